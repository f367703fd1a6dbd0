#pragma once
// paged_attention_ragged_latent on NVIDIA's GPUs.
#include "ops/paged_attention_ragged.h"

namespace mla_fp8::gpu {

int ragged_latent_splits(const PagedAttentionRaggedParams& params);  // as many as fill the GPU
void ragged_latent(const PagedAttentionRaggedParams& params, gpuStream_t stream);

}  // namespace mla_fp8::gpu
