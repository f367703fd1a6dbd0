// quantize_index_k on the CPU: for each key, its amax, scales and codes; bound by memory.
#include "ops/quantize_index_k.h"

#include "cpu/index_row.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

template <Dtype kDtype>
void quantize_key(const QuantizeIndexKParams& p, int64_t token) {
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[token]
                                         : static_cast<const int32_t*>(p.slot_mapping)[token];
  if (slot < 0 || slot >= p.num_slots) return;
  const IndexLayout l = index_layout(p.layout);
  const int64_t row = slot % p.page_size;
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;

  constexpr int kItemsize = kDtype == Dtype::kF32 ? 4 : 2;
  const void* source = static_cast<const uint8_t*>(p.k) + token * p.k_stride_token * kItemsize;
  F32 x[kIndexVectors];
  for (int i = 0; i < kIndexVectors; ++i) x[i] = load_latent<kDtype>(source, i * kLanes);
  if (p.hadamard) hadamard(x);
  uint8_t *values = page + l.value_offset(row), *scales = page + l.scale_offset(row, p.page_size);
  if (p.layout == IndexLayoutId::kIndexFp4) return encode_index_fp4(p.scaling, x, values, scales);
  const float scale = encode_index_fp8(p.scaling, x, values);
  memcpy(scales, &scale, sizeof scale);
}

}  // namespace

void quantize_index_k(const QuantizeIndexKParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  with_dtype(p.dtype, [&](auto dtype) {
    for (int64_t token = begin; token < end; ++token) quantize_key<dtype>(p, token);
  });
}

}  // namespace mla_fp8::cpu::MLA_ISA
