"""Running something in a thread of its own: outside of a trace, or within a time limit.

What JAX traces, and under which mesh, is a matter of its thread: a new one has neither.
And a call into C++ that does not come back cannot be left, but its thread can.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
Future = concurrent.futures.Future

# What an interrupted thread may take to leave word to other processes and free things.
_GRACE_S = 5.0
# Between looks for an interrupt that another thread has passed on.
_SLICE_S = 0.25


def untraced(function: Callable[[], Result]) -> Result:
    """`function()` to its end, outside of the trace that the caller is in.

    Ctrl-C comes to the main thread alone, and is passed on.
    """
    future, thread = _thread_of(function, "jax_ep untraced")
    try:
        thread.start()
        # In slices: a signal that comes just before a wait does not end it.
        while not future.done():
            concurrent.futures.wait([future], _SLICE_S)
        return future.result()
    except KeyboardInterrupt:
        if thread.ident is not None and not future.done():
            _interrupt(thread.ident)
            concurrent.futures.wait([future], _GRACE_S)
        raise
    finally:
        del future  # the frames of its exception refer to it


def bounded(function: Callable[[], Result], seconds: float) -> Result:
    """`function()` if it ends in time; else it goes on, and nobody waits for it.

    Ctrl-C gets through to the caller.

    Raises:
        TimeoutError: it did not end.
    """
    future, thread = _thread_of(function, "jax_ep bounded")
    end = time.monotonic() + seconds
    try:
        thread.start()
        while not future.done():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {seconds:g} s")
            # In slices: an exception that is set in a thread waits for its Python code.
            concurrent.futures.wait([future], min(left, _SLICE_S))
        return future.result()
    finally:
        del future


def _thread_of(
    function: Callable[[], Result], name: str
) -> tuple[Future[Result], threading.Thread]:
    future: Future[Result] = Future()
    # A daemon: what does not end must not hold up the end of the process.
    thread = threading.Thread(
        target=_resolve, args=(future, function), name=name, daemon=True
    )
    return future, thread


def _resolve(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        result = function()
    except BaseException as error:  # whatever it is, it is the caller's
        future.set_exception(error)
    else:
        future.set_result(result)


def _interrupt(ident: int) -> None:
    """Raises KeyboardInterrupt in that thread once it runs Python code."""
    import ctypes  # hardly ever needed

    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt)
    )
