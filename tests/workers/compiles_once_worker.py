"""Calls programs twice and prints what the first and the second call compiled."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

ROOT = pathlib.Path(__file__).parents[2]
ON_GPUS = pathlib.Path("/proc/driver/nvidia/gpus").exists()
if not ON_GPUS:
    jax.config.update("jax_num_cpu_devices", 2)

COUNTED = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
compiled: list[str] = []
found: dict[str, Any] = {}


def note(event: str, _: float, **about: Any) -> None:
    if event in COUNTED:
        compiled.append(f"{event} {about.get('fun_name', '')}")


class NoFlax:
    """Makes imports of Flax fail, as if it were not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "flax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def during(call: Callable[[], Any]) -> list[str]:
    compiled.clear()
    jax.block_until_ready(call())
    return list(compiled)


def twice(name: str, call: Callable[[], Any]) -> None:
    found[name] = [during(call), during(call)]


def block_names(page: str, most: int | None = None) -> dict[str, Any]:
    """The names that a page's Python blocks define when run one after the other."""
    parts = (ROOT / page).read_text().split("```python\n")[1:]
    names: dict[str, Any] = {}
    exec("\n".join(part.split("```")[0] for part in parts[:most]), names)
    return names


def calls_of_ranks() -> None:
    """dispatch and combine: whole, in halves, with gradients and on global arrays."""
    import jax_ep

    ranks = min(2, jax.device_count())
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(AxisType.Auto,))
    config = jax_ep.EPConfig(
        num_experts=4, top_k=2, hidden_size=128, max_tokens_per_rank=8, pending_calls=1
    )
    ep = jax_ep.init(mesh, "ep", config)
    rng = np.random.default_rng(0)
    n = 8 * ranks
    tokens = jnp.asarray(rng.standard_normal((n, 128)), jnp.bfloat16)
    ids = jnp.asarray(rng.integers(0, 4, (n, 2)), jnp.int32)
    weights = jnp.full((n, 2), 0.5)

    def on_ranks(body: Callable[..., Any]) -> Callable[..., Any]:
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jax.jit(mapped)

    @on_ranks
    def exchange(tokens: Any, ids: Any, weights: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids, weights)
        return jax_ep.combine(ep, d.tokens, d.route, d.router_weights)

    @on_ranks
    def halves(tokens: Any, ids: Any, weights: Any) -> Any:
        d = jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, tokens, ids, weights))
        sent = jax_ep.combine_async(ep, d.tokens, d.route, d.router_weights)
        return jax_ep.combine_wait(sent)

    @jax.jit
    @jax.grad
    def gradient(tokens: Any) -> Any:
        return halves(tokens, ids, weights).astype(jnp.float32).sum()

    def sharded() -> Any:
        d = jax_ep.sharded.dispatch(ep, tokens, ids, weights)
        return jax_ep.sharded.combine(ep, d.tokens, d.route, d.router_weights)

    twice("exchange", lambda: exchange(tokens, ids, weights))
    twice("halves", lambda: halves(tokens, ids, weights))
    twice("gradient", lambda: gradient(tokens))
    twice("sharded", sharded)
    masters = jnp.ones((2, 128, 2, 128)), jnp.ones((2, 128, 128))
    twice("weights", lambda: jax_ep.experts.quantize_weights(*masters, "mxfp4"))


def programs_of_pages() -> None:
    """README's programs and the step of docs/start.md (moe_ffn, gradients, stats)."""
    names = block_names("README.md")
    operands = ("tokens", "topk_ids", "router_weights", "gate_up", "down")
    call = functools.partial(names["moe"], *(names[name] for name in operands))
    found["README.md"] = [["run above"], during(call)]
    names = block_names("docs/start.md")
    operands = ("params", "load", "tokens", "targets")
    call = functools.partial(names["step"], *(names[name] for name in operands))
    found["docs/start.md"] = [["run above"], during(call)]


@jax.jit
def bystander(x: jax.Array) -> jax.Array:
    """Uses nothing of jax_ep."""
    return x * 2


def main() -> None:
    sys.meta_path.insert(0, NoFlax())
    jax.monitoring.register_event_duration_secs_listener(note)
    call = functools.partial(bystander, np.ones(4, np.float32))
    first = during(call)
    calls_of_ranks()
    programs_of_pages()
    found["bystander"] = [first, during(call)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
