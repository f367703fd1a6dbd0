// plan_shared_keys on the CPU gives no tile a list: attention's kernel there takes single queries alone.
#include "ops/shared_keys.h"

namespace mla_fp8::cpu {

void plan_shared_keys(const SparseAttentionParams& p) {
  const SharedKeysShape shape(p);
  auto* const lists = reinterpret_cast<int32_t*>(p.workspace);
  for (int64_t tile = 0; tile < shape.num_tiles; ++tile) lists[tile * shape.words] = -1;
}

}  // namespace mla_fp8::cpu
