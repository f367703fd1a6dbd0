// Exchanges tensors between ranks: candidates of the top-k, queries of all heads before attention, partial
// results after it. A CTA stores its part into every rank's memory, raises its flag there, and waits for the
// same CTA of each rank. No wait hangs: a CTA stores all and raises all flags before its first wait, and the
// grid is no larger than what runs at once. So each flag that is waited for is raised, in whatever order CTAs
// begin. Bound: the latency of a flag; from 128 tokens on the links.

#include "ops/context_parallel.h"

#include <algorithm>

#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/merge_states.cuh"
#include "cuda/merge_topk.cuh"
#include "cuda/topk_to_slots.cuh"

namespace mla_fp8::gpu {
namespace {

constexpr int kExchangeThreads = 512;
constexpr int kExchangeWarps = kExchangeThreads / kWarpSize;

__device__ __forceinline__ void store_release(uint32_t* p, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

// A call, as a CTA sees it: begin, stores, raise, wait, reads, end. Each kind of call has flags of its own. A
// call takes its number from what the last one left in memory, so a graph may be replayed.
class PeerCall {
 public:
  __device__ __forceinline__ explicit PeerCall(const PeerMemory& memory)
      : memory_(memory), number_(memory.calls[0] + 1) {}

  __device__ __forceinline__ uint32_t number() const { return number_; }
  template <class T>
  __device__ __forceinline__ T* of_rank(T* own, int rank) const {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(own) + memory_.offsets[rank]);
  }
  // The i-th rank behind this one. Each rank thus begins with another one.
  __device__ __forceinline__ int rank_behind(int i) const {
    const int rank = memory_.rank + i;
    return rank < memory_.world_size ? rank : rank - memory_.world_size;
  }
  __device__ __forceinline__ void raise() const {
    __syncthreads();
    if (is_of_other()) store_release(of_rank(flag(memory_.rank), thread()), number_);
  }
  __device__ __forceinline__ void wait() const {
    if (is_of_other()) {
      const uint64_t begin = nanoseconds();
      while (static_cast<int32_t>(load_acquire(flag(thread())) - number_) < 0)
        if (nanoseconds() - begin > static_cast<uint64_t>(memory_.time_limit)) asm volatile("trap;");
    }
    __syncthreads();
  }
  // The last CTA to come writes the call's number; all have read the last call's by then.
  __device__ __forceinline__ void end() const {
    if (threadIdx.x == 0 && atomicAdd(&memory_.calls[1], 1u) == gridDim.x - 1) {
      memory_.calls[1] = 0;
      memory_.calls[0] = number_;
    }
  }

 private:
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ bool is_of_other() const {
    return thread() < memory_.world_size && thread() != memory_.rank;
  }
  __device__ __forceinline__ uint32_t* flag(int rank) const {
    return memory_.flags + rank * memory_.num_ctas + blockIdx.x;
  }
  const PeerMemory& memory_;
  const uint32_t number_;
};

}  // namespace

struct GatherQueriesArgs {
  GatherQueriesParams p;
  Divider pieces, num_heads;  // pieces: of 16 bytes, in a head
};

__global__ void __launch_bounds__(kExchangeThreads)
    gather_queries_kernel(const __grid_constant__ GatherQueriesArgs args) {
  constexpr int kPiece = 8;
  const GatherQueriesParams& p = args.p;
  wait_for_previous_grid();
  const PeerCall call(p.memory);
  const int64_t pieces = args.pieces.divisor(), all = p.num_tokens * p.num_heads * pieces;
  for (int64_t i = int64_t{blockIdx.x} * kExchangeThreads + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * kExchangeThreads) {
    const int64_t row = args.pieces(i), token = args.num_heads(row), head = row - token * p.num_heads;
    const int64_t element = (i - row * pieces) * kPiece;
    const uint16_t* from = p.q + token * p.q_stride_token + head * p.q_stride_head + element;
    if (element >= p.first_rope)
      from = p.q_rope + token * p.q_rope_stride_token + head * p.q_rope_stride_head + element - p.first_rope;
    const Words<4> x = load_if<4>(from, true);
    const int64_t to = (token * p.memory.world_size + p.memory.rank) * p.num_heads + head;
    for (int r = 0; r < p.memory.world_size; ++r)
      store(call.of_rank(p.queries + to * p.head_dim + element, call.rank_behind(r)), x);
  }
  call.raise();
  call.wait();
  call.end();
}

struct ExchangeStatesArgs {
  ExchangeStatesParams p;
  Divider num_heads;
};

namespace {

// The partial results of a token and one of this rank's heads, from all ranks.
struct StatesOfRanks {
  static constexpr int kAtOnce = 4;
  const ExchangeStatesParams& p;
  int64_t own, own_lse;  // where this rank's own are in out and lse
  const uint16_t* outs;  // from rank 0 on
  const float* lses;
  int64_t pitch;  // heads between a rank's results and the next rank's
  int count;
  float attn_sink, log_base;

  __device__ __forceinline__ float lse(int i) const {
    return counted_lse(i == p.memory.rank ? p.lse[own_lse] : lses[i * pitch]);
  }
  __device__ __forceinline__ const void* row(int i) const {
    return i == p.memory.rank ? p.out + own : outs + i * pitch * p.head_dim;
  }
};

// Sends results to the ranks that own the heads. A warp stores a row, unless no key was attended to.
__device__ __forceinline__ void send_states(const ExchangeStatesParams& p, const PeerCall& call,
                                            int64_t token, int64_t head, int64_t to) {
  constexpr int kPiece = 8, kPass = kPiece * kWarpSize, kPasses = 2, kRanksAtOnce = 4;
  const int lane = threadIdx.x % kWarpSize;
  for (int first = 1; first < p.memory.world_size; first += kRanksAtOnce) {
    float lse[kRanksAtOnce];
#pragma unroll
    for (int j = 0; j < kRanksAtOnce; ++j) {
      const bool is_one = first + j < p.memory.world_size;
      const int64_t of = call.rank_behind(is_one ? first + j : 0) * p.num_heads + head;
      lse[j] = is_one ? p.lse[token * p.memory.world_size * p.num_heads + of] : -INFINITY;
    }
    for (int64_t begin = lane * kPiece; begin < p.head_dim; begin += kPasses * kPass) {
      Words<4> x[kRanksAtOnce][kPasses];
#pragma unroll
      for (int j = 0; j < kRanksAtOnce; ++j) {
        const bool is_one = first + j < p.memory.world_size;
        const int64_t of = call.rank_behind(is_one ? first + j : 0) * p.num_heads + head;
        const uint16_t* from = p.out + token * p.out_stride_token + of * p.out_stride_head;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
          x[j][pass] = load_if<4>(from + begin + pass * kPass, is_one && begin + pass * kPass < p.head_dim);
      }
#pragma unroll
      for (int j = 0; j < kRanksAtOnce; ++j) {
        if (first + j >= p.memory.world_size || counted_lse(lse[j]) == -INFINITY) continue;
        uint16_t* row = call.of_rank(p.outs + to * p.head_dim, call.rank_behind(first + j));
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
          if (begin + pass * kPass < p.head_dim) store(row + begin + pass * kPass, x[j][pass]);
      }
    }
#pragma unroll
    for (int j = 0; j < kRanksAtOnce; ++j)
      if (lane == 0 && first + j < p.memory.world_size)
        *call.of_rank(p.lses + to, call.rank_behind(first + j)) = lse[j];
  }
}

}  // namespace

__global__ void __launch_bounds__(kExchangeThreads)
    exchange_states_kernel(const __grid_constant__ ExchangeStatesArgs args) {
  const ExchangeStatesParams& p = args.p;
  wait_for_previous_grid();
  const PeerCall call(p.memory);
  const int world_size = p.memory.world_size, rank = p.memory.rank;
  const int64_t rows = p.num_tokens * p.num_heads, pitch = p.max_tokens * p.num_heads;
  // Calls alternate between halves: a rank one call ahead stores while this rank may still read.
  const int64_t half = (call.number() & 1) * world_size * pitch;
  const int64_t first = int64_t{threadIdx.x / kWarpSize} * gridDim.x + blockIdx.x;
  const int64_t step = int64_t{gridDim.x} * kExchangeWarps;
  for (int64_t row = first; row < rows; row += step) {
    const int64_t token = args.num_heads(row);
    send_states(p, call, token, row - token * p.num_heads, half + rank * pitch + row);
  }
  call.raise();
  call.wait();
  for (int64_t row = first; row < rows; row += step) {
    const int64_t token = args.num_heads(row), head = row - token * p.num_heads;
    const int64_t own = rank * p.num_heads + head;
    const StatesOfRanks states{p,
                               token * p.out_stride_token + own * p.out_stride_head,
                               token * world_size * p.num_heads + own,
                               p.outs + (half + row) * p.head_dim,
                               p.lses + half + row,
                               pitch,
                               world_size,
                               p.attn_sink ? p.attn_sink[head] : -INFINITY,
                               p.log_base};
    uint16_t* merged = p.merged + token * p.merged_stride_token + head * p.merged_stride_head;
    const float lse = merge_head<Dtype::kBf16, true>(states, p.head_dim, merged);
    if (threadIdx.x % kWarpSize == 0) p.merged_lse[row] = lse;
  }
  call.end();
}

struct ExchangeScoresArgs {
  ExchangeScoresParams p;
  Divider per_list;
  TopkToSlotsArgs slots;
};

// Sends a row of candidates to every rank, this one too.
__device__ __forceinline__ void send_candidates(const ExchangeScoresParams& p, const PeerCall& call,
                                                int64_t row, int32_t* to) {
  constexpr int kPiece = 4;
  const MergeTopkParams& m = p.merge;
  for (int64_t i = int64_t{threadIdx.x} * kPiece; i < 2 * m.per_list; i += kMergeTopkThreads * kPiece) {
    const bool is_score = i < m.per_list;
    const int64_t place = is_score ? i : i - m.per_list;
    const void* from = is_score ? static_cast<const void*>(p.scores + row * p.scores_stride_row + place)
                                : p.positions + row * p.positions_stride_row + place;
    const Words<4> x = load_if<4>(from, true);
    int32_t* own = to + place + (is_score ? 0 : m.positions - p.candidates);
    for (int r = 0; r < p.memory.world_size; ++r) store(call.of_rank(own, call.rank_behind(r)), x);
  }
}

// A CTA merges the rows that it has sent; with a page table it also finds the slots of this rank's own.
__global__ void __launch_bounds__(kMergeTopkThreads)
    exchange_scores_kernel(const __grid_constant__ ExchangeScoresArgs args) {
  MLA_SHARED(MergeTopkSmem, smem);
  const ExchangeScoresParams& p = args.p;
  wait_for_previous_grid();
  const PeerCall call(p.memory);
  MergeTopkParams merge = p.merge;
  const int64_t half = (call.number() & 1) * p.memory.world_size * merge.scores_stride_list;
  merge.scores += half;
  merge.positions += half;
  int32_t* const own = p.candidates + half + p.memory.rank * merge.scores_stride_list;
  for (int64_t row = blockIdx.x; row < merge.num_rows; row += gridDim.x)
    send_candidates(p, call, row, own + row * merge.scores_stride_row);
  call.raise();
  call.wait();
  for (int64_t row = blockIdx.x; row < merge.num_rows; row += gridDim.x) {
    const int32_t count = merge_row(merge, args.per_list, row, smem);
    if (p.slots.page_table) {
      const TopkToSlotsRow of_row = topk_to_slots_row(args.slots.p, row, [count] { return count; });
      pack_slots<kMergeTopkThreads>(args.slots, of_row, smem.team.staged, row);
    } else if (threadIdx.x == 0) {
      merge.out_lens[row] = count;
    }
  }
  call.end();
}

void gather_queries(const GatherQueriesParams& p, gpuStream_t stream) {
  const int64_t pieces = p.head_dim / 8;
  const int64_t wanted = ceil_div<int64_t>(p.num_tokens * p.num_heads * pieces, kExchangeThreads);
  launch(gather_queries_kernel,
         {.grid = std::min(wanted, p.memory.num_ctas), .block = kExchangeThreads, .stream = stream},
         GatherQueriesArgs{p, Divider(pieces), Divider(p.num_heads)});
}

void exchange_states(const ExchangeStatesParams& p, gpuStream_t stream) {
  constexpr int64_t kRows = 4;  // of a CTA, if there are few
  const int64_t wanted = ceil_div<int64_t>(p.num_tokens * p.num_heads, kRows);
  launch(exchange_states_kernel,
         {.grid = std::min(wanted, p.memory.num_ctas), .block = kExchangeThreads, .stream = stream},
         ExchangeStatesArgs{p, Divider(p.num_heads)});
}

void exchange_scores(const ExchangeScoresParams& p, gpuStream_t stream) {
  const TopkToSlotsParams& s = p.slots;
  launch(
      exchange_scores_kernel,
      {.grid = std::min(p.merge.num_rows, p.memory.num_ctas), .block = kMergeTopkThreads, .stream = stream},
      ExchangeScoresArgs{
          p, Divider(p.merge.per_list),
          TopkToSlotsArgs{s, Divider(s.page_size), Divider(s.group_size), Divider(s.turn()), Divider(1)}});
}

}  // namespace mla_fp8::gpu
