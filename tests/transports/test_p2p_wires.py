"""Transport p2p gives the bits of collective: quantised sums and gradients.

With the shapes at which kernels change their behaviour, as in test_p2p.py.
"""

from __future__ import annotations

import pytest

from support import oracle, shapes
from support.shapes import CUT, LONG, ROUTINGS, Case

pytestmark = pytest.mark.gpu


def _wire_format_cases() -> list[Case]:
    # Whole and partial pieces of a combine; rows that exceed a stage.
    wires = {"combine_format": "fp8_block128", "grad_format": "fp8_block128"}
    cases = [
        Case(
            f"wires_{dtype}_hidden{hidden}",
            wires | {"dtype": dtype, "hidden_size": hidden, "max_tokens_per_rank": 24},
            (None, 5),
        )
        for dtype in oracle.DTYPES
        for hidden in (128, 1152, 40064)
    ]
    for field in wires:
        config = {field: "fp8_block128", "hidden_size": 256}
        cases += [
            Case(field, config, (None, 3), ROUTINGS),
            Case(f"{field}_long", LONG | config, (1024, 7)),
            Case(f"{field}_no_weights", LONG | config, (1024, 7), weighted=False),
            Case(f"{field}_cut", LONG | config | CUT, (1024, 513), drops=True),
        ]
    return cases


MODEL = (
    Case(
        "model_mxfp8",
        {
            "max_tokens_per_rank": 4096,
            "hidden_size": 7168,
            "top_k": 8,
            "num_experts": 256,
            "capacity_factor": 1.25,
            "dispatch_format": "mxfp8",
            "scale_layout": "tiled_128x4",
            "combine_format": "fp8_block128",
            "grad_format": "fp8_block128",
        },
        (4096, 128),
        ("full",),
    ),
)


@pytest.mark.parametrize(
    "case", [*_wire_format_cases(), *MODEL], ids=lambda case: case.name
)
def test_bits_of_collective(case: Case) -> None:
    shapes.compare(case)
