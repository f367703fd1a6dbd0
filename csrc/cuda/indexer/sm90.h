#pragma once
// The Hopper engine of the indexer (sm90.cuh) from outside: index_logits and index_topk ask the same
// question, so that they see the same logits.
#include "cuda/indexer/scan.cuh"

namespace mla_fp8::gpu {

struct IndexLogitsArgs {
  IndexLogitsParams p;
  Divider page_size, pieces;
  int group_rows;
};

// Of what index_topk has chosen.
void index_scores(const IndexTopkParams& params, gpuStream_t stream);

#if MLA_FP8_WITH_SM90A && MLA_FP8_PTX
// FP8 keys whose rows are 16-byte aligned, on Hopper.
bool takes_sm90(const IndexProblem& problem);
void index_topk_sm90(const IndexTopkArgs& args, gpuStream_t stream);
void index_logits_sm90(const IndexLogitsParams& params, gpuStream_t stream);
#else
inline bool takes_sm90(const IndexProblem&) { return false; }
inline void index_topk_sm90(const IndexTopkArgs&, gpuStream_t) {}
inline void index_logits_sm90(const IndexLogitsParams&, gpuStream_t) {}
#endif

}  // namespace mla_fp8::gpu
