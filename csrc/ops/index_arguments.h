#pragma once
// Checks of arguments that the ops of the indexer share.
#include "common/torch.h"
#include "ops/index_topk.h"
#include "ops/rope_table.h"

namespace mla_fp8 {

struct IndexCacheView {
  const uint8_t* data;
  int64_t stride_page;  // bytes
  int64_t num_pages, page_size;
};

IndexLayoutId check_index_layout(const Check& check, int64_t layout);
// Checks a writer's options.
IndexScaling check_index_scaling(const Check& check, IndexLayoutId layout, const std::string& scale_format,
                                 std::optional<double> amax_floor, bool reciprocal);
// Checks which dims of the indexer's heads or keys can be rotated. In errors the table is called `name`, and
// the heads or keys `of`.
void check_index_rope(const Check& check, const char* name, const RopeTable& table, bool is_neox,
                      const char* of);
// `t` is [num_pages, page_bytes] or [num_pages, page_size, 1, bytes_per_entry], typed as bytes or as the
// layout's values; pages may lie further apart.
IndexCacheView check_index_cache(const Check& check, const Tensor& t, IndexLayoutId layout,
                                 int64_t page_size);
// An int32 tensor of this size, contiguous, on the device of `like`.
const int32_t* check_ints(const Check& check, const Tensor& t, const char* name, int64_t size,
                          const Tensor& like, const char* like_name);
// MergeTopkParams::interleave_bits.
int check_interleave(const Check& check, std::optional<int64_t> interleave);

struct PagedIndexArguments {
  const Tensor &q, &weights, &index_cache, &page_table;
  const OptionalTensor& seq_lens;
  int64_t layout, page_size;
  const OptionalTensor &q_scale, &row_lens, &query_start_loc;
  int64_t next_n, compress_ratio;
};
struct RaggedIndexArguments {
  const Tensor &q, &weights, &k, &k_scale, &k_start, &k_end;
  const OptionalTensor& q_scale;
};
IndexProblem check_index_problem(const Check& check, const PagedIndexArguments& arguments);
IndexProblem check_index_problem(const Check& check, const RaggedIndexArguments& arguments);

}  // namespace mla_fp8
