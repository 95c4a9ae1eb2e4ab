"""`python -m jax_ep` is the command `jax-ep`."""

import sys

from jax_ep._cli.main import main

sys.exit(main())
