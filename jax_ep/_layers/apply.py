"""apply_experts: dispatch, a function of rows, and combine, in one call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jax_ep._core import calls, checks, context, errors, operands
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import Transport
from jax_ep._core.operands import Operand
from jax_ep._core.varying import vary_alike, varying
from jax_ep._layers import columns, moe_checks
from jax_ep._ops import combine as combining
from jax_ep._ops import dispatch as dispatching
from jax_ep._ops.dequantize import dequantize
from jax_ep._ops.expert_of_row import expert_of_row
from jax_ep._setup.shared import shared_handle

# (rows [N, H], group_sizes [G], expert_of_row [N]) -> rows [N, H].
RowsFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# Arguments that are no fields of EPConfig.
ARGUMENTS = (
    "mesh",
    "scatter_axis",
    "transport",
    "return_dropped",
    "return_invalid",
    "input_scale",
    "chunks",
)

# What `fn` gets.
ROWS = ("rows", "group_sizes", "expert_of_row")

# Fields of EPConfig that arrays or arguments determine.
_GIVEN = {
    "max_tokens_per_rank": "the number of tokens",
    "top_k": "the last dimension of topk_ids",
    "hidden_size": "the last dimension of tokens",
    "dtype": "the dtype of tokens",
}
# What fields of EPConfig may be in apply_experts, the default first, and why only that.
_WITHOUT_EFFECT = "it makes whole calls, so nothing is pending"
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "skip_a2a": ((False,), "every rank has tokens of its own"),
    "allreduce_world_size": ((None,), "it belongs to skip_a2a"),
    "overlap": (("sm",), _WITHOUT_EFFECT),
    "pending_calls": ((None, 0), _WITHOUT_EFFECT),
    "scale_layout": (("rows",), "rows come dequantised"),
}
_FREE = sorted(
    field.name
    for field in dataclasses.fields(EPConfig)
    if field.name not in {"num_experts", *_GIVEN, *_ONLY}
)


@overload
def apply_experts(
    fn: RowsFunction,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[False] = False,
    return_invalid: Literal[False] = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> jax.Array: ...
@overload
def apply_experts(
    fn: RowsFunction,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[True],
    return_invalid: Literal[False] = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def apply_experts(
    fn: RowsFunction,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[False] = False,
    return_invalid: Literal[True],
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def apply_experts(
    fn: RowsFunction,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: Literal[True],
    return_invalid: Literal[True],
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def apply_experts(
    fn: RowsFunction,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: bool = False,
    return_invalid: bool = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> jax.Array | tuple[jax.Array, ...]: ...
@calls.explained("apply_experts")
def apply_experts(
    fn: RowsFunction,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike,
    *,
    num_experts: int,
    axis_name: str | Sequence[str],
    mesh: Mesh | None = None,
    scatter_axis: str | None = None,
    transport: Transport = "auto",
    return_dropped: bool = False,
    return_invalid: bool = False,
    input_scale: ArrayLike | None = None,
    chunks: int = 1,
    **config: Any,
) -> jax.Array | tuple[jax.Array, ...]:
    """Sends tokens to their experts, applies `fn` there, and sums the rows on return.

    Call it inside your own `jax.shard_map` over `mesh`, on the arrays of one rank. It
    calls `dispatch`, `fn` and `combine` with a handle of `jax_ep.shared_handle` that
    fits the arrays, so a batch of another size gets its own handle (and, on a GPU
    transport, its own windows). `jax_ep.sharded.apply_experts` does the same on global
    arrays. The call is differentiable in reverse mode, and works under the
    transformations that `dispatch` and `combine` support.

    Args:
        fn: a function of `rows` `[N, H]` in the dtype of the tokens, grouped by local
            expert and dequantised if the format is a quantised one; `group_sizes` int32
            `[G]`, for `jax.lax.ragged_dot` and `jax_ep.experts.add_bias`; and
            `expert_of_row` int32 `[N]`, each row's group. It returns `[N, H]` in the
            dtype of the rows. What it returns for rows past the last group is ignored.
            It closes over this rank's weights.
        tokens: `[..., H]` in bfloat16, float16 or float32; the leading dimensions have
            the same sizes on every rank.
        topk_ids: int32 `[..., K]`, global expert ids, -1 for none. Other ids outside
            [0, E) count as -1, so their part of a token's sum is missing; ask for
            their number with `return_invalid`.
        router_weights: `[..., K]` of any float dtype, used in float32.
        num_experts: E, the number of experts in the whole group.
        axis_name: the EP axis, or a tuple of axes whose product is the group.
        mesh: the mesh of the enclosing `jax.shard_map`, or None if it is the one of
            `jax.set_mesh`.
        scatter_axis: a mesh axis outside of the group over which the experts are split
            (tensor parallel), so that `fn` returns partial sums. They are
            reduce-scattered over the columns in float32 and rounded once to the dtype
            of the tokens, and each rank of the axis returns only its part of the
            columns. `fn` may then also return float32. Tokens, ids and weights must be
            equal along the axis.
        transport: as in `jax_ep.init`.
        return_dropped: whether to return the number of dropped rows as well.
        return_invalid: whether to return the number of bad ids as well, last.
        input_scale: global scale of dispatch_format "nvfp4", as in `jax_ep.dispatch`.
        chunks: the tokens of a rank are sent in up to this many parts of ceil(n /
            chunks), one after the other, and the handle has room for the rows of a
            part. The backward pass sends each part, and calls `fn`, again.
        **config: further fields of `jax_ep.EPConfig`, such as `capacity_factor` and
            `dispatch_format`. With `fused_shared_expert` group 0 is the shared expert.
            With `reduce="source"` each row goes back separately.

    Returns:
        `[..., H]` in the dtype of the tokens, `[..., H / size]` with `scatter_axis`.
        With `return_dropped` also int32 `[1]`, the number of rows that this rank
        dropped because N was too small. With `return_invalid` also int32 `[1]`, the
        number of ids outside [-1, E) among this rank's tokens. With both a tuple of
        three, in this order.

    Raises:
        ValueError, TypeError: while tracing, if an argument is not as described above,
            if `config` has a field that the arrays determine, or changes one that has
            no meaning here (`skip_a2a`, `reduce="none"`, `overlap`, ...), if the mesh
            is unknown, or for the reasons of `jax_ep.init`.
    """
    function = "apply_experts"
    errors.require_type(
        function,
        "fn",
        fn,
        Callable,
        "a function of rows, group_sizes and expert_of_row",
        "pass one that returns a row for each row",
    )
    require_fn(function, fn, ROWS)
    moe_checks.require_chunks(function, chunks)
    given = flattened(function, tokens, topk_ids, router_weights, chunks)
    names = _axes(function, axis_name)
    mesh = _resolved_mesh(function, mesh)
    fields = config_of(function, given.config | {"num_experts": num_experts}, config)
    require_scatter(function, mesh, names, scatter_axis, fields)
    if scatter_axis is not None and not checks.in_scope((scatter_axis,)):
        raise errors.invalid(
            function,
            f"scatter_axis {scatter_axis!r} must be in scope",
            "a jax.shard_map over other axes",
            "leave axis_names out of jax.shard_map",
        )
    with errors.told_of(function, part=False):
        ep = shared_handle(mesh, names, fields, transport)
    results = applied(function, ep, fn, given, scatter_axis, input_scale)
    return results.asked(return_dropped, return_invalid)


class Results(NamedTuple):
    """What a call of `apply_experts` can return."""

    y: jax.Array
    dropped: jax.Array
    invalid: jax.Array

    def asked(
        self, return_dropped: bool, return_invalid: bool
    ) -> jax.Array | tuple[jax.Array, ...]:
        """Returns `y`, and the numbers that the user wants."""
        pairs = (self.dropped, return_dropped), (self.invalid, return_invalid)
        counts = [count for count, wanted in pairs if wanted]
        return (self.y, *counts) if counts else self.y


def applied(
    function: str,
    ep: EPHandle,
    fn: Callable[..., Any],
    given: Flattened,
    scatter_axis: str | None,
    input_scale: ArrayLike | None,
    params: tuple[Any, ...] = (),
) -> Results:
    """Runs a call of `apply_experts` on one rank.

    `params`, if there are any, are the first argument of `fn`.
    """
    inputs = (given.tokens, given.topk_ids, given.router_weights)
    if scatter_axis is not None:
        # Marked as varying along the axis before the dispatch, so that gradients are
        # summed over it for n tokens, not for N rows.
        axes = frozenset((scatter_axis,))
        inputs = vary_alike(ep.mesh.axis_names, axes, *inputs)
    tokens, topk_ids, weights = inputs

    def part(params: Any, input_scale: Any, one: Any, sent: bool = True) -> Any:
        own = functools.partial(fn, *params) if params else fn
        tokens, ids, weights = one
        how = scatter_axis, input_scale, combining.How(sent=sent)
        return _part(function, ep, own, tokens, ids, weights, *how)

    n, most = tokens.shape[0], ep.config.max_tokens_per_rank
    if n <= most:
        y, counts = part(params, input_scale, (tokens, topk_ids, weights))
    else:
        from jax_ep._ops import parts  # few programs need it

        count = -(-n // most)
        missing = count * most - n
        padded = (
            jnp.pad(array, ((0, missing), (0, 0)), constant_values=value)
            for array, value in ((tokens, 0), (topk_ids, -1), (weights, 0))
        )
        operands = parts.Given(params, input_scale)
        one = tuple(padded) if missing else (tokens, topk_ids, weights)
        y, counts = parts.in_parts(function, ep, part, operands, one, count)
        y = y[:n]
    return Results(y.reshape(*given.leading, y.shape[1]), *counts)


def _part(
    function: str,
    ep: EPHandle,
    fn: Callable[..., Any],
    tokens: jax.Array,
    topk_ids: jax.Array,
    weights: jax.Array,
    scatter_axis: str | None,
    input_scale: Any,
    how: combining.How,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the sums of some tokens, and the numbers of dropped rows and bad ids."""
    at_source = ep.config.reduce == "source"
    sent = None if at_source else weights
    with errors.told_of(function, part=False):
        d = dispatching.dispatch(ep, tokens, topk_ids, sent, input_scale=input_scale)
        rows = dequantize(d)
    with jax.named_scope("jax_ep.experts"), errors.by_the_user():
        out: Any = fn(rows, d.group_sizes, expert_of_row(d))
    _require_result(function, out, rows, scatter_axis)
    if scatter_axis is not None:
        out = columns.scatter(out, scatter_axis, rows.dtype.name)
    with errors.told_of(function, part=False):
        factors = weights if at_source else d.router_weights
        y = combining.combine_routed(ep, out, d.route, factors, None, how=how)
    counts = d.num_dropped, d.num_invalid
    if scatter_axis in varying(counts[0]):
        # They are equal along the axis; pmax proves that to check_vma.
        counts = jax.lax.pmax(jax.lax.stop_gradient(counts), scatter_axis)
    return y, counts


def require_fn(function: str, fn: Any, operands: Sequence[str]) -> None:
    """Raises TypeError unless `fn` can be called with these operands."""
    if isinstance(fn, type):
        raise errors.invalid(
            function,
            f"fn must be a function of ({', '.join(operands)})",
            f"the class {fn.__name__}",
            "pass a function, or an instance that can be called",
            operand="fn",
            kind=TypeError,
        )
    calls.require_takes(function, "fn", fn, operands)


class Flattened(NamedTuple):
    """The operands of a call with one leading dimension.

    Attributes:
        tokens: `[n, H]`.
        topk_ids: int32 `[n, K]`.
        router_weights: float32 `[n, K]`.
        leading: the leading dimensions.
        config: fields of `EPConfig` that they determine.
    """

    tokens: jax.Array
    topk_ids: jax.Array
    router_weights: jax.Array
    leading: tuple[int, ...]
    config: dict[str, Any]


_OPERANDS = (
    Operand(
        "tokens",
        "[..., H]",
        operands.SUPPORTED,
        "pass an array with a row for each token",
        "cast them to one of these",
    ),
    Operand(
        "topk_ids",
        "[..., K]",
        operands.IDS,
        "give each token its top_k ids, -1 where it has fewer",
    ),
    Operand(
        "router_weights",
        "[..., K]",
        operands.FLOATS,
        "give each id of topk_ids its weight",
        'cast them with router_weights.astype("float32")',
    ),
)


def flattened(
    function: str, tokens: Any, topk_ids: Any, router_weights: Any, chunks: int
) -> Flattened:
    """Returns the checked operands of a call, flattened."""
    given = {
        "tokens": tokens,
        "topk_ids": topk_ids,
        "router_weights": router_weights,
    }
    for name, what in (("tokens", "columns"), ("topk_ids", "ids for each token")):
        shape = getattr(given[name], "shape", ())
        errors.require(
            shape[-1:] != (0,),
            function,
            f"{name} must have {what}",
            shape,
            "leave the call out where there is nothing to send",
        )
    arrays = operands.checked(function, _OPERANDS, given)
    tokens, topk_ids, weights = arrays.values()
    leading = tokens.shape[:-1]
    n, top_k = math.prod(leading), topk_ids.shape[-1]
    return Flattened(
        tokens.reshape(n, tokens.shape[-1]),
        topk_ids.reshape(n, top_k),
        weights.reshape(n, top_k).astype(jnp.float32),
        leading,
        {
            "max_tokens_per_rank": max(-(-n // chunks), 1),
            "top_k": top_k,
            "hidden_size": tokens.shape[-1],
            "dtype": tokens.dtype.name,
        },
    )


def _axes(function: str, axis_name: Any) -> tuple[str, ...]:
    """Returns the EP axes; raises unless the call is in a shard_map over them."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    known = isinstance(names, tuple | list) and all(isinstance(n, str) for n in names)
    if not known or not names:
        raise errors.invalid(
            function,
            "axis_name must be the name of a mesh axis, or a tuple of names",
            errors.brief(axis_name),
            "name the axes that the experts are split over",
        )
    if not checks.in_scope(tuple(names)):
        raise errors.invalid(
            function,
            f"mesh axes {tuple(names)} must be in scope",
            "a call outside jax.shard_map over them",
            "wrap the caller in jax.shard_map, or use jax_ep.sharded.apply_experts on "
            "global arrays",
        )
    return tuple(names)


def _resolved_mesh(function: str, mesh: Any) -> Mesh:
    """Returns the mesh of the enclosing `shard_map`, with its devices."""
    around = jax.sharding.get_abstract_mesh()
    if mesh is None:
        mesh = context.concrete_mesh()
        # shard_map tells its body the axes of its mesh, but no devices.
        if mesh is None:
            raise errors.invalid(
                function,
                "mesh must be given where jax.set_mesh has set none",
                "None",
                "pass mesh=, the mesh of the enclosing jax.shard_map",
            )
    errors.require_type(
        function,
        "mesh",
        mesh,
        Mesh,
        "a jax.sharding.Mesh",
        "pass the mesh of the enclosing jax.shard_map",
    )
    if dict(mesh.shape) != dict(around.shape) or mesh.axis_names != around.axis_names:
        raise errors.invalid(
            function,
            f"mesh must be that of the enclosing jax.shard_map, {dict(around.shape)}",
            dict(mesh.shape),
            "pass mesh=, with all of its axes in their order",
        )
    return mesh


def config_of(
    function: str, given: Mapping[str, Any], options: Mapping[str, Any]
) -> EPConfig:
    """Returns the config of a call of `apply_experts`.

    Args:
        function: the name for errors.
        given: fields that the arguments determine.
        options: the other fields that the caller passed.
    """
    known = {field.name for field in dataclasses.fields(EPConfig)}
    for name, value in options.items():
        if name in _GIVEN:
            raise errors.invalid(
                function,
                f"{name} must be left out, because {_GIVEN[name]} determines it",
                f"{name}={errors.brief(value)}",
                "remove it from the call",
            )
        if name not in known:
            raise errors.invalid(
                function,
                f"further arguments must be fields of EPConfig, of {_FREE}",
                f"{name}={errors.brief(value)}",
                calls.meant([name], [*ARGUMENTS, *_FREE])
                or "correct the name or remove it from the call",
                kind=TypeError,
            )
        allowed, why = _ONLY.get(name, ((value,), ""))
        # By repr, since a value may be of any type, such as an array.
        if errors.brief(value) not in map(errors.brief, allowed):
            raise errors.invalid(
                function,
                f"{name} must be {allowed[0]!r} here, because {why}",
                f"{name}={errors.brief(value)}",
                "call dispatch and combine yourself to use it",
            )
    with errors.told_of(function, part=False):
        config = EPConfig(**given, **options)
    if config.reduce == "none":
        raise errors.invalid(
            function,
            'reduce must be "rank" or "source"',
            "'none'",
            "call dispatch and combine yourself to get a row for each expert",
        )
    return config


def require_scatter(
    function: str, mesh: Mesh, ep_axes: tuple[str, ...], axis: Any, config: EPConfig
) -> None:
    """Raises unless `axis` is None or an axis to scatter columns over."""
    if axis is None:
        return
    others = [name for name in mesh.axis_names if name not in ep_axes]
    if not errors.is_one_of(axis, others):
        raise errors.invalid(
            function,
            f"scatter_axis must be a mesh axis outside of {ep_axes}, of {others}",
            errors.brief(axis),
            "leave it out if the experts are not split",
        )
    size, multiple = mesh.shape[axis], config.column_multiple
    if config.hidden_size % (size * multiple):
        raise errors.invalid(
            function,
            f"hidden_size must be a multiple of {size * multiple} with scatter_axis="
            f"{axis!r}, so that each of {size} ranks returns a multiple of {multiple} "
            "columns",
            config.hidden_size,
            f"sum over {axis!r} in fn, by jax.lax.psum, and leave scatter_axis out",
        )


def _require_result(
    function: str, out: Any, rows: jax.Array, scatter_axis: str | None
) -> None:
    """Raises unless `out` are rows as `fn` must return them."""
    shape = getattr(out, "shape", None)
    dtype = getattr(out, "dtype", None)
    dtypes = [rows.dtype.name]
    if scatter_axis is not None and "float32" not in dtypes:
        dtypes.append("float32")
    if shape is None or dtype is None or shape != rows.shape:
        raise errors.invalid(
            function,
            f"fn must return an array of the shape of rows, {rows.shape}",
            f"a {type(out).__name__}" if shape is None else shape,
            "return a row for each row, in the same order",
            kind=TypeError if shape is None else ValueError,
        )
    if dtype.name not in dtypes:
        raise errors.invalid(
            function,
            f"fn must return {' or '.join(dtypes)}",
            dtype,
            "cast the weights to rows.dtype, or the result with .astype(rows.dtype)",
            kind=TypeError,
        )
