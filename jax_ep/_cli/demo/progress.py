"""A progress bar on stderr, or plain lines if that is not a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

_WIDTH, _LEAST_WIDTH = 30, 5  # columns of the bar
_PLAIN_LINES = 5  # lines for the whole run if stderr is not a terminal


class Progress:
    """Counts `total` steps; `say` prints lines on stdout without breaking the bar."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        """Shows the bar at 0."""
        self._title, self._total = title, total
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._done, self._note, self._plain = 0, "", 0
        if self._terminal:
            self._draw()

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the bar."""
        self._clear()

    def update(self, note: str = "") -> None:
        """Counts one more step and shows `note` beside the bar."""
        self._done, self._note = self._done + 1, note
        if self._terminal:
            self._draw()
            return
        reached = self._done * _PLAIN_LINES // self._total
        if reached > self._plain:
            self._plain = reached
            print(self._text(), file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """Prints a line on stdout above the bar."""
        self._clear()
        print(line, flush=True)
        if self._terminal:
            self._draw()

    def _text(self) -> str:
        passed = time.monotonic() - self._start
        left = passed / self._done * (self._total - self._done) if self._done else 0.0
        parts = [f"{self._title} {self._done}/{self._total}", self._note]
        if left:
            parts.append(f"{left:.0f} s left")
        return ", ".join(part for part in parts if part)

    def _draw(self) -> None:
        # One line at most, because a wrapped line cannot be cleared.
        columns = shutil.get_terminal_size().columns - 1
        line = self._text()
        # If there is no room for both, the text wins over the bar.
        wide = min(_WIDTH, columns - len(line) - len("[] "))
        if wide >= _LEAST_WIDTH:
            full = wide * self._done // self._total
            line = f"[{'#' * full}{'.' * (wide - full)}] {line}"
        self._stream.write(f"\r\x1b[2K{line[:columns]}")
        self._stream.flush()

    def _clear(self) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
