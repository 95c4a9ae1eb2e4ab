"""The router of `moe_ffn`: logits, a `Router` or the user's function, and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import router as routers
from jax_ep._core import calls, errors, operands
from jax_ep._core.handle import EPHandle
from jax_ep._core.operands import Operand
from jax_ep._core.varying import vary_alike, varying
from jax_ep._layers import moe_checks
from jax_ep._layers.logits import logits_of


def routed(
    ep: EPHandle,
    tokens: jax.Array,
    params: Mapping[str, Any],
    router: routers.Router | routers.RouterFunction | None,
    mask: jax.Array | None,
    topk_ids: Any = None,
) -> routers.Routing:
    """Returns the decision of `router` for the tokens of one rank.

    With `topk_ids`, the router is not the user's function.
    """
    top_k, device = ep.config.top_k, ep.mesh.local_devices[0]
    if mask is not None:
        # NaN in padding times a zero cotangent would be NaN in the kernel's gradient.
        tokens = jnp.where(mask[:, None], tokens, 0)
    logits = logits_of(tokens, params["router"], device)
    if "router_logit_bias" in params:
        own = jnp.asarray(params["router_logit_bias"], jnp.float32)
        # Gradients are summed over ranks for [E], not for [n, E].
        (own,) = vary_alike(ep.mesh.axis_names, varying(logits), own)
        logits = logits + own
    bias = params.get("router_bias")
    if router is None or isinstance(router, routers.Router):
        given = {"bias": bias, "mask": mask, "topk_ids": topk_ids}
        return routers.route(logits, top_k, router, **given)
    values = tokens, top_k, mask, bias
    given: dict[str, Any] = dict(zip(moe_checks.ROUTER_KEYWORDS, values, strict=True))
    taken = moe_checks.keywords(router, [*given])
    if bias is not None and "bias" not in taken:
        raise errors.invalid(
            "moe_ffn",
            "router must take the keyword bias where there is a router_bias",
            f"{calls.name_of(router)} without it",
            "add it to the function, or leave router_bias out",
            operand="router",
            kind=TypeError,
        )
    found = router(logits, **{name: given[name] for name in taken})
    return _masked(_checked(router, found, logits, top_k), mask)


def _of_ids(dtype: Any) -> str | None:
    floats = jnp.issubdtype(dtype, jnp.floating)
    return f"return {operands.SWAPPED}" if floats else None


_ROWS = "return one row per token and top_k experts in each"
_RESULTS = (
    Operand("ids of router", "[n, K]", operands.IDS, _ROWS, _of_ids),
    Operand("weights of router", "[n, K]", operands.FLOATS, _ROWS),
    *(
        Operand(f"{name} of router", shape, operands.FLOATS, "reduce or reshape it")
        for name, shape in (("logits", "[n, E]"), ("probabilities", "[n, E]"))
    ),
    Operand(
        "loss of router", "[]", operands.FLOATS, "reduce it to a sum", optional=True
    ),
)


_FIELDS = tuple(field.name for field in dataclasses.fields(routers.Routing))


def _checked(
    router: routers.RouterFunction, found: Any, logits: jax.Array, top_k: int
) -> routers.Routing:
    """Returns the result of the user's function as a `Routing`."""
    if isinstance(found, tuple) and len(found) in (2, 3):
        ids, weights, *loss = found
        soft = jax.nn.softmax(logits)
        found = routers.Routing(ids, weights, logits, soft, loss[0] if loss else None)
    if not isinstance(found, routers.Routing):
        raise _wrong(
            "router must return (ids, weights), (ids, weights, loss) or a "
            "jax_ep.router.Routing",
            f"{_described(found)} from {calls.name_of(router)}",
            "return one of these",
            TypeError,
        )
    given = {f"{name} of router": getattr(found, name) for name in _FIELDS}
    sizes = {"n": logits.shape[0], "K": (top_k, "top_k"), "E": logits.shape[1]}
    arrays = operands.checked("moe_ffn", _RESULTS, given, sizes)
    ids, *floats = arrays.values()
    return routers.Routing(ids, *(each.astype(jnp.float32) for each in floats))


def _described(found: Any) -> str:
    kind = type(found).__name__
    return f"a {kind} of {len(found)}" if isinstance(found, tuple) else f"a {kind}"


def _wrong(
    rule: str, value: Any, remedy: str, kind: type[Exception] = ValueError
) -> Exception:
    return errors.invalid("moe_ffn", rule, value, remedy, operand="router", kind=kind)


def _masked(routing: routers.Routing, mask: jax.Array | None) -> routers.Routing:
    """Sends masked tokens to no expert, whatever the router returned for them."""
    if mask is None:
        return routing
    real = mask[:, None]
    even = 1 / routing.probabilities.shape[-1]
    return routers.Routing(
        jnp.where(real, routing.ids, -1),
        jnp.where(real, routing.weights, 0.0),
        jnp.where(real, routing.logits, 0.0),
        jnp.where(real, routing.probabilities, even),
        routing.loss,
    )
