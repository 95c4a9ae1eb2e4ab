"""docs/models.md: each model's block from its tensors, against its own formula."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import checkpoints
from jax_ep.experts import geglu
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
    router, top_k = kind.get("router", "gate.weight"), kind.get("top_k", K)
    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}

    def by_name(expert, x):
        return mlp(tensors, f"{block}.experts.{expert}", names, x)

    expert_of = kind.get("expert", by_name)
    result = []
    for row, x in enumerate(tokens.astype(np.float64)):
        scores = score(tensors[f"{block}.{router}"] @ x)
        chosen_by = scores + (tensors[f"{block}.{bias}"].ravel() if bias else 0)
        if groups:
            chosen_by = in_best_groups(chosen_by, *groups)
        ids = np.argsort(-chosen_by, kind="stable")[:top_k]
        if "ids" in kind:
            ids = kind["ids"][row]
        weights = scores[ids] / (scores[ids].sum() if normalize else 1) * scale
        pairs = list(zip(ids, weights, strict=True))
        if kind.get("on_input"):
            y = sum(expert_of(expert, weight * x) for expert, weight in pairs)
        else:
            y = sum(weight * expert_of(expert, x) for expert, weight in pairs)
        if callable(kind.get("shared")):
            y = y + kind["shared"](x)
        elif kind.get("shared"):
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


@pytest.mark.few(4)
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


def assert_close(found, want):
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


def softplus_root(x):
    return np.sqrt(np.log1p(np.exp(x)))


@pytest.mark.parametrize("hashed", [False, True])
def test_deepseek_v4(page, mesh, hashed):
    """Codes of four bits, a shared expert in eight, and ids from a table."""
    hidden, inner, experts = 256, 128, 2 * mesh.size
    rng = np.random.default_rng(3)
    block, names = "layers.0.ffn", ("w1", "w3", "w2")
    gate = rng.standard_normal((experts, hidden)).astype(np.float32) / 16
    tensors, values = {f"{block}.gate.weight": gate}, {}
    if hashed:
        table = rng.integers(0, experts - 1, (50, 1))
        tensors[f"{block}.gate.tid2eid"] = np.concatenate([table, table + 1], 1)
    else:
        bias = rng.random(experts).astype(np.float32)
        tensors[f"{block}.gate.bias"] = bias
    for expert in range(experts):
        for part in names:
            name = f"{block}.experts.{expert}.{part}"
            shape = (hidden, inner) if part == "w2" else (inner, hidden)
            codes, scales, values[name] = blocks(rng, *shape)
            payload = codes.reshape(shape[0], shape[1] // 2).view(np.int8)
            tensors[f"{name}.weight"] = payload
            tensors[f"{name}.scale"] = scales.view(jnp.float8_e8m0fnu)
    for part in names:
        name = f"{block}.shared_experts.{part}"
        shape = (hidden, inner) if part == "w2" else (inner, hidden)
        codes = rng.standard_normal(shape).astype(jnp.float8_e4m3fn)
        powers = rng.integers(122, 125, (shape[0] // 128, shape[1] // 128), np.uint8)
        scales = powers.view(jnp.float8_e8m0fnu)
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = codes, scales
        whole = np.kron(scales.astype(np.float32), np.ones((128, 128)))
        values[name] = codes.astype(np.float32) * whole

    def clamped(name, x):
        gate, up, down = (values[f"{block}.{name}.{part}"] for part in names)
        gate, up = np.minimum(gate @ x, 10), np.clip(up @ x, -10, 10)
        return down @ (silu(gate) * up)

    params = page["load"](mesh, *page["deepseek_v4"](tensors, **LAYER))
    assert params["experts"].format == "mxfp4"
    tokens = rng.standard_normal((N * mesh.size, hidden)).astype(np.float32)
    # Large enough to be clamped.
    tokens *= 8
    how = {
        "scale": 1.5,
        "expert": lambda expert, x: clamped(f"experts.{expert}", x),
        "shared": lambda x: clamped("shared_experts", x),
    }
    per_token = None
    if hashed:
        token_ids = rng.integers(0, 50, len(tokens))
        how["ids"] = page["ids_of_a_hash_layer"](tensors, 0, token_ids)
        per_token = {"topk_ids": how["ids"]}
    else:
        how["bias"] = "gate.bias"
    with make_ep(mesh, experts, hidden) as ep:
        found = page["apply"](ep, params, tokens, per_token, **page["DEEPSEEK_V4"])
    plain = {name: tensors[name] for name in tensors if "gate" in name}
    assert_close(found, moe(plain, block, tokens, softplus_root, **how))


def test_step(page, ep, experts, tokens):
    block = "model.layers.0.moe"
    tensors = Tensors(11)
    tensors.add(f"{block}.gate.weight", experts, H)
    tensors.add(f"{block}.router_bias", experts)
    for part in PROJ:
        shape = (H, F) if part == "down_proj" else (F, H)
        tensors.add(f"{block}.{part}.weight", experts, *shape)
        tensors[f"{block}.{part}.weight"] *= 2  # large enough to be clamped
    shared = "model.layers.0.share_expert"
    tensors.linears(shared, PROJ, S)

    def clamped(matrices, limit, x):
        gate, up, down = matrices
        inner = np.minimum(silu(gate @ x), limit) * np.clip(up @ x, -limit, limit)
        return down @ inner

    def expert(e, x):
        return clamped([tensors[f"{block}.{part}.weight"][e] for part in PROJ], 0.5, x)

    def shared_expert(x):
        return clamped([tensors[f"{shared}.{part}.weight"] for part in PROJ], 0.25, x)

    params = page["load"](ep.mesh, *page["step"](tensors, **LAYER))
    options = {
        "router": Router(score="sigmoid", scale=3.0),
        "activation": page["step_clamped_at"](0.5),
        "shared_activation": page["step_clamped_at"](0.25),
    }
    how = {"scale": 3.0, "bias": "router_bias"}
    how |= {"expert": expert, "shared": shared_expert}
    found = page["apply"](ep, params, tokens, **options)
    assert_close(found, moe(tensors, block, tokens, sigmoid, **how))


def test_nemotron_h(page, ep, experts, tokens):
    block, bias = "backbone.layers.0.mixer", "gate.e_score_correction_bias"
    tensors = Tensors(12)
    tensors.add(f"{block}.gate.weight", experts, H)
    tensors.add(f"{block}.{bias}", experts)
    parts = [(f"experts.{expert}", F) for expert in range(experts)]
    for name, inner in (*parts, ("shared_experts", S)):
        tensors.add(f"{block}.{name}.up_proj.weight", inner, H)
        tensors.add(f"{block}.{name}.down_proj.weight", H, inner)

    def squared(name, x):
        up, down = (tensors[f"{block}.{name}.{part}.weight"] for part in PROJ[1:])
        return down @ np.square(np.maximum(up @ x, 0))

    how = {
        "scale": 2.5,
        "bias": bias,
        "expert": lambda expert, x: squared(f"experts.{expert}", x),
        "shared": lambda x: squared("shared_experts", x),
    }
    params = page["load"](ep.mesh, *page["nemotron_h"](tensors, **LAYER))
    found = page["apply"](ep, params, tokens, **page["NEMOTRON_H"])
    assert_close(found, moe(tensors, block, tokens, sigmoid, **how))


def test_longcat(page, ep, experts, tokens):
    identity, bias = 5, "router.e_score_correction_bias"
    tensors = checkpoint(experts, MLP)
    tensors.add(f"{MLP}.router.classifier.weight", experts + identity, H)
    tensors.add(f"{MLP}.{bias}", experts + identity)
    chosen = set()

    def expert(e, x):
        chosen.add(e)
        return x if e >= experts else mlp(tensors, f"{MLP}.experts.{e}", PROJ, x)

    how = {"scale": 6, "normalize": False, "bias": bias, "expert": expert}
    params = page["load"](ep.mesh, *page["longcat"](tensors, **LAYER))
    options = {**page["LONGCAT"], "num_identity_experts": identity}
    found = page["apply"](ep, params, tokens, **options)
    gate = {"router": "router.classifier.weight"}
    assert_close(found, moe(tensors, MLP, tokens, softmax, **gate, **how))
    assert max(chosen) >= experts


def test_llama4(page, mesh, experts, tokens):
    block = "language_model.model.layers.0.feed_forward"
    tensors = Tensors(13)
    tensors.add(f"{block}.router.weight", experts, H)
    tensors.add(f"{block}.experts.gate_up_proj", experts, H, 2 * F)
    tensors.add(f"{block}.experts.down_proj", experts, F, H)
    tensors.linears(f"{block}.shared_expert", PROJ, S)
    both, down = (tensors[f"{block}.experts.{n}_proj"] for n in ("gate_up", "down"))

    def expert(e, x):
        gate, up = np.split(x @ both[e], 2)
        return (silu(gate) * up) @ down[e]

    how = {"normalize": False, "top_k": 1, "on_input": True, "expert": expert}
    how |= {"shared": "shared_expert", "router": "router.weight"}
    params = page["load"](mesh, *page["llama4"](tensors, **LAYER))
    sizes = {"num_experts": experts, "hidden_size": H, "top_k": 1}
    given = {"max_tokens_per_rank": N, "dtype": "float32"}
    with helpers.init(mesh, **sizes, **given) as ep:
        found = page["apply"](ep, params, tokens, **page["LLAMA4"])
    want = moe(tensors, block, tokens, sigmoid, **how)
    assert_close(found, want)
    other = moe(tensors, block, tokens, sigmoid, **{**how, "on_input": False})
    assert np.abs(other - want).max() > 0.1 * np.abs(want).max()


def test_gemma4(page, ep, experts, tokens):
    block = "model.language_model.layers.0"
    tensors = Tensors(14)
    tensors.add(f"{block}.router.proj.weight", experts, H)
    tensors.add(f"{block}.router.scale", H)
    tensors[f"{block}.router.scale"] *= 64
    tensors.add(f"{block}.router.per_expert_scale", experts)
    tensors.add(f"{block}.experts.gate_up_proj", experts, 2 * F, H)
    tensors.add(f"{block}.experts.down_proj", experts, H, F)
    stream = np.random.default_rng(15).standard_normal(tokens.shape).astype(np.float32)
    gate, weights = page["gemma4"](tensors, **LAYER)
    decided = page["gemma4_routing"](gate, stream, K)
    params = page["load"](ep.mesh, {}, weights)
    options = {"activation": geglu}
    found = page["apply"](ep, params, tokens, {"routing": decided}, **options)
    both, down = (tensors[f"{block}.experts.{n}_proj"] for n in ("gate_up", "down"))
    want = []
    for x, own in zip(
        tokens.astype(np.float64), stream.astype(np.float64), strict=True
    ):
        normed = own / np.sqrt(np.mean(own**2) + 1e-6)
        normed = normed * tensors[f"{block}.router.scale"] * H**-0.5
        scores = softmax(tensors[f"{block}.router.proj.weight"] @ normed)
        ids = np.argsort(-scores, kind="stable")[:K]
        shares = scores[ids] / scores[ids].sum()
        shares = shares * tensors[f"{block}.router.per_expert_scale"][ids]
        y = 0
        for expert, share in zip(ids, shares, strict=True):
            g, u = np.split(both[expert] @ x, 2)
            gelu = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
            y = y + share * (down[expert] @ (gelu * u))
        want.append(y)
    assert_close(found, np.array(want))


def test_phimoe(page, ep, experts, tokens):
    tensors = checkpoint(experts, SPARSE, MIXTRAL)
    params = page["load"](ep.mesh, *page["mixtral"](tensors, **LAYER))
    found = page["apply"](ep, params, tokens, router=page["sparsemixer"])
    want, shared = [], 0
    for x in tokens.astype(np.float64):
        logits = tensors[f"{SPARSE}.gate.weight"] @ x
        left, y = logits.copy(), 0
        for _ in range(2):
            best = left.argmax()
            size = np.maximum(np.abs(logits), left[best])
            close = (left[best] - logits) / size <= 0.02
            powers = np.where(close, np.exp(left), 0)
            share = powers[best] / powers.sum()
            shared += share < 1
            y = y + share * mlp(tensors, f"{SPARSE}.experts.{best}", MIXTRAL, x)
            left[best] = -np.inf
        want.append(y)
    assert shared  # some experts' logits are close
    assert_close(found, np.array(want))
