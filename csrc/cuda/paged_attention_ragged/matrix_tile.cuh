#pragma once
// The product of two 16 x 16 tiles by one wave, for every GPU here: mma.sync by a warp of 32 lanes, MFMA by a
// wave of 64. For each operand row a lane has four neighbouring k. How the instruction numbers k inside does
// not matter, as long as A and B agree.
#include "common/dtype.h"
#include "cuda/device/convert.cuh"
#if MLA_FP8_PTX
#include "cuda/device/mma.cuh"
#endif
#include "ops/paged_attention_ragged.h"

namespace mla_fp8::gpu {

inline constexpr int kTile = 16;
inline constexpr int kTileAccumulators = kTile * kTile / kWaveSize;
inline constexpr int kOperandRows = 64 / kWaveSize;  // rows of A, and columns of B, of a lane

// A thread's number, opaque on gfx90a: there addresses that are kept take too many registers.
__device__ __forceinline__ int this_thread() {
#ifdef __gfx90a__
  return mla_opaque(threadIdx.x);
#else
  return threadIdx.x;
#endif
}
__device__ __forceinline__ int wave_lane() { return threadIdx.x % kWaveSize; }

// Four 16-bit elements, k to k + 3, of each of the lane's rows.
struct Operand {
  Words<2> row[kOperandRows];
};

#if MLA_FP8_WAVE64
// A vector type: clang scatters the elements of an array over registers, and moves all of them to and fro.
using Accumulators = float __attribute__((ext_vector_type(kTileAccumulators)));

__device__ __forceinline__ int operand_row(int) { return wave_lane() % 16; }
__device__ __forceinline__ int operand_k() { return wave_lane() / 16 * 4; }
__device__ __forceinline__ int accumulator_row(int i) { return wave_lane() / 16 * 4 + i; }
__device__ __forceinline__ int accumulator_column(int) { return wave_lane() % 16; }

// acc (row, column) += sum over k of A (row, k) B (k, column).
template <Dtype kDtype>
__device__ __forceinline__ void multiply_tiles(Accumulators& acc, const Operand& a, const Operand& b) {
  mfma_16x16x16<kDtype>(acc, a.row[0], b.row[0]);
}
// acc[i] *= factors[i]
__device__ __forceinline__ void scale_accumulators(Accumulators& acc, const Accumulators& factors) {
  acc *= factors;
}
#else
using Accumulators = float[kTileAccumulators];

__device__ __forceinline__ int operand_row(int i) { return wave_lane() / 4 + 8 * i; }
__device__ __forceinline__ int operand_k() { return wave_lane() % 4 * 4; }
__device__ __forceinline__ int accumulator_row(int i) { return wave_lane() / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int accumulator_column(int i) { return i / 4 * 8 + wave_lane() % 4 * 2 + i % 2; }

template <Dtype kDtype>
__device__ __forceinline__ void multiply_tiles(Accumulators& acc, const Operand& a, const Operand& b) {
  const uint32_t rows[4] = {a.row[0][0], a.row[1][0], a.row[0][1], a.row[1][1]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // eight columns each
    float (&d)[4] = *reinterpret_cast<float (*)[4]>(&acc[4 * half]);
    if constexpr (kDtype == Dtype::kF16) mma_f16(d, rows, b.row[half][0], b.row[half][1]);
    else mma_bf16(d, rows, b.row[half][0], b.row[half][1]);
  }
}
__device__ __forceinline__ void scale_accumulators(Accumulators& acc, const Accumulators& factors) {
#pragma unroll
  for (int i = 0; i < kTileAccumulators; ++i) acc[i] *= factors[i];
}
#endif

// ---- loading operands -----------------------------------------------------------------------------------

template <CacheDtype kStored>
inline constexpr int kStoredBytes = kStored == CacheDtype::kBf16 || kStored == CacheDtype::kF16 ? 2 : 1;

template <CacheDtype kStored>
inline constexpr Format kCodes = kStored == CacheDtype::kE4m3fn ? Format::kE4m3fn : Format::kE4m3fnuz;

// Whether codes are staged halved; otherwise they are staged as they are stored.
template <CacheDtype kStored>
inline constexpr bool kIsHalved = kStoredBytes<kStored> == 1 && kAreHalved<kCodes<kStored>>;
template <CacheDtype kStored>
inline constexpr Format kStagedCodes = kIsHalved<kStored> ? Format::kE4m3fnuz : kCodes<kStored>;

// Widens four staged codes to 16-bit floats, exactly.
template <CacheDtype kStored, Dtype kDtype>
__device__ __forceinline__ Words<2> widen4(uint32_t codes) {
  return e4m3x4_to_16bit<kStagedCodes<kStored>, kDtype>(codes);
}

// Loads four neighbouring elements of one row from shared memory.
template <CacheDtype kStored, Dtype kDtype>
__device__ __forceinline__ Words<2> load_k4(const uint8_t* row) {
  if constexpr (kStoredBytes<kStored> == 2) return *reinterpret_cast<const Words<2>*>(row);
  else return widen4<kStored, kDtype>(*reinterpret_cast<const uint32_t*>(row));
}

// Loads kBytes of a row, 1 to 8, as words.
template <int kBytes>
__device__ __forceinline__ Words<2> load_bytes(const uint8_t* p) {
  if constexpr (kBytes == 1) return {*p, 0};
  if constexpr (kBytes == 2) return {*reinterpret_cast<const uint16_t*>(p), 0};
  if constexpr (kBytes == 4) return {*reinterpret_cast<const uint32_t*>(p), 0};
  if constexpr (kBytes == 8) return *reinterpret_cast<const Words<2>*>(p);
}

// Loads neighbouring elements of one row as floats.
template <CacheDtype kStored, Dtype kDtype, int kCount>
__device__ __forceinline__ void load_floats(const uint8_t* row, float (&x)[kCount]) {
  Words<2> w = load_bytes<kCount * kStoredBytes<kStored>>(row);
  if constexpr (kStoredBytes<kStored> == 1) w = widen4<kStored, kDtype>(w[0]);
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = to_float<kDtype>(static_cast<uint16_t>(w[j / 2] >> (j % 2 * 16)));
}

// Loads kCount neighbouring columns of four rows: columns[j] gets the four elements of column j.
template <CacheDtype kStored, Dtype kDtype, int kCount>
__device__ __forceinline__ void load_columns(const uint8_t* rows, int pitch, Words<2> (&columns)[kCount]) {
  Words<2> x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = load_bytes<kCount * kStoredBytes<kStored>>(rows + i * pitch);
  if constexpr (kStoredBytes<kStored> == 2) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const auto pair = [&](int i) {
        const uint32_t a = x[i][j / 2], b = x[i + 1][j / 2];
        return j % 2 == 0 ? lower_halves(a, b) : upper_halves(a, b);
      };
      columns[j] = {pair(0), pair(2)};
    }
  } else {
    e4m3_columns_to_16bit<kStagedCodes<kStored>, kDtype>({x[0][0], x[1][0], x[2][0], x[3][0]}, columns);
  }
}

}  // namespace mla_fp8::gpu
