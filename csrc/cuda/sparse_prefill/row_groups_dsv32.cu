#include "cuda/sparse_prefill/row_groups.cuh"

template void mla_fp8::gpu::launch_row_groups<mla_fp8::KvLayoutId::kDsv32>(const SparseAttentionParams&, int,
                                                                           gpuStream_t);
