"""What test files and the processes that they start (workers/) import.

Also lets them import the repository's own programs, of benchmarks/, tools/ and docs/.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
WORKERS = TESTS / "workers"
# Known before JAX starts.
HAS_GPUS = pathlib.Path("/proc/driver/nvidia/gpus").exists()

# Last: the root's jax_ep has no compiled modules, so an installed one must come first.
sys.path += [str(ROOT), str(ROOT / "docs")]
