"""README and docs: their Python runs, their generated parts and names are current."""

import ast
import importlib.util
import re
import sys

import pytest

from support import ROOT
from support.launch import run_to_end
from support.pages import python_blocks


def test_readme_program_runs_and_differentiates():
    first, program = python_blocks("README.md")
    program += (
        "\nimport numpy as np\n"
        "assert y.shape == (n, 64) and np.isfinite(np.asarray(y, np.float32)).all()\n"
        "loss = lambda w: moe(tokens, topk_ids, router_weights, w, down).sum()\n"
        "assert np.abs(np.asarray(jax.grad(loss)(gate_up), np.float32)).sum() > 0\n"
        "print('devices', ep.ep_size)\n"
    )
    first += (
        "\nimport numpy as np\n"
        "assert y.shape == tokens.shape\n"
        "assert np.isfinite(np.asarray(y, np.float32)).all()\n"
    )
    header = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
    run = run_to_end([sys.executable, "-c", header + first + program])
    assert run.returncode == 0, run.stderr
    assert "devices" in run.stdout


def test_generated_parts_are_current():
    run = run_to_end([sys.executable, str(ROOT / "docs" / "generate.py"), "--check"])
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "doc",
    sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "api").glob("*.md")]),
    ids=lambda p: str(p.relative_to(ROOT / "docs")),
)
def test_links_and_files_named_in_docs_exist(doc):
    text = doc.read_text()
    # In code this may be an index and a call.
    prose = re.sub("```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (doc.parent / target).exists(), target
    for path in re.findall(
        r"`((?:xla_ffi|jax_ep|tests|docs|benchmarks)/[\w./]+)`", text
    ):
        assert (ROOT / path).exists(), path


def test_native_stub_names_what_the_module_has():
    spec = importlib.util.find_spec("jax_ep._native_cpu")
    assert spec is not None
    assert spec.origin is not None
    from jax_ep import _native_cpu

    stub = ast.parse((ROOT / "jax_ep" / "_native_cpu.pyi").read_text())
    declared = {
        node.name if isinstance(node, ast.FunctionDef) else node.target.id
        for node in stub.body
        if isinstance(node, ast.FunctionDef | ast.AnnAssign)
    }
    present = {name for name in dir(_native_cpu) if not name.startswith("_")}
    assert declared == present
