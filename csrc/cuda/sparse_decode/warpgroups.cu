#include "cuda/sparse_decode/warpgroups.cuh"

namespace mla_fp8::gpu {

template void launch_warpgroups<KvLayoutId::kDsv32>(const SparseAttentionParams&, const TeamPlan&,
                                                    gpuStream_t);
template void launch_warpgroups<KvLayoutId::kDsv4>(const SparseAttentionParams&, const TeamPlan&,
                                                   gpuStream_t);
template void launch_warpgroups<KvLayoutId::kFp8E4m3>(const SparseAttentionParams&, const TeamPlan&,
                                                      gpuStream_t);
template void launch_warpgroups<KvLayoutId::kFp8E4m3D512>(const SparseAttentionParams&, const TeamPlan&,
                                                          gpuStream_t);

}  // namespace mla_fp8::gpu
