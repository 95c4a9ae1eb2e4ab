"""Passes file descriptors between the processes of a host, over Unix sockets.

Sockets also work between containers with separate process ids. Their names are
abstract: nothing stays on disk, and processes see each other's sockets if and only if
they share a network namespace.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pathlib
import secrets
import select
import selectors
import socket
import struct
import threading
import time

# Request and answer: magic, the server's secret, a number. The answer carries the
# descriptor with that number.
_MESSAGE = struct.Struct("<8s16sq")
_MAGIC = b"jax_ep/1"
# In the place of the magic: the server's process cannot open one more file. The secret
# is left out.
_FULL = b"jax_ep/f"
_PREFIX = b"\0jax_ep-"
_NO_NUMBER = -1  # no descriptor has this number
# Limit on a server's open connections: more than a host has devices, fewer than the
# usual limit of open files.
_MAX_CLIENTS = 256
_BACKLOG = 4096  # the kernel lowers it to its own limit
# How long a client keeps reconnecting after the server dropped it in favour of others.
_COME_AGAIN_S = 5.0
_RETRY_S = 0.02
# struct ucred of Linux's SO_PEERCRED: process, effective user, group.
_CREDENTIALS = struct.Struct("3i")
_PAUSE_MS = 50
# Errors of accept() that leave the client in the queue.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Full(ConnectionError):
    """The process of the server cannot open one more file."""

    def __init__(self) -> None:
        """Sets the code and the message of an OSError."""
        super().__init__(errno.EMFILE, "the process cannot open one more file")


class OtherUser(PermissionError):
    """The server may run as another user."""

    def __init__(self) -> None:
        """Sets the code and the message of an OSError."""
        words = "the socket belongs to another user than this process"
        super().__init__(errno.EPERM, words)


class DescriptorServer:
    """Serves descriptors by number, from a thread, to clients that know its address.

    The address contains a secret, because other users of the host can see the socket.
    The server drops other users before they can ask. No client can block it: beyond
    `_MAX_CLIENTS` a new client replaces the oldest that has not shown the secret. When
    the process runs out of files, the server tells clients so and closes them, by means
    of a file that it keeps spare.
    """

    def __init__(self) -> None:
        """Starts to listen, with no descriptors yet.

        Raises:
            OSError: the process cannot open more files or start one more thread, or the
                system refuses a call.
        """
        self._name, self._secret = secrets.token_bytes(8), secrets.token_bytes(16)
        self._descriptors: dict[int, int] = {}
        # Opens everything that the thread needs here, where a failure can be raised.
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener = stack.enter_context(listener)
            listener.setblocking(False)
            listener.bind(_PREFIX + self._name.hex().encode())
            listener.listen(_BACKLOG)
            self._spare = stack.enter_context(listener.dup())
            self._wake, woken = socket.socketpair()
            stack.enter_context(woken)
            for source in (listener, woken):
                selector.register(source, selectors.EVENT_READ)
            opened = stack.pop_all()
        args = (woken, selector, opened)
        self._thread = threading.Thread(target=self._serve, args=args, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may not start one more
            opened.close()
            self._wake.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def address(self) -> str:
        """Name and secret, in hexadecimal, for `DescriptorClient`."""
        return (self._name + self._secret).hex()

    def give(self, number: int, descriptor: int) -> None:
        """Offers `descriptor` under `number`; the server now owns it and closes it."""
        self._descriptors[number] = descriptor

    def close(self) -> None:
        """Stops, and closes the descriptors it offers. Clients keep their copies."""
        # Closing alone would not wake the thread if a forked child holds the socket.
        with contextlib.suppress(OSError):
            self._wake.shutdown(socket.SHUT_RDWR)
        self._wake.close()
        self._thread.join()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _serve(
        self,
        woken: socket.socket,
        selector: selectors.BaseSelector,
        opened: contextlib.ExitStack,
    ) -> None:
        with opened:
            # Oldest first; the value tells whether the client has shown the secret.
            clients: dict[socket.socket, bool] = {}
            opened.callback(lambda: [client.close() for client in clients])
            opened.callback(lambda: self._spare.close())

            def leave(client: socket.socket) -> None:
                del clients[client]
                selector.unregister(client)
                client.close()

            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is woken:
                        return
                    if source is not self._listener:
                        # It may already have been dropped in favour of a later client.
                        if source in clients and not self._serve_one(source, clients):
                            leave(source)
                        continue
                    # Accepts all waiting clients, up to a bound so that others are
                    # served.
                    for _ in range(_MAX_CLIENTS):
                        client = self._accept(woken)
                        if client is None:
                            break
                        if client.fileno() < 0:  # closed: it is another user's
                            continue
                        selector.register(client, selectors.EVENT_READ)
                        clients[client] = False
                        if len(clients) > _MAX_CLIENTS:
                            leave(self._least(clients))

    def _serve_one(
        self, client: socket.socket, clients: dict[socket.socket, bool]
    ) -> bool:
        """Answers a request, if there is one; returns whether to keep the client."""
        answered = self._answer(client)
        clients[client] = clients[client] or bool(answered)
        return answered is not False

    def _least(self, clients: dict[socket.socket, bool]) -> socket.socket:
        """Returns the oldest client that has not shown the secret; serves it first."""
        for client, proven in clients.items():
            if proven:
                continue
            if not (self._serve_one(client, clients) and clients[client]):
                return client
        return next(iter(clients))

    def _accept(self, woken: socket.socket) -> socket.socket | None:
        """Returns the next client, closed if another user's; None if none waits."""
        try:
            client = self._listener.accept()[0]
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._turn_away(woken)
            return None
        client.setblocking(False)
        if not self._is_ours(client):
            client.close()
        return client

    @staticmethod
    def _is_ours(client: socket.socket) -> bool:
        try:
            return _same_user(client)
        except OSError:  # the system does not say
            return False

    def _turn_away(self, woken: socket.socket) -> None:
        """Tells the next client that there is no room for it, in the spare file."""
        self._spare.close()
        try:
            with self._listener.accept()[0] as client:
                client.setblocking(False)
                if self._is_ours(client):
                    # Its request comes first: to close without reading it would reset
                    # the connection, and the client would not get the answer.
                    _pause(woken, client)
                    client.recv(_MESSAGE.size + 1)
                    client.send(_MESSAGE.pack(_FULL, bytes(16), _NO_NUMBER))
        except OSError:
            # The listener stays readable, so without a pause this would spin.
            _pause(woken)
        with contextlib.suppress(OSError):  # another thread took the file
            self._spare = self._listener.dup()

    def _answer(self, client: socket.socket) -> bool | None:
        """Answers without blocking; False for a bad client, None without a request."""
        try:
            message = client.recv(_MESSAGE.size + 1)
            magic, secret, number = _MESSAGE.unpack(message)
            if magic != _MAGIC or not secrets.compare_digest(secret, self._secret):
                return False
            found = self._descriptors.get(number)
            socket.send_fds(client, [message], [] if found is None else [found])
        except BlockingIOError:
            return None
        except (OSError, struct.error):
            return False
        return True


class DescriptorClient:
    """A connection to a `DescriptorServer`.

    Every wait ends after `timeout_s` seconds; failures are OSErrors with a reason.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        """Connects.

        Raises:
            OtherUser: the server runs as another user, or as one that the user
                namespace of this process does not map.
            OSError: there is no such server in this network namespace.
        """
        raw = bytes.fromhex(address)
        self._name = _PREFIX + raw[:8].hex().encode()
        self._secret = raw[8:]
        self._timeout_s = timeout_s
        self._socket = self._connected(time.monotonic() + timeout_s)

    def limit(self, timeout_s: float) -> None:
        """Sets the limit on each of the following waits."""
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def _connected(self, end: float) -> socket.socket:
        while True:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                found.settimeout(self._timeout_s)
                found.connect(self._name)
                if _same_user(found):
                    return found
                raise OtherUser
            except BlockingIOError:
                # The backlog is full; the server works through it.
                found.close()
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"the server's backlog stayed full for {self._timeout_s:g} s"
                    ) from None
                time.sleep(_RETRY_S)
            except BaseException:
                found.close()
                raise

    def greet(self) -> None:
        """Waits for an answer, which shows that the server accepts this user.

        Raises:
            Full: the server's process has no room for one more file.
            OSError: the server keeps closing the connection.
        """
        end = time.monotonic() + min(_COME_AGAIN_S, self._timeout_s)
        while True:
            try:
                self._ask(_NO_NUMBER)
                return
            except (ConnectionError, BrokenPipeError):
                # A server with many clients drops those that have not asked yet.
                if time.monotonic() > end:
                    raise
                self._socket.close()
                time.sleep(_RETRY_S)
                self._socket = self._connected(end)

    def take(self, number: int) -> int:
        """Returns a new descriptor of what the server offers under `number`.

        Raises:
            OSError: the number is unknown, the answer is missing or malformed, or the
                server has closed.
        """
        taken, flags = self._ask(number)
        if len(taken) == 1 and not flags & socket.MSG_CTRUNC:
            return taken[0]
        for descriptor in taken:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "this process cannot open one more file")
        raise OSError(f"the server has no descriptor {number}")

    def _ask(self, number: int) -> tuple[list[int], int]:
        """Returns the descriptors of the answer, and the flags of recvmsg."""
        message = _MESSAGE.pack(_MAGIC, self._secret, number)
        try:
            self._socket.send(message)
            answer, taken, flags = _receive(self._socket, len(message) + 1)
        except TimeoutError:
            raise TimeoutError(
                f"no answer within {self._socket.gettimeout():g} s"
            ) from None
        if answer == message:
            return taken, flags
        for descriptor in taken:
            os.close(descriptor)
        if answer.startswith(_FULL):
            raise Full
        if not answer:
            raise ConnectionResetError("the server closed the connection")
        raise OSError(f"malformed answer {answer[:16]!r}")

    def close(self) -> None:
        """Closes the connection, but not the descriptors that were taken."""
        self._socket.close()


def _pause(*sources: socket.socket) -> None:
    """Waits a moment, or until there is something to read."""
    pause = select.poll()
    for source in sources:
        pause.register(source, select.POLLIN)
    pause.poll(_PAUSE_MS)


def _same_user(connection: socket.socket) -> bool:
    """Whether the other end certainly runs as the user of this process."""
    raw = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    user = _CREDENTIALS.unpack(raw)[1]
    return user == os.geteuid() and not (user == _unmapped() and _some_unmapped())


def _unmapped() -> int:
    """Returns the uid that stands for users outside this user namespace."""
    try:
        return int(pathlib.Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _some_unmapped() -> bool:
    """Whether this user namespace leaves some users unmapped, as most do."""
    try:
        lines = pathlib.Path("/proc/self/uid_map").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines) < 2**32 - 1
    except (OSError, ValueError, IndexError):
        return True


def _receive(source: socket.socket, size: int) -> tuple[bytes, list[int], int]:
    # Not socket.recv_fds, which ignores MSG_CMSG_CLOEXEC: children would inherit them.
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(4 * descriptors.itemsize)
    data, extra, flags, _ = source.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    return data, list(descriptors), flags
