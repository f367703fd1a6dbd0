#pragma once
// Makes rows of one kind of the rows of two caches (mixed_row.cuh). A stage is expanded once, when its bytes
// have arrived, as several consumers read it. Bound: a chain of latencies, about 2 K clocks a stage for 410
// instructions, and the issue slots and shared memory that consumers lose. With up to 32 heads four warps do
// only this, and no stage waits until its producer has fetched another. With 64 heads registers suffice for
// producers only.
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"

namespace mla_fp8::gpu {

// Converts 8 codes of e2m1 to e4m3 of 1/64 of their values, in their order.
__device__ __forceinline__ uint2 expand_e2m1x8(uint32_t codes) {
  // A code of 4 bits, times 4, plus 96: its sign carries into bit 7. The mask removes what is left of 96. A
  // subtraction spares the pipe of logic, which is busy.
  uint32_t even = codes & 0x0f0f0f0fu;
  uint32_t odd = codes - even;
  asm("mad.lo.u32 %0, %1, 4, 0x60606060;" : "=r"(even) : "r"(even));  // else nvcc shifts, masks and adds
  odd = (odd >> 2) + 0x60606060u;
  even &= 0x9c9c9c9cu, odd &= 0x9c9c9c9cu;
  return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}

// Converts two e4m3 (bytes 0 and 1) to bf16 of 64 times their values, exactly. NaN is not known here.
__device__ __forceinline__ uint32_t e4m3_scales_to_bf16(uint32_t pair) {
  const uint32_t x = __byte_perm(pair, 0, 0x4140);
  return mul_bf16x2((x & 0x00800080u) << 8 | (x & 0x007f007fu) << 4, 0x7e807e80u);  // 2^120 * 64
}

inline constexpr unsigned kStagePlaces = (1u << kStageRows) - 1;
// The address of a stage's bits for rows that come from the second cache.
template <class C>
__device__ uint32_t stage_extras_at(const Ring<C>& ring, int stage) {
  return ring.smem + MLA_SMEM(C, stage_extras) + stage * 4;
}

template <class C>
class StageExpander {
 public:
  using R = typename C::R;
  using First = typename R::First;
  using Second = typename R::Second;

  __device__ StageExpander(uint8_t* smem, int lane) : ring_{shared_address(smem)}, lane_(lane) {}

  // A warp that only expands: it takes every kExpanders-th stage, from `i` on.
  __device__ void run(int i, int num_stages) const {
    for (; i < num_stages; i += C::kExpanders) take(i);
  }
  // Waits for the i-th stage of the ring's sequence, and expands it.
  __device__ __forceinline__ void take(int i) const {
    wait_until_full<C::kStages>(ring_.raw(i % C::kStages), i);
    expand(i % C::kStages);
  }
  // Expands a stage whose bytes have arrived.
  __device__ __forceinline__ void expand(int stage) const {
    const uint32_t rows = ring_.stage(stage), table = rows + R::kTableOffset;
    const unsigned extras = load_shared_4(stage_extras_at(ring_, stage));
    const int row = lane_ / 2, half = lane_ % 2;  // two lanes have what becomes bf16 in a row
    const bool extra = extras >> row & 1;
    uint4 tail_codes{};
    uint32_t tail_scales = 0;
    if constexpr (R::kBf16Dims > 0)
      if (extra) {
        tail_codes = load_shared_16(rows + row * R::kPitch + First::kBytes - 32 + half * 16);
        tail_scales = e4m3_scales_to_bf16(load_shared_2(table + row * R::kRawScaleBytes + 28 + half * 2));
      }
    // Most stages have rows of the second cache alone. They have a path without jumps over other code.
    Codes codes;
    bool is_done = false;
    if (extras == kStagePlaces) [[likely]] {
      if (Codes::kEarly) codes.load(codes_at(rows), 0);
      is_done = store_scales_of_one<Second>(stage);
      if (is_done) [[likely]] {
        expand_codes<true>(rows, extras, codes);
        if constexpr (R::kBf16Dims == 0) return arrive(stage);
      }
    }
    if (!is_done) {
      if (extras || !store_scales_of_one<First>(stage)) store_any_scales(stage, extras);
      if (extras) {
        if (Codes::kEarly) codes.load(codes_at(rows), 0);
        expand_codes<false>(rows, extras, codes);
      }
    }
    if constexpr (R::kBf16Dims > 0) {
      __syncwarp();
      if (extra) store_tail(rows + row * R::kPitch + R::kBf16Offset + half * 64, tail_codes, tail_scales);
    }
    arrive(stage);
  }

 private:
  __device__ void arrive(int stage) const { mbarrier_arrive_warp(ring_.full(stage), lane_); }

  // Stores the scales of 16 rows of one cache. A lane has two tiles of eight keys: what two lanes of the
  // consumers load at once. Scales of the second cache, NaN too, may be in one fixed unit. In it all products
  // with codes are exact, and it is near that of first rows with elements about 1, so bases need not move.
  // But scales that multiply weights, which are up to 2^15, must be at most 1. False, and nothing stored, if
  // one is NaN.
  template <class Cache>
  __device__ __forceinline__ bool store_scales_of_one(int stage) const {
    // e4m3 has a byte for each tile of 16 dims, ue8m0 for more dims.
    constexpr bool kE4m3 = Cache::kL.scale_format == ScaleFormat::kE4m3;
    constexpr bool kOneUnit = kE4m3 && !C::kScalesMultiplyWeights;
    static_assert(kE4m3 || Cache::kTileDims % 32 == 0);
    const uint32_t table = ring_.stage(stage) + R::kTableOffset;
    const int unit = lane_ % 16, first = lane_ / 16 * 4;  // keys first .. first + 3, and + 8
    const uint32_t from =
        table + first * R::kRawScaleBytes + (kE4m3 ? unit * 2 : unit * 32 / Cache::kTileDims);
    const auto key_at = [&](int i) { return from + (i % 4 + i / 4 * 8) * R::kRawScaleBytes; };
    uint32_t scales[8];  // pairs of f16; of ue8m0 a byte at first
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kE4m3) scales[i] = e4m3x2_to_f16(load_shared_2(key_at(i)));
      else scales[i] = unit * 32 < Cache::kFp8Dims ? load_shared_1(key_at(i)) : 0;
    }
    uint32_t above = 0;  // the largest scale
    if constexpr (!kOneUnit) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = kE4m3 ? __vmaxs2(largest, scales[i]) : max(largest, scales[i]);
      if constexpr (kE4m3) largest = max(largest & 0xffffu, largest >> 16);
      above = __reduce_max_sync(kFullWarp, largest);
      if (above >= (kE4m3 ? kInfiniteF16 : 255u)) [[unlikely]]
        return false;
    }
    int e;  // they are stored in units of 2^e
    if constexpr (kE4m3) {
      e = kOneUnit ? -kLog2OneUnit : static_cast<int>(above >> 10) - 14;
      const uint32_t unit_f16 = static_cast<uint32_t>(15 - e) * 0x04000400u;
#pragma unroll
      for (int i = 0; i < 8; ++i) scales[i] = mul_f16x2(scales[i], unit_f16);
      e += kLog2Codes;
    } else {
      e = min(max(exponent_above(above << 23), -100), 100);
      const float unit_f32 = power_of_two(-e);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float scale = bits_float(scales[i] << 23) * unit_f32;
        scales[i] = pack_f16(scale, scale);
      }
    }
    if (lane_ == 0) store_shared_4(ring_.smem + MLA_SMEM(C, stage_exponents) + stage * 4, e);
    __syncwarp();  // the table's place has been read
    const uint32_t to = table + unit * R::kUnitBytes + first / 2 * 16;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      store_shared_16(
          to + i * 8,
          {__byte_perm(scales[i], scales[i + 1], 0x5410), __byte_perm(scales[i + 4], scales[i + 5], 0x5410),
           __byte_perm(scales[i], scales[i + 1], 0x7632), __byte_perm(scales[i + 4], scales[i + 5], 0x7632)});
      if constexpr (R::kKeyTable)
        store_shared_16(to + R::kKeyTableAt + i * 8,
                        {scales[i], scales[i + 4], scales[i + 1], scales[i + 5]});
    }
    return true;
  }

  // Stores the scales of rows of either cache: two lanes have those of a row, 16 tiles each.
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

  // Loads the scales of 16 tiles of 16 dims as bf16, infinite for NaN. The second cache's are times 64.
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
      constexpr int kBytes = First::kL.scale_bytes() / 2;  // ue8m0 of these 16 tiles
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

  // Stores scales in the table, in a unit by which the largest is at most 1, and marks keys with a NaN.
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
        const uint32_t valid = ring_.smem + MLA_SMEM(C, valid) + stage * kStageRows + row;
        if (load_shared_1(valid)) store_shared_1(valid, kValidKey | kNanKey);
      }
    }
    const float unit = power_of_two(-e);
    const uint32_t units = ring_.stage(stage) + R::kTableOffset + half * 8 * R::kUnitBytes;
    const uint32_t at = units + row % 8 / 2 * 16 + row / 8 * 4 + row % 2 * 2;
    const uint32_t for_keys = units + R::kKeyTableAt + row % 8 * 8 + row / 8 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair =
          pack_f16(bits_float(scales[i] << 16) * unit, bits_float(scales[i] & 0xffff0000u) * unit);
      store_shared_2(at + i * R::kUnitBytes, pair);
      store_shared_2(at + i * R::kUnitBytes + 8, pair >> 16);
      if constexpr (R::kKeyTable) store_shared_4(for_keys + i * R::kUnitBytes, pair);
    }
  }

  // A lane's codes of some rows. Warps that only expand have registers to load the first ones while scales
  // are converted.
  struct Codes {
    static constexpr bool kEarly = C::kExpanders > 0;
    static constexpr int kRows = kEarly || C::kProducerRegisters >= 80 ? 8 : 4;
    uint2 of_row[kRows];
    __device__ __forceinline__ void load(uint32_t from, int first) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) of_row[i] = load_shared_8(from + (first + i) * R::kPitch);
    }
  };
  __device__ uint32_t codes_at(uint32_t rows) const { return rows + R::kCodesOffset + lane_ * 8; }

  // Expands the codes of all rows: a lane's 16 codes become 16 bytes. A row's last codes lie where its last
  // bytes will. `codes`: those of the first rows.
  template <bool kAll>
  __device__ __forceinline__ void expand_codes(uint32_t rows, unsigned extras, Codes& codes) const {
    const uint32_t from = codes_at(rows), to = rows + lane_ * 16;
    constexpr int kAtOnce = 2;  // a row's registers are free once its store has read them
#pragma unroll 1
    for (int first = 0; first < kStageRows; first += Codes::kRows) {
      if (!Codes::kEarly || first > 0) codes.load(from, first);
      __syncwarp();
      if (R::kFp8Dims < kWarpSize * 16 && lane_ * 16 >= R::kFp8Dims) continue;
#pragma unroll
      for (int i = 0; i < Codes::kRows; i += kAtOnce) {
        uint4 row[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const uint2 a = expand_e2m1x8(codes.of_row[i + j].x), b = expand_e2m1x8(codes.of_row[i + j].y);
          row[j] = {a.x, a.y, b.x, b.y};
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (kAll || (extras >> (first + i + j) & 1))
            store_shared_16(to + (first + i + j) * R::kPitch, row[j]);
      }
    }
  }

  // Stores 32 codes with two tiles' scales as bf16. A code's bits, shifted, are the bf16 of 2^-126 times it.
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
  static constexpr int kLog2Codes = 6;    // codes become 64ths
  static constexpr int kLog2OneUnit = 7;  // 128 * 448, the largest scale, is an f16

  const Ring<C> ring_;
  const int lane_;
};

}  // namespace mla_fp8::gpu
