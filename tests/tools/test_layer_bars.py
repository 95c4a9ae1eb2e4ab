"""The chart of whole layers (docs/layer_bars.py) shows what its record has."""

import json
import re

import layer_bars
import pytest

from support import ROOT

RESULTS = ROOT / "benchmarks" / "results"
# Names of records, and how many ways each has.
RECORDS = {"layer-h200x2-2026-11-26": 3, "layer-h200x2-2026-11-23": 3}


@pytest.mark.parametrize("name", RECORDS)
def test_bars_are_as_long_as_times(name):
    data = json.loads((RESULTS / f"{name}.json").read_text())
    picture = layer_bars.svg(data)
    bars = re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', picture)
    times = re.findall(r'<text x="[\d.]+" y="\d+">([\d.]+)</text>', picture)
    assert len(bars) == len(times) == 2 * RECORDS[name]
    for half in (slice(RECORDS[name]), slice(RECORDS[name], None)):
        lengths = [float(bar) for bar in bars[half]]
        ms = [float(time) for time in times[half]]
        assert max(lengths) == layer_bars.BARS
        for length, time in zip(lengths, ms, strict=True):
            assert length / layer_bars.BARS == pytest.approx(time / max(ms), abs=0.02)
    caption = layer_bars.caption(data)
    assert all(f"{time} ms" in caption for time in times)


def test_only_what_was_timed():
    newest, older = (
        layer_bars.svg(json.loads((RESULTS / f"{name}.json").read_text()))
        for name in RECORDS
    )
    assert "fp8" in newest
    assert "ragged" not in newest
    assert "fp8" not in older
    assert "ragged" in older
