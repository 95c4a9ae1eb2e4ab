"""A model on paper of many ranks, for docs/scale.md: bytes, messages, memory, time.

Routing is uniform: each token takes `TOP_K` distinct experts at random. All numbers
come from the rates below and from the sizes that the native module gives.
"""

import dataclasses
from math import comb

from jax_ep import _native_cpu as native

HIDDEN, TOP_K, LOCAL_EXPERTS = 7168, 8, 8
RANKS_PER_NODE = 8
RANKS = (16, 32, 64, 128, 256, 512, 1024)
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Rate:
    """A number that the model takes for given."""

    value: float
    unit: str
    what: str
    source: str


NVLINK = Rate(
    350,
    "GB/s",
    "written by a GPU to the others of its node, all at once",
    "measured on 4 H200s: [gpu_limits.md](gpu_limits.md)",
)
NETWORK = Rate(
    45,
    "GB/s",
    "written by a GPU to other nodes, all at once, each GPU with a port of its own",
    "assumed: 90% of a 400 Gb/s port; not measured",
)
COPY = Rate(
    3000,
    "GB/s",
    "read and written by copies inside a GPU",
    "measured on an H200: [gpu_limits.md](gpu_limits.md), rounded down",
)
MESSAGE = Rate(
    0.1,
    "us",
    "a put with its signal, one after another from a GPU",
    "assumed: 10 million a second; not measured",
)
NEAR = Rate(
    9,
    "us",
    "start to end of a call of one token's payload, inside a node",
    "measured on 4 H200s: kernels alone in [performance.md](performance.md)",
)
FAR = Rate(
    17,
    "us",
    "the same between nodes; hierarchical sends pay `NEAR` on top",
    "assumed; not measured",
)
RATES = {
    "NVLINK": NVLINK,
    "NETWORK": NETWORK,
    "COPY": COPY,
    "MESSAGE": MESSAGE,
    "NEAR": NEAR,
    "FAR": FAR,
}


def touched(parts, experts, top_k=TOP_K):
    """How many of `parts` equal parts of the experts a token has experts in, mean."""
    share = experts // parts
    return parts * (1 - comb(experts - share, top_k) / comb(experts, top_k))


@dataclasses.dataclass(frozen=True)
class Load:
    """What one rank sends in one call, and how long a call takes."""

    near_bytes: float  # over NVLink, to ranks of its node
    far_bytes: float  # over its port of the network
    near_messages: float
    far_messages: float
    us: float


def _load(near_bytes, far_bytes, near_messages, far_messages, copied, steps):
    # bytes / (GB/s) is nanoseconds; the two links work at the same time.
    wire = max(near_bytes / NVLINK.value, far_bytes / NETWORK.value) / 1e3
    us = wire + copied / COPY.value / 1e3 + far_messages * MESSAGE.value + steps
    return Load(near_bytes, far_bytes, near_messages, far_messages, us)


def direct(ranks, tokens, message_bytes):
    """One message per (token, rank); the far ones are staged and put together."""
    experts, near = ranks * LOCAL_EXPERTS, RANKS_PER_NODE - 1
    per_rank = tokens * touched(ranks, experts) / ranks * message_bytes
    far = ranks - RANKS_PER_NODE
    far_bytes = far * per_rank
    # Staged once: written and read.
    return _load(near * per_rank, far_bytes, near, far, 2 * far_bytes, FAR.value)


def hierarchical(ranks, tokens, message_bytes):
    """One per (token, node), to the rank there with the sender's place in the node.

    That rank forwards what comes from all nodes to the ranks of its own.
    """
    experts, nodes = ranks * LOCAL_EXPERTS, ranks // RANKS_PER_NODE
    per_rank = tokens * touched(ranks, experts) / ranks * message_bytes
    per_node = tokens * touched(nodes, experts) / nodes * message_bytes
    near = RANKS_PER_NODE - 1
    far_bytes = (nodes - 1) * per_node
    # Its own and, of each other node, those of the rank with its place there.
    near_bytes = nodes * near * per_rank
    steps = FAR.value + NEAR.value
    messages = nodes * near
    return _load(near_bytes, far_bytes, messages, nodes - 1, 2 * far_bytes, steps)


def dispatch_bytes(name):
    """Of a message of a first dispatch."""
    payload, scales = native.encoded_bytes(name, HIDDEN, 2)
    one, two = (
        native.dispatch_region_bytes(name, HIDDEN, 2, n, TOP_K, LOCAL_EXPERTS)
        for n in (1, 2)
    )
    assert two - one >= payload + scales
    return two - one


def combine_bytes():
    """Of a reduced row on its way back."""
    one, two = (native.combine_region_bytes("bf16", HIDDEN, 2, n, 0) for n in (1, 2))
    return two - one


def window_bytes(ranks, tokens, regions):
    """Of the regions of a window: one a source and call in flight, of all its tokens.

    With as much again, for those of other nodes, where their messages are staged.
    """
    each = tokens * (dispatch_bytes("bf16") + combine_bytes())
    return regions * each * (ranks + ranks - RANKS_PER_NODE)


def _number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def rates(table):
    """What the model takes for given."""
    rows = [
        (f"`{name}`", f"{rate.value:g} {rate.unit}", rate.what, rate.source)
        for name, rate in RATES.items()
    ]
    return table(("rate", "value", "of what", "from"), rows)


def sends(tokens, table):
    """Both ways to send a dispatch, and a combine, of so many tokens a rank."""
    cases = (
        ("dispatch `bf16`", dispatch_bytes("bf16"), True),
        ("dispatch `fp8_block128`", dispatch_bytes("fp8_block128"), True),
        ("combine", combine_bytes(), False),
    )
    rows = []
    for what, size, may_forward in cases:
        for ranks in RANKS:
            plain = direct(ranks, tokens, size)
            forwarded = hierarchical(ranks, tokens, size) if may_forward else None
            cells = [what, ranks]
            for load in (plain, forwarded):
                if load is None:
                    cells += [""] * 4
                    continue
                cells += [
                    _number(load.far_bytes / 1e6),
                    _number(load.near_bytes / 1e6),
                    f"{load.far_messages:.0f}",
                    f"{load.us:.0f}",
                ]
            cells.append(f"{plain.us / forwarded.us:.2f}" if forwarded else "")
            rows.append(cells)
    columns = ["", "R", "far MB", "near MB", "puts", "us"]
    columns += ["hier. far MB", "near MB", "puts", "us", "direct / hier."]
    return table(columns, rows)


def memory(table):
    """Of a window, as it is now and with regions for as many as come on average."""
    rows = []
    for ranks in RANKS:
        share = touched(ranks, ranks * LOCAL_EXPERTS) / ranks
        cells = [ranks]
        for tokens, regions in ((128, 2), (4096, 1)):
            full = window_bytes(ranks, tokens, regions) / GB
            # Half as much again as the mean, for routings that are not even.
            cells += [_number(full), _number(min(full, 1.5 * share * full))]
        rows.append(cells)
    return table(
        ("R", "T = 128: GB", "bounded, GB", "T = 4096: GB", "bounded, GB"), rows
    )


def parts(table):
    """The generated parts of docs/scale.md, by name."""
    return {
        "rates": rates(table),
        "long": sends(4096, table),
        "short": sends(128, table),
        "memory": memory(table),
    }
