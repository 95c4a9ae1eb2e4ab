"""Warnings about N, the output rows per rank, for `init` and `jax-ep doctor`."""

from __future__ import annotations

from jax_ep._core.config import CAPACITY_MULTIPLE, EPConfig
from jax_ep._native import ffi

_LARGE_BYTES = 10**9


def worst_case(config: EPConfig, ranks: int) -> str | None:
    """Returns a warning if N defaults to the worst case and is large, or None."""
    if config.recv_capacity is not None or config.capacity_factor is not None:
        return None
    rows = config.capacity(ranks)
    encoded = (config.dispatch_format, config.hidden_size, config.element_bytes)
    row_bytes = sum(ffi.native.encoded_bytes(*encoded))
    if rows * row_bytes <= _LARGE_BYTES:
        return None
    return (
        f"dispatch returns {rows} rows of {row_bytes} bytes, "
        f"{rows * row_bytes / 1e9:.2f} GB per call, enough for the worst case; set "
        "recv_capacity or capacity_factor to limit it"
    )


def shortfall(config: EPConfig, ranks: int) -> str | None:
    """Returns a warning if N is too small even for balanced routing, or None.

    It suggests a sufficient `recv_capacity`. `capacity_factor` multiplies only routed
    rows, but N must also hold a fused shared expert's rows and `expert_alignment`'s
    padding.
    """
    factor = config.capacity_factor
    if factor is None and config.recv_capacity is None:
        return None
    rows, routed = config.capacity(ranks), _routed(config, ranks)
    beside = _padded(config, ranks, routed) - routed + _shared(config, ranks)
    if rows >= routed + beside:
        return None
    enough = int(max(factor or 1, 1) * routed) + beside
    enough = -(-enough // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
    what = "recv_capacity" if factor is None else f"capacity_factor {factor:g}"
    options = " and ".join(
        name
        for name, used in (
            ("fused_shared_expert", config.fused_shared_expert),
            ("expert_alignment", config.expert_alignment > 1),
        )
        if used
    )
    more = f", plus {beside} for {options}" if beside else ""
    return (
        f"{what} gives N = {rows}, but even balanced routing needs {routed}{more}, and "
        f"rows past N are dropped; set recv_capacity={enough} or more"
    )


def _routed(config: EPConfig, ranks: int) -> int:
    """Returns rows per rank if all ranks get the same number and ids are distinct."""
    entries = config.max_tokens_per_rank * config.top_k
    return -(-entries // ranks) if config.skip_a2a else entries


def _padded(config: EPConfig, ranks: int, routed: int) -> int:
    """Returns `routed` rows with padding, if all local experts get the same number."""
    local = config.num_experts // ranks
    each, rest = divmod(routed, local)
    return rest * _aligned(each + 1, config) + (local - rest) * _aligned(each, config)


def _shared(config: EPConfig, ranks: int) -> int:
    """Returns rows of a fused shared expert, which ranks split with skip_a2a."""
    if not config.fused_shared_expert:
        return 0
    tokens = config.max_tokens_per_rank
    return _aligned(-(-tokens // ranks) if config.skip_a2a else tokens, config)


def _aligned(rows: int, config: EPConfig) -> int:
    return -(-rows // config.expert_alignment) * config.expert_alignment
