"""examples/serve_*.py: whole models from checkpoints, against formulas in NumPy."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import checkpoints
from support import ROOT, helpers, quantizer

pytestmark = pytest.mark.usefixtures("quick_compiles")

LENGTH, STEPS, LAYERS = 11, 4, 2
EXAMPLES = {"serve_gpt_oss": "GptOss"}


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(4))


class Served:
    """A small checkpoint that an example has loaded and served in float32."""

    def __init__(self, name, mesh, folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "examples")
            self.serving = importlib.import_module("serving")
            self.module = importlib.import_module(name)
        kind = getattr(self.module, EXAMPLES[name])
        config, tensors = kind.random(np.random.default_rng(0))
        config = config | {"num_hidden_layers": LAYERS}
        self.serving.write(folder, config, tensors)
        self.written, self.folder, self.mesh = tensors, folder, mesh
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = checkpoints.open_safetensors(folder)
        self.model = kind(self.config, "float32")
        self.read = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints.Experts, "__getitem__", self.reading())
            self.params = self.serving.load(self.model, mesh, self.tensors)
        rng = np.random.default_rng(1)
        shape = mesh.size, LENGTH
        prompts = rng.integers(0, config["vocab_size"], shape, np.int32)
        self.prompts = jax.device_put(prompts, NamedSharding(mesh, P("ep")))
        self.tokens, self.logits, _ = self.serving.serve(
            self.model, mesh, self.params, self.prompts, STEPS
        )
        self.sequence = np.concatenate([prompts, self.tokens[:, :-1]], 1)
        self.whole = self.serving.prefilled(
            self.model,
            mesh,
            self.params,
            jax.device_put(self.sequence, self.prompts.sharding),
        )

    def reading(self):
        """`Experts.__getitem__` that notes which experts are read at once."""
        read = checkpoints.Experts.__getitem__

        def noting(experts, index):
            first = index[0] if isinstance(index, tuple) else index
            self.read.append(range(len(experts))[first])
            return read(experts, index)

        return noting


@pytest.fixture(scope="module")
def gpt_oss(mesh, tmp_path_factory):
    return Served("serve_gpt_oss", mesh, tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(params=EXAMPLES.values())
def served(request):
    names = {"GptOss": "gpt_oss"}
    return request.getfixturevalue(names[request.param])


def test_decode_with_a_cache_is_a_prefill_of_the_whole(served):
    want = served.whole[:, LENGTH:]
    assert served.logits.shape == want.shape == (*served.tokens[:, 1:].shape, 512)
    np.testing.assert_allclose(served.logits, want, atol=1e-5 * np.abs(want).max())
    likely = served.whole[:, LENGTH - 1 :].argmax(-1)
    np.testing.assert_array_equal(served.tokens, likely)


def test_the_checkpoint_is_read_as_it_was_written(served):
    files = sorted(path.name for path in served.folder.iterdir())
    assert len(files) == 5
    index = json.loads((served.folder / files[-1]).read_text())
    assert sorted(index["weight_map"]) == sorted(served.written)
    for name, tensor in served.written.items():
        found = served.tensors[name]
        assert found.dtype == tensor.dtype
        assert np.asarray(found).tobytes() == tensor.tobytes()


def test_a_device_has_and_reads_its_experts_alone(served):
    ranks, experts = served.mesh.size, served.model.num_experts
    own = experts // ranks
    wanted = [range(first, first + own) for first in range(0, experts, own)]
    assert {(each.start, each.stop) for each in served.read} == {
        (each.start, each.stop) for each in wanted
    }
    for layer in served.params["layers"]:
        for leaf in jax.tree.leaves(layer["feed"].get("experts")):
            assert leaf.shape[0] == experts
            assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {own}
        for leaf in jax.tree.leaves(layer["attention"]):
            assert leaf.sharding.is_fully_replicated


def turned(x, config):
    """Rotary embedding of x `[t, heads, d]` with YaRN, a pair at a time."""
    scaling, theta = config["rope_scaling"], config["rope_theta"]
    length, _, size = x.shape
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_with(turns):
        return size * np.log(context / (turns * 2 * np.pi)) / (2 * np.log(theta))

    first, last = (pair_with(scaling[name]) for name in ("beta_fast", "beta_slow"))
    if scaling.get("truncate", True):
        first, last = np.floor(first), np.ceil(last)
    last = min(last, size - 1)
    grown = 1.0 if "mscale" in scaling else 0.1 * np.log(factor) + 1
    y = np.empty_like(x)
    half = size // 2
    for pair in range(half):
        slow = np.clip((pair - max(first, 0)) / (last - max(first, 0)), 0, 1)
        speed = theta ** (-2 * pair / size) * (1 - slow + slow / factor)
        angle = np.arange(length)[:, None] * speed
        cos, sin = np.cos(angle) * grown, np.sin(angle) * grown
        a, b = x[..., pair], x[..., pair + half]
        y[..., pair], y[..., pair + half] = a * cos - b * sin, b * cos + a * sin
    return y


def normed(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gpt_oss_logits(config, tensors, tokens):
    """gpt-oss for one sequence, a head and a token at a time."""
    epsilon, heads = config["rms_norm_eps"], config["num_attention_heads"]
    size, groups = config["head_dim"], config["num_key_value_heads"]

    def get(name):
        return np.asarray(tensors[name]).astype(np.float64)

    def linear(x, name):
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    x = get("model.embed_tokens.weight")[tokens]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        rows = normed(x, get(f"{block}.input_layernorm.weight"), epsilon)
        q, k, v = (
            linear(rows, f"{block}.self_attn.{name}_proj").reshape(len(x), -1, size)
            for name in "qkv"
        )
        q, k = turned(q, config), turned(k, config)
        mixed = np.zeros_like(q)
        slides = config["layer_types"][layer] == "sliding_attention"
        for head in range(heads):
            group, sink = head * groups // heads, get(f"{block}.self_attn.sinks")[head]
            for at in range(len(x)):
                first = max(0, at - config["sliding_window"] + 1) if slides else 0
                scores = k[first : at + 1, group] @ q[at, head] / np.sqrt(size)
                shares = softmax(np.append(scores, sink))[:-1]
                mixed[at, head] = shares @ v[first : at + 1, group]
        x = x + linear(mixed.reshape(len(x), -1), f"{block}.self_attn.o_proj")
        rows = normed(x, get(f"{block}.post_attention_layernorm.weight"), epsilon)
        logits = linear(rows, f"{block}.mlp.router")
        w1, w2 = (
            mxfp4(tensors, f"{block}.mlp.experts", n) for n in ("gate_up", "down")
        )
        b1, b2 = (
            get(f"{block}.mlp.experts.{n}_proj_bias") for n in ("gate_up", "down")
        )
        for at, row in enumerate(rows):
            ids = np.argsort(-logits[at])[: config["num_experts_per_tok"]]
            for expert, weight in zip(ids, softmax(logits[at, ids]), strict=True):
                both = w1[expert] @ row + b1[expert]
                gate = np.minimum(both[::2], config["swiglu_limit"])
                up = np.clip(both[1::2], -7, 7)
                inner = gate * sigmoid(1.702 * gate) * (up + 1)
                x[at] += weight * (w2[expert] @ inner + b2[expert])
    return normed(x, get("model.norm.weight"), epsilon) @ get("lm_head.weight").T


def mxfp4(tensors, block, part):
    """The experts' matrices `[E, out, in]` in float32."""
    payload, scales = (
        np.asarray(tensors[f"{block}.{part}_proj_{kind}"])
        for kind in ("blocks", "scales")
    )
    payload = payload.reshape(*payload.shape[:2], -1)
    return quantizer.dequantize(payload, scales, "mxfp4")


def test_gpt_oss_is_its_formula(gpt_oss):
    assert gpt_oss.config["sliding_window"] < LENGTH
    for row, sequence in zip(gpt_oss.whole, gpt_oss.sequence, strict=True):
        want = gpt_oss_logits(gpt_oss.config, gpt_oss.tensors, sequence)
        np.testing.assert_allclose(row, want, atol=2e-5 * np.abs(want).max())


def test_gpt_oss_keeps_codes(gpt_oss):
    """Every byte is that of the checkpoint, and so is every value."""
    for layer, params in enumerate(gpt_oss.params["layers"]):
        block, feed = f"model.layers.{layer}.mlp.experts", params["feed"]
        codes = feed["experts"]
        assert codes.format == "mxfp4"
        for part in ("gate_up", "down"):
            for kind, name in (("blocks", part), ("scales", f"{part}_scales")):
                want = np.asarray(gpt_oss.tensors[f"{block}.{part}_proj_{kind}"])
                want = want.reshape(*want.shape[:2], -1).swapaxes(1, 2)
                if part == "gate_up":
                    want = np.stack([want[..., ::2], want[..., 1::2]], 2)
                found = np.asarray(getattr(codes, name))
                np.testing.assert_array_equal(found.view(np.uint8), want)
        _, down = codes.dequantized()
        want = mxfp4(gpt_oss.tensors, block, "down")
        np.testing.assert_array_equal(down, want.swapaxes(1, 2))
        bias = gpt_oss.tensors[f"{block}.gate_up_proj_bias"]
        np.testing.assert_array_equal(feed["up_bias"], bias[:, 1::2])


@pytest.fixture(params=EXAMPLES)
def command(request, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module(request.param)
    monkeypatch.setitem(module.SMALL, "num_hidden_layers", LAYERS)
    return module.main


QUICK = ["--prompts", "1", "--length", "4", "--steps", "2"]


def test_a_command_writes_a_checkpoint_and_serves_it(command, tmp_path, capsys):
    folder = tmp_path / "model"
    assert command([*QUICK, "--no-compare", "--folder", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("writing a small checkpoint")
    assert len(re.findall(r"(?m)^(prefill|decode): \d+ tokens per second$", out)) == 2
    assert "transformers" not in out
    assert len(checkpoints.open_safetensors(folder)) > 20


@pytest.mark.slow
def test_transformers_has_the_same_logits(command, capsys, monkeypatch):
    for name in ("torch", "transformers", "accelerate"):
        pytest.importorskip(name)
    assert command([*QUICK, "--dtype", "float32"]) == 0
    found = re.findall(r"at most (\S+); 100%", capsys.readouterr().out)
    assert len(found) == 2
    assert max(map(float, found)) < 1e-5
