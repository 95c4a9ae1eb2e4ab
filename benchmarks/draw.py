"""Draws a file of p2p.py: microseconds and GB/s against T, with the wire's floor.

    python benchmarks/draw.py benchmarks/results/p2p-<gpu>x<n>-<date>.json [PICTURE]

Needs matplotlib. The picture says in its metadata which file it shows.
"""

import argparse
import hashlib
import importlib.util
import json
import pathlib

import p2p_report

_INK, _GRID = "#333333", "#dddddd"
_FLOOR = "#888888"
# key of a summary's row, label, colour, marker
_SERIES = (
    ("ragged_default_us", "ragged_all_to_all", "#b0472f", "v"),
    ("ragged_best_us", "ragged_all_to_all, its best", "#e08a2e", "^"),
    ("collective_us", "jax_ep collective", "#2e8b57", "s"),
    ("p2p_us", "jax_ep p2p", "#2a6fb0", "o"),
)
_ROUTINGS = {"uniform": "-", "zipf": ":"}


def available():
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def mark(record):
    """What a picture of `record` says of itself: a digest of the record."""
    text = json.dumps(record, sort_keys=True)
    return f"jax_ep p2p {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _points(rows, key):
    points = []
    for row in sorted(rows, key=lambda row: row["tokens"]):
        p2p = row["p2p"]
        us = (p2p and p2p["us"]) if key == "p2p_us" else row[key]
        if us:
            points.append((row["tokens"], us, row["bytes"] / us / 1e3))
    return points


def _draw_column(axes, rows, peak):
    """Times above, speeds below, of one operation."""
    times, speeds = axes
    for routing, style in _ROUTINGS.items():
        drawn = [row for row in rows if row["routing"] == routing]
        plain = routing == "uniform"
        for key, label, colour, marker in _SERIES:
            points = _points(drawn, key)
            if not points or not (plain or key == "p2p_us"):
                continue
            tokens, us, gb_s = zip(*points, strict=True)
            look = {"color": colour, "marker": marker, "ms": 5, "ls": style, "lw": 1.8}
            name = label if plain else f"{label}, skewed (Zipf) routing"
            times.plot(tokens, us, label=name, **look)
            speeds.plot(tokens, gb_s, **look)
        floor = _points(drawn, "floor_us") if plain else []
        if floor:
            tokens, us, _ = zip(*floor, strict=True)
            times.plot(tokens, us, color=_FLOOR, ls="--", lw=1.5, label="wire floor")
    if peak:
        speeds.axhline(peak, color=_FLOOR, ls="--", lw=1.5)
        speeds.text(
            0.01,
            peak * 0.985,
            f"peer write peak {peak:.0f}",
            transform=speeds.get_yaxis_transform(),
            color=_INK,
            fontsize=9,
            va="top",
        )


def _short(tokens):
    whole = tokens >= 1024 and tokens % 1024 == 0
    return f"{tokens // 1024}k" if whole else str(tokens)


def _dress(axis, rows, unit):
    tokens = sorted({row["tokens"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [_short(each) for each in tokens])
    axis.minorticks_off()
    axis.set_xlabel("tokens a rank")
    axis.set_ylabel(unit)
    axis.grid(color=_GRID, lw=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def figure(record):
    """The picture of a record as a matplotlib figure."""
    # Without pyplot: nothing global is touched and no display is looked for.
    from matplotlib.figure import Figure

    rows = p2p_report.summary(record["results"])
    result = Figure(figsize=(11, 8), layout="constrained", facecolor="white")
    result.suptitle(
        f"Expert-parallel dispatch and combine, {record['count']} x "
        f"{record['device']}: hidden {record['hidden']}, {record['dtype']}, "
        f"top-{record['top_k']} of {record['experts']}",
        fontsize=13,
        color=_INK,
    )
    grid = result.subplots(2, 2, sharey="row", height_ratios=(1.3, 1))
    for column, op in enumerate(("dispatch", "combine")):
        drawn = [row for row in rows if row["op"] == op]
        times, speeds = grid[:, column]
        _draw_column((times, speeds), drawn, record["peak_gb_s"])
        times.set_yscale("log")
        times.yaxis.set_major_formatter("{x:,.0f}")
        times.set_title(op, color=_INK)
        _dress(times, drawn, "microseconds a call")
        _dress(speeds, drawn, "GB/s a GPU, sent or received")
        times.set_ylim(bottom=1)
        speeds.set_ylim(bottom=0)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    result.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=10
    )
    return result


def save(record, path):
    """Draws `record` to `path`; the same record gives the same bytes of SVG."""
    import matplotlib

    facts = {"Description": mark(record)}
    if path.suffix == ".svg":
        facts["Date"] = None
    with matplotlib.rc_context({"svg.hashsalt": "jax_ep"}):
        figure(record).savefig(path, dpi=150, metadata=facts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path, nargs="?")
    args = parser.parse_args()
    picture = args.picture or args.json.with_suffix(".svg")
    save(json.loads(args.json.read_text()), picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
