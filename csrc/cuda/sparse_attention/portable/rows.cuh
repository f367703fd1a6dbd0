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
constexpr int kQuarters = 4;      // of the dims, in S
constexpr int kSoftmaxLanes = 8;  // of a head
constexpr int kLaneKeys = kBlockKeys / kSoftmaxLanes;

// A CTA of 64 heads is alone on its SM, others may be two: warps have 128 registers each.
template <int kHeads>
struct Team {
  static constexpr int kWarps = kHeads == 64 ? 16 : 8, kThreads = kWarps * kWarpSize;
  static constexpr int kCtasPerSm = kHeads == 64 ? 1 : 2;
  static constexpr int kRowsPerWarp = kBlockKeys / kWarps;
  static constexpr int kWarpDims = kHeadDimV / kWarps;
  static constexpr int kHeadTiles = kHeads / 16, kKeyParts = kWarps / kQuarters / kHeadTiles;
  static_assert(kKeyParts >= 1 && kHeads * kSoftmaxLanes <= kThreads);
};

// kId: of rows of the first cache, kExtra: of the second.
template <KvLayoutId kId, KvLayoutId kExtra, int kHeads>
struct Shared {
  using R = Row<kId>;
  // With one, the next block's rows are asked for once this one's are decoded; with two before that.
  static constexpr int kStages = kHeads == 64 ? 1 : 2;
  static constexpr int kDims = R::kDims;
  static constexpr int kPitch = kDims + 8;  // elements: 16 bytes past a multiple of 128 bytes
  static constexpr int kWeightsPitch = kBlockKeys + 8;
  static constexpr bool kDecodes = R::kFp8Dims > 0;
  static constexpr int kRawPitch = std::max(R::kPitch, Row<kExtra>::kPitch);
  static_assert(kDims == Row<kExtra>::kDims && (kDecodes || kStages == 2));
  static_assert(kDecodes || (kId == kExtra && kRawPitch == kPitch * 2), "bf16 rows are latents as they are");
  alignas(16) uint8_t raw[kStages][kBlockKeys][kRawPitch];
  alignas(16) uint16_t latent[kDecodes ? kBlockKeys : 1][kPitch];
  alignas(16) float logits[kQuarters][kHeads * kBlockKeys];  // by logit_index
  alignas(16) uint16_t weights[kHeads][kWeightsPitch];
  float factor[kHeads];                // on what has been summed up before this block
  float max[kHeads], sum[kHeads];      // at the end
  bool is_extra[kStages][kBlockKeys];  // the row
  alignas(8) uint8_t map[kMapBytes];   // of the row's valid keys

  // Octets of keys in an order that changes from head to head: the stores of S and the loads of P fall into
  // different banks.
  __device__ static int logit_index(int head, int key) { return head * kBlockKeys + (key ^ head % 4 * 8); }
  __device__ const uint16_t (*latents(int stage) const)[kPitch] {
    if constexpr (kDecodes) return latent;
    else return reinterpret_cast<const uint16_t (*)[kPitch]>(raw[stage]);
  }
};

// Runs fn(Row<layout>{}) for the cache that a row is of.
template <KvLayoutId kId, KvLayoutId kExtra, class Fn>
__device__ __forceinline__ void with_row(bool is_extra, Fn&& fn) {
  if (kId == kExtra || !is_extra) fn(Row<kId>{});
  else fn(Row<kExtra>{});
}

// The keys of one split, by rank, and the copies of their rows. A warp fetches its rows of each block one
// after the other, each by all lanes; lane i knows row i % kRowsPerWarp.
template <KvLayoutId kId, KvLayoutId kExtra, int kRowsPerWarp>
class Gather {
 public:
  __device__ Gather(const SparseAttentionParams& p, const Keys& keys,
                    const ValidKeys<MapInShared>& valid_keys, int first, int end)
      : p_(p), source_(p, keys), valid_keys_(valid_keys), next_(first), end_(end) {
    look_up();
  }
  // Starts the copies of the next block, and the look-up of the one after it.
  template <class Smem>
  __device__ __forceinline__ void start(Smem& smem, int stage) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const uint8_t *own_row = nullptr, *own_scales = nullptr;  // none: zeros, and nothing is read
    const bool own_extra = is_key_ && key_.scope == 1;
    if (is_key_) {
      const KvScope& s = p_.scopes[key_.scope];
      const unsigned page = static_cast<unsigned>(key_.slot) / static_cast<unsigned>(s.page_size);
      const int64_t in_page = key_.slot - static_cast<int64_t>(page) * s.page_size;
      const uint8_t* at = s.kv_cache + page * s.kv_cache_stride_page;
      with_row<kId, kExtra>(own_extra, [&](auto r) {
        constexpr KvLayout kL = decltype(r)::kL;
        own_row = at + kL.token_offset(in_page);
        own_scales = at + kL.scale_offset(in_page, s.page_size);
      });
    }
    if (lane < kRowsPerWarp) smem.is_extra[stage][warp * kRowsPerWarp + lane] = own_extra;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const uint8_t* row = broadcast(own_row, i);
      const bool is_key = row != nullptr, is_extra = kId != kExtra && broadcast(int{own_extra}, i);
      const uint32_t dst = shared_address(smem.raw[stage][warp * kRowsPerWarp + i]);
      with_row<kId, kExtra>(is_extra, [&](auto r) {
        using R = decltype(r);
#pragma unroll
        for (int first = 0; first < R::kBytes; first += kWarpSize * 16) {
          const int byte = first + lane * 16;
          if (first + kWarpSize * 16 <= R::kBytes || byte < R::kBytes)
            cp_async_16(dst + byte, row + byte, is_key);
        }
        if constexpr (R::kScalesApart) {
          const uint8_t* scales = broadcast(own_scales, i);
          if (lane < R::kL.scale_bytes() / 8)
            cp_async_8(dst + R::kScaleOffset + lane * 8, scales + lane * 8, is_key);
        }
      });
    }
    look_up();
  }

 private:
  __device__ __forceinline__ void look_up() {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int rank = next_ + warp * kRowsPerWarp + lane % kRowsPerWarp;
    is_key_ = rank < end_;
    key_ = valid_keys_.find(source_, is_key_ ? rank : -1);
    next_ += kBlockKeys;
  }

  const SparseAttentionParams& p_;
  const KeySource source_;
  const ValidKeys<MapInShared>& valid_keys_;
  int next_, end_;
  bool is_key_;
  KeySource::Key key_;
};

// Elements dim to dim + 7 of a raw row, which are FP8 or FP4, as bf16. The scale of a uniform FP8 layout
// multiplies logits and output instead: exact here.
template <class R>
__device__ __forceinline__ Words<4> decode_unit(const uint8_t* row, int dim) {
  constexpr KvLayout kL = R::kL;
  constexpr int kBytes = format_bits(kL.nope_format);  // of 8 elements
  float scale = 1.0f;
  if constexpr (R::kNumScales > 0)
    scale = load_scale<kL.scale_format>(row + R::kScaleOffset, dim / R::kTileDims);
  return decode8<kL.nope_format>(*reinterpret_cast<const Words<kBytes / 4>*>(row + dim / 8 * kBytes), scale);
}

// Raw rows to bf16 latents; a warp decodes the rows that it fetched, 8 elements a lane at a time.
template <KvLayoutId kId, KvLayoutId kExtra, int kHeads>
__device__ __forceinline__ void decode_block(Shared<kId, kExtra, kHeads>& smem, int stage) {
  constexpr int kRowsPerWarp = Team<kHeads>::kRowsPerWarp;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll 2
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int key = warp * kRowsPerWarp + i;
    const uint8_t* raw = smem.raw[stage][key];
    uint16_t* latent = smem.latent[key];
    with_row<kId, kExtra>(smem.is_extra[stage][key], [&](auto r) {
      using R = decltype(r);
      constexpr int kUnits = R::kFp8Dims / 8;
#pragma unroll
      for (int first = 0; first < kUnits; first += kWarpSize) {
        const int dim = (first + lane) * 8;
        if (first + kWarpSize <= kUnits || first + lane < kUnits)
          *reinterpret_cast<Words<4>*>(latent + dim) = decode_unit<R>(raw, dim);
      }
      if (lane < R::kBf16Dims / 8)
        *reinterpret_cast<Words<4>*>(latent + R::kFp8Dims + lane * 8) =
            *reinterpret_cast<const Words<4>*>(raw + R::kBf16Offset + lane * 16);
    });
  }
}

}  // namespace mla_fp8::gpu::portable
