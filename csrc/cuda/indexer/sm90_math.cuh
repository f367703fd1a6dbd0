#pragma once
// The warpgroups that multiply on Hopper.
#include "cuda/device/mma.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

// D[64 x N] = or += A[64 x 32] B[32 x N], e4m3, both in swizzled panels of 128 bytes a row along k.
#define MLA_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define MLA_D16(d, i) MLA_D4(d, i), MLA_D4(d, i + 1), MLA_D4(d, i + 2), MLA_D4(d, i + 3)
#define MLA_R32                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
__device__ inline void wgmma_e4m3(float (&d)[8][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " MLA_R32
      "}, %32, %33, p, 1, 1; }"
      : MLA_D16(d, 0), MLA_D16(d, 4)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void wgmma_e4m3(float (&d)[16][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " MLA_R32
      ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1; }"
      : MLA_D16(d, 0), MLA_D16(d, 4), MLA_D16(d, 8), MLA_D16(d, 12)
      : "l"(a), "l"(b), "r"(accumulate));
}
#undef MLA_R32
#undef MLA_D16
#undef MLA_D4

// 0 of what is negative; a NaN stays one.
__device__ inline float relu(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

// The math of a warpgroup. kHeads: lines of a row's queries, 16, 32 or 64.
template <int kHeads>
class Math {
 public:
  __device__ __forceinline__ Math(const Memory& memory, Barriers& barriers)
      : memory_(memory), barriers_(barriers), base_{memory.num_stages, 0} {}

  // When the queries of a unit have been loaded.
  __device__ __forceinline__ void begin(int num_rows) {
    constexpr int kShares = kHeads == 64 ? 2 : 1;  // of the rows, at most
    shares_ = num_rows > kRows ? kShares : 1;
    const int groups = kGroups / shares_;  // with the same rows
    row_ = group() / groups * kRows;
    item_ = group() % groups;
    num_rows_ = num_rows;
    place_ = base_;
    place_.advance(item_);
    const float4* weights = reinterpret_cast<const float4*>(memory_.weights()) + threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kHeads / 16; ++i) {
        const int line = (row_ + r) * kHeads;
        weights_[r][i] = line < memory_.lines ? weights[line / 4 + 4 * i] : float4{};
      }
  }

  // Of a tile: sink(row, valid, key, logit, present, is_pair), the lanes of a warp together; a lane with
  // `valid` has the logit of a key of the tile of its own. With `is_pair` the upper lanes of each quad have
  // the row behind that of the lower ones.
  template <class Sink>
  __device__ __forceinline__ void next_tile(const Sink& sink) {
    for (int i = 0; i < shares_; ++i) {
      const int stage = place_.stage;
      mbarrier_wait(shared_address(&barriers_.full[stage]), place_.phase);
      fence_proxy_async();
      const int key = (i * (kGroups / shares_) + item_) * kItemKeys;
      const int rows = num_rows_ - row_;
      if (rows > kRows / 2) rows_logits<kRows * kHeads>(stage, key, sink);
      else if constexpr (kRows * kHeads > 64) rows_logits<kRows * kHeads / 2>(stage, key, sink);
      else rows_logits<kRows * kHeads>(stage, key, sink);
      for (int j = shares_; j <= 2; ++j)
        mbarrier_arrive_warp(shared_address(&barriers_.empty[stage]), threadIdx.x % kWarpSize);
      place_.advance(kGroups / shares_);
    }
  }

  // When the unit's tiles are done.
  __device__ __forceinline__ void end(int tiles) {
    const int last = base_.stage + tiles * kGroups;
    base_.phase ^= last / base_.num_stages & 1;
    base_.stage = last % base_.num_stages;
  }

 private:
  static constexpr int kRows = kHeads == 64 ? 2 : 4;  // of a warpgroup, at most

  __device__ __forceinline__ static int group() { return threadIdx.x / kGroup; }

  // The products of kN / kHeads rows with the item whose first key of the tile is `first`.
  template <int kN, class Sink>
  __device__ __forceinline__ void rows_logits(int stage, int first, const Sink& sink) const {
    constexpr int kColumns = kN / 8, kUsed = kN / kHeads;
    uint32_t queries = shared_address(memory_.queries()) + row_ * kHeads * kIndexDim;
    asm volatile("" : "+r"(queries));  // or its descriptors wait in registers, which are short
    const uint64_t a = wgmma_panel_descriptor(shared_address(memory_.keys(stage)));
    const uint64_t b = wgmma_panel_descriptor(queries);
    float acc[kColumns][4];
    pin_registers(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_e4m3(acc, wgmma_advance(a, 32 * step), wgmma_advance(b, 32 * step), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(acc);

    // The lane's logits will be those of key `key`: of eight keys, or the eight behind them.
    const int lane = threadIdx.x % kWarpSize, t = lane % 4;
    const int key = threadIdx.x % kGroup / kWarpSize * 16 + lane / 4 + 8 * (t & 1);
    const float scale = memory_.scales(stage)[key];
    const bool present = memory_.present(stage)[key];
    float sums[kUsed];
#pragma unroll
    for (int r = 0; r < kUsed; ++r) {
      float s[2][2] = {};  // keys, heads modulo two
#pragma unroll
      for (int i = 0; i < kHeads / 16; ++i) {
        const float4 w = weights_[r][i];
        const float (&c)[4] = acc[r * (kHeads / 8) + 2 * i];
        const float (&d)[4] = acc[r * (kHeads / 8) + 2 * i + 1];
        s[0][0] = fmaf(relu(c[0]), w.x, s[0][0]);
        s[0][1] = fmaf(relu(c[1]), w.y, s[0][1]);
        s[1][0] = fmaf(relu(c[2]), w.x, s[1][0]);
        s[1][1] = fmaf(relu(c[3]), w.y, s[1][1]);
        s[0][0] = fmaf(relu(d[0]), w.z, s[0][0]);
        s[0][1] = fmaf(relu(d[1]), w.w, s[0][1]);
        s[1][0] = fmaf(relu(d[2]), w.z, s[1][0]);
        s[1][1] = fmaf(relu(d[3]), w.w, s[1][1]);
      }
      const float low = round_add(s[0][0], s[0][1]), high = round_add(s[1][0], s[1][1]);
      sums[r] = exchange(low, high, 1);
    }
    // The scale comes behind the sum of all heads: parts times infinity would cancel.
    const auto logit = [&](float sum) { return round_add(round_mul(sum, scale), 0.0f); };
    if constexpr (kUsed == 1) {
      const float sum = round_add(sums[0], __shfl_xor_sync(kFullWarp, sums[0], 2));
      sink(row_, t < 2, first + key, logit(sum), present, std::false_type{});
    } else {
#pragma unroll
      for (int r = 0; r < kUsed; r += 2) {
        const int own = row_ + r + t / 2;
        sink(own, own < num_rows_, first + key, logit(exchange(sums[r], sums[r + 1], 2)), present,
             std::true_type{});
      }
    }
  }

  // A lane without bit `lanes` keeps x and gives y to the lane with it, which gives x; the sums of both.
  __device__ __forceinline__ static float exchange(float x, float y, int lanes) {
    const bool upper = threadIdx.x & lanes;
    const float kept = upper ? y : x;
    return round_add(kept, __shfl_xor_sync(kFullWarp, upper ? x : y, lanes));
  }

  const Memory& memory_;
  Barriers& barriers_;
  Place base_, place_{};                 // of the unit's first item, of the next one
  int shares_ = 1, row_ = 0, item_ = 0;  // of the tile's; the first row of the warpgroup, its item
  int num_rows_ = 0;
  float4 weights_[kRows][kHeads / 16];
};

}  // namespace mla_fp8::gpu::sm90_index
