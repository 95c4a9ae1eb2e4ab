"""The model of docs/scale.md against draws, hand calculations, records and layouts."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest

from support import ROOT

DOCS = ROOT / "docs"


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
    tokens, kind = 1000, model.dispatch()
    plain = model.direct(16, tokens, kind)
    assert plain.far_bytes * 7 == pytest.approx(plain.near_bytes * 8)
    forwarded = model.hierarchical(16, tokens, kind)
    # Nearly every token has an expert in the other half.
    assert forwarded.far_bytes == pytest.approx(tokens * 14464, rel=0.01)
    assert forwarded.far_bytes < plain.far_bytes
    # Shares as puts and signals, then flags and counts; a bundle has those of all
    # ranks, and a table.
    assert plain.requests == 8 * (8 + 8 + 2)
    assert forwarded.requests == 8 + 8 + 1 + 8 * 2
    # What arrives over the network for other ranks of the node is forwarded.
    assert forwarded.near_bytes == pytest.approx(2 * plain.near_bytes)
    # A rank has 8 of 128 experts; `missed` is how likely all 8 ids of a token miss it.
    missed = math.prod((120 - i) / (128 - i) for i in range(8))
    each = tokens * (1 - missed) * 14464
    assert plain.near_bytes == pytest.approx(7 * each)
    assert plain.steps == {
        "first half": pytest.approx(7 * each / 336e3),
        "puts": pytest.approx(8 * each / 45e3),
        "second half": pytest.approx((16 * each + 8000 * 14336) / 3442e3),
    }
    assert forwarded.steps == {
        "first half": pytest.approx(7 * each / 336e3),
        "gather": pytest.approx(2 * forwarded.far_bytes / 3442e3),
        "puts": pytest.approx(forwarded.far_bytes / 45e3),
        "relay": pytest.approx(7 * each / 336e3),
        "second half": pytest.approx((16 * each + 8000 * 14336) / 3442e3),
    }
    assert plain.us == pytest.approx(sum(plain.steps.values()) + 15 + 14 + 8)
    assert plain.overlapped_us == pytest.approx(plain.steps["puts"] + 15 + 14 + 8)


def test_model_is_near_what_was_recorded_over_nvlink(model):
    found = model.recorded()
    assert {(op, tokens) for op, tokens, _ in found} >= {
        (op, tokens) for op in ("dispatch", "combine") for tokens in (128, 4096)
    }
    for op, tokens, us in found:
        assert model.over_nvlink(op, tokens).us == pytest.approx(us, rel=0.1)


def test_halves_inside_a_node_are_near_what_was_recorded(model):
    # Nothing is fitted to whole halves; those of 128 tokens also wait for each other.
    record = sorted((ROOT / "benchmarks" / "results").glob("options-h200x2-*.json"))[-1]
    rows = json.loads(record.read_text())["results"]
    halves = [row for row in rows if row["option"] == "halves"]
    assert len(halves) == 6
    for row in halves:
        load = model.over_nvlink(row["op"], row["tokens"], per_node=2)
        assert load.us == pytest.approx(row["us"], rel=0.25)


def ratio(model, ranks, tokens):
    kind = model.dispatch()
    plain = model.direct(ranks, tokens, kind)
    forwarded = model.hierarchical(ranks, tokens, kind)
    return plain.us / forwarded.us, plain.overlapped_us / forwarded.overlapped_us


def test_conclusions_of_the_page(model, monkeypatch):
    for tokens in (128, 4096):
        assert all(ratio(model, ranks, tokens)[0] > 1.1 for ranks in (16, 32, 64))
        assert ratio(model, 128, tokens)[0] == pytest.approx(1, abs=0.05)
        assert all(ratio(model, ranks, tokens)[1] > 1 for ranks in model.RANKS)
    for ranks in (256, 512, 1024):
        assert 0.89 < ratio(model, ranks, 4096)[0] < 0.96
        assert ratio(model, ranks, 128)[0] > 1.2
    text = " ".join((DOCS / "scale.md").read_text().split())
    with monkeypatch.context() as patch:
        patch.setattr(model, "NETWORK", 90)
        long, short = (ratio(model, 32, tokens)[0] for tokens in (4096, 128))
        said = f"({long:.2f} times for long calls of 32 ranks, {short:.2f} for short"
        assert said in text
    with monkeypatch.context() as patch:
        patch.setattr(model, "REQUEST", 0)
        assert ratio(model, 256, 128)[0] < 1
    forwarded = model.hierarchical(1024, 4096, model.dispatch())
    beside = forwarded.us - forwarded.steps["relay"]
    plain = model.direct(1024, 4096, model.dispatch())
    assert plain.us / beside == pytest.approx(1, abs=0.01)


def test_page_says_the_rates(model):
    text = (DOCS / "scale.md").read_text()
    for name, (value, unit) in model.RATES.items():
        assert f"\n| `{name}` | {value:g} {unit} |" in text


def test_message_sizes_are_those_of_the_wire(model):
    # docs/protocol.md: 14464 bytes of payload, tables and padding; a row has 14336.
    assert model.dispatch().message == 14464
    assert model.combine().message == 14336


_SIZES = """
#include <cstdio>
#include "ffi/window_sizes.h"
#include "protocol/bundle.h"
using namespace jax_ep;
int main() {
  for (long long ranks : {16, 32, 1024}) for (long long tokens : {128, 4096})
    for (long long pending : {0, 2}) {
      WindowSizes sizes;
      if (!ffi_layer::SizesOf({"bf16", 7168, 2, 2, tokens, tokens, tokens, 8, ranks, 8,
                               pending}, sizes)) return 1;
      const auto window = WindowLayout::Of(sizes);
      const auto far = InternodeLayout::Of(window, sizes);
      const auto all = BundleLayout::Of(far, window, sizes, ranks / 8, 8);
      std::printf("%lld %lld %lld %lld\\n", ranks, tokens, pending,
                  static_cast<long long>(all.bytes));
    }
}
"""


def test_memory_is_that_of_the_layout(model, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source, program = tmp_path / "sizes.cc", tmp_path / "sizes"
    source.write_text(_SIZES)
    words = [compiler, "-std=c++20", "-I", str(ROOT / "xla_ffi"), str(source)]
    subprocess.run([*words, "-o", str(program)], check=True)
    out = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    lines = out.stdout.splitlines()
    assert len(lines) == 12
    for line in lines:
        *case, size = map(int, line.split())
        assert model.block_bytes(*case) == pytest.approx(size, rel=1e-3)
