"""The calls of a p2p handle follow each other, like in test_chain.py, with options."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe_dense, moe_ffn, options
from support.call_order import (
    TOKEN_INDEX,
    afters,
    calls,
    chain,
    layer,
    lowered,
    p2p_handle,
    split_layer,
    square,
)
from support.gpus import needs_stream


@pytest.fixture
def mesh():
    if jax.default_backend() != "cpu":
        # p2p's native module is replaced; on GPUs test_p2p*.py runs the real one.
        pytest.skip("fakes p2p on CPU devices")
    return helpers.make_mesh(2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_halves(mesh, check_vma: bool) -> None:
    """Two calls in flight around whole calls, and their gradients."""
    ep = p2p_handle(mesh)

    def run(x: Any, ids: Any) -> Any:
        first, second = (jax_ep.dispatch_async(ep, x, i) for i in (ids, ids + 1))
        y = layer(ep, x, ids)
        d, e = map(jax_ep.dispatch_wait, (second, first))
        back = [jax_ep.combine_async(ep, each.tokens, each.route) for each in (d, e)]
        return square(y) + sum(square(jax_ep.combine_wait(b)) for b in back)

    def body(x: Any, ids: Any) -> Any:
        return jax.grad(run)(x, ids) + split_layer(ep, x, ids)

    text = lowered(mesh, body, check_vma=check_vma)
    found = [call.target for call in calls(text)]
    assert set(found) == set(TOKEN_INDEX)
    forward = ["ep_dispatch_send"] * 2 + ["ep_dispatch", "ep_combine"]
    forward += ["ep_dispatch_recv"] * 2 + ["ep_combine_send"] * 2
    assert found[:8] == forward
    assert afters(text) == chain(len(found))


def test_copied_halves(mesh) -> None:
    """Halves that XLA exchanges are outside of the chain of all other calls."""
    ep = p2p_handle(mesh, overlap="copy")

    def run(x: Any, ids: Any) -> Any:
        pending = jax_ep.dispatch_async(ep, x, ids)
        y = layer(ep, x, ids)
        d = jax_ep.dispatch_wait(pending)
        back = jax_ep.combine_async(ep, d.tokens, d.route)
        return square(y) + square(jax_ep.combine_wait(back))

    whole = lowered(mesh, jax.grad(run))
    named = r"custom_call @(ep_\w+)\("
    others = set(re.findall(named, whole)) - set(TOKEN_INDEX)
    assert others == {
        "ep_dispatch_pack",
        "ep_dispatch_unpack",
        "ep_combine_pack",
        "ep_combine_unpack",
    }
    assert whole.count('"stablehlo.all_to_all"') == 2
    text = "\n".join(
        line for line in whole.splitlines() if not set(re.findall(named, line)) & others
    )
    found = [call.target for call in calls(text)]
    # All backward calls go through the windows.
    assert found[:2] == ["ep_dispatch", "ep_combine"]
    assert sorted(found[2:]) == ["ep_combine"] * 2 + ["ep_dispatch_cached"] * 2
    assert afters(text) == chain(len(found))


_LINE = re.compile(r"\s*(%\w+)(?::\d+)? = ([\w.]+)(?: @(\w+))?[ (]([^:{)]*)")


def made_by(text: str) -> list[tuple[str, str | None]]:
    """Each ep_* call, or function with one, and the one its last operand comes from."""
    lines = {}
    for line in text.partition("func.func private")[0].splitlines():
        if match := _LINE.match(line):
            lines[match[1]] = (match[3], re.findall(r"%[\w#]+", match[4]))
    found: list[tuple[str, str | None]] = []
    for target, operands in lines.values():
        if not (target or "").startswith(("ep_", "compute_on")):
            continue
        (name, _, index), before = operands[-1].partition("#"), None
        while before is None and name in lines and lines[name][1]:
            source, from_what = lines[name]
            before = source if source != "annotate_device_placement" else None
            # For a barrier, the operand with this result's index.
            which = int(index or 0) if len(from_what) > 1 else 0
            if before is None:
                name, _, index = from_what[which].partition("#")
        found.append((target, before))
    return found


@needs_stream
@pytest.mark.parametrize("check_vma", [True, False])
def test_halves_on_a_stream(mesh, check_vma: bool) -> None:
    """Only first halves are on the stream, but they are in the chain like all calls."""
    ep = p2p_handle(mesh, overlap="stream")

    def body(x: Any, ids: Any) -> Any:
        return jax.grad(lambda x: square(split_layer(ep, x, ids)))(x)

    text = lowered(mesh, body, check_vma=check_vma)
    found = made_by(text)
    targets = ["compute_on", "ep_dispatch_recv", "compute_on_0", "ep_combine_recv"]
    targets += ["ep_dispatch_cached", "ep_combine"]
    assert [target for target, _ in found] == targets
    assert [before for _, before in found] == [None, *targets[:-1]]
    apart = re.findall(r"func.func private @(compute_on\w*)\(.*?\n.*?@(ep_\w+)\(", text)
    assert apart == [
        ("compute_on", "ep_dispatch_send_on_stream"),
        ("compute_on_0", "ep_combine_send_on_stream"),
    ]


@needs_stream
def test_what_is_beside_a_stream_needs_nothing_of_it(mesh) -> None:
    """XLA slices an array as early as it can, and the work must not wait for that."""
    ep = p2p_handle(mesh, overlap="stream")

    def run(x: Any, ids: Any) -> Any:
        pending, y = jax_ep.dispatch_async(ep, x, ids), jnp.sin(x)
        pending, y = jax.lax.optimization_barrier((pending, y))
        d = jax_ep.dispatch_wait(pending)
        back, z = jax_ep.combine_async(ep, d.tokens, d.route), jnp.cos(y)
        back, z = jax.lax.optimization_barrier((back, z))
        return jax_ep.combine_wait(back) + z

    text = lowered(mesh, run).partition("func.func private")[0]
    pattern = r"stablehlo\.(?:custom_call @)?(slice|sine|cosine|optim\w+|ep_\w+)\b"
    order = re.findall(pattern, text)
    cut = ["slice"] * order.count("slice")
    assert cut
    assert order == [
        *("sine", "optimization_barrier", *cut),
        *("ep_dispatch_recv", "optimization_barrier", "cosine"),
        *("optimization_barrier", "ep_combine_recv", "optimization_barrier"),
    ]
    packed = {match[1] for match in re.finditer(r"(%\d+) = func.call @comp", text)}
    placed = re.findall(r"(%\d+) = .*@annotate_device_placement\((%\d+)\)", text)
    wanted = [out for out, of in placed if of in packed]
    found = re.findall(r"@ep_\w+_recv\(.*?(%\d+)\)", text)
    assert len(wanted) == 2
    assert found == wanted  # the whole array that the call comes after


@pytest.mark.few(3)
@pytest.mark.parametrize("one", [layer, split_layer])
@pytest.mark.parametrize("mode", options.MODES)
def test_options(mesh, mode: str, one: Any) -> None:
    """Every mode and its gradients are one chain, unless nothing is exchanged."""
    ep = p2p_handle(mesh, **options.MODES[mode])

    def body(x: Any, ids: Any) -> Any:
        gradient = jax.grad(lambda x: square(one(ep, x, ids)) + square(one(ep, x, ids)))
        return gradient(x)

    text = lowered(mesh, body)
    if ep.config.skip_a2a:
        assert "ep_dispatch_pack" in text
        assert not set(TOKEN_INDEX) & set(re.findall(r"@(ep_\w+)\(", text))
        return
    assert len(calls(text)) == (8 if one is layer else 12)
    assert afters(text) == chain(len(calls(text)))


@needs_stream
@pytest.mark.parametrize("check_vma", [True, False])
def test_chunks_on_a_stream(mesh, check_vma: bool) -> None:
    """A chunk's combine comes after the next one's first half, whose token is wider."""
    ep = p2p_handle(mesh, overlap="stream", max_tokens_per_rank=4)
    config = ep.config
    sizes = {"experts": config.num_experts, "hidden": config.hidden_size}
    params = moe_dense.params(shared=False, **sizes)
    specs = moe_ffn.param_specs(params, None)

    def body(params: Any, x: Any) -> Any:
        return jax_ep.moe_ffn(ep, x, params, chunks=2)[0]

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, P("ep")),
        out_specs=P("ep"),
        check_vma=check_vma,
    )
    grad = jax.jit(jax.grad(lambda params, x: square(run(params, x))))
    x = jnp.zeros((2 * 2 * 4, config.hidden_size), config.dtype)
    text = grad.trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"@(ep_\w+_on_stream)\(", text)) == {
        "ep_dispatch_send_on_stream"
    }
    # Before and in both loops.
    assert text.count("@ep_dispatch_recv") == 4
    found = re.findall(r"@(ep_combine|ep_dispatch_cached)\(.*? : \((.*?)\) ->", text)
    tokens = [(name, types.split(", ")[-1]) for name, types in found]
    (_, wide), *_ = tokens
    assert re.fullmatch(r"tensor<1x\d+xi32>", wide)
    assert tokens == [
        ("ep_combine", wide),
        ("ep_dispatch_cached", wide),
        ("ep_combine", "tensor<1xi32>"),
    ]
    # The backward pass is a program of its own, without a token of the forward one. It
    # begins after its cotangents, as a constant token would not let it.
    starts = re.findall(r"func\.call @compute_on\w*\((.*?)\)", text)
    (_, _, backward, _) = [operands.split(", ")[-1] for operands in starts]
    barrier = backward.partition("#")[0] + r":\d+ = stablehlo\.optimization_barrier"
    assert re.search(barrier, text)
