"""Draws the diagrams of the pages as SVG: boxes in a grid, and arrows between them.

`generate.py` writes the files, so that the pages, and the README on any index, show
them without a script. They have a light background of their own, for dark pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from html import escape

GAP_X, GAP_Y, PAD = 34, 30, 16
LINE = 19  # pixels from one line of text to the next
FILLS = {
    "data": "#f1f3f5",
    "step": "#dbe7fb",
    "wire": "#fde8cf",
    "work": "#dcf2dd",
}
STYLE = """\
text { font: 14px system-ui, "Segoe UI", "Noto Sans", sans-serif; fill: #1f2328 }
.name { font-weight: 600 }
.box { stroke: #57606a; rx: 6px }
.frame { fill: none; stroke: #8c959f; stroke-dasharray: 5 4; rx: 10px }
.arrow { fill: none; stroke: #57606a; stroke-width: 1.5; marker-end: url(#head) }
"""


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """Returns an SVG of these parts on a light background, with the pages' style."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">',
            f"<style>\n{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


@dataclasses.dataclass(frozen=True)
class Box:
    """A box in the grid. Its first line of text is bold."""

    column: float
    row: float
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Diagram:
    """Boxes by name, arrows between them, and titled frames around rows."""

    width: int  # pixels of a box
    lines: int  # lines of text that a box holds
    boxes: dict[str, Box]
    arrows: tuple[tuple[str, str], ...]
    frames: tuple[tuple[int, int, str], ...] = ()

    @property
    def height(self) -> int:
        return self.lines * LINE + 14

    def corner(self, box: Box) -> tuple[float, float]:
        x = PAD + box.column * (self.width + GAP_X)
        y = PAD + box.row * (self.height + GAP_Y)
        return x, y + LINE * len([f for f in self.frames if f[0] <= box.row])

    def draw_box(self, box: Box) -> str:
        x, y = self.corner(box)
        size = f'width="{self.width}" height="{self.height}"'
        made = [f'<rect class="box" x="{x}" y="{y}" {size} fill="{FILLS[box.kind]}"/>']
        texts = box.text.split("\n")
        first = y + self.height / 2 - LINE * (len(texts) - 1) / 2 + 5
        for at, text in enumerate(texts):
            place = f'x="{x + self.width / 2}" y="{first + LINE * at}"'
            kind = "" if at else ' class="name"'
            text = escape(text, quote=False)
            made.append(f'<text{kind} text-anchor="middle" {place}>{text}</text>')
        return "\n".join(made)

    def draw_arrow(self, start: Box, end: Box) -> str:
        (x0, y0), (x1, y1) = self.corner(start), self.corner(end)
        middle = self.height / 2
        if y0 == y1:
            right = x1 > x0
            x0, x1 = (x0 + self.width, x1 - 2) if right else (x0, x1 + self.width + 2)
            path = f"M{x0} {y0 + middle} H{x1}"
        else:
            x0, x1 = x0 + self.width / 2, x1 + self.width / 2
            turn = y1 - GAP_Y / 2
            path = f"M{x0} {y0 + self.height} V{turn} H{x1} V{y1 - 2}"
        return f'<path class="arrow" d="{path}"/>'

    def draw_frame(self, first: int, last: int, title: str, width: float) -> str:
        _, top = self.corner(Box(0, first, "", ""))
        _, bottom = self.corner(Box(0, last, "", ""))
        y, height = top - LINE - 3, bottom - top + self.height + LINE + 11
        place = f'x="{PAD / 2}" y="{y}" width="{width - PAD}" height="{height}"'
        at = f'x="{PAD + 2}" y="{y + LINE - 3}"'
        return f'<rect class="frame" {place}/>\n<text {at}>{escape(title)}</text>'

    def svg(self) -> str:
        """Returns the whole picture."""
        corners = [self.corner(box) for box in self.boxes.values()]
        width = max(x for x, _ in corners) + self.width + PAD
        height = max(y for _, y in corners) + self.height + PAD
        head = '<path d="M0 0 L8 4 L0 8 z" fill="#57606a"/>'
        where = 'markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"'
        units = 'markerUnits="userSpaceOnUse"'
        parts = [
            f'<defs><marker id="head" {where} {units}>{head}</marker></defs>',
            *(self.draw_frame(*frame, width) for frame in self.frames),
            *(self.draw_arrow(self.boxes[a], self.boxes[b]) for a, b in self.arrows),
            *map(self.draw_box, self.boxes.values()),
        ]
        return picture(width, height, parts)


# The calls of a layer on transport collective (README.md).
FLOW = Diagram(
    width=178,
    lines=3,
    boxes={
        "tokens": Box(0, 0, "data", "tokens [n, H]\ntopk_ids [n, K]"),
        "pack": Box(
            1, 0, "step", "ep_dispatch_pack\nroute and encode, one\nmessage per rank"
        ),
        "send": Box(2, 0, "wire", "exchange\nall_to_all"),
        "unpack": Box(3, 0, "step", "ep_dispatch_unpack\nplace by expert"),
        "rows": Box(4, 0, "data", "rows [N, H]\nby local expert"),
        "experts": Box(4, 1, "work", "experts\ngrouped matmuls"),
        "combine": Box(3, 1, "step", "ep_combine_pack\none row per message"),
        "back": Box(2, 1, "wire", "exchange\nall_to_all"),
        "sum": Box(1, 1, "step", "ep_combine_unpack\nsum over ranks"),
        "y": Box(0, 1, "data", "y [n, H]"),
    },
    arrows=(
        ("tokens", "pack"),
        ("pack", "send"),
        ("send", "unpack"),
        ("unpack", "rows"),
        ("rows", "experts"),
        ("experts", "combine"),
        ("combine", "back"),
        ("back", "sum"),
        ("sum", "y"),
    ),
)

# Which folder imports or includes which (docs/architecture.md).
MODULES = Diagram(
    width=300,
    lines=2,
    boxes={
        "layers": Box(0, 0, "step", "flax, _layers, experts\nlayers, routers, matmuls"),
        "ops": Box(0, 1, "step", "sharded, _ops\narguments, order, derivatives"),
        "setup": Box(1, 1, "step", "_setup\ninit, shared handles"),
        "transport": Box(0.5, 2, "step", "_transport\ncollective, p2p, shmem"),
        "peers": Box(0.5, 3, "step", "_peers\nprocesses meet, windows are mapped"),
        "core": Box(0.5, 4, "step", "_core\nconfigs, handles, types, checks"),
        "native": Box(0.5, 5, "step", "_native\nnative modules, custom calls"),
        "ffi": Box(0.5, 6, "wire", "ffi\nhandlers: decode, check, launch"),
        "cpu": Box(0, 7, "work", "cpu\nsteps on rows"),
        "cuda": Box(1, 7, "work", "cuda, shmem\nkernels, on a host and between nodes"),
        "formats": Box(0.5, 8, "data", "formats\ntoken formats, numbers"),
        "protocol": Box(0.5, 9, "data", "protocol\nlayout, routing, steps, windows"),
    },
    arrows=(
        ("layers", "ops"),
        ("ops", "transport"),
        ("setup", "transport"),
        ("transport", "peers"),
        ("peers", "core"),
        ("core", "native"),
        ("native", "ffi"),
        ("ffi", "cpu"),
        ("ffi", "cuda"),
        ("cpu", "formats"),
        ("cuda", "formats"),
        ("formats", "protocol"),
    ),
    frames=((0, 5, "jax_ep (Python)"), (6, 9, "xla_ffi (C++, CUDA)")),
)

DIAGRAMS = {"flow.svg": FLOW, "modules.svg": MODULES}
