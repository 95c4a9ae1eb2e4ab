"""Functions from a record to the figures that prose quotes, for claims.py."""

import math
import pathlib
import re
import statistics

import matmul_tables
import scale_model

from benchmarks.layers import report as layer_report
from benchmarks.overlap import report as overlap_report
from jax_ep._cli.bench import report as call_report

CHOICE = (
    pathlib.Path(__file__).resolve().parents[1]
    / "xla_ffi/cuda/matmul/grouped_matmul.cc"
)


def span(values):
    values = list(values)
    return min(values), max(values)


def about(value, digits):
    """Rounds a figure as the text does, to tens (digits -1) or hundreds (-2)."""
    return round(value, digits)


def pick(rows, /, **wanted):
    """Returns the only row whose entries are `wanted`."""
    found = [r for r in rows if all(r.get(k) == v for k, v in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows with {wanted}")
    return found[0]


def quick(record):
    """Returns microseconds of dispatch and combine with 4096 tokens."""
    ops = ("dispatch", "combine")
    timed = [row for row in record["results"] if "us" in row]
    return [pick(timed, op=op, tokens=4096)["us"] for op in ops]


def times_as_long(*ways):
    """How many times as long as `hopper` other ways take: the least and the most.

    For rows and their gradients, with gate, up and down together."""

    def figures(record):
        us = {}
        for row in record["results"]:
            if row["matrix"] != "experts" and row["op"] != "to matrices":
                place = row["case"], row["op"]
                own = us.setdefault(place, {})
                own[row["way"]] = own.get(row["way"], 0) + row["us"]
        ratios = [
            own[way] / own["hopper"]
            for own in us.values()
            for way in ways
            if way in own
        ]
        return span(ratios)

    return figures


# Whole layers.

BIG, MID, BIG_64 = "large-256", "mid", "large-64"


def layers(record):
    """Returns the rows of the table, by case and pass."""
    return {(row["case"], row["pass"]): row for row in layer_report.summary(record)}


def of_bf16(each, **more):
    """The time of layers with fp8 experts over that in bfloat16, in both sizes."""

    def shares(record):
        main = layer_report.main_transport(record)
        for case in (BIG, MID):
            at = {"case": case, "pass": each} | more
            coded = {"layer": layer_report.fp8_experts(main)}
            plain = {"layer": main, "format": "bf16"}
            ms = [
                layer_report.best(record["results"], **way, **at)["ms"]
                for way in (coded, plain)
            ]
            yield ms[0] / ms[1]

    return shares


def beside_ragged(case):
    """Milliseconds of the layer over p2p and over the best ragged way, by pass."""
    return lambda record: [
        layers(record)[case, each][name]["ms"]
        for each in layer_report.PASSES
        for name in ("p2p", "ragged")
    ]


def over_ragged(each):
    """How many times as fast p2p's layer is, by size."""
    return lambda record: [
        layers(record)[case, each]["speed_ups"]["ragged"] for case in (MID, BIG_64, BIG)
    ]


def exchange_shares(each):
    """The least and most percent that p2p's exchange takes of layers of 4096 tokens."""
    return lambda record: span(
        100 * row["p2p"]["exchange_share"]
        for (case, found), row in layers(record).items()
        if found == each and case in (MID, BIG_64, BIG)
    )


def without_exchange(record):
    """The speed of p2p's layer without exchanges over that of the best ragged one."""
    row = layers(record)[BIG, "forward"]
    return [
        row["ragged"]["ms"] / (row["p2p"]["ms"] * (1 - row["p2p"]["exchange_share"]))
    ]


# Decode steps, training.


def of_read(way):
    """The time of experts with 1024 rows over that of a read of their weights."""
    return lambda record: [
        pick(record["results"], part="experts", rows=1024, way=way)["of_read"]
    ]


def below_bf16(record):
    return [-100 * record["gaps"]["fp8"]]


def above_bf16(record):
    return [100 * record["gaps"]["fp8"]]


def least_cosine(record):
    return [min(min(found.values()) for found in record["cosines"].values())]


def most_apart(record):
    """The largest difference within a pair of runs, in percent."""
    finals = zip(record["finals"]["fp8"], record["finals"]["bf16"], strict=True)
    return [max(100 * abs(fp8 / bf16 - 1) for fp8, bf16 in finals)]


def served(record):
    """How much higher the loss is with weights in each format, in percent."""
    plain = statistics.mean(record["finals"]["bf16"])
    found = (statistics.mean(losses) for losses in record["served"].values())
    above = [100 * (loss / plain - 1) for loss in found]
    return [math.ceil(100 * abs(above[0])) / 100, above[1]]


# Single calls.


def calls(record, routing="uniform"):
    """Returns p2p's rows by op and tokens."""
    rows = call_report.summary(record["results"])
    return {
        (r["op"], r["tokens"]): r for r in rows if r["routing"] == routing and r["p2p"]
    }


def us_of_call(*places):
    return lambda record: [calls(record)[place]["p2p"]["us"] for place in places]


def both_ops(tokens):
    return us_of_call(("dispatch", tokens), ("combine", tokens))


def of_peak(record):
    found = calls(record)
    ops = "dispatch", "combine"
    return [100 * found[op, 4096]["p2p"]["of_peak"] for op in ops]


def faster_than(name, tokens=4096):
    """How many times as long as over p2p both ops take over a ragged way."""
    return lambda record: [
        row["ragged"][name] / row["p2p"]["us"]
        for row in (calls(record)[op, tokens] for op in ("dispatch", "combine"))
    ]


def with_defaults(record):
    """Microseconds of a dispatch with worst-case capacity, and with one that fits."""
    rows = record["results"]
    worst = pick(rows, transport="p2p", op="dispatch", tokens=4096, zero_tail=True)
    return [worst["us"], *us_of_call(("dispatch", 4096))(record)]


def formats(record):
    """Returns rows by op, tokens and format."""
    rows = call_report.formats(record["results"])
    return {(r["op"], r["tokens"], r["format"]): r for r in rows}


FP8, NVFP4 = "fp8_block128", "nvfp4"
OTHERS = ("mxfp8", "mxfp4", NVFP4)


def ratio(op, tokens, *names):
    """The times in these formats over the time in bfloat16."""
    return lambda record: [
        formats(record)[op, tokens, name]["us_ratio"] for name in names
    ]


def ratios(tokens, *names):
    """The least and the most ratio of dispatches."""
    return lambda record: span(ratio("dispatch", tokens, *names)(record))


def format_us(op, tokens, *names):
    return lambda record: [formats(record)[op, tokens, name]["us"] for name in names]


def joined(*parts):
    return lambda record: [value for part in parts for value in part(record)]


def inverse(part):
    return lambda record: [1 / value for value in part(record)]


def recovered(op, *names):
    return lambda record: [
        formats(record)[op, 4096, name]["recovered"] for name in names
    ]


def more_tokens(name, op="dispatch"):
    """Microseconds per 1024 more tokens, what the link needs of them, and a fixed rest.

    Dispatches also carry tables, which `floor` does not count.
    """

    def found(record):
        few, many = (formats(record)[op, tokens, name] for tokens in (1024, 4096))
        codes = sum(scale_model.native.encoded_bytes(name, record["hidden"], 2))
        whole = scale_model.dispatch_bytes(name) if op == "dispatch" else codes
        link = (many["floor_us"] - few["floor_us"]) / 3 * whole / codes
        each = (many["us"] - few["us"]) / 3
        return [each, link, few["us"] - each]

    return found


def longer_than_link(*names):
    return lambda record: [
        us - link for us, link, _ in (more_tokens(name)(record) for name in names)
    ]


def besides(*names):
    return lambda record: [more_tokens(name)(record)[2] for name in names]


def option(op, name, tokens=4096):
    """The time of a call with an option over that of a plain call."""

    def over_plain(record):
        at = {"op": op, "tokens": tokens, "num_sms": None}
        plain, other = (
            pick(record["results"], option=each, **at)["us"] for each in ("plain", name)
        )
        return [other / plain]

    return over_plain


def small_options(record):
    """The least and the most that a residual and a shared expert add, in percent."""
    cases = ("combine", "residual"), ("dispatch", "shared"), ("combine", "shared")
    return span(100 * (option(*case)(record)[0] - 1) for case in cases)


def first_half(op, *sms):
    return lambda record: [
        pick(
            record["results"], option="first_half", op=op, tokens=4096, num_sms=number
        )["us"]
        for number in sms
    ]


def halves_of_one_token(record):
    rows = record["results"]
    ops = "dispatch", "combine"
    return [
        statistics.mean(
            pick(rows, option="halves", op=op, tokens=1)["us"] for op in ops
        )
    ]


def over_best_sms(call, tokens, sms):
    """The kernels' time with `sms` multiprocessors over that with the best number."""

    def found(record):
        rows = [
            r for r in record["results"] if r["call"] == call and r["tokens"] == tokens
        ]
        return pick(rows, sms=sms)["us"] / min(r["us"] for r in rows)

    return found


KERNELS = ("dispatch", "cached dispatch", "combine")


def long_calls(sms):
    return lambda record: span(
        over_best_sms(call, tokens, sms)(record)
        for call in KERNELS
        for tokens in (4096, 8192)
    )


def most_of_long_calls(record):
    """`over_best_sms` with 32 SMs: dispatch, cached dispatch, and two combines.

    The combines are of 4096 and 8192 tokens, the others of 4096.
    """
    shown = ((KERNELS[0], 4096), (KERNELS[1], 4096), (KERNELS[2], 4096))
    shown += ((KERNELS[2], 8192),)
    return [over_best_sms(call, tokens, 32)(record) for call, tokens in shown]


def one_process(record):
    """The most percent that processes' times differ from one process's, rounded up."""
    rows = [row for row in record["rows"] if row["way"] == "p2p"]
    return [math.ceil(max(100 * abs(row["to_one_process"] - 1) for row in rows))]


# Expert matmuls.


def of_cutlass(dtype, *cases):
    """The kernels' time of a forward pass over CUTLASS's, by their ratios to cuBLAS.

    Takes the records of both, `matmuls` and `cutlass`.
    """
    names = {"bf16": "forward", "fp8": "fp8 forward"}
    products = next(p for p, name in matmul_tables.RESULTS if name == names[dtype])

    def found(record, cutlass):
        for case in cases:
            rows = [pick(record["results"], case=case, product=p) for p in products]
            own = sum(r["us"] for r in rows) / sum(r["cublas_us"] for r in rows)
            ways = {}
            for row in cutlass["results"]:
                if (row["case"], row["op"]) == (case, "forward"):
                    ways[row["way"]] = ways.get(row["way"], 0) + row["us"]
            batched = ways.pop("batched")
            fp8 = dtype == "fp8"
            least = min(us for w, us in ways.items() if w.startswith("fp8 ") == fp8)
            yield own / (least / batched)

    return found


def less_than_cutlass(*cases):
    """How much less time than CUTLASS the kernels take: least and most, in percent."""
    return lambda *records: span(
        100 * (1 - value) for value in of_cutlass("bf16", *cases)(*records)
    )


def more_than_cutlass(*cases):
    return lambda *records: span(
        100 * (value - 1) for value in of_cutlass("fp8", *cases)(*records)
    )


def tensor_busy(case, whose, *products):
    """The percentage of cycles in which tensor cores multiply."""

    def found(record):
        for product in products:
            row = pick(record["results"], case=case, product=product, whose=whose)
            yield row["tensor_percent"]

    return found


AS_IT_IS = "as it is"


def us_tried(record):
    """Returns microseconds by case, product and variant, the means of its runs."""
    us = {}
    for run in record["runs"]:
        for row in run["results"]:
            place = row["case"], row["product"], run["variant"]
            us.setdefault(place, []).append(row["us"])
    return {place: statistics.mean(each) for place, each in us.items()}


def tried(variant, beside=AS_IT_IS):
    """The least and the most of a variant's times over those of `beside`."""

    def found(record):
        means = us_tried(record)
        return span(
            mean / means[(*place, beside)]
            for (*place, name), mean in means.items()
            if name == variant
        )

    return found


def decode_traces(record):
    """Microseconds on the GPU and in all, of a step of 1 token in bfloat16.

    The first two are without experts.
    """
    row = pick(record["results"], part="layer", way="bf16", tokens=1)
    for part, time in (("exchange", "exchange_us"), ("layer", "us")):
        yield row["traces"][part]["span_us"] / record["steps"]
        yield row[time]


def decode_us(*places):
    """Microseconds of experts, for each pair of rows and a way."""

    def found(record):
        for rows, way in places:
            yield pick(record["results"], part="experts", rows=rows, way=way)["us"]

    return found


def _alone_and_repeated(record, rows, way, name="mxfp4"):
    """Microseconds per step, in a profiled call and in repeated ones."""
    found = pick(record["results"], part="experts", rows=rows, way=way, format=name)
    trace = found["traces"]["read" if way == "read" else "experts"]
    return trace["span_us"] / record["steps"], found["us"]


def four_bits_by_time(record, longer):
    """Microseconds of 1024 rows with "mxfp4" weights, and in a longer run."""
    yield from _alone_and_repeated(record, 1024, "mxfp4")
    yield from decode_us((1024, "mxfp4"))(longer)


def sixteen_rows(record):
    """Microseconds of 16 rows with "mxfp4" weights, then of a read."""
    for way in ("mxfp4", "read"):
        yield from _alone_and_repeated(record, 16, way)


def most_longer(*ways):
    """The most percent that repeated calls take more than a profiled one."""

    def found(record):
        rows = record["results"]
        names = {row["way"]: row["format"] for row in rows if row["part"] == "experts"}
        times = [_alone_and_repeated(record, 1024, way, names[way]) for way in ways]
        yield max(100 * (repeated / alone - 1) for alone, repeated in times)

    return found


def least_issued(record):
    """Least percentage of cycles with an instruction, with 1024 rows and "mxfp4"."""
    rows = [row for row in record["results"] if row["case"] == "1024 rows"]
    yield min(row["issue_percent"] for row in rows)


def _few_rows_bound():
    """Rows per expert up to which the kernels for few rows are taken."""
    (bound,) = re.findall(r"kFewRows = (\d+);", CHOICE.read_text())
    return int(bound)


def most_few_rows(record):
    """The bound, which must be among what was measured."""
    bound = _few_rows_bound()
    assert {row["rows"] for row in record["results"]} >= {bound * record["groups"]}
    yield bound


def few_rows_gain(record):
    """Percent by which few_rows.cuh is faster in fp8 up to half the bound, then slower.

    In bfloat16 it must be as fast up to the bound.
    """
    most = _few_rows_bound() * record["groups"]
    rows = [row for row in record["results"] if row["rows"] <= most]
    assert all(abs(r["ratio"] - 1) < 0.01 for r in rows if r["weights"] == "bf16")
    fp8 = [row for row in rows if row["weights"] == "fp8"]
    gains = span(1 - row["ratio"] for row in fp8 if 2 * row["rows"] <= most)
    yield from (100 * gain for gain in gains)
    yield 100 * (max(row["ratio"] for row in fp8) - 1)


def layer_ms(*records):
    """Milliseconds of p2p's layer of 256 experts, without and with gradients."""
    found = (
        layer_report.best(each["results"], layer="p2p", **{"pass": name})["ms"]
        for each in records
        for name in layer_report.PASSES
    )
    return list(found)


def _forward_of(record, case, layer):
    """Returns the row of a layer's forward pass."""
    at = {"case": case, "layer": layer, "pass": "forward"}
    return layer_report.best(record["results"], **at)


def dense_forward(*records):
    return [_forward_of(each, "large-64", "dense")["ms"] for each in records]


def forward_memory(record):
    """MiB that p2p's forward pass needs besides operands and results."""
    at = {"case": "large-256", "layer": "p2p", "pass": "forward", "format": "bf16"}
    row = layer_report.best(record["results"], **at)
    return [row["temp_bytes"] / 2**20]


def whole_experts(case, *ways):
    return lambda record: [
        pick(record["results"], case=case, matrix="experts", op="forward", way=way)[
            "us"
        ]
        for way in ways
    ]


def most_of_cards(record, other, besides="mid"):
    """How much the times of forward passes of whole experts differ, in percent."""

    def times(found):
        return {
            (row["case"], row["way"]): row["us"]
            for row in found["results"]
            if (row["matrix"], row["op"]) == ("experts", "forward")
            and row["case"] != besides
        }

    ours, theirs = times(record), times(other)
    shared = ours.keys() & theirs.keys()
    return [max(100 * abs(ours[each] / theirs[each] - 1) for each in shared)]


def concurrent_calls(record):
    assert record["chained"]["outcome"] == "right"
    assert record["unchained"]["outcome"] == "no end"
    return [record["chained"]["calls"], record["unchained"]["limit_s"]]


def less_of_single_calls(profile, record):
    """How much less a profiled call takes than one of many, in percent."""
    means = us_tried(record)
    singles = {
        (row["case"], row["product"], AS_IT_IS): row["us"]
        for row in profile["results"]
        if row["whose"] == "jax_ep"
    }
    shared = means.keys() & singles.keys()
    return span(100 * (1 - singles[each] / means[each]) for each in shared)


def capped_clock(record):
    """The least and the most MHz, and the least watts, of the runs' medians."""
    clocks = [run["clocks"] for run in record["runs"]]
    mhz = span(each["mhz"] for each in clocks)
    return [*mhz, min(each["watts"] for each in clocks)]


# Exchanges beside other work.


def overlapped(op, beside, arrangement):
    """Returns the row that the table shows: the one with the least exposed."""
    return lambda record: min(
        (
            row
            for row in record["results"]
            if (row["op"], row["beside"], row["arrangement"])
            == (op, beside, arrangement)
            and row.get("exposed_us") is not None
        ),
        key=lambda row: row["exposed_us"],
    )


def whole_calls(record):
    """Microseconds of a dispatch and a combine alone, as the table has them."""
    ops = "dispatch", "combine"
    return [overlapped(op, "matmul", "whole")(record)["alone_us"] for op in ops]


def traced(op, beside, arrangement):
    """Like `overlapped`, among profiled rows, which have the default `num_sms`."""

    def found(record):
        rows = [row for row in record["results"] if row.get("trace")]
        return overlapped(op, beside, arrangement)(record | {"results": rows})

    return found


STREAM, COPY = "stream_halves", "copy_halves"


def exposed(op, beside, arrangement=STREAM):
    return lambda record: [overlapped(op, beside, arrangement)(record)["exposed_us"]]


def placing(op):
    """Microseconds of the second half in the timelines: a median over kinds of work."""
    kinds = "matmul", "elementwise", "attention"

    def found(record):
        traces = [traced(op, kind, STREAM)(record)["trace"] for kind in kinds]
        streams = [trace["streams"] for trace in traces]
        spans = [
            [s["exchange"] for s in each if "exchange" in s and s["gpu"] == of["gpu"]]
            for each in streams
            for of in each[:1]
        ]
        last = [max(each, key=lambda span: span["start_us"]) for each in spans]
        return [statistics.median(span["busy_us"] for span in last)]

    return found


def without_placing(op, beside):
    return lambda record: [exposed(op, beside)(record)[0] - placing(op)(record)[0]]


def matmul_beside_combine(record):
    """Microseconds of the matmul in the timelines, beside a half and a whole call."""
    for arrangement in (STREAM, "whole"):
        row = traced("combine", "matmul", arrangement)(record)
        first = row["trace"]["streams"][0]["gpu"]
        streams = [s for s in row["trace"]["streams"] if s["gpu"] == first]
        spans = [s["other"] for s in streams if "other" in s]
        yield max(span["busy_us"] for span in spans)


def over_parts(op):
    return lambda record: [overlapped(op, "matmul", COPY)(record)["over_parts_us"]]


def dense_ragged_dot(record):
    """Milliseconds of `ragged_dot` alone, and how far processes differ, in us."""
    rows = record["results"]
    us = [
        row["us"]
        for row in rows
        if row["beside"] == "ragged_dot" and row["arrangement"] is None
    ]
    return [us[0] / 1e3, about(max(us) - min(us), -2)]


def two_batches(record):
    """Milliseconds of two micro-batches' experts, and of their exchanges."""
    rows = record["results"]
    turns = pick(rows, beside="two_batches", overlap="sm", arrangement=None)["us"]
    exchanges = 2 * sum(whole_calls(record))
    return [(turns - exchanges) / 1e3, exchanges / 1e3]


def aim_beside_work(record):
    return [overlap_report.TARGET_US]


def graph_us(op, tokens):
    """Microseconds of a call captured in a CUDA graph, and of one that is not."""
    return lambda record: [
        pick(record["graphs"], op=op, tokens=tokens, graphs=graphs)["us"]
        for graphs in (True, False)
    ]


def graphs_over_none(record):
    rows = [row for row in record["graphs"] if "op" in row and row["graphs"]]
    pairs = (graph_us(row["op"], row["tokens"])(record) for row in rows)
    return span(inside / outside for inside, outside in pairs)


# Limits of GPUs.


def rate(kind, pattern, *blocks, each=False):
    """GB/s with each number of blocks; with `each`, per block and rounded to tens."""
    shape = {"row_bytes": 14336} if kind == "local" else {}

    def found(record):
        for count in blocks:
            row = pick(record[kind], pattern=pattern, blocks=count, **shape)
            yield about(row["gb_s"] / count, -1) if each else row["gb_s"]

    return found


def small_rows(record):
    """GB/s of placing rows of 2048 bytes with 2 in flight, and of 14336 with 15."""
    for row_bytes, stages in ((2048, 2), (14336, 15)):
        at = {"blocks": 24, "row_bytes": row_bytes, "stages": stages, "warps": 1}
        yield pick(record["local_shapes"], pattern="bulk_place", **at)["gb_s"]


def copies_apart(record):
    """How far the two copy kernels' rates differ at most, in percent, rounded up."""
    rows = record["peer_write"]
    rates = [
        (pick(rows, pattern="vector_copy", blocks=r["blocks"])["gb_s"], r["gb_s"])
        for r in rows
        if r["pattern"] == "bulk_copy"
    ]
    return [math.ceil(max(100 * abs(a / b - 1) for a, b in rates))]


def eight_blocks(record):
    few, all_of_them = rate("peer_write", "bulk_store", 8, 132)(record)
    return [100 * few / all_of_them]


def send_and_place(*pairs):
    return lambda record: [
        pick(record["send_and_place"]["splits"], senders=s, placers=p)["us"]
        for s, p in pairs
    ]


def one_way(key):
    return lambda record: [statistics.median(row[key] for row in record["one_way"])]


def publish(variant, *keys):
    return lambda record: [
        pick(record["publish"], variant=variant, bytes_a_peer=14336)[key]
        for key in ("us", *keys)
    ]


def litmus(name=None):
    """Messages of the litmus test, and reads with wrong data."""
    return lambda record: [
        (record["litmus_mutants"][name] if name else record["litmus"])[key]
        for key in ("messages", "bad_reads")
    ]


def at(*keys):
    """The entry of a record under these keys."""

    def found(record):
        for key in keys:
            record = record[key]
        return [record]

    return found


def cells_of_one_row(record):
    return [pick(record["cells"], rows_a_peer=1, blocks_a_row=4)["us"]]


def more_of_combine(record):
    """Microseconds that 1024 more fp8 tokens cost a combine beyond the link's time."""
    us, link, _ = more_tokens(FP8, "combine")(record)
    return [us - link]


def cells_faster(record):
    """Microseconds that cells save over a published and loaded row, rounded up."""
    (loaded,) = publish("lane_a_peer_and_load")(record)
    return [math.ceil(loaded - cells_of_one_row(record)[0])]


def rate_of_sums(record):
    """GB/s of a combine's first half on two GPUs: rows read and sums written."""
    (us,) = first_half("combine", 24)(record)
    sums = scale_model.touched(2, record["experts"])
    moved = 4096 * (record["top_k"] + sums) * scale_model.ROW
    return [about(moved / us / 1e3, -2)]
