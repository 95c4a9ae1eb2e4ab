"""Measures how an exchange hides for overlap.py, in a process of its own.

    python -m benchmarks.overlap.worker SPECIFICATION OUTPUT

It writes a line of JSON to OUTPUT for the devices, and one for each row as soon as it
is measured.
"""

import dataclasses
import functools
import gc

import jax
import numpy as np

from benchmarks.overlap import batches as overlap_batches
from benchmarks.overlap import cases, report
from benchmarks.overlap import parts as overlap_parts
from jax_ep._cli.bench import checks, loops, process, transports
from jax_ep._cli.bench.loops import compile_all, raised

# Calls in a program's loop body; in the longest programs a matmul takes a millisecond.
_UNROLLED = 4
_EXPECTED_US = 1500


class Worker:
    """Measures one specification."""

    def __init__(self, spec, mesh, emit):
        self.spec, self.mesh, self.emit = spec, mesh, emit
        self.case = transports.make_case(
            mesh, spec, spec["tokens"], "uniform", defaults=False
        )
        config = dataclasses.replace(
            self.case.config, overlap=spec["overlap"], pending_calls=1
        )
        self.case.config = config
        self.other = transports.reference(self.case)
        self.transports = {}
        self.alone_us, self.beside_us, self.parts_us = {}, {}, {}
        self.once_us = 0

    def row(self, **entries):
        facts = {name: self.case.facts[name] for name in ("tokens", "recv_capacity")}
        facts |= {name: self.spec[name] for name in ("flags", "overlap")}
        self.emit({**facts, **entries})

    def late(self):
        return process.late(self.spec)

    def open(self, num_sms):
        """Opens a handle and checks its results against the collective transport's."""
        transport = transports.Transport(self.case, self.spec["transport"], num_sms)
        transport.call_all()
        found = transport.differences(self.other)
        if found:
            raise RuntimeError(f"results differ from the reference's: {found}")
        self.transports[num_sms] = transport

    def sizes(self):
        """Returns how many calls a loop's body has, and the number of iterations."""
        return loops.sizes(self.spec, _UNROLLED, max(_EXPECTED_US, self.once_us))

    def compiling(self, transport, op, arrangement, beside):
        """Returns functions that compile what is timed and what is compared."""
        made = cases.operation(transport, op, arrangement, beside)
        sizes = self.sizes()
        # Tied by data: on two streams the order of launches is not enough.
        timed = loops.compiling(self.mesh, made, *sizes, tie="data")
        found = {"timed": timed}
        # With other num_sms only the timed calls' checksum is compared.
        if arrangement and beside and transport.num_sms is None:
            run = cases.together(transport.ep, op, arrangement, beside)
            checked = checks.mapped(self.mesh, functools.partial(_result, run))
            arguments = (transport.inputs(op, 0), beside.operands)
            found["checked"] = checked.lower(*arguments).compile
        return found

    def check(self, transport, op, program, beside):
        """Returns how results differ from the reference's, {} if they do not."""
        result = raised(program)(transport.inputs(op, 0), beside.operands)[0]
        if op == "dispatch":
            wanted = self.other.dispatched[0]
            config = self.case.config
            return checks.dispatched(self.mesh, config, result, wanted)
        return checks.combined(result, self.other.combined[0])

    def time(self, program, op, arrangement):
        """Times a program; returns its timing, and what is wrong with its checksum."""
        last = self.other.last(op)
        if arrangement is None:
            last = [np.zeros_like(each) for each in last]
        return loops.measure(raised(program), self.spec["repeats"], last)

    def measure_parts(self):
        """Times each step of overlap="copy" alone."""
        for op in transports.OPS:
            facts = {"op": op, "num_sms": None, "beside": None}
            if self.late():
                self.no_parts(facts, {"error": process.NO_TIME})
                continue
            try:
                parts = overlap_parts.Parts(self.transports[None], op)
                different = parts.differences(self.other)
                programs = compile_all(
                    {
                        part: parts.compiling(part, *self.sizes())
                        for part in report.PARTS
                    }
                )
            except Exception as error:  # of one operation of two
                self.no_parts(facts, _error(error))
                continue
            for part, program in programs.items():
                facts["arrangement"] = part
                try:
                    timing, wrong = loops.measure(
                        raised(program), self.spec["repeats"], parts.last(part)
                    )
                except Exception as error:  # of one program of many
                    self.row(**facts, **_error(error))
                    continue
                wrong |= different
                self.parts_us[op, part] = timing["us"]
                self.row(**facts, **timing, differences=wrong, wrong=bool(wrong))

    def no_parts(self, facts, why):
        for part in report.PARTS:
            self.row(**facts, arrangement=part, **why)

    def measure(self, wanted, beside):
        """Times each (op, arrangement, num_sms) of `wanted` with `beside`."""
        name = beside.name if beside else None
        finishers = {}
        for key in wanted:
            op, arrangement, num_sms = key
            facts = {"op": op, "arrangement": arrangement, "num_sms": num_sms}
            if self.late():
                self.row(**facts, beside=name, error=process.NO_TIME)
                continue
            try:
                found = self.compiling(
                    self.transports[num_sms], op, arrangement, beside
                )
            except Exception as error:  # what this JAX cannot trace
                self.row(**facts, beside=name, **_error(error))
                continue
            finishers |= {(*key, part): finish for part, finish in found.items()}
        programs = compile_all(finishers)
        for key in wanted:
            if (*key, "timed") not in programs:
                continue
            op, arrangement, num_sms = key
            facts = {"op": op, "arrangement": arrangement, "num_sms": num_sms}
            try:
                transport = self.transports[num_sms]
                different = {}
                if (*key, "checked") in programs:
                    checked = programs[(*key, "checked")]
                    different = self.check(transport, op, checked, beside)
                timing, wrong = self.time(programs[(*key, "timed")], op, arrangement)
                transport.ep.check()
            except Exception as error:  # of one program of many
                self.row(**facts, beside=name, **_error(error))
                continue
            self.note(facts, beside, timing, different | wrong)

    def note(self, facts, beside, timing, different):
        """Emits a measured row, with what follows from it and earlier ones."""
        op, us = facts["op"], timing["us"]
        row = {**facts, "beside": beside and beside.name, **timing}
        row |= {"differences": different, "wrong": bool(different)}
        if beside is None:
            if (facts["arrangement"], facts["num_sms"]) == ("whole", None):
                self.alone_us[op] = us
        elif facts["arrangement"] is None:
            self.beside_us[beside.name] = us
            row["facts"] = beside.facts
        else:
            x_us = self.beside_us.get(beside.name)
            row |= report.exposed(us, x_us, self.alone_us.get(op))
            if self.spec["overlap"] == "copy":
                parts = [self.parts_us.get((op, part)) for part in report.PARTS]
                row |= report.over_parts(row, *parts)
        self.row(**row)

    def besides(self):
        """Yields the work beside the exchange, each made when it is its turn."""
        spec, mesh, size = self.spec, self.mesh, self.spec["matmul"]
        make = {
            "matmul": lambda: cases.matmul(mesh, size),
            "matmul_fitted": lambda: cases.fitted_matmul(
                mesh, size, self.beside_us["matmul"], max(self.alone_us.values())
            ),
            "attention": lambda: cases.attention(mesh, self.case),
            "elementwise": lambda: cases.elementwise(mesh, spec["megabytes"]),
        }
        for way in ("ragged_dot", "hopper"):
            make[way] = functools.partial(self.grouped, way)
        for name in spec["beside"]:
            if name == overlap_batches.NAME:
                continue
            facts = {"op": None, "arrangement": None, "num_sms": None, "beside": name}
            if self.late():
                self.row(**facts, error=process.NO_TIME)
                continue
            try:
                beside = make[name]()
                self.once_us = cases.once_us(mesh, beside)
            except Exception as error:  # nothing to fit it to, or not for this device
                self.row(**facts, **_error(error))
                continue
            yield beside

    def measure_batches(self, arrangements):
        """Times two micro-batches, one after the other and overlapped."""
        facts = {"op": "layer", "beside": overlap_batches.NAME, "num_sms": None}
        forms = [None, *(a for a in arrangements if a.endswith("halves"))]
        if self.late():
            for form in forms:
                self.row(**facts, arrangement=form, error=process.NO_TIME)
            return
        with overlap_batches.Batches(self.transports[None], self.spec) as batches:
            for form in forms:
                try:
                    found = batches.measure(form)
                except Exception as error:  # of one arrangement of several
                    found = _error(error)
                self.row(**facts, arrangement=form, **found)

    def grouped(self, way):
        sizes = self.transports[None].dispatched[0].group_sizes
        inner = self.spec["ragged_inner" if way == "ragged_dot" else "inner"]
        return cases.grouped(self.mesh, self.case, sizes, inner, way)

    def run(self):
        for num_sms in [None, *self.spec["num_sms"]]:
            self.open(num_sms)
        chosen = [a for a in self.spec["arrangements"] if cases.available(a)]
        for name in sorted(set(self.spec["arrangements"]) - set(chosen)):
            print(f"  {name}: not in jax {jax.__version__}", flush=True)
        alone = [
            (op, form, num_sms)
            for op in transports.OPS
            for form in ("whole", "halves")
            for num_sms in self.transports
        ]
        self.measure(alone, None)
        if self.spec["overlap"] == "copy":
            self.measure_parts()
        # `num_sms` matters beside work on a second stream, which runs on the other SMs.
        wanted = [
            (op, name, num_sms)
            for op in transports.OPS
            for name in chosen
            for num_sms in self.transports
            if num_sms is None or report.OVERLAPS[name] == "stream"
        ]
        for beside in self.besides():
            self.measure([("dispatch", None, None)], beside)
            self.measure(wanted, beside)
            gc.collect()
        if overlap_batches.NAME in self.spec["beside"]:
            self.measure_batches(chosen)
        for transport in (*self.transports.values(), self.other):
            transport.ep.close()


def _result(run, operands, others):
    """Returns `run`'s result, and only the last element of the other work's result."""
    result, other = run(operands, others)
    return result, loops.last_element(jax.lax.optimization_barrier(other))[None]


def _error(error):
    return {"error": process.error_text(error)}


def main(arguments=None):
    spec, output = process.given(arguments)
    mesh = process.ep_mesh(spec["devices"])
    with process.reporting(output, report.line, mesh) as emit:
        Worker(spec, mesh, emit).run()


if __name__ == "__main__":
    main()
