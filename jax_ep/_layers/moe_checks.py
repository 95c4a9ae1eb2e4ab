"""Checks the arguments of `moe_ffn` and of the layers around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import placement as placements
from jax_ep import router as routers
from jax_ep._core import calls, checks, errors, operands
from jax_ep._core.arrays import as_array
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.operands import Operand
from jax_ep._core.varying import varying
from jax_ep._experts import orders
from jax_ep._experts.interface import Experts, of
from jax_ep._experts.quantized import QuantizedWeights

_require = partial(errors.require, function="moe_ffn")

# What functions of the user's get by keyword, if they take it.
ROUTER_KEYWORDS = ("tokens", "top_k", "mask", "bias")
_BIASES = ("gate_bias", "up_bias", "down_bias")
_ROUTER_BIASES = ("router_bias", "router_logit_bias")
_EXPERTS_KEYWORDS = (*_BIASES, "activation", "quantized")


def require_type(
    function: str, name: str, value: Any, kinds: Any, what: str, remedy: str
) -> None:
    """Raises TypeError unless `value` is None or of `kinds`."""
    if value is not None:
        errors.require_type(function, name, value, kinds, what, remedy)


def require_hashable(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless `value`, a function that a layer keeps, is hashable."""
    try:
        hash(value)
    except TypeError as error:
        raise errors.invalid(
            function,
            f"{name} must be hashable, because compiled programs are cached by it",
            f"a {type(value).__name__}",
            "pass a function or a frozen dataclass",
            kind=TypeError,
        ) from error


def require_choices(function: str, router: Any, experts: Any) -> None:
    """Raises TypeError unless router and experts have usable types."""
    require_type(
        function,
        "router",
        router,
        routers.Router | Callable,
        "a jax_ep.router.Router or a function of logits",
        "leave it out for softmax top-k",
    )
    require_type(
        function,
        "experts",
        experts,
        Callable,
        "a function of rows, gate_up, down and group_sizes",
        "jax_ep.experts has some to choose from",
    )
    for name, value, taken, options in (
        ("router", router, ("logits",), ROUTER_KEYWORDS),
        ("experts", experts, _operands(experts), _EXPERTS_KEYWORDS),
    ):
        if not isinstance(value, type):
            calls.require_takes(function, name, value, taken, options)
    for name, value, instance in (
        ("router", router, "jax_ep.router.Router()"),
        ("experts", experts, "jax_ep.experts.Padded(largest)"),
    ):
        if isinstance(value, type):
            raise errors.invalid(
                function,
                f"{name} must be a function",
                f"the class {value.__name__}",
                f"pass an instance, for example {instance}",
                operand=name,
                kind=TypeError,
            )


def require_activations(
    function: str, gated: bool, has_shared: bool, fused: bool, *given: Any
) -> None:
    """Raises unless the activations suit the experts.

    Args:
        function: the caller.
        gated: whether experts have a gate.
        has_shared: whether there is a shared expert.
        fused: whether it is one of the groups.
        *given: `activation` and `shared_activation`.
    """
    operands = ("gate", "up") if gated else ("up",)
    otherwise = "leave it out for silu(gate) * up" if gated else "write one"
    for name, value in zip(("activation", "shared_activation"), given, strict=True):
        what = f"a function of {' and '.join(operands)}"
        require_type(function, name, value, Callable, what, otherwise)
        if not isinstance(value, type):
            calls.require_takes(function, name, value, operands)
    activation, shared = given
    errors.require(
        gated or activation is not None,
        function,
        "activation must be a function of up, because experts without a gate have no "
        "default",
        "None",
        "pass for example lambda up: jnp.square(jax.nn.relu(up))",
    )
    errors.require(
        shared is None or (has_shared and not fused),
        function,
        "shared_activation needs a shared expert, and a config without "
        "fused_shared_expert",
        errors.brief(shared),
        "leave it out, and the shared expert has the activation of the others",
    )


def require_sent_weights(function: str, config: EPConfig, on_input: Any) -> None:
    """Raises unless weights can be multiplied before the exchange, if they are."""
    name = "apply_router_weight_on_input"
    remedy = "leave it out to weigh the experts' results"
    require_type(function, name, on_input, bool, "a bool", remedy)
    errors.require(
        not on_input or (config.top_k == 1 and not config.fused_shared_expert),
        function,
        f"{name} needs top_k=1, and no fused_shared_expert",
        f"top_k {config.top_k}",
        "with more experts per token, call dispatch, multiply d.tokens by "
        "d.router_weights[:, None], and call combine without weights",
    )


def require_count(function: str, name: str, value: Any) -> None:
    """Raises unless `value` is an int of at least 0."""
    errors.require(
        type(value) is int and value >= 0,
        function,
        f"{name} must be an int of at least 0",
        errors.brief(value),
        "the default is 0",
    )


def require_chunks(function: str, value: Any) -> None:
    """Raises unless `value` is a positive int."""
    errors.require(
        type(value) is int and value >= 1,
        function,
        "chunks must be an int of at least 1",
        errors.brief(value),
        "the default is 1",
    )


def require_mode(function: str, config: EPConfig) -> None:
    """Raises unless `config` lets combine return the layer's result."""
    if config.reduce == "none":
        raise errors.invalid(
            function,
            'the config must have reduce="rank" or "source"',
            repr(config.reduce),
            "call dispatch and combine yourself to get each expert's rows",
        )
    if config.skip_a2a:
        raise errors.invalid(
            function,
            "the config must not have skip_a2a",
            "True",
            "call dispatch and combine yourself and sum over the ranks",
        )


def require_handle(function: str, ep: Any) -> None:
    """Raises unless `ep` is a handle, which may be closed until the layer is called."""
    what = "the handle that jax_ep.init returned"
    require_type(function, "ep", ep, EPHandle, what, "leave it out to share one")


def check_choices(
    ep: EPHandle,
    router: Any,
    routing: Any,
    mask: Any,
    topk_ids: Any,
    batch_axes: Any,
    experts: Any,
) -> None:
    """Raises unless the options have the documented types and fit together."""
    require_choices("moe_ffn", router, experts)
    require_type(
        "moe_ffn",
        "routing",
        routing,
        routers.Routing,
        "a jax_ep.router.Routing",
        "jax_ep.router.route makes one",
    )
    for name, value in (("router", router), ("mask", mask), ("topk_ids", topk_ids)):
        _require(
            routing is None or value is None,
            rule=f"{name} must be None with routing",
            value=f"a {type(value).__name__}",
            remedy="apply it where you make the routing",
        )
    _require(
        topk_ids is None or router is None or isinstance(router, routers.Router),
        rule="router must be a jax_ep.router.Router with topk_ids",
        value=calls.name_of(router),
        remedy="use the ids in your function",
    )
    known = tuple(name for name in ep.mesh.axis_names if checks.in_scope((name,)))
    names = isinstance(batch_axes, Sequence) and not isinstance(batch_axes, str)
    _require(
        batch_axes is None or (names and set(batch_axes) <= set(known)),
        rule=f"batch_axes must be a sequence of manual axes of the call, of {known}",
        value=errors.brief(batch_axes),
        remedy="leave it out to use all of them",
    )


def checked_mask(function: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns `mask` as a bool array with one entry per token."""
    arrays = operands.checked(function, (_MASK,), {"mask": mask}, {"...": shape})
    return arrays["mask"]


_ONE_BOOL = "pass one bool per token"
_MASK = Operand("mask", "[...]", "bool", _ONE_BOOL, _ONE_BOOL, optional=True)
_ONE_ROW = "pass a row for each token of x, in the same dimensions"
_IDS = "pass top_k experts for each token of x, in the same dimensions"
# The arrays of a `jax_ep.router.Routing` that have a row per token.
OF_ROUTING = ("ids", "weights", "logits", "probabilities")
# What calls of layers may have for each token of x, besides x.
PER_TOKEN = (
    _MASK,
    Operand("residual", "[..., H]", operands.FLOATS, _ONE_ROW, optional=True),
    Operand("topk_ids", "[..., K]", operands.IDS, _IDS, optional=True),
    Operand("routing.ids", "[..., K]", operands.IDS, _IDS, optional=True),
    Operand("routing.weights", "[..., K]", operands.FLOATS, _IDS, optional=True),
    *(
        Operand(f"routing.{name}", "[..., E]", operands.FLOATS, _ONE_ROW, optional=True)
        for name in ("logits", "probabilities")
    ),
)


def _remedy_of_tokens(found: operands.Found) -> str:
    (tokens,) = found.shapes
    if len(tokens) != 2:
        return "reshape them to two dimensions"
    hidden = found.sizes["H"]
    return f"pass tokens of {hidden} columns, or init ep with hidden_size={tokens[1]}"


def _remedy_of_weights(tp: str | None, found: operands.Found) -> str:
    gate_up, down = found.shapes
    local, hidden = found.sizes["L"], found.sizes["H"]
    remedy = orders.remedy(gate_up, down, hidden)
    steps = [remedy] if remedy else []
    if remedy and tp and len(gate_up) == 3:
        # Split over ranks as they are, gate and up would lie on different ranks.
        steps = [f"before {tp!r} splits it, {remedy}"]
    if gate_up[:1] != (local,) or down[:1] != (local,):
        steps.append("shard dimension 0 over the EP axes")
    if steps:
        return ", and ".join(steps)
    if gate_up[1:3] == (hidden, 2) and down[2:] == (hidden,):
        return "give both the same F" + (f", split over {tp!r}" if tp else "")
    return "pass the weights of this layer, or init ep with their hidden_size"


def remedy_of_parameters(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> str:
    """Returns what to do about the shapes of a layer's parameters."""
    hidden = wanted["router"][0]
    if {"gate_up", "down"} <= {*found} and len(found["down"]) == len(wanted["down"]):
        matrices = found["gate_up"], found["down"]
        if remedy := orders.remedy(*matrices, hidden):
            return remedy
    if found.get("router") == wanted["router"][::-1] != wanted["router"]:
        return "transpose it with router.T"
    return "give it the weights of this layer, or make the layer with their sizes"


def _remedy_of_shared(otherwise: str, found: operands.Found) -> str:
    gate_up, down = found.shapes
    return orders.shared_remedy(gate_up, down, found.sizes["H"]) or otherwise


def _remedy_of_bias(name: str, tp: str | None, found: operands.Found) -> str:
    (bias,), sizes = found
    local, columns = sizes.values()
    sharded = "shard dimension 0 over the EP axes"
    if len(bias) != 2 or bias[1] == columns:
        return sharded
    steps = [] if bias[0] == local else [sharded]
    if name == "down_bias":
        steps.append("give it all H columns")
    elif bias[1] == 2 * columns and not tp:
        steps.append(f"pass gate_bias and up_bias: {_split_bias(name)}")
    else:
        how = f", split over {tp!r} as gate_up is" if tp else ""
        steps.append(f"give it the F columns of gate_up{how}")
    return ", and ".join(steps)


def _split_bias(name: str) -> str:
    """Returns how to split a bias `[L, 2F]` of gate and up."""
    return (
        f"jnp.split({name}, 2, -1) if gate comes first, or, if gate and up alternate "
        f"as in gpt-oss, {name}[:, 0::2] and {name}[:, 1::2]"
    )


def _remedy_of_router(ranks: int, given: operands.Found) -> str:
    (found,), sizes = given
    hidden, experts = sizes["H"], sizes["E"]
    whole = "replicate it over all axes"
    if found == (experts, hidden):
        return "transpose it with router.T"
    if ranks > 1 and found in ((hidden, experts // ranks), (hidden // ranks, experts)):
        return whole
    if ranks > 1 and found == (experts // ranks, hidden):
        return f"transpose it with router.T, and {whole}"
    return "pass a column for each expert, with hidden_size rows"


def _operands(experts: Any) -> tuple[str, ...]:
    """Returns what `experts` gets by position."""
    if of(experts).takes_dispatched:
        return ("d", "gate_up", "down")
    return ("rows", "gate_up", "down", "group_sizes")


def require_keywords(experts: Experts, options: Mapping[str, Any]) -> None:
    """Raises TypeError unless `experts` takes these keywords, and needs no others."""
    taken = keywords(experts.given, list(options))
    lacking = [name for name in options if name not in taken]
    if lacking:
        raise errors.invalid(
            "moe_ffn",
            f"experts must take the keywords {list(options)}",
            f"{experts.name} without {lacking}",
            "add them to the function, or leave them out of the call",
            operand="experts",
            kind=TypeError,
        )
    given, by_position = experts.given, _operands(experts)
    calls.require_takes("moe_ffn", "experts", given, by_position, list(options))


def require_gate(experts: Experts, params: Mapping[str, Any]) -> None:
    """Raises if these experts need a gate, and there is none."""
    _require(
        is_gated(params) or experts.takes_ungated,
        rule="experts must take a gate_up without a gate, [L, H, 1, F]",
        value=repr(experts),
        remedy="leave experts out, or pass gate and up",
    )


def require_split(
    ep: EPHandle, tokens: jax.Array, params: Mapping[str, Any], tp_axis: str
) -> None:
    """Raises if JAX knows that all ranks of `tp_axis` have the same experts' weights.

    Their results would be added up, so every row would be too large by that factor.
    """
    checked = bool(varying(tokens))  # otherwise check_vma is off, or may be
    names = [name for name in ("gate_up", "down", "experts") if name in params]
    for name in names:
        axes = frozenset().union(*map(varying, jax.tree.leaves(params[name])))
        _require(
            not checked or tp_axis in axes or ep.mesh.shape[tp_axis] == 1,
            rule=f"params[{name!r}] must be split along F over tp_axis {tp_axis!r}",
            value="the same on all of its ranks",
            remedy=f"name {tp_axis!r} in its in_specs, or leave tp_axis out",
        )


def require_rows(rows: Any, expected: tuple[int, int], experts: Experts) -> None:
    """Raises unless `experts` have returned a row of H columns for each of N rows."""
    found = jnp.shape(rows)
    _require(
        found == expected,
        rule=f"experts must return [N, H] = {expected}",
        value=f"{found} from {experts.name}",
        remedy="return one row per row, with the columns of tokens",
    )


def require_blocks(
    ep: EPHandle, experts: Experts, params: Mapping[str, Any], tp_axis: str | None
) -> None:
    """Raises if H or F do not suit `experts`."""
    codes = params.get("experts")
    form = None if codes is None else codes.format
    multiple = experts.multiple_of(form, ep.config.dispatch_format)
    down = codes.shapes[1] if codes is not None else jnp.shape(params["down"])
    hidden = ep.config.hidden_size
    split = f" (its part on each rank of {tp_axis!r})" if tp_axis else ""
    _require(
        hidden % multiple == 0 and down[1] % multiple == 0,
        rule=f"H and F{split} must be multiples of {multiple} for {experts!r}",
        value=f"H = {hidden} and F = {down[1]}",
        remedy="pad the weights with zeros"
        + (", or split them over fewer ranks" if tp_axis else "")
        + ", or use jax_ep.experts.auto",
    )


def checked_placement(ep: EPHandle, placement: Any) -> int:
    """Returns the number of experts that the router knows."""
    count = ep.config.num_experts
    if placement is None:
        return count
    what = "a jax_ep.placement.Placement"
    remedy = "jax_ep.placement.balance makes one"
    require_type("moe_ffn", "placement", placement, placements.Placement, what, remedy)
    found = jnp.shape(placement.expert_of)
    _require(
        found == (count,),
        rule=f"placement must have the {count} places that num_experts of the config "
        "counts, and be of one layer",
        value=f"places of shape {found}",
        remedy="init ep with num_experts=placement.num_slots, and scan over a stack of "
        "layers",
    )
    return placement.num_experts


def keywords(function: Any, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that `function` takes as keywords.

    If that cannot be known, all of them. The first parameter of `function` does not
    count, because it is passed by position.
    """
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):  # not a Python function
        return [*names]
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return [*names]
    return [name for name in names if name in [*taken][1:]]


def checked_params(
    ep: EPHandle,
    tokens: jax.Array,
    residual: Any,
    topk_ids: Any,
    params: Mapping[str, Any],
    routing: routers.Routing | None,
    tp_axis: str | None,
    experts: int,
    chunks: int,
) -> Mapping[str, Any]:
    """Returns `params` with checked shapes, and "gate" and "up" as the pair "gate_up".

    The router chooses among `experts` experts: fewer than places if some have copies.
    """
    if not isinstance(params, Mapping):
        raise errors.invalid(
            "moe_ffn",
            "params must be a mapping of names to arrays",
            type(params).__name__,
            "pass a dict with the names in the docstring",
            operand="params",
            kind=TypeError,
        )
    given_names = sorted(params)
    params = _joined(params, ep.config.hidden_size)
    names = set(params)
    matrices = {"gate_up", "down"}
    # Codes may replace the matrices.
    needed = set() if "experts" in names and not matrices & names else matrices
    needed |= {"router"} if routing is None else set()
    shared = {"shared_gate_up", "shared_down"}
    known = needed | matrices | shared | {"router", "experts", *_BIASES}
    known |= {*_ROUTER_BIASES, "shared_expert_gate"}
    joined = ' ("gate" and "up" may replace "gate_up")' if matrices <= needed else ""
    fused = [name for name in names - known if "gate_up" in name and "bias" in name]
    _require(
        needed <= names <= known,
        rule=f"params must have {sorted(needed)}{joined} and nothing besides "
        f"{sorted(known | {'gate', 'up'})}",
        value=given_names,
        remedy=f"pass gate_bias and up_bias: {_split_bias(fused[0])}"
        if fused
        else "add, rename or remove entries",
    )
    if "experts" in names:
        what = "the QuantizedWeights of jax_ep.experts.quantize_weights"
        remedy = "pass it whole, not its arrays"
        codes = params["experts"]
        kinds = QuantizedWeights
        require_type("moe_ffn", "params['experts']", codes, kinds, what, remedy)
    _require(
        ("shared_gate_up" in names) == ("shared_down" in names),
        rule="shared_gate_up and shared_down must come together",
        value=sorted(names),
        remedy="pass both or none",
    )
    _require(
        errors.is_one_of(tp_axis, {None, *ep.mesh.axis_names} - set(ep.axis_names)),
        rule=f"tp_axis must be an axis of the mesh outside of {ep.axis_names}",
        value=errors.brief(tp_axis),
        remedy="leave it out if experts are not split",
    )
    require_mode("moe_ffn", ep.config)
    most, times = ep.config.max_tokens_per_rank, ""
    if chunks > 1:
        most, times = most * chunks, f"chunks * max_tokens_per_rank = {chunks} * {most}"
    _require(
        tokens.ndim != 2 or tokens.shape[0] <= most,
        rule=f"tokens must be at most {times or f'max_tokens_per_rank = {most}'} per "
        "rank",
        value=tokens.shape[0],
        remedy="pass fewer tokens, or more chunks, or init ep with a larger "
        "max_tokens_per_rank",
    )
    given = {name: value for name, value in params.items() if name != "experts"}
    given |= {"tokens": tokens, "residual": residual, "topk_ids": topk_ids}
    if isinstance(params.get("gate_up"), tuple):
        given["gate_up"] = jax.eval_shape(_stack, *params["gate_up"])
    if "experts" in names:
        for name, shape in zip(
            ("gate_up", "down"), params["experts"].shapes, strict=True
        ):
            given[f"quantized {name}"] = jax.ShapeDtypeStruct(shape, jnp.uint8)
    fused = ep.config.fused_shared_expert
    _require(
        not fused or shared <= names,
        rule="with fused_shared_expert params must have shared_gate_up and shared_down",
        value=given_names,
        remedy="pass both, or leave fused_shared_expert out",
    )
    _require(
        "shared_expert_gate" not in names or (shared <= names and not fused),
        rule="shared_expert_gate needs shared_gate_up and shared_down, and a config "
        "without fused_shared_expert",
        value=given_names,
        remedy="leave fused_shared_expert out, or pass no shared_expert_gate",
    )
    sizes = {
        "H": (ep.config.hidden_size, "hidden_size"),
        "L": (ep.local_experts, "this rank's experts"),
        "E": experts,
        "K": (ep.config.top_k, "top_k"),
    }
    gated = is_gated(params)
    _require(
        gated or not {"gate_bias", "experts"} & names,
        rule="params of experts without a gate must have no gate_bias and no experts",
        value=given_names,
        remedy="pass up_bias alone, and weights that are not quantised",
    )
    rows = _table(ep.ep_size, tp_axis, fused, routing is None, 2 if gated else 1)
    table = [row for row in rows if operands.names_of(row)[0] in given]
    operands.checked("moe_ffn", table, given, sizes, ep.config.dtype)
    return params


def is_gated(params: Mapping[str, Any]) -> bool:
    """Whether the routed experts have a gate."""
    return orders.is_gated(params.get("gate_up"))


def _table(
    ranks: int, tp: str | None, fused: bool, chooses: bool, sides: int
) -> tuple[Operand, ...]:
    """Returns what `moe_ffn` requires of its arrays, if they are given.

    Args:
        ranks: the size of the EP group.
        tp: the tensor axis, or None.
        fused: whether the shared expert is one of the groups.
        chooses: whether the layer's router chooses the experts.
        sides: 2 if experts have a gate, 1 if not.
    """
    of_any = operands.ANY
    shared = (
        f"[H, {sides}, F] and [F, H]",
        "pass one of the size of a routed expert",
    )
    if not fused:
        whole = "replicate both over the EP axes, and split only S over tp_axis"
        shared = (f"[H, {sides}, S] and [S, H]", whole)
    rows = [
        Operand("tokens", "[n, H]", None, _remedy_of_tokens),
        Operand("residual", "[n, H]", None, "pass one row per token", optional=True),
        Operand(
            "topk_ids",
            "[n, K]",
            operands.IDS,
            "pass top_k experts per token",
            optional=True,
        ),
        Operand(
            "quantized gate_up and quantized down",
            "[L, H, 2, F] and [L, F, H]",
            _SHAPES,
            "quantise this rank's experts with jax_ep.experts.quantize_weights, or "
            "shard dimension 0 of all its arrays over the EP axes",
        ),
        Operand(
            "gate_up and down",
            f"[L, H, {sides}, F] and [L, F, H]",
            (_SHAPES, of_any),
            partial(_remedy_of_weights, tp),
        ),
        Operand(
            "shared_gate_up and shared_down",
            shared[0],
            of_any,
            partial(_remedy_of_shared, shared[1]),
        ),
        Operand(
            "shared_expert_gate",
            "[H, 1]",
            of_any,
            "transpose a Linear's weight, and replicate it over all axes",
        ),
        *(
            Operand(name, shape, of_any, partial(_remedy_of_bias, name, tp))
            for name, shape in (
                ("gate_bias", "[L, F]"),
                ("up_bias", "[L, F]"),
                ("down_bias", "[L, H]"),
            )
        ),
    ]
    if chooses:
        whole = "replicate it over all axes"
        rows += [Operand(name, "[E]", of_any, whole) for name in _ROUTER_BIASES]
        rows += [Operand("router", "[H, E]", of_any, partial(_remedy_of_router, ranks))]
    return tuple(rows)


def _shaped(function: str, name: str, value: Any) -> Any:
    known = isinstance(value, jax.ShapeDtypeStruct)
    return value if known else as_array(function, name, value)


# Codes, and gate and up as a pair, have the shapes of the matrices they stand for.
_SHAPES = operands.ANY._replace(convert=_shaped)


def _joined(params: Mapping[str, Any], hidden: int) -> Mapping[str, Any]:
    """Returns `params` with "gate" and "up", if present, as the pair "gate_up".

    Without a gate, "up" becomes a "gate_up" `[L, H, 1, F]`.
    """
    given = [name for name in ("gate", "up") if name in params]
    if not given:
        return params
    if given == ["up"] and not {"gate_up", "experts"} & {*params}:
        up = as_array("moe_ffn", "params['up']", params["up"])
        swapped = up.ndim == 3 and up.shape[1] != hidden == up.shape[2]
        _require(
            up.ndim == 3 and not swapped,
            rule=f"up must be [L, H, F] with H = {hidden}",
            value=up.shape,
            remedy="transpose what is [L, F, H]: pass up.swapaxes(1, 2)",
        )
        rest = {name: value for name, value in params.items() if name != "up"}
        return rest | {"gate_up": up[:, :, None]}
    _require(
        len(given) == 2 and "gate_up" not in params,
        rule='gate and up must come together, in place of "gate_up", or up alone '
        "if experts have no gate",
        value=sorted(params),
        remedy='pass both, or only "gate_up"',
    )
    both = {n: as_array("moe_ffn", f"params[{n!r}]", params[n]) for n in given}
    gate, up = both.values()
    transposed = [
        name
        for name, matrix in both.items()
        if matrix.ndim == 3 and matrix.shape[1] != hidden == matrix.shape[2]
    ]
    how = " and ".join(f"{name}.swapaxes(1, 2)" for name in transposed)
    _require(
        gate.ndim == 3 and gate.shape == up.shape and not transposed,
        rule=f"gate and up must both be [L, H, F] with H = {hidden}",
        value=f"{gate.shape} and {up.shape}",
        remedy=f"transpose what is [L, F, H]: pass {how}"
        if transposed
        else "give both the same F",
    )
    rest = {name: value for name, value in params.items() if name not in given}
    return rest | {"gate_up": (gate, up)}


def _stack(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.stack([gate, up], axis=2)


def stacked(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `params` with "gate_up" as one array, for experts that take no pair."""
    pair = params.get("gate_up")
    if not isinstance(pair, tuple):
        return params
    return {**params, "gate_up": _stack(*pair)}
