#include "cuda/sparse_prefill/row_groups.cuh"

namespace mla_fp8::gpu {

template void launch_row_groups<KvLayoutId::kFp8E4m3>(const SparseAttentionParams&, int, gpuStream_t);
template void launch_row_groups<KvLayoutId::kFp8E4m3D512>(const SparseAttentionParams&, int, gpuStream_t);

}  // namespace mla_fp8::gpu
