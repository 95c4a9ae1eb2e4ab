"""Runs a function in a new thread: outside any trace, or with a time limit.

JAX keeps traces and the current mesh per thread, so a new thread has neither. And a
call into C++ that never returns cannot be interrupted, but its thread can be abandoned.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
Future = concurrent.futures.Future

# Time for an interrupted thread to tell other processes and to free its resources.
_GRACE_S = 5.0
# How often a waiting thread wakes up, so that Python can deliver pending exceptions.
_SLICE_S = 0.25


def untraced(function: Callable[[], Result]) -> Result:
    """Returns `function()`, run outside the caller's trace.

    Python delivers Ctrl-C to the main thread only; this forwards it to the new thread.
    """
    future, thread = _thread_of(function, "jax_ep untraced")
    try:
        thread.start()
        # In slices, because a signal just before a wait does not end that wait.
        while not future.done():
            concurrent.futures.wait([future], _SLICE_S)
        return future.result()
    except KeyboardInterrupt:
        if thread.ident is not None and not future.done():
            _interrupt(thread.ident)
            concurrent.futures.wait([future], _GRACE_S)
        raise
    finally:
        del future  # breaks a cycle: frames of its exception refer to it


def bounded(function: Callable[[], Result], seconds: float) -> Result:
    """Returns `function()`, or abandons it to its thread after `seconds`.

    Ctrl-C reaches the caller.

    Raises:
        TimeoutError: `function` did not return in time.
    """
    future, thread = _thread_of(function, "jax_ep bounded")
    end = time.monotonic() + seconds
    try:
        thread.start()
        while not future.done():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {seconds:g} s")
            # In slices, because an exception set by `_interrupt` needs Python code to
            # run before it is raised.
            concurrent.futures.wait([future], min(left, _SLICE_S))
        return future.result()
    finally:
        del future


def _thread_of(
    function: Callable[[], Result], name: str
) -> tuple[Future[Result], threading.Thread]:
    future: Future[Result] = Future()
    # A daemon, so that an abandoned thread does not keep the process alive.
    thread = threading.Thread(
        target=_resolve, args=(future, function), name=name, daemon=True
    )
    return future, thread


def _resolve(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        result = function()
    except BaseException as error:  # raised again in the calling thread
        future.set_exception(error)
    else:
        future.set_result(result)


def _interrupt(ident: int) -> None:
    """Raises KeyboardInterrupt in that thread once it runs Python code."""
    import ctypes  # rarely needed, so not imported with the package

    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt)
    )
