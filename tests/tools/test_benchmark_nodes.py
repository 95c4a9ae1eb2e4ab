"""nodes.py: which results of its jobs it accepts, and which it refuses."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.calls import nodes


class Job:
    """Answers like processes; every second start is too late."""

    def __init__(self, seconds, right=True, differences=None) -> None:
        self.seconds, self.right, self.late = seconds, right, False
        self.differences = differences or {}

    def ask(self, name, *arguments):
        if name == "time":
            self.late = not self.late
            good = {"seconds": self.seconds, "right": True, "late": False}
            slow = {"seconds": 2 * self.seconds, "right": self.right, "late": False}
            return [good, slow | {"late": self.late}]
        calls = {"calls": {"dispatch": 10, "combine": 20}}
        return [{"differences": {}} | calls, {"differences": self.differences} | calls]


def test_slowest_process_counts_and_errors_are_kept() -> None:
    jobs = {True: Job(1e-3), False: Job(2e-3, False, {"y": 2})}
    ways = (f"p2p, {nodes.ONE}", "p2p")
    rows = nodes.measure(jobs, ways, 3)
    assert rows[ways[0], "dispatch"]["us"] == pytest.approx(200)
    assert rows[ways[1], "combine"]["us"] == pytest.approx(200)
    assert not rows[ways[0], "combine"]["differences"]
    found = rows[ways[1], "combine"]["differences"]
    assert set(found) == {"y", "checksum of the timed dispatch"} | {
        "checksum of the timed combine"
    }


def test_rows_before_a_failure_stay(tmp_path, monkeypatch, capsys) -> None:
    def fails(args, record) -> None:
        record |= {"device": "cpu"}
        record["rows"].append({"differences": {}})
        raise BrokenPipeError("a process is gone")

    monkeypatch.setattr(nodes, "run", fails)
    arguments = ["--platform", "cpu", "--ranks", "2", "--results", str(tmp_path)]
    assert nodes.main(arguments) == 1
    (path,) = tmp_path.glob("nodes-cpux2-*.json")
    record = json.loads(path.read_text())
    assert (len(record["rows"]), record["problems"]) == (1, ["a process is gone"])
    assert (
        record["command"] == "python -m benchmarks.calls.nodes --platform cpu --ranks 2"
    )
    assert "MISSING: a process is gone" in capsys.readouterr().out


def test_a_slower_process_per_gpu_fails(tmp_path, monkeypatch) -> None:
    def runs(args, record) -> None:
        row = {"op": "combine", "tokens": 8, "differences": {}}
        for way, ratio in (("p2p", ratios[-1]), ("shmem, one a node", 3.9)):
            record["rows"].append(row | {"way": way, "to_one_process": ratio})

    monkeypatch.setattr(nodes, "run", runs)
    arguments = ["--platform", "cpu", "--ranks", "2", "--results", str(tmp_path)]
    ratios = []
    for ratio, status in ((None, 0), (0.99, 0), (1.03, 0), (1.04, 1)):
        ratios.append(ratio)
        assert nodes.main(arguments) == status
    (path,) = tmp_path.iterdir()
    (problem,) = json.loads(path.read_text())["problems"]
    assert problem.startswith("combine of 8 tokens takes 1.040 of one process's time")


def test_ways_that_are_turned() -> None:
    """Each transport runs in both kinds of processes; ways of a single node do not."""
    args = nodes.parse(["--ranks", "4"])
    assert next(iter(nodes.turns(args.ways))) == (f"p2p, {nodes.ONE}", "p2p")
    assert sum(len(ways) for ways in nodes.turns(args.ways)) == len(args.ways) == 6
    assert len(nodes.parse(["--ranks", "2"]).ways) == 4
    given = ["--ranks", "4", "--ways", "p2p", "collective", f"p2p, {nodes.ONE}"]
    turned = nodes.turns(nodes.parse(given).ways)
    assert list(turned) == [(f"p2p, {nodes.ONE}", "p2p"), ("collective",)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
        (
            ["--ranks", "2", "--ways", "shmem, two a node, direct"],
            "--ways must have one .* got shmem, two a node, direct of 2 ranks",
        ),
    ],
)
def test_what_leaves_nothing_to_measure_is_refused(given, message, capsys) -> None:
    with pytest.raises(SystemExit):
        nodes.parse(given)
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
