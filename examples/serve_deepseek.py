"""Serves DeepSeek-V3 from its checkpoint, with experts' weights as its fp8 codes.

    python examples/serve_deepseek.py                     a small one of random weights
    python examples/serve_deepseek.py --folder DeepSeek-V3 --no-compare
    python examples/serve_deepseek.py --dtype float32     to compare more closely

The whole model is here and in serving.py: multi-head latent attention, whose cache has
one latent vector per token, dense layers, and layers with a shared expert and experts
that are split over all devices, 8 virtual CPU devices or GPUs. Tokens travel to their
experts in fp8. Other matrices, in fp8 as well, are decoded when they are loaded.
Prompts are random tokens of one length. The command prints tokens per second of prefill
and of decode, and how far the logits are from those of transformers for the same
folder, if torch, transformers and accelerate are installed. These do not quantise rows,
so results differ by some percent.
"""

import sys

import serving  # before JAX starts its backend  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep import checkpoints

PARTS = ("gate_proj", "up_proj", "down_proj")
# As config.json of the published model has it, with smaller sizes.
SMALL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 384,
    "kv_lora_rank": 128,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 128,
    "n_group": 4,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 64,
    "vocab_size": 512,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


def codes(rng, rows, columns):
    """Draws a weight `[out, in]` in fp8, and a scale per 128 x 128 elements."""
    values = (64 * rng.standard_normal((rows, columns))).astype(jnp.float8_e4m3fn)
    blocks = -(-rows // 128), -(-columns // 128)
    return values, rng.uniform(0.5, 1.5, blocks).astype(np.float32) * columns**-0.5 / 64


class DeepSeek(serving.Model):
    """DeepSeek-V3, without the layer that predicts one token more."""

    dispatch_format = "fp8_block128"
    # Weights are decoded here, because transformers 5.24 takes a smaller last block for
    # one as large as the others.
    reference = "DeepseekV3ForCausalLM"

    @classmethod
    def random(cls, rng):
        size, vocabulary = SMALL["hidden_size"], SMALL["vocab_size"]
        experts, heads = SMALL["n_routed_experts"], SMALL["num_attention_heads"]
        nope, rope = SMALL["qk_nope_head_dim"], SMALL["qk_rope_head_dim"]
        value, latent = SMALL["v_head_dim"], SMALL["kv_lora_rank"]
        query, inner = SMALL["q_lora_rank"], SMALL["moe_intermediate_size"]
        tensors = {"model.embed_tokens.weight": serving.normal(rng, vocabulary, size)}

        def quantized(name, rows, columns):
            weight = f"{name}.weight"
            tensors[weight], tensors[f"{weight}_scale_inv"] = codes(rng, rows, columns)

        def mlp(name, inner):
            for part in PARTS:
                shape = (size, inner) if part == "down_proj" else (inner, size)
                quantized(f"{name}.{part}", *shape)

        for layer in range(SMALL["num_hidden_layers"]):
            block = f"model.layers.{layer}"
            quantized(f"{block}.self_attn.q_a_proj", query, size)
            quantized(f"{block}.self_attn.q_b_proj", heads * (nope + rope), query)
            quantized(f"{block}.self_attn.kv_a_proj_with_mqa", latent + rope, size)
            quantized(f"{block}.self_attn.kv_b_proj", heads * (nope + value), latent)
            quantized(f"{block}.self_attn.o_proj", size, heads * value)
            for norm, width in (
                ("input_layernorm", size),
                ("post_attention_layernorm", size),
                ("self_attn.q_a_layernorm", query),
                ("self_attn.kv_a_layernorm", latent),
            ):
                tensors[f"{block}.{norm}.weight"] = serving.near_one(rng, width)
            if layer < SMALL["first_k_dense_replace"]:
                mlp(f"{block}.mlp", SMALL["intermediate_size"])
                continue
            gate = f"{block}.mlp.gate"
            tensors[f"{gate}.weight"] = serving.normal(rng, experts, size)
            bias = rng.uniform(-0.2, 0.2, experts).astype(np.float32)
            tensors[f"{gate}.e_score_correction_bias"] = bias
            for expert in range(experts):
                mlp(f"{block}.mlp.experts.{expert}", inner)
            shared = SMALL["n_shared_experts"] * inner
            mlp(f"{block}.mlp.shared_experts", shared)
        tensors["model.norm.weight"] = serving.near_one(rng, size)
        tensors["lm_head.weight"] = serving.normal(rng, vocabulary, size)
        return dict(SMALL), tensors

    @property
    def num_experts(self):
        return self.config.n_routed_experts

    @property
    def scaling(self):
        """What config.json says of YaRN, if anything."""
        return getattr(self.config, "rope_scaling", None)

    def attention_of(self, tensors, layer):
        config, block = self.config, f"model.layers.{layer}.self_attn"
        names = ["kv_a_proj_with_mqa", "o_proj"]
        names += ["q_proj"] if config.q_lora_rank is None else ["q_a_proj", "q_b_proj"]
        params = {name: self.matrix(tensors, f"{block}.{name}") for name in names}
        norms = ["kv_a_layernorm"]
        norms += [] if config.q_lora_rank is None else ["q_a_layernorm"]
        for name in norms:
            params[name] = self.vector(tensors, f"{block}.{name}.weight")
        # Keys and values of all heads from the latent vector: [heads, each, latent].
        both = self.matrix(tensors, f"{block}.kv_b_proj").T
        both = both.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        params["to_keys"] = both[:, : config.qk_nope_head_dim]
        params["to_values"] = both[:, config.qk_nope_head_dim :]
        return params

    def experts_of(self, tensors, layer):
        block = f"model.layers.{layer}.mlp"

        def mlp(name):
            return [self.matrix(tensors, f"{name}.{part}") for part in PARTS]

        if layer < self.config.first_k_dense_replace:
            return dict(zip(("gate", "up", "down"), mlp(block), strict=True)), {}
        gate, up, down = mlp(f"{block}.shared_experts")
        bias = tensors[f"{block}.gate.e_score_correction_bias"]
        of_all = {
            "router": tensors[f"{block}.gate.weight"].T,
            "router_bias": bias.astype(np.float32),
            "shared_gate_up": np.stack([gate, up], axis=1),
            "shared_down": down,
        }

        def stacks(kind):
            names = (f"{block}.experts.{{}}.{part}.{kind}" for part in PARTS)
            gate, up, down = (checkpoints.stack(tensors, name) for name in names)
            return checkpoints.pair(gate, up), down

        # Codes stay as they are.
        quantized = checkpoints.quantized_weights(
            *(
                each
                for both in zip(
                    stacks("weight"), stacks("weight_scale_inv"), strict=True
                )
                for each in both
            )
        )
        return of_all, {"experts": quantized}

    def cache_shapes(self):
        """The latent vector, of which each head makes a key and a value, and a key."""
        return ((1, self.config.kv_lora_rank + self.config.qk_rope_head_dim),)

    def attend(self, layer, params, x, positions, cache):
        del layer  # all are alike
        config, scaling = self.config, self.scaling
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        latent, epsilon = config.kv_lora_rank, config.rms_norm_eps
        turns = serving.rotary(rope, config.rope_theta, scaling)
        if config.q_lora_rank is None:
            q = x @ params["q_proj"]
        else:
            q = serving.rms_norm(
                x @ params["q_a_proj"], params["q_a_layernorm"], epsilon
            )
            q = q @ params["q_b_proj"]
        q = q.reshape(*x.shape[:2], config.num_attention_heads, nope + rope)
        rotated = serving.rotate(q[..., nope:], positions, *turns, interleaved=True)
        # A product with the key that a head makes of a latent vector is one of the
        # latent vector with this. So keys are never made, and heads share a cache.
        q = jnp.einsum("bthn,hnc->bthc", q[..., :nope], params["to_keys"])
        q = jnp.concatenate([q, rotated], -1)
        new = (x @ params["kv_a_proj_with_mqa"])[:, :, None]
        key = serving.rotate(new[..., latent:], positions, *turns, interleaved=True)
        new = serving.rms_norm(new[..., :latent], params["kv_a_layernorm"], epsilon)
        new = jnp.concatenate([new, key], -1)
        cache = serving.extended(cache, [new], positions)
        (keys,) = cache
        scale = (nope + rope) ** -0.5
        if scaling and scaling.get("mscale_all_dim"):
            grown = serving.logarithmic(scaling["factor"], scaling["mscale_all_dim"])
            scale *= grown**2
        values = keys[..., :latent]
        mixed = serving.attention(q, keys, values, positions, scale=scale)
        mixed = jnp.einsum("bthc,hvc->bthv", mixed, params["to_values"])
        return mixed.reshape(*x.shape[:2], -1) @ params["o_proj"], cache

    def feed(self, ep, params, rows):
        if "router" not in params:
            inner = jax.nn.silu(rows @ params["gate"]) * (rows @ params["up"])
            return inner @ params["down"]
        router = jax_ep.router.Router(
            score="sigmoid",
            normalize=self.config.norm_topk_prob,
            scale=self.config.routed_scaling_factor,
            num_groups=self.config.n_group,
            top_groups=self.config.topk_group,
        )
        return jax_ep.moe_ffn(ep, rows, params, router=router)[0]


def main(arguments=None):
    return serving.main(DeepSeek, __doc__, arguments)


if __name__ == "__main__":
    # Only affects the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
