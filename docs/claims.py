"""Lists the figures that README.md and docs quote from records outside generated parts.

tests/tools/test_claims.py compares them. A claim names a record of benchmarks/results,
quotes the text with `{}` in place of each figure, and says which numbers of the record
these are (claim_figures.py). A `*` in the name takes the newest such record, so a newer
one that disagrees fails the test: then correct the text, or name the record that it
quotes and say its date there.
"""

import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

# For `benchmarks`. It comes last, since the root's jax_ep has no compiled modules.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import claim_figures as of
from claim_figures import BIG, BIG_64, FP8, MID, NVFP4, OTHERS

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = r"(?<![\d.,])(-?\d+(?:,\d{3})*(?:\.\d+)?)(?!\d)"


class Claim(NamedTuple):
    records: str  # names in benchmarks/results without .json, separated by spaces
    text: str  # each {} is a figure, each space any white space
    figures: Callable[..., Iterable[float]]

    def pattern(self):
        """Returns a regular expression with a group for each figure."""
        parts = (r"\s+".join(map(re.escape, part.split(" "))) for part in self.parts())
        return re.compile(FIGURE.join(parts))

    def parts(self):
        return self.text.split("{}")

    def paths(self):
        """Yields the newest file that matches each name."""
        for name in self.records.split():
            found = sorted(RESULTS.glob(f"{name}.json"), key=date_of)
            if not found:
                raise ValueError(f"no record {name}")
            yield found[-1]

    def numbers(self):
        return list(self.figures(*(json.loads(p.read_text()) for p in self.paths())))


def date_of(path):
    return path.stem[-10:]


def is_newest(path):
    """Whether no record of the same kind has a later date."""
    kind = path.stem.partition("-")[0]
    return date_of(path) == max(map(date_of, RESULTS.glob(f"{kind}-*.json")))


def prose(page):
    """Returns a page without its generated parts."""
    text = (ROOT / page).read_text()
    return re.sub(r"<!-- generated: .*?<!-- end generated -->", "", text, flags=re.S)


LAYERS = "layer-h200x2-*"
DECODE = "decode-h200x1-*"
TRAINED, TRAINED_ON_CPU = "train_fp8-h200x2-*", "train_fp8-cpux8-*"
CALLS = "p2p-h200x4-*"
FORMATS, FORMATS_OF_2 = "formats-h200x4-*", "formats-h200x2-*"
OPTIONS = "options-h200x2-*"
OVERLAP = "overlap-h200x2-*"
GROUPED, EXPERTS = "grouped-h200x1-*", "experts-h200x1-*"
PROFILE, TRIED = "profile-h200x1-*", "tried-matmuls-h200x1-*"
MATMULS = "matmuls-h200x1-* cutlass-h200x1-*"
SMS = "kernels-h200x4-*"
NODES = "nodes-h200x2-*"
LIMITS = "limits-h200x4-*"

PAGES = {
    "README.md": [
        Claim(
            CALLS,
            "large batches run at over {}% of the link's speed",
            lambda record: [math.floor(min(of.of_peak(record)) / 10) * 10],
        ),
    ],
    "docs/fp8.md": [
        Claim(LAYERS, "| forward | {} | {} |", of.of_bf16("forward")),
        Claim(LAYERS, "| forward and backward | {} | {} |", of.of_bf16("both")),
        Claim(
            LAYERS,
            "| a step of 8 microbatches, with making the codes | {} | {} |",
            of.of_bf16("step", microbatches=8),
        ),
        Claim(
            LAYERS,
            "| a step of 1 microbatch, with making the codes | {} | {} |",
            of.of_bf16("step", microbatches=1),
        ),
        Claim(
            DECODE,
            "bfloat16 takes {} times as long as reading its weights, `fp8_block128` {} "
            'times as long as reading half the bytes, and "mxfp4" {} times',
            of.joined(of.of_read("bf16"), of.of_read("fp8"), of.of_read("mxfp4")),
        ),
        Claim(
            TRAINED_ON_CPU, "A single pair of runs ends up to {}% apart", of.most_apart
        ),
        Claim(
            TRAINED,
            "the mean final loss in fp8 is {}% below that in bfloat16 on 2 H200s",
            of.below_bf16,
        ),
        Claim(TRAINED_ON_CPU, "and {}% above it on 8 CPU devices", of.above_bf16),
        Claim(TRAINED, "The lowest cosines of gradients are {} and", of.least_cosine),
        Claim(TRAINED_ON_CPU, "of gradients are 0.956 and {}.", of.least_cosine),
        Claim(
            TRAINED,
            'the same loss within {}%; with "mxfp4" its loss is {}% higher',
            of.served,
        ),
        Claim(
            TRAINED_ON_CPU, "Single pairs of longer runs ended up to {}%", of.most_apart
        ),
        Claim(
            TRAINED_ON_CPU, "fp8's mean over six seeds was {}% higher", of.above_bf16
        ),
    ],
    "docs/performance.md": [
        Claim(CALLS, "| 1 | {} us | {} us |", of.both_ops(1)),
        Claim(CALLS, "| 128 | {} us | {} us |", of.both_ops(128)),
        Claim(CALLS, "| 4096 | {} us | {} us |", of.both_ops(4096)),
        Claim(CALLS, "which they use at {}% and {}% of its speed", of.of_peak),
        Claim(
            FORMATS,
            "a dispatch takes {} times as long in `fp8_block128` and {} times in "
            "`nvfp4`",
            of.ratio("dispatch", 4096, FP8, NVFP4),
        ),
        Claim(NODES, "(the times differ by less than {}%)", of.one_process),
        Claim(
            OVERLAP,
            "calls of up to 32 tokens take {} to {} times as long as outside",
            of.graphs_over_none,
        ),
        Claim(
            CALLS,
            "a dispatch of T = 4096 then takes {} us on 4 GPUs instead of {}.",
            of.with_defaults,
        ),
        Claim(
            SMS,
            "calls of 4096 and 8192 tokens take {} to {} times as long as with the "
            "best number",
            of.long_calls(32),
        ),
        Claim(SMS, "and with 24 SMs {} to {} times.", of.long_calls(24)),
    ],
    "docs/formats.md": [
        Claim(
            FORMATS,
            "| dispatch | 4096 | {} in `fp8_block128`, {} in `nvfp4` |",
            of.ratio("dispatch", 4096, FP8, NVFP4),
        ),
        Claim(
            FORMATS_OF_2,
            "in `nvfp4` | {} in `fp8_block128`, {} in `nvfp4` |",
            of.ratio("dispatch", 4096, FP8, NVFP4),
        ),
        Claim(FORMATS, "| dispatch | 1024 | {} to {} |", of.ratios(1024, FP8, *OTHERS)),
        Claim(
            FORMATS_OF_2,
            "| dispatch | 1024 | 0.50 to 0.68 | {} to {} |",
            of.ratios(1024, FP8, *OTHERS),
        ),
        Claim(FORMATS, "| dispatch | 128 | {} to {} |", of.ratios(128, FP8, *OTHERS)),
        Claim(
            FORMATS_OF_2,
            "| dispatch | 128 | 0.66 to 0.80 | {} to {} |",
            of.ratios(128, FP8, *OTHERS),
        ),
        Claim(
            FORMATS_OF_2,
            "{} in `fp8_block128` ({} against {} us), {} to {} in the others |",
            of.joined(
                of.ratio("dispatch", 1, FP8),
                of.format_us("dispatch", 1, FP8, "bf16"),
                of.ratios(1, *OTHERS),
            ),
        ),
        Claim(
            FORMATS,
            "| combine, `fp8_block128` | 4096 | {} |",
            of.ratio("combine", 4096, FP8),
        ),
        Claim(
            FORMATS_OF_2,
            "| combine, `fp8_block128` | 4096 | 0.65 | {} |",
            of.ratio("combine", 4096, FP8),
        ),
        Claim(
            FORMATS,
            "| combine, `fp8_block128` | 1024 | {} |",
            of.ratio("combine", 1024, FP8),
        ),
        Claim(
            FORMATS_OF_2,
            "| combine, `fp8_block128` | 1024 | 0.71 | {} ({} against {} us) |",
            of.joined(
                of.ratio("combine", 1024, FP8),
                of.format_us("combine", 1024, FP8, "bf16"),
            ),
        ),
        Claim(
            FORMATS,
            "| combine, `fp8_block128` | 128 | {} |",
            of.ratio("combine", 128, FP8),
        ),
        Claim(
            FORMATS_OF_2,
            "| combine, `fp8_block128` | 128 | 0.83 | {} |",
            of.ratio("combine", 128, FP8),
        ),
        Claim(
            FORMATS_OF_2,
            "| combine, `fp8_block128` | 1 | not measured | {} ({} against {} us) |",
            of.joined(
                of.ratio("combine", 1, FP8), of.format_us("combine", 1, FP8, "bf16")
            ),
        ),
        Claim(
            FORMATS,
            "a dispatch is {} times as fast in `fp8_block128` and {} times in `nvfp4`",
            of.inverse(of.ratio("dispatch", 4096, FP8, NVFP4)),
        ),
    ],
    "docs/options.md": [
        Claim(
            OPTIONS, "a fused shared expert add {} to {}% to a call", of.small_options
        ),
        Claim(
            OPTIONS,
            "| combine: {} and {} times |",
            of.joined(of.option("combine", "source"), of.option("combine", "none")),
        ),
        Claim(
            OPTIONS,
            "needs | dispatch: {} times; combine: {} times |",
            of.joined(of.option("dispatch", "local"), of.option("combine", "local")),
        ),
        Claim(
            OPTIONS,
            "beside them | dispatch: {} times; combine: {} times |",
            of.joined(of.option("dispatch", "halves"), of.option("combine", "halves")),
        ),
    ],
    "docs/architecture.md": [
        Claim(
            MATMULS,
            "takes {} to {}% less than the bare matmuls of CUTLASS in bfloat16 in the "
            "large sizes",
            of.less_than_cutlass(BIG_64, BIG, "many"),
        ),
        Claim(
            MATMULS,
            "{}% less in the mid size",
            lambda *records: of.less_than_cutlass(MID)(*records)[:1],
        ),
        Claim(
            MATMULS,
            "in fp8 {} to {}% more",
            of.more_than_cutlass(MID, BIG_64, BIG, "many"),
        ),
        Claim(
            "quick-p2p-h200x2-2026-11-27 before-p2p-h200x2-2026-11-27",
            "| 229 us, 217 us | {} us, {} us |",
            lambda now, _: of.quick(now),
        ),
        Claim(
            "before-p2p-h200x2-2026-11-27",
            "| {} us, {} us | 230 us, 219 us |",
            of.quick,
        ),
        Claim(
            MATMULS,
            "but {}% less for few rows",
            lambda *records: [-of.more_than_cutlass("decode")(*records)[0]],
        ),
    ],
    "docs/layers.md": [
        Claim(
            LAYERS,
            "exchanges take {} to {}% of a layer's forward pass",
            of.exchange_shares("forward"),
        ),
        Claim(
            LAYERS,
            "| 2048 x 1024, 64 experts | {} ms | {} ms | {} ms | {} ms |",
            of.beside_ragged(MID),
        ),
        Claim(
            LAYERS,
            "| 7168 x 2048, 64 experts | {} ms | {} ms | {} ms | {} ms |",
            of.beside_ragged(BIG_64),
        ),
        Claim(
            LAYERS,
            "| 7168 x 2048, 256 experts | {} ms | {} ms | {} ms | {} ms |",
            of.beside_ragged(BIG),
        ),
    ],
    "docs/overlap.md": [
        Claim(
            OVERLAP,
            "a whole dispatch takes {} us and a whole combine {} us",
            of.whole_calls,
        ),
        Claim(
            OVERLAP,
            "It takes {} us of a dispatch and {} us of a combine",
            of.joined(of.placing("dispatch"), of.placing("combine")),
        ),
        Claim(
            OVERLAP,
            "hidden except for {} us ({} us of the call are exposed)",
            of.joined(
                of.without_placing("dispatch", "elementwise"),
                of.exposed("dispatch", "elementwise"),
            ),
        ),
        Claim(
            OVERLAP,
            "that of a combine except for {} us ({} us exposed)",
            of.joined(
                of.without_placing("combine", "elementwise"),
                of.exposed("combine", "elementwise"),
            ),
        ),
        Claim(
            OVERLAP,
            "Beside attention, {} and {} us of the first halves stay exposed",
            of.joined(
                of.without_placing("dispatch", "attention"),
                of.without_placing("combine", "attention"),
            ),
        ),
        Claim(
            OVERLAP,
            "(in the timelines {} us instead of {})",
            of.matmul_beside_combine,
        ),
        Claim(
            OVERLAP,
            "packing and placing of a dispatch exposed, and {} us more of a combine; "
            "the aim is {} us",
            of.joined(of.over_parts("combine"), of.aim_beside_work),
        ),
        Claim(
            OVERLAP,
            "takes {} ms even for 128 columns. Nothing hides beside it: the work alone "
            "differed by {} us",
            of.dense_ragged_dot,
        ),
        Claim(
            OVERLAP,
            "Experts take {} ms and the four exchanges {} ms",
            of.two_batches,
        ),
        Claim(
            OPTIONS,
            "takes {} us with 24 SMs, {} with 32 and {} with 16",
            of.first_half("combine", 24, 32, 16),
        ),
        Claim(
            OPTIONS,
            "That of a dispatch takes {} to {} us with any of them",
            lambda record: of.span(of.first_half("dispatch", 24, 32, 16)(record)),
        ),
        Claim(
            OVERLAP,
            "A dispatch of one token takes {} us captured and {} us otherwise",
            of.graph_us("dispatch", 1),
        ),
    ],
    "docs/gpu_limits.md": [
        Claim(LIMITS, "read + written | {} GB/s |", of.at("local_memcpy_gb_s")),
        Claim(
            LIMITS,
            "by bulk stores | {} GB/s per block up to 24 blocks, {} GB/s by 64 |",
            of.joined(
                of.rate("local", "bulk_store", 24, each=True),
                of.rate("local", "bulk_store", 64),
            ),
        ),
        Claim(
            LIMITS,
            "two random rows | {} GB/s per block (read + written) up to 32 blocks, {} "
            "GB/s by 64 |",
            of.joined(
                of.rate("local", "bulk_place", 32, each=True),
                of.rate("local", "bulk_place", 64),
            ),
        ),
        Claim(LIMITS, "24 blocks | {} instead of {} GB/s", of.small_rows),
        Claim(
            LIMITS,
            "at once, 1 block each | {} GB/s |",
            of.rate("peer_write", "bulk_store", 1),
        ),
        Claim(
            LIMITS,
            "132 blocks | {} / {} / {} / {} GB/s |",
            of.rate("peer_write", "bulk_store", 8, 24, 64, 132),
        ),
        Claim(LIMITS, "the same within {}% |", of.copies_apart),
        Claim(LIMITS, "reach {}% of the link's speed", of.eight_blocks),
        Claim(
            LIMITS,
            "| 8 + 16 | {} | | 16 + 16 | {} | | 16 + 32 | {} | | 24 + 24 | {} | "
            "| 32 + 32 | {} | | 44 + 88 | {} |",
            of.send_and_place(
                (8, 16), (16, 16), (16, 32), (24, 24), (32, 32), (44, 88)
            ),
        ),
        Claim(LIMITS, "one way | {} | | published", of.one_way("relaxed_us")),
        Claim(LIMITS, "acquire), one way | {} |", of.one_way("publish_observe_us")),
        Claim(LIMITS, "by flags | {} |", of.at("barrier_us")),
        Claim(
            LIMITS,
            "one lane per peer | {} (stores {}, fence {}, flags {}) |",
            of.publish("lane_a_peer", "store_and_wait_us", "fence_us", "flags_us"),
        ),
        Claim(LIMITS, "at the peer | {} |", of.publish("lane_a_peer_and_load")),
        Claim(
            LIMITS,
            "one lane for all peers | {}, {} loaded |",
            of.joined(of.publish("one_lane"), of.publish("one_lane_and_load")),
        ),
        Claim(LIMITS, "4 blocks per row | {} |", of.cells_of_one_row),
        Claim(LIMITS, "are almost {} us faster than fence", of.cells_faster),
        Claim(LIMITS, "graph of many | {} |", of.at("launch", "graph_node_us")),
        Claim(LIMITS, "back to back | {} |", of.at("launch", "graph_launch_us")),
        Claim(LIMITS, "the recipe of protocol.md | {} | {} |", of.litmus()),
        Claim(
            LIMITS,
            "without `fence.acq_rel.sys` | {} | {} |",
            of.litmus("no fence.acq_rel.sys"),
        ),
        Claim(LIMITS, "bulk group | {} | {} |", of.litmus("no wait_group")),
        Claim(
            LIMITS,
            "waiting with `.read` only | {} | {} |",
            of.litmus("wait_group.read only"),
        ),
        Claim(
            LIMITS,
            "before overwriting | {} million each | {} |",
            lambda record: [
                value / unit
                for value, unit in zip(
                    of.litmus("no fence.proxy.async before reading")(record),
                    (1e6, 1),
                    strict=True,
                )
            ],
        ),
        Claim(
            LIMITS,
            "relaxed instead of acquire | {} | {} |",
            of.litmus("relaxed instead of acquire"),
        ),
    ],
    "docs/scale.md": [
        Claim(
            LIMITS,
            "`NVLINK` | {} GB/s |",
            of.rate("peer_write", "bulk_store", 24),
        ),
        Claim(
            LIMITS,
            "`SEND` | {} GB/s |",
            lambda record: [
                24 * each
                for each in of.rate("local", "bulk_place", 32, each=True)(record)
            ],
        ),
        Claim(OPTIONS, "`SUM` | {} GB/s |", of.rate_of_sums),
        Claim(LIMITS, "`COPY` | {} GB/s |", of.rate("local", "bulk_place", 64)),
        Claim(OPTIONS, "`HALVES` | {} us |", of.halves_of_one_token),
    ],
    "docs/sharp_bits.md": [
        Claim(
            "concurrent-h200x2-*",
            "a program of {} calls was right with it, and the same program without "
            "chaining did not end within {} s",
            of.concurrent_calls,
        ),
    ],
    "docs/benchmarks.md": [
        Claim(
            f"{DECODE} before-decode-h200x1-2026-11-28",
            "Experts with 1024 rows take {} us per step in a single profiled call of "
            "32 steps, {} us per step when such calls follow each other for 0.1 s, "
            "and, on another card, {} us when",
            of.four_bits_by_time,
        ),
        Claim(
            DECODE,
            "In bfloat16 and fp8 repeated calls take at most {}% longer than a single",
            of.most_longer("bf16", "fp8"),
        ),
        Claim(
            DECODE,
            "Experts with 16 rows take {} us per step in a single call and {} us in "
            "repeated ones, and a plain read of their weights takes {} and {} us",
            of.sixteen_rows,
        ),
        Claim(
            "mxfp4-profile-h200x1-*",
            "each of the two kernels issues an instruction in at least {}% of the",
            of.least_issued,
        ),
        Claim(
            DECODE,
            "With 256 rows `mxfp4` takes {} us and `mxfp4-fp8` {}, where `fp8` takes "
            "{}; with 8 rows they take {}, {} and {}.",
            of.decode_us(
                *(
                    (rows, way)
                    for rows in (256, 8)
                    for way in ("mxfp4", "mxfp4-fp8", "fp8")
                )
            ),
        ),
        Claim(
            "before-decode-h200x1-2026-11-28",
            "`mxfp4-fp8` took {} us with 1024 rows",
            of.decode_us((1024, "mxfp4-fp8")),
        ),
        Claim(
            "few-rows-h200x1-*",
            "the one for few rows, if there is room for up to {} rows per expert",
            of.most_few_rows,
        ),
        Claim(
            "few-rows-h200x1-*",
            "In fp8 it is {} to {}% faster with up to 16 rows per expert, and at most "
            "{}% slower with all 32",
            of.few_rows_gain,
        ),
        Claim(
            "decode-h200x2-*",
            "such a step takes a GPU {} us at one token per rank, where the program "
            "takes {}, and a whole layer takes it {} us, where the program takes {} ",
            of.decode_traces,
        ),
        Claim(
            "tokens128-h200x2-* before-tokens128-h200x2-*",
            "on each of 2 GPUs, takes {} ms, and {} with gradients. With the Pallas "
            "kernels of commit 08b5e9d it took {} and {} on the same GPUs",
            of.layer_ms,
        ),
        Claim(
            f"layer-h200x2-2026-11-27 {LAYERS}",
            "forward pass took {} ms on 2026-11-27, and takes {} ms since",
            of.dense_forward,
        ),
        Claim(
            LAYERS,
            "needs {} MiB besides its operands and results",
            of.forward_memory,
        ),
        Claim(
            EXPERTS,
            "whole experts of the mid size took {} us, as long as batched cuBLAS ({}), "
            "and {} in fp8",
            of.whole_experts("mid", "hopper", "batched", "fp8"),
        ),
        Claim(
            f"{EXPERTS} {GROUPED}",
            "no forward pass differed by more than {}% from the table",
            lambda *records: [math.ceil(*of.most_of_cards(*records))],
        ),
        Claim(
            TRIED,
            "the medians of seven runs (`tried-matmuls-h200x1-2026-11-27.json`) are {} "
            "to {} MHz at {} W and more",
            of.capped_clock,
        ),
        Claim(
            f"{PROFILE} {TRIED}",
            "Single calls take {} to {}% less.",
            of.less_of_single_calls,
        ),
        Claim(
            PROFILE,
            "busy {}% and {}% of the cycles of gate/up and down, and {}% and {}% in "
            "cuBLAS",
            of.joined(
                of.tensor_busy("mid", "jax_ep", "gate_up", "down"),
                of.tensor_busy("mid", "cuBLAS", "gate_up", "down"),
            ),
        ),
        Claim(
            PROFILE,
            "busy {}% and {}% of the cycles in the mid size, {}% and {}% in "
            '"large-256"',
            of.joined(
                of.tensor_busy("mid", "jax_ep", "fp8 gate_up", "fp8 down"),
                of.tensor_busy("large-256", "jax_ep", "fp8 gate_up", "fp8 down"),
            ),
        ),
        Claim(
            TRIED,
            "one is added while the next is multiplied, took {} to {} times as long",
            of.tried("64 columns from registers"),
        ),
        Claim(
            TRIED,
            "only one of them stores results at a time, took {} to {} times as long",
            of.tried(
                "64 columns from registers, one warpgroup 3 steps ahead",
                "64 columns from registers",
            ),
        ),
        Claim(
            GROUPED,
            "{} to {} times as long as `hopper` with 16 groups",
            of.times_as_long("jax_grouped_gemm", "jax_fusion"),
        ),
        Claim(
            GROUPED,
            "tokamax takes {} to {} times as long as `hopper`",
            of.times_as_long("tokamax"),
        ),
        Claim(CALLS, "reached ({} and {} times) against", of.faster_than("decomposer")),
        Claim(
            CALLS,
            "jax_ep is {} and {} times as fast",
            of.faster_than("update an expert"),
        ),
        Claim(
            FORMATS,
            "T = 4096: 267 us | {} | each 1024 tokens take {} us longer than their "
            "messages take on the link, where bfloat16 takes {} us longer: {} us of a "
            "call",
            of.joined(
                of.format_us("dispatch", 4096, FP8),
                of.longer_than_link(FP8, "bf16"),
                lambda record: [4 * us for us in of.longer_than_link(FP8)(record)],
            ),
        ),
        Claim(CALLS, "14 in `fp8_block128` | {}, {}, 21 |", of.both_ops(128)),
        Claim(FORMATS, "| 27, 30, {} |", of.format_us("dispatch", 128, FP8)),
        Claim(CALLS, "T = 1: 8 us | {} |", of.us_of_call(("dispatch", 1))),
        Claim(
            FORMATS,
            "of 0.85 | {}, {} | a call takes {} us besides the link's time, where "
            "bfloat16 takes {};",
            of.joined(
                of.recovered("dispatch", NVFP4, "mxfp4"), of.besides("mxfp4", "bf16")
            ),
        ),
        Claim(
            FORMATS,
            "of 0.85 | {} | {} us for each 1024 tokens besides",
            of.joined(of.recovered("combine", FP8), of.more_of_combine),
        ),
        Claim(
            SMS,
            "| dispatch {}, cached {}, combine {} and {} |",
            of.most_of_long_calls,
        ),
        Claim(SMS, "which were the aim, take {} to {} |", of.long_calls(24)),
        Claim(
            LAYERS,
            "forward {} times (2048 x 1024, 64 experts), {} and {} (7168 x 2048, 64 "
            "and 256); with gradients {}, {}, {} |",
            of.joined(of.over_ragged("forward"), of.over_ragged("both")),
        ),
        Claim(
            LAYERS,
            "the layer of 256 experts would be {} times as fast",
            of.without_exchange,
        ),
        *(
            Claim(FORMATS, f"| `{name}` | {{}} | {{}} | {{}} |", of.more_tokens(name))
            for name in ("bf16", FP8, NVFP4, "mxfp4")
        ),
        Claim(
            FORMATS,
            "A combine in `fp8_block128` takes {} us for each 1024 more tokens, where "
            "the link needs {}.",
            lambda record: of.more_tokens(FP8, "combine")(record)[:2],
        ),
    ],
}
