"""The command `jax-ep`; each subcommand is a function that adds its parser."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax_ep
from jax_ep._cli.bench import command as bench_command
from jax_ep._cli.doctor import command as doctor_command
from jax_ep._cli.text import Parser, complain
from jax_ep._cli.values import at_least

GOOD, FAILED, USAGE = 0, 1, 2

_ABOUT = "Expert-parallel dispatch and combine for JAX: try it out."
_ENDING = """\
examples:
  jax-ep doctor  what this machine can do
  jax-ep demo --quick  train a small model on it
  jax-ep bench --quick  time it
  jax-ep doctor --help  all options of a command

exit codes: 0 good, 1 what was asked for failed, 2 usage, 130 interrupted
"""

_DEMO_TEXT = """\
Trains a small byte-level mixture-of-experts language model on the sources of Python's
standard library, expert-parallel over every GPU present, or over 8 virtual CPU devices.
Checks its first 20 losses against the same model computed densely on one device without
jax_ep, and draws the loss and the experts' load. Takes about a minute on two CPU cores.
"""

_DEMO_EXAMPLES = """\
examples:
  jax-ep demo  the whole run, picture in ./jax_ep_demo.png
  jax-ep demo --quick --no-plot  a small model for a few steps
  jax-ep demo --devices 4 --steps 500  longer, on four devices
  JAX_PLATFORMS=cpu jax-ep demo  on the CPU, whatever GPUs there are

exit codes: 0 good, 1 the check failed or the demo could not run, 2 usage,
130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    Without arguments it prints its help and succeeds. Usage errors raise SystemExit
    with code 2, as argparse does.
    """
    parser = Parser(prog="jax-ep", description=_ABOUT, epilog=_ENDING)
    parser.add_argument(
        "--version", action="version", version=f"jax-ep {jax_ep.__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_demo, doctor_command.add, bench_command.add):
        add(commands)
    asked = sys.argv[1:] if argv is None else argv
    try:
        try:
            args = parser.parse_args(asked or ["--help"])
            code = args.run(args)
        except SystemExit:  # also after --help
            _flush()
            raise
        _flush()
    except KeyboardInterrupt:
        print("\njax-ep: interrupted", file=sys.stderr)
        return 130
    except OSError:
        lost = _lost_output()
        if lost is None:
            raise
        return lost
    return code


def _flush() -> None:
    if sys.stdout is not None:  # None if the parent process closed it
        sys.stdout.flush()


def _lost_output() -> int | None:
    """Returns the exit code if standard output fails, or None if it works."""
    try:
        # Buffers may be empty after the failed write, so write something.
        print(flush=True)
    except OSError as error:
        # Python flushes again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE  # as with `| head`
        complain(
            f"jax-ep: standard output cannot be written: {error.strerror or error}; "
            "make room, or redirect it"
        )
        return FAILED
    return None


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small mixture-of-experts model here and check it",
        description=_DEMO_TEXT,
        epilog=_DEMO_EXAMPLES,
    )
    parser.add_argument(
        "--steps", type=at_least(1), metavar="N", help="training steps (default 200)"
    )
    parser.add_argument(
        "--devices",
        type=at_least(1),
        metavar="N",
        help="how many devices (default: every GPU, or 8 virtual CPU devices)",
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="seed of parameters and batches (default 0)",
    )
    parser.add_argument(
        "--out",
        default="./jax_ep_demo.png",
        metavar="FILE",
        help="the picture: .png, .pdf or .svg (default ./jax_ep_demo.png)",
    )
    parser.add_argument("--no-plot", action="store_true", help="draw no picture")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model and 30 steps"
    )
    parser.set_defaults(run=lambda args: _demo(args, parser))


def _demo(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from jax_ep._cli.demo import corpus, devices, run
    from jax_ep._stats import picture

    # Checked now rather than after a minute of training.
    if not args.no_plot and (problem := picture.problem(args.out)):
        parser.error(f"--out must be {problem}, got {args.out!r}")
    options = run.Options(
        steps=args.steps,
        devices=args.devices,
        seed=args.seed,
        out=args.out,
        plot=not args.no_plot,
        quick=args.quick,
    )
    try:
        return run.run(options)
    except devices.TooManyDevicesError as error:
        parser.error(str(error))
    except (corpus.CorpusError, devices.NoBackendError) as error:
        complain(f"jax-ep demo: {error}")
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
