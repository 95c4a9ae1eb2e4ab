"""Measures transports, or JAX's ragged_all_to_all, in a process of its own for p2p.py.

    python -m jax_ep._cli.bench.worker SPECIFICATION OUTPUT

XLA reads its flags once, when a process starts to use it. The specification is JSON of
p2p.py. A line of JSON goes to OUTPUT for the devices and for each row once it is
measured, so that rows outlive a process that hangs.
"""

import gc
import time

from jax_ep._cli.bench import process, ragged_calls, report, transports
from jax_ep._cli.demo.progress import Progress


def _cases(spec):
    # Variants one after the other, so that what disturbs one disturbs all.
    variants = spec.get("variants", [{}])
    for tokens in spec["tokens"]:
        for routing in spec["routings"]:
            for variant in variants:
                yield tokens, routing, False, variant
    if spec["defaults_at"]:
        yield spec["defaults_at"], "uniform", True, variants[0]


def line_of_new():
    """report.line, but nothing for an error that was told before."""
    told = set()

    def line(row):
        error = report.variant(row), row.get("error")
        if row.get("error") and error in told:
            return ""
        told.add(error)
        return report.line(row)

    return line


def main(arguments=None):
    spec, output = process.given(arguments)
    mesh = process.ep_mesh(spec.get("devices"))
    cases = list(_cases(spec))
    title = "ragged_all_to_all, case" if spec["ragged"] else "jax_ep, case"
    with (
        Progress(title, len(cases)) as progress,
        process.reporting(output, line_of_new(), mesh, progress.say) as emit,
    ):
        for tokens, routing, defaults, variant in cases:
            if time.time() > spec["deadline"]:
                facts = {"tokens": tokens, "routing": routing, "zero_tail": defaults}
                facts["format"] = (spec | variant)["format"]
                name = "ragged" if spec["ragged"] else "jax_ep"
                emit({**facts, "transport": name, "error": "no time left"})
                continue
            module = p2p_ragged if spec["ragged"] else p2p_transports
            module.measure_case(spec | variant, mesh, emit, tokens, routing, defaults)
            progress.update(f"T {tokens}")
            gc.collect()


if __name__ == "__main__":
    main()
