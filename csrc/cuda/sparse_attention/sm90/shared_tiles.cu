// Tiles of queries that share keys and, in the same grid, the queries of tiles that have no list, usually
// none (docs/kernels/hopper.md).
//
//   a CTA whose tile has a list   attends to it, as many_heads does
//   all others                    walk through the queries that go alone, as few_heads does
//
// A launch for these would take all shared memory of the SMs from the tiles, for as long as it takes to see
// that nobody goes alone. No CTA does both: where one ends, the other's roles and registers would begin.
#include <algorithm>
#include <cstddef>

#include "cuda/device/launch.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/sm90/few_heads/walk.cuh"
#include "cuda/sparse_attention/sm90/many_heads/neighbours.cuh"
#include "cuda/sparse_attention/sm90/many_heads/split.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"
#include "cuda/sparse_attention/sm90/walk_item.cuh"

namespace mla_fp8::gpu {
namespace {

// Behind all that a walk has: the queries.
template <class Walk>
struct WalkBesideTiles : Walk {
  static constexpr int kAlonePlace = align_up(Walk::kSmemBytes, 16);
  static constexpr int kSmemBytes = kAlonePlace + static_cast<int>(sizeof(AloneQueries));
};

// Where a tile's shared memory begins: its barriers, which are made before it is known whether it has a list,
// lie behind all of the walk's.
template <class Tile, class Walk>
inline constexpr int kTilePlace =
    align_up(std::max(Walk::kSmemBytes - MLA_SMEM(Tile, stage_barriers), 0), 128);

template <class Tile, class Walk>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    shared_tiles_kernel(const __grid_constant__ KernelParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(Tile::kThreads == Walk::kThreads);
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  uint8_t* const of_tile = smem + kTilePlace<Tile, Walk>;
  if (thread == 0) init_split<Tile>(of_tile);
  wait_for_previous_grid();
  ListItem w = find_tile<Tile>(params, of_tile, warp, lane);
  if (w.num_keys >= 0) return attend_to_item<Tile>(params, w, of_tile, warp, lane);
  if (thread == 0) FewHeadsWalk<Walk>::init(smem);
  alone_queries<Walk>().template find<Tile::kThreads>(params.shared, warp, lane);
  block_barrier<Tile::kThreads>();
  if (alone_queries<Walk>().count > 0) FewHeadsWalk<Walk>::run(params, smem, warp, lane);
#endif
}

template <class Tile, class Walk>
void launch_both(const SparseAttentionParams& p, const Sharing& sharing, gpuStream_t stream) {
  launch(shared_tiles_kernel<Tile, Walk>,
         {.grid = sharing.alone.ctas,
          .block = Tile::kThreads,
          .stream = stream,
          .smem = std::max(kTilePlace<Tile, Walk> + Tile::kSmemBytes, Walk::kSmemBytes)},
         kernel_params<Tile>(p, sharing.tiles));
}

}  // namespace

void launch_shared_tiles(const SparseAttentionParams& p, const Sharing& sharing, gpuStream_t stream) {
  with_variant<Kernel::kManyHeads>(p, sharing.tiles, [&](auto variant, auto layout, auto extra) {
    constexpr Variant kVariant = kVariants[variant()];
    if constexpr (attends_beside_walk(kVariant, {layout(), extra()})) {
      constexpr int kOctets = kVariant.heads / kOctetHeads;
      using R = CachedRow<layout(), extra()>;
      constexpr ManyHeadsTraits kOfTile{
          .octets = kOctets, .producers = kVariant.producers, .tiles = Tiles::kLists};
      constexpr FewHeadsTraits kOfWalk{.octets = 1, .producers = 8, .schedule = Schedule::kWalk};
      using Tile = ManyHeads<R, kOfTile>;
      using Walk = FewHeads<CachedRow<layout(), extra(), 0, true>, kOfWalk>;
      launch_both<Tile, WalkBesideTiles<Walk>>(p, sharing, stream);
    }
  });
}

}  // namespace mla_fp8::gpu
