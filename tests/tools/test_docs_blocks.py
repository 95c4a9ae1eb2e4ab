"""A test or CI runs every code block of README.md and docs/; some run here."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._core import literals
from support import ROOT, gpus, helpers
from support.launch import run_to_end
from support.pages import python_blocks

HIDDEN, TOP_K, N = 128, 2, 8
# Blocks by page and language, and what runs them.
RUN = {
    ("README.md", "bash"): 2,  # .ci/run, step readme
    ("README.md", "python"): 2,  # test_readme.py
    ("docs/cluster.md", "bash"): 1,  # here, as all below
    ("docs/cluster.md", "python"): 2,
    ("docs/determinism.md", "python"): 1,
    ("docs/extending.md", "cpp"): 2,
    ("docs/formats.md", "python"): 3,
    ("docs/fp8.md", "python"): 3,
    ("docs/layers.md", "bash"): 1,
    ("docs/layers.md", "python"): 12,  # test_docs_layers.py
    ("docs/migrate.md", "diff"): 2,  # of MaxText's sources, which are not here
    ("docs/migrate.md", "python"): 8,  # test_docs_layers.py
    ("docs/migrate_others.md", "python"): 7,  # test_docs_migrate.py
    ("docs/models.md", "python"): 11,  # test_docs_models.py
    ("docs/options.md", "python"): 2,
    ("docs/overlap.md", "python"): 1,
    ("docs/placement.md", "python"): 3,
    ("docs/recipes.md", "python"): 9,
    ("docs/reliability.md", "python"): 1,
    (
        "docs/sharp_bits.md",
        "python",
    ): 5,  # and test_export, test_remat, test_saved_pytrees
    ("docs/start.md", "bash"): 1,  # test_doctor.py
    ("docs/start.md", "python"): 3,
    ("docs/tutorial.md", "bash"): 1,
    ("docs/tutorial.md", "python"): 11,
}
# Fences without a language: commands for developers, a formula, an error; not run.
PLAIN = {"CONTRIBUTING.md": 2, "docs/formats.md": 1, "docs/start.md": 1}
# Pictures and directives: step docs of .ci/run builds them.
DRAWN = (
    "{toctree}",
    "{eval-rst}",
    "{include} ../README.md",
    "{include} ../CHANGELOG.md",
)


def blocks(name, language):
    text = (ROOT / name).read_text()
    return re.findall(rf"```{re.escape(language)}\n(.*?)```", text, re.DOTALL)


def test_every_block_is_run():
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "api").glob("*.md"),
    ]
    found: dict = {}
    for page in pages:
        name = str(page.relative_to(ROOT))
        fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(), re.MULTILINE)
        for language in fences[::2]:  # every other one closes
            if language not in DRAWN:
                found[name, language] = found.get((name, language), 0) + 1
        assert not any(fences[1::2]), name
    assert found == RUN | {(name, ""): count for name, count in PLAIN.items()}


def run_block(name, transport, extra):
    """The names that a page's block defines, run inside shard_map; N rows each."""
    halves = "dispatch_async" if name.endswith("options.md") else ""
    code = python_blocks(name, halves)[0]
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    experts = 4 * mesh.size
    config = jax_ep.EPConfig(
        num_experts=experts, top_k=TOP_K, hidden_size=HIDDEN, max_tokens_per_rank=N
    )
    if name.endswith("formats.md"):
        # Rows come from the second dispatch, whose tokens are already quantised.
        code += python_blocks(name, "token_scales")[0]
        code += "rows = jax_ep.dequantize(d)\n"
        config = jax_ep.EPConfig(**vars(config) | {"dispatch_format": "mxfp8"})
    if name.endswith("overlap.md"):
        config = jax_ep.EPConfig(**vars(config) | {"overlap": "stream"})
    if name.endswith("options.md"):
        config = jax_ep.EPConfig(**vars(config) | {"pending_calls": 1})
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((N * mesh.size, HIDDEN)).astype(jnp.bfloat16)
    ids = np.argsort(rng.random((len(tokens), experts)))[:, :TOP_K].astype(np.int32)
    weights = np.full(ids.shape, 0.5, np.float32)
    with jax_ep.init(mesh, "ep", config, transport=transport) as ep:

        def body(tokens, topk_ids, router_weights):
            names = {"jax": jax, "jax_ep": jax_ep, "ep": ep, "tokens": tokens}
            names |= {"topk_ids": topk_ids, "router_weights": router_weights}
            exec(code, names | extra, names)
            d = names["d"]
            return d.src_info, d.group_sizes, [names[key] for key in shown]

        shown = ["shared"] if "shared" in code else ["rows", "hidden"]
        run = jax.shard_map(
            body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
        )
        return tokens, jax.jit(run)(tokens, ids, weights)


def test_sharp_bits_page():
    """No input is copied between devices, and the guard would find one that is."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))

    def add(state, batch, key, step):
        return state + batch + jax.random.uniform(key) + step

    train_step = jax.jit(
        jax.shard_map(
            add, mesh=mesh, in_specs=(P("ep"), P("ep"), P(), P()), out_specs=P("ep")
        )
    )
    zeros = helpers.put(mesh, [np.zeros(2, np.float32)] * mesh.size)
    names = {"jax": jax, "np": np, "P": P, "NamedSharding": jax.NamedSharding}
    names |= {"mesh": mesh, "train_step": train_step, "state": zeros, "batch": zeros}
    (code,) = python_blocks("docs/sharp_bits.md", "transfer_guard")
    exec(code, names | {"steps": 2}, names)
    assert (np.asarray(names["state"]) > 1).all()
    if mesh.size > 1:
        names["split"] = jax.random.split
        elsewhere = code.replace("split = ", "_ = ").replace(", replicated)", ", None)")
        with pytest.raises(jax.errors.JaxRuntimeError, match="device-to-device"):
            exec(elsewhere, names | {"steps": 1}, names)


def test_formats_page():
    w = jnp.stack([jnp.eye(HIDDEN, dtype=jnp.bfloat16)] * 4)
    tokens, (src_info, group_sizes, (rows, hidden)) = run_block(
        "docs/formats.md", helpers.TRANSPORT, {"w": w}
    )
    assert int(group_sizes.sum()) == len(tokens) * TOP_K
    rank, token, _ = np.asarray(src_info).T
    at = np.flatnonzero(rank >= 0)
    sent = tokens[rank[at] * N + token[at]].astype(np.float32)
    got = np.asarray(rows, np.float32)[at]
    np.testing.assert_allclose(got, sent, rtol=0.07, atol=0.01)
    np.testing.assert_allclose(np.asarray(hidden, np.float32)[at], got, rtol=0.01)


def test_ties_of_formats_page():
    """Compares fp8_block128's codes with those of multiplying by a reciprocal."""
    tokens = np.random.default_rng(0).standard_normal((8192, 128)).astype(jnp.bfloat16)
    codes, scales = jax.jit(lambda x: jax_ep.formats.quantize(x, "fp8_block128"))(
        tokens
    )
    values, codes = tokens.astype(np.float32), np.asarray(codes)
    scales = np.asarray(scales).reshape(-1, 1)
    amax = np.abs(values).max(axis=1, keepdims=True)
    page = " ".join((ROOT / "docs" / "formats.md").read_text().split())
    for factor, percent in (
        (np.float32(448) / amax, r"([\d.]+)% got another code than with 448 / amax"),
        (1 / scales, r"([\d.]+)% another than with 1 / s"),
    ):
        others = np.clip(values * factor, -448, 448).astype(codes.dtype)
        differ = codes != others
        (said,) = re.findall(percent, page)
        assert np.mean(differ) == pytest.approx(float(said) / 100, rel=0.2)
        steps = codes.view(np.int8)[differ] - others.view(np.int8)[differ]
        assert set(np.abs(steps)) == {1}
    for scale, percent in (
        (amax * np.float32(1 / 448), r"was another number in (\d+)% of the blocks"),
        (1 / (np.float32(448) / amax), r"1 / \(448 / amax\) in (\d+)%"),
    ):
        (said,) = re.findall(percent, page)
        assert np.mean(scale != scales) == pytest.approx(float(said) / 100, rel=0.05)


def test_scaled_matmul_of_formats_page():
    """Only traced, as not every JAX runs it on every device."""
    (code,) = python_blocks("docs/formats.md", "scaled_matmul")

    def body(tokens, w):
        codes, scales = jax_ep.formats.quantize(tokens, "mxfp8")
        d = types.SimpleNamespace(tokens=codes, scales=scales)
        names = {"jax": jax, "jax_ep": jax_ep, "d": d, "w": w}
        exec(code, names)
        return names["hidden"]

    shapes = (jax.ShapeDtypeStruct((rows, HIDDEN), "bfloat16") for rows in (N, 64))
    assert jax.eval_shape(body, *shapes).shape == (N, 64)


@pytest.mark.parametrize("page", ["options", "overlap"])
def test_pages_of_halves(page):
    if page == "overlap":
        gpus.require_stream("stream", helpers.TRANSPORT)
    tokens, (_, group_sizes, (shared,)) = run_block(
        f"docs/{page}.md", helpers.TRANSPORT, {"shared_expert": lambda x: 2 * x}
    )
    assert int(group_sizes.sum()) == len(tokens) * TOP_K
    np.testing.assert_array_equal(np.asarray(shared), 2 * tokens)


def test_options_page_along_a_route():
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(hidden_size=HIDDEN, dtype="float32")
    rng = np.random.default_rng(3)
    made = helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
    x, ids, w = (helpers.put(mesh, p) for p in (made.tokens, made.ids, made.weights))
    names = {"jax": jax, "jnp": jnp, "P": P, "jax_ep": jax_ep, "mesh": mesh}
    names["ep"] = helpers.make_ep(mesh, config)
    (code,) = python_blocks("docs/options.md", "route=d.route")
    exec(code, names)
    y = names["two_tensors"](x, x[:, :8], ids, w)
    kept = np.where(np.asarray(ids) >= 0, np.asarray(w), 0).sum(1, keepdims=True)
    want = kept * np.asarray(x) * np.asarray(x)[:, :8].mean(1, keepdims=True)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_start_page(quick_compiles, capsys):
    names: dict = {}
    exec("\n".join(python_blocks("docs/start.md")), names)
    ep, values = names["ep"], names["values"]
    assert values[-1] < values[0]
    summary = jax_ep.stats.summary(names["load"])
    assert names["TOKENS"] * TOP_K <= summary.fullest <= ep.recv_capacity
    assert str(summary.fullest) in capsys.readouterr().out
    ep.close()
    # The figures of "How many rows".
    sizes = {"num_experts": 256, "top_k": 8, "hidden_size": 7168}
    config = jax_ep.EPConfig(**sizes, max_tokens_per_rank=4096)
    assert config.capacity(8) == 262144
    config = jax_ep.EPConfig(**vars(config) | {"capacity_factor": 1.25})
    assert config.capacity(8) == 40960


def test_placement_page(quick_compiles, capsys):
    names: dict = {}
    exec("\n".join(python_blocks("docs/placement.md")), names)
    before, after = (np.asarray(names[name], np.float32) for name in ("y", "y_after"))
    np.testing.assert_allclose(before, after, atol=0.02 * np.abs(before).max())
    if jax.device_count() > 2:
        rows = np.asarray(names["aux"].expert_counts).reshape(names["ranks"], -1).sum(1)
        assert rows.max() / rows.mean() < names["seen"].rank_imbalance
    for name, weights in names["saved"].items():
        np.testing.assert_array_equal(weights, names["by_expert"][name])
        assert np.abs(np.asarray(names["grads"][name])).max() > 0
    assert "places of" in capsys.readouterr().out
    names["ep"].close()


@pytest.mark.slow
def test_fp8_page(quick_compiles):
    pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
    names: dict = {}
    exec("\n".join(python_blocks("docs/fp8.md")), names)
    for name, grad in names["grads"].items():
        assert np.abs(np.asarray(grad)).max() > 0, name
    y, four = (np.asarray(names[n], np.float32) for n in ("y", "y_four_bits"))
    params, tokens = names["params"], names["tokens"][0]
    y_now = np.asarray(jax.jit(names["over_ranks"])(params, tokens), np.float32)
    np.testing.assert_allclose(y, y_now, atol=0.02 * np.abs(y).max())
    assert 0 < np.linalg.norm(four - y) < 0.3 * np.linalg.norm(y)
    for name in ("router", "gate_up", "down"):
        assert np.abs(np.asarray(names["moe_grads"][name][...])).max() > 0, name
    served = np.asarray(names["y_served"], np.float32)
    whole = np.asarray(names["moe"](tokens), np.float32)
    assert 0 < np.linalg.norm(served - whole) < 0.3 * np.linalg.norm(whole)
    names["ep"].close()


def test_tutorial_page(quick_compiles, tmp_path, monkeypatch):
    """Trains, saves, restores on another mesh and decodes."""
    for name in ("flax", "optax", "orbax.checkpoint"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "tutorial"}
    exec("\n".join(python_blocks("docs/tutorial.md")), names)
    assert names["curve"][0] > 5
    assert names["curve"][-1] < 0.2
    assert names["served"].blocks[0].moe.ep.ep_size == names["serving"].size
    for layer in ("down", "router"):
        found, want = (
            np.asarray(getattr(names[name].blocks[0].moe, layer)[...])
            for name in ("served", "model")
        )
        np.testing.assert_array_equal(found, want)
    days = "mon tue wed thu fri sat sun " * 3
    right = [answer in days for answer in names["answers"]]
    assert np.mean(right) >= 0.75
    assert {len(answer) for answer in names["answers"]} == {names["LENGTH"]}
    assert names["same"] >= 0.5


def test_determinism_page():
    """With XLA's optimisations, which might give other shapes other code."""
    names: dict = {}
    exec("\n".join(python_blocks("docs/determinism.md")), names)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(names["generated"], names["trained"][[40, 7, 21]])
    assert np.abs(names["trained"]).max() > 1


def test_recipes_page(quick_compiles):
    """Each block asserts what it shows."""
    names: dict = {}
    for code in python_blocks("docs/recipes.md"):
        assert "assert" in code or code.startswith("import")
        exec(code, names)
    for name in ("ep", "whole", "compact", "quantised"):
        names[name].close()


def test_reliability_page():
    def step(state, batch):
        raise jax.errors.JaxRuntimeError("timed out")

    names = {"jax": jax, "jax_ep": jax_ep, "step": step, "state": 1, "batch": 2}
    names |= {"mesh": helpers.make_mesh(1), "config": helpers.make_config()}
    names |= {"make_step": lambda ep: ep, "restore": lambda: 3}
    with jax_ep.init(names["mesh"], "ep", names["config"]) as failed:
        exec(*python_blocks("docs/reliability.md"), names | {"ep": failed}, names)
        assert failed.closed
    assert names["step"] is names["ep"]
    assert not names["ep"].closed
    assert names["new_state"] == 3
    names["ep"].close()


def test_cluster_page(monkeypatch):
    """Runs the page like a process 0 with all devices, without jax.distributed."""
    (launch,) = blocks("docs/cluster.md", "bash")
    subprocess.run(["bash", "-n"], input=launch, text=True, check=True)
    job, alone = python_blocks("docs/cluster.md")
    begun = []
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *args, **named: begun.append((args, named)),
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "3"])
    exec(alone, {"jax": jax, "sys": sys})
    assert begun == [(("localhost:12345",), {"num_processes": 4, "process_id": 3})]
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    helpers.make_mesh(8)  # skips if there are fewer devices
    names = {"config": helpers.make_config(num_experts=16)}
    exec(job, names)
    assert names["ep"].ep_size == 8
    names["ep"].close()


def test_extending_page(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    one, two = blocks("docs/extending.md", "cpp")
    source = tmp_path / "format.cc"
    source.write_text(
        '#include "formats/registry.h"\n#undef JAX_EP_QUANTIZED_FORMATS\n'
        f"namespace jax_ep {{\n{one}\n{two}\n"
        "#define NAME(FORMAT) FORMAT::kName,\n"
        "constexpr const char* kNames[] = {JAX_EP_QUANTIZED_FORMATS(NAME)};\n"
        "static_assert(kNames[1][0] == 'm' && kNames[1][9] == 0);\n}\n"
    )
    words = [compiler, "-std=c++20", "-fsyntax-only", "-I", str(ROOT / "xla_ffi")]
    done = run_to_end([*words, str(source)])
    assert done.returncode == 0, done.stderr


def test_extras_that_pages_install_are_there():
    text = pathlib.Path(ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    pages = ("docs/layers.md", "docs/tutorial.md", "README.md")
    commands = [command for page in pages for command in blocks(page, "bash")]
    named = [re.findall(r"\[(\w+)\]", command) for command in commands]
    assert [len(each) for each in named] == [1, 1, 1, 1]
    assert {each for (each,) in named} <= set(extras)


def described(module):
    """The names that a module's page in docs/api/ describes."""
    named = getattr(module, "__all__", None)
    if named is not None:
        return set(named)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        and not isinstance(value, typing.TypeVar)
    }


def test_api_pages_have_every_public_name():
    found: dict[str, set[str]] = {}
    for page in (ROOT / "docs" / "api").glob("*.md"):
        text = page.read_text()
        for table in text.split(".. currentmodule:: ")[1:]:
            names = re.findall(r"^   ([\w.]+)$", table.partition("```")[0], re.M)
            found.setdefault(table.split()[0], set()).update(names)
    modules = {
        name for name in jax_ep.__all__ if inspect.ismodule(getattr(jax_ep, name))
    }
    assert found.pop("jax_ep") == set(jax_ep.__all__) - modules
    # Flax may not be installed.
    assert found.pop("jax_ep.flax") == {"Codes", "MoE", "RouterBias"}
    assert found.pop("jax_ep.flax.linen") == {"MoE"}
    assert set(found) == {f"jax_ep.{name}" for name in modules}
    for name, names in found.items():
        assert names == described(sys.modules[name]), name


def test_types_page_has_every_option():
    text = (ROOT / "docs" / "api" / "types.md").read_text()
    shown = re.findall(r"py:type:: (\w+)\n   :canonical: Literal\[(.*)\]", text)
    have = {
        name: typing.get_args(value)
        for name, value in vars(literals).items()
        if typing.get_origin(value) is typing.Literal
    }
    assert {name: ast.literal_eval(f"({values},)") for name, values in shown} == have
