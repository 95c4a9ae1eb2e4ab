"""Programs that measure jax_ep. Run them in the root of a clone, with jax_ep installed:

    python -m benchmarks.calls.p2p --quick

`python -m` puts the root first on the path, where `import jax_ep` would find sources
without compiled modules. As the last entry it lets an installed jax_ep come first.
"""

import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
if pathlib.Path(sys.path[0]).resolve() == _ROOT:
    sys.path.append(sys.path.pop(0))
