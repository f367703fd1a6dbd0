#pragma once
// resolve_hot_rows: shares of a request's entries and slots by lane, and a hash table of the entries in
// shared memory.
#include "cuda/device/warp.cuh"
#include "ops/resolve_hot_rows.h"

namespace mla_fp8::gpu {

// n / divisor for 0 <= n < 2^31 in three instructions, where Divider takes eight: n * magic / 2^(31 + shift),
// with the least 2^shift >= divisor and magic = ceil(2^(31 + shift) / divisor). That exceeds n / divisor by
// less than 1 / divisor.
class IntDivider {
 public:
  explicit IntDivider(int32_t divisor) {
    while (int64_t{1} << shift_ < divisor) ++shift_;
    magic_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }
  __device__ __forceinline__ int32_t operator()(int32_t n) const {
    return static_cast<int32_t>(__umulhi(2u * n, magic_) >> shift_);
  }

 private:
  uint32_t magic_ = 0;
  int32_t shift_ = 0;
};

// Where arrays begin in the block's dynamic shared memory, and how long they are. First come the nodes: node
// 0 ends a list, reference i is node 1 + i. References whose keys have one hash are a list.
struct HotLayout {
  int heads;  // [places] uint32_t, a multiple of 4: the first node of each list
  int order;  // [slots] int16_t, num_hot and more, a multiple of kSlotsAtOnce
  int next;   // [nodes] uint16_t
  int used;   // [slots / kQuad + 1] bytes, a bit a slot
  int places, slots;
};

struct ResolveHotRowsArgs {
  ResolveHotRowsParams p;
  IntDivider host_page_size, hot_page_size, topk, next_n, columns;
  int row_columns;  // topk, rounded up to whole warps
  HotLayout smem;
  bool in_quads;  // four slots of a state lie at a multiple of their size

  __device__ int32_t host(int32_t n) const { return host_page_size(n); }
  __device__ int32_t hot(int32_t n) const { return hot_page_size(n); }
  __device__ int32_t row(int32_t n) const { return topk(n); }
  __device__ int32_t group(int32_t n) const { return next_n(n); }
};

constexpr int kHotBlock = 1024;
constexpr int kHotWarps = kHotBlock / kWarpSize;
constexpr int kQuad = 4;                         // slots that a lane takes at once
constexpr int kSlotsAtOnce = kQuad * kHotBlock;  // and a block

// The rows of a request, `count` from `first` on, and its state.
struct HotGroup {
  int first, count;
  HotTables tables;
  int32_t* held;
  int16_t* order;
};

// A lane's share of the references, which are numbered by row, with the columns of a row rounded up to whole
// warps. A warp's share is one run, and what it takes at once is of one row.
struct Reference {
  int node, row, column;  // the node is 1 and the number
};
struct ReferenceShare {
  int chunks, columns;
  Reference first;

  __device__ ReferenceShare(const ResolveHotRowsArgs& a, int rows) : columns(a.row_columns) {
    const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int all = rows * columns, most = (all + kHotBlock - 1u) / kHotBlock;
    const int begin = warp * most * kWarpSize, row = a.columns(begin);
    chunks = max(0, min(most, (all - begin) / kWarpSize));
    first = {static_cast<int>(begin + lane + 1), row, static_cast<int>(begin - row * columns + lane)};
  }
  __device__ void advance(Reference& r) const {
    r.node += kWarpSize, r.column += kWarpSize;
    if (r.column >= columns) r.column -= columns, ++r.row;
  }
};

// A lane's share of the slots, or of their order, kQuad a chunk. The shares of a warp are one run.
struct SlotShare {
  int chunks, begin;

  __device__ explicit SlotShare(const ResolveHotRowsArgs& a) : chunks(unsigned(a.smem.slots) / kSlotsAtOnce) {
    const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    begin = (warp * chunks * kWarpSize + lane) * kQuad;
  }
  __device__ int at(int chunk) const { return begin + chunk * kWarpSize * kQuad; }
};

// Four values from `at` on; -1 behind the last slot.
template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T of[kQuad];
};
template <class T>
__device__ __forceinline__ Quad<T> load_quad(const ResolveHotRowsArgs& a, const T* values, int at) {
  Quad<T> quad;
  if (a.in_quads && at + kQuad <= a.p.num_hot) {
    quad = *reinterpret_cast<const Quad<T>*>(values + at);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) quad.of[i] = at + i < a.p.num_hot ? values[at + i] : T{-1};
  }
  return quad;
}

struct HotNode {
  uint32_t key, found;  // `found`: the slot that holds the key, or kNoSlot
};
constexpr uint32_t kNoKey = 1u << 31, kNoSlot = ~0u;

constexpr int kFirstNodes = 4;  // node 0, and what keeps the arrays aligned

struct HotSmem {
  HotNode* nodes;
  uint32_t* heads;
  int16_t* order;
  uint16_t* next;
  uint8_t* used;

  __device__ HotSmem(unsigned char* base, const HotLayout& at)
      : nodes(reinterpret_cast<HotNode*>(base)),
        heads(reinterpret_cast<uint32_t*>(base + at.heads)),
        order(reinterpret_cast<int16_t*>(base + at.order)),
        next(reinterpret_cast<uint16_t*>(base + at.next)),
        used(base + at.used) {}
};

__device__ __forceinline__ uint32_t& head_of(const HotSmem& s, int places, uint32_t key) {
  return s.heads[__umulhi(key * 0x9e3779b1u, static_cast<uint32_t>(places))];
}

__device__ __forceinline__ void clear(const HotSmem& s, const ResolveHotRowsArgs& a) {
#pragma unroll 1
  for (int i = threadIdx.x; i < a.smem.places / 4; i += kHotBlock) reinterpret_cast<uint4*>(s.heads)[i] = {};
  if (threadIdx.x == 0) s.nodes[0].key = kNoKey, s.next[0] = 0, s.used[a.smem.slots / kQuad] = 0;
}

__device__ __forceinline__ void insert(const HotSmem& s, int places, unsigned node, uint32_t key) {
  s.next[node] = static_cast<uint16_t>(atomicExch(&head_of(s, places, key), node));
  s.nodes[node] = {key, kNoSlot};
}

// Tells references which of four slots from `slot` on holds their key, the first of several. Bit i of the
// result: the key of slot + i is chosen.
__device__ __forceinline__ uint32_t look_up(const HotSmem& s, int places, const int32_t (&held)[kQuad],
                                            uint32_t slot) {
  uint32_t keys[kQuad], node[kQuad], chosen = 0;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    keys[i] = static_cast<uint32_t>(max(held[i], -1));  // -1 is no key, and not kNoKey
    node[i] = head_of(s, places, keys[i]);
  }
  while (node[0] | node[1] | node[2] | node[3]) {
    uint32_t key[kQuad], next[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) key[i] = s.nodes[node[i]].key, next[i] = s.next[node[i]];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (key[i] == keys[i]) {
        atomicMin(&s.nodes[node[i]].found, slot + i);
        chosen |= 1u << i;
      }
      node[i] = next[i];
    }
  }
  return chosen;
}

// The first node with the key of one.
__device__ __forceinline__ uint32_t first_node(const HotSmem& s, int places, unsigned node) {
  const uint32_t key = s.nodes[node].key;
  for (uint32_t other = head_of(s, places, key); other != 0; other = s.next[other])
    if (s.nodes[other].key == key) node = min(node, other);
  return node;
}

}  // namespace mla_fp8::gpu
