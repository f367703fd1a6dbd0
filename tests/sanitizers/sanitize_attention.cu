// Every variant of the attention kernels once, at a size for compute-sanitizer, against the portable kernel.
// With plans of its own: few CTAs, each with enough keys that slots are used again.
//   sanitize_attention [FIRST STEP]   cases FIRST, FIRST + STEP, ...: several processes share them
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/sparse_attention/launch.h"
#include "sanitizers/sanitize.h"

namespace mla_fp8::gpu {
namespace {

struct Case {
  Kernel kernel;
  Schedule schedule;
  int cta_heads, splits, producers;  // 0 splits: all CTAs share all tiles; 0 producers: as the kernel has
  KvLayoutId layout;
  int heads, tokens, topk, extra_topk;
  bool finds_largest;            // asks for max_logits
  bool is_window = false;        // of topk tokens, in place of the indices
  bool fp4_extra = false;        // the second cache is dsv41_fp4
  bool has_entry_pages = false;  // of up to extra_topk entries, in place of the second cache's indices
  int query_groups = 1;          // whose keys are mostly the same; but for the last group's
};
using enum KvLayoutId;
using enum Kernel;
using enum Schedule;
constexpr Case kCases[] = {
    {kFewHeads, kSplit, 8, 1, 0, kDsv32, 8, 5, 300, 0, false},
    {kFewHeads, kSplit, 8, 4, 0, kDsv32, 8, 5, 1200, 0, false},
    {kFewHeads, kSplit, 8, 1, 8, kDsv32, 5, 5, 700, 0, false},
    {kFewHeads, kSplit, 8, 1, 0, kDsv4, 8, 5, 300, 100, false},
    {kFewHeads, kSplit, 8, 4, 0, kDsv4, 8, 5, 1000, 200, false},
    {kFewHeads, kSplit, 8, 1, 0, kFp8E4m3, 8, 5, 300, 0, false},
    {kFewHeads, kSplit, 8, 2, 0, kBf16, 8, 5, 500, 0, false},
    {kFewHeads, kSplit, 16, 1, 0, kDsv32, 16, 5, 300, 0, false},
    {kFewHeads, kSplit, 16, 4, 0, kDsv32, 16, 5, 1200, 0, false},
    {kFewHeads, kSplit, 16, 1, 0, kDsv32, 17, 5, 300, 0, false},
    {kFewHeads, kSplit, 16, 1, 0, kDsv4, 16, 5, 300, 100, false},
    {kFewHeads, kSplit, 16, 2, 0, kDsv4, 16, 5, 800, 100, false},
    {kFewHeads, kSplit, 16, 2, 0, kFp8E4m3D512, 16, 5, 600, 0, false},
    {kFewHeads, kSplit, 16, 2, 0, kBf16D512, 12, 5, 500, 0, false},
    {kFewHeads, kSplit, 32, 1, 0, kBf16, 32, 5, 600, 0, false},
    {kFewHeads, kSplit, 32, 2, 0, kBf16, 64, 5, 1000, 0, false},
    {kFewHeads, kSplit, 8, 16, 0, kBf16D512, 8, 1, 4800, 0, false},
    {kManyHeads, kSplit, 32, 1, 0, kDsv32, 32, 5, 1100, 0, false},
    {kManyHeads, kSplit, 32, 1, 0, kDsv32, 32, 5, 2400, 0, false},
    {kManyHeads, kSplit, 32, 1, 0, kDsv4, 32, 5, 600, 500, false},
    {kManyHeads, kSplit, 64, 1, 0, kDsv32, 64, 5, 900, 0, false},
    {kManyHeads, kSplit, 64, 1, 0, kDsv32, 128, 5, 1500, 0, false},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 64, 5, 500, 400, false},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 64, 5, 2000, 100, false},
    {kManyHeads, kSplit, 64, 1, 0, kFp8E4m3, 64, 5, 900, 0, false},
    {kManyHeads, kSplit, 32, 1, 0, kDsv32, 32, 5, 1100, 0, true},
    {kManyHeads, kSplit, 64, 1, 0, kDsv32, 128, 5, 1500, 0, true},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 64, 5, 2000, 100, true},
    {kFewHeads, kSplit, 8, 2, 8, kDsv41, 8, 5, 800, 200, false},
    {kFewHeads, kSplit, 16, 2, 0, kDsv41, 16, 5, 800, 100, false},
    {kFewHeads, kSplit, 16, 2, 0, kDsv32Nope, 16, 5, 900, 0, false},
    {kManyHeads, kSplit, 32, 1, 0, kDsv32Nope, 32, 5, 1100, 0, false},
    {kManyHeads, kSplit, 64, 1, 0, kDsv41, 64, 5, 900, 300, false},
    {kFewHeads, kWalk, 16, 1, 0, kDsv41, 16, 30, 100, 60, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv41, 32, 30, 200, 60, true},
    {kFewHeads, kWalk, 8, 1, 0, kDsv32, 8, 30, 150, 0, true},
    {kFewHeads, kWalk, 8, 1, 0, kDsv4, 8, 30, 100, 60, true},
    {kFewHeads, kWalk, 16, 1, 0, kDsv32, 16, 16, 200, 0, true},
    {kFewHeads, kWalk, 16, 1, 0, kDsv4, 16, 16, 100, 60, true},
    {kFewHeads, kWalk, 8, 1, 0, kDsv32Nope, 8, 30, 150, 0, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16, 16, 280, 200, 0, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 8, 280, 100, 60, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv32, 32, 8, 400, 0, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv4, 32, 8, 300, 100, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv32Nope, 32, 8, 400, 0, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv32, 64, 6, 400, 0, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv4, 128, 4, 300, 100, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16, 64, 280, 200, 0, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 128, 150, 200, 0, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16, 40, 280, 100, 90, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 64, 280, 130, 60, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kDsv4, 100, 150, 130, 60, true},
    {kPortable, kSplit, 16, 1, 0, kDsv4, 8, 5, 300, 100, false},
    {kFewHeads, kSplit, 16, 2, 0, kDsv4, 16, 5, 500, 60, false, true},
    {kFewHeads, kWalk, 8, 1, 0, kDsv4, 8, 30, 100, 60, true, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv32, 32, 8, 300, 0, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 8, 1200, 70, 0, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 100, 150, 70, 0, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 64, 500, 128, 0, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 40, 300, 200, 0, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16, 20, 500, 70, 0, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 20, 280, 70, 60, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kDsv4, 128, 150, 70, 60, true, true},
    {kPortable, kSplit, 16, 1, 0, kDsv4, 8, 5, 300, 100, false, true},
    {kFewHeads, kSplit, 8, 1, 0, kDsv41, 8, 5, 300, 500, false, false, true},
    {kFewHeads, kSplit, 8, 2, 8, kDsv4, 8, 5, 800, 500, true, false, true},
    {kFewHeads, kSplit, 16, 2, 8, kDsv41, 16, 5, 200, 900, true, false, true},
    {kFewHeads, kSplit, 16, 1, 0, kDsv4, 17, 5, 128, 400, false, true, true},
    {kFewHeads, kWalk, 8, 1, 0, kDsv41, 8, 30, 60, 200, true, false, true},
    {kFewHeads, kWalk, 16, 1, 0, kDsv4, 16, 30, 128, 100, true, true, true},
    {kManyHeads, kSplit, 32, 1, 8, kDsv41, 32, 5, 300, 900, true, false, true},
    {kManyHeads, kSplit, 32, 1, 0, kDsv4, 32, 5, 300, 500, false, false, true},
    {kManyHeads, kSplit, 64, 1, 0, kDsv41, 64, 5, 128, 700, false, true, true},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 64, 5, 300, 900, true, false, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv41, 32, 30, 100, 300, true, false, true},
    {kManyHeads, kWalk, 32, 1, 0, kDsv4, 64, 12, 128, 300, true, true, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 8, 1200, 70, 300, true, true, false, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16D512, 20, 500, 128, 200, true, true, false, true},
    {kBf16Tiles, kWalk, 64, 1, 0, kBf16, 100, 150, 70, 200, true, true, false, true},
    {kFewHeads, kWalk, 8, 1, 0, kDsv4, 8, 30, 100, 200, true, true, false, true},
    {kFewHeads, kSplit, 16, 2, 0, kDsv41, 16, 5, 200, 600, true, true, true, true},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 64, 5, 300, 600, true, true, false, true},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 8, 30, 100, 300, true, true, false, true},  // tiles of neighbours
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 16, 18, 128, 600, true, true, false, true},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 32, 9, 70, 200, true, true, false, true},
    {kPortable, kSplit, 16, 1, 0, kDsv4, 8, 5, 300, 200, false, true, false, true},
    {kManyHeads, kSplit, 32, 1, 0, kDsv4, 8, 15, 300, 100, false, false, false, false, 4},
    {kManyHeads, kSplit, 64, 1, 0, kDsv4, 8, 22, 300, 100, true, false, false, false, 7},
    {kManyHeads, kSplit, 64, 1, 0, kDsv32, 16, 14, 400, 0, false, false, false, false, 4},
    {kManyHeads, kSplit, 64, 1, 0, kDsv32, 32, 7, 400, 0, true, false, false, false, 2},
    {kManyHeads, kSplit, 48, 1, 0, kDsv4, 8, 15, 300, 100, false, false, false, false, 6},
    {kManyHeads, kSplit, 64, 1, 0, kDsv32, 16, 14, 300, 0, false, false, false, false, 7},
    {kFewHeads, kSplit, 16, 6, 0, kDsv32, 16, 3, 2400, 0, false},  // clusters of six
    {kFewHeads, kSplit, 8, 6, 8, kDsv41, 8, 3, 300, 1500, true, false, true},
    {kManyHeads, kWalk, 64, 1, 0, kDsv32, 64, 7, 400, 0, true},
    {kManyHeads, kWalk, 64, 1, 0, kDsv4, 100, 5, 300, 100, false},
    {kManyHeads, kWalk, 64, 1, 0, kDsv32Nope, 64, 6, 70, 60, true, true},
    {kManyHeads, kSplit, 32, 0, 0, kDsv4, 8, 8, 300, 900, true, true, false, true},  // all CTAs share tiles
    {kManyHeads, kSplit, 48, 0, 0, kDsv4, 8, 12, 70, 600, false, true, false, true},
    {kManyHeads, kSplit, 64, 0, 0, kDsv4, 16, 16, 128, 600, true, true, false, true},
    {kManyHeads, kSplit, 64, 0, 0, kDsv4, 100, 2, 128, 300, false, true, false, true},
    {kFewHeads, kSegments, 8, 4, 0, kDsv32, 8, 5, 1200, 0, false},  // batch_invariant
    {kFewHeads, kSegments, 16, 1, 0, kDsv4, 16, 5, 900, 200, false},
    {kManyHeads, kSegments, 32, 1, 0, kDsv32, 32, 3, 2400, 0, false},
    {kManyHeads, kSegments, 32, 1, 0, kDsv4, 32, 5, 900, 200, false},
    {kManyHeads, kSegments, 64, 1, 0, kDsv4, 64, 3, 1200, 200, false},
    {kManyHeads, kSegments, 64, 1, 0, kDsv32, 128, 5, 1200, 0, false},
    {kManyHeads, kParts, 32, 8, 0, kDsv32, 40, 3, 2400, 0, false},  // no clusters
    {kManyHeads, kParts, 64, 3, 0, kDsv4, 128, 2, 900, 300, false},
    {kManyHeads, kParts, 32, 5, 8, kDsv41, 40, 3, 128, 700, false, false, true},
    {kManyHeads, kParts, 64, 3, 0, kDsv4, 128, 2, 100, 500, false, false, true},
    {kManyHeads, kRuns, 32, 8, 0, kDsv32, 40, 3, 2400, 0, false},
    {kManyHeads, kRuns, 64, 3, 0, kDsv4, 128, 2, 900, 300, false},
    {kPortable, kSplit, 16, 3, 0, kDsv32, 16, 5, 900, 0, true},  // by parts, or by other CTAs
    {kPortable, kSplit, 32, 12, 0, kDsv4, 32, 5, 600, 500, true},
    {kPortable, kSplit, 64, 2, 0, kDsv32, 40, 10, 900, 0, true},
    {kPortable, kSplit, 64, 9, 0, kDsv4, 100, 5, 700, 200, false, true},
    {kPortable, kSplit, 64, 3, 0, kDsv41, 64, 5, 300, 900, true, false, true},
    {kPortable, kSplit, 32, 1, 0, kDsv32Nope, 64, 10, 400, 0, true},
    {kPortable, kSplit, 32, 2, 0, kBf16, 40, 5, 500, 0, true},
    {kPortable, kSplit, 16, 1, 0, kFp8E4m3, 64, 5, 500, 0, true},
};
constexpr bool is_a_variant(const Case& c) {
  const KvPair layouts{c.layout, c.fp4_extra ? kDsv41Fp4 : c.layout};
  const bool may_find_largest = c.schedule != kSegments && c.schedule != kRuns;
  if (c.finds_largest && !may_find_largest) return false;
  return std::any_of(std::begin(kVariants), std::end(kVariants), [&](const Variant& v) {
    return v.kernel == c.kernel && v.schedule == c.schedule && v.heads == c.cta_heads &&
           (c.producers == 0 || v.producers == c.producers) && v.reads(layouts);
  });
}
static_assert(std::all_of(std::begin(kCases), std::end(kCases), is_a_variant));

constexpr int kWalkCtas = 2;  // of a walk, but for bf16_tiles, whose cases fill the device
constexpr int kNumRows = 512, kPageSize = 64;

std::mt19937 random_bits;
float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(random_bits);
}
uint16_t to_bf16(float x) { return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + 0x8000) >> 16); }
float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

// Latents of about 1/8: any e4m3 code but NaN times 2^-10, 2^-11 (stored scales); any e2m1.
std::vector<uint8_t> random_cache(const KvLayout& l, int page_size) {
  std::vector<uint8_t> cache(kNumRows / page_size * l.page_bytes(page_size));
  const auto put = [](uint8_t* at, int dims, Format format) {
    for (int i = 0; i < dims; ++i) {
      const uint16_t wide = to_bf16(normal() / 8);
      const uint8_t code = static_cast<uint8_t>(random_bits());
      if (format == Format::kBf16) std::memcpy(at + 2 * i, &wide, 2);
      else if (format == Format::kE2m1 && i >= dims / 2) break;
      else if (format == Format::kE2m1) at[i] = code;
      else at[i] = (code & 0x7f) == 0x7f ? 0 : code;
    }
  };
  for (int i = 0; i < kNumRows; ++i) {
    uint8_t* const page = cache.data() + i / page_size * l.page_bytes(page_size);
    uint8_t* const row = page + l.token_offset(i % page_size);
    put(row, l.nope_dim, l.nope_format);
    put(row + l.rope_offset(), l.rope_dim, l.rope_format);
    uint8_t* const scales = page + l.scale_offset(i % page_size, page_size);
    for (int tile = 0; tile < l.num_tiles(); ++tile) {
      const uint32_t exponent = 127 - 10 - random_bits() % 2, bits = exponent << 23;
      if (l.scale_format == ScaleFormat::kE4m3) scales[tile] = random_bits() % 32 + 8;  // 2^-6 to 0.11
      else if (l.scale_itemsize() == 4) std::memcpy(scales + 4 * tile, &bits, 4);
      else scales[tile] = static_cast<uint8_t>(exponent);
    }
  }
  return cache;
}

// Entries of all kinds. Row 1 has none that counts, row 2 five, row 3 a negative length; in row 4 and every
// tenth after it all count, in row 9 and every tenth after it they are one slot.
KvScope random_scope(Device& device, const KvLayout& l, int page_size, int tokens, int topk) {
  constexpr int32_t kHostile[] = {-1, INT32_MIN, INT32_MAX, kNumRows};
  std::vector<int32_t> indices(tokens * topk), lengths(tokens);
  for (int32_t& i : indices) i = random_bits() % 8 ? random_bits() % kNumRows : kHostile[random_bits() % 4];
  for (int t = 4; t < tokens; t += 5)
    for (int i = 0; i < topk; ++i)
      indices[t * topk + i] = static_cast<int32_t>((t % 10 == 9 ? t : random_bits()) % kNumRows);
  if (tokens > 1) std::fill_n(indices.begin() + topk, topk, -1);
  for (int t = 0; t < tokens; ++t)
    lengths[t] = t == 0        ? topk
                 : t == 2      ? 5
                 : t == 3      ? INT32_MIN
                 : t % 10 == 4 ? topk
                               : topk / 2 + random_bits() % (topk / 2 + 1);
  return {.kv_cache = device.upload(random_cache(l, page_size)),
          .kv_cache_stride_page = l.page_bytes(page_size),
          .num_slots = kNumRows,
          .page_size = page_size,
          .indices = device.upload(indices),
          .indices_stride_token = topk,
          .topk = topk,
          .topk_length = device.upload(lengths)};
}

// Of all groups but the last each query takes a stretch of the same distinct slots; no slot twice.
void share_keys(Device& device, KvScope& scope, int tokens, int group) {
  std::vector<int32_t> indices = download(scope.indices, tokens * scope.topk), slots(kNumRows);
  std::iota(slots.begin(), slots.end(), 0);
  for (int t = 0; t < (tokens - 1) / group * group; ++t) {
    if (t % group == 0) std::shuffle(slots.begin(), slots.end(), random_bits);
    for (int i = 0; i < scope.topk; ++i)
      if (int32_t& x = indices[t * scope.topk + i]; x >= 0 && x < kNumRows)
        x = slots[(i + 7 * (t % group)) % kNumRows];
  }
  scope.indices = device.upload(indices);
}

// Two requests with random pages, one of them missing and one hostile; the second's last tokens are past the
// end of its table.
SlidingWindow random_window(Device& device, int tokens, int window_size) {
  constexpr int kPages = kNumRows / kPageSize;
  std::vector<int32_t> pages(2 * kPages);
  for (int32_t& page : pages) page = static_cast<int32_t>(random_bits() % kPages);
  pages[1] = -1, pages[2] = INT32_MAX;
  return {.page_table = device.upload(pages),
          .page_table_stride_request = kPages,
          .num_requests = 2,
          .max_pages = kPages,
          .window_size = window_size,
          .query_start_loc = device.upload(std::vector<int32_t>{3, 3 + tokens / 2, 3 + tokens}),
          .seq_lens = device.upload(std::vector<int32_t>{kNumRows - 7, kNumRows + 50})};
}

// The same two requests' pages of two entries each, of which the last tokens ask for more than there are.
EntryPages random_entry_pages(Device& device, int max_entries) {
  const int max_pages = max_entries / 2;
  std::vector<int32_t> pages(2 * max_pages);
  for (int32_t& page : pages) page = static_cast<int32_t>(random_bits() % (kNumRows / 2));
  pages[1] = -1, pages[2] = INT32_MAX;
  return {.page_table = device.upload(pages), .page_table_stride_request = max_pages, .max_pages = max_pages};
}

Plan plan_of(const Case& c, const SparseAttentionParams& p) {
  Plan plan = forced_plan({name(c.kernel), name(c.schedule), c.cta_heads, c.splits, c.producers}, p,
                          {compute_major(), num_processors()});
  if (shares_tiles(plan)) plan.ctas = static_cast<int>(2 * num_entry_tiles(p) + 1);
  else if (plan.variant.schedule == Schedule::kWalk && plan.variant.kernel != Kernel::kBf16Tiles)
    plan.ctas = kWalkCtas;
  return plan;
}
// Tiles over lists, and the queries of those that have none, by another kernel.
void launch_sharing(Device& device, SparseAttentionParams p, Plan tiles) {
  const char* const kernel = p.num_q_heads > 16 ? "many_heads" : "few_heads";
  const char* const schedule = p.num_q_heads == 16 ? "split" : "walk";
  Plan alone = forced_plan({kernel, schedule, p.num_q_heads, 1, 0}, p, {compute_major(), num_processors()});
  if (alone.variant.schedule == Schedule::kWalk) alone.ctas = kWalkCtas;
  int32_t* const lists = device.upload(std::vector<int32_t>(lists_size(p)));
  launch_shared_keys(p, 256, lists, nullptr);
  p.shared_keys = lists;
  tiles.takes_lists = tiles.follows = true;
  launch_plan(p, alone, nullptr);
  launch_plan(p, tiles, nullptr);
}

// The largest difference, of large values relative, NaN if there is one.
template <class T, class Fn>
float difference(const T* a, const T* b, size_t size, Fn&& value) {
  const std::vector<T> x = download(a, size), y = download(b, size);
  float largest = 0.0f;
  for (size_t i = 0; i < size; ++i) {
    const float u = value(x[i]), v = value(y[i]), size_of = std::max(std::abs(v), 1.0f);
    if (const float d = u == v ? 0.0f : std::abs(u - v) / size_of; !(d <= largest)) largest = d;
    if (std::isnan(largest)) break;
  }
  return largest;
}

bool run(const Case& c) {
  random_bits.seed(1);
  Device device;
  const KvLayoutId extra = c.fp4_extra ? kDsv41Fp4 : c.layout;
  const KvLayout l = kv_layout(c.layout);
  const int d = l.head_dim_qk();
  const size_t rows = static_cast<size_t>(c.tokens) * c.heads;
  std::vector<uint16_t> q(rows * d);
  for (uint16_t& x : q) x = to_bf16(normal());
  std::vector<float> sink(c.heads);
  for (float& x : sink) x = normal();

  SparseAttentionParams p{};
  p.layout = c.layout, p.extra_layout = extra, p.num_tokens = c.tokens, p.num_q_heads = c.heads;
  p.num_scopes = c.extra_topk > 0 ? 2 : 1;
  const bool plain_rows = c.kernel == kBf16Tiles && !c.is_window && p.num_scopes == 1;
  p.scopes[0] = random_scope(device, l, plain_rows ? 1 : kPageSize, c.tokens, c.topk);
  if (p.num_scopes > 1) p.scopes[1] = random_scope(device, kv_layout(extra), 2, c.tokens, c.extra_topk);
  if (c.is_window) p.is_window = true, p.window = random_window(device, c.tokens, c.topk);
  if (c.has_entry_pages) p.has_entry_pages = true, p.entry_pages = random_entry_pages(device, c.extra_topk);
  if (c.query_groups > 1) {
    p.query_groups = c.query_groups;
    for (int i = 0; i < p.num_scopes; ++i) share_keys(device, p.scopes[i], c.tokens, c.query_groups);
  }
  p.q = device.upload(q), p.q_stride_token = c.heads * d, p.q_stride_head = d;
  p.attn_sink = device.upload(sink);
  if (l.num_tiles() == 0 && l.nope_format != Format::kBf16)
    p.scale = device.upload(std::vector<float>{0x1p-10f});
  p.sm_scale = 8.0f / std::sqrt(static_cast<float>(d));
  const auto with_outputs = [&] {
    SparseAttentionParams full = p;
    full.out = device.upload(std::vector<uint16_t>(rows * kHeadDimV, 0x7fff));
    full.out_stride_token = c.heads * kHeadDimV, full.out_stride_head = kHeadDimV;
    full.lse = device.upload(std::vector<float>(rows, NAN));
    if (c.finds_largest) full.max_logits = device.upload(std::vector<float>(rows, NAN));
    return full;
  };
  SparseAttentionParams got = with_outputs(), want = with_outputs();
  const Plan plan = plan_of(c, p);
  got.workspace_floats = workspace_size(plan, p);
  if (got.workspace_floats > 0) got.workspace = device.upload(std::vector<float>(got.workspace_floats, NAN));
  if (c.query_groups > 1) launch_sharing(device, got, plan);
  else launch_plan(got, plan, nullptr);
  launch_plan(want, forced_plan({"portable"}, p, {}), nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  const auto same = [](float x) { return x; };
  const float out = difference(got.out, want.out, rows * kHeadDimV, from_bf16);
  const float lse = difference(got.lse, want.lse, rows, same);
  const float largest = c.finds_largest ? difference(got.max_logits, want.max_logits, rows, same) : 0.0f;
  // One code of bf16: of many results some are rounded the other way.
  const bool right = out < 0x1.1p-7f && lse < 1e-4f && largest < 1e-4f;
  std::printf("%s %s; %s, %d heads, %d queries, %d + %d keys%s%s: off by %.1e, lse %.1e\n",
              right ? "ok   " : "WRONG", to_string(plan).c_str(), l.name, c.heads, c.tokens, c.topk,
              c.extra_topk, c.fp4_extra ? " of FP4" : "",
              c.is_window          ? " (window)"
              : c.query_groups > 1 ? " (lists)"
                                   : "",
              out, lse);
  std::fflush(stdout);
  return right;
}

}  // namespace
}  // namespace mla_fp8::gpu

int main(int argc, char** argv) {
  const size_t first = argc > 1 ? std::atoi(argv[1]) : 0, step = argc > 2 ? std::atoi(argv[2]) : 1;
  bool right = true;
  for (size_t i = first; i < std::size(mla_fp8::gpu::kCases); i += step)
    right = mla_fp8::gpu::run(mla_fp8::gpu::kCases[i]) && right;
  return right ? 0 : 1;
}
