#pragma once
// The prefill kernels, one source file of explicit instances per family of layouts.
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

template <KvLayoutId kId>
void launch_row_teams(const SparseAttentionParams& p, int num_sms, gpuStream_t stream);

// FP8 layouts only.
template <KvLayoutId kId>
void launch_row_groups(const SparseAttentionParams& p, int num_sms, gpuStream_t stream);

}  // namespace mla_fp8::gpu
