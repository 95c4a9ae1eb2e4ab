"""Windows over hosts of one NVLink fabric, without a GPU: when and how they are shared.

Threads act as processes, as in test_windows.py, and hosts are names.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from jax_ep._peers import fabric as _fabric
from jax_ep._peers import windows
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._transport import select
from support import fake_windows
from support.fake_windows import ONE_EACH, PAIRS, Job, check_marks, make_groups
from support.fake_windows import all_closed as all_closed

ALONE = Rendezvous([0], 0, 1.0)

RACK = "0123456789abcdef0123456789abcdef.1"
OTHER_CLIQUE = "0123456789abcdef0123456789abcdef.2"
# Two processes per host, whose ranks are not adjacent; and a group on one host.
OVER_HOSTS = make_groups(
    [[(0, 0), (2, 0), (1, 0), (3, 0)], [(0, 1), (0, 2), (1, 2), (1, 1)]]
)
ALL_IN_RACK = dict.fromkeys(range(4), RACK)
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.fixture
def hosts(monkeypatch) -> dict[int, str]:
    """The name of each process's host."""
    of_process = dict(HOSTS)

    def host() -> list[str]:
        name = of_process[fake_windows.here.process]
        return [f"boot of {name}", name]

    monkeypatch.setattr(windows, "host", host)
    return of_process


@pytest.fixture
def connected(monkeypatch) -> set[tuple[int, int]]:
    """Pairs of processes that connected by sockets."""
    pairs: set[tuple[int, int]] = set()
    true_connect = Rendezvous.connect

    def connect(self: Rendezvous, process: int, address: str) -> None:
        pairs.add((self.own, process))
        true_connect(self, process, address)

    monkeypatch.setattr(Rendezvous, "connect", connect)
    return pairs


def kinds(job: Job) -> set[type]:
    """The types of the handles by which windows were mapped."""
    return {kind for native in job.natives.values() for _, kind in native.taken_by}


def test_hosts_of_one_clique(hosts, connected, all_closed) -> None:
    job = Job(OVER_HOSTS, fabric=ALL_IN_RACK)
    check_marks(job, job.results())
    assert connected == {(0, 1), (1, 0), (2, 3), (3, 2)}
    for process, native in job.natives.items():
        over = native.taken_by[:3]
        host_of_rank = [hosts[device.process_index] for device in OVER_HOSTS[0]]
        for rank, kind in over:
            near = host_of_rank[rank] == hosts[process]
            assert kind is (int if near else bytes), (process, rank)
        # The second group is on one host.
        assert {kind for _, kind in native.taken_by[3:]} <= {int}
        assert len(native.taken_by) == (5 if process < 2 else 3)
    job.close()


REFUSED = [
    ("no fabric", {"fabric": {}}, r"ranks \[0, 1, 2, 3\] in no fabric"),
    (
        "one without",
        {"fabric": {0: RACK, 1: RACK, 2: RACK}},
        rf"ranks \[3\] in no fabric, ranks \[0, 1, 2\] in {RACK}",
    ),
    (
        "other clique",
        {"fabric": {0: RACK, 1: RACK, 2: OTHER_CLIQUE, 3: OTHER_CLIQUE}},
        rf"ranks \[0, 2\] in {RACK}, ranks \[1, 3\] in {OTHER_CLIQUE}",
    ),
]


@pytest.mark.parametrize(
    ("fields", "got"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_hosts_apart(fields, got, hosts, connected, all_closed) -> None:
    """All processes give the same reason, and nothing is opened."""
    job = Job(OVER_HOSTS, **fields)
    (found,) = set(job.results())
    with pytest.raises(ValueError, match=r"clique of an NVLink fabric") as error:
        select.instead("p2p", found, ALONE)
    assert re.search(got, str(error.value))
    assert "hosts ['a', 'b'] (processes [0, 1, 2, 3])" in str(error.value)
    assert "docs/cluster.md" in str(error.value)
    assert select.instead("auto", found, ALONE) == "collective"
    assert not any(native.own for native in job.natives.values())
    assert not connected


def test_no_channel(hosts, connected, all_closed) -> None:
    """The attribute and the fabric exist, but handles do not work."""
    job = Job(OVER_HOSTS, fabric=ALL_IN_RACK, makes_handles={3: False})
    (found,) = set(job.results())
    assert "nvidia-caps-imex-channels" in found[0]
    assert _fabric.FORCE not in found[0]
    assert found[1] == "no handle from rank 3 (process 3)"
    assert not connected


def test_one_host_of_a_rack(connected, all_closed) -> None:
    """Uses descriptors as usual, and does not depend on a channel."""
    job = Job(PAIRS, fabric=ALL_IN_RACK, makes_handles={1: False, 2: False})
    check_marks(job, job.results())
    assert kinds(job) == {int}
    assert not any(native.by_fabric for native in job.natives.values())
    job.close()


@pytest.mark.parametrize("fabric", ["", RACK])
def test_forced_on_one_host(fabric: str, connected, all_closed, monkeypatch) -> None:
    """Uses handles without a socket; the host need not be in a fabric."""
    monkeypatch.setenv(_fabric.FORCE, "1")
    job = Job(PAIRS, fabric=dict.fromkeys(range(4), fabric))
    check_marks(job, job.results())
    assert kinds(job) == {bytes}
    assert not connected
    job.close()


def test_forced_in_one_process(connected, all_closed, monkeypatch) -> None:
    """Then all are forced, as both ends must use the same way."""
    true_card = _fabric.peer_info

    def card(native: Any, ordinals: dict[int, int]) -> dict[str, Any]:
        return true_card(native, ordinals) | {"forced": native.process == 2}

    monkeypatch.setattr(_fabric, "peer_info", card)
    job = Job(ONE_EACH, fabric={0: RACK, 1: RACK, 2: RACK})
    check_marks(job, job.results())
    assert kinds(job) == {bytes}
    assert not connected
    job.close()


@pytest.mark.parametrize(("value", "forced"), [("0", False), ("", False), ("1", True)])
def test_forced_without_handles(value, forced, all_closed, monkeypatch) -> None:
    monkeypatch.setenv(_fabric.FORCE, value)
    job = Job(ONE_EACH, makes_handles={1: False})
    results = job.results()
    if forced:
        (found,) = set(results)
        assert f"as {_fabric.FORCE} is set" in found[0]
        assert found[1] == "no handle from rank 1 (process 1)"
    else:
        check_marks(job, results)
        assert kinds(job) == {int}
        job.close()


def test_forced_beside_a_group_of_one_process(all_closed, monkeypatch) -> None:
    """A group of one process passes nothing and needs no handles."""
    monkeypatch.setenv(_fabric.FORCE, "1")
    groups = make_groups([[(0, 0), (1, 0)], [(2, 0), (2, 1)]])
    job = Job(groups, makes_handles={2: False})
    check_marks(job, job.results())
    assert kinds(job) == {bytes}
    job.close()


@pytest.mark.parametrize("field", ["no_map", "no_export"])
def test_handles_that_fail_late(field: str, hosts, all_closed) -> None:
    job = Job(
        OVER_HOSTS,
        fabric=ALL_IN_RACK,
        **{field: {2: "CUDA_ERROR_NOT_PERMITTED"}},
    )
    errors = [actor.error for actor in job.run().values()]
    assert {type(error) for error in errors} == {windows.NotMapped}
    assert len({error.obstacle for error in errors}) == 1
    assert "NOT_PERMITTED" in errors[0].obstacle[1]
    assert "(process 2)" in errors[0].obstacle[1]
    assert all(native.closed == [1] for native in job.natives.values())
