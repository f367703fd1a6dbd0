#pragma once
// Shared memory of the portable kernel, and what brings a block of rows there: by cp.async as they are
// stored, then as bf16 latents.
#include <algorithm>

#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/row.cuh"

namespace mla_fp8::gpu::portable {

constexpr int kBlockKeys = 32;
constexpr int kQuarters = 4;  // of the dims, in S

// A CTA of 64 heads is alone on its SM: its warps have 255 registers each. Others may be two, and have 128.
// Of 32 heads two fit only where an SM has 228 KB of shared memory.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
inline constexpr int kMostCtasOf32Heads = 2;
#else
inline constexpr int kMostCtasOf32Heads = 1;
#endif
template <int kHeads>
struct Team {
  static constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;
  static constexpr int kCtasPerSm = kHeads == 64 ? 1 : kHeads == 32 ? kMostCtasOf32Heads : 2;
  static constexpr int kRowsPerWarp = kBlockKeys / kWarps;
  static constexpr int kHeadTiles = kHeads / 16;
  static constexpr int kWarpTiles = kHeads == 64 ? 2 : 1;  // of a warp in S, which has a quarter of the dims
  static constexpr int kTileParts = kHeadTiles / kWarpTiles, kKeyParts = kWarps / kQuarters / kTileParts;
  static constexpr int kSoftmaxLanes = kHeads == 64 ? 4 : 8;  // of a head
  static constexpr int kLaneKeys = kBlockKeys / kSoftmaxLanes;
  // Of warps, which have heads of their own.
  static constexpr int kGroups = kHeads == 64 ? 2 : 1, kGroupWarps = kWarps / kGroups;
  static constexpr int kGroupTiles = kHeadTiles / kGroups, kGroupHeads = kHeads / kGroups;
  static constexpr int kWarpDims = kHeadDimV / kGroupWarps;  // in O
  // Of latents, in S; and whether a warp knows the places of all its rows before it asks for the first.
  // Groups are slower with these (one H200, dsv4, 4096 rows: 1.91 -> 1.97, 2.01 ms).
  static constexpr int kLoadsAhead = kGroups == 1 ? 1 : 0;
  static constexpr bool kPlacesAtOnce = kGroups == 1;
  static_assert(kKeyParts >= 1 && kHeads * kSoftmaxLanes <= kThreads);
  static_assert(kGroups == 1 || (kKeyParts == 1 && kGroupTiles == kWarpTiles &&
                                 kGroupHeads * kSoftmaxLanes == kGroupWarps * kWarpSize),
                "a group's warps have its heads in S and P, too");
};

// The page of a slot, which is below 2^31, without a division.
struct Pages {
  unsigned page_size, factor;  // factor: how many fit into 2^32 - 1 rows
  Pages() = default;
  __device__ explicit Pages(const KvScope& scope)
      : page_size(static_cast<unsigned>(scope.page_size)), factor(~0u / page_size) {}
  __device__ unsigned of(unsigned slot) const {
    const unsigned page = __umulhi(slot, factor);  // or one too low
    return page + (slot - page * page_size >= page_size);
  }
};

// Of a row in its cache.
struct Place {
  unsigned page;
  int64_t in_page;
};

// Where the rows of a block lie; null: none.
template <bool kScalesApart>
struct Places {
  alignas(16) const uint8_t* row[kBlockKeys];
  const uint8_t* scales[kScalesApart ? kBlockKeys : 1];
  bool is_extra[kBlockKeys];
};

// kId: of rows of the first cache, kExtra: of the second.
template <class KeysOf, KvLayoutId kId, KvLayoutId kExtra, int kHeads>
struct Shared {
  using R = Row<kId>;
  // With one, the next rows are asked for once these are decoded; with two before that.
  static constexpr int kStages = kHeads == 64 ? 1 : 2;
  static constexpr int kRows = kHeads, kDims = R::kDims;
  static constexpr int kPitch = kDims + 8;  // elements: 16 bytes past a multiple of 128 bytes
  static constexpr int kWeightsPitch = kBlockKeys + 8;
  static constexpr bool kDecodes = R::kFp8Dims > 0;
  static constexpr bool kScalesApart = R::kScalesApart || Row<kExtra>::kScalesApart;
  static constexpr int kRawPitch = std::max(R::kPitch, Row<kExtra>::kPitch);
  static_assert(kDims == Row<kExtra>::kDims && (kDecodes || kStages == 2));
  static_assert(kDecodes || (kId == kExtra && kRawPitch == kPitch * 2), "bf16 rows are latents as they are");
  alignas(16) uint8_t raw[kStages][kBlockKeys][kRawPitch];
  alignas(16) uint16_t latent[kDecodes ? kBlockKeys : 1][kPitch];
  alignas(16) float logits[kQuarters][kHeads * kBlockKeys];  // by logit_index
  alignas(16) uint16_t weights[kHeads][kWeightsPitch];
  float factor[kHeads];                             // on what has been summed up before this block
  float out_factor[kHeads];                         // at the end
  bool sees[KeysOf::kSeveralQueries ? kHeads : 1];  // of rows, one of the last keys
  Places<kScalesApart> places[2];                   // of even and of odd blocks
  // What looks rows up, here because registers are short: valid_keys is each lane's, the same for any warp.
  ValidKeys<MapInShared> valid_keys[kWarpSize];
  typename KeysOf::Keys keys;
  Pages pages[2];  // of each scope
  int num_blocks;
  alignas(8) uint8_t map[kMapBytes];  // of the row's valid keys

  // Octets of keys in an order that changes from head to head: the stores of S and the loads of P fall into
  // different banks.
  __device__ static int logit_index(int head, int key) { return head * kBlockKeys + (key ^ head % 4 * 8); }
  __device__ uint16_t (*latents(int stage)) [kPitch] {
    if constexpr (kDecodes) return latent;
    else return reinterpret_cast<uint16_t (*)[kPitch]>(raw[stage]);
  }
};

// Runs fn(Row<layout>{}) for the cache that a row is of.
template <KvLayoutId kId, KvLayoutId kExtra, class Fn>
__device__ __forceinline__ void with_row(bool is_extra, Fn&& fn) {
  if (kId == kExtra || !is_extra) fn(Row<kId>{});
  else fn(Row<kExtra>{});
}

// The rows of one split's keys: where they lie, which one warp finds out for a block, and the copies of them,
// each by all lanes of a warp.
template <class KeysOf, KvLayoutId kId, KvLayoutId kExtra, int kHeads>
class Gather {
 public:
  using Smem = Shared<KeysOf, kId, kExtra, kHeads>;
  using Params = typename KeysOf::Params;
  __device__ Gather(const Params& params, Smem& smem, int first, int end)
      : params_(params), smem_(smem), first_(first), end_(end) {}

  // Asks for the slots of a block, which `finish` waits for: it notes down where the rows lie.
  __device__ __forceinline__ void look_up(int block) {
    const int lane = threadIdx.x % kWarpSize;
    const auto source = KeysOf::source(params_, smem_.keys);
    const int rank = first_ + block * kBlockKeys + lane;
    is_key_ = rank < end_;
    if constexpr (KeysOf::kSeveralQueries)
      if (const int last = block - ceil_div(end_ - first_, kBlockKeys); last >= 0) {
        is_key_ = lane == 0 && block < smem_.num_blocks;
        if (is_key_) key_ = source.last(last);
        return;
      }
    key_ = smem_.valid_keys[lane].find(source, is_key_ ? rank : -1);
  }
  __device__ __forceinline__ void finish(int block) const {
    const int lane = threadIdx.x % kWarpSize;
    auto& places = smem_.places[block % 2];
    const bool is_extra = is_key_ && key_.scope == 1;
    const uint8_t *row = nullptr, *scales = nullptr;
    if (is_key_ && (!KeysOf::kSeveralQueries || KeysOf::source(params_, smem_.keys).is_valid(key_))) {
      const KvScope& s = params_.p.scopes[key_.scope];
      const auto [page, in_page] = KeysOf::place(key_, smem_.pages[key_.scope], s);
      const uint8_t* at = s.kv_cache + page * s.kv_cache_stride_page;
      with_row<kId, kExtra>(is_extra, [&](auto r) {
        constexpr KvLayout kL = decltype(r)::kL;
        row = at + kL.token_offset(in_page);
        scales = at + kL.scale_offset(in_page, s.page_size);
      });
    }
    places.row[lane] = row;
    if constexpr (Smem::kScalesApart) places.scales[lane] = scales;
    if constexpr (kId != kExtra) places.is_extra[lane] = is_extra;
  }
  // Starts the copies of a block.
  __device__ __forceinline__ void start(int block) const { start_copies<false>(smem_, block); }
  // The same of rows that may be one; nothing behind the last block. Thousands of copies of one row would
  // queue at its few lines of the L2. A call, so that it takes no registers.
  __device__ __forceinline__ void start_through_l1(int block) const { start_slowly(smem_, block); }

 private:
  static __device__ __noinline__ void start_slowly(Smem& smem, int block) {
    if (block < smem.num_blocks) start_copies<true>(smem, block);
  }
  template <bool kThroughL1>
  static __device__ __forceinline__ void start_copies(Smem& smem, int block) {
    constexpr int kRowsPerWarp = Team<kHeads>::kRowsPerWarp;
    constexpr bool kAtOnce = Team<kHeads>::kPlacesAtOnce;
    const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x / kWarpSize * kRowsPerWarp;
    const auto& places = smem.places[block % 2];
    auto& stage = smem.raw[block % Smem::kStages];
    const auto copy_scales = [&](int key, int byte) {
      with_row<kId, kExtra>(kId != kExtra && places.is_extra[key], [&](auto r) {
        using R = decltype(r);
        static_assert(!R::kScalesApart || R::kL.scale_bytes() <= kWarpSize / kRowsPerWarp * 8);
        if constexpr (R::kScalesApart)
          if (byte < R::kL.scale_bytes())
            cp_async_8(shared_address(stage[key]) + R::kScaleOffset + byte, places.scales[key] + byte,
                       places.row[key] != nullptr);
      });
    };
    const uint8_t* rows[kRowsPerWarp];
    if constexpr (kAtOnce)
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) rows[i] = places.row[first_key + i];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int key = first_key + i;
      const uint8_t* const row = kAtOnce ? rows[i] : places.row[key];
      const uint32_t dst = shared_address(stage[key]);
      with_row<kId, kExtra>(kId != kExtra && places.is_extra[key], [&](auto r) {
        using R = decltype(r);
#pragma unroll
        for (int first = 0; first < R::kBytes; first += kWarpSize * 16) {
          const int byte = first + lane * 16;
          if (first + kWarpSize * 16 <= R::kBytes || byte < R::kBytes)
            cp_async_16<kThroughL1>(dst + byte, row + byte, row != nullptr);
        }
      });
      if constexpr (!kAtOnce) copy_scales(key, lane * 8);
    }
    if constexpr (kAtOnce) copy_scales(first_key + lane % kRowsPerWarp, lane / kRowsPerWarp * 8);
  }

  const Params& params_;
  Smem& smem_;
  const int first_, end_;
  bool is_key_;
  typename KeysOf::Key key_;
};

// What a lane has of a raw row: elements by eights with their scales, and 8 bf16. The scale of a uniform FP8
// layout multiplies logits and output instead: exact here.
template <class R>
struct Codes {
  static constexpr KvLayout kL = R::kL;
  static constexpr int kUnits = R::kFp8Dims / 8, kPerLane = ceil_div(kUnits, kWarpSize);
  static constexpr int kWords = format_bits(kL.nope_format) / 4;
  Words<kWords> codes[kPerLane];
  float scale[kPerLane];
  Words<4> bf16;

  __device__ __forceinline__ static bool has(int i, int lane) {
    return (i + 1) * kWarpSize <= kUnits || i * kWarpSize + lane < kUnits;
  }
  __device__ __forceinline__ void load(const uint8_t* raw, int lane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int unit = i * kWarpSize + lane;
      if (!has(i, lane)) continue;
      codes[i] = *reinterpret_cast<const Words<kWords>*>(raw + unit * kWords * 4);
      scale[i] = 1.0f;
      if constexpr (R::kNumScales > 0)
        scale[i] = load_scale<kL.scale_format>(raw + R::kScaleOffset, unit * 8 / R::kTileDims);
    }
    if (lane < R::kBf16Dims / 8) bf16 = *reinterpret_cast<const Words<4>*>(raw + R::kBf16Offset + lane * 16);
  }
  __device__ __forceinline__ void store(uint16_t* latent, int lane) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (has(i, lane))
        *reinterpret_cast<Words<4>*>(latent + (i * kWarpSize + lane) * 8) =
            decode8<kL.nope_format>(codes[i], scale[i]);
    if (lane < R::kBf16Dims / 8) *reinterpret_cast<Words<4>*>(latent + R::kFp8Dims + lane * 8) = bf16;
  }
};

// Raw rows to bf16 latents, each by all lanes of a warp.
template <class KeysOf, KvLayoutId kId, KvLayoutId kExtra, int kHeads>
__device__ __forceinline__ void decode_block(Shared<KeysOf, kId, kExtra, kHeads>& smem, int block) {
  using Smem = Shared<KeysOf, kId, kExtra, kHeads>;
  constexpr int kRowsPerWarp = Team<kHeads>::kRowsPerWarp;
  // Rows whose bytes are loaded before the first is converted, where there are registers.
  constexpr int kAtOnce = kHeads == 64 && kId == kExtra ? 2 : 1;
  const int first_key = threadIdx.x / kWarpSize * kRowsPerWarp, lane = threadIdx.x % kWarpSize;
  const auto& raw = smem.raw[block % Smem::kStages];
#pragma unroll
  for (int key = first_key; key < first_key + kRowsPerWarp; key += kAtOnce)
    with_row<kId, kExtra>(kId != kExtra && smem.places[block % 2].is_extra[key], [&](auto r) {
      Codes<decltype(r)> codes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) codes[i].load(raw[key + i], lane);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) codes[i].store(smem.latent[key + i], lane);
    });
}

}  // namespace mla_fp8::gpu::portable
