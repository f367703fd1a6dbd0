#include "cuda/sparse_prefill/row_teams.cuh"

namespace mla_fp8::gpu {

template void launch_row_teams<KvLayoutId::kFp8E4m3>(const SparseAttentionParams&, int, gpuStream_t);
template void launch_row_teams<KvLayoutId::kFp8E4m3D512>(const SparseAttentionParams&, int, gpuStream_t);
template void launch_row_teams<KvLayoutId::kBf16>(const SparseAttentionParams&, int, gpuStream_t);
template void launch_row_teams<KvLayoutId::kBf16D512>(const SparseAttentionParams&, int, gpuStream_t);

}  // namespace mla_fp8::gpu
