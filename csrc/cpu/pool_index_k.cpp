// pool_index_k on the CPU: the units of work of a GPU, one after another; bound by memory.
#include "ops/pool_index_k.h"

#include "cpu/index_row.h"
#include "cpu/isa.h"
#include "cpu/pool.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

void load_row(const uint16_t* from, float (&to)[kIndexDim]) {
  for (int i = 0; i < kIndexDim; i += kLanes) store(to + i, load_bf16(from + i));
}

void close_pool(const PoolIndexKParams& p, int64_t state, const PoolEnd& end) {
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[end.token]
                                         : static_cast<const int32_t*>(p.slot_mapping)[end.token];
  if (slot < 0 || slot >= p.num_slots) return;
  alignas(64) float keys[kPoolSize][kIndexDim], scores[kPoolSize][kIndexDim];
  WindowRow rows[kPoolSize];
  for (int j = 0; j < kPoolSize; ++j) {
    const int64_t back = kPoolSize - 1 - j, token = end.token - back;
    const int64_t kept = (end.position - back) % p.depth;
    load_row(j < end.before ? p.kept_key(state, kept) : p.key_row(token), keys[j]);
    load_row(j < end.before ? p.kept_score(state, kept) : p.score_row(token), scores[j]);
    rows[j] = {keys[j], scores[j], p.ape + j * kIndexDim};
  }
  F32 x[kIndexVectors];
  for (int i = 0; i < kIndexVectors; ++i) {
    const Pooled all = pool_group(rows, kPoolSize, i * kLanes);
    x[i] = from_bits(shift_left<16>(to_bf16(div(all.value, all.sum))));
  }
  hadamard(x);
  constexpr IndexLayout kL = index_layout(IndexLayoutId::kIndexFp8);
  const int64_t row = slot % p.page_size;
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;
  const float scale = encode_index_fp8(p.scaling, x, page + kL.value_offset(row));
  memcpy(page + kL.scale_offset(row, p.page_size), &scale, sizeof scale);
}

// All that touches a request's state, in this order.
void advance(const PoolIndexKParams& p, const CompressRequest& r) {
  if (r.state < 0) return;
  const PoolEnd end = PoolEnd::at(r, r.first_close(kPoolSize));
  if (end.token >= 0 && end.before > 0) close_pool(p, r.state, end);
  for (int64_t q = first_kept(r, p.depth); q < r.end(); ++q) {
    const int64_t token = r.first + q - r.start, row = q % p.depth;
    memcpy(p.kept_key(r.state, row), p.key_row(token), sizeof(uint16_t) * kIndexDim);
    memcpy(p.kept_score(r.state, row), p.score_row(token), sizeof(uint16_t) * kIndexDim);
  }
}

void close_at(const PoolIndexKParams& p, int64_t token) {
  const int64_t request = find_request(p.query_start_loc, p.num_requests, token);
  if (request < 0) return;
  const CompressRequest r = compress_request(p, request, true);
  const PoolEnd end = PoolEnd::at(r, r.start + token - r.first);
  if (token >= r.first && end.token >= 0 && end.before == 0) close_pool(p, r.state, end);
}

}  // namespace

// Units: the requests, then the tokens.
void pool_index_k(const PoolIndexKParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  for (int64_t unit = begin; unit < end; ++unit) {
    if (unit < p.num_requests) advance(p, compress_request(p, unit, true));
    else close_at(p, unit - p.num_requests);
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
