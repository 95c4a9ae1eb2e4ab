"""What workers have in common: their arguments, the mesh, and rows as they come."""

import contextlib
import json
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ep._cli import text as _cli_text


def _say(text):
    print(text, flush=True)


def given(arguments):
    """The specification and the output's path; None stands for the command line's."""
    specification, output = sys.argv[1:] if arguments is None else arguments
    return json.loads(specification), output


def ep_mesh(count=None):
    """All devices, or the first `count`, as one axis."""
    devices = np.array(jax.devices()[: count or None])
    return Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def reporting(path, line, mesh, say=_say):
    """A function that writes a row to `path` at once, and says what `line` makes of it.

    Nothing is said of a row of which `line` makes nothing. The first row names the
    devices. Rows outlive a process that hangs.
    """
    start = time.perf_counter()
    kind, count = mesh.devices.flat[0].device_kind, mesh.size
    with open(path, "a") as output:

        def write(row):
            output.write(json.dumps(row) + "\n")
            output.flush()

        def emit(row):
            write(row)
            if text := line(row):
                passed = f"  {time.perf_counter() - start:5.1f} s  "
                say("\n".join(_cli_text.fit(passed + text, len(passed))))

        write({"device": kind, "count": count, "jax": jax.__version__})
        yield emit
