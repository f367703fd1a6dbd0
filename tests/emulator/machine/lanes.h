#pragma once
// How a function of one lane becomes an instruction of a wave: what the tables of vector instructions are
// written with. All 64 lanes are computed; write() keeps those that exec names.
#include "emulator/machine/wave.h"

namespace emulator {

using I = const Instruction&;
using u32 = uint32_t;
using u64 = uint64_t;
inline int32_t as_signed(u32 x) { return static_cast<int32_t>(x); }
inline u32 as_bits(float x) { return std::bit_cast<u32>(x); }
inline float as_float(u32 x) { return std::bit_cast<float>(x); }

template <auto kF>
void lanes1(Wave& w, I i) {
  const u32* a = w.source(i, 0);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = kF(a[l]);
  w.write(i, result);
}
template <auto kF>
void lanes2(Wave& w, I i) {
  const u32 *a = w.source(i, 0), *b = w.source(i, 1);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = kF(a[l], b[l]);
  w.write(i, result);
}
template <auto kF>
void lanes3(Wave& w, I i) {
  const u32 *a = w.source(i, 0), *b = w.source(i, 1), *c = w.source(i, 2);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = kF(a[l], b[l], c[l]);
  w.write(i, result);
}
// Floats in, floats out.
template <auto kF>
void floats1(Wave& w, I i) {
  const float* a = w.source_float(i, 0);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(kF(a[l]));
  w.write(i, result);
}
template <auto kF>
void floats2(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(kF(a[l], b[l]));
  w.write(i, result);
}
template <auto kF>
void floats3(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1), *c = w.source_float(i, 2);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(kF(a[l], b[l], c[l]));
  w.write(i, result);
}
// Floats in, bits out.
template <auto kF>
void from_float(Wave& w, I i) {
  const float* a = w.source_float(i, 0);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = kF(a[l]);
  w.write(i, result);
}
template <auto kF>
void from_floats(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = kF(a[l], b[l]);
  w.write(i, result);
}

}  // namespace emulator
