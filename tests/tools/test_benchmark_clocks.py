"""How benchmarks/common/clocks.py reads nvidia-smi's lines, with a fake nvidia-smi."""

import time

import pytest

from benchmarks.common import clocks

LINES = (
    "1980, 1980, 70.5, 700.00, 0x0000000000000001",  # idle
    "1500, 1980, 690.0, 700.00, 0x0000000000000004",
    "1480, 1980, 695.0, 700.00, 0x0000000000000004",
    "1900, 1980, 600.0, 700.00, 0x0000000000000000",
    "[N/A], 1980, 600.0, 700.00, 0x0000000000000000",
    "15",  # cut off
)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi on the path that prints `lines` and keeps running."""

    def make(*lines):
        told = tmp_path / "lines"
        told.write_text("\n".join(lines))
        program = tmp_path / "nvidia-smi"
        asked = tmp_path / "asked"
        script = f'#!/bin/sh\necho "$@" >{asked}\ncat {told}\nexec sleep 60\n'
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return asked

    return make


def sampled():
    with clocks.sampled() as found:
        time.sleep(0.5)
        assert found == {}
    return found


def test_medians_of_busy_samples(smi):
    smi(*LINES)
    found = sampled()
    assert (found["mhz"], found["most_mhz"]) == (1500, 1980)
    assert (found["watts"], found["most_watts"]) == (690, 700)
    assert found["samples"] == 3
    assert found["capped"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("visible", "gpu"), [(None, "0"), ("3,2", "3")])
def test_samples_the_first_gpu_of_this_process(smi, monkeypatch, visible, gpu):
    asked = smi(*LINES)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sampled()
    assert f"--id={gpu}" in asked.read_text().split()


@pytest.mark.parametrize("lines", [(), LINES[:1], ("no devices were found",)])
def test_nothing_where_nothing_was_seen(smi, lines):
    smi(*lines)
    assert sampled() == {}


def test_nothing_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sampled() == {}
