#pragma once
// The indexer's kernels for Hopper, as index_topk.cu and index_logits.cu see them. Both ask takes_sm90, so
// both ops see the same logits.
#include "cuda/indexer/scan.cuh"

namespace mla_fp8::gpu {

struct IndexLogitsArgs {
  IndexLogitsParams p;
  Divider page_size, pieces;
  int group_rows;
};

// Writes the logits of the positions that index_topk has chosen.
void index_scores(const IndexTopkParams& params, gpuStream_t stream);

#if MLA_FP8_WITH_SM90A && MLA_FP8_PTX
// Whether the Hopper kernels can take the keys: on Hopper, with rows aligned to 16 bytes.
bool takes_sm90(const IndexProblem& problem);
void index_topk_sm90(const IndexTopkArgs& args, gpuStream_t stream);
void index_logits_sm90(const IndexLogitsParams& params, gpuStream_t stream);
#else
inline bool takes_sm90(const IndexProblem&) { return false; }
inline void index_topk_sm90(const IndexTopkArgs&, gpuStream_t) {}
inline void index_logits_sm90(const IndexLogitsParams&, gpuStream_t) {}
#endif

}  // namespace mla_fp8::gpu
