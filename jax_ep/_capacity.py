"""What `init` and `jax-ep doctor` remark on N, the output rows of a rank."""

from __future__ import annotations

from jax_ep import _ffi
from jax_ep._config import CAPACITY_MULTIPLE, EPConfig

_LARGE_BYTES = 10**9


def worst_case(config: EPConfig, ranks: int) -> str | None:
    """That N is the worst case and takes much, or None."""
    if config.recv_capacity is not None or config.capacity_factor is not None:
        return None
    rows = config.capacity(ranks)
    encoded = (config.dispatch_format, config.hidden_size, config.element_bytes)
    row_bytes = sum(_ffi.native.encoded_bytes(*encoded))
    if rows * row_bytes <= _LARGE_BYTES:
        return None
    return (
        f"dispatch returns {rows} rows of {row_bytes} bytes, "
        f"{rows * row_bytes / 1e9:.2f} GB a call, to hold the worst case; set "
        "recv_capacity or capacity_factor to bound it"
    )


def shortfall(config: EPConfig, ranks: int) -> str | None:
    """That options leave less of `capacity_factor` than balanced routing needs.

    The factor is one of routed rows, and N holds the rows of a fused shared expert and
    the padding of `expert_alignment` as well.
    """
    factor = config.capacity_factor
    if factor is None or config.recv_capacity is not None:
        return None
    entries = config.max_tokens_per_rank * config.top_k
    routed = -(-entries // ranks) if config.skip_a2a else entries
    local = config.num_experts // ranks
    padded = _aligned(-(-routed // local), config) * min(local, routed)
    shared = _aligned(config.max_tokens_per_rank, config)
    shared *= config.fused_shared_expert
    beside = max(padded - routed, 0) + shared
    rows = config.capacity(ranks)
    if not beside or rows - beside >= min(factor, 1) * routed:
        return None
    enough = int(max(factor, 1) * routed) + beside
    return (
        f"capacity_factor {factor:g} makes N {rows} rows, where balanced routing needs "
        f"{routed} and fused_shared_expert and expert_alignment {beside} besides; set "
        f"recv_capacity={-(-enough // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE} instead"
    )


def _aligned(rows: int, config: EPConfig) -> int:
    return -(-rows // config.expert_alignment) * config.expert_alignment
