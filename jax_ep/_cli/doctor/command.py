"""The subcommand `jax-ep doctor`."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from jax_ep import formats
from jax_ep._cli import text as _cli_text
from jax_ep._cli.text import LABEL, NBSP, entry
from jax_ep._cli.values import (
    at_least,
    nodes_problem,
    number,
    ranks_problem,
    top_k_problem,
)
from jax_ep._core import config as _config

_WIDE = 60  # from this many columns on, sizes are indented to the label's column

_TEXT = """\
Says what this machine can do with jax_ep and why: devices, which of them reach each
other's memory and over what link, versions, which transports work (each is tried with a
few tokens), how much memory a layer would take, and advice.

Memory is computed from sizes only, so any machine can report it for any group.
"""

_EXAMPLES = """\
examples:
  jax-ep doctor
  jax-ep doctor --experts 64 --hidden 4096 --capacity-factor 1.25
  jax-ep doctor --tokens 4096 64  handles for two batch shapes
  jax-ep doctor --ranks 32  a group larger than this machine
  jax-ep doctor --tokens 4096 --chunks 8  a layer in chunks of 512 tokens
  jax-ep doctor --ranks 32 --ranks-per-node 4  the same over nodes of 4 GPUs
  jax-ep doctor --json | jq .transports

exit codes: 0 every transport that is served here passed its test, 1 one did not, JAX
starts no backend or a plugin of jax_ep is not the right one, 2 usage, 130 interrupted
"""


def add(commands: Any) -> None:
    """Adds the subcommand's parser."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do, and why not more",
        description=_TEXT,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    layer = parser.add_argument_group("the layer whose memory is counted")
    count = at_least(1)
    for name, default, text in (
        ("experts", 256, "num_experts"),
        ("top-k", 8, "top_k"),
        ("hidden", 7168, "hidden_size"),
    ):
        layer.add_argument(
            f"--{name}",
            type=count,
            default=default,
            metavar="N",
            help=f"{text} (default {default})",
        )
    layer.add_argument(
        "--tokens",
        type=count,
        nargs="+",
        default=[4096],
        metavar="N",
        help="max_tokens_per_rank (default 4096). Of several, those of a program's "
        "batch shapes, each has a shared handle; other lines are for the largest",
    )
    layer.add_argument(
        "--chunks",
        type=count,
        default=1,
        metavar="N",
        help="chunks of the layer, each with room for 1/N of the tokens (default 1)",
    )
    layer.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="ranks of the EP group (default: every device here)",
    )
    layer.add_argument(
        "--ranks-per-node",
        type=count,
        metavar="N",
        help="ranks that share a node, for shmem (default: as many as devices here)",
    )
    layer.add_argument(
        "--dtype", default="bfloat16", metavar="NAME", help=_one_of(_config.DTYPES)
    )
    layer.add_argument(
        "--format",
        default="bf16",
        metavar="NAME",
        help=f"dispatch_format: {_one_of(formats.names())}",
    )
    layer.add_argument(
        "--combine-format",
        metavar="NAME",
        help=f"combine_format: none by default, or {', '.join(formats.wire_names())}",
    )
    capacity = layer.add_mutually_exclusive_group()
    capacity.add_argument(
        "--capacity-factor",
        type=number(0, strict=True),
        metavar="X",
        help="room for X times the rows of balanced routing (default: the worst case)",
    )
    capacity.add_argument(
        "--recv-capacity", type=count, metavar="N", help="room for N rows per rank"
    )
    layer.add_argument(
        "--reduce",
        default="rank",
        metavar="NAME",
        help=f"where combine sums: {_one_of(_config.REDUCES)}",
    )
    layer.add_argument(
        "--fused-shared-expert",
        action="store_true",
        help="every token also goes to a shared expert of its rank",
    )
    layer.add_argument(
        "--expert-alignment",
        type=count,
        default=1,
        metavar="N",
        help="pad each expert's rows to a multiple of N (default 1)",
    )
    parser.set_defaults(run=lambda args: _run(args, parser))


def _one_of(names: tuple[str, ...]) -> str:
    first, *others = names
    return ", ".join([f"{first} (default)", *others])


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # Leaves GPU memory to other processes; JAX reads it when the backend starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    import jax_ep
    from jax_ep._cli.doctor import findings

    # Only affects the CPU platform; the test of a transport needs several ranks.
    jax.config.update("jax_num_cpu_devices", 8)

    problem = top_k_problem(args.experts, args.top_k)
    if args.ranks is not None:
        problem = problem or ranks_problem(args.experts, args.ranks)
    if problem:
        parser.error(problem)
    tokens = [-(-count // args.chunks) for count in args.tokens]
    try:
        config = jax_ep.EPConfig(
            num_experts=args.experts,
            top_k=args.top_k,
            hidden_size=args.hidden,
            max_tokens_per_rank=max(tokens),
            dtype=args.dtype,
            dispatch_format=args.format,
            combine_format=args.combine_format,
            capacity_factor=args.capacity_factor,
            recv_capacity=args.recv_capacity,
            reduce=args.reduce,
            fused_shared_expert=args.fused_shared_expert,
            expert_alignment=args.expert_alignment,
            ranks_per_node=args.ranks_per_node,
        )
    except ValueError as error:
        parser.error(str(error).removeprefix("jax_ep.EPConfig: "))
    if args.ranks_per_node is not None:
        ranks = args.ranks or findings.group_size(args.experts)
        if problem := nodes_problem(ranks, args.ranks_per_node):
            parser.error(problem)
    found = findings.silent_examine(config, args.ranks, tokens, args.chunks)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(report(found)))
    return 1 if found["problems"] else 0


def report(found: dict[str, Any]) -> list[str]:
    """Returns the findings as lines of text."""
    versions = [f"{k} {v}" for k, v in found["versions"].items() if v]
    versions = [version.replace(" ", NBSP) for version in versions]
    built = [name for name, has in found["build"].items() if has]
    lines = entry("versions", ", ".join(versions))
    lines += entry("built for", ", ".join(built))
    lines += _device_lines(found["devices"])
    matrix = found.get("peer_access")
    if matrix:
        cells = [["x" if served else "-" for served in row] for row in matrix]
        heads = [f"{i:>2}" for i in range(len(matrix))]
        lines += _cli_text.matrix("p2p between", heads, cells)
    links = found.get("links")
    if links:
        lines += _cli_text.matrix("link", [str(i) for i in range(len(links))], links)
    for name, told in found.get("transports", {}).items():
        state = "works" if told["works"] else "no"
        test = f"; test {told['test']}" if "test" in told else ""
        lines += entry(name, f"{state}: {told['why']}{test}")
    if "memory" in found:
        lines += _memory_lines(found["memory"])
        lines += _handle_lines(found["shared_handles"])
    for text in found["problems"]:
        lines += entry("PROBLEM", text)
    for text in found["advice"]:
        lines += entry("advice", text)
    return lines


def _device_lines(devices: list[dict[str, Any]]) -> list[str]:
    on_cpu = [device for device in devices if device["platform"] == "cpu"]
    lines = []
    if on_cpu:
        lines += entry("devices", f"{len(on_cpu)} virtual CPU devices")
    for device in devices[len(on_cpu) :]:
        memory = device["memory_bytes"]
        size = f", {memory / 1e9:.0f} GB for JAX" if memory else ""
        capability = device["compute_capability"]
        kind = f"{device['kind']}, compute capability {capability}{size}"
        text = f"{kind}, process {device['process']}"
        lines += entry(f"device {device['id']}", text)
    return lines


def _memory_lines(sizes: dict[str, Any]) -> list[str]:
    ranks, windows = sizes["ranks"], sizes.get("p2p_windows")
    chunks, tokens = sizes.get("chunks", 1), sizes.get("max_tokens_per_rank", 0)
    part = f" for one of {chunks} chunks of {tokens:,} tokens" if chunks > 1 else ""
    lines = entry(
        "memory",
        f"per rank, in a group of {ranks} ranks with recv_capacity "
        f"{sizes['recv_capacity']:,}{part}:",
    )
    items = [
        (sizes["dispatched_rows"], "received rows of a dispatch"),
        (sizes["expert_rows"], "rows of the experts' outputs"),
        (sizes["tables"], "tables of a dispatch"),
        (sizes["exchange"], "exchange of a call on transport collective"),
    ]
    if isinstance(windows, int):
        items.append((windows, "window of p2p, as long as a handle is open"))
    node, over_nodes = sizes.get("ranks_per_node", ranks), sizes.get("shmem_windows")
    if over_nodes is not None and ranks > node:
        items.append((over_nodes, f"window of shmem over nodes of {node} ranks"))
    indent = LABEL if _cli_text.width() >= _WIDE else 2
    shown = [_megabytes(count) for count, _ in items]
    column = max(map(len, shown))
    for size, (_, text) in zip(shown, items, strict=True):
        lines += _cli_text.fill(text, f"{'':{indent}}{size:>{column}}  ")
    if windows is None:
        why = f"no windows: p2p and shmem serve at most 32 ranks, got {ranks}"
        lines += entry("", why)
    elif isinstance(windows, str):
        lines += entry("", f"no window of p2p: {windows}")
    return lines


def _handle_lines(handles: dict[str, Any]) -> list[str]:
    """Says how much memory shared handles keep: open ones, and those of the options."""
    lines = []
    total = sum(each["bytes"] for each in handles["open"])
    for each in handles["open"]:
        lines += entry(
            "" if lines else "handles",
            f"open in this process: {_kept_by(each['bytes'])} per device, "
            f"{each['transport']} over {each['ranks']} ranks, max_tokens_per_rank "
            f"{each['max_tokens_per_rank']:,}, {each['num_experts']} experts, "
            f"hidden_size {each['hidden_size']:,}, {each['dispatch_format']}",
        )
    if len(handles["open"]) > 1:
        lines += entry("", f"{_kept_by(total)} per device in all")
    lines += entry(
        "" if lines else "handles",
        "layers of equal sizes share one, and apply_experts opens one per batch shape. "
        "It keeps, until close_shared_handles(), per device "
        + "; ".join(_kept(handles["estimate"])),
    )
    return lines


def _kept(handles: list[dict[str, Any]]) -> list[str]:
    """Says how much memory handles keep on each transport, singly and in total."""
    found = []
    for name in handles[0]["bytes"]:
        sizes = [handle["bytes"][name] for handle in handles]
        if None in sizes:
            continue
        if not any(sizes):
            found.append(f"nothing on {name}")
            continue
        told = " and ".join(
            f"{_megabytes(size)} with max_tokens_per_rank "
            f"{handle['max_tokens_per_rank']:,}"
            for size, handle in zip(sizes, handles, strict=True)
        )
        whole = f", {_megabytes(sum(sizes))} in all" if len(sizes) > 1 else ""
        found.append(f"on {name} {told}{whole}")
    return found


def _kept_by(count: int) -> str:
    return _megabytes(count) if count else "nothing"


def _megabytes(count: int) -> str:
    size = count / 1e6
    return f"{size:,.0f} MB" if size >= 10 else f"{size:.2g} MB"
