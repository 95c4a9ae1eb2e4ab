"""What test files and the processes that they start (workers/) import.

Also lets them import the repository's own programs.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
WORKERS = TESTS / "workers"

sys.path += [str(ROOT / name) for name in ("benchmarks", "docs")]
