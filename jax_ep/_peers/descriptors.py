"""Passing file descriptors between the processes of a host. Used by init.

By sockets, which also work between containers with process ids of their own. Names are
abstract: nothing is left behind on disk, and processes see each other's iff they share
a network namespace.
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

# Both ways: who speaks, the giver's secret, a number. The descriptor of that number
# comes with the answer.
_MESSAGE = struct.Struct("<8s16sq")
_MAGIC = b"jax_ep/1"
_PREFIX = b"\0jax_ep-"
_NO_NUMBER = -1  # under which nothing is given
# Open at a giver: more than processes have devices, fewer than files may be opened.
_MOST_TAKERS = 256
_BACKLOG = 4096  # the kernel takes its own limit where that is less
# How long a taker comes again after it was left, which happens in a crowd of others.
_COME_AGAIN_S = 5.0
_RETRY_S = 0.02
# Of Linux's SO_PEERCRED: process, effective user, group.
_CREDENTIALS = struct.Struct("3i")
_PAUSE_MS = 50
# Of accept(), where a taker stays in the queue.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Giver:
    """Hands out descriptors by number, from a thread, to whoever knows its address.

    The address holds a secret: other users of the host can see the socket. They are
    left before they can ask, and nobody can keep it from serving: takers above
    `_MOST_TAKERS` replace the oldest that has not shown the secret, and where no more
    files can be opened it waits.
    """

    def __init__(self) -> None:
        """Listens; nothing is there to take yet.

        Raises:
            OSError: no more files can be opened.
        """
        self._name, self._secret = secrets.token_bytes(8), secrets.token_bytes(16)
        self._descriptors: dict[int, int] = {}
        # All that the thread needs: nobody would hear of what failed there.
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener = stack.enter_context(listener)
            listener.setblocking(False)
            listener.bind(_PREFIX + self._name.hex().encode())
            listener.listen(_BACKLOG)
            self._wake, woken = socket.socketpair()
            stack.enter_context(woken)
            for source in (listener, woken):
                selector.register(source, selectors.EVENT_READ)
            opened = stack.pop_all()
        args = (woken, selector, opened)
        self._thread = threading.Thread(target=self._serve, args=args, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """For `Taker`."""
        return (self._name + self._secret).hex()

    def give(self, number: int, descriptor: int) -> None:
        """Lets others take it; it is this object's to close from here on."""
        self._descriptors[number] = descriptor

    def close(self) -> None:
        """Stops, and closes what it had to give. Those who took have their own."""
        # Closing is not enough: a forked child may have it open, too.
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
            # Oldest first; whether each has shown the secret.
            takers: dict[socket.socket, bool] = {}
            opened.callback(lambda: [taker.close() for taker in takers])

            def leave(taker: socket.socket) -> None:
                del takers[taker]
                selector.unregister(taker)
                taker.close()

            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is woken:
                        return
                    if source is not self._listener:
                        # It may have been left already, for the sake of a later one.
                        if source in takers and not self._serve_one(source, takers):
                            leave(source)
                        continue
                    # As many as wait, but not for ever: others are to be served.
                    for _ in range(_MOST_TAKERS):
                        taker = self._accept(woken)
                        if taker is None:
                            break
                        if taker.fileno() < 0:  # of another user
                            continue
                        selector.register(taker, selectors.EVENT_READ)
                        takers[taker] = False
                        if len(takers) > _MOST_TAKERS:
                            leave(self._least(takers))

    def _serve_one(
        self, taker: socket.socket, takers: dict[socket.socket, bool]
    ) -> bool:
        """Answers if there is a question; whether more may follow."""
        answered = self._answer(taker)
        takers[taker] = takers[taker] or bool(answered)
        return answered is not False

    def _least(self, takers: dict[socket.socket, bool]) -> socket.socket:
        """The oldest that has not shown the secret, though it had the time."""
        for taker, proven in takers.items():
            if not proven and not (self._serve_one(taker, takers) and takers[taker]):
                return taker
        return next(iter(takers))

    def _accept(self, woken: socket.socket) -> socket.socket | None:
        """The next taker, closed if it is of another user; None where none waits."""
        try:
            taker = self._listener.accept()[0]
        except OSError as error:
            if error.errno in _NO_ROOM:
                # Else the selector would return at once for ever.
                pause = select.poll()
                pause.register(woken, select.POLLIN)
                pause.poll(_PAUSE_MS)
            return None
        taker.setblocking(False)
        if not _same_user(taker):
            taker.close()
        return taker

    def _answer(self, taker: socket.socket) -> bool | None:
        """Whether more may follow; None where nothing was asked. Never blocks."""
        try:
            message = taker.recv(_MESSAGE.size + 1)
            magic, secret, number = _MESSAGE.unpack(message)
            if magic != _MAGIC or not secrets.compare_digest(secret, self._secret):
                return False
            found = self._descriptors.get(number)
            socket.send_fds(taker, [message], [] if found is None else [found])
        except BlockingIOError:
            return None
        except (OSError, struct.error):
            return False
        return True


class Taker:
    """A connection to a `Giver`.

    Every wait is bounded by `timeout_s`; what goes wrong is an OSError that says what.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        """Connects.

        Raises:
            PermissionError: the giver is of another user, or of one that this process's
                user namespace does not know.
            OSError: there is no such giver, or not in this network namespace.
        """
        raw = bytes.fromhex(address)
        self._name = _PREFIX + raw[:8].hex().encode()
        self._secret = raw[8:]
        self._timeout_s = timeout_s
        self._socket = self._connected(time.monotonic() + timeout_s)

    def _connected(self, end: float) -> socket.socket:
        while True:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                found.settimeout(self._timeout_s)
                found.connect(self._name)
                if _same_user(found):
                    return found
                raise PermissionError(
                    errno.EPERM, "the socket there is of another user than this process"
                )
            except BlockingIOError:
                # Others wait in line, whoever they are: the giver goes through them.
                found.close()
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"no place in line within {self._timeout_s:g} s"
                    ) from None
                time.sleep(_RETRY_S)
            except BaseException:
                found.close()
                raise

    def greet(self) -> None:
        """Waits until the giver has answered, which it does to its own user alone.

        Raises:
            OSError: it left, and did so again.
        """
        end = time.monotonic() + min(_COME_AGAIN_S, self._timeout_s)
        while True:
            try:
                self._ask(_NO_NUMBER)
                return
            except (ConnectionError, BrokenPipeError):
                # It leaves those who have not asked yet where very many come.
                if time.monotonic() > end:
                    raise
                self._socket.close()
                time.sleep(_RETRY_S)
                self._socket = self._connected(end)

    def take(self, number: int) -> int:
        """A descriptor of one's own of what was given under that number.

        Raises:
            OSError: it is not there; no answer, or one that is none; the giver is gone.
        """
        taken, flags = self._ask(number)
        if len(taken) == 1 and not flags & socket.MSG_CTRUNC:
            return taken[0]
        for descriptor in taken:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC:
            raise OSError("this process cannot open one more file")
        raise OSError(f"nothing is there under number {number}")

    def _ask(self, number: int) -> tuple[list[int], int]:
        """The descriptors that come with the answer, and its flags."""
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
        if not answer:
            raise ConnectionResetError("the process closed its socket")
        raise OSError(f"an answer that is none, {answer[:16]!r}")

    def close(self) -> None:
        """Leaves; what was taken stays."""
        self._socket.close()


def _same_user(connection: socket.socket) -> bool:
    """Whether the other end is of this process's user, beyond doubt."""
    raw = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    user = _CREDENTIALS.unpack(raw)[1]
    return user == os.geteuid() and not (user == _unmapped() and _some_unmapped())


def _unmapped() -> int:
    """What users look like that this user namespace does not know."""
    try:
        return int(pathlib.Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _some_unmapped() -> bool:
    """Whether there are such: a namespace of its own mostly knows a part of them."""
    try:
        lines = pathlib.Path("/proc/self/uid_map").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines) < 2**32 - 1
    except (OSError, ValueError, IndexError):
        return True


def _receive(source: socket.socket, size: int) -> tuple[bytes, list[int], int]:
    # socket.recv_fds takes no heed of its flags: children would inherit descriptors.
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(4 * descriptors.itemsize)
    data, extra, flags, _ = source.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    return data, list(descriptors), flags
