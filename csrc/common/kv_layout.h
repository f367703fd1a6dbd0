#pragma once
// The byte layout of a latent KV cache. Nothing else in the repository may spell these numbers: kernels
// include this table, Python reads it through torch.ops.mla_fp8.kv_layout_table, tests/ops/test_kv_layout.py
// freezes it.
//
//   dsv32       token: | nope e4m3 x512 | scale f32 x4 | rope bf16 x64 |                      inline
//   dsv4        page:  | (nope e4m3 x448 | rope bf16 x64) x page_size                         page tail
//                      | (scale ue8m0 x7 | pad 0) x page_size | pad to page_align |
//   fp8_e4m3    token: | nope, rope e4m3 |    one f32 scale per layer, kept outside the cache
//   bf16        token: | nope, rope bf16 |
//   dsv41       page:  | (nope e4m3 x512) x page_size                                         page tail
//                      | (scale ue8m0 x16) x page_size | pad to page_align |
//   dsv32_nope  token: | nope e4m3 x512 | scale f32 x4 |                                      inline
//   dsv41_fp4   page:  | (nope e2m1 x512, the even element in the low half of a byte) x page_size  page tail
//                      | (scale e4m3 x32) x page_size | pad to page_align |
//
// `_512` rows are the uniform formats at head_dim_qk 512, `_fnuz` rows hold e4m3fnuz instead of e4m3fn.
// Stored scales of e4m3 are powers of two: FlashMLA's SM100 reader keeps only their exponent. Scales of e2m1
// are the e4m3 nearest to amax / 6, or NaN where the tile has a NaN, as e2m1 itself has none.
// nope and rope name how a latent is stored, not what a model rotates. dsv41 and dsv32_nope store all of it
// in one format, so their rope_dim is 0; the model of dsv41 rotates the last 64 dims.

#include <cstdint>
#include <iterator>
#include <utility>

#include "common/macros.h"

namespace mla_fp8 {

inline constexpr int kHeadDimV = 512;  // V is the first 512 elements of the latent in every layout

enum class Format : int32_t { kBf16, kE4m3fn, kE4m3fnuz, kE2m1 };
enum class ScaleFormat : int32_t { kNone, kPerLayer, kF32, kUe8m0, kE4m3 };
enum class ScalePlacement : int32_t { kOutside, kInline, kPageTail };

enum class KvLayoutId : int32_t {
  kDsv32,
  kDsv4,
  kFp8E4m3,
  kFp8E4m3D512,
  kBf16,
  kBf16D512,
  kDsv32Fnuz,
  kDsv4Fnuz,
  kFp8E4m3Fnuz,
  kFp8E4m3D512Fnuz,
  kDsv41,
  kDsv32Nope,
  kDsv41Fp4,
};
inline constexpr int kNumKvLayouts = 13;

constexpr const char* name(Format f) {
  constexpr const char* kNames[] = {"bf16", "e4m3fn", "e4m3fnuz", "e2m1"};
  return kNames[static_cast<int>(f)];
}
constexpr const char* name(ScaleFormat f) {
  constexpr const char* kNames[] = {"none", "per_layer", "f32", "ue8m0", "e4m3"};
  return kNames[static_cast<int>(f)];
}
MLA_HD constexpr int format_bits(Format f) { return f == Format::kBf16 ? 16 : f == Format::kE2m1 ? 4 : 8; }
MLA_HD constexpr bool is_e4m3(Format f) { return f == Format::kE4m3fn || f == Format::kE4m3fnuz; }
MLA_HD constexpr float format_max(Format f) {  // meaningless for bf16
  return f == Format::kE2m1 ? 6.0f : f == Format::kE4m3fnuz ? 240.0f : 448.0f;
}

struct KvLayout {
  const char* name;
  int nope_dim, rope_dim;
  Format nope_format, rope_format;  // rope_format is unused where rope_dim is 0
  ScaleFormat scale_format;
  ScalePlacement scale_placement;
  int tile_dim;       // nope elements sharing one stored scale; 0 = no stored scales
  float amax_floor;   // writers raise a tile's amax to this,
  float scale_floor;  // then its scale to this, and round up to a power of two (e4m3 scales: to nearest)
  int page_align;     // bytes

  MLA_HD constexpr int head_dim_qk() const { return nope_dim + rope_dim; }
  // True if a row has something in this format: values, rope or scales.
  constexpr bool holds(Format f) const {
    return nope_format == f || (rope_dim > 0 && rope_format == f) ||
           (scale_format == ScaleFormat::kE4m3 && f == Format::kE4m3fn);
  }
  MLA_HD constexpr int num_tiles() const { return tile_dim ? nope_dim / tile_dim : 0; }
  // True for a layout that attention reads only as the second cache of a call.
  MLA_HD constexpr bool extra_only() const { return nope_format == Format::kE2m1; }
  MLA_HD constexpr bool scale_inline() const { return scale_placement == ScalePlacement::kInline; }
  MLA_HD constexpr int scale_itemsize() const { return scale_format == ScaleFormat::kF32 ? 4 : 1; }
  MLA_HD constexpr int scale_bytes() const { return align_up(num_tiles() * scale_itemsize(), 8); }
  MLA_HD constexpr int nope_bytes() const { return nope_dim * format_bits(nope_format) / 8; }
  MLA_HD constexpr int rope_bytes() const { return rope_dim * format_bits(rope_format) / 8; }
  MLA_HD constexpr int rope_offset() const { return nope_bytes() + (scale_inline() ? scale_bytes() : 0); }
  MLA_HD constexpr int token_stride() const { return rope_offset() + rope_bytes(); }
  MLA_HD constexpr int bytes_per_token() const { return nope_bytes() + scale_bytes() + rope_bytes(); }
  MLA_HD constexpr int64_t page_bytes(int64_t page_size) const {
    return align_up(page_size * bytes_per_token(), int64_t{page_align});
  }
  // Offsets in bytes from the start of the page, for the token in row `row`.
  MLA_HD constexpr int64_t token_offset(int64_t row) const { return row * token_stride(); }
  MLA_HD constexpr int64_t scale_offset(int64_t row, int64_t page_size) const {
    return scale_inline() ? token_offset(row) + nope_bytes()
                          : page_size * token_stride() + row * scale_bytes();
  }
};

MLA_HD constexpr KvLayout kv_layout(KvLayoutId id) {
  using enum Format;
  using enum ScaleFormat;
  using enum ScalePlacement;
  switch (id) {
    case KvLayoutId::kDsv32:
      return {"dsv32", 512, 64, kE4m3fn, Format::kBf16, kF32, kInline, 128, 0.0f, 1e-4f, 1};
    case KvLayoutId::kDsv4:
      return {"dsv4", 448, 64, kE4m3fn, Format::kBf16, kUe8m0, kPageTail, 64, 1e-4f, 0.0f, 576};
    case KvLayoutId::kFp8E4m3:
      return {"fp8_e4m3", 512, 64, kE4m3fn, kE4m3fn, kPerLayer, kOutside, 0, 0.0f, 0.0f, 1};
    case KvLayoutId::kFp8E4m3D512:
      return {"fp8_e4m3_512", 448, 64, kE4m3fn, kE4m3fn, kPerLayer, kOutside, 0, 0.0f, 0.0f, 1};
    case KvLayoutId::kBf16:
      return {"bf16", 512, 64, Format::kBf16, Format::kBf16, kNone, kOutside, 0, 0.0f, 0.0f, 1};
    case KvLayoutId::kBf16D512:
      return {"bf16_512", 448, 64, Format::kBf16, Format::kBf16, kNone, kOutside, 0, 0.0f, 0.0f, 1};
    case KvLayoutId::kDsv32Fnuz:
      return {"dsv32_fnuz", 512, 64, kE4m3fnuz, Format::kBf16, kF32, kInline, 128, 0.0f, 1e-4f, 1};
    case KvLayoutId::kDsv4Fnuz:
      return {"dsv4_fnuz", 448, 64, kE4m3fnuz, Format::kBf16, kUe8m0, kPageTail, 64, 1e-4f, 0.0f, 576};
    case KvLayoutId::kFp8E4m3Fnuz:
      return {"fp8_e4m3_fnuz", 512, 64, kE4m3fnuz, kE4m3fnuz, kPerLayer, kOutside, 0, 0.0f, 0.0f, 1};
    case KvLayoutId::kFp8E4m3D512Fnuz:
      return {"fp8_e4m3_512_fnuz", 448, 64, kE4m3fnuz, kE4m3fnuz, kPerLayer, kOutside, 0, 0.0f, 0.0f, 1};
    case KvLayoutId::kDsv41:
      return {"dsv41", 512, 0, kE4m3fn, Format::kBf16, kUe8m0, kPageTail, 32, 0.0f, 1e-4f, 512};
    case KvLayoutId::kDsv32Nope:
      return {"dsv32_nope", 512, 0, kE4m3fn, Format::kBf16, kF32, kInline, 128, 0.0f, 1e-4f, 1};
    case KvLayoutId::kDsv41Fp4:
      return {"dsv41_fp4", 512, 0, kE2m1, Format::kBf16, kE4m3, kPageTail, 16, 0.0f, 0x1p-9f, 256};
  }
  return {};
}

static_assert(kv_layout(KvLayoutId::kDsv32).bytes_per_token() == 656);
static_assert(kv_layout(KvLayoutId::kDsv4).bytes_per_token() == 584);
static_assert(kv_layout(KvLayoutId::kDsv41).bytes_per_token() == 528);
static_assert(kv_layout(KvLayoutId::kDsv32Nope).bytes_per_token() == 528);
static_assert(kv_layout(KvLayoutId::kDsv41Fp4).bytes_per_token() == 288);

// The layouts of a call's two caches. Without a second cache both are the first one's.
struct KvPair {
  KvLayoutId first, extra;
  MLA_HD constexpr bool is_mixed() const { return first != extra; }
};
// Pairs of different layouts that one call may attend to jointly. Both have 512 elements, all of them V. The
// second cache holds FP4 entries, or e4m3fn entries made elsewhere beside a GPU's own e4m3fnuz.
inline constexpr KvPair kMixedPairs[] = {{KvLayoutId::kDsv4, KvLayoutId::kDsv41Fp4},
                                         {KvLayoutId::kDsv41, KvLayoutId::kDsv41Fp4},
                                         {KvLayoutId::kDsv4Fnuz, KvLayoutId::kDsv4}};
constexpr bool can_attend(KvPair pair) {
  if (!pair.is_mixed()) return !kv_layout(pair.first).extra_only();
  for (const KvPair& p : kMixedPairs)
    if (p.first == pair.first && p.extra == pair.extra) return true;
  return false;
}

// Runs fn(constant<id>{}): turns the run-time `id` into a template argument. The id is valid (checked in
// ops/).
template <class Fn>
inline void with_kv_layout(KvLayoutId id, Fn&& fn) {
  switch (id) {
    case KvLayoutId::kDsv32: return fn(constant<KvLayoutId::kDsv32>{});
    case KvLayoutId::kDsv4: return fn(constant<KvLayoutId::kDsv4>{});
    case KvLayoutId::kFp8E4m3: return fn(constant<KvLayoutId::kFp8E4m3>{});
    case KvLayoutId::kFp8E4m3D512: return fn(constant<KvLayoutId::kFp8E4m3D512>{});
    case KvLayoutId::kBf16: return fn(constant<KvLayoutId::kBf16>{});
    case KvLayoutId::kBf16D512: return fn(constant<KvLayoutId::kBf16D512>{});
    case KvLayoutId::kDsv32Fnuz: return fn(constant<KvLayoutId::kDsv32Fnuz>{});
    case KvLayoutId::kDsv4Fnuz: return fn(constant<KvLayoutId::kDsv4Fnuz>{});
    case KvLayoutId::kFp8E4m3Fnuz: return fn(constant<KvLayoutId::kFp8E4m3Fnuz>{});
    case KvLayoutId::kFp8E4m3D512Fnuz: return fn(constant<KvLayoutId::kFp8E4m3D512Fnuz>{});
    case KvLayoutId::kDsv41: return fn(constant<KvLayoutId::kDsv41>{});
    case KvLayoutId::kDsv32Nope: return fn(constant<KvLayoutId::kDsv32Nope>{});
    case KvLayoutId::kDsv41Fp4: return fn(constant<KvLayoutId::kDsv41Fp4>{});
  }
}

// Runs fn(constant<first>{}, constant<extra>{}) for a pair that can_attend (checked in ops/).
template <class Fn>
inline void with_kv_layouts(KvPair pair, Fn&& fn) {
  if (!pair.is_mixed())
    return with_kv_layout(pair.first, [&](auto id) {
      if constexpr (can_attend({id(), id()})) fn(id, id);
    });
  const auto run_if_it = [&](auto i) {
    constexpr KvPair kPair = kMixedPairs[i()];
    if (kPair.first == pair.first && kPair.extra == pair.extra)
      fn(constant<kPair.first>{}, constant<kPair.extra>{});
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (run_if_it(constant<i>{}), ...);
  }(std::make_index_sequence<std::size(kMixedPairs)>{});
}

}  // namespace mla_fp8
