"""Transport p2p gives the bits of collective: token formats.

With the shapes at which kernels change their behaviour, as in test_p2p.py.
"""

from __future__ import annotations

import pytest

from support import oracle, quantizer, shapes
from support.shapes import CUT, LONG, ROUTINGS, Case

pytestmark = pytest.mark.gpu


def _format_cases() -> list[Case]:
    cases = []
    for name in quantizer.BLOCKS:
        base = {"dispatch_format": name, "hidden_size": 256}
        cases += [
            Case(name, base, (None, 3), ROUTINGS),
            Case(f"{name}_long", LONG | base, (1024, 7)),
            Case(f"{name}_cut", LONG | base | CUT, (1024, 513), drops=True),
            Case(f"{name}_free_tail", base | {"zero_tail": False}, (None, 1), ROUTINGS),
        ]
        # Scales that are not whole vectors; rows that exceed a stage, tokens and codes.
        cases += [
            Case(f"{name}_{dtype}_hidden{hidden}", base | {"dtype": dtype} | wide, (5,))
            for dtype in oracle.DTYPES
            for hidden in (384, 40064)
            for wide in [{"hidden_size": hidden, "max_tokens_per_rank": 24}]
        ]
    for name in quantizer.TILED:
        base = {"dispatch_format": name, "scale_layout": "tiled_128x4"}
        base |= {"hidden_size": 256}
        cases += [
            Case(f"{name}_tiled", base, (None, 3), ROUTINGS),
            Case(f"{name}_tiled_long", LONG | base, (1024, 7), ("full", "one:5")),
            Case(f"{name}_tiled_cut", LONG | base | CUT, (1024, 513), drops=True),
            Case(f"{name}_tiled_hidden", base | {"hidden_size": 40064}, (5,)),
            Case(f"{name}_tiled_free_tail", base | {"zero_tail": False}, (None, 1)),
        ]
    return cases


@pytest.mark.parametrize("case", _format_cases(), ids=lambda case: case.name)
def test_bits_of_collective(case: Case) -> None:
    shapes.compare(case)
