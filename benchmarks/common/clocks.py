"""Samples a GPU's clock and power with nvidia-smi while something runs.

Matmuls that run for more than a moment draw as much power as the card may, and then its
clock falls. So a time alone does not tell whether a kernel waits or is slowed down.
"""

import contextlib
import shutil
import statistics
import subprocess
import tempfile

from benchmarks.common import processes

PERIOD_MS = 50
# nvidia-smi's names, by the names that records use.
_QUERIES = {
    "mhz": "clocks.sm",
    "most_mhz": "clocks.max.sm",
    "watts": "power.draw",
    "most_watts": "enforced.power.limit",
    "reasons": "clocks_event_reasons.active",
}
_CAPPED = 0x4  # the bit of `reasons` for the power cap
_BUSY = 0.5  # of the power limit: between two programs a GPU draws less


@contextlib.contextmanager
def sampled():
    """Yields a dict that holds the medians of the busy samples after the block.

    They are of the first GPU that this process sees. Clocks are in MHz. `capped` is the
    share of samples in which the power cap held the clock down. The dict stays empty if
    nvidia-smi is missing or reports nothing.
    """
    found = {}
    program = shutil.which("nvidia-smi")
    if program is None:
        yield found
        return
    query = f"--query-gpu={','.join(_QUERIES.values())}"
    gpu = processes.visible_gpus(1)[0]
    words = (f"--id={gpu}", query, "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}")
    with tempfile.TemporaryFile("w+") as lines:
        with subprocess.Popen(
            [program, *words], stdout=lines, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield found
            finally:
                process.terminate()
        lines.seek(0)
        found.update(_medians(filter(None, map(_sample, lines))))


def _sample(line):
    """Returns a line's numbers by name, or None if it does not have all of them."""
    words = [word.strip() for word in line.split(",")]
    try:
        *numbers, reasons = [*map(float, words[:-1]), int(words[-1], 16)]
        return dict(zip(_QUERIES, (*numbers, reasons), strict=True))
    except ValueError:
        return None


def _medians(samples):
    busy = [s for s in samples if s["watts"] > _BUSY * s["most_watts"]]
    if not busy:
        return {}
    names = [name for name in _QUERIES if name != "reasons"]
    made = {name: statistics.median(s[name] for s in busy) for name in names}
    capped = sum(bool(s["reasons"] & _CAPPED) for s in busy) / len(busy)
    return made | {"capped": capped, "samples": len(busy)}
