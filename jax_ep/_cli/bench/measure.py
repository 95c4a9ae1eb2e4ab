"""Times dispatch and combine over transports and over JAX's ragged_all_to_all.

A time is the host's time for a whole program of many calls on all GPUs, divided by the
number of calls; nothing is subtracted. Results are compared bit for bit with those of
the collective transport, except ragged's sums, which have a tolerance.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_ep._cli.bench import cuda, record, report

TOKENS = (4096, 128, 1, 1024, 8192, 512, 32, 8)  # the most important first
QUICK_TOKENS = (4096, 128, 1, 1024)
FORMATS_TOKENS = (4096, 128, 1024, 8192)
TRANSPORTS = ("p2p", "collective", "ragged")
GRAPHS = "--xla_gpu_graph_min_graph_size=1"
# XLA's flags, and (updates of ragged.py, label) measured with them.
RAGGED = (
    (
        "",
        (
            ("rank", "default"),
            ("expert", "update an expert"),
            ("1/8 rank", "update 1/8 rank"),
            ("1/32 rank", "update 1/32 rank"),
        ),
    ),
    (
        "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true",
        (("rank", "decomposer"),),
    ),
    (
        "--xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false",
        (("rank", "no one-shot"), ("expert", "no one-shot, update an expert")),
    ),
    (
        "--xla_gpu_experimental_ragged_all_to_all_use_device_kernel=true"
        " --xla_gpu_ragged_all_to_all_mode=symmetric",
        (("rank", "device kernel"), ("expert", "device kernel, update an expert")),
    ),
)
Peak = tuple[float | None, dict[str, Any]]


@dataclasses.dataclass
class Plan:
    """What to time. A field that is None gets a default that depends on the others.

    Attributes:
        seed: seed of routing and tokens.
        quick: p2p alone, few T, uniform routing.
        tokens: values of T, in the order to measure them.
        ragged_tokens: values of T for ragged.
        routing: kinds of routing.
        transports: names from `TRANSPORTS`.
        num_sms: numbers of SMs for p2p, besides the default.
        formats: dispatch formats, measured one after the other on each case; combine
            is measured with the first of them.
        codes: formats whose dispatch is also measured with tokens that are quantised
            already.
        combine_format: with it combine is also measured with the second format.
        hidden, experts, top_k, dtype: sizes.
        repeats: how often each program is timed.
        milliseconds: how long a program takes.
        unrolled: calls in a loop body; 0 means the default.
        budget: seconds in all.
        devices: number of devices; None means all.
        here: whether workers run in this process.
    """

    seed: int
    quick: bool = False
    tokens: Sequence[int] | None = None
    ragged_tokens: Sequence[int] | None = None
    routing: Sequence[str] | None = None
    transports: Sequence[str] | None = None
    num_sms: Sequence[int] = ()
    formats: Sequence[str] = ("bf16",)
    codes: Sequence[str] = ()
    combine_format: str | None = None
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    dtype: str = "bfloat16"
    repeats: int = 7
    milliseconds: float = 100
    unrolled: int = 0
    budget: float = 300
    devices: int | None = None
    here: bool = False

    def __post_init__(self) -> None:
        """Fills in the defaults."""
        self.formats = list(dict.fromkeys(self.formats))
        tokens = FORMATS_TOKENS if self.several else TOKENS
        self.tokens = self.tokens or (QUICK_TOKENS if self.quick else tokens)
        self.ragged_tokens = self.ragged_tokens or self.tokens
        self.routing = self.routing or (
            ["uniform"] if self.few else ["uniform", "zipf"]
        )
        if self.transports is None:
            ours = TRANSPORTS if self.plain else TRANSPORTS[:2]
            self.transports = ["p2p"] if self.few else ours

    @property
    def several(self) -> bool:
        """Whether formats are compared with each other."""
        return len(self.formats) + len(self.codes) > 1

    @property
    def few(self) -> bool:
        """Whether only the most important cases are measured."""
        return self.quick or self.several

    @property
    def plain(self) -> bool:
        """Whether all rows are sent in bfloat16."""
        formats = [*self.formats, *self.codes]
        return formats == ["bf16"] and self.combine_format is None


def specification(args: Any, **changes: Any) -> dict[str, Any]:
    """Returns a worker's specification of bfloat16 calls, from a plan or arguments."""
    names = ("hidden", "experts", "top_k", "seed", "repeats", "milliseconds")
    return {
        **{name: getattr(args, name, None) for name in (*names, "unrolled")},
        "dtype": "bfloat16",
        "format": "bf16",
        "combine_format": None,
        "peak_gb_s": None,
        **changes,
    }


def _variants(plan: Plan) -> list[dict[str, Any]]:
    """Returns the entries of a specification for each handle of a case."""
    if not plan.several:
        (name,) = plan.formats
        return [{"format": name, "combine_format": plan.combine_format}]
    found: list[dict[str, Any]] = [
        {"format": name, "combine_format": None, "ops": ["dispatch"]}
        for name in plan.formats
    ]
    found[0]["ops"] = ["dispatch", "combine"]
    if plan.combine_format:
        found[1] |= {"combine_format": plan.combine_format, "ops": found[0]["ops"]}
    coded = {"combine_format": None, "ops": ["dispatch"], "coded": True}
    return found + [{"format": name, **coded} for name in plan.codes]


def ragged(after: float, here: bool) -> Iterator[tuple[str, str, float, Any]]:
    """Yields `workers` for JAX's own path, each with the ways that it measures.

    Args:
        after: the share of the time that is over when they begin.
        here: whether they run in this process, where flags have no effect. Then only
            the way without flags is measured.
    """
    ways = RAGGED[:1] if here else RAGGED
    for index, (flags, measured) in enumerate(ways, 1):
        name = f"ragged_all_to_all with {flags or 'the default flags'}"
        yield name, flags, after + (1 - after) * index / len(ways), measured


def workers(plan: Plan) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Yields, per worker: what it measures, XLA flags, share of time, specification."""
    assert plan.transports is not None
    assert plan.tokens is not None
    assert plan.routing is not None
    common = specification(
        plan,
        dtype=plan.dtype,
        variants=_variants(plan),
        defaults_at=0,
        ragged=(),
        routings=plan.routing,
        devices=plan.devices,
        here=plan.here,
    )
    ours = [name for name in plan.transports if name != "ragged"]
    if ours:
        changes = {
            "transports": ours,
            "tokens": plan.tokens,
            "num_sms": [None, *plan.num_sms],
            "defaults_at": 0 if plan.few else min(4096, max(plan.tokens)),
        }
        share = 0.65 if "ragged" in plan.transports else 1.0
        yield report.OURS, GRAPHS, share, common | changes
    if "ragged" in plan.transports:
        for name, flags, share, measured in ragged(0.65, plan.here):
            changes = {
                "tokens": plan.ragged_tokens,
                "routings": plan.routing[:1],
                "ragged": measured,
            }
            yield name, flags, share, common | changes


def measure(
    plan: Plan,
    command: str,
    root: pathlib.Path | None = None,
    find_peak: Callable[[], Peak] = cuda.peer_write_peak,
) -> dict[str, Any]:
    """Measures all of a plan.

    Args:
        plan: what to measure.
        command: the command that makes the same record again.
        root: the checkout to measure; None means the package's own.
        find_peak: a function that returns the GB/s that each GPU can write to the
            others, or None if there is nothing to measure, and its report.

    Returns:
        The record.
    """
    run = record.Run(
        "codes" if plan.codes else "formats" if plan.several else "p2p",
        command,
        plan.seed,
        plan.budget,
        root,
        hidden=plan.hidden,
        dtype=plan.dtype,
        formats=plan.formats,
        combine_format=plan.combine_format,
        codes=list(plan.codes),
        top_k=plan.top_k,
        experts=plan.experts,
        flags={},
    )
    found = run.record
    found["peak_gb_s"], peak = (None, {}) if plan.here else find_peak()
    if peak:  # else there are no GPUs
        found |= {"device": peak["device"], "count": int(peak["count"])}
        gb_s = found["peak_gb_s"]
        shown = f"{gb_s:.1f} GB/s per GPU" if gb_s else "not measured"
        print(f"peer write peak: {shown}; {run.seconds:.0f} s")
    for name, flags, share, spec in workers(plan):
        found["flags"][name] = flags
        spec["peak_gb_s"] = found["peak_gb_s"]
        if problem := run.work(name, flags, spec, share):
            found["problems"].append({"worker": name, "problem": problem})
    return found
