#include "cuda/sparse_decode/warp_teams.cuh"

template void mla_fp8::gpu::launch_warp_teams<mla_fp8::KvLayoutId::kDsv32>(const SparseAttentionParams&,
                                                                           const TeamPlan&, gpuStream_t);
