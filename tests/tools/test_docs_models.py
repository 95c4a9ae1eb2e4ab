"""docs/models.md: each model's block from its tensors, against its own formula."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import checkpoints
from jax_ep.router import Router
from support import helpers, quantizer
from support.pages import python_blocks

pytestmark = pytest.mark.usefixtures("quick_compiles")

H, F, S, K, N = 64, 32, 24, 2, 6
MLP = "model.layers.0.mlp"
SPARSE = "model.layers.0.block_sparse_moe"
LAYER = {"layer": 0}


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(4))


@pytest.fixture(scope="module")
def experts(mesh):
    return 4 * mesh.size


@pytest.fixture(scope="module")
def ep(mesh, experts):
    with make_ep(mesh, experts, H) as ep:
        yield ep


def make_ep(mesh, experts, hidden, **more):
    sizes = {"num_experts": experts, "hidden_size": hidden, "top_k": K}
    return helpers.init(mesh, **sizes, max_tokens_per_rank=N, dtype="float32", **more)


@pytest.fixture(scope="module")
def tokens(mesh):
    rng = np.random.default_rng(7)
    return rng.standard_normal((N * mesh.size, H)).astype(np.float32)


class Tensors(dict):
    """Random tensors by the names of a checkpoint."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def add(self, name, *shape):
        value = self.rng.standard_normal(shape) / np.sqrt(shape[-1])
        self[name] = value.astype(np.float32)

    def linears(self, block, names, inner):
        gate, up, down = names
        self.add(f"{block}.{gate}.weight", inner, H)
        self.add(f"{block}.{up}.weight", inner, H)
        self.add(f"{block}.{down}.weight", H, inner)


PROJ = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


def checkpoint(experts, block, names=PROJ, shared=None, bias=None, gate=None):
    tensors = Tensors(len(block))
    tensors.add(f"{block}.gate.weight", experts, H)
    for expert in range(experts):
        tensors.linears(f"{block}.experts.{expert}", names, F)
    if shared:
        tensors.linears(f"{block}.{shared}", PROJ, S)
    if bias:
        tensors.add(f"{block}.{bias}", experts)
        # Large enough to choose other experts.
        tensors[f"{block}.{bias}"] *= np.float32(np.sqrt(experts) / 2)
    if gate:
        tensors.add(f"{block}.{gate}", 1, H)
    return tensors


@pytest.fixture(scope="module")
def page(ep, experts, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    tensors = checkpoint(experts, MLP)
    half = len(tensors) // 2
    for part, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
        checkpoints.save_safetensors(
            folder / f"model-{part}.safetensors",
            {name: tensors[name] for name in names},
        )
    names: dict = {"ep": ep, "folder": folder, "tokens": tokens}
    exec("\n".join(python_blocks("docs/models.md")), names)
    return names


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def mlp(tensors, block, names, x):
    """The MLP of a PyTorch module, whose linears are `[out, in]`."""
    gate, up, down = (tensors[f"{block}.{name}.weight"] for name in names)
    return down @ (silu(gate @ x) * (up @ x))


def in_best_groups(chosen_by, groups, best, of_group):
    """Scores of the experts outside the best groups become -inf."""
    parts = np.split(chosen_by, groups)
    worth = [np.sort(part)[-of_group:].sum() for part in parts]
    keep = np.argsort(worth)[-best:]
    return np.concatenate(
        [
            part if i in keep else np.full_like(part, -np.inf)
            for i, part in enumerate(parts)
        ]
    )


def moe(tensors, block, tokens, score, *, names=PROJ, bias=None, groups=None, **kind):
    """The block of a model, a token and an expert at a time."""
    normalize, scale = kind.get("normalize", True), kind.get("scale", 1.0)
    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
    result = []
    for x in tokens.astype(np.float64):
        scores = score(tensors[f"{block}.gate.weight"] @ x)
        chosen_by = scores + (tensors[f"{block}.{bias}"].ravel() if bias else 0)
        if groups:
            chosen_by = in_best_groups(chosen_by, *groups)
        ids = np.argsort(-chosen_by, kind="stable")[:K]
        weights = scores[ids] / (scores[ids].sum() if normalize else 1) * scale
        y = sum(
            weight * mlp(tensors, f"{block}.experts.{expert}", names, x)
            for expert, weight in zip(ids, weights, strict=True)
        )
        if kind.get("shared"):
            y = y + mlp(tensors, f"{block}.{kind['shared']}", PROJ, x)
        if kind.get("gated"):
            gate = sigmoid(tensors[f"{block}.{kind['gated']}_gate.weight"] @ x)
            y = y + gate * mlp(tensors, f"{block}.{kind['gated']}", PROJ, x)
        result.append(y)
    return np.array(result)


V3 = {"groups": (4, 2, 2), "scale": 2.5}
FAMILIES = {
    "mixtral": ("mixtral", SPARSE, Router(), softmax, {"names": MIXTRAL}),
    "qwen3_moe": ("qwen3_moe", MLP, Router(), softmax, {}),
    "qwen3_moe, no norm": (
        "qwen3_moe",
        MLP,
        Router(normalize=False),
        softmax,
        {"normalize": False},
    ),
    "deepseek_v2": (
        "deepseek",
        MLP,
        Router(normalize=False, scale=16, num_groups=4, top_groups=2, best_of_group=1),
        softmax,
        {
            "normalize": False,
            "scale": 16,
            "groups": (4, 2, 1),
            "shared": "shared_experts",
        },
    ),
    "deepseek_v3": (
        "deepseek",
        MLP,
        Router(score="sigmoid", scale=2.5, num_groups=4, top_groups=2),
        sigmoid,
        V3 | {"shared": "shared_experts", "bias": "gate.e_score_correction_bias"},
    ),
    "glm_kimi": (
        "deepseek",
        MLP,
        Router(score="sigmoid", scale=2.827),
        sigmoid,
        {
            "scale": 2.827,
            "shared": "shared_experts",
            "bias": "gate.e_score_correction_bias",
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        SPARSE,
        Router(score="sigmoid"),
        sigmoid,
        {"names": MIXTRAL, "bias": "e_score_correction_bias"},
    ),
    "ernie": (
        "ernie",
        MLP,
        Router(),
        softmax,
        {"shared": "shared_experts", "bias": "moe_statics.e_score_correction_bias"},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_its_formula(page, ep, experts, tokens, family):
    load, block, router, score, kind = FAMILIES[family]
    made = {key: kind[key] for key in ("names", "shared", "bias") if key in kind}
    tensors = checkpoint(experts, block, **made)
    if load == "ernie":
        name = f"{block}.{kind['bias']}"
        tensors[name] = tensors[name][None]
    params = page["load"](ep.mesh, *page[load](tensors, **LAYER))
    found = page["apply"](ep, params, tokens, router=router)
    want = moe(tensors, block, tokens, score, **kind)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())
    if "bias" in kind:  # it matters
        other = moe(tensors, block, tokens, score, **{**kind, "bias": None})
        assert np.abs(other - want).max() > 0.1 * np.abs(want).max()


def test_qwen2_has_a_gated_shared_expert(page, ep, experts, tokens):
    shared = "shared_expert"
    tensors = checkpoint(experts, MLP, shared=shared, gate=f"{shared}_gate.weight")
    params = page["load"](ep.mesh, *page["qwen2_moe"](tensors, **LAYER))
    found = page["apply"](ep, params, tokens, router=Router(normalize=False))
    want = moe(tensors, MLP, tokens, softmax, normalize=False, gated=shared)
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


def test_the_page_s_own_run(page, experts, tokens):
    tensors = checkpoint(experts, MLP)
    want = moe(tensors, MLP, tokens, softmax)
    np.testing.assert_allclose(page["y"], want, atol=2e-5 * np.abs(want).max())


def test_saves_what_it_loaded(page, experts, tmp_path):
    file = tmp_path / "model.safetensors"
    page["save_qwen3_moe"](file, page["params"], **LAYER)
    saved, tensors = checkpoints.open_safetensors(file), checkpoint(experts, MLP)
    assert sorted(saved) == sorted(tensors)
    for name, want in tensors.items():
        np.testing.assert_array_equal(saved[name], want)


def blocks(rng, *shape):
    """Blocks and scales of `[E, out, in]`, and their values."""
    *outer, columns = shape
    codes = rng.integers(0, 256, (*outer, columns // 32, 16), np.uint8)
    scales = rng.integers(121, 125, (*outer, columns // 32), np.uint8)
    payload = codes.reshape(*outer, columns // 2)
    return codes, scales, quantizer.dequantize(payload, scales, "mxfp4")


def test_gpt_oss(page, ep, experts, tokens):
    rng = np.random.default_rng(5)
    gate_up, gate_up_scales, w1 = blocks(rng, experts, 2 * F, H)
    down, down_scales, w2 = blocks(rng, experts, H, F)
    router = rng.standard_normal((experts, H)).astype(np.float32) / 8
    bias, b1, b2 = (
        rng.standard_normal(shape).astype(jnp.bfloat16)
        for shape in (experts, (experts, 2 * F), (experts, H))
    )
    tensors = {
        f"{MLP}.router.weight": router,
        f"{MLP}.router.bias": bias,
        f"{MLP}.experts.gate_up_proj_blocks": gate_up,
        f"{MLP}.experts.gate_up_proj_scales": gate_up_scales,
        f"{MLP}.experts.gate_up_proj_bias": b1,
        f"{MLP}.experts.down_proj_blocks": down,
        f"{MLP}.experts.down_proj_scales": down_scales,
        f"{MLP}.experts.down_proj_bias": b2,
    }
    params = page["load"](ep.mesh, *page["gpt_oss"](tensors, **LAYER))
    assert params["experts"].format == "mxfp4"
    found = page["apply"](ep, params, tokens, **page["GPT_OSS"])
    want = []
    for x in tokens.astype(np.float64):
        logits = router @ x + bias.astype(np.float64)
        ids = np.argsort(-logits, kind="stable")[:K]
        y = 0
        for expert, weight in zip(ids, softmax(logits[ids]), strict=True):
            both = w1[expert] @ x + b1[expert].astype(np.float64)
            gate = np.minimum(both[::2], 7)
            up = np.clip(both[1::2], -7, 7)
            inner = gate * sigmoid(1.702 * gate) * (up + 1)
            y = y + weight * (w2[expert] @ inner + b2[expert].astype(np.float64))
        want.append(y)
    want = np.array(want)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


def test_deepseek_fp8(page, mesh):
    """Weights are the checkpoint's; rows of 3 mantissa bits round the results."""
    hidden, inner, experts = 256, 128, 2 * mesh.size
    rng = np.random.default_rng(2)
    gate = rng.standard_normal((experts, hidden)).astype(np.float32) / 16
    bias = rng.random(experts, np.float32)
    values = {"gate.weight": gate, "gate.e_score_correction_bias": bias}
    values = {f"{MLP}.{name}": value for name, value in values.items()}
    tensors = dict(values)
    for block in (*map("experts.{}".format, range(experts)), "shared_experts"):
        for part in PROJ:
            name = f"{MLP}.{block}.{part}.weight"
            shape = (hidden, inner) if part == "down_proj" else (inner, hidden)
            codes = rng.standard_normal(shape).astype(jnp.float8_e4m3fn)
            scales = rng.random((shape[0] // 128, shape[1] // 128), np.float32) / 8
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            whole = np.kron(scales, np.ones((128, 128), np.float32))
            values[name] = codes.astype(np.float32) * whole
    params = page["load"](mesh, *page["deepseek_fp8"](tensors, **LAYER))
    codes = params["experts"]
    assert codes.format == "fp8_block128"
    assert codes.down.sharding.shard_shape(codes.down.shape)[0] == 2
    gate_up, down = codes.dequantized()
    for expert in range(experts):
        wanted = (values[f"{MLP}.experts.{expert}.{part}.weight"].T for part in PROJ)
        found = gate_up[expert, :, 0], gate_up[expert, :, 1], down[expert]
        for each, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(each, want)
    tokens = rng.standard_normal((N * mesh.size, hidden)).astype(np.float32)
    with make_ep(mesh, experts, hidden, dispatch_format="fp8_block128") as ep:
        router = Router(score="sigmoid", scale=2.5)
        found = page["apply"](ep, params, tokens, router=router)
    how = {"scale": 2.5, "shared": "shared_experts"}
    how["bias"] = "gate.e_score_correction_bias"
    want = moe(values, MLP, tokens, sigmoid, **how)
    error = np.linalg.norm(found - want) / np.linalg.norm(want)
    assert error < 0.05, error
