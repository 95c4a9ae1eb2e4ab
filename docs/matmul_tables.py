"""Tables of records of expert matmuls without JAX, and of decode steps."""

import performance_tables

# (the products of grouped_kernels.py that make up a result, its name)
RESULTS = (
    (("gate_up", "down"), "forward"),
    (("gate_up to rows", "down back"), "gradient of rows"),
    (("gate_up to matrices", "down to matrices"), "gradient of matrices"),
    (("fp8 gate_up", "fp8 down"), "fp8 forward"),
    (("fp8 gate_up to rows", "fp8 down back"), "fp8 gradient of rows"),
)


def _must_be_right(data, kind):
    rows = [*data["results"], *data.get("checks", ())]
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        raise SystemExit(f"the newest {kind} file is unfit: {wrong}")


def _source(data):
    flags = data.get("xla_flags")
    command = f"XLA_FLAGS='{flags}' {data['command']}" if flags else data["command"]
    return performance_tables.source(data, command)


def kernels(data, table):
    """Shows the kernels beside batched cuBLAS matmuls; gate, up and down are summed."""
    _must_be_right(data, "matmuls")
    rows = {(row["case"], row["product"]): row for row in data["results"]}
    cells = []
    for case in dict.fromkeys(row["case"] for row in data["results"]):
        for products, name in RESULTS:
            found = [rows[case, p] for p in products if (case, p) in rows]
            if len(found) < len(products):
                continue
            us = sum(row["us"] for row in found)
            other = sum(row["cublas_us"] for row in found)
            rate = sum(row["tflops"] * row["us"] for row in found) / us
            numbers = (f"{us:.0f}", f"{rate:.0f}", f"{other:.0f}", f"{us / other:.2f}")
            cells.append((case, name, *numbers))
    head = (
        f"The kernels of `jax_ep.experts.hopper` and `fp8` ({_source(data)}), without "
        "JAX, on random normal operands with random group sizes. Times are in "
        "microseconds, for gate, up and down together. The forward pass includes "
        "SwiGLU and stores gate and up for a backward pass; in fp8 it also quantises "
        "the activation. The gradient of rows includes the derivative of SwiGLU. "
        "`cuBLAS` is one batched bfloat16 matmul with the same number of rows in every "
        "group and nothing else, timed in turns with the kernel; `of cuBLAS` is the "
        f"kernels' time over that. In the same run {len(data['checks'])} checks of "
        "other sizes agreed with float64."
        f"{_clocks(data.get('clocks'))}"
    )
    columns = ("size", "result", "us", "TFLOP/s", "cuBLAS us", "of cuBLAS")
    return f"{head}\n\n" + table(columns, cells)


def _clocks(seen):
    if not seen:
        return ""
    return (
        f" The GPU drew {seen['watts']:.0f} of {seen['most_watts']:.0f} W at "
        f"{seen['mhz']:.0f} of {seen['most_mhz']:.0f} MHz (medians over the run); its "
        f"power cap held the clock down {100 * seen['capped']:.0f}% of the time."
    )


def decode(data, table, with_layers):
    """Shows experts with few rows beside a plain read of their weights, and layers.

    `with_layers` is the record that has the layers; it may be `data`.
    """
    _must_be_right(data, "decode")
    sizes = data["sizes"]
    experts = [row for row in data["results"] if row["part"] == "experts"]
    cells = []
    for row in experts:
        if row["way"] == "read":
            continue
        ratio = f"{row['of_read']:.2f}" if "of_read" in row else ""
        numbers = f"{row['us']:.0f}", f"{row['gb_s']:.0f}", ratio
        cells.append((row["rows"], f"{row['hit']:g}", f"`{row['way']}`", *numbers))
    reads = {
        (row["rows"], row["format"]): row["us"]
        for row in experts
        if row["way"] == "read"
    }
    plain = "; ".join(
        f"{rows} rows, {name} {us:.0f}" for (rows, name), us in reads.items()
    )
    seen = {row["rows"]: row["clocks"] for row in experts if row.get("clocks")}
    power = "; ".join(
        f"{rows} rows, {of['watts']:.0f} of {of['most_watts']:.0f} W at "
        f"{of['mhz']:.0f} of {of['most_mhz']:.0f} MHz"
        for rows, of in seen.items()
    )
    together = f" and {data['steps']} steps per call" if "steps" in data else ""
    head = (
        f"{performance_tables.runs(data)}: one rank's experts, {sizes['groups']} of "
        f"hidden {sizes['hidden']} and inner {sizes['inner']}, with "
        f"{sizes['top_k']} experts per token{together}. `of read` is the time over "
        "that of a plain read of the weights of the experts that are hit. Such a read "
        f"took, in microseconds: {plain}."
    )
    if power:
        head += f" Meanwhile the GPU drew (medians over all ways): {power}."
    parts = [
        head,
        table(("rows", "experts hit", "weights", "us", "GB/s", "of read"), cells),
    ]
    _must_be_right(with_layers, "decode")
    layers = [
        (
            row["tokens"],
            f"`{row['way']}`",
            f"{row['us']:.0f}",
            f"{row['exchange_us']:.0f}",
        )
        for row in with_layers["results"]
        if row["part"] == "layer"
    ]
    if layers:
        source = "" if with_layers is data else f" ({_source(with_layers)})"
        parts += [
            f"Whole layers on {with_layers['count']} GPUs{source}, by tokens per rank. "
            "`exchange` is the same program with experts that return their rows "
            "unchanged:",
            table(("tokens", "weights", "us", "exchange us"), layers),
        ]
    return "\n\n".join(parts)


def few_rows(data, table):
    """Shows experts by the kernels for few rows and by those for any number."""
    different = [row for row in data["results"] if row["different"]]
    if different:
        raise SystemExit(f"the newest few-rows file is unfit: {different}")
    cells = [
        (
            row["weights"],
            row["rows"],
            f"{row['rows'] / data['groups']:g}",
            f"{row['any_us']:.0f}",
            f"{row['few_us']:.0f}",
            f"{row['ratio']:.3f}",
        )
        for row in data["results"]
    ]
    head = (
        f"{_source(data)}, without JAX: both products of {data['groups']} experts of "
        f"hidden {data['hidden']} and inner {data['inner']}, for tokens with "
        f"{data['top_k']} distinct experts each. `any` are the kernels for any number "
        "of rows, `few` those for few rows; both in microseconds, by turns. `of any` "
        "is the time of `few` over that of `any`. Their results were the same bit for "
        f"bit.{_clocks(data.get('clocks'))}"
    )
    columns = ("weights", "rows", "rows per expert", "any", "few", "of any")
    return f"{head}\n\n" + table(columns, cells)
