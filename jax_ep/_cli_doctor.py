"""The subcommand `jax-ep doctor`."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

_TEXT = """\
Says what this machine can do with jax_ep and why: devices, which of them reach each
other's memory and over what link, versions, which transports work (each is tried with a
few tokens), what a layer would take of memory, and advice.
"""

_EXAMPLES = """\
examples:
  jax-ep doctor
  jax-ep doctor --experts 64 --hidden 4096 --tokens 8192 --capacity-factor 1.25
  jax-ep doctor --ranks 32              memory of a group larger than this machine
  jax-ep doctor --ranks 32 --ranks-per-node 4         ... over nodes of 4 GPUs
  jax-ep doctor --json | jq .transports

exit codes: 0 every transport that is served here passed its test, 1 one did not or JAX
starts no backend, 2 usage, 130 interrupted
"""


def add(commands: Any) -> None:
    """Adds the subcommand's parser."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do, and why not more",
        description=_TEXT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    layer = parser.add_argument_group("the layer whose memory is counted")
    for name, default, text in (
        ("experts", 256, "num_experts"),
        ("top-k", 8, "top_k"),
        ("hidden", 7168, "hidden_size"),
        ("tokens", 4096, "max_tokens_per_rank"),
    ):
        layer.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{text} (default {default})",
        )
    layer.add_argument("--ranks", type=int, metavar="N", help="of the EP group")
    layer.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="of shmem (default: every device here)",
    )
    layer.add_argument("--dtype", default="bfloat16", help="default bfloat16")
    layer.add_argument("--format", default="bf16", help="dispatch_format, default bf16")
    layer.add_argument("--combine-format", help="combine_format, default none")
    capacity = layer.add_mutually_exclusive_group()
    capacity.add_argument("--capacity-factor", type=float, metavar="X")
    capacity.add_argument("--recv-capacity", type=int, metavar="N")
    layer.add_argument("--reduce", default="rank", help="rank (default), source, none")
    layer.add_argument("--fused-shared-expert", action="store_true")
    layer.add_argument("--expert-alignment", type=int, default=1, metavar="N")
    parser.set_defaults(run=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # A look should leave room for others on a GPU; read when the backend starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    import jax_ep
    from jax_ep import _doctor

    # Changes the CPU platform alone; the test of a transport wants several ranks.
    jax.config.update("jax_num_cpu_devices", 8)

    try:
        config = jax_ep.EPConfig(
            num_experts=args.experts,
            top_k=args.top_k,
            hidden_size=args.hidden,
            max_tokens_per_rank=args.tokens,
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
    if args.ranks is not None and (args.ranks < 1 or args.experts % args.ranks):
        parser.error(f"--ranks must divide --experts {args.experts}, got {args.ranks}")
    found = _doctor.silent_examine(config, args.ranks)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(report(found)))
    return 1 if found["problems"] else 0


def report(found: dict[str, Any]) -> list[str]:
    """The findings as text."""
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items() if v)
    built = ", ".join(name for name, has in found["build"].items() if has)
    lines = [f"versions    {versions}", f"built for   {built}"]
    on_cpu = [device for device in found["devices"] if device["platform"] == "cpu"]
    if on_cpu:
        lines.append(f"devices     {len(on_cpu)} virtual CPU devices")
    for device in found["devices"][len(on_cpu) :]:
        memory = device["memory_bytes"]
        size = f", {memory / 1e9:.0f} GB for JAX" if memory else ""
        capability = device["compute_capability"]
        kind = f"{device['kind']}, compute capability {capability}{size}"
        lines.append(f"device {device['id']:<4} {kind}, process {device['process']}")
    matrix = found.get("peer_access")
    if matrix:
        lines.append("p2p between " + " ".join(f"{i:>2}" for i in range(len(matrix))))
        for index, row in enumerate(matrix):
            cells = " ".join(" x" if served else " -" for served in row)
            lines.append(f"{index:>11} {cells}")
    links = found.get("links")
    if links:
        width = max(len(kind) for row in links for kind in row)
        heads = " ".join(f"{i:>{width}}" for i in range(len(links)))
        lines.append(f"link        {heads}")
        for index, row in enumerate(links):
            lines.append(f"{index:>11} " + " ".join(f"{kind:>{width}}" for kind in row))
    for name, entry in found.get("transports", {}).items():
        state = "works" if entry["works"] else "no"
        test = f"; test {entry['test']}" if "test" in entry else ""
        lines.append(f"{name:<11} {state}: {entry['why']}{test}")
    if "memory" in found:
        lines += _memory_lines(found["memory"])
    lines += [f"PROBLEM     {text}" for text in found["problems"]]
    lines += [f"advice      {text}" for text in found["advice"]]
    return lines


def _memory_lines(sizes: dict[str, Any]) -> list[str]:
    def megabytes(name: str) -> str:
        return f"{sizes[name] / 1e6:,.0f} MB"

    lines = [
        f"memory      of one call on each of {sizes['ranks']} ranks, "
        f"recv_capacity {sizes['recv_capacity']:,}:",
        f"            received rows {megabytes('dispatched_rows')}, expert rows "
        f"{megabytes('expert_rows')}, tables {megabytes('tables')}, exchange "
        f"{megabytes('exchange')}",
    ]
    windows = sizes.get("p2p_windows")
    if windows is not None:
        shown = windows if isinstance(windows, str) else f"{windows / 1e6:,.0f} MB"
        lines.append(f"            window of p2p, as long as a handle is open: {shown}")
    node = sizes.get("ranks_per_node", sizes["ranks"])
    if sizes.get("shmem_windows") is not None and sizes["ranks"] > node:
        lines.append(
            f"            window of shmem over nodes of {node} ranks, likewise: "
            f"{megabytes('shmem_windows')}"
        )
    return lines
