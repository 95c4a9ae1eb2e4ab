"""What the processes that measure have in common: the mesh, and rows as they come."""

import contextlib
import json
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ep import _cli_text


def _say(text):
    print(text, flush=True)


def ep_mesh():
    return Mesh(np.array(jax.devices()), ("ep",), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def reporting(path, line, say=_say):
    """A function that writes a row to `path` at once, and says what `line` makes of it.

    Nothing is said of a row of which `line` makes nothing. The first row names the
    devices. Rows outlive a process that hangs.
    """
    start = time.perf_counter()
    devices = jax.devices()
    kind, count = devices[0].device_kind, len(devices)
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
