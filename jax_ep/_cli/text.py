"""Lays out the commands' text for the width of the terminal."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from jax_ep._core.calls import meant

LABEL = 12  # columns for the label of a finding
NBSP = "\N{NO-BREAK SPACE}"  # printed as a space, but lines do not break at it
_WIDEST = 100  # longer lines are hard to read
_NARROWEST = 24


def width() -> int:
    """Returns the columns for text: the terminal's, up to 100, or 80 without one."""
    columns = shutil.get_terminal_size((80, 24)).columns
    return min(max(columns, _NARROWEST), _WIDEST)


def fill(text: str, first: str = "", rest: str | None = None) -> list[str]:
    """Wraps `text`; the first line begins with `first`, others with `rest`."""
    rest = " " * len(first) if rest is None else rest
    return _wrapped(text, width(), first, rest)


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    lines = textwrap.wrap(
        text.replace("pip install ", f"pip{NBSP}install{NBSP}"),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        # Names, paths and commands stay whole, so that they can be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(NBSP, " ") for line in lines]


def fit(line: str, indent: int) -> list[str]:
    """Returns `line` unchanged if it fits, else wrapped with further lines indented."""
    if len(line) <= width():
        return [line]
    lead = line[: len(line) - len(line.lstrip())]
    return fill(" ".join(line.split()), lead, " " * indent)


def entry(label: str, text: str) -> list[str]:
    """Returns lines with a label and `text` beside it."""
    return fill(text, f"{label:<{LABEL - 1}} ", " " * LABEL)


def matrix(
    label: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[str]:
    """Returns lines of a square table of devices, in parts if it is too wide."""
    cell = 1 + max(len(text) for row in (heads, *rows) for text in row)
    fitting = max(1, (width() - LABEL + 1) // cell)
    lines = []
    for start in range(0, len(heads), fitting):
        for name, row in zip((label, *heads), (heads, *rows), strict=True):
            place = f"{name:<{LABEL - 1}}" if row is heads else f"{name:>{LABEL - 1}}"
            cells = row[start : start + fitting]
            lines.append(place + "".join(f"{text:>{cell}}" for text in cells))
    return lines


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> list[str]:
    """Returns lines of a table, without columns that are empty in every row.

    Args:
        heads: headings of the columns.
        rows: cells.
        names: number of leading columns that identify a row; they are always shown.

    Returns:
        Aligned columns if they fit, else for each row its names, followed by each cell
        after its heading.
    """
    kept = [i for i in range(len(heads)) if i < names or any(row[i] for row in rows)]
    shown = [[row[i] for i in kept] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= width():
        numeric = [all(row[i].isdigit() for row in shown[1:]) for i in range(names)]
        sides = [">" if each else "<" for each in numeric] + [">"] * len(kept)
        return [
            "  ".join(
                f"{cell:{side}{wide}}"
                for cell, side, wide in zip(row, sides, widths, strict=False)
            ).rstrip()
            for row in shown
        ]
    lines = []
    for row in shown[1:]:
        lines += fill(" ".join(row[:names]), rest="  ")
        cells = zip(shown[0][names:], row[names:], strict=True)
        told = [
            f"{head} {cell.strip()}".strip() for head, cell in cells if cell.strip()
        ]
        lines += fill(", ".join(text.replace(" ", NBSP) for text in told), "  ")
    return lines


def complain(text: str) -> None:
    """Prints an error, wrapped on a terminal or in one line for logs."""
    if sys.stderr is not None and sys.stderr.isatty():
        text = "\n".join(fill(text, rest="  "))
    print(text, file=sys.stderr)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs of descriptions and epilogs, and lays out examples.

    An example is a line that begins with two spaces. It holds a command, two or more
    spaces, and an explanation.
    """

    def __init__(self, prog: str) -> None:
        """Makes a formatter for the program or subcommand `prog`."""
        super().__init__(prog, width=width())

    def _format_usage(
        self, usage: Any, actions: Any, groups: Any, prefix: str | None
    ) -> str:
        """Formats the usage as argparse does, or without options if they do not fit."""
        text = super()._format_usage(usage, actions, groups, prefix)
        if max(map(len, text.splitlines())) > width():
            short = "%(prog)s [options]"
            return super()._format_usage(short, actions, groups, prefix)
        return text

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = []
        for paragraph in text.strip("\n").split("\n\n"):
            head = [line for line in paragraph.splitlines() if line[:2] != "  "]
            examples = [line for line in paragraph.splitlines() if line[:2] == "  "]
            lines = fill(" ".join(head)) + _examples(examples)
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)


def _examples(lines: Sequence[str]) -> list[str]:
    parts = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines]
    column = max((len(words[0]) for words in parts if words[1:]), default=0) + 4
    beside = all(column + len(text) <= width() for _, *texts in parts for text in texts)
    laid = []
    for command, *texts in parts:
        if beside and texts:
            laid.append(f"  {command:<{column - 2}}{texts[0]}")
            continue
        whole = re.sub(r"(--[\w-]+) (?=[^\s-])", rf"\1{NBSP}", command)
        broken = fill(whole, "  ", "      ")
        # So that a command of several lines can be copied.
        laid += [f"{line} \\" for line in broken[:-1]] + broken[-1:]
        laid += [line for text in texts for line in fill(text, "      ")]
    return laid


class Parser(argparse.ArgumentParser):
    """A parser that lays out its help, and reports unknown arguments itself."""

    def __init__(self, **options: Any) -> None:
        """Takes the arguments of argparse's parser."""
        options.setdefault("formatter_class", HelpFormatter)
        # An option that is cut short would become ambiguous with the next new one.
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Rejects unknown arguments here; the main parser would print its own usage."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [word.partition("=")[0] for word in unknown if word[:1] == "-"]
            near = meant(names, [*self._option_string_actions])
            told = f"unrecognized arguments: {' '.join(unknown)}"
            self.error("; ".join(filter(None, [told, near])))
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, and exits with code 2."""
        self.print_usage(sys.stderr)
        complain(f"{self.prog}: error: {message}")
        raise SystemExit(2)
