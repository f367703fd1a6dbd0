// dequantize_kv on the CPU: a row of the cache to bf16, 16 elements at a time; bound by memory.
#include "cpu/decode.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

template <KvLayoutId kId, class Params>
MLA_SIMD void dequantize_slot(const Params& p, int64_t slot, uint16_t* dst) {
  constexpr KvLayout kL = kv_layout(kId);
  if (slot < 0 || slot >= p.num_slots) {
    memset(dst, 0, 2 * kL.head_dim_qk());
    return;
  }
  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  const uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;
  decode_row<kId>(page, slot % p.page_size, p.page_size, layer_scale, dst);
}

}  // namespace

void dequantize_kv(const DequantizeKvParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  with_kv_layout(p.layout, [&](auto id) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slots)[i]
                                             : static_cast<const int32_t*>(p.slots)[i];
      dequantize_slot<id>(p, slot, p.out + i * p.out_stride_row);
    }
  });
}

// Decodes gathered tokens [begin, end) of `request`. The first one of all is row `first_row` of out.
void dequantize_kv_paged(const DequantizeKvPagedParams& p, int64_t request, int64_t first_row, int64_t begin,
                         int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  const int64_t first_pos = int64_t{p.seq_lens[request]} - p.gather_lens[request];
  const int32_t* pages = p.page_table + request * p.page_table_stride_request;
  with_kv_layout(p.layout, [&](auto id) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t pos = first_pos + j, page_index = pos / p.page_size;
      const bool known = pos >= 0 && page_index < p.max_pages && pages[page_index] >= 0;
      const int64_t slot = known ? pages[page_index] * p.page_size + pos % p.page_size : -1;
      dequantize_slot<id>(p, slot, p.out + (first_row + j) * p.out_stride_row);
    }
  });
}

}  // namespace mla_fp8::cpu::MLA_ISA
