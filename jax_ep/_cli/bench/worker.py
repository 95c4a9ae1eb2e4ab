"""Measures transports, or JAX's ragged_all_to_all, in a process of its own.

    python -m jax_ep._cli.bench.worker SPECIFICATION OUTPUT

The specification is JSON that measure.py makes. OUTPUT gets a line of JSON for the
devices, and one for each row as soon as it is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_ep._cli.bench import process, ragged_calls, report, transports
from jax_ep._cli.demo.progress import Progress


def _cases(spec: dict[str, Any]) -> Iterator[tuple[int, str, bool, dict[str, Any]]]:
    # Measures variants one after the other, so that what disturbs one disturbs all.
    variants = spec.get("variants", [{}])
    for tokens in spec["tokens"]:
        for routing in spec["routings"]:
            for variant in variants:
                yield tokens, routing, False, variant
    if spec["defaults_at"]:
        yield spec["defaults_at"], "uniform", True, variants[0]


def line_of_new() -> Callable[[dict[str, Any]], str]:
    """Returns a function like `report.line`, but "" for an error shown before."""
    told = set()

    def line(row: dict[str, Any]) -> str:
        error = report.variant(row), row.get("error")
        if row.get("error") and error in told:
            return ""
        told.add(error)
        return report.line(row)

    return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every case of a specification."""
    spec, output = process.given(arguments)
    mesh = process.ep_mesh(spec["devices"])
    cases = list(_cases(spec))
    module = ragged_calls if spec["ragged"] else transports
    title = "ragged_all_to_all, case" if spec["ragged"] else "jax_ep, case"
    with (
        Progress(title, len(cases)) as progress,
        process.reporting(output, line_of_new(), mesh, progress.say) as emit,
    ):
        for tokens, routing, defaults, variant in cases:
            if process.late(spec):
                facts = {"tokens": tokens, "routing": routing, "zero_tail": defaults}
                facts["format"] = (spec | variant)["format"]
                name = "ragged" if spec["ragged"] else "jax_ep"
                emit({**facts, "transport": name, "error": process.NO_TIME})
                continue
            module.measure_case(spec | variant, mesh, emit, tokens, routing, defaults)
            progress.update(f"T {tokens}")
            gc.collect()


if __name__ == "__main__":
    main()
