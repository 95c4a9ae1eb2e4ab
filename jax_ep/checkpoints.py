"""Experts of published checkpoints, in the layout of jax_ep.

Checkpoints of transformers keep a matrix as `[out, in]`, gate and up in one matrix or
in two, and experts stacked or in a tensor each. jax_ep multiplies `[E, in, out]`.
Nothing here copies a tensor before it is needed: files are mapped, and an `Experts`
reads only what you index. `place` lets each device read its own experts::

    from jax_ep import checkpoints

    tensors = checkpoints.open_safetensors("Qwen3-30B-A3B")
    name = "model.layers.0.mlp.experts.{}.%s_proj.weight"
    params = {
        part: checkpoints.stack(tensors, name % part) for part in ("gate", "up", "down")
    }
    params = checkpoints.place(params, NamedSharding(mesh, PartitionSpec("ep")))

All functions use NumPy alone, except for `place`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike, NDArray

from jax_ep._core import errors
from jax_ep._core.literals import MATRIX_ORDERS, MatrixOrder, WeightFormat
from jax_ep._experts import quantized
from jax_ep.experts import QuantizedWeights

__all__ = [
    "Experts",
    "fuse",
    "gate_up",
    "open_safetensors",
    "pair",
    "place",
    "quantized_weights",
    "save_safetensors",
    "stack",
    "transpose",
    "unstack",
]

Tree = TypeVar("Tree")
Array = NDArray[Any]

# The format's names of dtypes.
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "U32": np.uint32,
        "I32": np.int32,
        "F32": np.float32,
        "U64": np.uint64,
        "I64": np.int64,
        "F64": np.float64,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "F8_E8M0": jnp.float8_e8m0fnu,
    }.items()
}


@dataclasses.dataclass(frozen=True)
class Experts:
    """An array of E experts that is read when it is indexed, an expert at a time.

    `experts[2:4]` is an ordinary array of those experts alone, and `experts[:, 0]`
    reads of each expert what the index says. `np.asarray(experts)` reads all.

    Attributes:
        shape: E, followed by the shape of one expert.
        dtype: as NumPy has it.
        read: returns expert e, an int; best as a view of the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int], Array]

    def __len__(self) -> int:
        """Returns E."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        """Returns an array of what `index` says, an int, a slice or a tuple."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        inner = tuple(rest)
        if first is Ellipsis:
            first, inner = slice(None), (Ellipsis, *inner)
        if not isinstance(first, slice):
            return np.array(self.read(range(len(self))[operator.index(first)])[inner])
        chosen = range(len(self))[first]
        if not chosen:
            return np.empty((0, *self.shape[1:]), self.dtype)[(slice(None), *inner)]
        return np.stack([self.read(expert)[inner] for expert in chosen])

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> Array:
        """Reads all experts, for `np.asarray`."""
        errors.require(
            copy is not False,
            "checkpoints.Experts",
            "copy must not be False for experts that are read from a file",
            copy,
            "leave it out",
        )
        found = self[:]
        return found if dtype is None else found.astype(dtype, copy=False)

    def astype(self, dtype: DTypeLike) -> Experts:
        """Returns the experts in another dtype; each is converted when it is read."""
        return dataclasses.replace(
            self,
            dtype=np.dtype(dtype),
            read=lambda expert: self.read(expert).astype(dtype),
        )

    def view(self, dtype: DTypeLike) -> Experts:
        """Returns the same bytes as another dtype of as many bytes."""
        kind = np.dtype(dtype)
        errors.require(
            kind.itemsize == self.dtype.itemsize,
            "checkpoints.Experts.view",
            f"dtype must have {self.dtype.itemsize} bytes, as {self.dtype} has",
            kind,
            "astype() converts values",
        )
        return dataclasses.replace(
            self, dtype=kind, read=lambda expert: self.read(expert).view(kind)
        )


def stack(
    tensors: Mapping[str, Any], name: str, *, order: MatrixOrder = "out_in"
) -> Experts:
    """Returns experts that have a tensor each.

    Args:
        tensors: arrays by name, for example those of `open_safetensors`.
        name: the tensors' names, with `{}` in place of the number of the expert:
            "model.layers.3.mlp.experts.{}.up_proj.weight". Experts count from 0.
        order: "out_in" if a matrix is `[out, in]`, as that of a PyTorch `Linear` is;
            "in_out" if it is `[in, out]`. A vector, such as a bias, stays as it is.

    Returns:
        `[E, in, out]`.

    Raises:
        ValueError: there is no expert 0, or the experts' shapes or dtypes differ.
    """
    own = name.format(0) != name.format(1)
    count = 0
    while own and name.format(count) in tensors:
        count += 1
    few = errors.brief(sorted(tensors)[:3])
    errors.require(
        count > 0,
        "checkpoints.stack",
        "name must have {} for the number of the expert, and expert 0 must exist",
        errors.brief(name),
        f"the tensors are called {few}, ...",
    )
    parts = [np.asarray(tensors[name.format(expert)]) for expert in range(count)]
    kinds = {(part.shape, part.dtype) for part in parts}
    errors.require(
        len(kinds) == 1,
        "checkpoints.stack",
        f"experts must have one shape and dtype, those of {errors.brief(name)}",
        kinds,
        "stack those that are alike",
    )
    _require_order("stack", order)
    return _experts(
        count, lambda e: parts[e].T if order == "out_in" else parts[e], parts[0].dtype
    )


def transpose(matrices: Any) -> Experts:
    """Returns `[E, in, out]` for `[E, out, in]`, or the other way round.

    Args:
        matrices: an array or `Experts` `[E, A, ...]`. Dimensions after A are merged to
            B, so blocks of codes, `[E, out, in / 32, 16]`, need no reshape.

    Returns:
        `[E, B, A]`.

    Raises:
        ValueError: it has fewer than 3 dimensions.
    """
    _require_dims("transpose", "matrices", matrices, 3)
    read = _reader(matrices)
    return _experts(len(matrices), lambda e: _rows(read(e)).T, np.dtype(matrices.dtype))


def gate_up(
    fused: Any, *, interleaved: bool = False, order: MatrixOrder = "out_in"
) -> Experts:
    """Returns the `gate_up` of jax_ep for gate and up that lie in one matrix.

    Args:
        fused: an array or `Experts`, `[E, 2 * F, H]`, or `[E, H, 2 * F]` with `order`
            "in_out". With "out_in", dimensions after the second are merged, so blocks
            of codes, `[E, 2 * F, H / 32, 16]`, need no reshape.
        interleaved: False if the F columns of gate come first, and True if gate and up
            take turns, as in gpt-oss.
        order: as in `stack`. Qwen's, Mixtral's and gpt-oss' codes are "out_in"; Llama
            4 and gpt-oss in bfloat16 are "in_out".

    Returns:
        `[E, H, 2, F]`.

    Raises:
        ValueError: there are fewer than 3 dimensions, or 2 * F is odd.
    """
    _require_order("gate_up", order)
    _require_dims("gate_up", "fused", fused, 3)
    width = fused.shape[1 if order == "out_in" else 2]
    errors.require(
        width % 2 == 0,
        "checkpoints.gate_up",
        "the dimension of gate and up must be even",
        f"{width} in {tuple(fused.shape)}",
        'order= says which it is: "out_in" or "in_out"',
    )
    inner, fused_of = width // 2, _reader(fused)

    def read(expert: int) -> Array:
        matrix = fused_of(expert)
        columns = matrix if order == "in_out" else _rows(matrix).T
        split = (inner, 2) if interleaved else (2, inner)
        parts = columns.reshape(len(columns), *split)
        return parts.swapaxes(1, 2) if interleaved else parts

    return _experts(len(fused), read, np.dtype(fused.dtype))


def pair(gate: Any, up: Any) -> Experts:
    """Returns the `gate_up` of jax_ep for gate and up in arrays of their own.

    `jax_ep.moe_ffn` takes "gate" and "up" as they are; the Flax layers and
    `QuantizedWeights` have one array.

    Args:
        gate: an array or `Experts`, `[E, H, F]`, in jax_ep's order.
        up: of the same shape and dtype.

    Returns:
        `[E, H, 2, F]`.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    kinds = [(tuple(each.shape), np.dtype(each.dtype)) for each in (gate, up)]
    errors.require(
        kinds[0] == kinds[1],
        "checkpoints.pair",
        "gate and up must have one shape and dtype",
        kinds,
        "pass both in one dtype and order",
    )
    _require_dims("pair", "gate", gate, 3)
    shape, dtype = kinds[0]
    reads = _reader(gate), _reader(up)
    return Experts(
        (*shape[:-1], 2, shape[-1]),
        dtype,
        lambda expert: np.stack([read(expert) for read in reads], axis=-2),
    )


def quantized_weights(
    gate_up: Any, gate_up_scales: Any, down: Any, down_scales: Any
) -> QuantizedWeights:
    """Returns weights for `jax_ep.experts.fp8`, from codes and scales as they are.

    No code changes. The format follows from the dtype of `gate_up`:

    * float8_e4m3fn, as in DeepSeek-V3, is "fp8_block128": a scale per 128 x 128, in
      float32, or in bfloat16 or float8_e8m0fnu, whose values float32 has.
    * uint8 or int8 with two e2m1 codes per byte along `[in]`, the earlier one in the
      low nibble, as in gpt-oss, is "mxfp4": a float8_e8m0fnu scale, or its uint8 byte,
      per 32 along `[in]`.

    Args:
        gate_up: codes `[E, H, 2, F]`, or `[E, H / 2, 2, F]` of two codes each: an array
            or an `Experts`, as `gate_up` and `pair` return it. The other three as well.
        gate_up_scales: `[E, H / 128, 2, F / 128]` or `[E, H / 32, 2, F]`.
        down: `[E, F, H]` or `[E, F / 2, H]`.
        down_scales: `[E, F / 128, H / 128]` or `[E, F / 32, H]`.

    Returns:
        The weights. Their fields are arrays or `Experts` until `place` reads them.

    Raises:
        ValueError: a dtype or shape is none of these.
    """
    dtype = np.dtype(gate_up.dtype)
    byte = dtype in (np.dtype(np.uint8), np.dtype(np.int8))
    errors.require(
        byte or dtype == quantized.E4M3,
        "checkpoints.quantized_weights",
        "gate_up must have codes in float8_e4m3fn or uint8",
        dtype,
        "jax_ep.experts.quantize_weights makes codes from weights",
    )
    name: WeightFormat = "mxfp4" if byte else "fp8_block128"
    values = (gate_up, gate_up_scales, down, down_scales)
    fields: dict[str, Any] = dict(zip(quantized.CANONICAL, values, strict=True))
    shapes = {field: tuple(value.shape) for field, value in fields.items()}
    # These two count weights, whatever a code holds.
    hidden, inner = down.shape[-1], gate_up.shape[-1]
    unit, count = quantized.multiple_of(name), len(gate_up)
    layout = quantized.layout(name, (count, hidden, 2, inner), (count, inner, hidden))
    wanted = {field: shape for field, (_, shape) in layout.items()}
    errors.require(
        shapes == wanted and not (hidden % unit or inner % unit),
        "checkpoints.quantized_weights",
        f"{name!r} needs H and F that are multiples of {unit}, and for H={hidden} and"
        f" F={inner} the shapes {wanted}",
        shapes,
        "gate_up(), pair() and transpose() bring codes and scales into this order",
    )
    for field, (kind, _) in layout.items():
        found, target = np.dtype(fields[field].dtype), np.dtype(kind)
        if found == target:
            continue
        is_float = target == np.float32
        if is_float:
            fits = found in (np.dtype(jnp.bfloat16), np.dtype(quantized.E8M0))
        else:
            fits = byte and found in (np.dtype(np.uint8), np.dtype(np.int8))
        errors.require(
            fits,
            "checkpoints.quantized_weights",
            f"{field} of {name!r} must be {target}, or convert to it exactly",
            found,
            "pass the codes and scales of one checkpoint",
        )
        value = fields[field]
        fields[field] = value.astype(target) if is_float else value.view(target)
    return QuantizedWeights(**fields, format=name)


def place(experts: Tree, sharding: Any) -> Tree:
    """Puts experts on devices; each reads its own part only.

    Args:
        experts: an array, an `Experts` or a pytree of them, such as a params dict or
            the result of `quantized_weights`.
        sharding: a `jax.sharding.Sharding` for all of them.

    Returns:
        The same with a global `jax.Array` of this sharding in place of each.
    """

    def one(leaf: Any) -> jax.Array:
        return jax.make_array_from_callback(
            tuple(leaf.shape), sharding, lambda index: np.asarray(leaf[index])
        )

    return jax.tree.map(one, experts)


def fuse(
    gate_up: Any, *, interleaved: bool = False, order: MatrixOrder = "out_in"
) -> Experts:
    """Returns gate and up in one matrix, to save them; undoes `gate_up`.

    Args:
        gate_up: an array or `Experts` `[E, H, 2, F]`.
        interleaved: as in `gate_up`.
        order: as in `gate_up`.

    Returns:
        `[E, 2 * F, H]`, or `[E, H, 2 * F]` with `order` "in_out".

    Raises:
        ValueError: `gate_up` has another shape.
    """
    _require_order("fuse", order)
    shape = tuple(gate_up.shape)
    errors.require(
        len(shape) == 4 and shape[2] == 2,
        "checkpoints.fuse",
        "gate_up must be [E, H, 2, F]",
        shape,
        "pair() makes it of two arrays",
    )

    matrices = _reader(gate_up)

    def read(expert: int) -> Array:
        parts = matrices(expert)
        parts = parts.swapaxes(1, 2) if interleaved else parts
        columns = parts.reshape(len(parts), -1)
        return columns.T if order == "out_in" else columns

    return _experts(len(gate_up), read, np.dtype(gate_up.dtype))


def unstack(
    matrices: Any, name: str, *, order: MatrixOrder = "out_in"
) -> dict[str, Array]:
    """Returns a tensor per expert, by name, to save them; undoes `stack`.

    Args:
        matrices: an array or `Experts` `[E, in, out]`.
        name: as in `stack`.
        order: as in `stack`.
    """
    _require_order("unstack", order)
    found = map(_reader(matrices), range(len(matrices)))
    return {
        name.format(expert): each.T if order == "out_in" else each
        for expert, each in enumerate(found)
    }


def open_safetensors(path: str | os.PathLike[str]) -> Mapping[str, Array]:
    """Opens a file in the safetensors format, or all of a folder, without reading them.

    It has the dtypes of quantised checkpoints as well: float8_e4m3fn, float8_e5m2 and
    float8_e8m0fnu. Format: https://github.com/huggingface/safetensors#format.

    Args:
        path: a file, or a folder whose files end in ".safetensors".

    Returns:
        Read-only arrays by name, mapped from the files. Bytes are read from the disk
        when an array's elements are.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not in this format, or two have a tensor of one name.
    """
    where = pathlib.Path(path)
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
    if not files:
        raise FileNotFoundError(f"no file in {where} ends in .safetensors")
    tensors: dict[str, _Tensor] = {}
    for file in files:
        for name, tensor in _entries(file):
            errors.require(
                name not in tensors,
                "checkpoints.open_safetensors",
                "a tensor must be in one file",
                f"{name!r} in {file.name} and in another",
                "pass a folder of one checkpoint",
            )
            tensors[name] = tensor
    return _Mapped(tensors)


def save_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Writes arrays to a file in the safetensors format, one at a time.

    A file that is there already is replaced when all is written.

    Args:
        path: the file.
        tensors: arrays or `Experts` by name. The process must have all of an array's
            parts, so gather those of a global array first.

    Raises:
        ValueError: the format has no name for a dtype.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    # Wider dtypes first, so that each array begins at a multiple of its items' size.
    kinds = {name: np.dtype(tensor.dtype) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: -kinds[name].itemsize)
    for name in order:
        tensor, dtype = tensors[name], kinds[name]
        errors.require(
            dtype in names,
            "checkpoints.save_safetensors",
            f"the dtype of {name!r} must be one of the format's",
            dtype,
            "convert it, or save its bytes as uint8",
        )
        end = offset + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {
            "dtype": names[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    file = pathlib.Path(path)
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            out.write(np.asarray(tensors[name]).tobytes())
    part.replace(file)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of a file: its bytes and how to read them."""

    data: Array
    dtype: str
    shape: tuple[int, ...]


class _Mapped(Mapping[str, Array]):
    def __init__(self, tensors: dict[str, _Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Array:
        tensor = self._tensors[name]
        # Only here, so that other tensors of a file can be read.
        errors.require(
            tensor.dtype in _DTYPES,
            "checkpoints.open_safetensors",
            f"the dtype of {name!r} must be one of {sorted(_DTYPES)}",
            errors.brief(tensor.dtype),
            "read this tensor with the library that wrote it",
        )
        dtype = _DTYPES[tensor.dtype]
        size = math.prod(tensor.shape) * dtype.itemsize
        errors.require(
            size == tensor.data.size,
            "checkpoints.open_safetensors",
            f"{name!r} must have {size} bytes, for {tensor.dtype} {tensor.shape}",
            tensor.data.size,
            "the file may be damaged",
        )
        return tensor.data.view(dtype).reshape(tensor.shape)


def _entries(file: pathlib.Path) -> Iterator[tuple[str, _Tensor]]:
    size = file.stat().st_size
    data: Array = np.memmap(file, np.uint8, "r") if size else np.empty(0, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        header = json.loads(data[8:start].tobytes()) if 8 < start <= size else None
        entries = {
            str(name): (str(entry["dtype"]), entry["shape"], entry["data_offsets"])
            for name, entry in ({} if header is None else header).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        header, entries = None, {}
    errors.require(
        header is not None
        and all(_is_entry(entry, size - start) for entry in entries.values()),
        "checkpoints.open_safetensors",
        "the file must be whole and in the safetensors format",
        errors.brief(str(file)),
        "download it again, or convert it",
    )
    body = data[start:]
    for name, (dtype, shape, (begin, end)) in entries.items():
        yield name, _Tensor(body[begin:end], dtype, tuple(shape))


def _is_entry(entry: tuple[str, Any, Any], size: int) -> bool:
    _, shape, offsets = entry
    numbers = isinstance(shape, list) and isinstance(offsets, list)
    numbers = numbers and all(type(n) is int and n >= 0 for n in (*shape, *offsets))
    return numbers and len(offsets) == 2 and offsets[0] <= offsets[1] <= size


def _experts(count: int, read: Callable[[int], Array], dtype: np.dtype[Any]) -> Experts:
    return Experts((count, *read(0).shape), dtype, read)


def _reader(matrices: Any) -> Callable[[int], Array]:
    """Returns what reads one expert, as a view where that is possible."""
    if isinstance(matrices, Experts):
        return matrices.read
    return lambda expert: np.asarray(matrices[expert])


def _rows(matrix: Any) -> Array:
    return np.asarray(matrix).reshape(len(matrix), -1)


def _require_order(function: str, order: str) -> None:
    errors.require(
        errors.is_one_of(order, MATRIX_ORDERS),
        f"checkpoints.{function}",
        f"order must be one of {list(MATRIX_ORDERS)}",
        errors.brief(order),
        'a PyTorch Linear is "out_in"',
    )


def _require_dims(function: str, name: str, value: Any, least: int) -> None:
    errors.require(
        len(value.shape) >= least and value.shape[0] > 0,
        f"checkpoints.{function}",
        f"{name} must have at least {least} dimensions, of which the first is experts",
        tuple(value.shape),
        "stack() makes one of a tensor per expert",
    )
