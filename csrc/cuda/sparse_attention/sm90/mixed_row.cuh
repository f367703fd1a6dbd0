#pragma once
// Rows of two caches with different layouts, as Hopper kernels read them: one kind of row. Rows of the first
// cache stay as they are. An e2m1 row of the second becomes such a row: its codes, shifted by two bits, are
// e4m3 of 1/64 of their values; where the first kind has bf16 dims, they become bf16. All scales become f16
// of 16 dims: tiles of both layouts are multiples of that.
//
// A stage is 16 such rows and a table of their scales * 2^-e <= 1, with one e for the stage:
//   [32 dims][i < 4] tile 0: keys (2i, 2i + 1), (2i + 8, 2i + 9); tile 1: the same
// Lane t = i wants these 16 bytes for 32 value dims. Lanes of key g = 2i want half of them, those of 2i + 1
// the other half. Where there is room, keys have a table of their own, read without a permutation:
//   [32 dims][g < 8] key g: tiles (0, 1); key g + 8: the same
//
//   MixedRow       where the dims of such a row lie
//   CachedRow      MixedRow, or Row where both layouts are the same
//   KeyFactors     scales as factors of fragments
#include <type_traits>

#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

// kExpanders_: warps that only expand (mixed_expand.cuh); 0: the producers do it. kHasKeyTable: there is room
// for the table of keys.
template <KvLayoutId kFirst, KvLayoutId kSecond, int kExpanders_, bool kHasKeyTable>
struct MixedRow : Row<kFirst> {
  using First = Row<kFirst>;
  using Second = Row<kSecond>;
  static constexpr bool kMixed = true;
  static constexpr int kExpanders = kExpanders_;
  static constexpr int kTileDims = Second::kTileDims, kNumScales = First::kFp8Dims / kTileDims;
  static constexpr int kNumTiles = kNumScales;
  static constexpr int kTilesOfChunk = kChunkDims / kTileDims;
  static_assert(kTileDims == 16 && First::kTileDims % 16 == 0 && First::kDims == Second::kDims);
  static_assert(First::kScalesApart && Second::kScalesApart);
  static_assert(First::kL.scale_format == ScaleFormat::kUe8m0 && First::kBf16Dims <= 64 &&
                Second::kL.nope_format == Format::kE2m1 && Second::kL.scale_format == ScaleFormat::kE4m3);

  static constexpr int kPitch = First::kBytes | 16;  // as Row's, without scales
  static constexpr int kTableOffset = kStageRows * kPitch;
  static constexpr bool kKeyTable = kHasKeyTable && First::kBf16Dims == 0;
  // Bytes of 32 dims. With 80, the stores of eight lanes at once fall into different banks.
  static constexpr int kUnitBytes = kKeyTable ? 80 : 64;
  static constexpr int kKeyTableAt = First::kDims / 32 * kUnitBytes;  // behind the table of V
  static constexpr int kTableBytes = kKeyTableAt * (kKeyTable ? 2 : 1);
  // The address of lane (g, t)'s factors of V in a table, for unit 0.
  __device__ static uint32_t value_factors_at(uint32_t table, int t) { return table + t * 16; }
  // Before it is expanded, a second row's codes end where its place ends; key i's scales lie in the table.
  static constexpr int kCodesOffset = First::kBytes - Second::kBytes, kRawScaleBytes = 32;
  static_assert(kStageRows * kRawScaleBytes <= kTableBytes && Second::kL.scale_bytes() == kRawScaleBytes);
  MLA_HD static constexpr int tile_of(int dim) { return dim / kTileDims; }
  MLA_HD static constexpr bool new_tile(int dim) { return dim % kTileDims == 0; }
};

// The kind of row of a call whose caches have these layouts.
template <KvLayoutId kFirst, KvLayoutId kSecond, int kExpanders = 0, bool kHasKeyTable = (kExpanders > 0)>
using CachedRow =
    std::conditional_t<kFirst == kSecond, Row<kFirst>, MixedRow<kFirst, kSecond, kExpanders, kHasKeyTable>>;

// Scales lie in the table of the stage, in units of 2^e.
template <KvLayoutId kFirst, KvLayoutId kSecond, int kExpanders, bool kHasKeyTable>
struct RowScales<MixedRow<kFirst, kSecond, kExpanders, kHasKeyTable>> {
  static constexpr int kPerLane = 0;
  int e;
  __device__ float operator[](int) const { return power_of_two(e); }
};

inline constexpr uint32_t kValidKey = 1, kNanKey = 2;  // bits of `valid`; one layout has the first only

// The scales of keys g and g + 8 for a unit of 32 dims, as factors of A fragments of K.
template <KvLayoutId kFirst, KvLayoutId kSecond, int kExpanders, bool kHasKeyTable>
struct KeyFactors<MixedRow<kFirst, kSecond, kExpanders, kHasKeyTable>> {
  using R = MixedRow<kFirst, kSecond, kExpanders, kHasKeyTable>;
  using Words = std::conditional_t<R::kKeyTable, uint2, uint4>;
  uint32_t of_g[2], of_g8[2];  // [tile]
  __device__ KeyFactors(const uint2& x, int) {
    of_g[0] = low_twice_f16(x.x), of_g8[0] = low_twice_f16(x.y);
    of_g[1] = high_twice_f16(x.x), of_g8[1] = high_twice_f16(x.y);
  }
  __device__ KeyFactors(const uint4& x, int g) {
    const uint32_t same = g % 2 ? 0x3232 : 0x1010;
    of_g[0] = __byte_perm(x.x, 0, same), of_g8[0] = __byte_perm(x.y, 0, same);
    of_g[1] = __byte_perm(x.z, 0, same), of_g8[1] = __byte_perm(x.w, 0, same);
  }
  __device__ static Words load(uint32_t rows, int unit, int g) {
    const uint32_t table = rows + R::kTableOffset + unit * R::kUnitBytes;
    if constexpr (R::kKeyTable) return load_shared_8(table + R::kKeyTableAt + g * 8);
    else return load_shared_16(table + g / 2 * 16);
  }
  __device__ void apply(uint32_t (&a0)[4], uint32_t (&a1)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a0[i] = mul_f16x2(a0[i], i % 2 ? of_g8[0] : of_g[0]);
      a1[i] = mul_f16x2(a1[i], i % 2 ? of_g8[1] : of_g[1]);
    }
  }
};

}  // namespace mla_fp8::gpu
