"""The transports collective, p2p and shmem, and the choice between them."""

from jax_ep._core.handle import EPHandle

# Importing a module registers its transport.
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
    """Returns the transport of `ep`."""
    # With skip_a2a only the local steps of collective run.
    return by_name("collective" if ep.config.skip_a2a else ep.transport)


def split_transport_of(ep: EPHandle) -> Transport:
    """Returns the transport for the asynchronous calls of `ep`."""
    return by_name("collective") if ep.config.overlap == "copy" else transport_of(ep)
