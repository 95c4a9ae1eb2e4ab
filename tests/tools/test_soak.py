"""soak.py: right calls pass its checks, and each kind of wrong one fails."""

from __future__ import annotations

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ep
from benchmarks.soak import codes as soak_codes
from benchmarks.soak import program as soak_program
from benchmarks.soak import run as soak_run
from benchmarks.soak import soak
from support import helpers, quantizer

pytestmark = pytest.mark.usefixtures("quick_compiles")

SECONDS = 3.0
right_dispatch, right_combine = jax_ep.dispatch, jax_ep.combine

CHANGES = {
    "tokens": lambda a: a.at[0].add(1),
    "src_info": lambda a: jnp.roll(a, 1, axis=0),
    "router_weights": lambda a: a * 2,
    "row_offsets": lambda a: a + 1,
    "group_sizes": lambda a: a + 1,
    "expert_counts": lambda a: a + 1,
    "expert_ids": lambda a: a + 1,
    "num_dropped": lambda a: a - 1,
    "num_invalid": lambda a: a + 1,
}


def wrong_dispatch(*args, **options):
    """Every field of the result is a little off."""
    d = right_dispatch(*args, **options)
    wrong = {field: change(getattr(d, field)) for field, change in CHANGES.items()}
    if d.scales is not None:
        wrong["scales"] = jnp.roll(d.scales, 1, axis=0)
    return dataclasses.replace(d, **wrong)


def wrong_combine(ep, rows, route, weights, residual):
    """Returns each row in the place of the next."""
    return right_combine(
        ep, jnp.roll(rows, 1, axis=0), route, weights, residual=residual
    )


def run(monkeypatch, folder, n, calls=1, minutes=None, options=()):
    """Soaks with the program of size n, and with each option's program."""
    monkeypatch.setattr(soak, "REDUCE_AT", n)
    args = argparse.Namespace(
        calls=calls,
        seed=5,
        minutes=minutes,
        devices=helpers.some_ranks(2),
        transport=helpers.TRANSPORT,
        folder=folder,
        options=list(options),
        sizes=[n],
        option_sizes=[20],
        threads=2,
        compiling=True,
        carried=False,
    )
    status = soak.run(args)
    (written,) = folder.glob("soak-*.json")
    return status, json.loads(written.read_text())


@pytest.mark.exclusive
@pytest.mark.slow
def test_right_calls_pass(monkeypatch, tmp_path) -> None:
    """For some seconds two threads, one with an option, run beside one that compiles.

    test_benchmarks.py has the other options.
    """
    names = ("fp8",)
    status, record = run(monkeypatch, tmp_path, 300, 10**6, SECONDS / 60, names)
    assert record["failures"] == {}
    assert record["error"] is None
    assert status == 0
    assert record["options"] == list(names)
    assert record["threads"] == 2
    kinds = len(soak_run.new_programs(jax.devices()))
    assert record["compilations"] > kinds * soak_run.COMPILED_SHAPES
    assert record["seconds"] >= SECONDS
    # As many launches as time allows, at least one per thread, with this many calls.
    assert record["launches"] >= 2
    assert record["calls"] >= 5 * soak.STEPS * record["launches"]
    assert record["checks"] > record["calls"]
    # The drawn routing covers all cases.
    assert min(record["rows"], record["dropped"], record["invalid"]) > 0


@pytest.mark.parametrize("name", soak.OPTIONS)
def test_every_option_has_a_config(name) -> None:
    _, b = soak.configs(4)
    assert soak.changed(b, name) != b


def test_every_format_is_soaked() -> None:
    configs = soak.configs(4)
    configs = (*configs, *(soak.changed(configs[1], name) for name in soak.OPTIONS))
    assert {c.dispatch_format for c in configs} == set(jax_ep.formats.names())
    for field in ("combine_format", "grad_format"):
        assert {getattr(c, field) for c in configs} == {None, "fp8_block128"}
    assert {c.reduce for c in configs} == {"rank", "source", "none"}


CODED = [n for n in soak.OPTIONS if "dispatch_format" in soak.OPTIONS[n][0]]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CODED)
def test_expected_codes_are_the_oracles(name) -> None:
    """The drawn tokens are exact in the format, and their codes are read right."""
    config = soak.changed(soak.configs(2)[1], name)
    kind = config.dispatch_format
    drawn = soak_program.draw(config, 2, 50, soak_program.random_key(3)).tokens
    scale = soak_codes.INPUT_SCALE
    payload, scales = quantizer.quantize(drawn, kind, scale)
    values = quantizer.dequantize(payload, scales, kind, scale)
    np.testing.assert_array_equal(values, np.asarray(drawn, np.float32))
    assert {0.0, values.max(), values.min()} < set(np.unique(values))
    found = soak_codes.read(kind, jnp.asarray(payload), jnp.asarray(scales))
    codes = payload
    if kind in soak_codes.FOUR_BITS:
        codes = quantizer.unpacked(payload).view(ml_dtypes.float4_e2m1fn)
    for got, wanted, read in zip(
        soak_codes.encode(kind, drawn), (codes, scales), found, strict=True
    ):
        np.testing.assert_array_equal(got, wanted.astype(np.float32))
        np.testing.assert_array_equal(read, got)


@pytest.mark.slow
def test_each_wrong_result_is_counted(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(jax_ep, "dispatch", wrong_dispatch)
    monkeypatch.setattr(jax_ep, "combine", wrong_combine)
    status, record = run(monkeypatch, tmp_path, 40, options=["nvfp4"])
    assert status == 1
    derived = {"combine", "psum", "d_rows", "d_row_weights", "d_tokens", "d_weights"}
    derived |= {"codes", "scales"}
    assert set(CHANGES) | derived == set(record["failures"])
    assert record["first_failure"]["elements"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"heap_start": None}, None),
        ({"free_memory_end": 2**40 - 2**27}, "a device has 134217728 bytes less"),
        ({"free_memory_end": 2**40 - 2**27, "device": "cpu"}, None),
        ({"free_memory_end": 2**40 - 2**27, "compilations": 72}, None),
        ({"free_memory_end": 2**40 - 2**27, "compilations": 71}, "a device has"),
        ({"heap_end": 2**25}, "heap has 33554432 bytes more after 100 launches"),
        ({"heap_end": 2**25, "launches": 10**5}, None),
    ],
)
def test_lost_memory_fails(changes, words):
    record = {"device": "H200", "free_memory_start": 2**40, "free_memory_end": 2**40}
    record |= {"heap_start": 0, "heap_end": 0, "launches": 300, "settled": [200, 8]}
    record["compilations"] = 8
    found = soak_run.grown(record | changes)
    assert words in found if words else found is None
