"""What exchanges: collective, p2p and shmem, and which one serves a mesh or a call."""

from jax_ep._core.handle import EPHandle

# Each registers its transport.
from jax_ep._transport import collective, p2p, shmem
from jax_ep._transport.base import Transport, by_name

__all__ = [
    "by_name",
    "collective",
    "p2p",
    "shmem",
    "split_transport_of",
    "transport_of",
]


def transport_of(ep: EPHandle) -> Transport:
    """What exchanges for `ep`."""
    # Where nothing is exchanged the steps alone are left.
    return by_name("collective" if ep.config.skip_a2a else ep.transport)


def split_transport_of(ep: EPHandle) -> Transport:
    """What exchanges for the calls of `ep` in halves."""
    return by_name("collective") if ep.config.overlap == "copy" else transport_of(ep)
