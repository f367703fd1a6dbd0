// pad_q_heads on the CPU: for each token, a copy of each head and a memset for the padding; bound by memory.
#include "ops/pad_q_heads.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/parallel.h"

namespace mla_fp8::cpu {

void pad_q_heads(const PadQHeadsParams& p) {
  constexpr int64_t kGrain = 16;  // tokens a thread takes at least
  const size_t head_bytes = sizeof(uint16_t) * p.head_dim;
  parallel_for(p.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint16_t* out = p.out_q + t * p.num_heads * p.head_dim;
      for (int64_t h = 0; h < p.num_q_heads; ++h)
        memcpy(out + h * p.head_dim, p.q + t * p.q_stride_token + h * p.q_stride_head, head_bytes);
      memset(out + p.num_q_heads * p.head_dim, 0, (p.num_heads - p.num_q_heads) * head_bytes);
    }
  });
  const int64_t num_sinks = p.attn_sink ? p.num_q_heads : 0;
  if (num_sinks > 0) std::copy_n(p.attn_sink, num_sinks, p.out_attn_sink);
  std::fill(p.out_attn_sink + num_sinks, p.out_attn_sink + p.num_heads,
            -std::numeric_limits<float>::infinity());
}

}  // namespace mla_fp8::cpu
