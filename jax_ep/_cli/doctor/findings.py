"""The findings of `jax-ep doctor`: what this machine can do, and why."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._cli.doctor import advice, links
from jax_ep._cli.values import backend_advice, backend_problem
from jax_ep._core.literals import TRANSPORTS, HandleTransport
from jax_ep._native import ffi, loader, plugins
from jax_ep._peers import nvshmem, topology
from jax_ep._peers import windows as _windows
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._setup import shared
from jax_ep._transport import by_name, select

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")
# Fields of a config that distinguish shared handles.
_TOLD = (
    "num_experts",
    "top_k",
    "hidden_size",
    "max_tokens_per_rank",
    "dispatch_format",
)
_NO_DEVICES = 8  # default number of ranks if there are no devices to count


def examine(
    config: jax_ep.EPConfig,
    ranks: int | None = None,
    tokens: Sequence[int] | None = None,
    chunks: int = 1,
) -> dict[str, Any]:
    """Returns all findings as JSON types.

    Args:
        config: the config to count memory for, and to check p2p with. Its
            ranks_per_node sets shmem's nodes; None means as many as there are devices,
            or the largest smaller number that divides the ranks.
        ranks: size of the EP group to count memory for; None means `group_size`.
        tokens: T of each shared handle to count memory for; None means the config's.
        chunks: those of the layer; the config is that of its handle, for one of them.
    """
    found: dict[str, Any] = {"versions": versions(), "build": _build()}
    devices, problem = local_devices()
    found["devices"] = [_device(device) for device in devices]
    if devices:
        found["peer_access"] = peer_access(devices)
        found["links"] = links.links(devices)
        found["transports"] = transports(devices, config)
    entries = found.get("transports", {})
    group = ranks or group_size(config.num_experts)
    found["memory"] = memory(config, group)
    if entries and entries["p2p"]["works"] and group == len(devices):
        windows: int | str | None = _opened_bytes(devices, config)
    else:
        windows = window_bytes(config, group)
    node = config.ranks_per_node or _fitting(len(devices) or _NO_DEVICES, group)
    found["memory"] |= {
        "chunks": chunks,
        "max_tokens_per_rank": config.max_tokens_per_rank,
        "p2p_windows": windows,
        "ranks_per_node": node,
        "shmem_windows": window_bytes(config, group, node),
    }
    found["shared_handles"] = {
        "open": opened(),
        "estimate": estimated(config, group, node, tokens),
    }
    tests = [entry["test"] for entry in entries.values() if "test" in entry]
    found["problems"] = [text for text in tests if text != "passed"]
    found["advice"] = advice.advice(found, devices, config)
    of_modules = (loader.plugin_problem, loader.shmem_problem())
    found["problems"][:0] = filter(None, of_modules)
    if problem is not None:
        found["problems"].insert(0, problem)
        found["advice"][:0] = filter(None, [backend_advice()])
    return found


def local_devices() -> tuple[list[Any], str | None]:
    """Returns this process's devices, or no devices and the reason."""
    try:
        return jax.local_devices(), None
    except Exception as error:  # JAX raises many types here, and each is a finding
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return [], backend_problem(text)


def group_size(experts: int) -> int:
    """Returns the default group size: all devices, or the most that divide experts."""
    return _fitting(len(local_devices()[0]) or _NO_DEVICES, experts)


def versions() -> dict[str, str | None]:
    """Returns versions of jax_ep, Python and related packages; None if missing."""
    found: dict[str, str | None] = {"jax_ep": jax_ep.__version__}
    found["python"] = platform.python_version()
    for name in (*_PACKAGES, *advice.CUDA_PACKAGES, nvshmem.PACKAGE):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found |= {plugin.name: plugin.version for plugin in plugins.installed()}
    found["nvidia driver"] = links.driver()
    found["built with cuda"] = links.toolkit()
    found["nccl"] = links.nccl()
    return found


def _build() -> dict[str, bool]:
    shmem = loader.shmem()
    nodes = bool(getattr(shmem, "HAS_KERNELS", False))
    found = {"cpu": True, "cuda": ffi.native_cuda is not None}
    return found | {"shmem": shmem is not None, "shmem over nodes": nodes}


def _device(device: Any) -> dict[str, Any]:
    memory = None
    if device.platform != "cpu":
        memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "process": device.process_index,
        "compute_capability": getattr(device, "compute_capability", None),
        "memory_bytes": memory,
    }


def peer_access(devices: list[Any]) -> list[list[bool]] | None:
    """Returns which pairs of devices support p2p, or None on CPUs or without CUDA."""
    if devices[0].platform == "cpu" or ffi.native_cuda is None:
        return None
    ordinals = [_windows.ordinal(device) for device in devices]

    def served(a: int, b: int) -> bool:
        group = [a] if a == b else [a, b]
        return ffi.native_for("gpu").p2p_obstacle([group]) is None

    return [[served(a, b) for b in ordinals] for a in ordinals]


def transports(devices: list[Any], config: jax_ep.EPConfig) -> dict[str, Any]:
    """Returns for each transport whether it works, why, and a test's result if so."""
    mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    found: dict[str, Any] = {}
    try:
        ffi.native_for(devices[0].platform)
    except ValueError as error:
        why = str(error).removeprefix("jax_ep.init: ")
        return {name: {"works": False, "why": why} for name in _names()}
    found["collective"] = {"works": True, "why": "XLA's collectives serve any devices"}
    # The mesh holds only this process's devices, so nobody else takes part.
    with Rendezvous.of(mesh, config.timeout_s) as rendezvous:
        groups = select.ep_groups(mesh, ("ep",))
        p2p, shmem = (
            by_name(name).obstacle(mesh, groups, config, rendezvous)
            for name in ("p2p", "shmem")
        )
    found["p2p"] = _windowed(p2p, "every device reaches every other")
    found["shmem"] = _windowed(shmem, "NVSHMEM is there, and one GPU in this process")
    for name in _names():
        if found[name]["works"]:
            found[name]["test"] = self_test(mesh, name)
    return found


def _windowed(obstacle: _windows.Obstacle | None, why: str) -> dict[str, Any]:
    if obstacle is not None:
        why = f"must have {obstacle[0]}, found {obstacle[1]}"
    return {"works": obstacle is None, "why": why}


def _names() -> list[HandleTransport]:
    return [name for name in TRANSPORTS if name != "auto"]


def self_test(mesh: Mesh, transport: HandleTransport) -> str:
    """Sends a few tokens to experts and back; returns "passed" or what went wrong."""
    n, hidden, experts = 16, 128, 2 * mesh.size
    config = jax_ep.EPConfig(
        num_experts=experts,
        top_k=2,
        hidden_size=hidden,
        max_tokens_per_rank=n,
        dtype="float32",
        timeout_s=20.0,
    )
    total = n * mesh.size
    x = np.random.default_rng(0).standard_normal((total, hidden)).astype(np.float32)
    first = np.arange(total) % experts
    ids = np.stack([first, (first + experts // 2) % experts], 1).astype(np.int32)
    weights = np.tile(np.array([0.25, 0.75], np.float32), (total, 1))

    def there_and_back(x: Any, ids: Any, weights: Any) -> Any:
        d = jax_ep.dispatch(ep, x, ids, weights)
        rank = jax.lax.axis_index("ep")
        local = jnp.repeat(
            jnp.arange(ep.local_experts, dtype=jnp.int32),
            d.group_sizes,
            total_repeat_length=ep.recv_capacity,
        )
        scale = 1 + rank * ep.local_experts + local
        rows = d.tokens * scale[:, None].astype(d.tokens.dtype)
        return jax_ep.combine(ep, rows, d.route, d.router_weights)

    try:
        with jax_ep.init(mesh, "ep", config, transport=transport) as ep:
            run = jax.shard_map(
                there_and_back, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")
            )
            y = np.asarray(jax.jit(run)(x, ids, weights))
            ep.check()
    except Exception as error:  # any failure is a finding
        return f"{transport}: {type(error).__name__}: {str(error).splitlines()[0]}"
    expected = x * np.sum(weights * (1 + ids), axis=1)[:, None]
    if not np.allclose(y, expected, rtol=1e-5, atol=1e-5):
        return f"{transport}: wrong sums, largest error {np.abs(y - expected).max()}"
    return "passed"


def memory(config: jax_ep.EPConfig, ranks: int) -> dict[str, Any]:
    """Returns bytes per rank for the calls of one layer, in a group of `ranks`.

    `exchange` is what transport collective sends and receives, for dispatch or combine,
    whichever is larger.
    """
    native, name = ffi.native, config.dispatch_format
    rows, tokens = config.capacity(ranks), config.max_tokens_per_rank
    hidden, element = config.hidden_size, config.element_bytes
    shared = config.fused_shared_expert
    payload, scales = native.encoded_bytes(name, hidden, element)
    # A shared expert adds one group, and one row per token.
    top_k, groups = config.top_k + shared, config.num_experts // ranks + shared
    sent = (name, hidden, element, tokens, top_k, groups)
    there = native.dispatch_region_bytes(*sent)
    wire, packed = jnp.dtype(config.wire_dtype).itemsize, config.combine_format
    # "bf16" means unencoded rows. Unless expert ranks sum, K rows per token are sent.
    back = native.combine_region_bytes(
        packed or "bf16",
        hidden,
        element if packed else wire,
        tokens if config.reduce == "rank" else tokens * config.top_k,
        0,
    )
    return {
        "ranks": ranks,
        "recv_capacity": rows,
        "dispatched_rows": rows * (payload + scales),
        "expert_rows": rows * hidden * element,
        "tables": 4 * (rows * 5 + ranks * tokens * top_k),
        "exchange": 2 * ranks * max(there, back),
        "worst_case": config.recv_capacity is None and config.capacity_factor is None,
    }


def opened() -> list[dict[str, Any]]:
    """Returns the shared handles of this process, with the bytes that each keeps."""
    return [
        {
            "transport": ep.transport,
            "ranks": ep.ep_size,
            **{name: getattr(ep.config, name) for name in _TOLD},
            "recv_capacity": ep.recv_capacity,
            "bytes": ep.buffer_bytes,
        }
        for ep in shared.open_handles()
    ]


def estimated(
    config: jax_ep.EPConfig,
    ranks: int,
    node: int,
    tokens: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Returns what a shared handle for each T would keep per device while it is open.

    Transport collective keeps nothing. None stands for a group that is too large.
    """
    found = []
    for count in tokens or [config.max_tokens_per_rank]:
        own = dataclasses.replace(config, max_tokens_per_rank=count)
        kept = {"collective": 0, "p2p": window_bytes(own, ranks)}
        if ranks > node:
            kept["shmem"] = window_bytes(own, ranks, node)
        found.append({"max_tokens_per_rank": count, "bytes": kept})
    return found


def window_bytes(
    config: jax_ep.EPConfig, ranks: int, node: int | None = None
) -> int | None:
    """Returns bytes of a rank's window in a group of `ranks`, or None above the limit.

    The window is one of p2p, or with `node` one of shmem over nodes of `node` ranks.
    It depends only on sizes, so the group need not exist here.
    """
    if ranks > ffi.native.MAX_WINDOW_RANKS:
        return None
    return topology.window_bytes(config, [[*topology.forced(ranks, node or ranks)]])


def _opened_bytes(devices: list[Any], config: jax_ep.EPConfig) -> int | str:
    """Returns the bytes per device of a p2p handle, or why it cannot be opened."""
    mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    try:
        with jax_ep.init(mesh, "ep", config, transport="p2p") as ep:
            return ep.buffer_bytes
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]


def _fitting(most: int, number: int) -> int:
    return max(each for each in range(1, most + 1) if number % each == 0)


def silent_examine(*args: Any) -> dict[str, Any]:
    """Runs `examine` without the warnings of its self-tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return examine(*args)
