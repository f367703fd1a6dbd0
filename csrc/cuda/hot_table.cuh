#pragma once
// The shared memory of resolve_hot_rows: a hash table of a request's chosen entries, and its slots.
#include "cuda/device/divide.cuh"
#include "cuda/device/warp.cuh"
#include "ops/resolve_hot_rows.h"

namespace mla_fp8::gpu {

struct ResolveHotRowsArgs {
  ResolveHotRowsParams p;
  Divider host_page_size, hot_page_size, topk, next_n;
  int places, slots;  // of HotSmem
  bool in_quads;      // four slots of a state lie at a multiple of their size

  __device__ int64_t host(int64_t n) const { return host_page_size.word(n); }
  __device__ int64_t hot(int64_t n) const { return hot_page_size.word(n); }
  __device__ int64_t row(int64_t n) const { return topk.word(n); }
  __device__ int64_t group(int64_t n) const { return next_n(n); }
};

constexpr int kHotBlock = 1024;
constexpr int kHotWarps = kHotBlock / kWarpSize;
constexpr int kQuad = 4;                         // slots that a lane takes at once
constexpr int kSlotsAtOnce = kQuad * kHotBlock;  // and a block
constexpr uint32_t kNoKey = ~0u;
constexpr uint32_t kMissed = 1u << 31;  // of a value; the rest is the first reference, below kMaxHotRows

// The block's dynamic shared memory. A key's value is its slot once that is known.
struct HotSmem {
  uint32_t *keys, *values;  // [places], a multiple of 4
  uint32_t* used;           // [slots / 32], a bit a slot
  int16_t* order;           // [slots], num_hot and more, a multiple of kSlotsAtOnce
  uint16_t* place_of;       // [next_n * topk]

  __device__ HotSmem(unsigned char* base, const ResolveHotRowsArgs& a)
      : keys(reinterpret_cast<uint32_t*>(base)),
        values(keys + a.places),
        used(values + a.places),
        order(reinterpret_cast<int16_t*>(used + a.slots / 32)),
        place_of(reinterpret_cast<uint16_t*>(order + a.slots)) {}
};
constexpr int64_t kPlaceBytes = 8, kReferenceBytes = 2;
constexpr int64_t kMostPlaces = 1 << 16;  // a place is uint16
constexpr int64_t slot_bytes(int64_t slots) { return 2 * slots + slots / 8; }

__device__ __forceinline__ int first_place(uint32_t key, int places) {
  return static_cast<int>(__umulhi(key * 0x9e3779b1u, static_cast<uint32_t>(places)));
}
__device__ __forceinline__ int next_place(int place, int places) {
  return place + 1 == places ? 0 : place + 1;
}

// There are more places than keys, so insert and find end.
__device__ __forceinline__ int insert(const HotSmem& s, int places, uint32_t key) {
  int place = first_place(key, places);
  for (;;) {
    const uint32_t held = atomicCAS(&s.keys[place], kNoKey, key);
    if (held == kNoKey || held == key) return place;
    place = next_place(place, places);
  }
}
// Finds four keys at once. Bit i of the result: keys[i] is there, at place[i].
__device__ __forceinline__ uint32_t find(const HotSmem& s, int places, const int (&keys)[kQuad],
                                         int (&place)[kQuad]) {
  uint32_t found = 0, open = (1u << kQuad) - 1;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) place[i] = first_place(keys[i], places);
  while (open) {
    uint32_t held[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) held[i] = s.keys[place[i]];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (!(open >> i & 1)) continue;
      if (held[i] == kNoKey) open &= ~(1u << i);  // first: a slot that holds none has this key
      else if (held[i] == static_cast<uint32_t>(keys[i])) open &= ~(1u << i), found |= 1u << i;
      else place[i] = next_place(place[i], places);
    }
  }
  return found;
}

}  // namespace mla_fp8::gpu
