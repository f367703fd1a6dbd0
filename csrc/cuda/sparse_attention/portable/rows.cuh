#pragma once
// The portable kernel's shared memory, and the two steps that bring a block of rows there: cp.async copies
// rows as they are stored, and decoding makes bf16 latents of them.
#include <algorithm>
#include <bit>

#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/portable/partials.cuh"

namespace mla_fp8::gpu::portable {

constexpr int kBlockKeys = 32;
constexpr int kQuarters = 4;  // parts of the dims, in S

// A CTA of 64 heads is alone on its SM, with up to 255 registers a thread. Two smaller ones may be there,
// with 128. Two of 32 heads fit only where an SM has 228 KB of shared memory.
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
  static constexpr int kWarpTiles = kHeads == 64 ? 2 : 1;  // tiles of a warp in S
  static constexpr int kTileParts = kHeadTiles / kWarpTiles, kKeyParts = kWarps / kQuarters / kTileParts;
  static constexpr int kSoftmaxLanes = kHeads == 64 ? 4 : 8;  // lanes of a head
  static constexpr int kLaneKeys = kBlockKeys / kSoftmaxLanes;
  // Groups of warps have heads of their own.
  static constexpr int kGroups = kHeads == 64 ? 2 : 1, kGroupWarps = kWarps / kGroups;
  static constexpr int kGroupTiles = kHeadTiles / kGroups, kGroupHeads = kHeads / kGroups;
  static constexpr int kWarpDims = kHeadDimV / kGroupWarps;  // value dims of a warp in O
  // kLoadsAhead: of latents, in S. kPlacesAtOnce: a warp reads the places of all its rows before it copies
  // one. Both make groups slower (one H200, dsv4, 4096 queries: 1.91 -> 1.97 and 2.01 ms).
  static constexpr int kLoadsAhead = kGroups == 1 ? 1 : 0;
  static constexpr bool kPlacesAtOnce = kGroups == 1;
  static_assert(kKeyParts >= 1 && kHeads * kSoftmaxLanes <= kThreads);
  static_assert(kGroups == 1 || (kKeyParts == 1 && kGroupTiles == kWarpTiles &&
                                 kGroupHeads * kSoftmaxLanes == kGroupWarps * kWarpSize),
                "a group's warps have its heads in S and P, too");
};

// The kinds of rows that kernels are compiled for. All else but the dims are numbers at run time, so layouts
// of one kind share their kernels.
enum class RowKind {
  kBf16,    // latents as they are
  kE4m3fn,  // one layout
  kAny,     // coded elements: e4m3fn, e4m3fnuz or e2m1; also two caches in two layouts
};
constexpr RowKind kind_of(KvPair layouts) {
  const Format format = kv_layout(layouts.first).nope_format;
  return format == Format::kBf16                            ? RowKind::kBf16
         : format == Format::kE4m3fn && !layouts.is_mixed() ? RowKind::kE4m3fn
                                                            : RowKind::kAny;
}
struct RowNumbers {
  Format format;  // the first coded_dims elements; the others are bf16
  ScaleFormat scale_format;
  int coded_dims, bf16_offset, bytes;  // `bytes`: a row, without scales that lie apart
  int scale_offset, scale_bytes;       // scales: offset in shared memory; bytes apart from the row, or 0
  int tile_log2;                       // dims that share a scale

  RowNumbers() = default;
  constexpr explicit RowNumbers(const KvLayout& l)
      : format(l.nope_format),
        scale_format(l.scale_format),
        coded_dims(l.nope_format == Format::kBf16             ? 0
                   : l.scale_format == ScaleFormat::kPerLayer ? l.head_dim_qk()
                                                              : l.nope_dim),
        bf16_offset(coded_dims == 0 ? 0 : l.rope_offset()),
        bytes(l.token_stride()),
        scale_offset(l.scale_placement == ScalePlacement::kPageTail ? bytes : l.nope_bytes()),
        scale_bytes(l.scale_placement == ScalePlacement::kPageTail ? l.scale_bytes() : 0),
        tile_log2(l.tile_dim > 0 ? std::countr_zero(static_cast<unsigned>(l.tile_dim)) : 0) {}
  // Bytes from row to row in shared memory: an odd multiple of 16, against bank conflicts.
  constexpr int pitch() const { return align_up(bytes + scale_bytes, 16) | 16; }
};
// The least and the most of a number among the layouts of a kind.
struct Range {
  int least, most;
};
template <class Fn>
constexpr Range range_of(RowKind kind, int dims, Fn&& number) {
  Range range{1 << 30, 0};
  for (int i = 0; i < kNumKvLayouts; ++i) {
    const KvLayout l = kv_layout(static_cast<KvLayoutId>(i));
    const bool is_bf16 = l.nope_format == Format::kBf16, is_e4m3fn = l.nope_format == Format::kE4m3fn;
    const bool is_one = kind == RowKind::kBf16 ? is_bf16 : kind == RowKind::kE4m3fn ? is_e4m3fn : !is_bf16;
    if (!is_one || l.head_dim_qk() != dims) continue;
    const int x = number(RowNumbers(l));
    range = {std::min(range.least, x), std::max(range.most, x)};
  }
  return range;
}
template <RowKind kKind, int kDims>
inline constexpr Range kBytesOf = range_of(kKind, kDims, [](const RowNumbers& r) { return r.bytes; });
template <RowKind kKind, int kDims>
inline constexpr Range kCodedDimsOf =
    range_of(kKind, kDims, [](const RowNumbers& r) { return r.coded_dims; });
struct RowsParams : PortableParams {
  RowNumbers rows[2];  // one for each scope
};
inline RowsParams rows_params(const SparseAttentionParams& p, int splits) {
  return {{p, splits}, {RowNumbers(kv_layout(p.layout)), RowNumbers(kv_layout(p.extra_layout))}};
}

// Finds the page of a slot below 2^31 without a division.
struct Pages {
  unsigned page_size, factor;  // factor: pages in 2^32 - 1 rows
  Pages() = default;
  __device__ explicit Pages(const KvScope& scope)
      : page_size(static_cast<unsigned>(scope.page_size)), factor(~0u / page_size) {}
  __device__ unsigned of(unsigned slot) const {
    const unsigned page = __umulhi(slot, factor);  // or one too low
    return page + (slot - page * page_size >= page_size);
  }
};

// The place of a row in its cache.
struct Place {
  unsigned page;
  int64_t in_page;
};

// Addresses of a block's rows and scales; null: no row.
template <bool kScalesApart, bool kTwoLayouts>
struct Places {
  alignas(16) const uint8_t* row[kBlockKeys];
  const uint8_t* scales[kScalesApart ? kBlockKeys : 1];
  bool is_extra[kTwoLayouts ? kBlockKeys : 1];
};

template <class KeysOf, RowKind kKind, int kDims_, int kHeads>
struct Shared {
  // The next rows are fetched after these are decoded with one stage, before that with two.
  static constexpr int kStages = kHeads == 64 ? 1 : 2;
  static constexpr int kRows = kHeads, kDims = kDims_;
  static constexpr int kPitch = kDims + 8;  // elements: 16 bytes past a multiple of 128 bytes
  static constexpr int kWeightsPitch = kBlockKeys + 8;
  static constexpr bool kDecodes = kKind != RowKind::kBf16, kTwoLayouts = kKind == RowKind::kAny;
  static constexpr int kRawPitch = range_of(kKind, kDims, [](const RowNumbers& r) { return r.pitch(); }).most;
  static constexpr int kMostScaleBytes =
      range_of(kKind, kDims, [](const RowNumbers& r) { return r.scale_bytes; }).most;
  static constexpr bool kScalesApart = kMostScaleBytes > 0;
  static_assert(kDecodes || (kStages == 2 && kRawPitch == kPitch * 2), "bf16 rows are latents as they are");
  alignas(16) uint8_t raw[kStages][kBlockKeys][kRawPitch];
  alignas(16) uint16_t latent[kDecodes ? kBlockKeys : 1][kPitch];
  alignas(16) float logits[kQuarters][kHeads * kBlockKeys];  // [quarter][logit_index]
  alignas(16) uint16_t weights[kHeads][kWeightsPitch];
  float factor[kHeads];                             // multiplies earlier sums and outputs
  float out_factor[kHeads];                         // multiplies the output at the end
  bool sees[KeysOf::kSeveralQueries ? kHeads : 1];  // rows that see one of the last keys
  Places<kScalesApart, kTwoLayouts> places[2];      // even and odd blocks
  // Kept here for looking up rows, as registers are short. A lane's valid_keys are the same in all warps.
  ValidKeys<MapInShared> valid_keys[kWarpSize];
  typename KeysOf::Keys keys;
  Pages pages[2];  // one for each scope
  int num_blocks;
  alignas(8) uint8_t map[kMapBytes];  // the query's valid keys

  // The order of octets of keys changes from head to head: the stores of S and the loads of P fall into
  // different banks.
  __device__ static int logit_index(int head, int key) { return head * kBlockKeys + (key ^ head % 4 * 8); }
  __device__ uint16_t (*latents(int stage)) [kPitch] {
    if constexpr (kDecodes) return latent;
    else return reinterpret_cast<uint16_t (*)[kPitch]>(raw[stage]);
  }
};

// Reads the thread's number anew. Otherwise addresses by it and a row's numbers would be computed once,
// before the first block, and spilled.
__device__ __forceinline__ int thread_found_here() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

// Gathers the rows of a split's keys: one warp looks up where those of a block lie, then all lanes of a warp
// copy a row.
template <class KeysOf, RowKind kKind, int kDims, int kHeads>
class Gather {
 public:
  using Smem = Shared<KeysOf, kKind, kDims, kHeads>;
  using Params = typename KeysOf::Params;
  __device__ Gather(const Params& params, Smem& smem, int first, int end)
      : params_(params), smem_(smem), first_(first), end_(end) {}

  // Starts the loads of a block's slots. `finish` waits for them, and writes down where the rows lie.
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
      const RowNumbers& r = params_.rows[Smem::kTwoLayouts && is_extra];
      row = at + in_page * r.bytes;
      if constexpr (Smem::kScalesApart) scales = at + s.page_size * r.bytes + in_page * r.scale_bytes;
    }
    places.row[lane] = row;
    if constexpr (Smem::kScalesApart) places.scales[lane] = scales;
    if constexpr (Smem::kTwoLayouts) places.is_extra[lane] = is_extra;
  }
  // Starts the copies of a block.
  __device__ __forceinline__ void start(int block) const { start_copies<false>(smem_, params_.rows, block); }
  // Does so through the L1, for keys that name one row: thousands of copies of it would queue at its few
  // lines of the L2. Does nothing behind the last block. A call takes no registers of the kernel.
  __device__ __forceinline__ void start_through_l1(int block) const {
    start_slowly(smem_, params_.rows, block);
  }

 private:
  static __device__ __noinline__ void start_slowly(Smem& smem, const RowNumbers* numbers, int block) {
    if (block < smem.num_blocks) start_copies<true>(smem, numbers, block);
  }
  template <bool kThroughL1>
  static __device__ __forceinline__ void start_copies(Smem& smem, const RowNumbers* numbers, int block) {
    constexpr int kRowsPerWarp = Team<kHeads>::kRowsPerWarp;
    constexpr bool kAtOnce = Team<kHeads>::kPlacesAtOnce;
    const int thread = thread_found_here(), lane = thread % kWarpSize;
    const int first_key = thread / kWarpSize * kRowsPerWarp;
    const auto& places = smem.places[block % 2];
    auto& stage = smem.raw[block % Smem::kStages];
    static_assert(Smem::kMostScaleBytes <= kWarpSize / kRowsPerWarp * 8);
    const auto numbers_of = [&](int key) -> const RowNumbers& {
      if constexpr (Smem::kTwoLayouts) return numbers[places.is_extra[key]];
      else return numbers[0];
    };
    const auto copy_scales = [&](int key, int byte) {
      if constexpr (Smem::kScalesApart)
        if (const RowNumbers& r = numbers_of(key); byte < r.scale_bytes)
          cp_async_8(shared_address(stage[key]) + r.scale_offset + byte, places.scales[key] + byte,
                     places.row[key] != nullptr);
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
      const int bytes = numbers_of(key).bytes;
#pragma unroll
      for (int first = 0; first < kBytesOf<kKind, kDims>.most; first += kWarpSize * 16) {
        const int byte = first + lane * 16;
        if (first + kWarpSize * 16 <= kBytesOf<kKind, kDims>.least || byte < bytes)
          cp_async_16<kThroughL1>(dst + byte, row + byte, row != nullptr);
      }
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

// The part of a raw row that a lane has: elements by eights with their scales, and 8 bf16. The scale of a
// uniform FP8 layout multiplies logits and output instead: exact here.
template <RowKind kKind, int kDims>
struct Codes {
  static constexpr bool kAny = kKind == RowKind::kAny;
  static constexpr int kPerLane = ceil_div(kDims / 8, kWarpSize);
  static constexpr Range kCoded = kCodedDimsOf<kKind, kDims>;
  Words<2> codes[kPerLane];  // one word of e2m1
  float scale[kPerLane];
  Words<4> bf16;

  __device__ __forceinline__ static int dim(int i, int lane) { return (i * kWarpSize + lane) * 8; }
  __device__ __forceinline__ static bool is_coded(const RowNumbers& r, int i, int lane) {
    return (i + 1) * kWarpSize * 8 <= kCoded.least || dim(i, lane) < r.coded_dims;
  }
  __device__ __forceinline__ static bool has_bf16(const RowNumbers& r, int lane) {
    return lane * 8 < kDims - r.coded_dims;
  }
  __device__ __forceinline__ void load(const RowNumbers& r, const uint8_t* raw, int lane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int d = dim(i, lane);
      if (!is_coded(r, i, lane)) continue;
      if (kAny && r.format == Format::kE2m1) codes[i][0] = *reinterpret_cast<const uint32_t*>(raw + d / 2);
      else codes[i] = *reinterpret_cast<const Words<2>*>(raw + d);
      scale[i] = load_scale_of(r, raw + r.scale_offset, d >> r.tile_log2);
    }
    if (has_bf16(r, lane)) bf16 = *reinterpret_cast<const Words<4>*>(raw + r.bf16_offset + lane * 16);
  }
  __device__ __forceinline__ void store(const RowNumbers& r, uint16_t* latent, int lane) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (is_coded(r, i, lane))
        *reinterpret_cast<Words<4>*>(latent + dim(i, lane)) = decoded(r, codes[i], scale[i]);
    if (has_bf16(r, lane)) *reinterpret_cast<Words<4>*>(latent + r.coded_dims + lane * 8) = bf16;
  }

 private:
  __device__ __forceinline__ static float load_scale_of(const RowNumbers& r, const uint8_t* scales,
                                                        int tile) {
    if (r.scale_format == ScaleFormat::kF32) return load_scale<ScaleFormat::kF32>(scales, tile);
    if (r.scale_format == ScaleFormat::kUe8m0) return load_scale<ScaleFormat::kUe8m0>(scales, tile);
    if (kAny && r.scale_format == ScaleFormat::kE4m3) return load_scale<ScaleFormat::kE4m3>(scales, tile);
    return 1.0f;
  }
  __device__ __forceinline__ static Words<4> decoded(const RowNumbers& r, const Words<2>& codes,
                                                     float scale) {
    if (kAny && r.format == Format::kE2m1) return decode8<Format::kE2m1>(Words<1>{codes[0]}, scale);
    if (kAny && r.format == Format::kE4m3fnuz) return decode8<Format::kE4m3fnuz>(codes, scale);
    return decode8<Format::kE4m3fn>(codes, scale);
  }
};

// Makes bf16 latents of a block's raw rows; all lanes of a warp convert a row.
template <class KeysOf, RowKind kKind, int kDims, int kHeads>
__device__ __forceinline__ void decode_block(Shared<KeysOf, kKind, kDims, kHeads>& smem,
                                             const RowNumbers* numbers, int block) {
  using Smem = Shared<KeysOf, kKind, kDims, kHeads>;
  constexpr int kRowsPerWarp = Team<kHeads>::kRowsPerWarp;
  // Rows whose bytes are loaded before the first is converted: two of one layout, where there are registers.
  constexpr int kAtOnce = kHeads == 64 && kDims == kHeadDimV && !Smem::kTwoLayouts ? 2 : 1;
  const int thread = thread_found_here(), lane = thread % kWarpSize;
  const int first_key = thread / kWarpSize * kRowsPerWarp;
  const auto& raw = smem.raw[block % Smem::kStages];
#pragma unroll 1
  for (int key = first_key; key < first_key + kRowsPerWarp; key += kAtOnce) {
    const RowNumbers& r = numbers[Smem::kTwoLayouts && smem.places[block % 2].is_extra[key]];
    Codes<kKind, kDims> codes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) codes[i].load(r, raw[key + i], lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) codes[i].store(r, smem.latent[key + i], lane);
  }
}

}  // namespace mla_fp8::gpu::portable
