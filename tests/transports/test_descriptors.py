"""Descriptors are passed between processes over sockets, but never to others."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jax_ep._peers import descriptors as _descriptors
from jax_ep._peers.descriptors import DescriptorClient, DescriptorServer
from support import fake_windows

# Offers a memfd under number 7, then waits to be killed or told to end.
GIVING = """
import mmap, os, sys
from jax_ep._peers.descriptors import DescriptorServer
server = DescriptorServer()
descriptor = os.memfd_create("window")
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
memory[:5] = b"first"
server.give(7, descriptor)
print(server.address, flush=True)
for line in sys.stdin:
    print(memory[:5].decode(), flush=True)
server.close()
"""


@pytest.fixture
def giving():
    """A process that gives a descriptor, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", GIVING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = process.stdout.readline().strip()
    yield process, address
    process.kill()
    process.communicate()


@pytest.fixture
def server():
    """A server in this process; checks that it leaves no threads or descriptors."""
    before = fake_windows.descriptors()
    one = DescriptorServer()
    yield one
    one.close()
    assert fake_windows.threads_of_meetings() == 0
    assert fake_windows.descriptors() == before


def make_file(content: bytes = b"here") -> int:
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, content, 0)
    return descriptor


def take_content(client: DescriptorClient, number: int) -> bytes:
    descriptor = client.take(number)
    try:
        assert not os.get_inheritable(descriptor)
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def test_memory_of_another_process(giving) -> None:
    """Each process sees the other's stores; the memory outlives its server."""
    process, address = giving
    client = DescriptorClient(address, 20.0)
    descriptor = client.take(7)
    assert os.pread(descriptor, 5, 0) == b"first"
    os.pwrite(descriptor, b"other", 0)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "other\n"
    process.kill()
    process.wait()
    assert os.pread(descriptor, 5, 0) == b"other"
    os.close(descriptor)
    client.close()


def test_server_that_dies(giving) -> None:
    """The error comes at once, both during a connection and before one."""
    process, address = giving
    client = DescriptorClient(address, 20.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    start = time.monotonic()
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        client.take(7)
    client.close()
    with pytest.raises(ConnectionRefusedError):
        DescriptorClient(address, 20.0)
    assert time.monotonic() - start < 15


def test_server_that_is_silent(giving) -> None:
    """A stopped process has a socket but does not answer."""
    process, address = giving
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
    with contextlib.closing(DescriptorClient(address, 0.3)) as client:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
            client.take(7)
        assert 0.2 < time.monotonic() - start < 15


def test_many_clients(server) -> None:
    for number in range(3):
        server.give(number, make_file(b"%d" % number))
    found = []

    def take_all() -> None:
        client = DescriptorClient(server.address, 20.0)
        found.append([take_content(client, number) for number in (2, 0, 1, 2)])
        client.close()

    started = [threading.Thread(target=take_all) for _ in range(40)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert found == [[b"2", b"0", b"1", b"2"]] * 40


def test_unknown_number(server) -> None:
    server.give(1, make_file())
    client = DescriptorClient(server.address, 20.0)
    with pytest.raises(OSError, match="the server has no descriptor 2"):
        client.take(2)
    assert take_content(client, 1) == b"here"
    client.close()


def test_whoever_asks_amiss_gets_nothing(server) -> None:
    """Others are served meanwhile, also beside silent clients that never ask."""
    server.give(1, make_file())
    good = DescriptorClient(server.address, 20.0)
    secret = bytes.fromhex(server.address)[8:]
    pack = _descriptors._MESSAGE.pack
    magic = _descriptors._MAGIC
    wrong = (
        b"x",
        b"GET / HTTP/1.1\r\n\r\n",
        pack(magic, bytes(16), 1),
        pack(b"jax_ep/0", secret, 1),
        pack(magic, secret, 1) + b"x",
        os.urandom(100_000),
    )
    silent = DescriptorClient(server.address, 20.0)
    for message in wrong:
        client = DescriptorClient(server.address, 20.0)
        client._socket.send(message)
        data, descriptors, _, _ = socket.recv_fds(client._socket, 100, 4)
        assert (data, descriptors) == (b"", [])
        client.close()
        assert take_content(good, 1) == b"here"
    good.close()
    silent.close()


def test_other_users_are_left(server, monkeypatch) -> None:
    """They are disconnected before they can ask, whatever they know."""
    server.give(1, make_file())
    main = threading.get_ident()
    monkeypatch.setattr(_descriptors, "_COME_AGAIN_S", 0.2)
    with monkeypatch.context() as patch:
        # As the server sees it.
        patch.setattr(
            _descriptors, "_same_user", lambda _: threading.get_ident() == main
        )
        for ask in (DescriptorClient.greet, lambda client: client.take(1)):
            with (
                contextlib.closing(DescriptorClient(server.address, 20.0)) as client,
                pytest.raises(OSError, match=r"closed|reset|Broken pipe"),
            ):
                ask(client)
    with contextlib.closing(DescriptorClient(server.address, 20.0)) as client:
        client.greet()
        assert take_content(client, 1) == b"here"


def test_server_of_another_user_is_asked_nothing(server, monkeypatch) -> None:
    """One that listens under the server's name learns no secret and is refused."""
    user = os.geteuid()
    monkeypatch.setattr(_descriptors.os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        DescriptorClient(server.address, 20.0)


@pytest.mark.parametrize(
    ("known", "good"),
    [("0 0 4294967295", True), ("0 1000 1\n1 100000 65536", False), ("", False)],
)
def test_users_that_a_namespace_does_not_know(server, monkeypatch, known, good) -> None:
    """They all look like one user, who is real only if every user is known."""
    monkeypatch.setattr(_descriptors, "_unmapped", os.geteuid)
    true_read = pathlib.Path.read_text
    monkeypatch.setattr(
        pathlib.Path,
        "read_text",
        lambda path: known if path.name == "uid_map" else true_read(path),
    )
    with contextlib.ExitStack() as stack:
        if not good:
            stack.enter_context(pytest.raises(PermissionError))
        stack.enter_context(
            contextlib.closing(DescriptorClient(server.address, 20.0))
        ).greet()


CROWD = """
import os, socket, sys, time
user, name, count, seconds = int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:])
if user:
    os.setuid(user)
end, held = time.monotonic() + seconds, []
print("here", flush=True)
while time.monotonic() < end:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    try:
        one.connect(chr(0) + name)
        held.append(one)
    except OSError:
        one.close()
    if len(held) > count:
        held.pop(0).close()
"""


@pytest.mark.parametrize("user", [0, 54321], ids=["same", "other"])
def test_crowd_of_silent_clients(user, monkeypatch) -> None:
    """They take no one's place in the queue, nor of a client that knows the secret."""
    if user and os.geteuid():
        pytest.skip("needs root, to be another user")
    servers = [DescriptorServer() for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            server.give(1, make_file())
        early = stack.enter_context(
            contextlib.closing(DescriptorClient(servers[0].address, 20.0))
        )
        early.greet()
        for server in servers:
            name = (_descriptors._PREFIX[1:] + server._name.hex().encode()).decode()
            crowd = subprocess.Popen(
                [sys.executable, "-c", CROWD, str(user), name, "900", "20"],
                stdout=subprocess.PIPE,
            )
            stack.callback(crowd.wait)
            stack.callback(crowd.kill)
            assert crowd.stdout is not None
            stack.callback(crowd.stdout.close)
            assert crowd.stdout.readline() == b"here\n"
        for server in servers:
            for _ in range(3):
                with contextlib.closing(
                    DescriptorClient(server.address, 20.0)
                ) as client:
                    client.greet()
                    assert take_content(client, 1) == b"here"
        assert take_content(early, 1) == b"here"


def test_no_more_takers_than_allowed(server, monkeypatch) -> None:
    """Silent clients make room for new ones, the oldest first."""
    monkeypatch.setattr(_descriptors, "_MAX_CLIENTS", 4)
    server.give(1, make_file())
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(
                contextlib.closing(DescriptorClient(server.address, 20.0))
            )
            for _ in range(40)
        ]
        for client in (silent[-1], DescriptorClient(server.address, 20.0)):
            stack.enter_context(contextlib.closing(client))
            assert take_content(client, 1) == b"here"
        for client in silent[:36]:
            assert client._socket.recv(1) == b""


@pytest.mark.parametrize("spare", range(5))
def test_no_file_to_listen_with(spare) -> None:
    """The error comes at once, and nothing stays open, whichever file is missing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        # All numbers below the highest are taken, so that the limit leaves `spare`.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (file := os.dup(0)) <= highest:
            stack.callback(os.close, file)
        os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (file + spare, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                DescriptorServer()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_more_files():
    """Lets this process open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest free number, which the next opened file would get.
    least = os.dup(0)
    os.close(least)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_more_files_to_open(server) -> None:
    """The server says so without waiting busily, and goes on when files are free."""
    server.give(1, make_file())
    raw = bytes.fromhex(server.address)
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            for _ in range(4)
        ]
        for one in sockets:
            one.settimeout(20)
        with no_more_files():
            before = time.process_time()
            for one in sockets:
                one.connect(_descriptors._PREFIX + raw[:8].hex().encode())
            for one in sockets[2:]:
                one.send(_descriptors._MESSAGE.pack(_descriptors._MAGIC, raw[8:], 1))
            answers = [one.recv(100) for one in sockets]
            # Whoever has not asked is closed without a word.
            assert answers[:2] == [b"", b""]
            for answer in answers[2:]:
                assert answer.startswith(_descriptors._FULL)
                assert raw[8:] not in answer
            time.sleep(0.3)
            assert time.process_time() - before < 0.25
    client = DescriptorClient(server.address, 20.0)
    assert take_content(client, 1) == b"here"
    client.close()


def test_client_of_a_full_process(giving) -> None:
    """It comes again, and then says what is missing."""
    process, address = giving
    number = process.pid
    taken = set(map(int, os.listdir(f"/proc/{number}/fd")))
    least = next(n for n in range(len(taken) + 1) if n not in taken)
    limits = resource.prlimit(number, resource.RLIMIT_NOFILE)
    resource.prlimit(number, resource.RLIMIT_NOFILE, (least, limits[1]))
    start = time.monotonic()
    with (
        contextlib.closing(DescriptorClient(address, 0.3)) as client,
        pytest.raises(_descriptors.Full, match="cannot open one more file"),
    ):
        client.greet()
    assert time.monotonic() - start < 15
    with contextlib.closing(DescriptorClient(address, 20.0)) as client:
        resource.prlimit(number, resource.RLIMIT_NOFILE, limits)
        client.greet()
        assert take_content(client, 7) == b"first" + bytes(95)


def test_system_that_does_not_tell_users(server, monkeypatch) -> None:
    """Where SO_PEERCRED is refused, nobody is served, and the server stays."""
    monkeypatch.setattr(_descriptors, "_COME_AGAIN_S", 0.1)
    main = threading.get_ident()

    def refuse(connection: socket.socket) -> bool:
        if threading.get_ident() == main:
            return True
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(_descriptors, "_same_user", refuse)
    with contextlib.closing(DescriptorClient(server.address, 20.0)) as client:
        for _ in range(2):
            with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
                client.greet()


def test_no_thread_to_serve_with(monkeypatch) -> None:
    before = fake_windows.descriptors()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        DescriptorServer()
    assert fake_windows.descriptors() == before


def answers(reply: bytes, descriptors: list[int]) -> tuple[str, threading.Thread]:
    """The address of a server that always gives this reply."""
    name = os.urandom(8)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_descriptors._PREFIX + name.hex().encode())
    listener.listen()

    def answer() -> None:
        client, _ = listener.accept()
        asked = client.recv(100)
        socket.send_fds(client, [reply or asked], descriptors)
        client.close()
        listener.close()

    thread = threading.Thread(target=answer)
    thread.start()
    return (name + bytes(16)).hex(), thread


@pytest.mark.parametrize(
    ("reply", "count"), [(b"what?", 0), (b"what?", 1), (b"x" * 100, 1), (b"", 2)]
)
def test_answer_that_is_none(reply: bytes, count: int) -> None:
    """An invalid reply is an error, and descriptors that came with it are closed."""
    before = fake_windows.descriptors()
    files = [make_file() for _ in range(count)]
    address, thread = answers(reply, files)
    client = DescriptorClient(address, 20.0)
    with pytest.raises(OSError, match=r"malformed answer|the server has no descriptor"):
        client.take(1)
    client.close()
    thread.join()
    for descriptor in files:
        os.close(descriptor)
    assert fake_windows.descriptors() == before


def test_end_of_a_server_is_the_end_of_its_clients() -> None:
    server = DescriptorServer()
    server.give(1, make_file())
    client = DescriptorClient(server.address, 20.0)
    kept = client.take(1)
    server.close()
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        client.take(1)
    assert os.pread(kept, 4, 0) == b"here"
    os.close(kept)
    client.close()
    with pytest.raises(ConnectionRefusedError):
        DescriptorClient(server.address, 20.0)
