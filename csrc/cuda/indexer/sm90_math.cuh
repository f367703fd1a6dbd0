#pragma once
// The consumers on Hopper compute products of an item's keys and queries, and the sums that are logits.
#include <cstddef>

#include "cuda/device/mma.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

// D[64 x N] = A[64 x 32] B[32 x N], plus D if `accumulate`: e4m3, swizzled panels of 128 bytes a row along k.
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

// Expands sixteen e2m1 to e4m3, whose eight magnitudes are given.
__device__ __forceinline__ uint4 expand_e2m1(uint32_t low, uint32_t high, uint2 magnitudes) {
  // Picks four of the eight bytes of x and y, one by each of the low four hex digits of the selector.
  const auto permute = [](uint32_t x, uint32_t y, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
    return bytes;
  };
  const auto eight = [&](uint32_t codes, uint32_t& first, uint32_t& last) {
    // An odd code has its sign in the top bit of its byte, an even one four bits below: `even` shifts it up.
    const uint32_t numbers = codes & 0x77777777u, even = codes << 4;
    first = permute(magnitudes.x, magnitudes.y, numbers) | (permute(even, codes, 0x5140u) & 0x80808080u);
    last = permute(magnitudes.x, magnitudes.y, numbers >> 16) | (permute(even, codes, 0x7362u) & 0x80808080u);
  };
  uint4 all;
  eight(low, all.x, all.y);
  eight(high, all.z, all.w);
  return all;
}

// 2 max(x, 0), and a NaN stays one. An addition has twice the rate of a maximum. Doubling is exact.
__device__ __forceinline__ float twice_relu(float x) { return __fadd_rn(x, fabsf(x)); }

// A consumer warpgroup's products for kRows rows of kHeads lines of queries (16, 32 or 64). kShares
// warpgroups together have all rows of a unit, so each of them takes kShares of the four items of a tile.
template <int kHeads, int kRows, int kShares, int kStages, bool kFp4>
class Math {
 public:
  __device__ __forceinline__ Math(const Memory& memory, Barriers& barriers, bool are_boxes)
      : memory_(memory),
        barriers_(barriers),
        are_boxes_(are_boxes),
        group_(__shfl_sync(kFullWarp, group(), 0)),
        first_row_(group() * kShares / kGroups * kRows),
        full_(shared_address(&barriers.full[group() % kStep])),
        scales_(shared_address(memory.scales({static_cast<int>(group() % kStep)}) + key())) {
    // All lanes have the same value; the exchange shows the compiler so.
    const auto panel = [](const uint8_t* from) {
      return static_cast<uint32_t>(wgmma_panel_descriptor(__shfl_sync(kFullWarp, shared_address(from), 0)));
    };
    keys_ = panel(kFp4 ? memory.panel(group()) : memory.keys(group() % kStep));
    queries_ = panel(memory.queries() + first_row_ * kHeads * kIndexDim);
    // Hides where these came from: else the compiler computes them again for each item.
    asm("" : "+r"(keys_), "+r"(queries_), "+r"(full_), "+r"(scales_));
  }

  static constexpr int kStep = kGroups / kShares;  // the warpgroup takes every kStep-th item
  static constexpr int kOwnStages = kStages / kStep;
  static constexpr int kPairs = (kRows + 1) / 2;

  // Call it when the unit's queries are in shared memory, after anything that needs many registers.
  __device__ __forceinline__ void load_weights() {
    const float4* weights = reinterpret_cast<const float4*>(memory_.weights()) + threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kHeads / 16; ++i) weights_[r][i] = weights[(first_row_ + r) * kHeads / 4 + 4 * i];
  }

  // The row of the unit whose logit the lane has, for a pair of rows.
  __device__ __forceinline__ int row(int pair) const {
    return kRows == 1 ? first_row_ : first_row_ + 2 * pair + threadIdx.x % 4 / 2;
  }
  // Whether no other lane has the same logit.
  __device__ __forceinline__ static bool is_own() { return kRows > 1 || (threadIdx.x & 2) == 0; }
  // The key of the lane's logits in an item. A warp has 16 keys: even lanes have one of the first eight, odd
  // lanes one of the others.
  __device__ __forceinline__ static int key() {
    const int lane = threadIdx.x % kWarpSize;
    return threadIdx.x % kGroup / kWarpSize * 16 + lane / 4 + 8 * (lane & 1);
  }
  // The first key of the warpgroup's first item, counted from the beginning of a tile.
  __device__ __forceinline__ static int first_key() { return group() % kStep * kItemKeys; }

  // Scores the warpgroup's next item: sink(0, pair, logit, present), by all lanes of a warp together.
  // `present` is as in Memory.
  template <class Sink>
  __device__ __forceinline__ void next_item(const Sink& sink) {
    item<false>(stage_, [&](int pair, float logit, uint32_t present) { sink(0, pair, logit, present); });
    if (++stage_ == kOwnStages) next_phase();
  }
  // Scores the next kOwnStages items, a round: sink(i, pair, logit, present) for item i. It must begin in the
  // warpgroup's first stage, and items must be boxes. Addresses of stages are then constants.
  __device__ __forceinline__ bool begins_round() const { return are_boxes_ && stage_ == 0; }
  template <class Sink>
  __device__ __forceinline__ void next_round(const Sink& sink) {
#pragma unroll
    for (int i = 0; i < kOwnStages; ++i)
      item<true>(i, [&](int pair, float logit, uint32_t present) { sink(i, pair, logit, present); });
    next_phase();
  }

 private:
  // Bytes of scales and presence between two stages of the warpgroup.
  static constexpr int kStageBytes = 4 * Memory::kPlaceWords * kStep;

  // Scores the item in the warpgroup's `own`-th stage.
  template <bool kIsBox, class Sink>
  __device__ __forceinline__ void item(int own, const Sink& sink) {
    const uint32_t full = full_ + 8 * kStep * own;
    mbarrier_wait(full, phase_);
    if (!kIsBox && !are_boxes_) fence_proxy_async();
    if constexpr (kFp4) {
      group_sync();  // the products of the last item are done with the panel
      expand(own);
      fence_proxy_async();
      group_sync();
    }
    const uint32_t keys = keys_ + (kFp4 ? 0 : own * kStep * (Memory::kPanelBytes >> 4));
    constexpr int kColumns = kRows * kHeads / 8;
    float acc[kColumns][4];
    pin_registers(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_e4m3(acc, descriptor(keys + 2 * step), descriptor(queries_ + 2 * step), step > 0);
    wgmma_commit();
    const uint32_t scale = load_shared_4(scales_ + kStageBytes * own),
                   present = load_shared_4(scales_ + kStageBytes * own + 4 * kItemKeys);
    wgmma_wait<0>();
    pin_registers(acc);
    constexpr int kToEmpty = offsetof(Barriers, empty) - offsetof(Barriers, full);
    mbarrier_arrive_warp(full + kToEmpty, threadIdx.x % kWarpSize);
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = head_sum(acc, r * (kHeads / 8), r);
    if constexpr (kRows == 1) {
      sink(0, scaled(__fadd_rn(sums[0], __shfl_xor_sync(kFullWarp, sums[0], 2)), scale), present);
    } else {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair)
        sink(pair, scaled(exchange(sums[2 * pair], sums[2 * pair + 1], 2), scale), present);
    }
  }
  // Goes on to the first stage, with scales and presence of the other parity.
  __device__ __forceinline__ void next_phase() {
    stage_ = 0;
    phase_ ^= 1;
    scales_ += phase_ ? 4 * Memory::kPlaceWords * kStages : -4 * Memory::kPlaceWords * kStages;
  }

  __device__ __forceinline__ static int group() { return threadIdx.x / kGroup; }
  __device__ __forceinline__ static uint64_t descriptor(uint32_t low) {
    return wgmma_panel_descriptor(0) | low;
  }

  // Expands an item of e2m1 into the warpgroup's panel. A lane takes 32 elements, which have one scale.
  __device__ __forceinline__ void expand(int own) const {
    const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x % kGroup / kWarpSize * 16;
    const uint32_t from =
        shared_address(memory_.keys(group_ % kStep + own * kStep)) + first_key * (kIndexDim / 2);
    const uint32_t to = shared_address(memory_.panel(group()));
    const uint32_t scales = scales_ + kStageBytes * own + 4 * (first_key - key());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = lane + i * kWarpSize, tile = part % 4, key = first_key + part / 4;
      const uint4 packed = load_shared_16(from + 16 * part);
      const uint32_t exponents = load_shared_4(scales + part / 4 * 4);
      const int shift = max(static_cast<int>(exponents >> 8 * tile & 0xff) - base_exponent(exponents),
                            Barriers::kLeastShift);
      const uint2 magnitudes =
          load_shared_8(shared_address(barriers_.magnitudes) + 8 * (shift - Barriers::kLeastShift));
      store_shared_16(to + swizzled(key, 2 * tile), expand_e2m1(packed.x, packed.y, magnitudes));
      store_shared_16(to + swizzled(key, 2 * tile + 1), expand_e2m1(packed.z, packed.w, magnitudes));
    }
  }

  // The exponents of E2m1Scales, from a word of four.
  __device__ __forceinline__ static int largest_exponent(uint32_t packed) {
    return static_cast<int>(
        max(max(packed & 0xff, packed >> 8 & 0xff), max(packed >> 16 & 0xff, packed >> 24)));
  }
  __device__ __forceinline__ static int base_exponent(uint32_t packed) {
    return max(largest_exponent(packed) - 6, 2);
  }

  // The scale multiplies the sum of all heads: parts times infinity might cancel to NaN. -0 becomes 0.
  __device__ __forceinline__ static float scaled(float sum, uint32_t scale) {
    if constexpr (kFp4) {
      const int largest = largest_exponent(scale);
      scale = largest == 255 ? kNanBits : static_cast<uint32_t>(max(largest - 6, 2)) << 23;
    }
    return fmaf(sum, bits_float(scale), 0.0f);
  }

  // Half of the sum over the heads of row r for the lane's key, from columns `first` on. The lane that
  // differs in bit 1 has the other half.
  template <int kColumns>
  __device__ __forceinline__ float head_sum(const float (&acc)[kColumns][4], int first, int r) const {
    float s[2][2] = {};  // [key][head modulo 2]
#pragma unroll
    for (int i = 0; i < kHeads / 16; ++i) {
      const float4 w = weights_[r][i];
      const float (&c)[4] = acc[first + 2 * i];
      const float (&d)[4] = acc[first + 2 * i + 1];
      s[0][0] = fmaf(twice_relu(c[0]), w.x, s[0][0]);
      s[0][1] = fmaf(twice_relu(c[1]), w.y, s[0][1]);
      s[1][0] = fmaf(twice_relu(c[2]), w.x, s[1][0]);
      s[1][1] = fmaf(twice_relu(c[3]), w.y, s[1][1]);
      s[0][0] = fmaf(twice_relu(d[0]), w.z, s[0][0]);
      s[0][1] = fmaf(twice_relu(d[1]), w.w, s[0][1]);
      s[1][0] = fmaf(twice_relu(d[2]), w.z, s[1][0]);
      s[1][1] = fmaf(twice_relu(d[3]), w.w, s[1][1]);
    }
    const float low = __fadd_rn(s[0][0], s[0][1]), high = __fadd_rn(s[1][0], s[1][1]);
    return exchange(low, high, 1);
  }

  // The sum of x over two lanes that differ in bit `lanes`, in the lane without it; of y in the other.
  __device__ __forceinline__ static float exchange(float x, float y, int lanes) {
    const bool upper = threadIdx.x & lanes;
    const float kept = upper ? y : x;
    return __fadd_rn(kept, __shfl_xor_sync(kFullWarp, upper ? x : y, lanes));
  }

  const Memory memory_;
  Barriers& barriers_;
  const bool are_boxes_;
  const int group_;  // of the warp; the compiler sees that all lanes have the same
  const int first_row_;
  uint32_t full_;    // address of the barrier of the warpgroup's first stage
  uint32_t scales_;  // address of the lane's key's scale in that stage, for the present phase
  int stage_ = 0;    // the warpgroup's stage with the next item
  int phase_ = 0;
  uint32_t keys_, queries_;  // low words of the panels' descriptors
  float4 weights_[kRows][kHeads / 16];
};

}  // namespace mla_fp8::gpu::sm90_index
