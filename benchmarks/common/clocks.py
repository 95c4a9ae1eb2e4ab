"""What a GPU's clock and power were while something ran, as nvidia-smi saw them.

Matmuls that go on for more than a moment draw all the power that a card may have, and
its clock then falls: a time alone does not tell whether a kernel waits or is slowed.
"""

import contextlib
import shutil
import statistics
import subprocess
import tempfile

PERIOD_MS = 50
# By name in a record, what nvidia-smi calls it.
_QUERIES = {
    "mhz": "clocks.sm",
    "most_mhz": "clocks.max.sm",
    "watts": "power.draw",
    "most_watts": "enforced.power.limit",
    "reasons": "clocks_event_reasons.active",
}
_CAPPED = 0x4  # of the reasons: the power cap
_BUSY = 0.5  # of the most power: less is drawn between two programs


@contextlib.contextmanager
def sampled(gpu=0):
    """Yields a dict, which holds medians of the busy samples after the block.

    Clocks are in MHz, `capped` is the share of the samples in which the power cap held
    the clock down. The dict stays empty where nvidia-smi is missing or tells nothing.
    """
    found = {}
    program = shutil.which("nvidia-smi")
    if program is None:
        yield found
        return
    query = f"--query-gpu={','.join(_QUERIES.values())}"
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
    """A line's numbers by name; None where there are others."""
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
