"""Checks what nvcc made of the device code; `.ci/run cuda` calls it.

    check_sass.py FOLDER [NVDISASM]

For each source, FOLDER has NAME.cubin and NAME.log, the output of `ptxas -v`. Without a
disassembler only the logs are checked. A kernel that takes a `WindowGroup` is a window
kernel: other GPUs write what it reads. docs/protocol.md, "Memory order", has the
reasons. A kernel with `Matmul` or `Matrices` in its name is a matmul kernel.
"""

from __future__ import annotations

import collections
import itertools
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

# Bytes that a thread of any other kernel may spill, outside its inner loops. Window
# kernels may spill none.
MAX_SPILL_BYTES = 100
# Matmul kernels may spill addresses that are used once per tile, but no sums.
MAX_MATMUL_SPILL_BYTES = 32
# Exact products of float32 have more sums and parts of operands than registers. What
# they spill is 1% of their instructions.
MAX_EXACT_SPILL_BYTES = 1024
# What ptxas prints when it makes tensor-core instructions wait for each other.
SERIALIZED = re.compile(r"wgmma.*serialized.*function '?([\w.$]+)", re.I)

# What no kernel may contain.
BANNED = {
    r"MEMBAR\.SC\b": "a sequentially consistent fence (fence.sc, __threadfence)",
    r"BPT\b": "a trap or breakpoint, which would end every rank's process",
    r"CALL\.ABS\b": "a call out of the module (assert, printf)",
}
# What window kernels may not contain either.
BANNED_IN_WINDOWS = {
    r"LDG\b.*\.CONSTANT\b": "a non-coherent load (ld.global.nc, __ldg)",
    r"TEX|TLD|SULD": "a texture or surface load, which is not coherent",
}
FLAG_READ, FLAG_STORE = r"LDG\.E\.128\.STRONG\.SYS\b", r"STG\.E\.128\.STRONG\.SYS\b"
BULK_LOAD, BULK_STORE = r"UBLKCP\.S\.G\b", r"UBLKCP\.G\.S\b"
CREDIT_STORE = r"STG\.E\.64\.STRONG\.SYS\b"
PROXY_FENCE, SYSTEM_FENCE = r"FENCE\.VIEW\.ASYNC\.G\b", r"MEMBAR\.ALL\.SYS\b"

# Kernels whose flags announce what they store into windows. Low-latency kernels send
# cells instead.
PUBLISHES = r"\d(Dispatch|DispatchCached|Combine)(Send)?Kernel"

# (what a window kernel contains, what it must then contain as well, why)
NEEDED = (
    (
        r"UBLKCP\.G\.S\b",
        r"FENCE\.VIEW\.ASYNC\.S\b",
        "bulk stores need a fence.proxy.async.shared::cta after the stage is written",
    ),
    (
        FLAG_STORE,
        r"LDG\.E\.128\.STRONG\.SYS\b",
        "flags are read whole, in 128 bits",
    ),
)


class Rule(NamedTuple):
    """Forbids `step` after `since` without `fence` between, on any path of a kernel."""

    since: str
    fence: str
    step: str
    words: str
    of: str = "WindowGroup"  # a pattern for the names of the kernels it applies to
    from_start: bool = False  # whether they begin as if after `since`


RULES = (
    # The read and the load belong to different proxies, which no barrier orders.
    Rule(
        since=FLAG_READ,
        fence=PROXY_FENCE,
        step=BULK_LOAD,
        words="a bulk load after the read of a flag, no fence.proxy.async.global "
        "between",
    ),
    # One warp reads the credits and reaches this barrier last (kCreditsBarrier).
    Rule(
        since=r"\bBAR\.SYNC\S* 0xe\b",
        fence=PROXY_FENCE,
        step=BULK_STORE,
        words="a bulk store after the wait for credits, no fence.proxy.async.global "
        "between",
        of=PUBLISHES,
    ),
    # A barrier or a counter orders the reads of other threads before this thread, but
    # does not pass on their release: the thread needs a fence of its own.
    Rule(
        since=r"\bBAR\.|MEMBAR\.ALL\.GPU\b",
        fence=SYSTEM_FENCE,
        step=CREDIT_STORE,
        words="a credit after a barrier, no fence.acq_rel.sys between",
        from_start=True,
    ),
)

# Between a fence and its flag there are only instructions that access no other memory.
# Cells and reports are stored by the same instruction as flags, but need no fence.
ACCESS = re.compile(r"(?:LDG|STG|UBLKCP|MEMBAR|ATOMG?|REDG?|CALL)\b")

SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
PTXAS_FUNCTION = re.compile(r"Function properties for (\S+)")
PTXAS_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")

FUNCTION_GRAPH = re.compile(r'^subgraph "cluster_([^"]+)"', re.M)
BLOCK = re.compile(r'^"([^"]+)"\n\[label="\{(.*?)\}"\]', re.M | re.S)
PORT = re.compile(r"\|<(\w+)>")
EDGE = re.compile(r'^"([^"]+)":(\w+):\w+ -> "([^"]+)"', re.M)

Instructions = list[str]


def is_window(function: str) -> bool:
    """Whether this kernel, or a function called by one, works on windows."""
    return "Window" in function


def is_matmul(function: str) -> bool:
    """Whether the kernel multiplies or quantises matrices."""
    return re.search(r"Matmul|Matrices", function) is not None


def log_errors(log: str) -> list[str]:
    """Returns the spills and serialised matmuls in the output of ptxas -v."""
    errors, function, seen = [], "", 0
    for line in log.splitlines():
        if match := SERIALIZED.search(line):
            errors.append(f"{match[1]}: its wgmma instructions are serialised")
        elif match := PTXAS_FUNCTION.search(line):
            function = match[1]
        elif match := PTXAS_SPILLS.search(line):
            seen += 1
            spilled = max(int(match[1]), int(match[2]))
            limit = 0 if is_window(function) else MAX_SPILL_BYTES
            limit = MAX_MATMUL_SPILL_BYTES if is_matmul(function) else limit
            limit = MAX_EXACT_SPILL_BYTES if "ExactFloat" in function else limit
            if spilled > limit:
                errors.append(f"{function}: spills {spilled} bytes, at most {limit}")
    return errors if seen else ["the log has no function: is it that of ptxas -v?"]


def disassemble(nvdisasm: str, cubin: pathlib.Path) -> dict[str, Instructions]:
    """Returns each function's instructions in order of address."""
    command = [nvdisasm, "-c", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions: dict[str, Instructions] = {}
    current: Instructions = []
    for line in text.splitlines():
        if match := SECTION.match(line):
            current = functions.setdefault(match[1], [])
        elif match := INSTRUCTION.match(line):
            current.append(match[1])
    return functions


class Graph:
    """The control flow of a function: its blocks, and the edges between them."""

    def __init__(self, text: str) -> None:
        """Parses what `nvdisasm -cfg` prints for the function."""
        # Each block's body, split at its ports: a branch leaves the block at its port.
        self.bodies = {
            match[1]: PORT.split(match[2].replace("\\", ""))
            for match in BLOCK.finditer(text)
        }
        self.edges = collections.defaultdict(list)
        for match in EDGE.finditer(text):
            self.edges[match[1]].append((match[2], match[3]))

    def broken(self, rule: Rule) -> tuple[list[str], int]:
        """Returns the blocks that break the rule, and how many steps were looked at."""
        order = re.compile(f"({rule.since})|({rule.fence})|({rule.step})")
        bad, seen, steps, applies = set(), set(), set(), rule.from_start
        # (block, whether it is after `since`)
        work = [
            (name, rule.from_start) for name in self.bodies if name.startswith(".text")
        ]
        while work:
            name, open_ = work.pop()
            if (name, open_) in seen or name not in self.bodies:
                continue
            seen.add((name, open_))
            parts = self.bodies[name]
            left_by = {}
            for port, body in zip(["entry", *parts[1::2]], parts[::2], strict=True):
                for match in order.finditer(body):
                    if match[3]:
                        steps.add((name, port, match.start()))
                        bad |= {name} if open_ else set()
                    else:
                        open_ = bool(match[1])
                        applies = applies or open_
                left_by[port] = open_
            # A block that falls through leaves at its end, through its entry port.
            left_by["entry"] = open_
            work += [(to, left_by[port]) for port, to in self.edges[name]]
        return sorted(bad), len(steps) if applies else 0


def flow_errors(nvdisasm: str, cubin: pathlib.Path) -> tuple[list[str], list[int]]:
    """Returns what breaks RULES, and how many steps each of them applied to."""
    command = [nvdisasm, "-cfg", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    errors, totals = [], [0] * len(RULES)
    parts = FUNCTION_GRAPH.split(text)
    for function, graph in zip(parts[1::2], parts[2::2], strict=True):
        parsed = Graph(graph)
        for i, rule in enumerate(RULES):
            if not re.search(rule.of, function):
                continue
            bad, steps = parsed.broken(rule)
            totals[i] += steps
            if bad:
                errors.append(f"{function}: {rule.words}, in {', '.join(bad[:4])}")
    return errors, totals


def holds(instructions: Instructions, pattern: str) -> list[str]:
    """Returns the instructions whose beginning matches the pattern."""
    return sorted(name for name in set(instructions) if re.match(pattern, name))


def announced(order: list[str]) -> bool:
    """Whether, among the memory accesses, some flag directly follows a fence."""
    accesses = [name for name in order if ACCESS.match(name)]
    return any(
        re.match(SYSTEM_FENCE, before) and re.match(FLAG_STORE, name)
        for before, name in itertools.pairwise(accesses)
    )


def sass_errors(functions: dict[str, Instructions]) -> list[str]:
    """Returns what is wrong with the instructions of a cubin's functions."""
    errors = []
    for function, instructions in functions.items():
        if not {"EXIT", "RET.REL.NODEC"} & set(instructions):
            errors.append(f"{function}: does not end; is the disassembly understood?")
        banned = BANNED | (BANNED_IN_WINDOWS if is_window(function) else {})
        for pattern, reason in banned.items():
            for name in holds(instructions, pattern):
                errors.append(f"{function}: {name}, {reason}")
        for has, needs, reason in NEEDED if is_window(function) else ():
            if holds(instructions, has) and not holds(instructions, needs):
                errors.append(f"{function}: no {needs}; {reason}")
        if re.search(PUBLISHES, function) and not announced(instructions):
            errors.append(f"{function}: no flag directly behind a fence.acq_rel.sys")
    return errors


def main(arguments: list[str]) -> int:
    """Prints one line per source, with its errors; returns 1 if there are any."""
    folder, nvdisasm = pathlib.Path(arguments[0]), (arguments[1:] or [""])[0]
    cubins = sorted(folder.glob("*.cubin"))
    failed = not cubins
    windows, steps = 0, [0] * len(RULES)
    for cubin in cubins:
        errors = log_errors(cubin.with_suffix(".log").read_text())
        summary = "no spills"
        if nvdisasm:
            functions = disassemble(nvdisasm, cubin)
            errors += sass_errors(functions)
            kernels = [c for name, c in functions.items() if is_window(name)]
            windows += len(kernels)
            if kernels:
                more, met = flow_errors(nvdisasm, cubin)
                errors += more
                steps = [sum(pair) for pair in zip(steps, met, strict=True)]
            summary = f"{len(functions)} functions, {len(kernels)} of windows"
        print(f"{cubin.stem}: " + ("; ".join(errors) or f"good, {summary}"))
        failed = failed or bool(errors)
    of_windows = {
        f"{source.parent.name}_{source.stem}"
        for part in ("window", "low_latency")
        for source in pathlib.Path("xla_ffi/cuda", part).glob("*.cu")
    }
    whole = of_windows <= {cubin.stem for cubin in cubins}
    if nvdisasm and whole and not (windows and all(steps)):
        print(f"steps of the rules in window kernels: {steps}; are names as expected?")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
