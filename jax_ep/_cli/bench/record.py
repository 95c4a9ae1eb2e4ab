"""A recorded run: facts about the run, and the workers that fill its record."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import time
from typing import Any

from jax_ep._cli.bench import process

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]


def commit(root: pathlib.Path = _PACKAGE.parent) -> str:
    """Returns the commit of the checkout `root`, or JAX_EP_COMMIT if that is set."""
    if "JAX_EP_COMMIT" in os.environ:
        return os.environ["JAX_EP_COMMIT"]
    if not (root / ".git").exists():
        return "unknown"
    found = _output("git", "-C", str(root), "rev-parse", "HEAD")
    return found[0] if found else "unknown"


def driver() -> str:
    """Returns the version of the GPUs' driver, or "unknown"."""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    found = _output("nvidia-smi", *query)
    return found[0] if found else "unknown"


def _output(*command: str) -> list[str]:
    """Returns the lines that a command prints; none if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def date() -> str:
    """Returns today's date."""
    return datetime.date.today().isoformat()


def libraries() -> dict[str, str]:
    """Returns the versions of jaxlib, and of cuDNN, cuBLAS and NCCL in JAX's wheels."""
    found = {"jaxlib": importlib.metadata.version("jaxlib")}
    for name in ("cudnn", "cublas", "nccl"):
        for package in (f"nvidia-{name}", f"nvidia-{name}-cu13", f"nvidia-{name}-cu12"):
            try:
                found[name] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    return found


def text(record: dict[str, Any]) -> str:
    """Formats a record as JSON, with a line for each entry and for each row."""
    lines = []
    for name, value in record.items():
        shown = json.dumps(value)
        if isinstance(value, list) and any(isinstance(row, dict) for row in value):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            shown = f"[\n  {rows}\n ]"
        lines.append(f" {json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Run:
    """A record that workers fill until the time is over."""

    def __init__(
        self,
        kind: str,
        command: str,
        seed: int,
        budget: float,
        root: pathlib.Path | None = None,
        **facts: Any,
    ) -> None:
        """Begins now.

        Args:
            kind: kind of the record.
            command: the command that makes the same record again.
            seed: seed of all that is drawn; it is printed.
            budget: seconds for all workers.
            root: the checkout whose commit is measured and in which workers start;
                None means the package's own.
            **facts: more entries of the record.
        """
        self._start, self._budget, self._root = time.time(), budget, root
        print(f"seed {seed}")
        self.record: dict[str, Any] = {
            "kind": kind,
            "device": "unknown",
            "count": 0,
            "driver": driver(),
            "libraries": libraries(),
            "commit": commit(root or _PACKAGE.parent),
            "date": date(),
            "seed": seed,
            "command": command,
            **facts,
            "results": [],
            "problems": [],
        }

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return round(time.time() - self._start, 1)

    def work(
        self,
        name: str,
        flags: str,
        spec: dict[str, Any],
        share: float = 1.0,
        module: str = "jax_ep._cli.bench.worker",
        key: str = "results",
        **facts: Any,
    ) -> str:
        """Runs a worker, which has until `share` of the budget is used.

        Args:
            name: what is timed, to print as progress.
            flags: XLA's flags.
            spec: the worker's specification.
            share: share of the budget.
            module: the worker.
            key: the list of the record that takes its rows.
            **facts: more entries of each row.

        Returns:
            What went wrong, or ""; also "" if XLA does not know the flags.
        """
        print(f"timing {name}, after {self.seconds:.0f} s", flush=True)
        spec = spec | {"deadline": self._start + share * self._budget}
        rows, problem = process.start(flags, spec, module, self._root)
        for row in rows:
            if "device" in row:
                self.record |= row
            else:
                self.record[key].append(row | facts)
        self.record["seconds"] = self.seconds
        if problem and not rows and not process.understood(flags):
            # They belong to an experiment that this version of XLA does not have.
            print(f"this XLA does not know {flags}: nothing is timed with it")
            return ""
        return problem
