"""Checks of what `moe_ffn`, and the layers around it, are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import router as routers
from jax_ep._core import checks
from jax_ep._core.arrays import as_array
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle


def _require(holds: bool, what: str, got: Any, remedy: str) -> None:
    if not holds:
        raise ValueError(f"jax_ep.moe_ffn: {what}, got {got}; {remedy}")


def require_type(
    function: str, name: str, value: Any, kinds: Any, what: str, remedy: str
) -> None:
    """Raises TypeError unless `value` is None or of `kinds`."""
    if value is not None and not isinstance(value, kinds):
        raise TypeError(
            f"jax_ep.{function}: {name} must be {what}, got {value!r}; {remedy}"
        )


def require_choices(function: str, router: Any, experts: Any) -> None:
    """Raises unless router and experts are what a layer can use."""
    require_type(
        function,
        "router",
        router,
        routers.Router,
        "a jax_ep.router.Router",
        "leave it out for softmax top-k",
    )
    require_type(
        function,
        "experts",
        experts,
        Callable,
        "a function of rows, gate_up, down and group_sizes",
        "jax_ep.experts has some",
    )
    if isinstance(experts, type):
        raise TypeError(
            f"jax_ep.{function}: experts must be a function, got the class "
            f"{experts.__name__}; make one of it, as jax_ep.experts.Padded(largest)"
        )


def require_mode(function: str, config: EPConfig) -> None:
    """Raises unless a layer can have results of the kind that `config` gives."""
    if config.reduce != "rank":
        raise ValueError(
            f'jax_ep.{function}: the config must have reduce="rank", got '
            f"{config.reduce!r}; call dispatch and combine yourself for the others"
        )
    if config.skip_a2a:
        raise ValueError(
            f"jax_ep.{function}: the config must not have skip_a2a, got True; call "
            "dispatch and combine yourself and sum over the ranks"
        )


def require_handle(function: str, ep: Any) -> None:
    """Raises unless `ep` is a handle; it may be closed until a layer is called."""
    what, remedy = "what jax_ep.init returned", "leave it out to share one"
    require_type(function, "ep", ep, EPHandle, what, remedy)


def check_choices(
    ep: EPHandle,
    router: Any,
    routing: Any,
    mask: Any,
    batch_axes: Any,
    experts: Any,
) -> None:
    """Raises unless the options are what their docstring says, and fit together."""
    require_choices("moe_ffn", router, experts)
    require_type(
        "moe_ffn",
        "routing",
        routing,
        routers.Routing,
        "a jax_ep.router.Routing",
        "jax_ep.router.route makes one",
    )
    for name, value in (("router", router), ("mask", mask)):
        _require(
            routing is None or value is None,
            f"{name} must be None with routing",
            f"a {type(value).__name__}",
            "apply it where the routing is made",
        )
    known = tuple(name for name in ep.mesh.axis_names if checks.in_scope((name,)))
    names = isinstance(batch_axes, Sequence) and not isinstance(batch_axes, str)
    _require(
        batch_axes is None or (names and set(batch_axes) <= set(known)),
        f"batch_axes must be a sequence of manual axes of the call, of {known}",
        repr(batch_axes),
        "leave it out for all of them",
    )


def checked_mask(function: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """`mask` as an array of bool, one a token."""
    array = as_array(function, "mask", mask)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"jax_ep.{function}: mask must be bool, got {array.dtype}; give one bool a "
            "token"
        )
    remedy = "give one bool a token"
    checks.require_shape(function, "mask", array, shape, "the tokens' one", remedy)
    return array


def checked_residual(ep: EPHandle, residual: Any, tokens: jax.Array) -> jax.Array:
    """`residual` as an array like `tokens`: what is added to it casts or repeats it."""
    array = as_array("moe_ffn", "residual", residual)
    checks.require_dtype("moe_ffn", "residual", array, ep.config.dtype)
    remedy = "pass a row for each token"
    checks.require_shape(
        "moe_ffn", "residual", array, tokens.shape, "the tokens' one", remedy
    )
    return array


def _remedy_of_weights(gate_up: tuple[int, ...], local: int, tp: str | None) -> str:
    sharded = "shard dimension 0 over the EP axes"
    if len(gate_up) != 3 or gate_up[-1] % 2:
        return sharded
    # Of halves side by side an axis would take a part of the whole row.
    first = f", before {tp!r} splits it" if tp else ""
    remedy = f"reshape gate_up of [L, H, 2F] to [L, H, 2, F], gate first{first}"
    return remedy if gate_up[0] == local else f"{remedy}, and {sharded}"


_BIASES = ("gate_bias", "up_bias", "down_bias")


def require_keywords(experts: Any, options: Mapping[str, Any]) -> None:
    """Raises TypeError unless `experts` take these keywords."""
    try:
        taken = inspect.signature(experts).parameters
    except (TypeError, ValueError):  # of what is not written in Python
        return
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return
    lacking = [name for name in options if name not in taken]
    if lacking:
        name = getattr(experts, "__name__", type(experts).__name__)
        raise TypeError(
            f"jax_ep.moe_ffn: experts must take the keywords {list(options)}, got "
            f"{name} without {lacking}; add them to it, or leave them out here"
        )


def checked_params(
    ep: EPHandle,
    tokens: jax.Array,
    params: Mapping[str, Any],
    routing: routers.Routing | None,
    tp_axis: str | None,
) -> Mapping[str, Any]:
    """`params` with the shapes that `ep` wants, "gate" and "up" as "gate_up"."""
    if not isinstance(params, Mapping):
        raise TypeError(
            "jax_ep.moe_ffn: params must be a mapping of names to arrays, got "
            f"{type(params).__name__}; its docstring names them"
        )
    params = _joined(params)
    needed = {"gate_up", "down"} | ({"router"} if routing is None else set())
    shared = {"shared_gate_up", "shared_down"}
    known = needed | shared | {"router", "router_bias", *_BIASES}
    names = set(params)
    _require(
        needed <= names <= known,
        f"params must have {sorted(needed)} and nothing besides {sorted(known)}",
        sorted(names),
        "rename or remove entries",
    )
    for name, value in params.items():
        as_array("moe_ffn", f"params[{name!r}]", value)
    _require(
        ("shared_gate_up" in names) == ("shared_down" in names),
        "shared_gate_up and shared_down must come together",
        sorted(names),
        "give both or none",
    )
    _require(
        tp_axis is None
        or (tp_axis in ep.mesh.axis_names and tp_axis not in ep.axis_names),
        f"tp_axis must be an axis of the mesh outside of {ep.axis_names}",
        repr(tp_axis),
        "leave it out where experts are whole",
    )
    require_mode("moe_ffn", ep.config)
    most = ep.config.max_tokens_per_rank
    _require(
        tokens.ndim != 2 or tokens.shape[0] <= most,
        f"tokens must be at most max_tokens_per_rank = {most} per rank",
        tokens.shape[0],
        "init ep with a larger max_tokens_per_rank, or pass fewer tokens",
    )
    checks.require_dtype("moe_ffn", "tokens", tokens, ep.config.dtype)
    hidden, local = ep.config.hidden_size, ep.local_experts
    inner = jnp.shape(params["down"])[1:2]
    _require(
        jnp.shape(params["gate_up"]) == (local, hidden, 2, *inner)
        and jnp.shape(params["down"]) == (local, *inner, hidden),
        "gate_up and down must be [L, H, 2, F] and [L, F, H] of this rank's "
        f"{local} experts with H {hidden}",
        f"{jnp.shape(params['gate_up'])} and {jnp.shape(params['down'])}",
        _remedy_of_weights(jnp.shape(params["gate_up"]), local, tp_axis),
    )
    for name in _BIASES:
        wanted = (local, hidden) if name == "down_bias" else (local, *inner)
        found = jnp.shape(params[name]) if name in names else wanted
        _require(
            found == wanted,
            f"{name} must be {wanted}, of this rank's {local} experts",
            found,
            "shard dimension 0 over the EP axes",
        )
    if ep.config.fused_shared_expert:
        both = [params.get("shared_gate_up"), params.get("shared_down")]
        found = [None if each is None else jnp.shape(each) for each in both]
        _require(
            found == [(hidden, 2, *inner), (*inner, hidden)],
            "with fused_shared_expert shared_gate_up and shared_down must be [H, 2, F] "
            "and [F, H], as a routed expert's",
            found,
            "give them, or leave fused_shared_expert out",
        )
    elif "shared_down" in names:
        found = [jnp.shape(params[name]) for name in ("shared_gate_up", "shared_down")]
        inner = found[1][:1]
        _require(
            found == [(hidden, 2, *inner), (*inner, hidden)],
            f"shared_gate_up and shared_down must be [H, 2, S] and [S, H] with H "
            f"{hidden}",
            found,
            "every rank holds all of both, a tp_axis its part of S",
        )
    if routing is None and "router_bias" in names:
        wanted = (ep.config.num_experts,)
        _require(
            jnp.shape(params["router_bias"]) == wanted,
            f"router_bias must be [E] = {wanted}",
            jnp.shape(params["router_bias"]),
            "every rank holds all of it",
        )
    if routing is None:
        _require(
            jnp.shape(params["router"]) == (hidden, ep.config.num_experts),
            f"router must be [H, E] = {(hidden, ep.config.num_experts)}",
            jnp.shape(params["router"]),
            "every rank holds all of it",
        )
        _require(
            tokens.ndim == 2 and tokens.shape[1] == hidden,
            f"tokens must be [n, H] with H {hidden}",
            tokens.shape,
            "reshape them",
        )
    return params


def _joined(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """`params` with "gate" and "up", where they are given, as "gate_up"."""
    given = [name for name in ("gate", "up") if name in params]
    if not given:
        return params
    _require(
        len(given) == 2 and "gate_up" not in params,
        'gate and up must come together, in place of "gate_up"',
        sorted(params),
        "give both, or gate_up alone",
    )
    gate, up = (as_array("moe_ffn", f"params[{n!r}]", params[n]) for n in given)
    _require(
        gate.ndim == 3 and gate.shape == up.shape,
        "gate and up must be [L, H, F] both",
        f"{gate.shape} and {up.shape}",
        "transpose them if F comes first",
    )
    rest = {name: value for name, value in params.items() if name not in given}
    return rest | {"gate_up": jnp.stack([gate, up], axis=2)}
