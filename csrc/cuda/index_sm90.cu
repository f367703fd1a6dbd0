// The kernels of the indexer on Hopper: index_topk's scan and index_logits over one engine
// (indexer/sm90.cuh).

#include <cmath>

#include "cuda/indexer/sm90.cuh"
#include "cuda/indexer/sm90.h"

#if MLA_FP8_WITH_SM90A

namespace mla_fp8::gpu {
namespace {

constexpr int kPieceTiles = 8;  // of a CTA of index_logits

template <int kHeads>
constexpr int kSmemBytes = sizeof(ScanSmem<Sm90IndexEngine<kHeads>>) + 1024;  // to align it

template <int kHeads>
__device__ __forceinline__ ScanSmem<Sm90IndexEngine<kHeads>>& shared_memory() {
  extern __shared__ uint8_t raw[];
  const uintptr_t address = reinterpret_cast<uintptr_t>(raw);
  return *reinterpret_cast<ScanSmem<Sm90IndexEngine<kHeads>>*>(raw + (1024 - address % 1024) % 1024);
}

// Runs fn(constant<lines of a row's queries>{}).
template <class Fn>
void with_lines(int num_heads, const Fn& fn) {
  if (num_heads <= 16) return fn(constant<16>{});
  if (num_heads <= 32) return fn(constant<32>{});
  return fn(constant<64>{});
}

}  // namespace

template <int kHeads>
__global__ void __launch_bounds__(Sm90IndexEngine<kHeads>::kThreads, 1)
    index_scan_sm90_kernel(const __grid_constant__ IndexTopkArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_grid();
  scan(args, shared_memory<kHeads>());
#endif
}

template <int kHeads>
__global__ void __launch_bounds__(Sm90IndexEngine<kHeads>::kThreads, 1)
    index_logits_sm90_kernel(const __grid_constant__ IndexLogitsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Engine = Sm90IndexEngine<kHeads>;
  constexpr int kKeys = Engine::kTileKeys;
  const IndexLogitsParams& p = args.p;
  wait_for_previous_grid();
  const int64_t row = args.pieces(blockIdx.x);
  const int64_t first = (int64_t{blockIdx.x} - row * args.pieces.divisor()) * kPieceTiles * kKeys;
  IndexUnit unit;
  if (!find_unit(p.problem.rows, row, args.group_rows, unit)) return;
  const int64_t last = min(first + kPieceTiles * kKeys, p.width);
  const auto out = [&](int r, int64_t column) { return p.out + (row + r) * p.out_stride_row + column; };
  if (first >= unit.end || last <= unit.begin) {
    for (int r = 0; r < unit.num_rows; ++r)
      for (int64_t c = first + threadIdx.x; c < last; c += Engine::kThreads) *out(r, c) = -INFINITY;
    return;
  }
  Engine engine{p.problem, args.page_size, shared_memory<kHeads>().memory};
  engine.load_queries(unit);
  const int tiles = static_cast<int>((last - first + kKeys - 1) / kKeys);
  engine.begin(unit, first, tiles);
  for (int t = 0; t < tiles; ++t)
    engine.logits(t, [&](int r, bool valid, int key, float logit, bool present) {
      const int64_t column = first + int64_t{t} * kKeys + key;
      if (!valid || column >= p.width) return;
      const IndexRow& where = unit.rows[r];
      if ((float_bits(logit) & ~kSignMask) > kInfBits) logit = bits_float(kNanBits);
      *out(r, column) = present && column >= where.begin && column < where.end ? logit : -INFINITY;
    });
#endif
}

bool takes_sm90(const IndexProblem& problem) {
  const IndexKeys& keys = problem.keys;
  const int64_t strides = keys.values_stride_page | keys.values_stride_row;
  return compute_major() == 9 && keys.layout == IndexLayoutId::kIndexFp8 &&
         (reinterpret_cast<uintptr_t>(keys.values) | static_cast<uintptr_t>(strides)) % 16 == 0;
}

void index_scan_sm90(const IndexTopkArgs& args, gpuStream_t stream) {
  with_lines(args.p.problem.queries.num_heads, [&](auto lines) {
    launch(index_scan_sm90_kernel<lines>,
           {.grid = args.num_ctas,
            .block = Sm90IndexEngine<lines>::kThreads,
            .stream = stream,
            .smem = kSmemBytes<lines>},
           args);
  });
}

void index_logits_sm90(const IndexLogitsParams& p, gpuStream_t stream) {
  with_lines(p.problem.queries.num_heads, [&](auto lines) {
    using Engine = Sm90IndexEngine<lines>;
    const int64_t columns = kPieceTiles * Engine::kTileKeys, pieces = (p.width + columns - 1) / columns;
    launch(index_logits_sm90_kernel<lines>,
           {.grid = p.problem.rows.num_rows * pieces,
            .block = Engine::kThreads,
            .stream = stream,
            .smem = kSmemBytes<lines>},
           IndexLogitsArgs{p, Divider(p.problem.keys.page_size), Divider(pieces), kIndexGroupRows});
  });
}

}  // namespace mla_fp8::gpu

#endif
