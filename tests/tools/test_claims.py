"""Figures in README.md and docs/ that docs/claims.py lists equal those of records.

Other figures with a unit say where they are from, or that they are recorded nowhere.
"""

from __future__ import annotations

import re

import claims
import pytest

from support import ROOT

FIGURE_WITH_UNIT = re.compile(
    r"\d(?: to [\d.]+| and [\d.]+)?(?:%| (?:us|ms|GB/s|MB|GB|times)\b)"
)
DATE = r"20\d\d-\d\d-\d\d"
SAID = re.compile(
    rf"{DATE}|not\s+recorded|not\s+measured|assum|\bseen\b|guess|fitted|comput"
    r"|by design|\btests\b|\baims?\b"
)
# A paragraph, a list entry or a table row.
BLOCK = re.compile(r"^[ ]*\S.*(?:\n(?![ ]*(?:[*|]|$)).+)*", re.M)
# Sections that say so of all their figures.
SECTIONS = {
    "docs/benchmarks.md": ("Beside other libraries",),
    "docs/performance.md": (
        "Where the time goes",
        "Long calls wait for the link",
        "Short calls are latency-bound",
    ),
    # The page begins with it.
    "docs/scale.md": ("Results", "How far to trust it", "What a rank allocates"),
}
# Figures that follow from sizes and formulas, are goals, or are defaults of others.
GIVEN = {
    "docs/benchmarks.md": ("T = 128: 20 us, 14 in `fp8_block128`",),
    "docs/fp8.md": ("scales add 0.02% (6%)",),
    "docs/overlap.md": ("some 10% more bytes at 4 ranks, and 50% more at 8",),
    "docs/sharp_bits.md": ("(R = 4, K = 8: 90%; R = 8, K = 8: 66%)",),
    "docs/start.md": (
        "262144 rows, or 3.76 GB of bfloat16",
        "40960 rows, or 0.59 GB",
        "more than 1 GB",
        "JAX reserves 75% of GPU memory",
    ),
}
PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def digits(figure: str) -> int:
    return len(figure.partition(".")[2])


def section(text: str, at: int) -> tuple[str, str]:
    """The heading above a place, and the text from it to the next heading."""
    heads = [m for m in re.finditer(r"^#+ (.*)$", text, re.M) if m.start() <= at]
    after = re.compile(r"^#+ ", re.M).search(text, at)
    start, name = (heads[-1].start(), heads[-1][1]) if heads else (0, "")
    return name, text[start : after.start() if after else len(text)]


def check(page: str, claim: claims.Claim) -> None:
    text = claims.prose(page)
    found = list(claim.pattern().finditer(text))
    assert len(found) == 1, f"{page} has {len(found)} times: {claim.text}"
    said = found[0].groups()
    numbers = claim.numbers()
    shown = [
        f"{number:,.{digits(figure)}f}"
        if "," in figure
        else f"{number:.{digits(figure)}f}"
        for figure, number in zip(said, numbers, strict=True)
    ]
    assert list(said) == shown, f"{page}, {claim.text!r}, {claim.records}"
    for path in claim.paths():
        dated = claims.date_of(path) in section(text, found[0].start())[1]
        assert claims.is_newest(path) or dated, f"{page} needs the date of {path.name}"


@pytest.mark.parametrize("page", claims.PAGES)
def test_figures_are_those_of_records(page: str) -> None:
    for claim in claims.PAGES[page]:
        check(page, claim)


def unclaimed(page: str) -> str:
    """A page's prose, with ~ in place of code and of text in claims or GIVEN."""
    text = claims.prose(page)
    patterns = [claim.pattern() for claim in claims.PAGES.get(page, ())]
    for words in GIVEN.get(page, ()):
        pattern = re.compile(r"\s+".join(map(re.escape, words.split())))
        assert pattern.search(text), f"{page} has no longer: {words}"
        patterns.append(pattern)
    patterns.append(re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S))
    shown = list(text)
    for pattern in patterns:
        for found in pattern.finditer(text):
            for at in range(*found.span()):
                shown[at] = "~" if text[at] not in "\n|" else text[at]
    return "".join(shown)


@pytest.mark.parametrize("page", PAGES)
def test_other_figures_say_where_they_are_from(page: str) -> None:
    text, bare = unclaimed(page), []
    for block in BLOCK.finditer(text):
        excused = section(text, block.start())[0] in SECTIONS.get(page, ())
        if not excused and not SAID.search(block[0]):
            at = [found.start() for found in FIGURE_WITH_UNIT.finditer(block[0])]
            bare += [block[0][max(0, start - 40) : start + 10] for start in at]
    assert not bare, (
        f"{page}: claim these in docs/claims.py, or say where they are from"
    )
