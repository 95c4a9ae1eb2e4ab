"""Times calls that are enqueued ahead, by the host's clock."""

import collections
import time

import jax


def seconds(run, calls, in_flight):
    """Returns the seconds per call of `run(0)` to `run(calls - 1)`.

    The host's work hides behind the device's. Besides the newest call at most
    `in_flight` are unfinished, since their outputs need memory.
    """
    start = time.perf_counter()
    running = collections.deque()
    for call in range(calls):
        running.append(run(call))
        if len(running) > in_flight:
            jax.block_until_ready(running.popleft())
    jax.block_until_ready(list(running))
    return (time.perf_counter() - start) / calls
