"""Runs the command jax-ep in its own process; makes records as its bench does."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import jax_ep
from support.launch import run_to_end


def command(*arguments):
    package = str(pathlib.Path(jax_ep.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *sys.path])}
    return run_to_end([sys.executable, "-m", "jax_ep", *arguments], env=environment)


def record(**times):
    rows = [
        {
            "op": op,
            "tokens": 128,
            "routing": "uniform",
            "transport": "p2p",
            "num_sms": None,
            "zero_tail": False,
            "us": us,
        }
        for op, us in times.items()
    ]
    return {
        "kind": "p2p",
        "device": "A",
        "count": 4,
        "jax": "0.11.2",
        "date": "2026-01-01",
        "commit": "0123456789abcdef",
        "results": rows,
    }


def write(path, content):
    path.write_text(json.dumps(content))
    return str(path)
