"""jax-ep doctor: what it finds, that its tests can fail, its exit codes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import helpers
import jax
import numpy as np
import pytest

import jax_ep
from jax_ep import _cli, _doctor, _windows


def command(*arguments):
    package = str(pathlib.Path(jax_ep.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *sys.path])}
    return subprocess.run(
        [sys.executable, "-m", "jax_ep", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )


@pytest.mark.multiprocess
def test_json_says_what_there_is():
    done = command("doctor", "--json", "--experts", "16", "--ranks", "4")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["jax"] == jax.__version__
    assert found["transports"]["collective"]["test"] == "passed"
    assert found["problems"] == []
    assert found["memory"]["ranks"] == 4
    on_cpu = found["devices"][0]["platform"] == "cpu"
    if on_cpu:
        assert len(found["devices"]) == 8
        assert "found CPU devices" in found["transports"]["p2p"]["why"]
        assert found["peer_access"] is None


@pytest.mark.multiprocess
def test_text_has_a_line_for_each_transport():
    done = command("doctor", "--tokens", "64")
    assert done.returncode == 0, done.stderr
    for name in ("collective", "p2p", "shmem", "memory", "versions"):
        assert f"\n{name}" in "\n" + done.stdout


def test_memory_counts_what_dispatch_returns():
    config = helpers.make_config(hidden_size=128, dispatch_format="fp8_block128")
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    sizes = _doctor.memory(config, mesh.size)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(0), config, mesh.size, fill=helpers.normal
    )
    d = helpers.run_dispatch(ep, mesh, inputs)
    assert sizes["recv_capacity"] == ep.recv_capacity
    held = (d.tokens.nbytes + d.scales.nbytes) // mesh.size
    assert sizes["dispatched_rows"] == held
    assert sizes["exchange"] > 0


def test_a_transport_that_sums_wrongly_is_a_problem(monkeypatch):
    right = jax_ep.combine
    monkeypatch.setattr(jax_ep, "combine", lambda *args: 2 * right(*args))
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    assert "wrong sums" in _doctor.self_test(mesh, "collective")
    found = _doctor.silent_examine(helpers.make_config())
    assert any("wrong sums" in problem for problem in found["problems"])


def test_an_error_is_the_finding(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no room")

    monkeypatch.setattr(jax_ep, "init", fail)
    mesh = helpers.make_mesh(1)
    found = _doctor.self_test(mesh, "collective")
    assert found == "collective: RuntimeError: no room"


def test_p2p_matrix_asks_each_pair(monkeypatch):
    class Device:
        platform = "gpu"

        def __init__(self, ordinal):
            self.local_hardware_id = ordinal

    class Native:
        @staticmethod
        def p2p_obstacle(groups):
            return ("peer access", "none") if groups in ([[0, 2]], [[2, 0]]) else None

    monkeypatch.setattr(_doctor._ffi, "native_cuda", Native)
    monkeypatch.setattr(_windows, "ordinal", lambda device: device.local_hardware_id)
    matrix = _doctor.peer_access([Device(i) for i in range(3)])
    assert matrix == [[True, True, False], [True] * 3, [False, True, True]]


def test_advice_on_the_worst_case():
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    found = _doctor.silent_examine(helpers.make_config())
    assert any("worst case" in line for line in found["advice"])
    bounded = _doctor.silent_examine(helpers.make_config(capacity_factor=1.25))
    assert not any("worst case" in line for line in bounded["advice"])


@pytest.mark.parametrize(
    "arguments", [["--experts", "0"], ["--ranks", "3"], ["--format", "fp3"], ["--what"]]
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        _cli.main(["doctor", *arguments])
    assert left.value.code == 2
    assert "error: " in capsys.readouterr().err
