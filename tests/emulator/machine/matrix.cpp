// Matrix instructions. Lane l holds row l % M of A and column l % M of B: of their K elements share l / M of
// the 64 / M. Of D it holds column l % M, four rows that follow one another at a time.
#include <cstring>

#include "emulator/machine/formats.h"
#include "emulator/machine/lanes.h"

namespace emulator {
namespace {

// gfx90a takes subnormal 16-bit inputs as 0.
float half_element(u32 x, bool flush) { return flush && (x & 0x7c00) == 0 ? 0.0f : from_f16(x); }
float bf16_element(u32 x, bool flush) { return flush && (x & 0x7f80) == 0 ? 0.0f : from_bf16(x); }
float fp8_element(u32 x, bool fnuz) { return from_e4m3(x, fnuz); }

// D = A B + C in float: the products of one element are summed in the order of K, then C is added. The
// hardware's order is its own: results differ in the last bits of float.
template <int kM, int kK, auto kElement, int kBits = 16>
void multiply(Wave& w, I i) {
  constexpr int kPerLane = kM * kK / kLanes, kPerRegister = 32 / kBits, kResults = kM * kM / kLanes;
  constexpr u32 kMask = (1u << kBits) - 1;
  const bool how = kBits == 8 ? w.group->gpu->fp8_is_fnuz : w.group->gpu->flushes_16_bit;
  if (i.src[0] < kFirstVgpr || i.src[1] < kFirstVgpr) w.fault("has a scalar operand");
  alignas(64) float a[kM][kK], b[kK][kM], d[kM][kM];
  for (int r = 0; r < kPerLane / kPerRegister; ++r) {
    const u32* x = w.vgpr(i.src[0] - kFirstVgpr + r, "reads");
    const u32* y = w.vgpr(i.src[1] - kFirstVgpr + r, "reads");
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < kPerRegister; ++e) {
        const int k = kPerLane * (l / kM) + r * kPerRegister + e;
        a[l % kM][k] = kElement(x[l] >> kBits * e & kMask, how);
        b[k][l % kM] = kElement(y[l] >> kBits * e & kMask, how);
      }
  }
  // Four rows of eight columns at once: left to itself, gcc takes several k, and shuffles.
  using Eight = float __attribute__((vector_size(32)));
  for (int row = 0; row < kM; row += 4)
    for (int column = 0; column < kM; column += 8) {
      Eight sums[4] = {};
      for (int k = 0; k < kK; ++k) {
        Eight of_b;
        std::memcpy(&of_b, &b[k][column], sizeof of_b);
        for (int r = 0; r < 4; ++r) sums[r] += a[row + r][k] * of_b;
      }
      for (int r = 0; r < 4; ++r) std::memcpy(&d[row + r][column], &sums[r], sizeof sums[r]);
    }
  // D may lie across C: all of C is read first.
  alignas(64) u32 out[kResults][kLanes];
  for (int r = 0; r < kResults; ++r) {
    const u32* c = i.src[2] >= kFirstVgpr ? w.vgpr(i.src[2] - kFirstVgpr + r, "reads")
                                          : w.broadcast(w.scalar(i, i.src[2]));
    for (int l = 0; l < kLanes; ++l) {
      const int row = kLanes / kM * 4 * (r / 4) + 4 * (l / kM) + r % 4;
      out[r][l] = as_bits(as_float(c[l]) + d[row][l % kM]);
    }
  }
  for (int r = 0; r < kResults; ++r) std::memcpy(w.vgpr(i.dst + r, "writes"), out[r], sizeof out[r]);
}

constexpr Format VP = Format::kVop3p;
constexpr Opcode kMatrix[] = {
    {VP, 53, "v_mfma_f32_16x16x32_bf16", multiply<16, 32, bf16_element>},
    {VP, 76, "v_mfma_f32_32x32x8_f16", multiply<32, 8, half_element>},
    {VP, 77, "v_mfma_f32_16x16x16_f16", multiply<16, 16, half_element>},
    {VP, 84, "v_mfma_f32_16x16x32_f16", multiply<16, 32, half_element>},
    {VP, 96, "v_mfma_f32_32x32x8_bf16", multiply<32, 8, bf16_element>},
    {VP, 97, "v_mfma_f32_16x16x16_bf16", multiply<16, 16, bf16_element>},
    {VP, 103, "v_mfma_f32_16x16x16bf16_1k", multiply<16, 16, bf16_element>},  // gfx90a's
    {VP, 115, "v_mfma_f32_16x16x32_fp8_fp8", multiply<16, 32, fp8_element, 8>},
};

}  // namespace

Table matrix_table() { return {kMatrix, std::size(kMatrix)}; }

}  // namespace emulator
