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

// Sixteen e2m1 as e4m3, whose magnitudes are given.
__device__ __forceinline__ uint4 expand_e2m1(uint32_t low, uint32_t high, uint2 magnitudes) {
  const auto four = [&](uint32_t codes) {  // the low 16 bits
    uint32_t magnitude, sign;
    asm("prmt.b32 %0, %1, %2, %3;"
        : "=r"(magnitude)
        : "r"(magnitudes.x), "r"(magnitudes.y), "r"(codes & 0x7777u));
    // Bit 3 of a selector repeats the byte's upper bit: 0xff of a negative one.
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(sign) : "r"(0x80808080u), "r"(codes));
    return magnitude | (sign << 7 & 0x80808080u);
  };
  return {four(low), four(low >> 16), four(high), four(high >> 16)};
}

// 0 of what is negative; a NaN stays one. An addition runs at twice the rate of a maximum, and doubling
// changes no other bit.
__device__ __forceinline__ float twice_relu(float x) { return __fadd_rn(x, fabsf(x)); }

// The math of a warpgroup. kHeads: lines of a row's queries, 16, 32 or 64.
template <int kHeads>
class Math {
 public:
  // `may_take_two`: where few rows leave half of the registers, a step is two items.
  __device__ __forceinline__ Math(const Memory& memory, Barriers& barriers, bool are_boxes, bool may_take_two)
      : memory_(memory), barriers_(barriers), are_boxes_(are_boxes), may_take_two_(may_take_two) {}

  __device__ __forceinline__ void begin(int num_rows) {
    num_rows_ = num_rows;
    place_.advance(item(), memory_.num_stages);
  }

  // When the queries of a unit have been loaded, and after what needs registers itself.
  __device__ __forceinline__ void load_weights() {
    const float4* weights = reinterpret_cast<const float4*>(memory_.weights()) + threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kHeads / 16; ++i) {
        const int line = (first_row() + r) * kHeads;
        weights_[r][i] = line < memory_.lines ? weights[line / 4 + 4 * i] : float4{};
      }
  }

  static constexpr int kRows = kHeads == 64 ? 2 : 4;  // of a warpgroup, at most
  static constexpr int kPairs = kRows / 2;
  static constexpr int kFewRows = kHeads == 16 ? 0 : kRows / 2;  // whose heads are 64 columns

  // Of the next unit's first item, between two units.
  __device__ __forceinline__ Place place() const { return place_; }
  // Whether a step is two tiles, while there are two.
  __device__ __forceinline__ bool takes_two() const { return may_take_two_ && num_rows_ <= kFewRows; }
  // The row of the calling lane's logits of a pair of rows, whether there is one, the lanes with the same.
  __device__ __forceinline__ int row(int pair) const {
    return kFewRows == 1 && takes_two() ? 0 : first_row() + 2 * pair + threadIdx.x % 4 / 2;
  }
  __device__ __forceinline__ bool has_row(int pair) const { return row(pair) < num_rows_; }
  __device__ __forceinline__ uint32_t row_lanes() const {
    return kFewRows == 1 && takes_two() ? kFullWarp : 0x33333333u << (threadIdx.x & 2);
  }
  // Warps that find logits of the calling warp's rows, and which of them it is.
  __device__ __forceinline__ int row_warps() const { return kThreads / kWarpSize / shares(); }
  __device__ __forceinline__ int row_warp() const { return threadIdx.x / kWarpSize % row_warps(); }

  // Of a tile: sink(pair, key, logit, present), the lanes of a warp together, each with the logit of a key of
  // the tile of its own, of its row of the pair; of lanes that have none it means nothing.
  template <class Sink>
  __device__ __forceinline__ void next_tile(const Sink& sink) {
    for (int i = 0; i < shares(); ++i) {
      wait_full(place_);
      if (memory_.is_fp4) {
        GroupTeam::sync();  // the products of the item before have been made
        expand(place_, group());
        fence_proxy_async();
        GroupTeam::sync();
      }
      const int key = (i * (kGroups / shares()) + item()) * kItemKeys;
      const int rows = num_rows_ - first_row();
      if (rows > kRows / 2) rows_logits<kRows * kHeads>(key, sink);
      else if constexpr (kRows * kHeads > 64) rows_logits<kRows * kHeads / 2>(key, sink);
      else rows_logits<kRows * kHeads>(key, sink);
      place_.advance(kGroups / shares(), memory_.num_stages);
    }
  }

  // Of two tiles, where a step is that.
  template <class Sink>
  __device__ __forceinline__ void next_two_tiles(const Sink& sink) {
    if constexpr (kFewRows > 0) {
      Place second = place_;
      second.advance(kGroups, memory_.num_stages);
      wait_full(place_);
      wait_full(second);
      if (memory_.is_fp4) {
        GroupTeam::sync();
        expand(place_, group());
        expand(second, kGroups + group());
        fence_proxy_async();
        GroupTeam::sync();
      }
      two_items_logits(second, sink);
      place_ = second;
      place_.advance(kGroups, memory_.num_stages);
    }
  }

  // When the unit's tiles are done.
  __device__ __forceinline__ void end() { place_.retreat(item(), memory_.num_stages); }

 private:
  __device__ __forceinline__ static int group() { return threadIdx.x / kGroup; }
  // Warpgroups that have the same rows take turns at the items, and `shares` of them make all rows.
  __device__ __forceinline__ int shares() const { return kHeads == 64 && num_rows_ > kRows ? 2 : 1; }
  __device__ __forceinline__ int first_row() const { return shares() == 2 ? group() / 2 * kRows : 0; }
  __device__ __forceinline__ int item() const { return shares() == 2 ? group() % 2 : group(); }

  __device__ __forceinline__ void wait_full(Place place) const {
    mbarrier_wait(shared_address(&barriers_.full[place.stage()]), place.phase());
    if (!are_boxes_) fence_proxy_async();
  }
  __device__ __forceinline__ void give_up(Place place) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t empty = shared_address(&barriers_.empty[place.stage()]);
    mbarrier_arrive_warp(empty, lane);
    if (shares() == 1) mbarrier_arrive_warp(empty, lane);  // for the warpgroup that it is not shared with
  }

  // An item of e2m1 into a panel, 32 elements of a key to a lane, which have one scale.
  __device__ __forceinline__ void expand(Place place, int panel) const {
    const int lane = threadIdx.x % kWarpSize, first_key = threadIdx.x % kGroup / kWarpSize * 16;
    const uint32_t from = shared_address(memory_.keys(place.stage())) + first_key * (kIndexDim / 2);
    const uint32_t to = shared_address(memory_.panel(panel));
    const uint32_t scales = shared_address(memory_.scales(place) + first_key);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = lane + i * kWarpSize, tile = part % 4, key = first_key + part / 4;
      const uint4 packed = load_shared_16(from + 16 * part);
      const int shift = E2m1Scales::load(load_shared_4(scales + part / 4 * 4)).shift(tile);
      const uint2 magnitudes =
          load_shared_8(shared_address(barriers_.magnitudes) + 8 * (shift - Barriers::kLeastShift));
      store_shared_16(to + swizzled(key, 2 * tile), expand_e2m1(packed.x, packed.y, magnitudes));
      store_shared_16(to + swizzled(key, 2 * tile + 1), expand_e2m1(packed.z, packed.w, magnitudes));
    }
  }

  // Descriptors are the same in all lanes; the compiler sees that, so it finds them in uniform registers.
  __device__ __forceinline__ uint64_t keys_descriptor(Place place, int panel) const {
    const int uniform = __shfl_sync(kFullWarp, memory_.is_fp4 ? panel : place.stage(), 0);
    const uint8_t* panels = memory_.is_fp4 ? memory_.panel(0) : memory_.keys(0);
    return wgmma_panel_descriptor(shared_address(panels) + uniform * Memory::kPanelBytes);
  }
  __device__ __forceinline__ uint64_t queries_descriptor() const {
    const int uniform = __shfl_sync(kFullWarp, first_row(), 0);
    return wgmma_panel_descriptor(shared_address(memory_.queries()) + uniform * kHeads * kIndexDim);
  }
  template <int kColumns>
  __device__ __forceinline__ static void multiply(float (&acc)[kColumns][4], uint64_t a, uint64_t b) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_e4m3(acc, wgmma_advance(a, 32 * step), wgmma_advance(b, 32 * step), step > 0);
    wgmma_commit();
  }

  // Of an item the key, of a lane with an even number that of the first eight, of others that behind them.
  __device__ __forceinline__ static int own_key() {
    const int lane = threadIdx.x % kWarpSize;
    return threadIdx.x % kGroup / kWarpSize * 16 + lane / 4 + 8 * (lane & 1);
  }
  __device__ __forceinline__ float own_scale(Place place) const {
    const float stored = memory_.scales(place)[own_key()];
    return memory_.is_fp4 ? E2m1Scales::load(float_bits(stored)).scale() : stored;
  }
  // The scale comes behind the sum of all heads: parts times infinity would cancel.
  __device__ __forceinline__ static float scaled(float sum, float scale) {
    return round_add(round_mul(sum, scale), 0.0f);
  }

  // Half of the sum over the heads of row r, whose columns begin at `first`, for the lane's key; the lane
  // with the other bit 1 has the other half.
  template <int kColumns>
  __device__ __forceinline__ float head_sum(const float (&acc)[kColumns][4], int first, int r) const {
    float s[2][2] = {};  // keys, heads modulo two
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
    const float low = round_add(s[0][0], s[0][1]), high = round_add(s[1][0], s[1][1]);
    return exchange(low, high, 1);
  }

  // The products of kN / kHeads rows with the item whose first key of the tile is `first`.
  template <int kN, class Sink>
  __device__ __forceinline__ void rows_logits(int first, const Sink& sink) const {
    constexpr int kColumns = kN / 8, kUsed = kN / kHeads;
    const uint64_t a = keys_descriptor(place_, group()), b = queries_descriptor();
    float acc[kColumns][4];
    pin_registers(acc);
    wgmma_fence();
    multiply(acc, a, b);
    wgmma_wait<0>();
    pin_registers(acc);

    const int key = first + own_key();
    const float scale = own_scale(place_);
    const bool present = memory_.present(place_)[own_key()];
    give_up(place_);
    float sums[kUsed];
#pragma unroll
    for (int r = 0; r < kUsed; ++r) sums[r] = head_sum(acc, r * (kHeads / 8), r);
    if constexpr (kUsed == 1) {  // two lanes of a quad have the same
      const float sum = round_add(sums[0], __shfl_xor_sync(kFullWarp, sums[0], 2));
      sink(0, key, scaled(sum, scale), present && (threadIdx.x & 2) == 0);
    } else {
#pragma unroll
      for (int pair = 0; pair < kUsed / 2; ++pair)
        sink(pair, key, scaled(exchange(sums[2 * pair], sums[2 * pair + 1], 2), scale), present);
    }
  }

  // The same of 64 columns and two items, the next tile's in `second`. One row: the upper lanes of each quad
  // have the second item's logits.
  template <class Sink>
  __device__ __forceinline__ void two_items_logits(Place second, const Sink& sink) const {
    const uint64_t a = keys_descriptor(place_, group()), b = queries_descriptor();
    const uint64_t c = keys_descriptor(second, kGroups + group());
    float acc[2][8][4];
    pin_registers(acc[0]);
    pin_registers(acc[1]);
    wgmma_fence();
    multiply(acc[0], a, b);
    multiply(acc[1], c, b);
    wgmma_wait<0>();
    pin_registers(acc[0]);
    pin_registers(acc[1]);

    const int key = item() * kItemKeys + own_key();
    if constexpr (kFewRows == 1) {
      const bool upper = threadIdx.x & 2;
      const Place own = upper ? second : place_;
      const float scale = own_scale(own);
      const bool present = memory_.present(own)[own_key()];
      give_up(place_);
      give_up(second);
      const float sum = exchange(head_sum(acc[0], 0, 0), head_sum(acc[1], 0, 0), 2);
      sink(0, key + (upper ? kTileKeys : 0), scaled(sum, scale), present);
    } else {
      const float scales[] = {own_scale(place_), own_scale(second)};
      const bool present[] = {memory_.present(place_)[own_key()], memory_.present(second)[own_key()]};
      give_up(place_);
      give_up(second);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = exchange(head_sum(acc[i], 0, 0), head_sum(acc[i], kHeads / 8, 1), 2);
        sink(0, key + i * kTileKeys, scaled(sum, scales[i]), present[i]);
      }
    }
  }

  // A lane without bit `lanes` keeps x and gives y to the lane with it, which gives x; the sums of both.
  __device__ __forceinline__ static float exchange(float x, float y, int lanes) {
    const bool upper = threadIdx.x & lanes;
    const float kept = upper ? y : x;
    return round_add(kept, __shfl_xor_sync(kFullWarp, upper ? x : y, lanes));
  }

  const Memory memory_;
  Barriers& barriers_;
  const bool are_boxes_, may_take_two_;
  Place place_;  // of the next item
  int num_rows_ = 0;
  float4 weights_[kRows][kHeads / 16];
};

}  // namespace mla_fp8::gpu::sm90_index
