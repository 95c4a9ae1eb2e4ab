"""Attacks jax_ep.init between processes, at every one of its points, in several ways.

    PYTHONPATH=tests python tests/workers/attack_init.py --record
    PYTHONPATH=tests python tests/workers/attack_init.py --ways error interrupt --most 6

The first form attacks every point in every way, and stops each process there, which
takes about an hour.

Jobs of three real processes (jax.distributed on CPUs, with fake windows) run an init,
or request a shared handle, in which one of them, the victim, is attacked at some point:
by an exception, Ctrl-C, a stop of some seconds (SIGSTOP) or SIGKILL; or it can open no
more files from there on, or is refused sockets. After each attack the survivors must
agree on whether the init succeeded, must have ended in time and left nothing open, and
the next init must succeed in all of them. test_attack_init.py runs some of the attacks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

PROCESSES = 3
TIMEOUT_S = 2.0
# How long an init may take beyond its time limit on a busy machine.
SLACK_S = 15.0
# How long all processes need to make their calls after a barrier.
TOGETHER_S = 0.3
# Words about processes that failed, or that others waited for in vain.
BLAME = r"failed on process (\d+)|nothing from processes \[(.*?)\]"
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
WAYS = ("error", "interrupt", "stop", "kill", "files", "refused")
# Calls before or after which the victim is attacked: "gather NAME" is a step of the
# rendezvous, "native NAME" a call of the native module, "ask" the request for a shared
# handle.
CALLS = (
    "check",
    "ask",
    "begin",
    "gather devices",
    "listen",
    "connect",
    "gather reach",
    "gather instance",
    "native open_windows",
    "native export_window",
    "gather windows",
    "take",
    "native import_window",
    "gather mapped",
    "run_init",
    "gather done",
    "gather agreed",
)
# Whatever happens to the victim after the last step is its own affair.
LATE = {"init": {("gather agreed", "after")}}
# In a request for a shared handle these run in the caller's thread; the others run in a
# thread that serves all processes.
OWN = {(call, when) for call in ("ask", "run_init") for when in ("before", "after")}
LATE["shared"] = LATE["init"] | {point for point in OWN if point[0] == "run_init"}
POINTS = {
    kind: tuple(
        (call, when)
        for call in CALLS
        for when in ("before", "after")
        if call != ("ask" if kind == "init" else "check")
        and (call, when) not in {("begin", "before"), ("check", "before")}
    )
    for kind in LATE
}


@dataclasses.dataclass(frozen=True)
class Attack:
    """One init, or request for a shared handle, with an attack at a point."""

    call: str
    when: str
    way: str
    victim: int
    kind: str = "init"

    def __str__(self) -> str:
        """For reports."""
        where = f"{self.when} {self.call!r} of {self.kind}"
        return f"{self.way} in process {self.victim} {where}"

    @property
    def late(self) -> bool:
        """Whether the others succeed, as they need nothing more from the victim."""
        return (self.call, self.when) in LATE[self.kind]

    @property
    def own(self) -> bool:
        """Whether only the victim's call fails, while the victim serves the others."""
        caller = (self.call, self.when) in OWN
        return self.kind == "shared" and (
            self.way == "interrupt" or (self.way == "error" and caller)
        )


# ---- A process of the job ----


def act(way: str) -> None:
    """Carries out an attack; returns only from "stop", when the process goes on."""
    if way == "error":
        raise RuntimeError("attacked")
    if way == "interrupt":
        signal.raise_signal(signal.SIGINT)
        # The handler runs before the next Python instruction.
        time.sleep(0.1)
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "files":
        # The lowest free number, which the next opened file would get.
        least = os.dup(0)
        os.close(least)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, FILES[1]))


def refuse(*args: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@contextlib.contextmanager
def attacked(native: Any, attack: Attack) -> Iterator[None]:
    """Attacks the victim's init once, inside the context."""
    from jax_ep._peers.rendezvous import Rendezvous
    from jax_ep._setup import init, shared

    kind, _, name = attack.call.partition(" ")
    places: dict[str, tuple[Any, str]] = {
        "check": (init, "_check_served"),
        "run_init": (init, "_run_init"),
        "ask": (shared._Opener, "ask"),
        "native": (native, name),
    }
    place, attribute = places.get(kind, (Rendezvous, kind))
    true, done = getattr(place, attribute), []
    with contextlib.ExitStack() as stack:

        def attack_once() -> None:
            done.append(True)
            if attack.kind == "shared" and (attack.call, attack.when) not in OWN:
                time.sleep(TOGETHER_S)  # all processes' calls have begun
            if attack.way == "refused":
                for name in ("bind", "listen", "connect"):
                    stack.enter_context(mock.patch.object(socket.socket, name, refuse))
            act(attack.way)

        def replaced(*args: Any, **named: Any) -> Any:
            here = not done and (kind != "gather" or args[1] == name)
            if here and attack.when == "before":
                attack_once()
            result = true(*args, **named)
            if here and attack.when == "after":
                attack_once()
            return result

        stack.enter_context(mock.patch.object(place, attribute, replaced))
        yield
    assert done, f"{attack}: nothing has called it"


def attempt(
    kind: str, native: Any, mesh: Any, config: Any, name: str, living: list[int]
) -> dict[str, Any]:
    """Gets a handle and closes it; reports what is left when all `living` are done."""
    import jax_ep
    from support import fake_windows
    from workers import windows_worker

    before, start = fake_windows.descriptors(), time.monotonic()
    found: dict[str, Any] = {"error": None}
    try:
        make = {"init": jax_ep.init, "shared": jax_ep.shared_handle}[kind]
        ep = make(mesh, "ep", config, transport="p2p")
        found["key"] = ep.key
        found["transport"] = ep.transport
        ep.close()
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
    jax_ep.close_shared_handles()
    windows_worker.barrier(name, living)
    # A group that was opened for others closes a moment later.
    end = time.monotonic() + SLACK_S
    while (native.own or native.mapped) and time.monotonic() < end:
        time.sleep(0.05)
    found["threads"] = fake_windows.threads_of_meetings()
    found["open"] = len(native.own) + len(native.mapped)
    # One or two more or less are normal: the store's connections come and go.
    found["descriptors"] = fake_windows.descriptors() - before
    return found


def work(port: str, process: int, attacks: list[Attack]) -> None:
    """Makes all attempts of one process and prints a line of JSON for each."""
    from workers import windows_worker

    # A shell that runs jobs in the background may have them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    native = windows_worker.start(port, PROCESSES, process)
    from support import helpers

    size = PROCESSES * windows_worker.DEVICES
    mesh = helpers.make_mesh(size)
    config = helpers.make_config(timeout_s=TIMEOUT_S)
    patient = helpers.make_config(timeout_s=60.0)
    everybody = list(range(PROCESSES))
    for number, attack in enumerate(attacks):
        windows_worker.barrier(f"begin{number}", everybody)
        with contextlib.ExitStack() as stack:
            if process == attack.victim:
                stack.enter_context(attacked(native, attack))
            # Before that, another's request could bring the victim past the point.
            windows_worker.barrier(f"ready{number}", everybody)
            if process != attack.victim and attack.call == "ask":
                time.sleep(TOGETHER_S)  # so that the victim is the first to ask
            if attack.way == "kill":
                everybody = [p for p in everybody if p != attack.victim]
            name, kind = f"end{number}", attack.kind
            found = attempt(kind, native, mesh, config, name, everybody)
        print("attacked: " + json.dumps(found), flush=True)
        # The next request would open a group in a process that is still looking at what
        # is left, or whose sockets are still refused.
        windows_worker.barrier(f"over{number}", everybody)
        mesh = _of_processes(mesh, everybody)
        name = f"next{number}"
        found = attempt(attack.kind, native, mesh, patient, name, everybody)
        print("next: " + json.dumps(found), flush=True)
    windows_worker.leave(process, len(everybody))


def _of_processes(mesh: Any, processes: list[int]) -> Any:
    import jax
    import numpy as np

    devices = [d for d in mesh.devices.flat if d.process_index in processes]
    return jax.sharding.Mesh(np.array(devices), mesh.axis_names)


# ---- The job, and what must hold ----


def run(attacks: list[Attack], timeout_s: float) -> dict[Attack, list[str]]:
    """Runs one job of all attacks; returns what went wrong, by attack."""
    from support.launch import command, environment, free_port
    from support.worker_process import LIMIT

    given = json.dumps([dataclasses.astuple(attack) for attack in attacks])
    port = str(free_port())
    env = environment(JAX_PLATFORMS="cpu", **{LIMIT: str(timeout_s)})
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"{process}.log") for process in range(PROCESSES)]
        jobs = []
        for process, log in enumerate(logs):
            words = command("attack_init.py", "--work", port, str(process), given)
            with log.open("wb") as output:
                jobs.append(
                    subprocess.Popen(
                        words, env=env, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        over = threading.Event()
        waker = threading.Thread(target=_wake, args=(jobs, over), daemon=True)
        waker.start()
        end = time.monotonic() + timeout_s
        try:
            for job in jobs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(max(0.1, end - time.monotonic()))
        finally:
            over.set()
            for job in jobs:
                job.kill()
                job.wait()
        texts = [log.read_text(errors="replace") for log in logs]
    return judge(attacks, texts)


def _wake(jobs: list[subprocess.Popen], over: threading.Event) -> None:
    """Continues a stopped process once the others' time is up."""
    since: dict[int, float] = {}
    while not over.wait(0.05):
        for job in jobs:
            try:
                stat = pathlib.Path(f"/proc/{job.pid}/stat").read_text()
            except OSError:
                continue
            if stat.rpartition(")")[2].split()[0] != "T":
                since.pop(job.pid, None)
            elif time.monotonic() - since.setdefault(job.pid, time.monotonic()) > (
                2.5 * TIMEOUT_S
            ):
                job.send_signal(signal.SIGCONT)


def _lines(text: str, word: str) -> list[dict[str, Any]]:
    return [
        json.loads(line.removeprefix(word))
        for line in text.splitlines()
        if line.startswith(word)
    ]


def judge(attacks: list[Attack], texts: list[str]) -> dict[Attack, list[str]]:
    """What went wrong, by attack."""
    first = [_lines(text, "attacked: ") for text in texts]
    second = [_lines(text, "next: ") for text in texts]
    found: dict[Attack, list[str]] = {}
    dead: set[int] = set()
    for number, attack in enumerate(attacks):
        wrong: list[str] = []
        if attack.way == "kill":
            dead.add(attack.victim)
        living = [process for process in range(PROCESSES) if process not in dead]
        here = {p: first[p][number] for p in living if len(first[p]) > number}
        after = {p: second[p][number] for p in living if len(second[p]) > number}
        if len(here) < len(living) or len(after) < len(living):
            ends = {p: texts[p][-600:] for p in living if p not in after}
            found[attack] = [f"did not come to its end: {ends}"]
            break
        others = {p: one["error"] for p, one in here.items() if p != attack.victim}
        succeeded = {error is None for error in others.values()}
        victim = here.get(attack.victim, {}).get("error")
        if attack.way in ("files", "refused") or (
            # The others wait for the store, or give up.
            attack.way == "stop" and attack.victim == 0 and not attack.late
        ):
            if succeeded != {victim is None}:
                wrong.append(f"outcomes: {others}, of the victim {victim}")
        else:
            if succeeded != {attack.late or attack.own}:
                wrong.append(f"outcomes of the others: {others}")
            # A stop after the last step is only a delay.
            delayed = attack.late and attack.way == "stop"
            if attack.victim in here and (victim is None) != delayed:
                wrong.append(f"outcome of the victim: {victim}")
        if attack.way != "stop" or attack.victim != 0:
            for error in filter(None, others.values()):
                blamed = {a or b for a, b in re.findall(BLAME, error)}
                named = re.search(rf"process {attack.victim}\b", error)
                if blamed - {str(attack.victim)} or not (named or blamed):
                    wrong.append(f"blames {blamed}: {error}")
        for process, one in here.items():
            stopped = attack.way == "stop" and process == attack.victim
            most = TIMEOUT_S + SLACK_S + (2.5 * TIMEOUT_S if stopped else 0)
            if one["seconds"] > most:
                wrong.append(f"process {process} took {one['seconds']:.1f} s")
            if one["threads"] or one["open"] or one["descriptors"] > 2:
                wrong.append(f"process {process} left {one}")
        keys = {one.get("key") for one in after.values()}
        if any(one["error"] for one in after.values()) or len(keys) != 1:
            wrong.append(f"the next init: {after}")
        found[attack] = wrong
    return found


def attacks_of(way: str, most: int | None, kind: str) -> list[Attack]:
    """Up to `most` evenly spaced points; victims take turns.

    If all points are attacked, a stop has each process as its victim.
    """
    found = []
    points = POINTS[kind]
    if way in ("files", "refused"):
        # The victim would fail before the others call.
        points = tuple(point for point in points if point[0] != "ask")
    points = points[:: max(1, len(points) // most)][:most] if most else points
    # The coordinator is in process 0: nobody survives its death.
    victims = [1, 2] if way == "kill" else [1, 0, 2]
    for number, (call, when) in enumerate(points):
        turn = [victims[number % len(victims)]]
        for victim in victims if way == "stop" and not most else turn:
            found.append(Attack(call, when, way, victim, kind))
    return found


def survived(
    ways: list[str], most: int | None, kind: str = "init"
) -> dict[Attack, list[str]]:
    """Runs one job per way, or per attack for "kill"; what went wrong, by attack."""
    found: dict[Attack, list[str]] = {}
    for way in ways:
        attacks = attacks_of(way, most, kind)
        jobs = [[attack] for attack in attacks] if way == "kill" else [attacks]
        for job in jobs:
            found |= run(job, timeout_s=60 + 12 * len(job))
        missing = [attack for attack in attacks if attack not in found]
        found |= {attack: ["was not come to"] for attack in missing}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kinds", nargs="+", choices=[*POINTS], default=[*POINTS])
    parser.add_argument("--most", type=int, help="points of each way; default: all")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        port, process, given = args.work
        work(port, int(process), [Attack(*each) for each in json.loads(given)])
        return 0
    found: dict[Attack, list[str]] = {}
    for kind in args.kinds:
        found |= survived(args.ways, args.most, kind)
    for attack, wrong in found.items():
        for each in wrong:
            print(f"{attack}: {each}")
    good = sum(not wrong for wrong in found.values())
    points = sum(len(POINTS[kind]) for kind in args.kinds)
    print(f"{points} points, {len(found)} attacks, {good} survived")
    return int(good < len(found))


if __name__ == "__main__":
    sys.exit(main())
