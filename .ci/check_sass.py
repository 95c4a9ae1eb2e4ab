"""Checks what nvcc made of the device code; `.ci/run cuda` calls it.

    check_sass.py FOLDER [NVDISASM]

FOLDER has NAME.cubin and NAME.log, the output of `ptxas -v`, of each source. Without a
disassembler only the logs are checked. A window kernel is one with `Window` in its
name: other GPUs write what it reads. docs/protocol.md, "Memory order", has the reasons.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sys

# Bytes that a thread of another kernel may spill; those of window kernels spill none.
MAX_SPILL_BYTES = 64

# What no kernel may hold.
BANNED = {
    r"MEMBAR\.SC\b": "a sequentially consistent fence (fence.sc, __threadfence)",
    r"BPT\b": "a trap or breakpoint, which would end every rank's process",
    r"CALL\.ABS\b": "a call out of the module (assert, printf)",
}
# What no window kernel may hold either.
BANNED_IN_WINDOWS = {
    r"LDG\b.*\.CONSTANT\b": "a non-coherent load (ld.global.nc, __ldg)",
    r"TEX|TLD|SULD": "a texture or surface load, which is not coherent",
}
# (what a window kernel holds, what it must then hold as well, why)
NEEDED = (
    (
        r"UBLKCP\.G\.S\b",
        r"FENCE\.VIEW\.ASYNC\.S\b",
        "bulk stores need a fence.proxy.async.shared::cta after the stage is written",
    ),
    (
        r"STG\.E\.128\.STRONG\.SYS\b",
        r"MEMBAR\.ALL\.SYS\b",
        "flags need a fence.acq_rel.sys before them",
    ),
    (
        r"STG\.E\.128\.STRONG\.SYS\b",
        r"LDG\.E\.128\.STRONG\.SYS\b",
        "flags are read whole, in 128 bits",
    ),
)

# On no path of a window kernel may a bulk load follow the read of a flag without the
# fence between: the two belong to different proxies, and a barrier does not join them.
FLAG_READ, PROXY_FENCE, BULK_LOAD = (
    r"LDG\.E\.128\.STRONG\.SYS\b",
    r"FENCE\.VIEW\.ASYNC\.G\b",
    r"UBLKCP\.S\.G\b",
)
FLOW_STEP = re.compile(f"({FLAG_READ})|({PROXY_FENCE})|({BULK_LOAD})")

SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
PTXAS_FUNCTION = re.compile(r"Function properties for (\S+)")
PTXAS_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")

FUNCTION_GRAPH = re.compile(r'^subgraph "cluster_([^"]+)"', re.M)
BLOCK = re.compile(r'^"([^"]+)"\n\[label="\{(.*?)\}"\]', re.M | re.S)
PORT = re.compile(r"\|<(\w+)>")
EDGE = re.compile(r'^"([^"]+)":(\w+):\w+ -> "([^"]+)"', re.M)

Instructions = collections.Counter[str]


def is_window(function: str) -> bool:
    """Whether the kernel, or what it calls, works on windows."""
    return "Window" in function


def spill_errors(log: str) -> list[str]:
    """Spills by ptxas -v."""
    errors, function, seen = [], "", 0
    for line in log.splitlines():
        if match := PTXAS_FUNCTION.search(line):
            function = match[1]
        elif match := PTXAS_SPILLS.search(line):
            seen += 1
            spilled = max(int(match[1]), int(match[2]))
            limit = 0 if is_window(function) else MAX_SPILL_BYTES
            if spilled > limit:
                errors.append(f"{function}: spills {spilled} bytes, at most {limit}")
    return errors if seen else ["the log has no function: is it that of ptxas -v?"]


def disassemble(nvdisasm: str, cubin: pathlib.Path) -> dict[str, Instructions]:
    """How often each instruction occurs in each function."""
    command = [nvdisasm, "-c", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions: dict[str, Instructions] = {}
    current: Instructions = collections.Counter()
    for line in text.splitlines():
        if match := SECTION.match(line):
            current = functions.setdefault(match[1], collections.Counter())
        elif match := INSTRUCTION.match(line):
            current[match[1]] += 1
    return functions


def unfenced_loads(graph: str) -> tuple[list[str], int]:
    """Blocks with a bulk load that a flag's read reaches unfenced; all bulk loads."""
    blocks = {match[1]: match[2].replace("\\", "") for match in BLOCK.finditer(graph)}
    edges = collections.defaultdict(list)
    for match in EDGE.finditer(graph):
        edges[match[1]].append((match[2], match[3]))
    bad, seen, loads = set(), set(), set()
    # (block, whether a flag was read since the last fence)
    work = [(name, False) for name in blocks if name.startswith(".text")]
    while work:
        name, unfenced = work.pop()
        if (name, unfenced) in seen or name not in blocks:
            continue
        seen.add((name, unfenced))
        ports = PORT.split(blocks[name])
        left_by = {}  # branches leave a block where their port is
        for port, body in zip(["entry", *ports[1::2]], ports[::2], strict=True):
            for match in FLOW_STEP.finditer(body):
                if match[3]:
                    loads.add((name, port, match.start()))
                    bad |= {name} if unfenced else set()
                else:
                    unfenced = bool(match[1])
            left_by[port] = unfenced
        # A block that falls through leaves at its end, by the port of its entry.
        left_by["entry"] = unfenced
        work += [(to, left_by[port]) for port, to in edges[name]]
    return sorted(bad), len(loads)


def flow_errors(nvdisasm: str, cubin: pathlib.Path) -> tuple[list[str], int]:
    """Window kernels that break the rule above, and how many bulk loads they have."""
    command = [nvdisasm, "-cfg", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    errors, total = [], 0
    parts = FUNCTION_GRAPH.split(text)
    for function, graph in zip(parts[1::2], parts[2::2], strict=True):
        if not is_window(function):
            continue
        bad, loads = unfenced_loads(graph)
        total += loads
        if bad:
            where = ", ".join(bad[:4])
            errors.append(
                f"{function}: a bulk load after the read of a flag and no "
                f"fence.proxy.async.global between, in {where}"
            )
    return errors, total


def holds(instructions: Instructions, pattern: str) -> list[str]:
    """The instructions that match from their start."""
    return sorted(name for name in instructions if re.match(pattern, name))


def sass_errors(functions: dict[str, Instructions]) -> list[str]:
    """What the rules above say of the functions of a cubin."""
    errors = []
    for function, instructions in functions.items():
        if not instructions["EXIT"] and not instructions["RET.REL.NODEC"]:
            errors.append(f"{function}: does not end; is the disassembly understood?")
        banned = BANNED | (BANNED_IN_WINDOWS if is_window(function) else {})
        for pattern, reason in banned.items():
            for name in holds(instructions, pattern):
                errors.append(f"{function}: {name}, {reason}")
        for has, needs, reason in NEEDED if is_window(function) else ():
            if holds(instructions, has) and not holds(instructions, needs):
                errors.append(f"{function}: no {needs}; {reason}")
    return errors


def main(arguments: list[str]) -> int:
    """Prints a line a source and every error; 1 if there are any."""
    folder, nvdisasm = pathlib.Path(arguments[0]), (arguments[1:] or [""])[0]
    cubins = sorted(folder.glob("*.cubin"))
    failed = not cubins
    windows = loads = 0
    for cubin in cubins:
        errors = spill_errors(cubin.with_suffix(".log").read_text())
        summary = "no spills"
        if nvdisasm:
            functions = disassemble(nvdisasm, cubin)
            errors += sass_errors(functions)
            kernels = [c for name, c in functions.items() if is_window(name)]
            windows += len(kernels)
            if kernels:
                more, reached = flow_errors(nvdisasm, cubin)
                errors += more
                loads += reached
            summary = f"{len(functions)} functions, {len(kernels)} of windows"
        print(f"{cubin.stem}: " + ("; ".join(errors) or f"good, {summary}"))
        failed = failed or bool(errors)
    if nvdisasm and not (windows and loads):
        print("no window kernel with bulk loads: are the names as this file expects?")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
