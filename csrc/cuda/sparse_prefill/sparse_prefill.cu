// Which kernel runs a prefill chunk.
#include "cuda/sparse_prefill/sparse_prefill.cuh"

#include "cuda/device/launch.cuh"
#include "cuda/sparse_decode/plan.h"
#include "cuda/sparse_prefill/warpgroups_bf16.h"

namespace mla_fp8::gpu {

void sparse_prefill(const SparseAttentionParams& p, gpuStream_t stream) {
  if (!hopper_kernels_fit(p) || p.num_tokens >= 1 << 27)  // units (rows x head blocks) are 32 bits
    return sparse_attention_portable(p, stream);
#if MLA_FP8_WITH_SM90A
  if (prefill_warpgroups_bf16_fits(p, num_processors())) return launch_prefill_warpgroups_bf16(p, stream);
  // The row-team kernel has 4 rows of 8 heads on an SM at once. With far fewer, or few more, it would be half
  // empty, where decode's kernels can put several SMs on one row. With many heads theirs is the faster one
  // anyway, up to the rows that they take.
  const bool pages = kv_layout(p.layout).nope_format != Format::kBf16;
  const bool many_heads = pages && p.num_q_heads > 32;
  const int64_t enough = pages && p.num_q_heads <= 16 ? 3 : 8;  // rows of 8 heads for an SM
  if (p.num_tokens * ceil_div(p.num_q_heads, 8) < enough * num_processors() ||
      (many_heads && p.num_tokens < kMaxDecodeTokens))
    return sparse_decode(p, stream);
  const auto run = [&]<KvLayoutId kId>(constant<kId>) {
    if constexpr (kv_layout(kId).nope_format != Format::kBf16) {
      if (many_heads) return launch_warpgroups<kId>(p, {8, 1, true}, stream);
      if (p.num_q_heads > 16) return launch_row_groups<kId>(p, num_processors(), stream);
    }
    launch_row_teams<kId>(p, num_processors(), stream);
  };
  switch (p.layout) {
    case KvLayoutId::kDsv32: return run(constant<KvLayoutId::kDsv32>{});
    case KvLayoutId::kDsv4: return run(constant<KvLayoutId::kDsv4>{});
    case KvLayoutId::kFp8E4m3: return run(constant<KvLayoutId::kFp8E4m3>{});
    case KvLayoutId::kFp8E4m3D512: return run(constant<KvLayoutId::kFp8E4m3D512>{});
    case KvLayoutId::kBf16: return run(constant<KvLayoutId::kBf16>{});
    case KvLayoutId::kBf16D512: return run(constant<KvLayoutId::kBf16D512>{});
    default: return sparse_attention_portable(p, stream);
  }
#endif
}

}  // namespace mla_fp8::gpu
