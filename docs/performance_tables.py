"""Tables of records of benchmarks, for README.md and docs."""

import pathlib

from benchmarks.calls import options_report
from benchmarks.overlap import report as overlap_report
from jax_ep._cli.bench import report

ROOT = pathlib.Path(__file__).resolve().parent.parent

# (op, format, T, limit, aim): microseconds of a whole call on 4 H200s, hidden 7168,
# bfloat16 tokens, top-8 of 256, uniform routing.
TARGETS = (
    ("dispatch", "bf16", 1, 12, 8),
    ("dispatch", "bf16", 128, 28, 20),
    ("dispatch", "bf16", 4096, 560, 495),
    ("dispatch", "bf16", 8192, 1100, 990),
    ("dispatch", "fp8_block128", 128, 22, 14),
    ("dispatch", "fp8_block128", 4096, 330, 267),
    ("combine", "bf16", 1, 12, 8),
    ("combine", "bf16", 128, 30, 20),
    ("combine", "bf16", 4096, 560, 495),
    ("combine", "bf16", 8192, 1080, 990),
)


LIBRARIES = {
    "jax": "jax",
    "cudnn": "cuDNN",
    "cublas": "cuBLAS",
    "nccl": "NCCL",
    "driver": "driver",
}


def source(data, command):
    return (
        f"{data['count']} x {data['device']}, {versions(data)}{data['date']}, commit "
        f"{data['commit'][:12]}; {shown(command)}"
    )


def versions(data):
    """Names the versions that a record has, each with a comma after it."""
    driver = data.get("driver", "unknown")
    found = {"jax": data.get("jax")}
    found |= {"driver": driver} if driver != "unknown" else {}
    found |= data.get("libraries", {})
    if "cublas" in data:  # the one that the program has loaded
        found["cublas"] = _of_cublas(data["cublas"])
    shown = (
        f"{name} {found[key]}" for key, name in LIBRARIES.items() if found.get(key)
    )
    return "".join(f"{each}, " for each in shown)


def _of_cublas(number):
    """Formats what cublasGetVersion returns."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def shown(command):
    """Shows a record's command, and what its program is called now if it has moved."""
    program = pathlib.Path(command.partition(" ")[0])
    if program.suffix != ".py" or (ROOT / program).exists():
        return f"`{command}`"
    (found,) = (ROOT / "benchmarks").glob(f"*/{program.name}")
    module = ".".join(found.relative_to(ROOT).with_suffix("").parts)
    return f"`{command}`, which is now `python -m {module}`"


def targets(plain, formats, table):
    """Shows aims beside what was measured.

    `plain` is the newest record of bfloat16, `formats` that of formats; None if there
    is none.
    """
    found, sources = {}, []
    for data, wanted in ((plain, "bf16"), (formats, "fp8_block128")):
        if data is None:
            continue
        _must_be_fit(data)
        found |= {
            (row["op"], row["format"], row["tokens"]): row
            for row in report.summary(data["results"])
            if row["routing"] == "uniform" and row["p2p"] and row["format"] == wanted
        }
        sources.append(f"`{wanted}`: {source(data, data['command'])}.")
    rows = []
    for op, name, tokens, limit, aim in TARGETS:
        row = found.get((op, name, tokens))
        if row is None:
            rows.append((op, f"`{name}`", tokens, "", limit, aim, "", "not recorded"))
            continue
        us = row["p2p"]["us"]
        verdict = "reached" if us <= aim else "met" if us <= limit else "missed"
        floor = report.number(row["floor_us"], 1)
        rows.append((op, f"`{name}`", tokens, floor, limit, aim, f"{us:.1f}", verdict))
    columns = ("", "format", "T per rank", "floor us", "target us", "aim us")
    columns += ("measured us", "")
    return "\n\n".join([*sources, table(columns, rows)])


def _must_be_fit(data):
    failures = report.failures(data)
    if failures:
        raise SystemExit(f"the newest {data['kind']} file is unfit: {failures}")


def formats(data, table):
    """Shows how much faster calls are with fewer bytes."""
    _must_be_fit(data)
    rows = []
    for row in report.formats(data["results"]):
        recovered, verdict = row["recovered"], ""
        judged = data["count"] == 4 and row["tokens"] == 4096
        if judged and recovered and row["format"] != "bf16":
            missed = recovered < report.RECOVERED_AIM
            verdict = "missed" if missed else "reached"
        rows.append(
            (
                row["op"],
                row["tokens"],
                f"`{row['format']}`",
                report.number(row["floor_us"], 1),
                report.number(row["us"], 1),
                report.number(row["bytes_ratio"], 3),
                report.number(row["us_ratio"], 3),
                report.number(recovered, 2),
                verdict,
            )
        )
    columns = ("", "T per rank", "format", "floor us", "measured us")
    columns += ("bytes of bf16's", "time of bf16's", "recovered", "")
    peak = report.number(data["peak_gb_s"], 0)
    head = (
        f"{source(data, data['command'])}, seed {data['seed']}; peak {peak} GB/s. "
        "On 4 GPUs, at T = 4096, the aim is a `recovered` of at least "
        f"{report.RECOVERED_AIM}; with fewer GPUs the links limit calls less."
    )
    return f"{head}\n\n" + table(columns, rows)


def host(data, table):
    """Shows how long a call keeps the host busy."""
    _must_be_fit(data)
    rows = [
        (
            row["op"],
            row["tokens"],
            f"{row['this_us']:.1f}",
            f"{row['this_us_least']:.1f}",
        )
        for row in data["results"]
    ]
    head = (
        f"{source(data, data['command'])}: {data['count']} GPUs, hidden "
        f"{data['hidden']}, without CUDA graphs, over {data['transports'][0]}. Medians "
        "and the least of all runs, per call."
    )
    return f"{head}\n\n" + table(("", "T per rank", "us", "least us"), rows)


def nodes(data, table):
    """Shows what several processes and forced nodes cost against one process's p2p."""
    rows = [
        (
            row["op"],
            row["tokens"],
            row["way"],
            f"{row['us']:.1f}",
            f"{row['us_least']:.1f} to {row['us_most']:.1f}",
            report.number(row["to_one_process"], 3),
            "no" if row["differences"] else "yes",
        )
        for row in sorted(data["rows"], key=lambda row: (row["op"], row["tokens"]))
    ]
    columns = ("", "T per rank", "", "us", "least to most", "of one process")
    head = f"{source(data, data['command'])}; seed {data['seed']}.\n\n"
    return head + table((*columns, "bits of collective"), rows)


def sms(data, table):
    """Shows microseconds of the kernels alone, by the number of multiprocessors."""
    counts = sorted({row["sms"] for row in data["results"]})
    times = {
        (row["call"], row["tokens"], row["sms"]): row["us"] for row in data["results"]
    }
    kinds = dict.fromkeys((row["call"], row["tokens"]) for row in data["results"])
    rows = []
    for call, tokens in sorted(kinds):
        cells = [times.get((call, tokens, count)) for count in counts]
        least = min(us for us in cells if us is not None)
        shown = ["" if us is None else f"{us:.1f} ({us / least:.2f})" for us in cells]
        rows.append((call, tokens, *shown))
    columns = ["", "T per rank", *("default" if c == 0 else f"{c} SMs" for c in counts)]
    return f"{source(data, data['command'])}.\n\n" + table(columns, rows)


def calls_by_sms(data, table):
    """Shows microseconds of whole calls, by `num_sms`."""
    found, counts = {}, {}
    for row in data["results"]:
        if row["wrong"]:
            raise SystemExit(f"the newest sms file is unfit: {row}")
        if not row["zero_tail"]:
            counts[row["num_sms"]] = None
            place = row["op"], row["tokens"]
            found.setdefault(place, {})[row["num_sms"]] = row["us"]
    rows = [
        (*place, *(f"{us[c]:.1f} ({us[c] / us[None]:.2f})" for c in counts))
        for place, us in sorted(found.items())
    ]
    names = ("default" if count is None else f"{count} SMs" for count in counts)
    return f"{source(data, data['command'])}.\n\n" + table(
        ("", "T per rank", *names), rows
    )


def runs(data):
    """Like `source`, for each of the runs that a record was made of."""
    each = data.get("runs", [data])
    return "; ".join(dict.fromkeys(source({**data, **r}, r["command"]) for r in each))


def overlap(data, table):
    """Shows what stays exposed beside other work."""
    failures = overlap_report.failures(data)
    if failures:
        raise SystemExit(f"the newest overlap file is unfit: {failures}")
    head = (
        f"{runs(data)}: {data['tokens']} tokens "
        f"per rank, hidden {data['hidden']}, top-{data['top_k']} of {data['experts']}, "
        "bfloat16. Times are in microseconds."
    )
    shown = [head, table(overlap_report.header(), list(overlap_report.cells(data)))]
    parts = list(overlap_report.parts(data))
    if parts:
        shown += [
            'The steps of a call with `overlap="copy"`, each timed alone. Packing and '
            "placing always stay exposed. `over pack+place` is what else is exposed; "
            f"the aim is at most {overlap_report.TARGET_US} us, provided that the work "
            "takes longer than the copies:",
            table(overlap_report.PARTS_HEADER, parts),
        ]
    batches = list(overlap_report.batches(data))
    if batches:
        shown += [
            "Two micro-batches go through dispatch, experts and combine: one after the "
            "other (`in turn ms`), and with each one's exchange under the other's "
            "experts (`ms`):",
            table(overlap_report.BATCHES_HEADER, batches),
        ]
    return "\n\n".join(shown)


def graphs(data, table):
    """Shows short calls with CUDA graphs and without."""
    rows = list(overlap_report.graphs(data))
    if not rows:
        return "No run is recorded yet."
    head = f"{runs(data)}. Times are per call, in programs of many calls."
    return f"{head}\n\n" + table(overlap_report.GRAPHS_HEADER, rows)


def _options(data):
    failures = options_report.failures(data)
    if failures:
        raise SystemExit(f"the newest options file is unfit: {failures}")
    return source(data, data["command"])


def options(data, table):
    """Shows what each option costs against plain calls."""
    head = (
        f"{_options(data)}: microseconds of a call of T tokens per rank, hidden "
        f"{data['hidden']}, top-{data['top_k']} of {data['experts']}, bfloat16. In "
        "brackets is the time over that of the plain call. An option without a row for "
        "dispatch does not change dispatch."
    )
    rows = list(options_report.cells(data))
    return f"{head}\n\n" + table(options_report.header(data), rows)


def halves(data, table):
    """Shows first halves alone, by the number of multiprocessors."""
    head = (
        f"{_options(data)}: times in microseconds, and in brackets over that of the "
        "default."
    )
    rows = list(options_report.halves(data))
    return f"{head}\n\n" + table(options_report.halves_header(data), rows)


def _speed_up(row):
    p2p, ragged = row["p2p"], row["ragged_best_us"]
    return report.number(ragged / p2p["us"] if p2p and ragged else None, 1)


def p2p_row(row, ways=()):
    """Formats a row; `ways` are those of `ragged_all_to_all` that have columns."""
    p2p = row["p2p"] or {}
    share = p2p.get("of_peak")
    return (
        row["tokens"],
        row["op"],
        report.number(row["floor_us"], 1),
        report.number(p2p.get("us"), 1),
        report.number(p2p.get("gb_s"), 0),
        report.number(100 * share if share else None, 0),
        report.number(row["collective_us"], 0),
        *(report.number(row["ragged"].get(way), 0) for way in ways),
        *([_speed_up(row)] if ways else []),
    )
