#pragma once
// The warpgroup that fetches: Q of each item and its selected rows, into swizzled tiles.
#include "cuda/sparse_prefill/warpgroups_bf16_config.cuh"
#include "cuda/warp.cuh"

namespace mla_fp8::gpu {

template <class C>
class RowsGather {
 public:
  __device__ RowsGather(const RowsParams& params, RowsSmem<C> smem, uint64_t* masks, int thread)
      : params_(params),
        smem_(smem),
        masks_(masks),
        lane_(thread % kWarpSize),
        row_(thread / 8),
        chunk_(thread % 8),
        offset_(row_ * 128 + ((chunk_ ^ (row_ % 8)) * 16)) {}

  __device__ void run() {
    RowsItems<C> items(params_);
    Indices ahead = indices(*items, 0);
    int num_items = 0, num_first = 0, num_second = 0;  // so far: items, blocks of either buffer
    for (; items.valid(); items.advance()) {
      const RowsItem item = *items;
      if (item.num_blocks > 0) {
        fetch_q(item, num_items++);
        if (items.has_next()) prefetch_q(items.next());
      }
      for (int block = 0; block < item.num_blocks; ++block) {
        const Indices now = ahead;
        ahead = block + 1 < item.num_blocks ? indices(item, block + 1) : indices(items.next(), 0);
        fetch_block(now, block % 2, block % 2 == 0 ? num_first++ : num_second++);
      }
      if (item.num_blocks == 0) ahead = indices(items.next(), 0);
    }
    cp_async_wait_all();
  }

 private:
  static constexpr int kRows = 4, kRowStep = 16;  // rows of one thread

  // Of a block's tokens `lane` and `lane` + 32; -1 past the end.
  struct Indices {
    int low, high;
  };
  __device__ Indices indices(const RowsItem& item, int block) const {
    const KvScope& s = params_.p.scopes[0];
    const int position = block * C::kBlockTokens + lane_;
    const int32_t* row = s.indices + item.token * s.indices_stride_token + position;
    return {position < item.length ? __ldg(row) : -1,
            position + kWarpSize < item.length ? __ldg(row + kWarpSize) : -1};
  }

  // This thread's chunk of its rows; zeros where there is none.
  struct Rows {
    const uint8_t* at[kRows];
    bool valid[kRows];
  };
  __device__ void copy_tiles(uint32_t dst, const Rows& rows, int first, int count) const {
    for (int tile = first; tile < first + count; ++tile)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        cp_async_16(dst + tile * C::kTileBytes + offset_ + i * kRowStep * 128,
                    rows.at[i] + tile * C::kTileDims * 2, rows.valid[i]);
  }

  __device__ const uint8_t* q_row(const RowsItem& item, int head) const {
    const SparseAttentionParams& p = params_.p;
    return reinterpret_cast<const uint8_t*>(p.q + item.token * p.q_stride_token +
                                            (item.first_head + head) * p.q_stride_head);
  }
  __device__ void fetch_q(const RowsItem& item, int count) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int head = row_ + i * kRowStep;
      rows.valid[i] = item.first_head + head < params_.p.num_q_heads;
      rows.at[i] = q_row(item, rows.valid[i] ? head : 0) + chunk_ * 16;
    }
    mbarrier_wait(smem_.q_empty(), (count & 1) ^ 1);
    copy_tiles(smem_.q_tile(0), rows, 0, C::kTiles);
    mbarrier_arrive_cp_async(smem_.q_full());
  }
  __device__ void prefetch_q(const RowsItem& item) const {
    const int head = row_ * 4 + chunk_;
    if (chunk_ < 4 && item.first_head + head < params_.p.num_q_heads)
      bulk_prefetch_l2(q_row(item, head), C::kDims * 2);
  }

  __device__ void fetch_block(const Indices& index, int buffer, int count) const {
    const KvScope& s = params_.p.scopes[0];
    const bool low = index.low >= 0 && index.low < s.num_slots;
    const bool high = index.high >= 0 && index.high < s.num_slots;
    const uint64_t mask = __ballot_sync(kFullWarp, low) | uint64_t{__ballot_sync(kFullWarp, high)} << 32;
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row_ + i * kRowStep;
      const int64_t slot = __shfl_sync(kFullWarp, i < 2 ? index.low : index.high, row % kWarpSize);
      rows.valid[i] = mask >> row & 1;
      rows.at[i] = s.kv_cache + (rows.valid[i] ? slot * s.kv_cache_stride_page + chunk_ * 16 : 0);
    }
    const int parity = (count & 1) ^ 1;
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      if (piece % 2 == 0) mbarrier_wait(smem_.empty(buffer, piece / 2), parity);
      if (piece == 0 && row_ == 0 && chunk_ == 0) {
        masks_[buffer] = mask;
        mbarrier_arrive(smem_.full(buffer, piece));
      }
      copy_tiles(smem_.tile(buffer, 0), rows, C::first_tile(piece), C::num_tiles(piece));
      mbarrier_arrive_cp_async(smem_.full(buffer, piece));
    }
  }

  const RowsParams& params_;
  const RowsSmem<C> smem_;
  uint64_t* const masks_;
  const int lane_, row_, chunk_;
  const uint32_t offset_;
};

}  // namespace mla_fp8::gpu
