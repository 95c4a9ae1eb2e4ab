"""tools/record_concurrent.py, with fake workers."""

import json

import pytest

from tools import record_concurrent, record_suite

DEVICES = {"kind": "NVIDIA H200", "count": 2, "platform": "gpu", "jax": "0.11.2"}
RIGHT = 'print(\'{"calls": 400, "wrong": 0}\')'
WORKERS = {
    "right": RIGHT,
    "wrong": 'print(\'{"calls": 400, "wrong": 3}\')',
    "failed": "raise ValueError('ep must be open')",
    "no end": "import time; time.sleep(60)",
}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Runs `chained` or `unchained`, depending on the argument; keeps records."""

    def make(chained, unchained):
        path = tmp_path / "worker.py"
        parts = [f"    {chained}", "else:", f"    {unchained}"]
        test = "if sys.argv[1] == 'open':"
        path.write_text("\n".join(["import sys", test, *parts]))
        monkeypatch.setattr(record_concurrent, "WORKER", path)
        monkeypatch.setattr(record_suite, "devices", lambda: DEVICES)
        records = []
        monkeypatch.setattr(
            record_concurrent.recording, "write", lambda *given: records.append(given)
        )
        return records

    return make


@pytest.mark.parametrize("unchained", WORKERS)
def test_records_both(worker, unchained):
    records = worker(RIGHT, WORKERS[unchained])
    assert record_concurrent.main(["--limit-s", "5"]) == 0
    ((name, made),) = records
    assert name == "concurrent-h200x2"
    assert made["chained"] == {"outcome": "right", "calls": 400, "wrong": 0}
    assert made["unchained"]["outcome"] == unchained
    assert ("ep must be open" in json.dumps(made)) == (unchained == "failed")


def test_chained_calls_must_be_right(worker):
    worker(WORKERS["wrong"], RIGHT)
    assert record_concurrent.main([]) == 1


def test_without_gpus(monkeypatch):
    found = DEVICES | {"platform": "cpu"}
    monkeypatch.setattr(record_suite, "devices", lambda: found)
    with pytest.raises(SystemExit, match="needs GPUs"):
        record_concurrent.main([])
