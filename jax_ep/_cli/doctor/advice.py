"""The advice of `jax-ep doctor`."""

from __future__ import annotations

import re
from typing import Any

from jax_ep import formats
from jax_ep._cli.doctor import links
from jax_ep._core.config import EPConfig
from jax_ep._experts import interface, of_rows
from jax_ep._native import ffi, loader, plugins
from jax_ep._setup import capacity

CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_OLDEST_CAPABILITY = 9.0


def _install() -> str:
    # With this setting a build without nvcc fails, rather than build for CPUs only.
    return (
        f'pip install "jax_ep[{plugins.wanted_extra()}]" (or, in the repository of '
        "jax_ep with nvcc 12.5 or newer on PATH or in CUDA_HOME, pip install . -C "
        "cmake.define.JAX_EP_CUDA=ON)"
    )


def advice(found: dict[str, Any], devices: list[Any], config: EPConfig) -> list[str]:
    """Returns advice, in sentences, on what `findings.examine` has found so far."""
    advice = []
    on_gpu = bool(devices) and devices[0].platform != "cpu"
    if on_gpu and ffi.native_cuda is None:
        advice.append(f"this jax_ep has no CUDA module: run {_install()}")
    advice += _on_plugins(found.get("versions", {}))
    if not on_gpu:
        only = "only CPU devices, which are fine for tests and small runs; "
        advice.append((only if devices else "") + _for_gpus(found["versions"]))
    if on_gpu:
        slow = of_rows.shortfall(interface.Case(devices[0], config.dtype))
        advice += [slow] if slow else []
    capabilities = [_capability(device) for device in devices]
    if any(each and each < _OLDEST_CAPABILITY for each in capabilities):
        advice.append("p2p needs compute capability 9.0: use transport collective")
    sizes = found["memory"]
    needed = sizes["dispatched_rows"] + sizes["expert_rows"] + sizes["exchange"]
    limits = [d["memory_bytes"] for d in found["devices"] if d["memory_bytes"]]
    if limits and needed > min(limits) / 2:
        advice.append(
            f"the config takes {needed / 1e9:.1f} GB of the {min(limits) / 1e9:.1f} GB "
            "per device: pass chunks= to the layer, lower max_tokens_per_rank or limit "
            "recv_capacity"
        )
    if sizes["worst_case"] and sizes["recv_capacity"] > 2 * _balanced(config):
        advice.append(
            f"recv_capacity is the worst case, {sizes['recv_capacity']:,} rows, while "
            f"a balanced router sends {_balanced(config):,}: chunks= of a layer saves "
            "memory for time, and capacity_factor=1.25 at the risk of dropped rows "
            "(jax_ep.stats counts them)"
        )
    remark = capacity.shortfall(config, sizes["ranks"])
    if remark is not None:
        advice.append(remark)
    # A single rank has no link to wait for, and virtual CPU devices share memory.
    linked = on_gpu and sizes["ranks"] > 1
    plain = not formats.is_quantized(config.dispatch_format)
    if linked and plain and config.hidden_size % 128 == 0:
        advice.append(
            'dispatch_format="fp8_block128" halves the bytes of bfloat16 dispatch, '
            "which pays if calls wait for the link (docs/formats.md)"
        )
    return advice


def _on_plugins(versions: dict[str, Any]) -> list[str]:
    """Returns advice on plugins that are unused, or for another CUDA than JAX's."""
    plugin, idle = loader.plugin, plugins.installed()
    if ffi.native_cuda is not None and plugin is None and idle:
        return [
            f"this jax_ep was built with CUDA, so that plugin {idle[0].name} is not "
            f"used: pip uninstall {idle[0].name}"
        ]
    has = [name for name in CUDA_PACKAGES if versions.get(name)]
    if plugin is None or not has or f"jax-{plugin.extra}-plugin" in has:
        return []
    extra = has[0].split("-")[1]
    return [
        f"{has[0]} and {plugin.name} are for different CUDA versions: run pip "
        f'uninstall {plugin.name}, then pip install "jax_ep[{extra}]"'
    ]


def _for_gpus(versions: dict[str, Any]) -> str:
    """Returns what this installation lacks for GPUs, in the order to install it."""
    lacks = []
    # JAX's packages first, because the build finds the nvcc that comes with them.
    if not any(map(versions.get, CUDA_PACKAGES)):
        lacks.append('pip install "jax[cuda13]"')
    if ffi.native_cuda is None:
        lacks.append(_install())
    elsewhere = "on a machine that has some: no driver answers here"
    no_driver = ffi.native_cuda is not None and links.driver() is None
    if lacks:
        then = f", {elsewhere}" if no_driver else ""
        return "for NVIDIA GPUs run " + ", then ".join(lacks) + then
    if no_driver:
        return f"for NVIDIA GPUs, run {elsewhere}"
    return (
        "this installation supports NVIDIA GPUs, but JAX uses none here: check "
        "JAX_PLATFORMS, CUDA_VISIBLE_DEVICES and the output of nvidia-smi"
    )


def _capability(device: Any) -> float | None:
    """Returns an NVIDIA GPU's compute capability; None on other platforms."""
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else None


def _balanced(config: EPConfig) -> int:
    return config.max_tokens_per_rank * config.top_k
