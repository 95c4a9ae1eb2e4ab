"""The model of docs/scale.md: its expectations against draws, its sums by hand."""

import pathlib
import sys

import numpy as np
import pytest

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import scale_model

    yield scale_model
    sys.modules.pop("scale_model")


@pytest.mark.parametrize(("parts", "experts"), [(2, 128), (16, 128), (64, 512)])
def test_tokens_touch_as_many_parts_as_draws_say(model, parts, experts):
    rng = np.random.default_rng(parts)
    drawn = [
        len(set(rng.choice(experts, model.TOP_K, replace=False) // (experts // parts)))
        for _ in range(4000)
    ]
    assert np.mean(drawn) == pytest.approx(model.touched(parts, experts), rel=0.02)


def test_two_nodes_by_hand(model):
    tokens, size = 1000, 10_000
    plain = model.direct(16, tokens, size)
    assert plain.far_bytes * 7 == pytest.approx(plain.near_bytes * 8)
    forwarded = model.hierarchical(16, tokens, size)
    # Nearly every token has an expert among half of them.
    assert forwarded.far_bytes == pytest.approx(tokens / 2 * 2 * size, rel=0.01)
    assert forwarded.far_bytes < plain.far_bytes
    assert (plain.far_messages, forwarded.far_messages) == (8, 1)
    # What comes over the network for the others of the node is sent on.
    assert forwarded.near_bytes == pytest.approx(2 * plain.near_bytes)
    wire = forwarded.far_bytes / (model.NETWORK.value * 1e3)
    assert wire < forwarded.us < wire + 50


def test_message_sizes_are_those_of_the_wire(model):
    # docs/protocol.md: 14464 of payload, tables and padding; 14336 of a row.
    assert model.dispatch_bytes("bf16") == 14464
    assert model.combine_bytes() == 14336
