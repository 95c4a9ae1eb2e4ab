"""Transport "shmem": the kernels of p2p over windows in NVSHMEM's symmetric heap.

NVSHMEM's puts reach ranks on other nodes.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
from jax.sharding import Mesh

from jax_ep._core.config import EPConfig
from jax_ep._peers import nvshmem
from jax_ep._peers.fabric import Obstacle
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._transport.base import register
from jax_ep._transport.p2p import P2P, gpu_obstacle, native_of, row_obstacle


@register
class Shmem(P2P):
    """Kernels as p2p, with one GPU per process, on one node or several."""

    name = "shmem"

    def obstacle(
        self, mesh: Mesh, groups: np.ndarray, config: EPConfig, rendezvous: Rendezvous
    ) -> Obstacle | None:
        """Checks for NVSHMEM, and for GPUs that it can reach."""
        if config.skip_a2a:
            return "skip_a2a=False, as skip_a2a exchanges nothing", "True"
        return (
            row_obstacle(config)
            or gpu_obstacle(mesh, groups)
            or nvshmem.heap.find_obstacle(native_of(mesh), groups, config, rendezvous)
        )

    def open(
        self,
        native: ModuleType,
        key: int,
        groups: np.ndarray,
        config: EPConfig,
        first_epoch: int | None,
        rendezvous: Rendezvous,
    ) -> int:
        """Opens the windows of all ranks in the heap."""
        return nvshmem.heap.open_windows(
            native, key, groups, config, first_epoch, rendezvous
        )
