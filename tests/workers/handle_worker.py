"""One process of test_handle.py: dispatches once and reports as a line of JSON."""

from __future__ import annotations

import gc
import json
import sys
import weakref

import jax_ep

# isort: split
import jax
import numpy as np

from support import helpers

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def main(mode: str) -> dict:
    """Runs `mode`: plain, shifted, twin, other or collect.

    shifted: opens other handles first; twin: opens a second, equal one; other: uses a
    config that changes no shape.
    """
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if "cache_hits" in event else None
    )
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    changes = {"timeout_s": 7.0, "num_sms": 3} if mode == "other" else {}
    config = helpers.make_config(hidden_size=40, **changes)
    if mode == "shifted":
        for hidden in (8, 16, 48):
            helpers.make_ep(mesh, helpers.make_config(hidden_size=hidden))
    if mode == "twin":
        jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT)
    ep = jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT)
    inputs = helpers.make_inputs(np.random.default_rng(0), config, mesh.size)
    hits.clear()  # do not count init's own programs
    d = helpers.run_dispatch(ep, mesh, inputs)
    found = len(hits)
    helpers.assert_dispatched(config, d, inputs)
    result = {"key": d.route.key, "right": True, "hits": found}
    if mode == "collect":
        seen = weakref.ref(ep)
        del ep, d
        helpers.dispatch_fn.cache_clear()
        jax.clear_caches()
        gc.collect()
        result["collected"] = seen() is None
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
