// Logits of a tile of index keys on the CPU. Lanes are sixteen heads: the query lies transposed,
// [element][head], and a key's elements are broadcast. Products are exact. A head's sum takes elements in
// pairs, the odd one first, each fused, as VDPBF16PS does. Then each lane has a fused chain of relu(sum) *
// weight over heads 16 i + lane. reduce_add_16 adds up the lanes, and the key's scale multiplies the sum.
#include "common/fp4.h"
#include "cpu/decode.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

#if MLA_SIMD_AVX512
constexpr int kHeadVectors = 4;  // vectors of heads whose sums are in registers at a time
#else
constexpr int kHeadVectors = 1;
#endif
constexpr int kKeys = 4;

// Adds the products of elements 2 i and 2 i + 1 of sixteen heads and of one key.
#if MLA_SIMD_AVX512
using Staged = uint16_t;
MLA_SIMD F32 add_products(F32 sum, const Staged* q, const Staged* k) {
  return dot(sum, load_pairs(q), broadcast_pair(k));
}
constexpr int kEven = 0, kOdd = 1, kPairStep = 2;  // of a head's two elements; and from a head to the next
#else
using Staged = float;
MLA_SIMD F32 add_products(F32 sum, const Staged* q, const Staged* k) {
  return fma(load(q), set1(k[0]), fma(load(q + kLanes), set1(k[1]), sum));
}
constexpr int kEven = 0, kOdd = kLanes, kPairStep = 1;
#endif
static_assert(sizeof(Staged) * kIndexDim * kMaxIndexHeads <= sizeof(StagedIndexQuery::elements));
static_assert(sizeof(Staged) * kIndexDim * kIndexTile <= sizeof(StagedIndexKeys::elements));
constexpr int kVectorPair = 2 * kLanes;  // staged elements of a pair, for sixteen heads

MLA_SIMD Staged staged(uint8_t e4m3) {
  const float x = e4m3_to_float<Format::kE4m3fn>(e4m3);
  if constexpr (sizeof(Staged) == 2) return float_to_bf16(x);
  else return x;
}

// Expands an entry, or a query's head, to e4m3 codes.
MLA_SIMD void expand_e2m1(const uint8_t* values, const E2m1Scales& scales, uint8_t (&codes)[kIndexDim]) {
  for (int i = 0; i < kIndexDim; ++i)
    codes[i] = e2m1_to_e4m3(values[i / 2] >> (i % 2 * 4) & 15u, scales.shift(i / kE2m1Tile));
}

MLA_SIMD void stage_key(const uint8_t* codes, Staged* to) {
  if constexpr (sizeof(Staged) == 2) {
    decode<Format::kE4m3fn>(codes, kIndexDim, 1.0f, reinterpret_cast<uint16_t*>(to));
  } else {
    for (int i = 0; i < kIndexDim; i += kLanes)
      store(reinterpret_cast<float*>(to) + i, load_e4m3<Format::kE4m3fn>(codes + i));
  }
}

// Adds weighted relus of heads from 16 * first_vector on to sums[j] of kKeys keys; the first heads set it.
template <int kVectors>
MLA_SIMD void add_heads(const StagedIndexQuery& query, const Staged* keys, int first_vector, F32* sums) {
  const Staged* q = reinterpret_cast<const Staged*>(query.elements) + first_vector * kIndexDim * kLanes;
  F32 acc[kVectors][kKeys];
  for (int v = 0; v < kVectors; ++v)
    for (int j = 0; j < kKeys; ++j) acc[v][j] = set1(0.0f);
  for (int pair = 0; pair < kIndexDim / 2; ++pair)
    for (int v = 0; v < kVectors; ++v)
      for (int j = 0; j < kKeys; ++j)
        acc[v][j] = add_products(acc[v][j], q + v * kIndexDim * kLanes + pair * kVectorPair,
                                 keys + j * kIndexDim + 2 * pair);
  for (int v = 0; v < kVectors; ++v) {
    const F32 weights = load(query.weights + (first_vector + v) * kLanes);
    for (int j = 0; j < kKeys; ++j) {
      const F32 relu = max(set1(0.0f), acc[v][j]);  // a NaN stays one
      sums[j] = first_vector + v == 0 ? mul(relu, weights) : fma(relu, weights, sums[j]);
    }
  }
}

}  // namespace

void stage_index_query(const IndexQueries& queries, int64_t row, StagedIndexQuery& to) {
  const SubnormalMode mode(Subnormals::kKeep);
  const int num_vectors = static_cast<int>(ceil_div(queries.num_heads, kLanes));
  to.num_vectors = num_vectors;
  Staged* elements = reinterpret_cast<Staged*>(to.elements);
  const int head_bytes = queries.is_fp4 ? kIndexDim / 2 : kIndexDim;
  for (int head = 0; head < num_vectors * kLanes; ++head) {
    const bool exists = head < queries.num_heads;
    uint8_t codes[kIndexDim] = {};
    const uint8_t* q = queries.q + row * queries.q_stride_row + head * head_bytes;
    if (exists && queries.is_fp4) {
      const uint8_t* s = static_cast<const uint8_t*>(queries.q_scale) + row * queries.q_scale_stride_row;
      expand_e2m1(q, {s[4 * head], s[4 * head + 1], s[4 * head + 2], s[4 * head + 3]}, codes);
    } else if (exists) {
      memcpy(codes, q, kIndexDim);
    }
    Staged* lane = elements + head / kLanes * kIndexDim * kLanes + head % kLanes * kPairStep;
    for (int pair = 0; pair < kIndexDim / 2; ++pair) {
      lane[pair * kVectorPair + kEven] = staged(codes[2 * pair]);
      lane[pair * kVectorPair + kOdd] = staged(codes[2 * pair + 1]);
    }
    to.weights[head] = exists ? queries.weight(row, head) : 0.0f;
  }
}

void stage_index_keys(const IndexKeys& keys, int64_t request, const int32_t* columns, int count,
                      StagedIndexKeys& to) {
  Staged* elements = reinterpret_cast<Staged*>(to.elements);
  for (int j = 0; j < kIndexTile; ++j) {
    const int64_t column = j < count ? columns[j] : 0;
    const int64_t page_index = column / keys.page_size, row = column - page_index * keys.page_size;
    const int64_t page = j < count ? keys.page(request, page_index) : -1;
    to.present[j] = page >= 0;
    to.scales[j] = 0.0f;
    if (page < 0) {
      memset(elements + j * kIndexDim, 0, kIndexDim * sizeof(Staged));
      continue;
    }
    const uint8_t *values = keys.value(page, row), *scale = keys.scale(page, row);
    if (keys.layout == IndexLayoutId::kIndexFp4) {
      const E2m1Scales scales{scale[0], scale[1], scale[2], scale[3]};
      uint8_t codes[kIndexDim];
      expand_e2m1(values, scales, codes);
      stage_key(codes, elements + j * kIndexDim);
      to.scales[j] = scales.scale();
    } else {
      stage_key(values, elements + j * kIndexDim);
      memcpy(&to.scales[j], scale, 4);
    }
  }
}

void index_tile(const StagedIndexQuery& query, const StagedIndexKeys& keys, float* logits) {
  const SubnormalMode mode(Subnormals::kKeep);
  const Staged* elements = reinterpret_cast<const Staged*>(keys.elements);
  for (int first = 0; first < kIndexTile; first += kLanes) {
    F32 sums[kLanes];
    for (int j = 0; j < kLanes; j += kKeys) {
      const Staged* k = elements + (first + j) * kIndexDim;
      if (kHeadVectors == 1) {
        for (int v = 0; v < query.num_vectors; ++v) add_heads<1>(query, k, v, sums + j);
      } else if (query.num_vectors == 4) {
        add_heads<4>(query, k, 0, sums + j);
      } else if (query.num_vectors == 3) {
        add_heads<3>(query, k, 0, sums + j);
      } else if (query.num_vectors == 2) {
        add_heads<2>(query, k, 0, sums + j);
      } else {
        add_heads<1>(query, k, 0, sums + j);
      }
    }
    const F32 scaled = add(mul(reduce_add_16(sums), load(keys.scales + first)), set1(0.0f));
    const U32 u = bits(scaled), magnitude = and_(u, set1(0x7fffffffu));
    store(logits + first, from_bits(select(greater(magnitude, set1(kInfBits)), set1(kNanBits), u)));
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
