#pragma once
// The gather from two caches of different layouts. A producer fetches rows as they lie there, each into its
// place of the ring; once they are there, or while it would wait for the next free stage, it makes them rows
// of one kind (mixed_row.cuh). So the whole ring is in flight, and nobody else converts what several warps
// read.
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"

namespace mla_fp8::gpu {

// e2m1 of 8 dims as e4m3 of a 64th, in their order.
__device__ __forceinline__ uint2 expand_e2m1x8(uint32_t codes) {
  const uint32_t even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1c1c1c1cu);
  const uint32_t odd = (codes & 0x80808080u) | (codes >> 2 & 0x1c1c1c1cu);
  return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}

// 64 times two e4m3 (bytes 0 and 1) as bf16, exactly; NaN is not known here.
__device__ __forceinline__ uint32_t e4m3_scales_to_bf16(uint32_t pair) {
  const uint32_t x = __byte_perm(pair, 0, 0x4140);
  return mul_bf16x2((x & 0x00800080u) << 8 | (x & 0x007f007fu) << 4, 0x7e807e80u);  // 2^120 * 64
}

template <class C>
class MixedGather : protected Gather<C> {
 public:
  using R = typename C::R;
  using First = typename R::First;
  using Second = typename R::Second;
  using Gather<C>::Gather;

 protected:
  using Key = KeySource::Key;
  using Gather<C>::find, Gather<C>::lane_, Gather<C>::p_, Gather<C>::ring_, Gather<C>::valid_;

  __device__ void fetch(int i, Key key, int num_keys) {
    const bool extra = key.scope != 0;
    const KvScope& s = p_.scopes[key.scope];
    const unsigned page_size = s.page_size, in_cache = key.slot;
    const unsigned page = in_cache / page_size, in_page = in_cache % page_size;
    const uint8_t* const base = s.kv_cache + page * s.kv_cache_stride_page;
    constexpr KvLayout kFirst = First::kL, kSecond = Second::kL;
    const uint8_t* const row = base + (extra ? kSecond.token_offset(in_page) : kFirst.token_offset(in_page));
    const uint8_t* const scales =
        base + (extra ? kSecond.scale_offset(in_page, page_size) : kFirst.scale_offset(in_page, page_size));
    const int num_here = min(num_keys, kStageRows);
    const bool counts = lane_ < num_here;
    const unsigned which = key.slot ^ key.scope << 31, other = __shfl_xor_sync(kFullWarp, which, 8);
    unsigned same = 0, repeated = 0;
    if (__any_sync(kFullWarp, counts && which == other)) [[unlikely]] {
      if (counts) same = __match_any_sync((1u << num_here) - 1, which);
      repeated = __ballot_sync(kFullWarp, __popc(same) > 1);
    }
    const unsigned extras = __ballot_sync(kFullWarp, extra) & kStagePlaces;

    const int stage = i % C::kStages;
    while (num_pending_ > 0 && (is_raw_full() || !is_free(i))) expand_next();
    wait_until_free<C::kStages>(ring_.empty(stage), i);
    if (lane_ < kStageRows) valid_[stage * kStageRows + lane_] = counts ? kValidKey : 0;
    if (lane_ == 0) store_shared_4(extras_at(stage), extras);
    if (repeated) [[unlikely]]
      copy_repeated(stage, row, repeated, same, extras);
    const unsigned copied = kStagePlaces & ~repeated;
    const int bytes = __popc(copied & ~extras) * First::kBytes + __popc(copied & extras) * Second::kBytes;
    mbarrier_arrive_expect_warp(ring_.raw(stage), bytes, lane_);
    __syncwarp();
    if (lane_ < kStageRows) {
      const uint32_t to = ring_.stage(stage) + R::kTableOffset + lane_ * R::kRawScaleBytes;
      const uint32_t dst = ring_.stage(stage) + lane_ * R::kPitch;
      if (extra) {
        cp_async_16(to, scales, true);
        cp_async_16(to + 16, scales + 16, true);
      } else if constexpr (kFirst.scale_bytes() == 8) {
        cp_async_8(to, scales);
      } else {
        static_assert(kFirst.scale_bytes() == 16);
        cp_async_16(to, scales, true);
      }
      mbarrier_arrive_cp_async(ring_.raw(stage));
      if (copied >> lane_ & 1) {
        if (extra) bulk_copy(dst + R::kCodesOffset, row, Second::kBytes, ring_.raw(stage));
        else bulk_copy(dst, row, First::kBytes, ring_.raw(stage));
      }
    }
    __syncwarp();
    pending_ |= static_cast<uint32_t>(i % (2 * C::kStages)) << 8 * num_pending_;
    ++num_pending_;
  }

  // Consumers may need them before what is waited for can come.
  template <class Ready>
  __device__ void finish_until(Ready&& ready) {
    while (num_pending_ > 0 && !ready()) expand_next();
  }
  __device__ void drain() {
    while (num_pending_ > 0) expand_next();
  }

 private:
  static constexpr unsigned kStagePlaces = (1u << kStageRows) - 1;
  static_assert(C::kStages <= 16 && C::kStages / C::kProducers <= 4, "a byte of pending_ each");

  __device__ uint32_t extras_at(int stage) const {
    return ring_.smem + MLA_SMEM(C, stage_extras) + stage * 4;
  }
  __device__ bool is_free(int i) const {
    return __all_sync(kFullWarp, mbarrier_test(ring_.empty(i % C::kStages), (i / C::kStages & 1) ^ 1));
  }
  __device__ bool is_raw_full() const {  // the next one's
    const int i = pending_ & 255;
    return __all_sync(kFullWarp, mbarrier_test(ring_.raw(i % C::kStages), i / C::kStages & 1));
  }
  __device__ void expand_next() {
    const int i = pending_ & 255;
    wait_until_full<C::kStages>(ring_.raw(i % C::kStages), i);
    expand(i % C::kStages);
    pending_ >>= 8;
    --num_pending_;
  }

  // As Gather's, of rows of either kind.
  __device__ __forceinline__ void copy_repeated(int stage, const uint8_t* row, unsigned repeated,
                                                unsigned same, unsigned extras) const {
    while (repeated) {
      const int first = __ffs(repeated) - 1;
      const unsigned places = __shfl_sync(kFullWarp, same, first);
      const auto* from = reinterpret_cast<const uint8_t*>(
          __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row), first));
      const bool extra = extras >> first & 1;
      const int bytes = extra ? Second::kBytes : First::kBytes;
      const uint32_t to = ring_.stage(stage) + (extra ? R::kCodesOffset : 0);
#pragma unroll 1
      for (int at = lane_ * 16; at < bytes; at += kWarpSize * 16) {
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(from + at));
#pragma unroll 1
        for (int place = 0; place < kStageRows; ++place)
          if (places >> place & 1) store_shared_16(to + place * R::kPitch + at, x);
      }
      repeated &= ~places;
    }
  }

  // A stage whose bytes are there.
  __device__ __forceinline__ void expand(int stage) {
    const uint32_t rows = ring_.stage(stage), table = rows + R::kTableOffset;
    const unsigned extras = load_shared_4(extras_at(stage));
    const int row = lane_ / 2, half = lane_ % 2;  // two lanes have what becomes bf16 in a row
    const bool extra = extras >> row & 1;
    uint4 tail_codes{};
    uint32_t tail_scales = 0;
    if constexpr (R::kBf16Dims > 0)
      if (extra) {
        tail_codes = load_shared_16(rows + row * R::kPitch + First::kBytes - 32 + half * 16);
        tail_scales = e4m3_scales_to_bf16(load_shared_2(table + row * R::kRawScaleBytes + 28 + half * 2));
      }
    // Most stages have rows of one cache; a NaN, which is rare, goes the longer way.
    if (extras != kStagePlaces || !store_second_scales(stage)) store_any_scales(stage, extras);
    if (extras == kStagePlaces) expand_codes<true>(rows, extras);
    else if (extras) expand_codes<false>(rows, extras);
    if constexpr (R::kBf16Dims > 0) {
      __syncwarp();
      if (extra) store_tail(rows + row * R::kPitch + R::kBf16Offset + half * 64, tail_codes, tail_scales);
    }
    fence_proxy_async();  // as consumers do before they give it back
    mbarrier_arrive_warp(ring_.full(stage), lane_);
  }

  // Of 16 rows of the second cache: a lane has the two tiles of a unit of eight keys, what two lanes of the
  // consumers want at once. False, and nothing stored, if one is NaN.
  __device__ __forceinline__ bool store_second_scales(int stage) const {
    const uint32_t table = ring_.stage(stage) + R::kTableOffset;
    const int unit = lane_ % 16, first = lane_ / 16 * 4;  // keys first .. first + 3, and + 8
    const uint32_t from = table + first * R::kRawScaleBytes + unit * 2;
    uint32_t scales[8], largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      scales[i] = e4m3x2_to_f16(load_shared_2(from + (i % 4 + i / 4 * 8) * R::kRawScaleBytes));
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = __vmaxs2(largest, scales[i]);
    const uint32_t above = __reduce_max_sync(kFullWarp, max(largest & 0xffffu, largest >> 16));
    if (above >= kInfiniteF16) [[unlikely]]
      return false;
    const int e = static_cast<int>(above >> 10) - 14;  // 2^e is above them
    if (lane_ == 0) store_shared_4(ring_.smem + MLA_SMEM(C, stage_exponents) + stage * 4, e + kLog2Codes);
    const uint32_t unit_f16 = static_cast<uint32_t>(15 - e) * 0x04000400u;
#pragma unroll
    for (int i = 0; i < 8; ++i) scales[i] = mul_f16x2(scales[i], unit_f16);
    __syncwarp();  // the table's place has been read
    const uint32_t to = table + unit * kUnitFactorBytes + first / 2 * 16;
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      store_shared_16(
          to + i * 8,
          {__byte_perm(scales[i], scales[i + 1], 0x5410), __byte_perm(scales[i + 4], scales[i + 5], 0x5410),
           __byte_perm(scales[i], scales[i + 1], 0x7632), __byte_perm(scales[i + 4], scales[i + 5], 0x7632)});
    return true;
  }

  // Of rows of either cache: two lanes have those of a row, 16 tiles each.
  __device__ __forceinline__ void store_any_scales(int stage, unsigned extras) const {
    const int row = lane_ / 2, half = lane_ % 2;
    const uint32_t at = ring_.stage(stage) + R::kTableOffset + row * R::kRawScaleBytes;
    uint32_t scales[8];  // pairs of bf16
    load_scales(at, half, extras >> row & 1, scales);
    if constexpr (R::kBf16Dims > 0)
      if (half) scales[6] = scales[7] = 0;
    __syncwarp();  // the table's place has been read
    store_scales(stage, row, half, scales);
  }

  // Of 16 tiles of 16 dims, as bf16; infinite in place of NaN. Codes of the second are 64ths.
  __device__ static void load_scales(uint32_t at, int half, bool extra, uint32_t (&scales)[8]) {
    if (extra) {
      const uint4 x = load_shared_16(at + half * 16);
      const uint32_t bytes[4] = {x.x, x.y, x.z, x.w};
      uint32_t nan = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scales[2 * i] = e4m3_scales_to_bf16(bytes[i]);
        scales[2 * i + 1] = e4m3_scales_to_bf16(bytes[i] >> 16);
        nan |= __vcmpeq4(bytes[i] & 0x7f7f7f7fu, 0x7f7f7f7fu);
      }
      if (nan) scales[0] = kInfinite;
    } else {
      constexpr int kBytes = First::kL.scale_bytes() / 2;  // of ue8m0, of these 16 tiles
      constexpr int kWordsPerByte = 8 / kBytes;
      uint32_t bytes[2];
      if constexpr (kBytes == 8) {
        const uint2 x = load_shared_8(at + half * 8);
        bytes[0] = x.x, bytes[1] = x.y;
      } else {
        bytes[0] = load_shared_4(at + half * 4);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int byte = i / kWordsPerByte;
        scales[i] = (bytes[byte / 4] >> 8 * (byte % 4) & 255u) * 0x00800080u;
        if (half * 8 + i >= R::kNumScales / 2) scales[i] = 0;  // behind the last tile
      }
    }
  }

  // To the table, in units of what the largest becomes at most 1 by; which keys are NaN.
  __device__ void store_scales(int stage, int row, int half, const uint32_t (&scales)[8]) const {
    uint32_t largest = 0;  // halves; negative ones are below 0
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = __vmaxs2(largest, scales[i]);
    const uint32_t above = __reduce_max_sync(kFullWarp, max(largest & 0xffffu, largest >> 16));
    const int e = min(max(exponent_above(above << 16), -100), 100);
    if (lane_ == 0) store_shared_4(ring_.smem + MLA_SMEM(C, stage_exponents) + stage * 4, e);
    if (above >= kInfinite) [[unlikely]] {
      const bool is_nan = (largest & 0xffffu) >= kInfinite || largest >> 16 >= kInfinite;
      const unsigned keys = __ballot_sync(kFullWarp, is_nan);
      if (half == 0 && (keys >> lane_ & 3)) {
        uint8_t& valid = valid_[stage * kStageRows + row];
        if (valid) valid = kValidKey | kNanKey;
      }
    }
    const float unit = power_of_two(-e);
    const uint32_t at = ring_.stage(stage) + R::kTableOffset + half * 8 * kUnitFactorBytes +
                        row % 8 / 2 * 16 + row / 8 * 4 + row % 2 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair =
          pack_f16(bits_float(scales[i] << 16) * unit, bits_float(scales[i] & 0xffff0000u) * unit);
      store_shared_2(at + i * kUnitFactorBytes, pair);
      store_shared_2(at + i * kUnitFactorBytes + 8, pair >> 16);
    }
  }

  // A row at a time: a lane's 16 codes become 16 bytes. Its last codes lie where its last bytes will.
  template <bool kAll>
  __device__ __forceinline__ void expand_codes(uint32_t rows, unsigned extras) const {
    constexpr int kAtOnce = C::kProducerRegisters >= 80 ? 8 : 4;
    const uint32_t from = rows + R::kCodesOffset + lane_ * 8, to = rows + lane_ * 16;
#pragma unroll 1
    for (int first = 0; first < kStageRows; first += kAtOnce) {
      uint2 codes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) codes[i] = load_shared_8(from + (first + i) * R::kPitch);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!kAll && !(extras >> (first + i) & 1)) continue;
        if (R::kFp8Dims < kWarpSize * 16 && lane_ * 16 >= R::kFp8Dims) continue;
        const uint2 a = expand_e2m1x8(codes[i].x), b = expand_e2m1x8(codes[i].y);
        store_shared_16(to + (first + i) * R::kPitch, {a.x, a.y, b.x, b.y});
      }
    }
  }

  // 32 codes with the scales of two tiles as 32 bf16: a code's bits are those of a bf16 of 2^-126 times it.
  __device__ static void store_tail(uint32_t at, const uint4& codes, uint32_t scales) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t scale = __byte_perm(scales, 0, i < 2 ? 0x1010 : 0x3232);
      uint32_t values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t x = (words[i] >> 8 * j & 15u) | (words[i] >> 8 * j & 0xf0u) << 12;
        const uint32_t bits = (x & 0x00080008u) << 12 | (x & 0x00070007u) << 6;
        values[j] = mul_bf16x2(mul_bf16x2(bits, 0x7b807b80u), scale);  // 2^120, and 64 is in the scale
      }
      store_shared_16(at + i * 16, {values[0], values[1], values[2], values[3]});
    }
  }

  static constexpr uint32_t kInfinite = 0x7f80, kInfiniteF16 = 0x7c00;
  static constexpr int kLog2Codes = 6;  // codes become 64ths

  uint32_t pending_ = 0;  // places in the ring's sequence, a byte each, the next one lowest
  int num_pending_ = 0;
};

}  // namespace mla_fp8::gpu
