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
import secrets
import select
import selectors
import socket
import struct
import threading

# Both ways: who speaks, the giver's secret, a number. The descriptor of that number
# comes with the answer.
_MESSAGE = struct.Struct("<8s16sq")
_MAGIC = b"jax_ep/1"
_PREFIX = b"\0jax_ep-"
_NO_NUMBER = -1  # under which nothing is given
# Open at a giver: more than processes have devices, fewer than files may be opened.
_MOST_TAKERS = 256
# Of Linux's SO_PEERCRED: process, effective user, group.
_CREDENTIALS = struct.Struct("3i")
_PAUSE_MS = 50
# Of accept(), where a taker stays in the queue.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Giver:
    """Hands out descriptors by number, from a thread, to whoever knows its address.

    The address holds a secret: other users of the host can see the socket. They are
    left before they can ask, and nobody can keep it from serving: takers above
    `_MOST_TAKERS` replace the oldest, and where no more files can be opened it waits.
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
            listener.listen(256)
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
            takers: dict[socket.socket, None] = {}  # oldest first
            opened.callback(lambda: [taker.close() for taker in takers])
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is woken:
                        return
                    if source is self._listener:
                        taker = self._accept(woken)
                        if taker is None:
                            continue
                        selector.register(taker, selectors.EVENT_READ)
                        takers[taker] = None
                        if len(takers) <= _MOST_TAKERS:
                            continue
                        source = next(iter(takers))
                    elif source not in takers or self._answer(source):
                        # Left already, for the sake of a later one, or served.
                        continue
                    del takers[source]
                    selector.unregister(source)
                    source.close()

    def _accept(self, woken: socket.socket) -> socket.socket | None:
        """The next taker; None for one of another user, or that is gone again."""
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
        raw = taker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] == os.geteuid():
            return taker
        taker.close()
        return None

    def _answer(self, taker: socket.socket) -> bool:
        """Whether more may follow. Never blocks; whoever asks amiss is left."""
        try:
            message = taker.recv(_MESSAGE.size + 1)
            magic, secret, number = _MESSAGE.unpack(message)
            if magic != _MAGIC or not secrets.compare_digest(secret, self._secret):
                return False
            found = self._descriptors.get(number)
            socket.send_fds(taker, [message], [] if found is None else [found])
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
            OSError: there is no such giver, or not in this network namespace.
        """
        raw = bytes.fromhex(address)
        name, self._secret = raw[:8], raw[8:]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(_PREFIX + name.hex().encode())
        except OSError:
            self._socket.close()
            raise

    def greet(self) -> None:
        """Waits until the giver has answered, which it does to its own user alone.

        Raises:
            OSError: it left.
        """
        self._ask(_NO_NUMBER)

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
