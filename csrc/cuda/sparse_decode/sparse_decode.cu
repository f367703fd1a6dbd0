// Which kernel runs a decode step: the Hopper kernels where they are built and fit, else the portable one.
#include "cuda/device/launch.cuh"
#include "cuda/sparse_decode/plan.h"
#include "cuda/sparse_prefill/warpgroups_bf16.h"

namespace mla_fp8::gpu {
bool hopper_kernels_fit(const SparseAttentionParams& p) {
#if MLA_FP8_WITH_SM90A
  constexpr int64_t kLimit = int64_t{1} << 26;  // positions stay far from 2^31
  return kv_layout(p.layout).nope_format != Format::kE4m3fnuz && total_topk(p) < kLimit &&
         compute_major() == 9;
#else
  return p.num_tokens < 0;  // not built
#endif
}

void sparse_decode(const SparseAttentionParams& p, gpuStream_t stream) {
  if (!hopper_kernels_fit(p) || p.num_tokens >= kMaxDecodeTokens) return sparse_attention_portable(p, stream);
#if MLA_FP8_WITH_SM90A
  // With many rows and heads of bf16 nothing need be split, and prefill's kernel is up to 1.8 times as fast.
  if (p.num_q_heads > 32 && !p.batch_invariant && prefill_warpgroups_bf16_fits(p, num_processors()))
    return launch_prefill_warpgroups_bf16(p, stream);
  const TeamPlan plan = plan_sparse_decode(p, num_processors());
  const auto run = [&]<KvLayoutId kId>(constant<kId>) {
    if constexpr (kv_layout(kId).nope_format != Format::kBf16)
      if (plan.warpgroups) return launch_warpgroups<kId>(p, plan, stream);
    launch_warp_teams<kId>(p, plan, stream);
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
