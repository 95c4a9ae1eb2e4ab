"""Measures whole layers for layer.py, in a process of its own.

    python -m benchmarks.layers.worker SPECIFICATION OUTPUT

It writes a line of JSON to OUTPUT for the devices, and one for each row as soon as it
is measured.
"""

import functools
import gc
import typing

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from benchmarks.layers import cases, kinds, report
from benchmarks.layers import experts as layer_experts
from jax_ep._cli.bench import checks, process
from jax_ep._cli.bench.loops import compile_all, raised
from jax_ep._cli.bench.transports import normal

# Ways of multiplying that take more than this many times the fastest forward pass are
# not timed with gradients.
_HOPELESS = 3
_REFERENCE = ("collective", "bf16")
_FP8 = "fp8"  # a way of multiplying


def _error(error):
    return {"error": process.error_text(error)}


def _checked(errors, name):
    """Returns a row's entries about its results: all errors if one is too large."""
    largest = max(errors.values())
    wrong = largest > cases.TOLERANCES[name]
    made = {"largest_error": largest, "wrong": wrong}
    return made | {"errors": errors} if wrong else made


class Timed(typing.NamedTuple):
    """A layer that was timed, kept for what else is measured with it."""

    facts: dict
    ep: typing.Any
    checked: dict
    both: typing.Any


class Worker:
    """Measures one case of one specification."""

    def __init__(self, spec, case, name, emit):
        self.spec, self.case, self.name, self.emit = spec, case, name, emit
        self.experts_ms = {}  # by way of multiplying and pass
        self.timed = {}  # jax_ep's layers, by layer and format

    @functools.cached_property
    def quantize(self):
        """A function that makes codes of the weights."""
        return cases.quantizing(self.case)

    @functools.cached_property
    def codes(self):
        """Codes for all layers with experts in fp8; only steps make them again."""
        return self.quantize()

    def row(self, **entries):
        facts = {"case": self.name, "recv_capacity": self.case.capacity}
        if entries.get("layer") in self.roomy:
            facts["recv_capacity"] = None
        self.emit({**facts, **entries})

    @property
    def roomy(self):
        """The names of the layers with the default capacity."""
        main = report.main_transport(self.spec)
        return [report.default_capacity(e) for e in (main, report.fp8_experts(main))]

    def late(self):
        return process.late(self.spec)

    def time(self, program):
        how = (self.spec["milliseconds"], self.spec["repeats"])
        return cases.measure(self.case, raised(program), *how)

    def choose_matmul(self):
        """Times every way of multiplying; returns the fastest right one, or None.

        Forward passes come first. Only ways that are not hopelessly slow are then timed
        with gradients. The way in the specification's `take` never counts as hopeless.
        """
        take = self.spec["take"]
        case = self.case
        shape = (case.mesh.size * case.capacity, case.sizes["hidden"])
        counts = cases.group_sizes(case)
        keep_real = checks.mapped(case.mesh, _zeros_past_the_end)
        rows = normal(case.mesh, jax.random.key(3), shape)
        rows = keep_real(rows, counts)
        finishers, forward = {}, {}
        for matmul in self.spec["matmul"][self.name]:
            if layer_experts.available(matmul, case.sizes):
                layer = kinds.alone(
                    case.sizes, layer_experts.make(matmul, case.largest)
                )
                try:
                    found = cases.compiling(case, layer, rows, counts)
                except Exception as error:  # a kernel that this JAX refuses
                    self.row(layer="experts", matmul=matmul, **_error(error))
                    continue
                finishers[matmul] = found
        finished = compile_all({m: f["forward"] for m, f in finishers.items()})
        for matmul, program in finished.items():
            try:
                forward[matmul] = self.time(program)
            except Exception as error:  # out of memory, or refused
                self.row(layer="experts", matmul=matmul, **_error(error))
        least = min((each["ms"] for each in forward.values()), default=0)
        good = [m for m in forward if m == take or forward[m]["ms"] < _HOPELESS * least]
        programs = compile_all({m: finishers[m]["both"] for m in good})
        best, reference = None, None
        # Ways with gradients come first, since the rest is compared with them.
        for matmul in [*good, *(m for m in forward if m not in good)]:
            facts = {"layer": "experts", "matmul": matmul}
            times = {"forward": forward[matmul]}
            try:
                if matmul in good:
                    (out, _), grads = raised(programs[matmul])(case.tokens[0])
                    rest = keep_real(grads[2], counts), grads[1]
                    times["both"] = self.time(programs[matmul])
                else:
                    (out, _), rest = finished[matmul](case.tokens[0]), reference[1]
                none = jnp.zeros(out.shape[0], bool)
                kept = (keep_real(out, counts), none), rest
                reference = reference or kept
                errors = cases.errors(kept, reference)
            except Exception as error:  # out of memory, or refused
                self.row(**facts, **_error(error))
                continue
            finally:
                out = grads = rest = kept = None
            checked = _checked(errors, "bf16")
            for name, each in times.items():
                self.row(**facts, **{"pass": name}, **checked, **each)
            self.experts_ms[matmul] = {name: t["ms"] for name, t in times.items()}
            total = 0 if matmul == take else sum(self.experts_ms[matmul].values())
            if (
                matmul in good
                and not checked["wrong"]
                and (best is None or total < best[0])
            ):
                best = (total, matmul)
        return best and best[1]

    def layers(self, experts, matmul):
        """Yields the specification's layers: (facts, how to make it and its handle)."""
        case = self.case
        for transport, name in self.spec["ours"]:
            facts = {"layer": transport, "format": name, "flags": ""}
            make = functools.partial(self.ours, transport, name, experts)
            yield facts, functools.partial(make, case.capacity)
        if self.spec["dense"]:
            facts = {"layer": "dense", "format": "bf16", "flags": ""}
            yield facts, lambda: (kinds.over_dense(case.sizes), None)
        for updates, label in self.spec["ragged"]:
            facts = {"layer": "ragged", "format": "bf16", "flags": label}
            layer = kinds.over_ragged(case.sizes, experts, case.capacity, updates)
            yield facts, functools.partial(lambda layer: (layer, None), layer)
        main = self.spec["transport"]
        asked = any(transport == main for transport, _ in self.spec["ours"])
        if asked:
            facts = {"layer": report.counted(main), "format": "bf16", "flags": ""}
            yield facts, functools.partial(self.counted, main, experts)
            facts = {"layer": self.roomy[0], "format": "bf16", "flags": ""}
            yield facts, functools.partial(self.ours, main, "bf16", experts, None)
        for transport in self.spec["fp8"]:
            if layer_experts.available(_FP8, case.sizes):
                facts = {"layer": report.fp8_experts(transport), "format": report.FP8}
                facts |= {"flags": "", "matmul": _FP8}
                yield (
                    facts,
                    functools.partial(self.coded, transport, self.case.capacity),
                )
                if transport == main:
                    facts = facts | {"layer": self.roomy[1]}
                    yield facts, functools.partial(self.coded, transport, None)
        offered = self.spec["matmul"][self.name]
        default = layer_experts.default(case.sizes)
        if asked and matmul != default and default in offered:
            facts = {"layer": report.default_experts(main), "format": "bf16"}
            facts |= {"flags": "", "matmul": default}
            make = functools.partial(self.ours, main, "bf16", None)
            yield facts, functools.partial(make, case.capacity)

    def counted(self, transport, experts):
        """Makes the layer with jax_ep.stats, and an empty `Load`."""
        _, ep = self.ours(transport, "bf16", experts, self.case.capacity)
        return kinds.counted(ep, experts), ep, jax_ep.stats.init(ep)

    def coded(self, transport, capacity):
        """Makes the layer with experts in fp8, and codes of the weights."""
        codes = self.codes
        _, ep = self.ours(transport, report.FP8, None, capacity)
        return kinds.coded(ep), ep, codes

    def ours(self, transport, name, experts, capacity):
        sizes = self.case.sizes
        config = jax_ep.EPConfig(
            num_experts=sizes["experts"],
            top_k=sizes["top_k"],
            hidden_size=sizes["hidden"],
            max_tokens_per_rank=sizes["tokens"],
            dispatch_format=name,
            recv_capacity=capacity,
            timeout_s=20.0,
        )
        ep = jax_ep.init(self.case.mesh, "ep", config, transport=transport)
        return kinds.ours(ep, experts), ep

    def time_fp8_experts(self):
        """Returns, by pass, milliseconds of fp8 experts on codes of rows."""
        case = self.case
        shape = (case.mesh.size * case.capacity, case.sizes["hidden"])
        counts = cases.group_sizes(case)
        rows = normal(case.mesh, jax.random.key(3), shape)
        rows = checks.mapped(case.mesh, _zeros_past_the_end)(rows, counts)
        quantize = functools.partial(jax_ep.formats.quantize, format=report.FP8)
        operands = rows, counts, checks.mapped(case.mesh, quantize)(rows), self.codes
        layer = kinds.alone_coded(case.sizes)
        programs = compile_all(cases.compiling(case, layer, *operands))
        return {name: self.time(each)["ms"] for name, each in programs.items()}

    def time_dense_experts(self):
        """Returns, by pass, milliseconds of the dense all-to-all's experts."""
        case, sizes = self.case, self.case.sizes
        slots = case.mesh.size * kinds.slots(sizes)
        shape = (sizes["experts"], slots, sizes["hidden"])
        rows = normal(case.mesh, jax.random.key(3), shape)
        layer = kinds.alone_batched(sizes)
        programs = compile_all(cases.compiling(case, layer, rows))
        return {name: self.time(each)["ms"] for name, each in programs.items()}

    def measure(self, facts, ep, programs, reference, matmul):
        """Measures one layer; returns what later layers are compared with."""
        if self.late():
            raise RuntimeError(process.NO_TIME)
        result = raised(programs["both"])(self.case.tokens[0])
        if reference is None and (facts["layer"], facts["format"]) != _REFERENCE:
            raise RuntimeError("there is nothing to compare it with")
        errors = cases.errors(result, reference or result)
        checked = _checked(errors, facts["format"])
        drops = int(np.asarray(result[0][1]).sum())
        reference = reference or result
        del result  # its gradients are as large as the parameters
        times = {name: self.time(program) for name, program in programs.items()}
        dense = facts["layer"] == "dense"
        matmul = "batched" if dense else facts.get("matmul", matmul)
        if matmul == _FP8 and matmul not in self.experts_ms:
            self.experts_ms[matmul] = self.time_fp8_experts()
        alone = self.time_dense_experts() if dense else self.experts_ms.get(matmul, {})
        for name, timing in times.items():
            experts_ms = alone.get(name)  # None: too slow to be timed alone
            share = None if experts_ms is None else 1 - experts_ms / timing["ms"]
            self.row(
                **{"matmul": matmul, **facts, "pass": name},
                **timing,
                temp_bytes=programs[name].temp_bytes,
                window_bytes=0 if ep is None else ep.buffer_bytes,
                experts_ms=experts_ms,
                exchange_share=share,
                **checked,
                tokens_with_drops=drops,
            )
        if ep is not None:
            key, facts = (facts["layer"], facts["format"]), {"matmul": matmul, **facts}
            self.timed[key] = Timed(facts, ep, checked, programs["both"])
        return reference

    def steps(self):
        """Measures making codes of the weights, and steps with and without them.

        The rows have the errors of their layers.
        """
        how = self.spec["milliseconds"], self.spec["repeats"]
        transport = self.spec["transport"]
        main, coded = (transport, "bf16"), (report.fp8_experts(transport), report.FP8)
        names = tuple(map(report.fp8_experts, report.OURS))
        found = [key for key in self.timed if key[0] in names]
        for key in sorted(found, key=lambda key: key != coded)[:1]:
            self.attempt(key, {"pass": "quantize"}, lambda: self.quantizing(how))
        if coded not in self.timed:
            return
        for key, quantize in ((main, None), (coded, self.quantize)):
            for count in cases.MICROBATCHES if key in self.timed else ():
                step = functools.partial(
                    cases.measure_step, self.case, self.timed[key].both, quantize, count
                )
                facts = {"pass": "step", "microbatches": count}
                self.attempt(key, facts, functools.partial(step, *how))

    def quantizing(self, how):
        """Returns the entries of the row of making codes."""
        found = cases.measure(self.case, lambda _: self.quantize(), *how, in_flight=1)
        size = cases.quantized_bytes(self.case, self.codes)
        return {**found, "bytes": size, "gb_s": size / found["ms"] / 1e6}

    def attempt(self, key, entries, measure):
        """Emits a row of something else than a pass, measured with a timed layer."""
        timed = self.timed[key]
        try:
            if self.late():
                raise RuntimeError(process.NO_TIME)
            row = {**measure(), **timed.checked}
            timed.ep.check()
        except Exception as error:  # of one row of many
            row = _error(error)
        self.row(**timed.facts, **entries, **row)

    def run(self):
        matmul = self.choose_matmul()
        if matmul is None:
            self.row(layer="all", error="no way of multiplying works")
            return
        gc.collect()
        experts = layer_experts.make(matmul, self.case.largest)
        layers, finishers, handles = [], {}, []
        for facts, make in self.layers(experts, matmul):
            if self.late():
                self.row(**{"matmul": matmul, **facts}, error=process.NO_TIME)
                continue
            try:
                layer, ep, *operands = make()
                handles.append(ep)
                found = cases.compiling(self.case, layer, *operands)
            except (RuntimeError, ValueError) as error:
                self.row(**{"matmul": matmul, **facts}, **_error(error))
                continue
            index = len(layers)
            layers.append((facts, ep))
            finishers |= {(index, name): finish for name, finish in found.items()}
        measured = any((f["layer"], f["format"]) == _REFERENCE for f, _ in layers)
        if layers and not measured:
            layer, ep = self.ours(*_REFERENCE, experts, self.case.capacity)
            handles.append(ep)
            finishers["reference"] = cases.compiling(self.case, layer)["both"]
        programs = compile_all(finishers)
        reference = None
        if "reference" in programs:
            reference = raised(programs["reference"])(self.case.tokens[0])

        # The reference comes first, a layer that may be very slow last.
        def place(index):
            facts = layers[index][0]
            if (facts["layer"], facts["format"]) == _REFERENCE:
                return 0
            default = report.default_experts(self.spec["transport"])
            return 2 if facts["layer"] == default else 1

        order = sorted(range(len(layers)), key=place)
        for index in order:
            facts, ep = layers[index]
            by_pass = {name: programs[index, name] for name in cases.PASSES}
            try:
                reference = self.measure(facts, ep, by_pass, reference, matmul)
                if ep is not None:
                    ep.check()
            except Exception as error:  # of one layer of many
                self.row(**{"matmul": matmul, **facts}, **_error(error))
            gc.collect()
        reference = None  # makes room for the codes of steps
        self.steps()
        for ep in handles:
            if ep is not None:
                ep.close()


def _zeros_past_the_end(rows, sizes):
    """Clears a rank's rows past the last group, as dispatch does."""
    real = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(real[:, None], rows, 0)


def main(arguments=None):
    spec, output = process.given(arguments)
    mesh = process.ep_mesh(spec["devices"])
    with process.reporting(output, report.line, mesh) as emit:
        for name, sizes in spec["cases"].items():
            if process.late(spec):
                emit({"case": name, "layer": "all", "error": process.NO_TIME})
                continue
            case = cases.make_case(mesh, sizes, spec["seed"])
            Worker(spec, case, name, emit).run()
            del case
            gc.collect()


if __name__ == "__main__":
    main()
