// Tests of protocol/window.h: no two parts of a window overlap, whatever the sizes; every chunk,
// piece and slot of every call that fits has a place; tags tell calls apart. And of
// ffi/window_sizes.h: every call of a config fits.
#include "protocol/window.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "ffi/window_sizes.h"
#include "formats/combine_wire.h"
#include "formats/registry.h"

namespace jax_ep {
namespace {

constexpr int64_t kLine = 128;

// The sizes of a config with tokens of `element_bytes` and sums of `wire_bytes`.
WindowSizes SizesOf(int64_t ranks, int64_t local_experts, int64_t tokens, int64_t top_k,
                    int64_t hidden, int64_t element_bytes, int64_t wire_bytes, int64_t depth,
                    int64_t combine_tokens = 0) {
  return {ranks,
          local_experts,
          tokens,
          combine_tokens == 0 ? tokens : combine_tokens,
          top_k,
          hidden,
          DispatchMessage::Of(hidden * element_bytes, 0, top_k).bytes,
          CombineMessage::Of(hidden * std::max(element_bytes, wire_bytes), 0, top_k).bytes,
          kLowLatencyDispatchTokens,
          DispatchMessage::Of(hidden * element_bytes, 0, top_k).bytes,
          1,
          depth};
}

std::string Text(const WindowSizes& sizes) {
  std::string text;
  for (const int64_t size :
       {sizes.ranks, sizes.local_experts, sizes.dispatch_tokens, sizes.combine_tokens, sizes.top_k,
        sizes.hidden, sizes.dispatch_message_bytes, sizes.combine_message_bytes, sizes.depth}) {
    text += std::to_string(size) + " ";
  }
  return "R L T T K H dispatch combine depth: " + text;
}

struct Part {
  int64_t begin;
  int64_t bytes;
};

// ---- Layout -------------------------------------------------------------------------------------

// All parts of the window that peers or this rank's route items write. A region is one part per
// source, and so are a source's flags and counts.
std::vector<Part> PartsOf(const WindowSizes& sizes, const WindowLayout& layout) {
  const int64_t route = RouteTotals::Ints(sizes.ranks * sizes.local_experts, sizes.ranks) * 4;
  const int64_t cells =
      2 * kRouteParts * RoutePart::Cells(sizes.ranks * sizes.local_experts, sizes.ranks);
  std::vector<Part> parts = {{layout.poison, sizeof(WaitReport)},
                             {layout.route_totals, route},
                             {layout.route_parts, cells * static_cast<int64_t>(sizeof(CountCell))}};
  for (const BufferGroupLayout& group : layout.groups) {
    const int64_t flag_bytes = group.flags_per_source * static_cast<int64_t>(sizeof(FlagCell));
    const int64_t count_bytes = group.count_cells * static_cast<int64_t>(sizeof(CountCell));
    const int64_t cell_bytes = group.cells_per_source * static_cast<int64_t>(sizeof(CountCell));
    parts.push_back({group.credits, sizes.depth * sizes.ranks * 8});
    for (int64_t part = 0; part < sizes.depth * sizes.ranks; ++part) {
      parts.push_back({group.flags + part * flag_bytes, flag_bytes});
      parts.push_back({group.counts + part * count_bytes, count_bytes});
      parts.push_back({group.cells + part * cell_bytes, cell_bytes});
      parts.push_back({group.regions + part * group.region_bytes, group.region_bytes});
    }
  }
  return parts;
}

void CheckLayout(const WindowSizes& sizes) {
  CurrentCase() = Text(sizes);
  const WindowLayout layout = WindowLayout::Of(sizes);
  std::vector<Part> parts = PartsOf(sizes, layout);
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.bytes < b.bytes;
  });
  int64_t end = 0;
  for (const Part& part : parts) {
    CHECK(part.bytes >= 0 && part.begin >= end);
    end = part.begin + part.bytes;
  }
  CHECK(layout.bytes >= end && layout.bytes % kLine == 0);
  // Only the rounding of each part and of each region to a line is lost.
  int64_t used = 0;
  for (const Part& part : parts) used += part.bytes;
  CHECK(layout.bytes - used < (2 + 5 * kBufferGroups + 1) * kLine);

  CHECK(layout.poison % kLine == 0 && layout.route_totals % kLine == 0 &&
        layout.route_parts % kLine == 0);
  for (const BufferGroupLayout& group : layout.groups) {
    // Signals never share a line with what others write; bulk copies need 16 bytes.
    CHECK(group.credits % kLine == 0 && group.flags % kLine == 0 && group.counts % kLine == 0);
    CHECK(group.cells % kLine == 0);
    CHECK(group.regions % kLine == 0 && group.region_bytes % kLine == 0);
  }
  const auto& dispatch = layout.groups[static_cast<int>(CallKind::kDispatch)];
  const auto& combine = layout.groups[static_cast<int>(CallKind::kCombine)];
  // The number of slots has its own cell; experts are three to a cell.
  CHECK((dispatch.count_cells - 1) * kCountsPerCell >= sizes.local_experts);
  CHECK((dispatch.count_cells - 2) * kCountsPerCell < sizes.local_experts);
  CHECK(combine.count_cells == 1);  // the tag of low-latency calls
  // The messages of a whole call.
  CHECK(dispatch.region_bytes >= sizes.dispatch_tokens * sizes.dispatch_message_bytes);
  CHECK(combine.region_bytes >= sizes.combine_tokens * sizes.combine_message_bytes);
  // The messages of a low-latency call, in cells of 12 bytes beside the epoch.
  CHECK(dispatch.cells_per_source ==
        std::min(sizes.dispatch_tokens, sizes.low_latency_dispatch_tokens) *
            dispatch.message_cells);
  CHECK((dispatch.message_cells - 1 - sizes.top_k) * 12 >= sizes.low_latency_message_bytes);
  CHECK(combine.cells_per_source ==
        std::min(sizes.combine_tokens, kLowLatencyCombineTokens) * combine.message_cells);
  CHECK(combine.message_cells * 12 >= sizes.combine_message_bytes);
}

void TestKnownLayout() {
  CheckLayout(SizesOf(4, 64, 4096, 8, 7168, 2, 2, 1));
  CheckLayout(SizesOf(4, 64, 4096, 8, 7168, 2, 2, 3, 4096 * 8));
  CheckLayout(SizesOf(2, 3, 2, 3, 16, 2, 4, 3, 2 * 3));
  const WindowLayout layout = WindowLayout::Of(SizesOf(4, 64, 128, 8, 7168, 2, 2, 2));
  // 256 experts and 4 ranks.
  CHECK(layout.poison == 0 && layout.route_totals == 128);
  const BufferGroupLayout& dispatch = layout.groups[0];
  CHECK(layout.route_parts == 128 + 1152 &&
        dispatch.credits == layout.route_parts + 2 * 32 * (86 + 4) * 16);
  CHECK(dispatch.flags == dispatch.credits + 128);
  CHECK(dispatch.flags_per_source == kDispatchChunks.MaxCount(128));
  CHECK(dispatch.count_cells == 1 + 22);
  CHECK(dispatch.region_bytes == 128 * 14464);
  CHECK(dispatch.counts == dispatch.flags + 8 * dispatch.flags_per_source * 16);
  CHECK(dispatch.cells == dispatch.counts + RoundUp(8 * 23 * 16, 128));
  CHECK(dispatch.message_cells == 1 + 8 + DivideUp(14464, 12));
  CHECK(dispatch.regions ==
        dispatch.cells + RoundUp(8 * kLowLatencyDispatchTokens * dispatch.message_cells * 16, 128));
  const BufferGroupLayout& combine = layout.groups[1];
  CHECK(combine.credits == dispatch.regions + 8 * dispatch.region_bytes);
  CHECK(combine.flags_per_source == kCombineChunks.MaxCount(128) * 7);
  CHECK(combine.region_bytes == 128 * 14464);
  CHECK(layout.bytes == combine.regions + 8 * combine.region_bytes);
}

void TestLayouts() {
  // One token of 16 bytes, one rank, one expert.
  CheckLayout(SizesOf(1, 1, 1, 1, 8, 2, 2, 1));
  CheckLayout(SizesOf(1, 1, 1, 1, 4, 4, 2, kMaxDepth));
  // Regions beyond 4 GiB.
  CheckLayout(SizesOf(kMaxWindowRanks, kMaxExperts / kMaxWindowRanks, 1 << 20, 32, 1 << 16, 4, 4,
                      kMaxDepth));
  CheckLayout(SizesOf(1, kMaxExperts, kMaxIndex, 1, 4, 4, 4, 1));
  Random random(1);
  for (int i = 0; i < 3000; ++i) {
    const int64_t ranks = random.In(1, kMaxWindowRanks);
    const int64_t element_bytes = random.OneIn(2) ? 2 : 4;
    const int64_t tokens = random.OneIn(4) ? random.In(1, 40) : random.In(1, 20000);
    // Tokens are multiples of 16 bytes, and their sums then of 8.
    const int64_t hidden = (random.OneIn(4) ? 1 : random.In(1, 4000)) * 16 / element_bytes;
    CheckLayout(SizesOf(ranks, random.In(1, kMaxExperts / ranks), tokens, random.In(1, kMaxTopK),
                        hidden, element_bytes, random.OneIn(2) ? 2 : 4, random.In(1, kMaxDepth)));
  }
}

// Tokens are sent in dispatch_format, and along a route unquantised or in grad_format. Sums are in
// combine_dtype, combine_format or, for cotangents, the tokens' type.
template <typename Format>
void CheckMessagesFit(int64_t hidden, ElementType element, ElementType wire, int64_t top_k) {
  CurrentCase() = std::string(Format::kName) + ", H " + std::to_string(hidden);
  const int64_t element_bytes = ElementBytes(element);
  WindowSizes sizes{};
  CHECK(ffi_layer::SizesOf({.format = Format::kName,
                            .hidden = hidden,
                            .element_bytes = element_bytes,
                            .wire_element_bytes = ElementBytes(wire),
                            .tokens = 8,
                            .dispatch_tokens = 8,
                            .combine_tokens = 8,
                            .top_k = top_k,
                            .ranks = 2,
                            .local_experts = 4,
                            .pending_calls = 2},
                           sizes));
  const auto message = DispatchMessage::Of(Format::PayloadBytes(hidden, element_bytes),
                                           Format::ScaleBytes(hidden), top_k);
  CHECK(message.bytes <= sizes.dispatch_message_bytes &&
        message.bytes <= sizes.low_latency_message_bytes);
  for (const int64_t weights : {int64_t{0}, top_k}) {
    CHECK(DispatchCachedMessage::Of(hidden * element_bytes, 0, weights).bytes <=
          sizes.dispatch_message_bytes);
    CHECK(DispatchCachedMessage::Of(CombineFormat::PayloadBytes(hidden, 0),
                                    CombineFormat::ScaleBytes(hidden), weights)
              .bytes <= sizes.dispatch_message_bytes);
    for (const bool quantized : {false, true}) {
      for (const ElementType type : {element, wire}) {
        CHECK(CombineMessageOf(hidden, type, quantized, weights).bytes <=
              sizes.combine_message_bytes);
      }
    }
  }
}

void TestMessagesOfConfigs() {
  constexpr ElementType kTypes[] = {ElementType::kFloat32, ElementType::kBFloat16};
  for (const int64_t hidden : {128, 256, 384, 2880 * 2, 7168, 16384}) {
    for (const ElementType element : kTypes) {
      for (const ElementType wire : kTypes) {
        for (const int64_t top_k : {1, 8, 32}) {
          ForEachFormat([&]<typename Format>(Format) {
            CheckMessagesFit<Format>(hidden, element, wire, top_k);
          });
        }
      }
    }
  }
  WindowSizes sizes{};
  CHECK(!ffi_layer::SizesOf({.format = "fp5",
                             .hidden = 128,
                             .element_bytes = 2,
                             .wire_element_bytes = 2,
                             .tokens = 8,
                             .dispatch_tokens = 8,
                             .combine_tokens = 8,
                             .top_k = 1,
                             .ranks = 2,
                             .local_experts = 4,
                             .pending_calls = 0},
                            sizes));
}

// One region for whole calls, two if they are short, and one more for each pending call.
void TestDepthsOfConfigs() {
  for (const int64_t tokens : {1, 512, 513, 4096}) {
    for (const int64_t pending : {0, 1, 2}) {
      WindowSizes sizes{};
      CHECK(ffi_layer::SizesOf({.format = "bf16",
                                .hidden = 128,
                                .element_bytes = 2,
                                .wire_element_bytes = 2,
                                .tokens = tokens,
                                .dispatch_tokens = tokens,
                                .combine_tokens = tokens,
                                .top_k = 1,
                                .ranks = 2,
                                .local_experts = 4,
                                .pending_calls = pending},
                               sizes));
      CHECK(sizes.turns == (tokens <= 512 ? 2 : 1));
      CHECK(sizes.depth == std::max(sizes.turns, pending + 1) && sizes.depth <= kMaxDepth);
    }
  }
}

// ---- Chunks -------------------------------------------------------------------------------------

// A source's n tokens in windows for at least n: chunks cover the tokens once, none is empty, a
// flag can hold its count, and each has a flag.
void CheckChunks(const ChunkRule& rule, int64_t tokens, int64_t flags) {
  const int64_t length = rule.Tokens(tokens), chunks = rule.Count(tokens);
  CHECK(length >= 1 && length <= rule.most);
  CHECK(length <= kMaxChunkTokens && kMaxChunkTokens <= UINT16_MAX);
  CHECK(chunks * length >= tokens && (chunks - 1) * length < tokens);
  CHECK(chunks <= flags);
}

void TestChunks() {
  for (const ChunkRule& rule : {kDispatchChunks, kCombineChunks}) {
    CurrentCase() = "wanted " + std::to_string(rule.wanted) + ", most " + std::to_string(rule.most);
    CHECK(rule.wanted >= 1 && rule.most >= 1 && rule.Count(0) == 0 && rule.Count(1) == 1);
    // The most chunks that any call of n <= T tokens needs fit the windows for T tokens.
    int64_t most = 0;
    for (int64_t tokens = 0; tokens <= 20000; ++tokens) {
      most = std::max(most, rule.Count(tokens));
      CHECK(rule.MaxCount(tokens) >= most);
      CheckChunks(rule, tokens, rule.MaxCount(tokens));
    }
    for (const int64_t tokens : {int64_t{1} << 20, kMaxIndex / 2, kMaxIndex}) {
      CheckChunks(rule, tokens, rule.MaxCount(tokens));
      CheckChunks(rule, tokens - 1, rule.MaxCount(tokens));
    }
    CHECK(rule.MaxCount(1) == 1);
  }
}

// Pieces cover a row once, and none is empty.
void TestPieces() {
  for (int64_t hidden = 1; hidden < 20000; ++hidden) {
    const int64_t pieces = Pieces(hidden);
    CHECK((pieces - 1) * kPieceElements < hidden && pieces * kPieceElements >= hidden);
  }
  // Pieces are whole 16-byte units of every element type, so that all are aligned.
  CHECK(kPieceElements % 16 == 0);
}

// Every chunk has its own flag; in a combine every piece of every chunk does.
void TestFlagIndexes() {
  Random random(2);
  for (int i = 0; i < 400; ++i) {
    const int64_t tokens = random.In(1, 3000);
    const WindowSizes sizes = SizesOf(random.In(1, 32), 4, tokens, random.In(1, kMaxTopK),
                                      random.In(1, 3000) * 8, 2, 2, 1);
    CurrentCase() = Text(sizes);
    const WindowLayout layout = WindowLayout::Of(sizes);
    const int64_t n = random.In(0, tokens);
    const int64_t pieces = Pieces(sizes.hidden);
    CHECK(kDispatchChunks.Count(n) <= layout.groups[0].flags_per_source);
    CHECK(kCombineChunks.Count(n) * pieces <= layout.groups[1].flags_per_source);
    // Senders announce a chunk's slots; receivers look for the chunk of a slot.
    const ChunkRule rule = kCombineChunks;
    for (int64_t slot = 0; slot < n; ++slot) {
      const int64_t chunk = slot / rule.Tokens(n), first = chunk * rule.Tokens(n);
      CHECK(chunk < rule.Count(n) && slot >= first && slot < Min(first + rule.Tokens(n), n));
    }
  }
}

// ---- Tags ---------------------------------------------------------------------------------------

// The kind is kept whole and everything else is hashed: pairs of similar calls collide about as
// rarely as 14 bits allow.
void TestTags() {
  constexpr TagKind kKind = TagKind::kDispatchCached;
  CHECK(CallTag(kKind, 4096, 14464, 8, 1) == CallTag(kKind, 4096, 14464, 8, 1));
  std::vector<uint16_t> tags;
  for (int64_t tokens = 1; tokens <= 16; ++tokens) {
    for (int64_t bytes = 16; bytes <= 128; bytes += 16) {
      for (const int64_t weights : {0, 8}) {
        for (int64_t site = 0; site < 8; ++site) {
          const uint16_t tag = CallTag(TagKind::kDispatch, tokens, bytes, weights, site);
          tags.push_back(tag);
          for (const TagKind kind : {TagKind::kDispatch, kKind, TagKind::kCombine}) {
            const uint16_t other = CallTag(kind, tokens, bytes, weights, site);
            CHECK(other == (tag | KindTag(kind)) && KindOf(other) == kind);
          }
        }
      }
    }
  }
  std::sort(tags.begin(), tags.end());
  int64_t pairs = 0, run = 1;
  for (size_t i = 1; i <= tags.size(); ++i) {
    if (i < tags.size() && tags[i] == tags[i - 1]) {
      ++run;
    } else {
      pairs += run * (run - 1) / 2;
      run = 1;
    }
  }
  const int64_t count = static_cast<int64_t>(tags.size());
  const int64_t expected = count * (count - 1) / 2 >> 14;
  CHECK(pairs < 2 * expected);
  // Each bit of each argument counts, including high ones.
  Random random(3);
  int64_t equal = 0;
  constexpr int64_t kTries = 20000;
  for (int64_t i = 0; i < kTries; ++i) {
    int64_t call[4] = {random.In(0, 8192), random.In(1, 2000) * 16, random.In(0, 8),
                       static_cast<int64_t>(random.Bits())};
    const uint16_t tag = CallTag(kKind, call[0], call[1], call[2], call[3]);
    call[random.In(0, 3)] ^= int64_t{1} << random.In(0, 40);
    equal += tag == CallTag(kKind, call[0], call[1], call[2], call[3]);
  }
  CHECK(equal < 4 * (kTries >> 14) + 8);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestKnownLayout();
  jax_ep::TestLayouts();
  jax_ep::TestMessagesOfConfigs();
  jax_ep::TestDepthsOfConfigs();
  jax_ep::TestChunks();
  jax_ep::TestPieces();
  jax_ep::TestFlagIndexes();
  jax_ep::TestTags();
  std::printf("window_test: ok\n");
  return 0;
}
