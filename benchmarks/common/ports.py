"""A TCP port for the coordinator of a jax.distributed job on this host."""

import contextlib
import random
import socket

RANGE = (15_000, 30_000)  # below those that Linux gives out by itself


def free_port() -> int:
    """Not one that the kernel may give to another process before it is used."""
    while True:
        port = random.SystemRandom().randrange(*RANGE)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
