"""Programs that measure jax_ep. Run them in the root of a clone, with jax_ep installed:

    python -m benchmarks.calls.p2p --quick

`python -m` puts the root first on the path, and there `import jax_ep` would find sources
without compiled modules. Behind the other entries an installed jax_ep comes first.
"""

import pathlib
import sys

if pathlib.Path(sys.path[0]).resolve() == pathlib.Path(__file__).resolve().parent.parent:
    sys.path.append(sys.path.pop(0))
