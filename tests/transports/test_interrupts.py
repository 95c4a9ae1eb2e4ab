"""What an init leaves behind if Ctrl-C ends it or the process forks meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time

import jax
import pytest

from jax_ep._peers import nvshmem
from jax_ep._peers.descriptors import DescriptorServer
from jax_ep._peers.rendezvous import Rendezvous
from support import fake_windows, helpers


def test_server_ends_where_a_child_has_its_sockets_too() -> None:
    """A fork copies descriptors, which stay open until the child ends."""
    server = DescriptorServer()
    copy = os.dup(server._wake.fileno())
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(20)
    os.close(copy)
    assert not closing.is_alive()


class Interrupted(fake_windows.Store):
    """The user presses Ctrl-C, and again while the process tells the others."""

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        if "/gone/" in key:
            raise KeyboardInterrupt
        super().key_value_set_bytes(key, value, allow_overwrite)


def test_second_interrupt_of_a_meeting() -> None:
    """The meeting's thread and socket end, and the next meeting can begin."""
    before = fake_windows.descriptors()
    store = Interrupted()
    other = Rendezvous([0, 1], 1, 20.0, "same", store)

    def act(meeting: Rendezvous) -> None:
        with meeting:
            meeting.gather("one", meeting.listen())
            if meeting is not other:
                raise KeyboardInterrupt

    thread = threading.Thread(target=act, args=(other,))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        act(Rendezvous([0, 1], 0, 20.0, "same", store))
    thread.join(20)
    assert fake_windows.threads_of_meetings() == 0
    assert fake_windows.descriptors() == before
    # It waits only for the other process, not for a lock of this one.
    alone = Rendezvous([0, 1], 0, 0.3, "same", store)
    with pytest.raises(RuntimeError, match="got nothing from"), alone:
        alone.gather("one", 1)


def test_interrupted_wait_of_nvshmem() -> None:
    """The interrupted call goes on in the background, and no other may start then."""
    heap, ended = nvshmem.Heap(lambda: None), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def call() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        ended.wait(60)

    # A shell that runs tests in the background may have them ignore Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            heap._bounded(call, 20.0)
        with pytest.raises(RuntimeError, match="got a wait of NVSHMEM that was interr"):
            heap._bounded(lambda: None, 20.0)
    finally:
        signal.signal(signal.SIGINT, handler)
        ended.set()


@pytest.mark.parametrize("traced", [False, True])
def test_interrupt_as_init_is_left(traced: bool, monkeypatch) -> None:
    """Even if no code that leaves init has run, no lock and no thread is kept."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    listening = []

    def interrupted(self: Rendezvous, *_: object) -> None:
        listening.append(self.listen())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Rendezvous, "__exit__", interrupted)
        # As with several processes, which have one meeting at a time.
        patch.setattr(Rendezvous, "alone", property(lambda self: self._locked))
        patch.setattr(Rendezvous, "begin", lambda self: setattr(self, "_locked", True))
        patch.setattr(Rendezvous, "_unlock", lambda self: listening.append("unlocked"))
        run = jax.jit(lambda x: helpers.init(mesh) and x) if traced else None
        with pytest.raises(KeyboardInterrupt):
            run(1.0) if run else helpers.init(mesh)
    assert listening[-1] == "unlocked"
    assert fake_windows.threads_of_meetings() == 0


def test_interrupt_of_a_store_that_stands_still() -> None:
    """A C++ call that does not return does not block Ctrl-C."""
    ended = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    class Stalled(fake_windows.Store):
        def key_value_try_get_bytes(self, key):
            signal.pthread_kill(main, signal.SIGINT)
            ended.wait(60)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        meeting = Rendezvous([0, 1], 1, 30.0, "same", Stalled())
        with pytest.raises(KeyboardInterrupt), meeting:
            meeting.gather("one", None)
    finally:
        signal.signal(signal.SIGINT, handler)
        ended.set()
    assert time.monotonic() - start < 20
