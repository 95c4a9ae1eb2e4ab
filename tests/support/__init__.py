"""What test files and the processes that they start (workers/) import.

It also lets them import the repository's own programs in benchmarks/, tools/ and docs/.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
WORKERS = TESTS / "workers"
# Found without starting JAX.
HAS_GPUS = pathlib.Path("/proc/driver/nvidia/gpus").exists()

# Last: the root's jax_ep has no compiled modules, so an installed one must come first.
sys.path += [str(ROOT), str(ROOT / "docs")]
