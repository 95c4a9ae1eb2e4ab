"""Configurations that run over both p2p and collective, and how they are compared."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

from support import compare_transports, helpers

ROUTINGS = (
    "random",
    "full",
    "duplicates",
    "none",
    "invalid",
    "one:0",
    "one:23",
    ("full", "none", "one:5", "duplicates"),
    ("none", "none", "none", "full"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration (changes to helpers.make_config) and what is run with it."""

    name: str
    config: dict = dataclasses.field(default_factory=dict)
    ns: tuple[int | None, ...] = (None,)
    routings: tuple[str | tuple[str, ...], ...] = ("random",)
    weighted: bool = True
    residual: bool = True
    drops: bool = False


def compare(case: Case) -> None:
    """Fails if the results of the two transports differ in any bit."""
    mesh = compare_transports.p2p_mesh()
    config = helpers.make_config(**case.config)
    seed = zlib.crc32(case.name.encode())
    dropped = 0
    with compare_transports.Pair(mesh, config) as pair:
        for n in case.ns:
            for routing in case.routings:
                seed += 1
                operands = pair.operands(
                    seed % 2**31,
                    config.max_tokens_per_rank if n is None else n,
                    routing,
                    case.weighted,
                    case.residual,
                )
                d = pair.compare(operands, f"n {n}, routing {routing}")
                dropped += int(np.asarray(d.num_dropped).sum())
    assert not case.drops or dropped


CUT = {"recv_capacity": 777, "expert_alignment": 8}
LONG = {"max_tokens_per_rank": 1024, "hidden_size": 256, "top_k": 8, "num_experts": 64}
