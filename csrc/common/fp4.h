#pragma once
// Expands FP4 index keys and queries (e2m1, a ue8m0 scale for 32 elements) to FP8 (e4m3fn, a float scale for
// 128). Host and device give the same bits.
#include "common/fp8.h"
#include "common/index_layout.h"

namespace mla_fp8 {

inline constexpr uint8_t kE2m1OfNan = 7;  // the code of a NaN in an index key, whose tile gets a NaN scale

MLA_HD float e2m1_to_float(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const float value = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                                    : bits_float(((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22);
  return bits_float(float_bits(value) | (code & 8u) << 28);
}

// The ue8m0 exponents of an entry's four tiles, and the one scale that replaces them.
struct E2m1Scales {
  uint8_t exponent[kIndexDim / kE2m1Tile];

  MLA_HD static E2m1Scales load(uint32_t packed) {
    return {static_cast<uint8_t>(packed), static_cast<uint8_t>(packed >> 8),
            static_cast<uint8_t>(packed >> 16), static_cast<uint8_t>(packed >> 24)};
  }
  MLA_HD int largest() const {
    const int a = exponent[0] > exponent[1] ? exponent[0] : exponent[1];
    const int b = exponent[2] > exponent[3] ? exponent[2] : exponent[3];
    return a > b ? a : b;
  }
  // The biased exponent of the scale of all 128 elements. The largest value is then at most 6 * 2^6 = 384.
  MLA_HD int base() const { return largest() - 6 > 2 ? largest() - 6 : 2; }
  MLA_HD float scale() const {
    return largest() == 255 ? bits_float(kNanBits) : bits_float(static_cast<uint32_t>(base()) << 23);
  }
  // A tile's values are multiplied by 2^shift before they become e4m3. Below -20 all would become 0.
  MLA_HD int shift(int tile) const {
    const int d = exponent[tile] - base();
    return d > -20 ? d : -20;
  }
};

MLA_HD uint8_t e2m1_to_e4m3(uint32_t code, int shift) {
  return float_to_e4m3<Format::kE4m3fn>(e2m1_to_float(code) *
                                        bits_float(static_cast<uint32_t>(127 + shift) << 23));
}

}  // namespace mla_fp8
