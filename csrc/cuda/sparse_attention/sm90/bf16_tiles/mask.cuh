#pragma once
// The mask of a block's keys, and the clearing of keys that count for some rows of a tile only.
#include <cstdint>

#include "cuda/device/sm90.cuh"

namespace mla_fp8::gpu {

struct KeyMask {
  uint64_t keys;
  uint32_t tail;  // the eight keys of a tail
  __device__ bool all() const { return keys == ~uint64_t{0} && tail == 0xff; }
  __device__ KeyMask operator>>(int keys_off) const { return {keys >> keys_off, tail >> keys_off}; }
  // Keeps the keys from `first` to `last`, which may lie outside.
  __device__ KeyMask between(int first, int last) const {
    return {keys & bits(first, last), tail & static_cast<uint32_t>(bits(first - 64, last - 64))};
  }

 private:
  __device__ static uint64_t bits(int first, int last) {
    if (last < 0 || first > 63) return 0;
    return ~uint64_t{0} << max(first, 0) & ~uint64_t{0} >> (63 - min(last, 63));
  }
};

__device__ inline bool has_no_number(uint32_t bf16x2) {
  return (bf16x2 & 0x7f80) == 0x7f80 || (bf16x2 & 0x7f800000) == 0x7f800000;
}

// A key of one query may be past the window of another in the same tile, where its weight is zero. But zero
// times NaN or infinity is NaN: such values become zeros. A key holds its value, so logits tell where to
// look. Queries that attend to it have a NaN among their weights, and need no second one. `suspects`: this
// lane's masked logits that are no number, bit 2n + i for column 8n + 2 (lane % 4) + i. `values`: tiles of
// kKeys rows.
template <int kKeys, int kPanels>
__device__ void clear_keys(uint8_t* values, uint32_t suspects, int lane) {
  for (int key = 0; key < kKeys; ++key) {
    const bool suspect = lane % 4 == key % 8 / 2 && suspects >> (key / 8 * 2 + key % 2) & 1;
    if (!__any_sync(kFullWarp, suspect)) continue;
    for (int i = lane; i < kPanels * 8; i += kWarpSize) {
      uint4& x = *reinterpret_cast<uint4*>(values + (i / 8 * kKeys + key) * 128 + i % 8 * 16);
      if (has_no_number(x.x) || has_no_number(x.y) || has_no_number(x.z) || has_no_number(x.w))
        x = {0, 0, 0, 0};
    }
  }
}

}  // namespace mla_fp8::gpu
