"""A paper model of many ranks for docs/scale.md: bytes, messages, memory and time.

Routing is uniform: each token takes `TOP_K` distinct experts at random. All numbers
come from the rates below and from the native module's sizes. A call is a chain of
launches in one stream (xla_ffi/cuda/internode/calls.h), so their times add up.
"""

import dataclasses
import json
import pathlib
from math import ceil, comb

from jax_ep import _native_cpu as native

HIDDEN, TOP_K, LOCAL_EXPERTS = 7168, 8, 8
ROW = HIDDEN * 2  # bytes of a token, and of a sum
RANKS_PER_NODE = 8
RANKS = (16, 32, 64, 128, 256, 512, 1024)
GB = 1e9
RESULTS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "results"


# The model's assumptions; docs/scale.md says what each is and where it comes from.
RATES = {
    "NVLINK": (336, "GB/s"),
    "NETWORK": (45, "GB/s"),
    "SEND": (1920, "GB/s"),
    "SUM": (1500, "GB/s"),
    "COPY": (3442, "GB/s"),
    "PUT": (140, "GB/s"),
    "REQUEST": (0.1, "us"),
    "HALVES": (15, "us"),
    "FAR": (14, "us"),
    "FLIGHT": (8, "us"),
    "BUNDLE": (16, "us"),
}
(NVLINK, NETWORK, SEND, SUM, COPY, PUT, REQUEST, HALVES, FAR, FLIGHT, BUNDLE) = (
    value for value, _ in RATES.values()
)
SHARES = 8  # kInternodeShares: each is a put, a fence and a signal


def touched(parts, experts, top_k=TOP_K):
    """Returns in how many of `parts` equal parts a token has experts, on average."""
    share = experts // parts
    return parts * (1 - comb(experts - share, top_k) / comb(experts, top_k))


def _combine_bytes(gradients):
    one, two = (
        native.combine_region_bytes("bf16", HIDDEN, 2, n, gradients) for n in (1, 2)
    )
    return two - one


def combine_bytes():
    """Returns the bytes of a reduced row on its way back."""
    return _combine_bytes(0)


def dispatch_bytes(name):
    """Returns the bytes of a message of a dispatch that is not cached."""
    one, two = (
        native.dispatch_region_bytes(name, HIDDEN, 2, n, TOP_K, LOCAL_EXPERTS)
        for n in (1, 2)
    )
    assert two - one >= sum(native.encoded_bytes(name, HIDDEN, 2))
    return two - one


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of call: bytes of a message, and what its halves touch besides, per token.

    `read` bytes are read before messages are sent, at `rate`; `written` bytes are
    written after they have arrived.
    """

    name: str
    message: int
    read: int
    written: int
    rate: float
    cells: int  # puts of flags, and of counts


def dispatch(name="bf16"):
    """A dispatch, not cached: a token is read once, and becomes up to TOP_K rows."""
    row = sum(native.encoded_bytes(name, HIDDEN, 2))
    return Kind(
        f"dispatch `{name}`", dispatch_bytes(name), ROW, TOP_K * row, SEND, cells=2
    )


def combine(in_halves=False):
    """A combine: rows are read and added up, and so are then the sums that arrive."""
    rate = SUM if in_halves else COPY
    return Kind("combine", combine_bytes(), TOP_K * ROW, ROW, rate, cells=1)


@dataclasses.dataclass(frozen=True)
class Load:
    """What one rank sends in one call, and how long its steps take."""

    near_bytes: float  # over NVLink, to ranks of its node
    far_bytes: float  # put to other nodes
    requests: int  # puts and signals
    steps: dict[str, float]  # us
    fixed: float  # us, for launches, waits and flights

    @property
    def us(self):
        """The time as built: one step after the other."""
        return sum(self.steps.values()) + self.fixed

    @property
    def overlapped_us(self):
        """The time if all steps ran beside the longest one, which is not built."""
        return max(self.steps.values()) + self.fixed


def _us(size, rate):
    return size / rate / 1e3  # bytes / (GB/s) is nanoseconds


def _halves(kind, ranks, tokens, near, far):
    # Both halves. Messages for other nodes are stored into the staging area.
    each = tokens * touched(ranks, ranks * LOCAL_EXPERTS) / ranks * kind.message
    local = tokens * kind.read + (1 + far) * each
    first = max(_us(local, kind.rate), _us(near * each, NVLINK))
    second = _us(ranks * each + tokens * kind.written, COPY)
    return each, first, second


def direct(ranks, tokens, kind, per_node=RANKS_PER_NODE, nvlink=False):
    """Sends one message per (token, rank); far ones are staged, and put from there.

    With `nvlink` nodes are forced: puts to one rank are stores over NVLink.
    """
    near, far = per_node - 1, ranks - per_node
    each, first, second = _halves(kind, ranks, tokens, near, far)
    requests = far * (2 * SHARES + kind.cells)
    put = max(_us(far * each, PUT if nvlink else NETWORK), requests * REQUEST)
    fixed = HALVES + (FAR if far else 0) + (0 if nvlink else FLIGHT)
    steps = {"first half": first, "puts": put, "second half": second}
    return Load(near * each, far * each, requests, steps, fixed)


def hierarchical(ranks, tokens, kind):
    """Sends one message per (token, node), to the rank with the sender's place there.

    Messages are still staged for each rank, and then gathered. The receiving rank
    stores what arrives from all nodes into the windows of its own node.
    """
    nodes, near = ranks // RANKS_PER_NODE, RANKS_PER_NODE - 1
    others = nodes - 1
    far = others * RANKS_PER_NODE
    each, first, second = _halves(kind, ranks, tokens, near, far)
    bundle = tokens * touched(nodes, ranks * LOCAL_EXPERTS) / nodes * kind.message
    # A bundle has a table, and cells for every rank there.
    requests = others * (2 * SHARES + 1 + kind.cells * RANKS_PER_NODE)
    relayed = others * (bundle + each)  # bytes read, and written for the relay itself
    steps = {
        "first half": first,
        "gather": _us(2 * others * bundle, COPY),
        "puts": max(_us(others * bundle, NETWORK), requests * REQUEST),
        "relay": max(_us(relayed, COPY), _us(others * near * each, NVLINK)),
        "second half": second,
    }
    fixed = HALVES + FAR + FLIGHT + BUNDLE
    return Load(nodes * near * each, others * bundle, requests, steps, fixed)


def recorded():
    """Returns (op, T, measured us) of 2 H200s as two nodes, with puts over NVLink."""
    found = sorted(RESULTS.glob("nodes-h200x2-*.json"))
    rows = json.loads(found[-1].read_text())["rows"]
    return [
        (row["op"], row["tokens"], row["us"])
        for row in rows
        if row["way"] == "shmem, one a node"
    ]


def over_nvlink(op, tokens, per_node=1):
    """Returns the model's load for 2 ranks; with two per node, of a call in halves."""
    kind = dispatch() if op == "dispatch" else combine(in_halves=per_node == 2)
    return direct(2, tokens, kind, per_node=per_node, nvlink=True)


def block_bytes(ranks, tokens, pending_calls, most=1.0, most_bundled=1.0):
    """Returns the bytes that a rank allocates: window, staging area, inboxes, bundles.

    As in xla_ffi/protocol (window.h, internode.h, bundle.h), without what does not grow
    with calls in flight. `most` is the share of a region's messages that have room.
    """
    # Short calls have two regions even with none pending: ffi/window_sizes.h.
    depth = max(2 if tokens <= 512 else 1, pending_calls + 1)
    nodes, cell = ranks // RANKS_PER_NODE, 16
    sent, back = dispatch_bytes("bf16"), _combine_bytes(TOP_K)
    # Flags, counts, and the cells in which the shortest calls send their messages.
    flags = max(min(tokens, 256), ceil(tokens / 4))
    flags_back = max(min(tokens, 64), ceil(tokens / 16)) * ceil(HIDDEN / 1024)
    counts = 1 + ceil(LOCAL_EXPERTS / 3)
    few = min(tokens, 24) * (1 + TOP_K + ceil(sent / 12))
    few_back = min(tokens, 64) * ceil(back / 12)
    small = cell * (flags + flags_back + counts + 1)
    region = most * tokens * (sent + back) + small + cell * (few + few_back)
    table = 16 + tokens * RANKS_PER_NODE * 4
    bundles = 2 * nodes * (most_bundled * tokens * sent + table)
    bundles += ranks * cell * (flags + counts)  # these are passed on as well
    return depth * (ranks * (2 * region + small) + bundles)


def _number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def record(table):
    """Makes the table of the model beside what was measured."""
    rows = []
    for op, tokens, us in recorded():
        load = over_nvlink(op, tokens)
        cells = [f"{step:.0f}" for step in (*load.steps.values(), load.fixed, load.us)]
        rows.append((op, tokens, *cells, f"{us:.0f}", f"{load.us / us:.2f}"))
    columns = ["", "T", "first half", "puts", "second half", "fixed"]
    return table([*columns, "model us", "measured us", "model / measured"], rows)


def steps(tokens, table):
    """Makes the table of where the time goes, in groups of sizes that windows serve."""
    names = ("first half", "gather", "puts", "relay", "second half")
    rows = []
    for ranks in (16, 32):
        for what, load in (
            ("dispatch, direct", direct(ranks, tokens, dispatch())),
            ("dispatch, hierarchical", hierarchical(ranks, tokens, dispatch())),
            ("combine", direct(ranks, tokens, combine())),
        ):
            cells = [f"{load.steps[n]:.0f}" if n in load.steps else "" for n in names]
            rows.append((what, ranks, *cells, f"{load.fixed:.0f}", f"{load.us:.0f}"))
    return table(("", "R", *names, "fixed", "us"), rows)


def sends(tokens, table):
    """Makes the table of both ways to send a dispatch, and of a combine."""
    rows = []
    for kind in (dispatch(), dispatch("fp8_block128"), combine()):
        for ranks in RANKS:
            plain = direct(ranks, tokens, kind)
            may_forward = kind.name != "combine"
            forwarded = hierarchical(ranks, tokens, kind) if may_forward else None
            cells = [kind.name, ranks]
            for load in (plain, forwarded):
                if load is None:
                    cells += [""] * 5
                    continue
                cells += [
                    _number(load.far_bytes / 1e6),
                    _number(load.near_bytes / 1e6),
                    load.requests,
                    f"{load.us:.0f}",
                    f"{load.overlapped_us:.0f}",
                ]
            cells.append(f"{plain.us / forwarded.us:.2f}" if forwarded else "")
            rows.append(cells)
    columns = ["far MB", "near MB", "requests", "us", "overlapped us"]
    hier = [f"hier. {columns[0]}", *columns[1:]]
    return table(["", "R", *columns, *hier, "direct / hier."], rows)


def memory(table):
    """Makes the table of a rank's memory, as built and with smaller regions."""
    rows = []
    for ranks in RANKS:
        nodes, experts = ranks // RANKS_PER_NODE, ranks * LOCAL_EXPERTS
        # Room for 1.5 times the mean, since real routing is uneven.
        few = [min(1, 1.5 * touched(n, experts) / n) for n in (ranks, nodes)]
        cells = [ranks]
        for tokens in (128, 4096):
            cells += [
                _number(block_bytes(ranks, tokens, *how) / GB)
                for how in ((0,), (2,), (2, *few))
            ]
        rows.append(cells)
    columns = ("default, GB", "`pending_calls=2`, GB", "2, bounded, GB")
    named = [f"T = {t}: {c}" for t in (128, 4096) for c in columns]
    return table(["R", *named], rows)


def parts(table):
    """Returns the generated parts of docs/scale_tables.md, by name."""
    return {
        "record": record(table),
        "long": sends(4096, table),
        "short": sends(128, table),
        "memory": memory(table),
    }
