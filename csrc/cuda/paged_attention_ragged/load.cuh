#pragma once
// Finds the rows and keys of a block, and loads keys into shared memory and queries into registers.
#include "cuda/device/global.cuh"
#include "cuda/paged_attention_ragged/config.cuh"

namespace mla_fp8::gpu::ragged {

// The part of the problem that this block works on.
struct Work {
  int64_t request, kv_head, first_page;  // first_page: an index into kv_indices
  int64_t num_keys;                      // of the request
  int split, first_row;                  // first_row: among the rows of the request and KV head

  __device__ explicit Work(const PagedAttentionRaggedParams& p, unsigned row_tiles) {
    unsigned block = blockIdx.x;  // neighbouring blocks read the same keys
    first_row = static_cast<int>(block % row_tiles) * kRows;
    block /= row_tiles;
    split = static_cast<int>(block % static_cast<unsigned>(p.num_splits));
    block /= static_cast<unsigned>(p.num_splits);
    kv_head = block % static_cast<unsigned>(p.num_kv_heads);
    request = block / static_cast<unsigned>(p.num_kv_heads);
    const RequestPages pages = find_pages(p, request);
    first_page = pages.first;
    num_keys = pages.num_keys;
  }
};

template <class Cache>
__device__ __forceinline__ void find_rows(Shared<Cache>& s, const Args& args, const Work& w) {
  if (threadIdx.x >= kRows) return;
  const PagedAttentionRaggedParams& p = args.p;
  const int group = args.group, num_rows = group * p.q_len;
  const int row = w.first_row + static_cast<int>(threadIdx.x), last = row < num_rows ? row : num_rows - 1;
  const int position = last / group;
  const int64_t token = w.request * p.q_len + position, head = w.kv_head * group + (last - position * group);
  s.visible[threadIdx.x] = w.num_keys - (p.q_len - 1 - position);
  s.row[threadIdx.x] = row < num_rows ? token * p.num_q_heads + head : -1;
  s.q[threadIdx.x] = token * p.q_stride_token + head * p.q_stride_head;
  s.out[threadIdx.x] = token * p.out_stride_token + head * p.out_stride_head;
  s.head[threadIdx.x] = static_cast<int>(head);
}

// Copies rows of kBytes from source(key) to shared memory. Null rows, and bytes from `used` on, are zeros.
template <CacheDtype kStored, int kBytes, int kPitch, class Source>
__device__ __forceinline__ void stage(uint8_t* rows, int used, const Source& source) {
  constexpr int kPieces = kBytes / 16, kAll = kKeys * kPieces, kEach = ceil_div(kAll, kThreads);
  constexpr int kBatch = kEach < 8 ? kEach : 8;  // loads in flight
  for (int first = this_thread(); first < kAll; first += kBatch * kThreads) {
    Words<4> x[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kThreads, key = i / kPieces, offset = i % kPieces * 16;
      const uint8_t* row = i < kAll ? source(key) : nullptr;
      x[b] = load_if<4>(row + offset, row != nullptr && offset < used);
    }
    if constexpr (kIsHalved<kStored>) halve_codes(x);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kThreads;
      if (i < kAll) *reinterpret_cast<Words<4>*>(rows + i / kPieces * kPitch + i % kPieces * 16) = x[b];
    }
  }
}

// Finds the addresses of keys from `position` on; keys from `end` on are masked.
template <class Cache>
__device__ __forceinline__ void locate(Rows& rows, const Args& args, const Work& w, int64_t position,
                                       int64_t end) {
  const PagedAttentionRaggedParams& p = args.p;
  if (threadIdx.x >= kKeys) return;
  const int key = threadIdx.x;
  position += key;
  const uint8_t *k = nullptr, *v = nullptr, *scales = nullptr;
  if (position < end) {
    const int64_t index = args.page_size(position), row = position - index * p.page_size;
    const int64_t page = p.kv_indices[w.first_page + index];
    if (page >= 0 && page < p.num_pages) {
      k = p.k_cache + page * p.k_cache_stride_page + row * p.k_cache_stride_row +
          w.kv_head * p.k_cache_stride_head;
      v = p.v_cache + page * p.v_cache_stride_page + row * p.v_cache_stride_row +
          w.kv_head * p.v_cache_stride_head;
      scales = Cache::scales(p, page, row);
    }
  }
  rows.k[key] = k;
  rows.v[key] = v;
  rows.scales[key] = scales;
}

template <class Cache>
inline constexpr int kLeadBytes = Cache::kLeadDim * kStoredBytes<Cache::kStored>;

template <class Cache>
__device__ __forceinline__ void stage_keys(Shared<Cache>& s, const Rows& rows,
                                           const PagedAttentionRaggedParams& p) {
  constexpr int kItemsize = kStoredBytes<Cache::kStored>, kBytes = kLeadBytes<Cache>;
  constexpr int kPitch = Shared<Cache>::kPitch;
  const int k_bytes = Cache::kIsLatent ? kBytes : p.head_dim * kItemsize;
  stage<Cache::kStored, kBytes, kPitch>(s.k[0], k_bytes, [&](int key) { return rows.k[key]; });
  if constexpr (!Cache::kIsLatent)
    stage<Cache::kStored, kBytes, kPitch>(s.v[0], p.head_dim_v * kItemsize,
                                          [&](int key) { return rows.v[key]; });
  if constexpr (Cache::kRopeDim > 0)
    stage<CacheDtype::kBf16, 2 * Cache::kRopeDim, 2 * (Cache::kRopeDim + 8)>(
        reinterpret_cast<uint8_t*>(s.rope[0]), 2 * Cache::kRopeDim,
        [&](int key) { return rows.k[key] ? rows.k[key] + Cache::kRopeOffset : nullptr; });
  for (int i = this_thread(); i < Cache::kTiles * kKeys; i += kThreads) {
    const int key = i % kKeys, tile = i / kKeys;
    s.scales[tile][key] = rows.scales[key] ? Cache::scale(rows.scales[key], tile) * kStagedScale : 0.0f;
  }
}

// Prefetches the bytes that stage_keys reads next, where the GPU has an instruction for that.
template <class Cache>
__device__ __forceinline__ void prefetch_keys(const Rows& rows, const PagedAttentionRaggedParams& p) {
  if constexpr (MLA_FP8_PTX) {
    constexpr int kLine = 128, kLines = ceil_div(kLeadBytes<Cache>, kLine) + 1;
    const int k_bytes = p.head_dim * kStoredBytes<Cache::kStored>;
    const int v_bytes = p.head_dim_v * kStoredBytes<Cache::kStored>;
    for (int i = this_thread(); i < kKeys * kLines; i += kThreads) {
      const int key = i / kLines, offset = i % kLines * kLine;
      if (rows.k[key] == nullptr) continue;
      if (offset < k_bytes) prefetch_l2(rows.k[key] + offset);
      if (offset < v_bytes) prefetch_l2(rows.v[key] + offset);
    }
  }
}

// Loads the q operands of this wave's share of the dims: every kShares-th step of 16, so that the tile of a
// step is known when compiling. bf16 dims beside tiles are divided by kUnit, as products of tiles are.
template <class Cache>
inline constexpr int kShareSteps = Cache::kDimQk / kTile / kShares;

template <class Cache>
__device__ __forceinline__ void load_q(Operand (&q)[kShareSteps<Cache>], const Shared<Cache>& s,
                                       const PagedAttentionRaggedParams& p, int share) {
#pragma unroll
  for (int i = 0; i < kOperandRows; ++i) {
    const int row = operand_row(i);
    const bool exists = s.row[row] >= 0;
    const uint16_t* src = static_cast<const uint16_t*>(p.q) + s.q[row];
#pragma unroll
    for (int step = 0; step < kShareSteps<Cache>; ++step) {
      const int k = (step * kShares + share) * kTile + operand_k();
      Words<2>& four = q[step].row[i];
      four = load_if<2>(src + k, exists && k < p.head_dim);
      if (Cache::kRopeDim > 0 && step >= Cache::kLeadDim / kTile / kShares)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          four[j] = pack_bf16(bits_float(four[j] << 16) / kUnit<Cache>,
                              bits_float(four[j] & 0xffff0000u) / kUnit<Cache>);
    }
  }
}

}  // namespace mla_fp8::gpu::ragged
