"""jax-ep doctor: its findings, its exit codes, and that its tests can fail."""

from __future__ import annotations

import json
import os
import types

import jax
import numpy as np
import pytest

import jax_ep
from jax_ep._cli import main, values
from jax_ep._cli.doctor import command as _cli_doctor
from jax_ep._cli.doctor import findings, links
from jax_ep._peers import windows
from support import helpers
from support.commands import command


@pytest.mark.multiprocess
def test_json_says_what_there_is():
    done = command(
        "doctor",
        "--json",
        "--experts",
        "16",
        "--ranks",
        "4",
        "--recv-capacity",
        "99",
        "--reduce",
        "source",
        "--fused-shared-expert",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["jax"] == jax.__version__
    assert found["transports"]["collective"]["test"] == "passed"
    assert found["problems"] == []
    assert found["memory"]["ranks"] == 4
    assert found["memory"]["recv_capacity"] == 99
    assert found["memory"]["p2p_windows"] > 0
    on_cpu = found["devices"][0]["platform"] == "cpu"
    if on_cpu:
        assert len(found["devices"]) == 8
        assert "found CPU devices" in found["transports"]["p2p"]["why"]
        assert found["peer_access"] is None


def test_memory_of_a_layer_in_chunks():
    sizes = ("--experts", "64", "--ranks", "64", "--tokens", "4095")
    one, many = (
        json.loads(command("doctor", "--json", *sizes, "--chunks", chunks).stdout)
        for chunks in ("1", "8")
    )
    assert many["memory"]["max_tokens_per_rank"] == 512
    for name in ("dispatched_rows", "expert_rows", "exchange"):
        whole, part = one["memory"][name], many["memory"][name]
        assert 7.9 * part < whole < 8.1 * part
    text = command("doctor", *sizes, "--chunks", "8").stdout
    assert "for one of 8 chunks of 512 tokens" in " ".join(text.split())


@pytest.mark.multiprocess
def test_text_has_a_line_for_each_transport():
    done = command("doctor", "--tokens", "64")
    assert done.returncode == 0, done.stderr
    for name in ("collective", "p2p", "shmem", "memory", "versions"):
        assert f"\n{name}" in "\n" + done.stdout


def test_memory_counts_what_dispatch_returns():
    config = helpers.make_config(hidden_size=128, dispatch_format="fp8_block128")
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    sizes = findings.memory(config, mesh.size)
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
    assert "wrong sums" in findings.self_test(mesh, "collective")
    found = findings.silent_examine(helpers.make_config())
    assert any("wrong sums" in problem for problem in found["problems"])


def test_an_error_is_the_finding(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no room")

    monkeypatch.setattr(jax_ep, "init", fail)
    mesh = helpers.make_mesh(1)
    found = findings.self_test(mesh, "collective")
    assert found == "collective: RuntimeError: no room"


def test_p2p_matrix_asks_each_pair(monkeypatch):
    class Native:
        @staticmethod
        def p2p_obstacle(groups):
            return ("peer access", "none") if groups in ([[0, 2]], [[2, 0]]) else None

    monkeypatch.setattr(findings.ffi, "native_cuda", Native)
    monkeypatch.setattr(windows, "ordinal", lambda device: device.local_hardware_id)
    matrix = findings.peer_access([Gpu(i) for i in range(3)])
    assert matrix == [[True, True, False], [True] * 3, [False, True, True]]


class Gpu:
    platform = "gpu"

    def __init__(self, ordinal):
        self.local_hardware_id = ordinal


# What `nvidia-smi topo -m` prints for three GPUs, two of them linked by 18 NVLinks.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tSYS\tNV18\tPIX\t0-15\t0\t\tN/A
GPU1\tSYS\t X \tPHB\tSYS\t0-15\t0\t\tN/A
GPU2\tNV18\tPHB\t X \tSYS\t0-15\t0\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""
INDICES = "0, GPU-0a00-01\n1, GPU-0b00-02\n2, GPU-0c00-03\n"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A fake nvidia-smi that prints what is in its files."""
    names = {"topo": TOPOLOGY, "uuid": INDICES, "driver": "580.1.2\n580.1.2\n"}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncd '{tmp_path}'\ncase $* in *topo*) cat topo;; *uuid*) cat uuid;;"
        " *driver*) cat driver;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    uuids = ["0c0003", "0a0001", "0b0002", "0d0004"]  # the process's own order

    class Native:
        CUDA_VERSION = 12080
        device_uuid = staticmethod(uuids.__getitem__)

    monkeypatch.setattr(findings.ffi, "native_cuda", Native)
    return program


def test_links_are_of_the_devices_that_jax_numbers(nvidia_smi):
    found = links.links([Gpu(i) for i in range(4)])
    assert found == [
        ["X", "NV18", "PHB", "unknown"],
        ["NV18", "X", "SYS", "unknown"],
        ["PHB", "SYS", "X", "unknown"],
        ["unknown", "unknown", "unknown", "X"],
    ]
    assert links.driver() == "580.1.2"
    assert links.toolkit() == "12.8"
    text = "\n".join(_cli_doctor.report(_found(links=found)))
    assert "          0       X    NV18     PHB unknown\n" in text


def test_links_without_a_driver_that_answers_are_unknown(nvidia_smi, monkeypatch):
    def fails(ordinal):
        raise RuntimeError("jax_ep: CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(findings.ffi.native_cuda, "device_uuid", staticmethod(fails))
    assert links.links([Gpu(0), Gpu(1)]) == [["X", "unknown"], ["unknown", "X"]]


@pytest.mark.parametrize("failing", ["#!/bin/sh\nexit 9\n", ""])
def test_links_without_nvidia_smi_are_unknown(failing, nvidia_smi, monkeypatch):
    nvidia_smi.write_text(failing)
    if not failing:
        monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(links, "_DRIVER_FILE", nvidia_smi.parent / "none")
    assert links.links([Gpu(0), Gpu(1)]) == [["X", "unknown"], ["unknown", "X"]]
    assert links.driver() is None


def test_the_driver_says_its_version_in_a_file_too(nvidia_smi, monkeypatch):
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    told = nvidia_smi.parent / "version"
    told.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    monkeypatch.setattr(links, "_DRIVER_FILE", told)
    assert links.driver() == "570.86.15"


def _found(**changes):
    keys = {"versions": {}, "build": {}, "devices": [], "problems": [], "advice": []}
    return keys | changes


def test_no_backend_is_the_finding(monkeypatch, capsys):
    """JAX_PLATFORMS=cuda without a GPU fails an assertion in JAX, without a message."""

    def fail():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main.main(["doctor", "--json", "--ranks", "16"]) == 1
    found = json.loads(capsys.readouterr().out)
    told = "JAX was told by JAX_PLATFORMS to use cuda and found no GPU"
    assert found["problems"] == [told]
    assert found["advice"][0].startswith("unset JAX_PLATFORMS")
    # Everything that needs no devices is reported.
    assert found["versions"]["jax"] == jax.__version__
    assert found["memory"]["ranks"] == 16
    assert found["memory"]["shmem_windows"] > found["memory"]["p2p_windows"] > 0
    assert main.main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"PROBLEM {told} advice" in said
    assert "window of p2p" in said
    assert "only CPU devices" not in said


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        (
            "cuda",
            "AssertionError",
            "told by JAX_PLATFORMS to use cuda and found no GPU",
        ),
        ("gpu", "RuntimeError: backend 'rocm' is unknown", "use gpu and found no GPU"),
        ("cuda", "RuntimeError: old driver", "use cuda and could not: old driver"),
        ("tpu", "AssertionError", "to use tpu and could not: AssertionError"),
        ("", "RuntimeError: broken", "JAX starts no backend: RuntimeError: broken"),
    ],
)
def test_why_jax_starts_no_backend(asked, error, told, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    assert told in values.backend_problem(error)
    assert ("unset JAX_PLATFORMS" in values.no_backend(error)) == bool(asked)


def test_memory_of_other_options_and_of_a_group_that_is_not_here(monkeypatch):
    sizes = {"hidden_size": 128, "num_experts": 32, "top_k": 4}
    plain = findings.memory(helpers.make_config(**sizes), 8)
    bounded = findings.memory(helpers.make_config(**sizes, recv_capacity=7), 8)
    assert bounded["recv_capacity"] == 7
    assert bounded["dispatched_rows"] == 7 * 128 * 2
    by_row = findings.memory(helpers.make_config(**sizes, reduce="source"), 8)
    assert by_row["exchange"] > 2 * plain["exchange"]
    fused = findings.memory(helpers.make_config(**sizes, fused_shared_expert=True), 8)
    assert fused["recv_capacity"] == plain["recv_capacity"] + 8  # T
    # int32 [R, T, K + 1]
    assert fused["tables"] - 4 * 5 * fused["recv_capacity"] == 4 * 8 * 8 * 5


def test_windows_of_a_group_that_is_not_here():
    """Window sizes follow from the config, also on a machine without GPUs."""
    sizes = {"hidden_size": 1024, "num_experts": 64, "top_k": 4}
    sizes["max_tokens_per_rank"] = 1024
    plain, more = (helpers.make_config(**sizes, pending_calls=n) for n in (0, 2))
    native = findings.ffi.native
    there = native.dispatch_region_bytes("bf16", 1024, 2, 1024, 4, 4)
    back = native.combine_region_bytes("bf16", 1024, 2, 1024, 4)
    # A region per source for each of both calls; flags and cells come on top.
    regions = 16 * (there + back)
    assert regions < findings.window_bytes(plain, 16) < 1.1 * regions
    assert 3 * regions < findings.window_bytes(more, 16) < 3.3 * regions
    # Over nodes there is more: staging, inboxes, and with two nodes bundles.
    one, two, single = (findings.window_bytes(plain, 16, n) for n in (16, 8, 1))
    assert one == findings.window_bytes(plain, 16) < single < two
    # With top_k 1 nothing is bundled.
    alone = helpers.make_config(**sizes | {"top_k": 1}, pending_calls=0)
    assert findings.window_bytes(alone, 16, 8) == findings.window_bytes(alone, 16, 1)
    assert findings.window_bytes(plain, 32) is not None
    assert findings.window_bytes(plain, 64) is None
    assert findings.window_bytes(plain, 64, 8) is None


@pytest.fixture
def only_memory(monkeypatch):
    """A doctor that does not look at devices."""
    found = {"works": False, "why": "of a test"}
    monkeypatch.setattr(findings, "transports", lambda *_: {"p2p": found})
    monkeypatch.setattr(findings, "peer_access", lambda _: None)
    monkeypatch.setattr(findings, "_build", dict)
    monkeypatch.setattr(links, "links", lambda _: None)


def test_each_transport_has_a_figure_of_its_own(only_memory, capsys):
    asked = ["doctor", "--ranks", "16", "--ranks-per-node"]

    def told(*options):
        assert main.main([*options, "--json"]) == 0
        sizes = json.loads(capsys.readouterr().out)["memory"]
        assert main.main([*options]) == 0
        return sizes, " ".join(capsys.readouterr().out.split())

    sizes, said = told(*asked, "4")
    p2p, shmem = (sizes[name] / 1e6 for name in ("p2p_windows", "shmem_windows"))
    assert shmem > 1.5 * p2p > 0
    assert f" {p2p:,.0f} MB window of p2p, as long as a handle is open" in said
    assert f" {shmem:,.0f} MB window of shmem over nodes of 4 ranks" in said
    sizes, said = told(*asked, "16")
    assert "window of shmem" not in said
    assert sizes["p2p_windows"] == sizes["shmem_windows"]
    _, said = told("doctor", "--tokens", "8", "--hidden", "128", "--ranks", "4")
    assert " 0 MB" not in said  # small layers also get a size
    sizes, said = told("doctor", "--ranks", "64")
    assert sizes["p2p_windows"] is sizes["shmem_windows"] is None
    assert "no windows: p2p and shmem serve at most 32 ranks, got 64" in said


def test_shared_handles(only_memory, capsys):
    """Computes shared handles for a program's batch shapes, and lists open ones."""
    asked = ["doctor", "--tokens", "64", "512", "--hidden", "1024"]
    sizes = ["--experts", "32", "--ranks"]

    def told(*options):
        jax_ep.close_shared_handles()
        assert main.main([*asked, *sizes, *options]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert main.main([*asked, *sizes, "16", "--ranks-per-node", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    handles = found["shared_handles"]
    assert [e["max_tokens_per_rank"] for e in handles["estimate"]] == [64, 512]
    small, large = (each["bytes"] for each in handles["estimate"])
    assert large["p2p"] == found["memory"]["p2p_windows"] > 4 * small["p2p"] > 0
    assert large["shmem"] > large["p2p"]
    assert small["collective"] == large["collective"] == 0
    said = told("16")
    assert "nothing on collective; on p2p" in said
    assert f" {(small['p2p'] + large['p2p']) / 1e6:,.0f} MB in all" in said
    assert "open in this process" not in said
    assert "on p2p" not in told("32", "--experts", "64", "--ranks", "64")

    mesh = helpers.make_mesh(2)
    for tokens in (24, 40):
        config = helpers.make_config(max_tokens_per_rank=tokens)
        own = jax_ep.shared_handle(mesh, "ep", config, helpers.TRANSPORT)
    handles = findings.opened()
    assert [each["max_tokens_per_rank"] for each in handles] == [24, 40]
    assert handles[1]["bytes"] == own.buffer_bytes
    assert main.main([*asked, *sizes, "16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("open in this process") == 2
    if helpers.TRANSPORT == "collective":
        assert said.count("open in this process: nothing per device, collective") == 2
    assert f"{own.transport} over 2 ranks, max_tokens_per_rank 40" in said
    own.close()
    assert len(findings.opened()) == 1
    jax_ep.close_shared_handles()
    assert findings.opened() == []


def test_nodes_divide_the_group_by_themselves_too(only_memory, capsys):
    """By default a node has as many devices as this host, or fewer."""
    here = jax.local_device_count()
    assert main.main(["doctor", "--experts", "60", "--ranks", "30", "--json"]) == 0
    node = json.loads(capsys.readouterr().out)["memory"]["ranks_per_node"]
    assert node == max(n for n in range(1, here + 1) if 30 % n == 0)


def test_dense_products_are_told_from_grouped_ones(monkeypatch):
    if jax.default_backend() == "cpu":
        assert jax_ep.experts.ragged_dot_is_dense()

    text = "%fusion { ROOT %r = bf16[512,256]{1,0} ragged-dot(%a, %b, %c) }"
    run = types.SimpleNamespace(as_text=lambda: text)
    run.lower = lambda *shapes: types.SimpleNamespace(compile=lambda: run)
    monkeypatch.setattr(jax, "jit", lambda function: run)
    assert not jax_ep.experts._ragged_dot_is_dense.__wrapped__(
        np.dtype("float16"), None
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--experts 0", "--experts: must be an integer of at least 1, got '0'"),
        ("--experts 4096", "num_experts must be in [1, 2048], got 4096"),
        ("--tokens -1", "--tokens: must be an integer of at least 1, got '-1'"),
        ("--ranks 0", "--ranks: must be an integer of at least 1, got '0'"),
        ("--ranks -8", "--ranks: must be an integer of at least 1, got '-8'"),
        ("--ranks 3", "got --ranks 3 and --experts 256; choose --ranks 2 or 4"),
        ("--ranks 512", "got --ranks 512 and --experts 256; choose --ranks 256"),
        (
            "--ranks 32 --ranks-per-node 5",
            "got --ranks-per-node 5 and 32 ranks; choose --ranks-per-node 4 or 8",
        ),
        ("--ranks 8 --ranks-per-node 9", "--ranks-per-node 9 and 8 ranks; choose"),
        (
            "--experts 7 --top-k 2 --ranks-per-node 2",
            "--ranks-per-node 2 and 7 ranks; choose --ranks-per-node 1 or 7",
        ),
        ("--ranks-per-node 0", "--ranks-per-node: must be an integer of at least 1"),
        ("--experts 4 --top-k 5", "got --top-k 5 and --experts 4; lower --top-k or"),
        ("--capacity-factor nan", "--capacity-factor: must be a number above 0"),
        ("--format fp3", "dispatch_format must be one of"),
        ("--what", "unrecognized arguments: --what"),
        ("--reduce sum", "reduce must be one of"),
        ("--recv-capacity 5 --capacity-factor 1", "not allowed with argument"),
    ],
)
def test_usage_errors(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(findings, "silent_examine", lambda *_: pytest.fail("looks"))
    monkeypatch.setattr(findings, "local_devices", lambda: ([None] * 8, None))
    with pytest.raises(SystemExit) as left:
        main.main(["doctor", *arguments.split()])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: jax-ep doctor ")
    assert words in said.splitlines()[-1]
