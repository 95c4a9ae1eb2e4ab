"""Plugins with the CUDA modules: which is loaded, messages, how they are built."""

from __future__ import annotations

import pathlib
import re
import runpy
import sys
import tomllib
import types

import pytest

import jax_ep
from jax_ep._cli.doctor import advice, findings
from jax_ep._native import expected, ffi, fingerprint, loader, plugins
from support import ROOT, helpers
from support.launch import run_to_end

VERSION = jax_ep.__version__
OTHER = "0.0.9"


def plugin(number: int, version: str = VERSION) -> plugins.Plugin:
    package = f"jax_ep_cuda{number}_plugin"
    return plugins.Plugin(f"cuda{number}", package, package.replace("_", "-"), version)


def project(folder: str) -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    ("found", "chosen", "words"),
    [
        ([], None, []),
        ([plugin(13)], 13, []),
        ([plugin(12)], 12, []),
        (
            [plugin(13, OTHER)],
            None,
            [f"version {VERSION}", f"got {OTHER}", f'"jax_ep[cuda13]=={VERSION}"'],
        ),
        ([plugin(13), plugin(12)], 12, ["got 2", "uninstall jax-ep-cuda13-plugin"]),
        ([plugin(13, OTHER), plugin(12)], 12, ["uninstall jax-ep-cuda13-plugin"]),
        ([plugin(13), plugin(12, OTHER)], 13, ["uninstall jax-ep-cuda12-plugin"]),
    ],
)
def test_choice(found, chosen, words, monkeypatch) -> None:
    """Only plugins of this version; if there are two, the one for the installed JAX."""
    monkeypatch.setattr(plugins, "wanted_extra", lambda: "cuda12")
    best, problem = plugins.choose(found, VERSION)
    assert best == (chosen and plugin(chosen))
    assert bool(problem) == bool(words)
    assert all(word in problem for word in words)


def install(
    folder: pathlib.Path, one: plugins.Plugin, module: str | None, shmem: str = ""
) -> None:
    """Installs a plugin like pip, with Python code in place of the native modules."""
    (folder / one.package).mkdir()
    (folder / one.package / "__init__.py").touch()
    for name, text in (("_native_cuda", module), ("_native_shmem", shmem)):
        if text:
            (folder / one.package / f"{name}.py").write_text(text)
    told = folder / f"{one.package}-{one.version}.dist-info"
    told.mkdir()
    if one.version:
        (told / "METADATA").write_text(f"Name: {one.name}\nVersion: {one.version}\n")
    entry = f"[{plugins.GROUP}]\n{one.extra} = {one.package}\n"
    (told / "entry_points.txt").write_text(entry)


LOADED = """
import jax_ep
from jax_ep._native import loader
print(loader.cuda and loader.cuda.__name__, loader.shmem())
print(loader.shmem_problem())
"""
# A module with the names and the tables of this commit's.
NAMES = re.findall(
    r"^(?:def )?(\w+)[(:]",
    (ROOT / "jax_ep/_native_cuda.pyi").read_text(),
    re.MULTILINE,
)
FITTING = f"""
from jax_ep._native_cpu import operand_tables
{" = ".join(name for name in NAMES if name != "operand_tables")} = lambda: {{}}
"""
SAME_COMMIT = "must be of the same commit"


@pytest.mark.skipif(loader.plugin is not None, reason="a plugin is installed")
@pytest.mark.parametrize(
    ("version", "module", "loaded", "told"),
    [
        (VERSION, FITTING, True, ""),
        (OTHER, FITTING, False, f"got {OTHER}, so it is not loaded"),
        (VERSION, "raise OSError('no driver')", False, "(OSError: no driver)"),
    ],
)
def test_import_loads_it_or_says_why_not(
    version, module, loaded, told, tmp_path
) -> None:
    if loader.cuda is not None:
        pytest.skip("this build has CUDA modules of its own, which come first")
    install(tmp_path, plugin(13, version), module)
    out, err = run_with(tmp_path)
    name = "jax_ep_cuda13_plugin._native_cuda" if loaded else "None"
    assert out.split() == [name, "None", "None"]
    warned = [line for line in err.splitlines() if "RuntimeWarning" in line]
    assert len(warned) == bool(told)
    assert all(f"jax_ep: plugin {plugin(13).name} " in line for line in warned)
    assert all("; run pip install " in line for line in warned)
    assert told in err


@pytest.mark.skipif(loader.cuda is not None, reason="has CUDA modules already")
@pytest.mark.parametrize(
    ("version", "module", "told"),
    [
        (VERSION, FITTING, None),
        (VERSION, "raise ImportError('no lib.so')", "(ImportError: no lib.so)"),
        (VERSION, "import gone", "does not load (ModuleNotFoundError"),
        (VERSION, "1 / 0", "does not load (ZeroDivisionError"),
        (VERSION, FITTING + "def targets(): 1 / 0", "(ZeroDivisionError"),
        (VERSION, FITTING + "del targets", SAME_COMMIT),
        (VERSION, FITTING + "def more(): 0", SAME_COMMIT),
        (VERSION, FITTING + "def operand_tables(): return {}", SAME_COMMIT),
        (VERSION, None, "has no module _native_cuda"),
        (None, FITTING, "got unknown, so it is not loaded"),
    ],
)
def test_modules_that_do_not_fit(version, module, told, tmp_path, monkeypatch) -> None:
    install(tmp_path, plugin(13, version), module)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("", "._native_cuda")
    try:
        found, used, problem = loader._load_cuda()
    finally:
        for name in names:
            sys.modules.pop(f"jax_ep_cuda13_plugin{name}", None)
    assert (found is None) == (used is None) == bool(told)
    assert bool(problem) == bool(told)
    if told:
        assert told in problem
        assert "; run pip install " in problem


def run_with(folder: pathlib.Path) -> tuple[str, str]:
    """Output of `LOADED` where the plugins of a folder are installed."""
    here = str(pathlib.Path(jax_ep.__file__).parent.parent)
    program = f"import sys; sys.path += [{here!r}, {str(folder)!r}]\n{LOADED}"
    done = run_to_end([sys.executable, "-P", "-c", program])
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.skipif(loader.plugin is not None, reason="a plugin is installed")
def test_a_shmem_module_that_does_not_fit_is_left_out(tmp_path) -> None:
    if loader.cuda is not None:
        pytest.skip("this build has CUDA modules of its own, which come first")
    install(tmp_path, plugin(13), FITTING, "def load(path): ...")
    out, _ = run_with(tmp_path)
    loaded, problem = out.splitlines()
    assert loaded == "jax_ep_cuda13_plugin._native_cuda None"
    assert problem.startswith(f"_native_shmem {SAME_COMMIT}")
    assert '"jax_ep[cuda13]==' in problem


def test_a_cpu_module_of_another_commit_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(expected.FINGERPRINTS, "_native_cpu", "0123456789ab")
    found = fingerprint.of(loader.cpu)
    with pytest.raises(ImportError, match=f"0123456789ab, got {found} .*; run pip in"):
        loader._load_cpu()


@pytest.mark.parametrize("name", ["cpu", "cuda", "shmem"])
def test_loaded_modules_fit(name: str) -> None:
    module = loader.shmem() if name == "shmem" else getattr(loader, name)
    if module is None:
        pytest.skip(f"nothing here has _native_{name}")
    wanted = expected.FINGERPRINTS[f"_native_{name}"]
    assert fingerprint.of(module) == wanted, "run .ci/fingerprints.py"


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("cpu", ["ffi/cpu_module.cc", "ffi/module_common.h"]),
        ("cuda", ["ffi/cuda_module.cc", "ffi/module_common.h"]),
        ("shmem", ["shmem/module.cc"]),
    ],
)
def test_stubs_list_the_names_of_the_modules(name: str, sources: list[str]) -> None:
    """Fingerprints of modules that are not built here are made from their stubs."""
    text = "".join((ROOT / "xla_ffi" / source).read_text() for source in sources)
    names = set(re.findall(r"m\.(?:def|attr)\(\s*\"(\w+)\"", text))
    stubs = runpy.run_path(str(ROOT / ".ci" / "fingerprints.py"))
    assert set(stubs["names_of"](f"_native_{name}")) == names


def test_handles_on_gpus_are_told_of_a_plugin_that_does_not_fit(monkeypatch) -> None:
    problem = plugins.unfit(plugin(13), "does not load (OSError: no driver)")
    monkeypatch.setattr(ffi, "native_cuda", None)
    monkeypatch.setattr(ffi, "plugin_problem", problem)
    with pytest.raises(ValueError, match=r"OSError: no driver.*; run pip install"):
        ffi.native_for("gpu")


def test_doctor_has_it_among_the_problems(monkeypatch) -> None:
    _, problem = plugins.choose([plugin(13, OTHER)], VERSION)
    monkeypatch.setattr(loader, "plugin_problem", problem)
    shmem = "_native_shmem does not load (OSError: no lib.so); run pip install ."
    monkeypatch.setattr(loader, "shmem_problem", lambda: shmem)
    monkeypatch.setattr(plugins, "installed", lambda: [plugin(13, OTHER)])
    monkeypatch.setattr(findings, "self_test", lambda *args: "passed")
    found = findings.silent_examine(helpers.make_config())
    assert found["problems"] == [problem, shmem]
    assert found["versions"]["jax-ep-cuda13-plugin"] == OTHER


@pytest.mark.parametrize(
    ("used", "idle", "jax_has", "words"),
    [
        (None, [plugin(13)], "jax-cuda13-plugin", "pip uninstall jax-ep-cuda13-plugin"),
        (plugin(13), [plugin(13)], "jax-cuda13-plugin", ""),
        (plugin(13), [plugin(13)], "jax-cuda12-plugin", '"jax_ep[cuda12]"'),
        (plugin(13), [plugin(13)], None, ""),
    ],
)
def test_doctor_on_plugins(used, idle, jax_has, words, monkeypatch) -> None:
    monkeypatch.setattr(ffi, "native_cuda", types.SimpleNamespace())
    monkeypatch.setattr(loader, "plugin", used)
    monkeypatch.setattr(plugins, "installed", lambda: idle)
    versions = dict.fromkeys(advice.CUDA_PACKAGES)
    if jax_has:
        versions[jax_has] = "0.10.2"
    lines = advice._on_plugins(versions)
    assert len(lines) == bool(words)
    assert all(words in line for line in lines)


def test_version_is_that_of_one_place() -> None:
    """The version is that of jax_ep/__init__.py wherever it is named or read."""
    main = project(".")
    for number in (12, 13):
        own = project(f"plugins/cuda{number}")
        extra = main["project"]["optional-dependencies"][f"cuda{number}"]
        oldest = main["project"]["dependencies"][0].removeprefix("jax")
        name = f"jax-ep-cuda{number}-plugin"
        assert extra == [f"jax[cuda{number}]{oldest}", f"{name}=={VERSION}"]
        assert own["project"]["name"] == name
        assert own["project"]["dependencies"] == [f"jax_ep=={VERSION}"]
        (version,) = own["tool"]["dynamic-metadata"]
        assert version["field"] == "version"
        read = version["input"]
        source = ROOT / "plugins" / f"cuda{number}" / read
        assert source.samefile(ROOT / "jax_ep" / "__init__.py")
    assert f'version: "{VERSION}"' in (ROOT / "CITATION.cff").read_text()


def test_plugins_differ_by_their_number() -> None:
    """Plugins are built like the package, except for its README on an index."""
    folders = [ROOT / "plugins" / name for name in ("cuda12", "cuda13")]
    twelve, thirteen = (
        {
            str(path.relative_to(folder)): path.read_text()
            for path in [*folder.iterdir(), *folder.glob("*_plugin/*.py")]
            if path.is_file()
        }
        for folder in folders
    )
    assert len(twelve) == 5
    for name, text in twelve.items():
        other = name.replace("cuda12", "cuda13")
        for word in ("cuda12", "CUDA 12", '"12"', ":: 12"):
            text = text.replace(word, word.replace("12", "13"))
        assert thirteen[other] == text, name
    needed = project(".")["build-system"]["requires"]
    readme = [name for name in needed if name.startswith("hatch-fancy-pypi-readme")]
    own = project("plugins/cuda13")
    assert own["build-system"]["requires"] == [n for n in needed if n not in readme]
    settings = own["tool"]["scikit-build"]["wheel"]["py-api"]
    assert settings == project(".")["tool"]["scikit-build"]["wheel"]["py-api"]
    for name in ("LICENSE", "THIRD_PARTY.md"):
        assert (ROOT / "plugins" / "cuda13" / name).resolve() == ROOT / name
