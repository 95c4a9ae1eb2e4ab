"""Type annotations agree with what happens; `.ci/run lint` runs the type checkers."""

from __future__ import annotations

import dataclasses
import pickle
import runpy
import typing

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import formats
from jax_ep._core import literals
from jax_ep._native.loader import cpu as native
from support import TESTS, helpers


def test_formats_are_those_of_the_native_module():
    found = [entry["name"] for entry in native.formats()]
    assert list(typing.get_args(literals.Format)) == found, (
        "a format needs a name in jax_ep/_core/literals.py: docs/extending.md"
    )
    assert typing.get_args(literals.WireFormat) == formats.wire_names()


@pytest.mark.parametrize("field", ["dtype", "combine_dtype"])
@pytest.mark.parametrize(
    "given",
    [jnp.float32, np.float32, jnp.dtype("float32"), "float32"],
)
def test_dtypes_are_kept_as_names(field, given):
    """However a dtype is given, its name is kept, so that equal configs are equal."""
    sizes = vars(helpers.make_config()) | {"dtype": "bfloat16"}
    config = jax_ep.EPConfig(**sizes | {field: given})
    assert vars(config)[field] == getattr(config, field) == "float32"
    for same in (
        jax_ep.EPConfig(**sizes | {field: "float32"}),
        jax_ep.EPConfig(**vars(config)),
        dataclasses.replace(config),
        pickle.loads(pickle.dumps(config)),
    ):
        assert (same, hash(same)) == (config, hash(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, "float16")


@pytest.mark.parametrize("name", ["training", "layers"])
def test_typed_programs_run(name, quick_compiles):
    if name == "layers":
        pytest.importorskip("flax")
    helpers.make_mesh(2)  # skips if there are fewer devices
    program = TESTS / "typing" / f"{name}.py"
    runpy.run_path(str(program), run_name="__main__")
