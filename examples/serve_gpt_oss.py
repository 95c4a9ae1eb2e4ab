"""Serves gpt-oss from its checkpoint, with experts' weights as the codes that it holds.

    python examples/serve_gpt_oss.py                      a small one of random weights
    python examples/serve_gpt_oss.py --folder gpt-oss-20b --no-compare
    python examples/serve_gpt_oss.py --dtype float32      to compare more closely

The whole model is here and in serving.py: attention with sinks and a sliding window in
every other layer, YaRN, and experts that are split over all devices, 8 virtual CPU
devices or GPUs. Prompts are random tokens of one length. The command prints tokens per
second of prefill and of decode, and how far the logits are from those of transformers
for the same folder, if torch, transformers and accelerate are installed.
"""

import sys

import serving  # before JAX starts its backend  # isort: skip

import jax
import numpy as np

import jax_ep
from jax_ep import checkpoints

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# As config.json of the published models has it, with smaller sizes.
SMALL = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 64,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def codes(rng, *shape):
    """Draws four-bit weights `[..., in]`: blocks of 32, two per byte, and scales."""
    *outer, columns = shape
    blocks = rng.integers(0, 256, (*outer, columns // 32, 16), np.uint8)
    # A scale is a power of two; codes are about 3 in size.
    power = 127 - round(np.log2(3 * columns**0.5))
    scales = rng.integers(power - 1, power + 1, (*outer, columns // 32), np.uint8)
    return blocks, scales


class GptOss(serving.Model):
    """gpt-oss; parameters by layer as `attention_of` and `experts_of` return them."""

    # H of the published models, 2880, is no multiple of 128, which fp8 would need.
    dispatch_format = "bf16"
    reference = "GptOssForCausalLM"
    decoder = "Mxfp4Config"

    @classmethod
    def random(cls, rng):
        size, inner = SMALL["hidden_size"], SMALL["intermediate_size"]
        experts, vocabulary = SMALL["num_local_experts"], SMALL["vocab_size"]
        heads, groups = SMALL["num_attention_heads"], SMALL["num_key_value_heads"]
        tensors = {"model.embed_tokens.weight": serving.normal(rng, vocabulary, size)}
        for layer in range(SMALL["num_hidden_layers"]):
            block = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{block}.{norm}.weight"] = serving.near_one(rng, size)
            counts = heads, groups, groups
            for name, count in zip(PROJECTIONS[:3], counts, strict=True):
                rows = count * SMALL["head_dim"]
                name = f"{block}.self_attn.{name}"
                tensors[f"{name}.weight"] = serving.normal(rng, rows, size)
                tensors[f"{name}.bias"] = serving.normal(rng, rows, fan_in=16)
            columns = heads * SMALL["head_dim"]
            name = f"{block}.self_attn.o_proj"
            tensors[f"{name}.weight"] = serving.normal(rng, size, columns)
            tensors[f"{name}.bias"] = serving.normal(rng, size, fan_in=16)
            tensors[f"{block}.self_attn.sinks"] = serving.normal(rng, heads, fan_in=1)
            tensors[f"{block}.mlp.router.weight"] = serving.normal(rng, experts, size)
            tensors[f"{block}.mlp.router.bias"] = serving.normal(rng, experts)
            for part, shape in (
                ("gate_up", (experts, 2 * inner, size)),
                ("down", (experts, size, inner)),
            ):
                name = f"{block}.mlp.experts.{part}_proj"
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes(
                    rng, *shape
                )
                tensors[f"{name}_bias"] = serving.normal(rng, *shape[:-1], fan_in=16)
        tensors["model.norm.weight"] = serving.near_one(rng, size)
        tensors["lm_head.weight"] = serving.normal(rng, vocabulary, size)
        # They take turns.
        kinds = ["sliding_attention", "full_attention"] * SMALL["num_hidden_layers"]
        return SMALL | {"layer_types": kinds[: SMALL["num_hidden_layers"]]}, tensors

    @property
    def num_experts(self):
        return self.config.num_local_experts

    def attention_of(self, tensors, layer):
        block = f"model.layers.{layer}.self_attn"
        params = {"sinks": self.vector(tensors, f"{block}.sinks")}
        for name in PROJECTIONS:
            params[name] = self.matrix(tensors, f"{block}.{name}")
            params[f"{name}_bias"] = self.vector(tensors, f"{block}.{name}.bias")
        return params

    def experts_of(self, tensors, layer):
        block = f"model.layers.{layer}.mlp"
        gate_up, down = (f"{block}.experts.{name}_proj" for name in ("gate_up", "down"))
        of_all = {
            "router": self.matrix(tensors, f"{block}.router"),
            "router_logit_bias": self.vector(tensors, f"{block}.router.bias"),
        }
        bias = tensors[f"{gate_up}_bias"]
        # Codes stay as they are; gate and up take turns in the checkpoint.
        quantized = checkpoints.quantized_weights(
            checkpoints.gate_up(tensors[f"{gate_up}_blocks"], interleaved=True),
            checkpoints.gate_up(tensors[f"{gate_up}_scales"], interleaved=True),
            checkpoints.transpose(tensors[f"{down}_blocks"]),
            checkpoints.transpose(tensors[f"{down}_scales"]),
        )
        experts = {
            "experts": quantized,
            "gate_bias": bias[:, ::2],
            "up_bias": bias[:, 1::2],
            "down_bias": tensors[f"{down}_bias"],
        }
        return of_all, experts

    def cache_shapes(self):
        """A key and a value per group of heads."""
        return ((self.config.num_key_value_heads, self.config.head_dim),) * 2

    def attend(self, layer, params, x, positions, cache):
        config = self.config

        def projected(name):
            y = x @ params[name] + params[f"{name}_bias"]
            return y.reshape(*x.shape[:2], -1, config.head_dim)

        turns = serving.rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        q = serving.rotate(projected("q_proj"), positions, *turns)
        key = serving.rotate(projected("k_proj"), positions, *turns)
        cache = serving.extended(cache, [key, projected("v_proj")], positions)
        slides = config.layer_types[layer] == "sliding_attention"
        keys, values = cache
        mixed = serving.attention(
            q,
            keys,
            values,
            positions,
            scale=config.head_dim**-0.5,
            window=config.sliding_window if slides else None,
            sinks=params["sinks"],
        )
        y = mixed.reshape(*x.shape[:2], -1) @ params["o_proj"]
        return y + params["o_proj_bias"], cache

    def feed(self, ep, params, rows):
        activation = jax_ep.experts.swiglu_clamped(
            alpha=1.702, limit=self.config.swiglu_limit
        )
        return jax_ep.moe_ffn(ep, rows, params, activation=activation)[0]


def main(arguments=None):
    return serving.main(GptOss, __doc__, arguments)


if __name__ == "__main__":
    # Only affects the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
