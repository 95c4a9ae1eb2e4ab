"""jax-ep bench: a short run, and comparisons of records."""

from __future__ import annotations

import json

import pytest
from test_doctor import command

from jax_ep import _cli, _cli_bench


def record(**times):
    rows = [
        {
            "op": op,
            "tokens": 128,
            "routing": "uniform",
            "transport": "p2p",
            "num_sms": None,
            "zero_tail": False,
            "us": us,
        }
        for op, us in times.items()
    ]
    return {
        "kind": "p2p",
        "device": "A",
        "count": 4,
        "jax": "0.11.2",
        "date": "2026-01-01",
        "commit": "0123456789abcdef",
        "results": rows,
    }


def write(path, content):
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("dispatch", "tolerance", "code"), [(110, "0.2", 0), (110, "0.05", 1), (90, "0", 0)]
)
def test_compare(tmp_path, capsys, dispatch, tolerance, code):
    before = write(tmp_path / "a.json", record(dispatch=100, combine=50))
    after = write(tmp_path / "b.json", record(dispatch=dispatch, combine=50))
    arguments = ["bench", "--compare", before, after, "--tolerance", tolerance]
    assert _cli.main(arguments) == code
    out = capsys.readouterr().out
    assert f"{dispatch - 100:+.1f}%" in out
    assert out.count("SLOWER") == code
    assert "2 cases in both" in out


def test_compare_leaves_out_wrong_rows_and_says_what_differs():
    before, after = record(dispatch=100, combine=50), record(dispatch=100, combine=50)
    after["results"][0]["wrong"] = True
    after["count"] = 8
    lines, slower = _cli_bench.compare(before, after, 0.1)
    assert slower == 0
    assert any("missing" in line for line in lines)
    assert "NOT ALIKE: count 4 and 8" in lines
    after["results"] = []
    assert _cli_bench.compare(before, after, 0.1)[1] == 1


def test_compare_wants_records(tmp_path, capsys):
    other = write(tmp_path / "a.json", {"kind": "soak"})
    for path in (other, str(tmp_path / "none.json")):
        with pytest.raises(SystemExit) as left:
            _cli.main(["bench", "--compare", path, path])
        assert left.value.code == 2
    assert "must name two records" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_short_run(tmp_path):
    path = tmp_path / "run.json"
    done = command("bench", "--quick", "--tokens", "8", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["count"] > 1 or "cpu" not in found["device"].lower()
    assert {row["op"] for row in found["results"]} == {"dispatch", "combine"}
    assert all(row["us"] > 0 and not row.get("wrong") for row in found["results"])
    assert _cli_bench.compare(found, found, 0)[1] == 0
