// Sparse MLA attention on Hopper over bf16 rows, and by pairs of CTAs over FP8 rows; mostly for prefill. CTAs
// take 64 rows of Q, one item after another: heads of a query, or all heads of neighbours with mostly the
// same keys.
//
//   gather   one warpgroup: Q and blocks of 64 keys (windows: also 72) by cp.async into swizzled panels, two
//            blocks and one Q in shared memory. It runs ahead into the next item, whose Q and first rows
//            arrive while this item's last weights are multiplied and its output is stored. With more than 32
//            heads a window's keys stay, and each query brings one. Over FP8 pages each of two CTAs of 64
//            heads converts half of a block to bf16, for both
//   math     two warpgroups: S = Q K^T of a block each, then O += P V of both blocks, 256 dims each. One's
//            softmax hides behind the other's products; weights cross through shared memory
//
// Bound: power, in long runs. Then shared memory, 33 clocks per key (512 dims) and 36 (576), as QK reads Q
// and K at its full rate, and the tensor cores, 32 and 34. It takes about 40: a block's way through its
// buffer, of which there are two (docs/kernels/hopper.md).
#include <algorithm>

#include "cuda/sparse_attention/launch.h"
#include "cuda/sparse_attention/sm90/bf16_tiles/gather_fp8_pair.cuh"
#include "cuda/sparse_attention/sm90/bf16_tiles/gather_window.cuh"
#include "cuda/sparse_attention/sm90/bf16_tiles/math.cuh"

namespace mla_fp8::gpu {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    bf16_tiles_kernel(const __grid_constant__ TileParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  const TileSmem<C> shared{shared_address(smem)};
  if (thread == 0) shared.init();
  wait_for_previous_grid();
  if constexpr (C::kPair) cluster_sync();
  else __syncthreads();
  if (warp >= 8) {
    give_up_registers<C::kGatherRegisters>();
    if constexpr (C::kPair) PairGather<C>(params, shared, thread - 8 * kWarpSize).run();
    else if constexpr (C::kRing) WindowGather<C>(params, shared, thread - 8 * kWarpSize).run();
    else TileGather<C>(params, shared, thread - 8 * kWarpSize).run();
  } else if (warp >= 4) {
    take_registers<C::kMathRegisters>();
    TileMath<C, 1>(params, smem, warp - 4, lane).run();
  } else {
    take_registers<C::kMathRegisters>();
    TileMath<C, 0>(params, smem, warp, lane).run();
  }
  if constexpr (C::kPair) {  // the other CTA may still write this one's shared memory
    __syncwarp();
    cluster_sync();
  }
#endif
}

// True for slots of one cache whose rows lie at multiples of them: pages of one row, or without gaps between.
bool is_plain_selection(const SparseAttentionParams& p) {
  const KvScope& s = p.scopes[0];
  return !p.is_window && p.num_scopes == 1 &&
         (s.page_size == 1 || s.kv_cache_stride_page == s.page_size * kv_layout(p.layout).token_stride());
}

template <KvLayoutId kId, KeysOfTile kKeys, KvLayoutId kExtraId = kId>
void launch_variant(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  using C = Bf16Tiles<kId, kKeys, kExtraId>;
  constexpr int kCluster = C::kPair ? 2 : 1;
  const TileParams params{
      .p = p,
      .num_head_blocks = ceil_div(p.num_q_heads, C::kHeads),
      .tile_queries = tile_queries(p),
      .tile_heads = static_cast<unsigned>(std::min(p.num_q_heads, C::kHeads)),
      .num_tiles = num_tiles(p),
      .row_stride = p.scopes[0].kv_cache_stride_page / p.scopes[0].page_size,
      .page_size = {Divider(p.scopes[0].page_size), Divider(p.scopes[p.num_scopes - 1].page_size)},
  };
  launch(bf16_tiles_kernel<C>,
         {.grid = std::min<int64_t>(params.num_tiles, plan.ctas / kCluster * kCluster),
          .block = C::kThreads,
          .stream = stream,
          .smem = C::kSmemBytes,
          .cluster = kCluster},
         params);
}

}  // namespace

void launch_bf16_tiles(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  with_variant<Kernel::kBf16Tiles>(p, plan, [&](auto, auto layout, auto extra) {
    constexpr KvLayoutId kId = layout();
    if constexpr (kv_layout(kId).nope_format != Format::kBf16) {
      launch_variant<kId, KeysOfTile::kPair, extra()>(p, plan, stream);
    } else {
      if (p.has_entry_pages) return launch_variant<kId, KeysOfTile::kEntries>(p, plan, stream);
      if (is_plain_selection(p)) return launch_variant<kId, KeysOfTile::kSelected>(p, plan, stream);
      if (tile_queries(p) > 1) return launch_variant<kId, KeysOfTile::kNeighbours>(p, plan, stream);
      if constexpr (kv_layout(kId).head_dim_qk() == kHeadDimV)  // windows come with this layout
        if (is_window_alone(p) && p.window.window_size <= kRingKeys)
          return launch_variant<kId, KeysOfTile::kRing>(p, plan, stream);
      launch_variant<kId, KeysOfTile::kAny>(p, plan, stream);
    }
  });
}

}  // namespace mla_fp8::gpu
