"""Runs the command `jax-ep` as `python -m jax_ep`."""

import sys

from jax_ep._cli.main import main

sys.exit(main())
