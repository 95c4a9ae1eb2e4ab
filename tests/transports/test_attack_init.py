"""Some of attack_init.py's attacks."""

from __future__ import annotations

import pytest

from workers import attack_init

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.mark.parametrize(
    ("kind", "way", "most"),
    [
        ("init", "error", 15),
        ("init", "interrupt", 15),
        ("init", "files", 15),
        ("init", "refused", 5),
        ("init", "stop", 2),
        ("shared", "error", 8),
        ("shared", "files", 8),
        ("shared", "stop", 2),
    ],
)
def test_init_survives(kind: str, way: str, most: int) -> None:
    """test_multiprocess_windows.py has deaths, which would need a job each here."""
    found = attack_init.survived([way], most, kind)
    assert len(found) == most
    assert {str(attack): wrong for attack, wrong in found.items() if wrong} == {}


def test_what_is_wrong_is_seen() -> None:
    """In lines as processes print them, each single fault is noticed."""
    attack = attack_init.Attack("gather done", "before", "error", 1)
    error = "failed on process 1"
    good = {"error": error, "seconds": 1.0, "threads": 0, "open": 0, "descriptors": 0}
    fine = good | {"error": None, "key": 1}

    def judged(process: int = 0, **amiss: object) -> list[str]:
        told = [dict(good) for _ in range(3)]
        after = [dict(fine) for _ in range(3)]
        for name, value in amiss.items():
            place = after if name == "key" else told
            place[process][name] = value
        texts = [
            f"attacked: {attack_init.json.dumps(one)}\nnext: "
            f"{attack_init.json.dumps(two)}\n"
            for one, two in zip(told, after, strict=True)
        ]
        return attack_init.judge([attack], texts)[attack]

    assert judged() == []
    assert "outcomes" in judged(error=None)[0]
    assert "victim" in judged(1, error=None)[0]
    for words in ("failed on process 2", "nothing from processes [0] of", "E"):
        assert "blames" in judged(error=words)[0]
    assert "took" in judged(seconds=100.0)[0]
    for name in ("threads", "open", "descriptors"):
        assert "left" in judged(**{name: 3})[0]
    assert "next init" in judged(key=2)[0]
    (told,) = attack_init.judge([attack], ["", "", ""])[attack]
    assert "did not come to its end" in told
