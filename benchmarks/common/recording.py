"""What every recorded run says about itself, and where it is written."""

import datetime
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def commit():
    """The commit measured; JAX_EP_COMMIT names it where the sources are no checkout."""
    if "JAX_EP_COMMIT" in os.environ:
        return os.environ["JAX_EP_COMMIT"]
    run = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"


def date():
    return datetime.date.today().isoformat()


def short_device(kind):
    """A device kind as part of a file name."""
    return kind.lower().replace("nvidia ", "").replace(" ", "-")


def write(name, record, folder=RESULTS):
    """Writes <folder>/<name>-<date>.json and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path
