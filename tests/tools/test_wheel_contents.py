"""The contents of a wheel and its behaviour at run time, without a network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from jax_ep._native import loader
from support import ROOT
from support.launch import run_to_end

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SYSTEM_LIBRARIES = {
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libdl.so.2",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}


def test_build_requirements_are_pinned() -> None:
    for requirement in PROJECT["build-system"]["requires"]:
        assert re.fullmatch(r"[\w-]+==[\d.]+", requirement), requirement


def test_third_party_names_what_is_compiled_in() -> None:
    text = (ROOT / "THIRD_PARTY.md").read_text()
    pins = dict(r.split("==") for r in PROJECT["build-system"]["requires"])
    for component in ("jaxlib", "nanobind"):
        assert re.search(rf"{component}.*\b{re.escape(pins[component])}\b", text)
    assert "THIRD_PARTY.md" in PROJECT["project"]["license-files"]


@pytest.mark.parametrize("name", ["cpu", "cuda", "shmem"])
def test_native_modules_link_the_system_alone(name: str) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    module = loader.shmem() if name == "shmem" else getattr(loader, name)
    if module is None:
        pytest.skip(f"nothing here has _native_{name}")
    text = subprocess.run(
        ["readelf", "-d", module.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", text))
    assert needed
    assert needed <= SYSTEM_LIBRARIES, needed - SYSTEM_LIBRARIES
    assert not re.search("R(UN)?PATH", text), "a search path of the build machine"


def test_wheel_is_compared_with_the_repository() -> None:
    """`.ci/run` checks the wheel that it builds; this tests the check itself."""
    path = ROOT / ".ci" / "check_wheel.py"
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    spec = importlib.util.spec_from_file_location("check_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    tracked = check.tracked_files()
    names = [name for name in tracked if name.startswith("jax_ep/")]
    names += ["jax_ep/_native_cpu.abi3.so"]
    assert "jax_ep/_cli/bench/peer_writes.cu" in names
    names += [f"jax_ep-0.1.0.dist-info/{name}" for name in check.METADATA]
    assert check.faults(names, tracked) == []
    for extra in (
        "jax_ep/notes.txt",
        "jax_ep/_native_gpu.so",
        "jax_ep/_native_cpu.cpython-311.so",
        "benchmarks/soak/soak.py",
        "other/__init__.py",
        "jax_ep-0.1.0.dist-info/licenses/OTHER",
    ):
        assert len(check.faults([*names, extra], tracked)) == 1, extra
    for index, name in enumerate(names):
        assert check.faults(names[:index] + names[index + 1 :], tracked), name
    plugin = "jax_ep_cuda13_plugin"
    names = [f"{plugin}/__init__.py", f"{plugin}/_native_cuda.abi3.so"]
    names += [f"{plugin}-0.1.0.dist-info/{name}" for name in check.METADATA]
    assert check.faults(names, tracked, plugin) == []
    for extra in (f"{plugin}/_native_cpu.abi3.so.1", "jax_ep/__init__.py"):
        assert len(check.faults([*names, extra], tracked, plugin)) == 1, extra
    for index, name in enumerate(names):
        assert check.faults(names[:index] + names[index + 1 :], tracked, plugin), name


def test_requirements_are_few() -> None:
    needed = importlib.metadata.requires("jax_ep") if _installed() else None
    needed = needed or PROJECT["project"]["dependencies"]
    bare = {re.split(r"[<>=~! \[;]", n)[0] for n in needed if "extra ==" not in n}
    assert bare == {"jax", "jaxlib", "numpy"}


def _installed() -> bool:
    try:
        importlib.metadata.distribution("jax_ep")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


QUIET = """
import sys
told = []
def hook(event, args):
    # Sockets that go nowhere, as a thread pool's wake-up pair, are no network.
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
        told.append((event, args[1:]))
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        told.append((event, args[:1]))
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.block_until_ready(jax.numpy.zeros(3) + 1)
sys.addaudithook(hook)
import jax_ep, jax.numpy as jnp
mesh = jax.make_mesh((2,), ("ep",))
config = jax_ep.EPConfig(num_experts=4, top_k=2, hidden_size=8, max_tokens_per_rank=4)
with jax_ep.init(mesh, "ep", config) as ep:
    x, ids = jnp.ones((8, 8), jnp.bfloat16), jnp.zeros((8, 2), jnp.int32)
    d = jax_ep.sharded.dispatch(ep, x, ids)
    jax.block_until_ready(jax_ep.sharded.combine(ep, d.tokens, d.route))
    ep.check()
assert not told, told
print("quiet")
"""


def test_no_network_and_no_processes() -> None:
    done = run_to_end(
        [sys.executable, "-W", "ignore", "-c", QUIET],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "quiet"
