#include "cuda/sparse_decode/warp_teams.cuh"

namespace mla_fp8::gpu {

template void launch_warp_teams<KvLayoutId::kFp8E4m3>(const SparseAttentionParams&, const TeamPlan&,
                                                      gpuStream_t);
template void launch_warp_teams<KvLayoutId::kFp8E4m3D512>(const SparseAttentionParams&, const TeamPlan&,
                                                          gpuStream_t);
template void launch_warp_teams<KvLayoutId::kBf16>(const SparseAttentionParams&, const TeamPlan&,
                                                   gpuStream_t);
template void launch_warp_teams<KvLayoutId::kBf16D512>(const SparseAttentionParams&, const TeamPlan&,
                                                       gpuStream_t);

}  // namespace mla_fp8::gpu
