"""jax-ep bench: a short run, and comparisons of records."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from jax_ep._cli import main
from jax_ep._cli import values as _cli_values
from jax_ep._cli.bench import command as _cli_bench
from jax_ep._cli.bench import compare as records
from jax_ep._cli.demo import picture
from support.commands import command, record, write
from support.launch import run_to_end

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(
    ("dispatch", "tolerance", "code"), [(110, "0.2", 0), (110, "0.05", 1), (90, "0", 0)]
)
def test_compare(tmp_path, capsys, dispatch, tolerance, code):
    before = write(tmp_path / "a.json", record(dispatch=100, combine=50))
    after = write(tmp_path / "b.json", record(dispatch=dispatch, combine=50))
    arguments = ["bench", "--compare", before, after, "--tolerance", tolerance]
    assert main.main(arguments) == code
    out = capsys.readouterr().out
    assert f"{dispatch - 100:+.1f}%" in out
    assert out.count("SLOWER") == code
    assert "2 cases in both" in out


def test_compare_fails_where_after_is_wrong_or_has_gone():
    before, after = record(dispatch=100, combine=50), record(dispatch=100, combine=50)
    after["results"][0]["wrong"] = True
    lines, failed = records.compare(before, after, 0.1)
    assert failed == 1
    assert [line.split()[-1] for line in lines if "dispatch" in line] == ["WRONG"]
    assert records.compare(record(combine=50), after, 0.1)[1] == 1
    lines, failed = records.compare(before, record(combine=50), 0.1)
    assert failed == 1
    assert [line.split()[-1] for line in lines if "dispatch" in line] == ["MISSING"]
    # Cases that only the later run has, or that were wrong before, are no failures.
    assert records.compare(record(combine=50), before, 0.1)[1] == 0
    assert records.compare(after, record(combine=50), 0.1)[1] == 0
    after["results"] = []
    assert records.compare(before, after, 0.1)[1] == 3  # nothing in common either


def test_compare_tells_formats_apart():
    plain, named, other = (record(combine=50) for _ in range(3))
    named["results"][0]["format"] = "bf16"
    other["results"][0]["format"] = "fp8_block128"
    assert records.compare(plain, named, 0.1)[1] == 0
    lines, failed = records.compare(named, other, 0.1)
    assert failed == 2  # missing, and nothing in common
    named["results"] += other["results"]
    lines, failed = records.compare(named, named, 0.1)
    assert failed == 0
    assert len([line for line in lines if "p2p, fp8_block128 " in line]) == 1
    assert "2 cases in both" in lines[-1]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("device", ("A", "B")),
        ("count", (4, 8)),
        ("hidden", (4, 8)),
        ("dtype", ("bfloat16", "float32")),
        ("experts", (4, 8)),
        ("top_k", (4, 8)),
    ],
)
def test_compare_of_unlike_runs_fails(tmp_path, capsys, name, values):
    runs = [record(combine=50) | {name: value} for value in values]
    paths = [write(tmp_path / f"{i}.json", each) for i, each in enumerate(runs)]
    assert main.main(["bench", "--compare", *paths]) == 1
    before, after = values
    assert f"NOT ALIKE: {name} {before!r} and {after!r}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: must be an integer of at least 1, got '0'"),
        (["--experts", "-3"], "--experts: must be an integer of at least 1, got '-3'"),
        (["--budget", "nan"], "--budget: must be a number above 0, got 'nan'"),
        (["--budget", "0"], "--budget: must be a number above 0, got '0'"),
        (["--tolerance", "-1"], "--tolerance: must be a number of at least 0"),
        (["--json", "none/run.json"], "--json must be a file in a folder"),
        (["--json", "."], "--json must be a file in a folder"),
        (["--json", ""], "--json must be a file in a folder that can be written to"),
        (["--json", "-"], "--json must be a file, got '-'"),
        (["--json", "n" * 300], "--json must be a file in a folder"),
        # Not even root can write there, whatever the permissions say.
        (["--json", "/proc/run.json"], "--json must be a file in a folder"),
        (["--plot", "run.gif"], "--plot must be a file name in one of .png"),
        (["--plot", ""], "--plot must be a file name in one of .png"),
        (["--plot", "none/run.svg"], "--plot must be a file in a folder"),
        (["--plot", "folder.svg"], "--plot must be a file in a folder"),
        (["--plot", "/proc/run.svg"], "--plot must be a file in a folder"),
    ],
)
def test_usage_errors_come_before_the_measurement(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr(_cli_bench, "_measure", lambda *args: pytest.fail("measures"))
    with pytest.raises(SystemExit) as left:
        main.main(["bench", *arguments])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_looking_whether_a_file_can_be_written_leaves_all_as_it_is(tmp_path):
    there, linked = tmp_path / "a.json", tmp_path / "linked.json"
    there.write_text("before")
    linked.symlink_to(tmp_path / "target.json")
    os.mkfifo(tmp_path / "pipe")
    for name in ("a.json", "new.json", "linked.json", "pipe"):
        assert _cli_values.file_problem(str(tmp_path / name)) is None
    assert there.read_text() == "before"
    assert linked.is_symlink()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.json", "linked.json", "pipe"]


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_disk_that_fills_meanwhile_is_one_line(option, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = "/dev/full" if option == "--json" else str(tmp_path / "run.svg")
    started = types.SimpleNamespace(returncode=0, stdout="cpu 8\n", stderr="")
    monkeypatch.setattr(_cli_bench.subprocess, "run", lambda *_, **__: started)
    monkeypatch.setattr(picture, "available", lambda: True)
    measured = record() | {"problems": []}
    monkeypatch.setattr(_cli_bench.measure, "measure", lambda *_, **__: measured)
    monkeypatch.setattr(_cli_bench.report, "print_table", lambda record: None)
    monkeypatch.setattr(_cli_bench.draw, "save", full)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert main.main(["bench", option, path]) == 1
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert f"{path!r} cannot be written: No space" in said.err
    assert "wrote" not in said.out
    good = str(tmp_path / "run.json")
    assert main.main(["bench", "--json", good]) == 0
    assert capsys.readouterr().out == f"wrote {good}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "7"], "hidden_size must make a token of bfloat16 a multiple"),
        (["--experts", "3000"], "num_experts must be in [1, 2048], got 3000"),
        (["--experts", "4", "--top-k", "5"], "got --top-k 5 and --experts 4; lower"),
        (["--experts", "7", "--top-k", "2"], "8 devices, got 7; choose --experts 8"),
        (
            ["--transports", "p2p"],
            "p2p needs GPUs, and JAX found only CPU devices",
        ),
        (["--transports", "collective", "p2p"], "use --transports collective"),
    ],
)
def test_sizes_that_nothing_serves_are_usage(arguments, message, monkeypatch, capsys):
    started = types.SimpleNamespace(returncode=0, stdout="cpu 8\n", stderr="")
    monkeypatch.setattr(_cli_bench.subprocess, "run", lambda *_, **__: started)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert main.main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_picture_needs_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(picture, "available", lambda: False)
    with pytest.raises(SystemExit) as left:
        main.main(["bench", "--plot", str(tmp_path / "run.svg")])
    assert left.value.code == 2
    assert "pip install 'jax_ep[demo]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_short_run(tmp_path):
    """A value that is given twice is measured once, so that records can be compared."""
    path = tmp_path / "run.json"
    done = command("bench", "--quick", "--tokens", "8", "8", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["count"] > 1 or "cpu" not in found["device"].lower()
    assert {row["op"] for row in found["results"]} == {"dispatch", "combine"}
    assert all(row["us"] > 0 and not row.get("wrong") for row in found["results"])
    assert main.main(["bench", "--compare", str(path), str(path)]) == 0


def test_no_backend_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    assert main.main(["bench", "--quick"]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "told by JAX_PLATFORMS to use nothing and could not" in said


def bench(
    folder: pathlib.Path, *options: str, **env: str
) -> subprocess.CompletedProcess:
    """Runs the command in `folder`, whose modules it must not import."""
    package = str(pathlib.Path(main.__file__).parents[2])
    return run_to_end(
        [
            sys.executable,
            *options,
            "-P",
            "-c",
            "import sys\n"
            "from jax_ep._cli.main import main; raise SystemExit(main(sys.argv[1:]))",
            *("bench", "--tokens", "4", "--transports", "collective"),
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": package, **env},
        cwd=folder,
    )


@pytest.mark.slow
def test_bench_without_docstrings_beside_a_module_of_jax_s_name(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('not JAX')")
    done = bench(tmp_path, "-OO", PYTHONOPTIMIZE="2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "dispatch" in done.stdout
