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
EXAMPLES = {"serve_gpt_oss": "GptOss", "serve_deepseek": "DeepSeek"}
# How far a token's logits may be off. Sums in another order round some elements of
# quantised rows to the code beside.
MOST = {"serve_gpt_oss": 2e-5, "serve_deepseek": 0.02}
MEDIAN = 1e-5
PARTS = ("gate", "up", "down")


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
        kind, self.most = getattr(self.module, EXAMPLES[name]), MOST[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(self.module.SMALL, "num_hidden_layers", LAYERS)
            config, tensors = kind.random(np.random.default_rng(0))
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


@pytest.fixture(scope="module")
def deepseek(mesh, tmp_path_factory):
    return Served("serve_deepseek", mesh, tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(params=["gpt_oss", "deepseek"])
def served(request):
    return request.getfixturevalue(request.param)


def assert_close(served, logits, want):
    off = served.serving.differences(logits, want)
    assert np.median(off) < MEDIAN
    assert off.max() < served.most


@pytest.mark.few(1)
def test_decode_with_a_cache_is_a_prefill_of_the_whole(served):
    want = served.whole[:, LENGTH:]
    assert served.logits.shape == want.shape == (*served.tokens[:, 1:].shape, 512)
    assert_close(served, served.logits, want)
    likely = served.whole[:, LENGTH - 1 :]
    chosen = np.take_along_axis(likely, served.tokens[..., None], -1)
    assert (likely - chosen).max() < served.most * np.abs(likely).max()


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
    want = [
        gpt_oss_logits(gpt_oss.config, gpt_oss.tensors, sequence)
        for sequence in gpt_oss.sequence
    ]
    assert_close(gpt_oss, gpt_oss.whole, np.array(want))


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


def fp8(tensors, name):
    """The matrix `[out, in]` of fp8 codes, an element at a time."""
    codes = np.asarray(tensors[f"{name}.weight"]).astype(np.float64)
    scales = np.asarray(tensors[f"{name}.weight_scale_inv"]).astype(np.float64)
    rows, columns = np.indices(codes.shape) // 128
    return codes * scales[rows, columns]


def rounded(rows):
    """What the codes of rows stand for, with a scale per 128 elements."""
    codes = quantizer.quantize(rows, "fp8_block128")
    return quantizer.dequantize(*codes, "fp8_block128").astype(np.float64)


def swiglu(tensors, name, rows, round_rows=np.asarray):
    gate, up, down = (fp8(tensors, f"{name}.{part}_proj") for part in PARTS)
    rows = round_rows(rows)
    gate, up = rows @ gate.T, rows @ up.T
    return round_rows(gate * sigmoid(gate) * up) @ down.T


def chosen_experts(config, scores, bias):
    """Ids of the best experts of the best groups, and their weights."""
    biased = np.split(scores + bias, config["n_group"])
    worth = [np.sort(group)[-2:].sum() for group in biased]
    best = np.argsort(worth)[-config["topk_group"] :]
    for group in set(range(len(biased))) - set(best):
        biased[group] = np.full_like(biased[group], -np.inf)
    ids = np.argsort(-np.concatenate(biased))[: config["num_experts_per_tok"]]
    return ids, scores[ids] / scores[ids].sum() * config["routed_scaling_factor"]


def latent_attention(config, tensors, block, rows):
    """Attention of each head over keys and values of its own."""
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    epsilon = config["rms_norm_eps"]

    def norm(x, name):
        weight = np.asarray(tensors[f"{block}.{name}.weight"]).astype(np.float64)
        return normed(x, weight, epsilon)

    q = norm(rows @ fp8(tensors, f"{block}.q_a_proj").T, "q_a_layernorm")
    q = q @ fp8(tensors, f"{block}.q_b_proj").T
    q = q.reshape(len(rows), heads, nope + rope)
    made = rows @ fp8(tensors, f"{block}.kv_a_proj_with_mqa").T
    both = norm(made[:, :latent], "kv_a_layernorm")
    both = both @ fp8(tensors, f"{block}.kv_b_proj").T
    both = both.reshape(len(rows), heads, -1)
    # Neighbours are pairs here.
    order = np.r_[0:rope:2, 1:rope:2]
    q_turned = turned(q[..., nope:][..., order], config)
    k_turned = turned(made[:, None, latent:][..., order], config)[:, 0]
    grown = 0.1 * np.log(config["rope_scaling"]["factor"]) + 1
    scale = grown**2 / np.sqrt(nope + rope)
    mixed = []
    for head in range(heads):
        keys = np.concatenate([both[:, head, :nope], k_turned], -1)
        queries = np.concatenate([q[:, head, :nope], q_turned[:, head]], -1)
        scores = queries @ keys.T * scale
        scores[np.triu_indices(len(rows), 1)] = -np.inf
        mixed.append(softmax(scores) @ both[:, head, nope:])
    return np.concatenate(mixed, -1) @ fp8(tensors, f"{block}.o_proj").T


def deepseek_logits(config, tensors, tokens, round_rows):
    """DeepSeek-V3 for one sequence."""
    epsilon = config["rms_norm_eps"]

    def get(name):
        return np.asarray(tensors[name]).astype(np.float64)

    x = get("model.embed_tokens.weight")[tokens]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        rows = normed(x, get(f"{block}.input_layernorm.weight"), epsilon)
        x = x + latent_attention(config, tensors, f"{block}.self_attn", rows)
        rows = normed(x, get(f"{block}.post_attention_layernorm.weight"), epsilon)
        if layer < config["first_k_dense_replace"]:
            x = x + swiglu(tensors, f"{block}.mlp", rows)
            continue
        x = x + swiglu(tensors, f"{block}.mlp.shared_experts", rows)
        scores = sigmoid(rows @ get(f"{block}.mlp.gate.weight").T)
        bias = get(f"{block}.mlp.gate.e_score_correction_bias")
        for at, row in enumerate(rows):
            for expert, weight in zip(
                *chosen_experts(config, scores[at], bias), strict=True
            ):
                name = f"{block}.mlp.experts.{expert}"
                x[at] += weight * swiglu(tensors, name, row, round_rows)
    return normed(x, get("model.norm.weight"), epsilon) @ get("lm_head.weight").T


def test_deepseek_is_its_formula(deepseek):
    """With rows rounded to codes where they are; without that it is another model."""
    config, tensors = deepseek.config, deepseek.tensors
    assert config["first_k_dense_replace"] < config["num_hidden_layers"]
    count = 2
    found = deepseek.whole[:count]
    want, other = (
        np.array(
            [
                deepseek_logits(config, tensors, sequence, round_rows)
                for sequence in deepseek.sequence[:count]
            ]
        )
        for round_rows in (rounded, np.asarray)
    )
    assert_close(deepseek, found, want)
    assert np.median(deepseek.serving.differences(found, other)) > 100 * MEDIAN


def test_deepseek_keeps_codes(deepseek):
    tensors = deepseek.tensors
    for layer, params in enumerate(deepseek.params["layers"]):
        if layer < deepseek.config["first_k_dense_replace"]:
            assert "experts" not in params["feed"]
            continue
        block, codes = f"model.layers.{layer}.mlp.experts", params["feed"]["experts"]
        assert codes.format == "fp8_block128"
        for kind, suffix in (("weight", ""), ("weight_scale_inv", "_scales")):
            gate_up = np.asarray(getattr(codes, f"gate_up{suffix}"))
            down = np.asarray(getattr(codes, f"down{suffix}"))
            for expert in range(deepseek.model.num_experts):
                found = gate_up[expert, :, 0], gate_up[expert, :, 1], down[expert]
                for part, each in zip(PARTS, found, strict=True):
                    want = np.asarray(tensors[f"{block}.{expert}.{part}_proj.{kind}"])
                    assert each.tobytes() == want.T.tobytes()


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
def test_transformers_has_the_same_logits(command, capsys):
    for name in ("torch", "transformers", "accelerate"):
        pytest.importorskip(name)
    assert command([*QUICK, "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    found = list(map(float, re.findall(r"by (\S+) of the largest", out)))
    assert len(found) == 2
    # transformers does not round rows to codes.
    exact = command.__module__ == "serve_gpt_oss"
    assert max(found) < (1e-5 if exact else 0.1)
