#include "cuda/sparse_prefill/row_teams.cuh"

template void mla_fp8::gpu::launch_row_teams<mla_fp8::KvLayoutId::kDsv4>(const SparseAttentionParams&, int,
                                                                         gpuStream_t);
