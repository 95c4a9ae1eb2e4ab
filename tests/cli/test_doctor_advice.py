"""What jax-ep doctor advises, and when."""

from __future__ import annotations

import types

import pytest

from jax_ep._cli import main
from jax_ep._cli.doctor import advice, findings, links
from jax_ep._experts import kernels
from jax_ep._native import ffi
from support import helpers


@pytest.mark.parametrize(
    ("told", "capability"), [("9.0", 9.0), ("10.3", 10.3), ("gfx942", None), ("", None)]
)
def test_other_platforms_words_are_no_capability(told, capability):
    assert advice._capability(types.SimpleNamespace()) is None
    device = types.SimpleNamespace(compute_capability=told)
    assert advice._capability(device) == capability


def test_advice_on_the_worst_case(monkeypatch):
    monkeypatch.setattr(findings, "self_test", lambda *args: "passed")
    found = findings.silent_examine(helpers.make_config(), 4)
    assert any("worst case" in line for line in found["advice"])
    bounded = findings.silent_examine(helpers.make_config(capacity_factor=1.25), 4)
    assert not any("worst case" in line for line in bounded["advice"])


@pytest.mark.parametrize(
    ("plugin", "built", "driver", "told"),
    [
        (False, False, None, ['pip install "jax[cuda13]"', "JAX_EP_CUDA=ON"]),
        (True, False, "580", ["JAX_EP_CUDA=ON"]),
        (False, True, "580", ['pip install "jax[cuda13]"']),
        (False, True, None, ['pip install "jax[cuda13]"', "no driver answers here"]),
        (True, True, None, ["no driver answers here"]),
        (True, True, "580", ["JAX_PLATFORMS, CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_advice_on_gpus_is_of_what_is_not_there(
    plugin, built, driver, told, monkeypatch
):
    """Advice is in the order of doing it: the build finds the nvcc that JAX brings."""
    monkeypatch.setattr(ffi, "native_cuda", types.SimpleNamespace() if built else None)
    monkeypatch.setattr(links, "driver", lambda: driver)
    versions = dict.fromkeys(advice.CUDA_PACKAGES)
    versions["jax-cuda12-plugin"] = "0.10.2" if plugin else None
    config = helpers.make_config()
    found = {"versions": versions, "memory": findings.memory(config, 2), "devices": []}
    cpu = types.SimpleNamespace(platform="cpu")
    line = advice.advice(found, [cpu], config)[0]
    assert line.startswith("only CPU devices")
    places = [line.index(words) for words in told]
    assert places == sorted(places)
    others = {'pip install "jax[cuda13]"', "JAX_EP_CUDA=ON"} - {*told}
    assert not any(words in line for words in others)


@pytest.mark.parametrize(
    ("capability", "built", "why"),
    [
        ("9.0", True, None),
        ("8.0", True, None),
        ("7.5", True, "GPUs of compute capability 8.0 or newer, got one 7.5"),
        ("8.0", False, "a CUDA module with its kernels"),
    ],
)
def test_advice_on_dense_experts(capability, built, why, monkeypatch):
    gpu = types.SimpleNamespace(
        platform="gpu", compute_capability=capability, device_kind="one"
    )
    monkeypatch.setattr(kernels, "built", lambda: built)
    config = helpers.make_config(dtype="float32")
    found = {"memory": findings.memory(config, 2), "devices": [], "versions": {}}
    lines = [
        line for line in advice.advice(found, [gpu], config) if "ragged_dot" in line
    ]
    assert len(lines) == (why is not None)
    assert all(f"portable must have {why}" in line for line in lines)


@pytest.mark.parametrize(
    ("platform", "ranks", "name", "told"),
    [
        ("gpu", 2, "bf16", True),
        ("gpu", 1, "bf16", False),
        ("gpu", 2, "mxfp8", False),
        ("cpu", 2, "bf16", False),
    ],
)
def test_advice_on_formats_is_of_links(platform, ranks, name, told, monkeypatch):
    device = types.SimpleNamespace(
        platform=platform, compute_capability="9.0", device_kind="one"
    )
    monkeypatch.setattr(kernels, "built", lambda: True)
    config = helpers.make_config(hidden_size=128, dispatch_format=name)
    found = {"memory": findings.memory(config, ranks), "devices": [], "versions": {}}
    lines = advice.advice(found, [device], config)
    assert any("fp8_block128" in line for line in lines) == told


def test_advice_where_options_leave_too_little_room(capsys):
    arguments = ["--experts", "64", "--hidden", "128", "--tokens", "128"]
    arguments += ["--ranks", "8", "--top-k", "2", "--capacity-factor", "1.25"]
    assert main.main(["doctor", *arguments]) == 0
    assert "capacity_factor" not in capsys.readouterr().out
    assert main.main(["doctor", *arguments, "--expert-alignment", "128"]) == 0
    assert "advice      capacity_factor 1.25 gives N" in capsys.readouterr().out
    arguments[-1] = "0.5"
    assert main.main(["doctor", *arguments]) == 0
    assert "advice      capacity_factor 0.5 gives N" in capsys.readouterr().out
