"""Running something outside of the trace that the caller is in.

What JAX traces, and under which mesh, is a matter of its thread: a new one has neither.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
Future = concurrent.futures.Future

# What an interrupted thread may take to leave word to other processes and free things.
_GRACE_S = 5.0


def run(function: Callable[[], Result]) -> Result:
    """`function()` in a thread of its own, to its end.

    Ctrl-C comes to the main thread alone, and is passed on.
    """
    future: Future[Result] = Future()
    # A daemon: what ignores the interrupt must not hold up the end of the process.
    thread = threading.Thread(
        target=_resolve, args=(future, function), name="jax_ep untraced", daemon=True
    )
    thread.start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if not future.done():
            _interrupt(thread)
            concurrent.futures.wait([future], _GRACE_S)
        raise
    finally:
        del future  # the frames of its exception refer to it


def _resolve(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # whatever it is, it is the caller's
        future.set_exception(error)


def _interrupt(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt in that thread once it runs Python code."""
    import ctypes  # hardly ever needed

    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    )
