// quantize_index_k on CUDA. Eight lanes take a key, sixteen elements a lane; if there are many keys, a lane
// reads two at once. HBM-bound: a key is 128 elements read, 132 or 68 bytes written.

#include "ops/quantize_index_k.h"

#include "cuda/index_row.cuh"

namespace mla_fp8::gpu {

struct QuantizeIndexKArgs {
  QuantizeIndexKParams p;
  Divider page_size;
};

inline constexpr int kKeyBlock = 128;
inline constexpr int kKeysPerBlock = kKeyBlock / kIndexLanes;  // read at once
inline constexpr int kManyKeys = 2;

// A lane works on kAtOnce keys.
template <IndexLayoutId kId, bool kIsBf16, int kAtOnce>
__global__ void __launch_bounds__(kKeyBlock)
    quantize_index_k_kernel(const __grid_constant__ QuantizeIndexKArgs args) {
  const QuantizeIndexKParams& p = args.p;
  const int64_t first = int64_t{blockIdx.x} * kKeysPerBlock * kAtOnce + threadIdx.x / kIndexLanes;
  wait_for_previous_grid();
  const bool is_float = !kIsBf16 && p.dtype == Dtype::kF32;
  const int itemsize = is_float ? 4 : 2;
  int64_t slots[kAtOnce];
  IndexRow keys[kAtOnce], more[kAtOnce];  // more: the second halves of chunks of eight floats
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int64_t token = first + i * kKeysPerBlock;
    const bool exists = token < p.num_tokens;  // lanes without a key go on: they shuffle
    slots[i] = exists ? load_index(p.slot_mapping, p.slots_are_int64, token) : -1;
    const uint8_t* source =
        static_cast<const uint8_t*>(p.k) + (exists ? token : 0) * p.k_stride_token * itemsize;
#pragma unroll
    for (int c = 0; c < kIndexChunks; ++c) {
      const uint8_t* chunk = source + IndexRow::element(c) * itemsize;
      keys[i].x[c] = load_if<4>(chunk, exists);
      if constexpr (!kIsBf16) more[i].x[c] = load_if<4>(chunk + 16, exists && is_float);
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if constexpr (!kIsBf16)
#pragma unroll
      for (int c = 0; c < kIndexChunks; ++c) keys[i].x[c] = to_bf16x8(is_float, keys[i].x[c], more[i].x[c]);
    if (p.hadamard) hadamard(keys[i]);
    write_index_key<kId>(find_row(p, args.page_size, slots[i]), p.page_size,
                         encode_index<kId>(p.scaling, keys[i]));
  }
}

// Few keys are taken one by a lane, as the latency of one key is then all the time.
template <IndexLayoutId kId, bool kIsBf16>
void quantize_index_keys(const QuantizeIndexKArgs& args, gpuStream_t stream) {
  const auto launch_blocks = [&](auto at_once) {
    const int64_t keys = kKeysPerBlock * at_once;
    launch(quantize_index_k_kernel<kId, kIsBf16, at_once>,
           {.grid = (args.p.num_tokens + keys - 1) / keys, .block = kKeyBlock, .stream = stream}, args);
  };
  const int64_t keys_at_once = int64_t{num_processors()} * (kMaxThreadsPerSm / kIndexLanes);
  if (args.p.num_tokens <= keys_at_once) launch_blocks(constant<1>{});
  else launch_blocks(constant<kManyKeys>{});
}

void quantize_index_k(const QuantizeIndexKParams& p, gpuStream_t stream) {
  const QuantizeIndexKArgs args{p, Divider(p.page_size)};
  constexpr IndexLayoutId kFp8 = IndexLayoutId::kIndexFp8, kFp4 = IndexLayoutId::kIndexFp4;
  const bool is_bf16 = p.dtype == Dtype::kBf16;
  if (p.layout == kFp8)
    return is_bf16 ? quantize_index_keys<kFp8, true>(args, stream)
                   : quantize_index_keys<kFp8, false>(args, stream);
  if (is_bf16) quantize_index_keys<kFp4, true>(args, stream);
  else quantize_index_keys<kFp4, false>(args, stream);
}

}  // namespace mla_fp8::gpu
