"""Handles and calls by the thousand leave nothing behind; in a process of its own.

On GPUs windows are counted too: tests/test_p2p_faults.py.
"""

from __future__ import annotations

import gpus
import helpers
import pytest

# A page now and then; a leaked group, report or operand would be more in each cycle.
FEW_BYTES = {"calls": 500, "groups": 25}
# What JAX keeps of each program that it has compiled, and ep_init is one, is some 4 kB
# when it settles, and more at first.
OF_A_PROGRAM = 40_000


@pytest.mark.slow
@pytest.mark.parametrize("what", ["calls", "groups", "handles"])
def test_memory_is_flat(what: str) -> None:
    if what == "groups" and helpers.TRANSPORT != "collective":
        pytest.skip("test_p2p_faults.py counts windows")
    found = gpus.run_worker("leaks_worker.py", what, timeout=170)
    assert found["bytes_a_cycle"] < FEW_BYTES.get(what, OF_A_PROGRAM), found
    assert found["handles_left"] <= 1, found
