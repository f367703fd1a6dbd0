// Sparse attention on CDNA, decode and prefill, for every layout, in at most 64 KB of LDS. The steps are
// those of the portable kernel (cuda/sparse_attention/portable), with MFMA.
//
// A block of 8 waves takes one query token, 32 or 64 of its heads (M of an MFMA, 16 at a time) and one of
// `splits` parts of its valid keys. For each block of 32 keys:
//
//   gather   loads stored bytes of rows into registers a block ahead; past the end zeros. Entries of
//            `indices` are loaded another block ahead
//   decode   writes bf16 latents [key][dim] to shared memory, once for all heads, decoded as by dequantize_kv
//   S        a wave has 16 keys, 16 heads and, with 32 heads, half of the dims. Q is in registers
//   P        the dims' shares are added up; online softmax by 8 lanes a head
//   O        a wave has 64 value dims of all heads
//
//   barrier            orders
//   1, before decode   reads of the last block's latents and weights, before they are overwritten
//   2, before S        latents
//   3, before P        logits
//   4, before O        weights and factors
//
// A plan (cuda/sparse_attention/plan.cpp) chooses heads and splits; parts merge as in the portable kernel.
#include "cuda/device/launch.cuh"
#include "cuda/device/math.cuh"
#include "cuda/sparse_attention/plan.h"
#include "hip/sparse_rows.cuh"

// Not an anonymous namespace: kernels are found by name, so types of template arguments need names.
namespace mla_fp8::gpu::cdna {

// The query, heads and part of the keys that a block has. Blocks go round the 8 dies of an MI300, which have
// an L2 each. Blocks that read the same keys are neighbours on one die.
struct Work {
  int64_t token;
  int split, first_head;

  __device__ Work(const PortableParams& params, int heads) {
    constexpr unsigned kDies = 8;
    const unsigned head_blocks = ceil_div(params.p.num_q_heads, heads), splits = params.splits;
    const unsigned items = static_cast<unsigned>(params.p.num_tokens) * splits;
    const unsigned group = blockIdx.x / (kDies * head_blocks);
    const unsigned in_group = blockIdx.x - group * kDies * head_blocks;
    const unsigned width = min(kDies, items - group * kDies);  // the last group may be smaller
    const unsigned item = group * kDies + in_group % width;
    token = item / splits;
    split = static_cast<int>(item % splits);
    first_head = static_cast<int>(in_group / width) * heads;
  }
};

template <Format kFirst, Format kExtra, int kDims, int kHeads>
__global__ void __launch_bounds__(kThreads) sparse_attention_kernel(const __grid_constant__ Args args) {
  using Smem = Shared<kDims, kHeads>;
  constexpr int kHeadTiles = Smem::kHeadTiles, kSteps = kDims / kTile / Smem::kShares;
  static_assert(kSteps * kTile * Smem::kShares == kDims && kHeads * kSoftmaxLanes <= kThreads);
  static_assert(kOperandRows == 1 && kTileAccumulators == 4, "a wave has 64 lanes");
  MLA_SHARED(Smem, smem);
  const PortableParams& params = args.portable;
  const SparseAttentionParams& p = params.p;
  const int wave = threadIdx.x / kWaveSize, lane = threadIdx.x % kWarpSize;
  const Work work(params, kHeads);

  const Keys keys(p, work.token);
  constexpr int kWarps = kThreads / kWarpSize;
  const uint32_t map = shared_address(smem.map);
  survey_keys<kWarps, kMapWords / kWarps>(KeySource(p, keys), threadIdx.x / kWarpSize, lane, map, [] {});

  // The keys, heads and dims of S that this wave has.
  const int key_tile = wave % kKeyTiles, head_tile = wave / kKeyTiles % kHeadTiles;
  const int share = wave / kKeyTiles / kHeadTiles, first_dim = share * kSteps * kTile + operand_k();
  Operand q[kSteps] = {};
  if (const int head = work.first_head + head_tile * kTile + operand_row(0); head < p.num_q_heads) {
    const uint16_t* const from =
        p.q + work.token * p.q_stride_token + int64_t{head} * p.q_stride_head + first_dim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      q[step].row[0] = *reinterpret_cast<const Words<2>*>(from + step * kTile);
  }
  __syncthreads();
  const ValidKeys<MapInShared> valid_keys(KeySurvey(map, keys.length, lane), {map});
  const int all_blocks = ceil_div(valid_keys.num_keys(), kBlockKeys);
  const int first_block = static_cast<int>(int64_t{all_blocks} * work.split / params.splits);
  const int num_blocks =
      static_cast<int>(int64_t{all_blocks} * (work.split + 1) / params.splits) - first_block;
  const int first_key = first_block * kBlockKeys;
  const int num_keys = min(valid_keys.num_keys() - first_key, num_blocks * kBlockKeys);

  Gather<kFirst, kExtra, kDims> gather(args, keys, valid_keys, first_key, first_key + num_keys);
  typename decltype(gather)::Pieces pieces;

  const float layer_scale = p.scale ? *p.scale : 1.0f;
  const float logit_scale = p.sm_scale * layer_scale * kLog2E;
  float max_logit = -INFINITY, sum = 0.0f;  // of this thread's head in P; the sum is this lane's share
  Accumulators out[kHeadTiles][kColumns] = {};
  const int first_column = wave * kWaveColumns + operand_row(0) * kColumns;  // of V and out, kColumns

#pragma unroll 1
  for (int block = -2; block < num_blocks; ++block) {  // the first two rounds look up rows, and load them
    __syncthreads();
    if (block >= 0) gather.finish(smem, pieces);
    if (block + 1 < num_blocks) gather.start(pieces);
    if (block < 0) continue;
    __syncthreads();

    {
      Accumulators s[2] = {};  // two chains, as a product waits for the one before it
      const uint16_t* const from = smem.latent[key_tile * kTile + operand_row(0)] + first_dim;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const Operand k{{*reinterpret_cast<const Words<2>*>(from + step * kTile)}};
        multiply_tiles<Dtype::kBf16>(s[step % 2], q[step], k);
      }
#pragma unroll
      for (int i = 0; i < kTileAccumulators; ++i)
        smem.logits[share][head_tile * kTile + accumulator_row(i)][key_tile * kTile + accumulator_column(i)] =
            s[0][i] + s[1][i];
    }
    __syncthreads();

    // Opaque: the compiler would keep addresses in registers from block to block.
    const int thread = mla_opaque(threadIdx.x), own_key = thread % kSoftmaxLanes * kLaneKeys;
    if (const int own_head = thread / kSoftmaxLanes; own_head < kHeads) {
      float s[kLaneKeys] = {};
#pragma unroll
      for (int i = 0; i < Smem::kShares; ++i) {
        const auto part = *reinterpret_cast<const Words<4>*>(&smem.logits[i][own_head][own_key]);
#pragma unroll
        for (int j = 0; j < kLaneKeys; ++j) s[j] += bits_float(part[j]);
      }
      float new_max = max_logit;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        s[i] = block * kBlockKeys + own_key + i < num_keys ? s[i] * logit_scale : -INFINITY;
        new_max = fmaxf(new_max, s[i]);
      }
#pragma unroll
      for (int offset = 1; offset < kSoftmaxLanes; offset *= 2)
        new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, offset));
      const float reference = new_max == -INFINITY ? 0.0f : new_max;  // no key yet: weights are 0, not NaN
      const float factor = fast_exp2(max_logit - reference);
      max_logit = new_max;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) s[i] = fast_exp2(s[i] - reference);
      sum = sum * factor + ((s[0] + s[1]) + (s[2] + s[3]));
      *reinterpret_cast<Words<2>*>(&smem.weights[own_head][own_key]) = {
          pack_weights<Dtype::kBf16>({s[0], s[1]}), pack_weights<Dtype::kBf16>({s[2], s[3]})};
      if (own_key == 0) smem.factor[own_head] = factor;
    }
    __syncthreads();

#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kTileAccumulators; ++i) {
        const float factor = smem.factor[tile * kTile + accumulator_row(i)];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) out[tile][j][i] *= factor;
      }
#pragma unroll
    for (int part = 0; part < kKeyTiles; ++part) {
      const int key = part * kTile + operand_k();
      Words<2> rows[4];  // this lane's columns of four keys; below, the four keys of each column
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = *reinterpret_cast<const Words<2>*>(smem.latent[key + i] + first_column);
      Operand v[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const auto pair = [&](int i) {
          const uint32_t a = rows[i][j / 2], b = rows[i + 1][j / 2];
          return j % 2 == 0 ? lower_halves(a, b) : upper_halves(a, b);
        };
        v[j].row[0] = {pair(0), pair(2)};
      }
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        const Operand weights{
            {*reinterpret_cast<const Words<2>*>(&smem.weights[tile * kTile + operand_row(0)][key])}};
#pragma unroll
        for (int j = 0; j < kColumns; ++j) multiply_tiles<Dtype::kBf16>(out[tile][j], weights, v[j]);
      }
    }
  }

  // A part of a query is not divided yet, and without keys it is not written.
  const bool is_part = params.splits > 1;
  const Partials partials(params);
  if (const int own_head = threadIdx.x / kSoftmaxLanes; own_head < kHeads) {
#pragma unroll
    for (int offset = 1; offset < kSoftmaxLanes; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    const int head = work.first_head + own_head;
    if (threadIdx.x % kSoftmaxLanes == 0 && head < p.num_q_heads) {
      const int64_t query_head = work.token * p.num_q_heads + head;
      smem.normalizer[own_head] = is_part ? 1.0f : layer_scale * output_factor(p, head, max_logit, sum);
      if (is_part) *partials.stats(query_head, work.split) = {max_logit, sum};
      else store_stats(p, query_head, max_logit, sum);
    }
  }
  if (is_part && num_blocks == 0) return;
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
    for (int i = 0; i < kTileAccumulators; ++i) {
      const int at = tile * kTile + accumulator_row(i), head = work.first_head + at;
      if (head >= p.num_q_heads) continue;
      const float factor = smem.normalizer[at];
      Words<kColumns> x;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[j] = float_bits(out[tile][j][i] * factor);
      if (is_part) {
        store(partials.out(work.token * p.num_q_heads + head, work.split) + first_column, x);
      } else {
        Words<kColumns / 2> rounded;
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j)
          rounded[j] = pack<Dtype::kBf16>({bits_float(x[2 * j]), bits_float(x[2 * j + 1])});
        store(p.out + work.token * p.out_stride_token + head * p.out_stride_head + first_column, rounded);
      }
    }
}

template <Format kFirst, Format kExtra, int kDims>
void launch_heads(const Args& args, int heads, gpuStream_t stream) {
  const auto launch_kernel = [&](auto kHeads) {
    const PortableParams& params = args.portable;
    launch(sparse_attention_kernel<kFirst, kExtra, kDims, kHeads()>,
           {.grid = params.p.num_tokens * ceil_div(params.p.num_q_heads, kHeads()) * params.splits,
            .block = kThreads,
            .stream = stream},
           args);
  };
  // 16 heads would be no faster in a kernel of their own: what takes time is done once for all heads. For
  // bf16 rows kVariants has no 64 heads.
  if (heads <= 32) return launch_kernel(constant<32>{});
  if constexpr (kFirst != Format::kBf16) return launch_kernel(constant<64>{});
}

// The formats of the kernel for a pair of layouts. e4m3fnuz rows of 512 dims have one kernel, which also
// reads e4m3fn rows next to them: a kernel for the pair alone would take more room than it is worth.
struct Formats {
  Format first, extra;
};
constexpr Formats formats_of(const KvLayout& first, const KvLayout& extra) {
  const bool has_twin = first.nope_format == Format::kE4m3fnuz && first.head_dim_qk() == kHeadDimV;
  return {first.nope_format, has_twin ? Format::kE4m3fn : extra.nope_format};
}

Gpu this_gpu() { return {.major = 0, .num_sms = num_processors()}; }

void run(const SparseAttentionParams& p, const Plan& wanted, gpuStream_t stream) {
  const Plan plan = within_workspace(wanted, p);
  const Args args{{p, plan.splits},
                  {RowLayout(kv_layout(p.layout)), RowLayout(kv_layout(p.extra_layout))},
                  {Divider(p.scopes[0].page_size), Divider(p.num_scopes > 1 ? p.scopes[1].page_size : 1)},
                  p.layouts().is_mixed()};
  with_kv_layouts(p.layouts(), [&](auto id, auto extra) {
    constexpr KvLayout kL = kv_layout(id()), kE = kv_layout(extra());
    constexpr Formats kFormats = formats_of(kL, kE);
    static_assert(format_bits(kL.nope_format) != format_bits(kE.nope_format) ||
                  RowLayout(kL) == RowLayout(kE));  // Gather loads both alike
    launch_heads<kFormats.first, kFormats.extra, kL.head_dim_qk()>(args, plan.variant.heads, stream);
  });
  if (plan.splits > 1) launch_merge(args.portable, stream);
}

}  // namespace mla_fp8::gpu::cdna

namespace mla_fp8::gpu {

int64_t sparse_decode_workspace(const SparseAttentionParams& p) {
  return workspace_of_call(Op::kDecode, p, cdna::this_gpu());
}
int64_t sparse_prefill_workspace(const SparseAttentionParams& p) {
  return workspace_of_call(Op::kPrefill, p, cdna::this_gpu());
}
int64_t sparse_attention_by_workspace(const WantedSparseAttention& x) {
  return workspace_size(forced_plan(x.wanted, x.params, cdna::this_gpu()), x.params);
}

void sparse_decode(const SparseAttentionParams& p, gpuStream_t stream) {
  cdna::run(p, plan(Op::kDecode, p, cdna::this_gpu()), stream);
}
void sparse_prefill(const SparseAttentionParams& p, gpuStream_t stream) {
  cdna::run(p, plan(Op::kPrefill, p, cdna::this_gpu()), stream);
}
void sparse_attention_by(const WantedSparseAttention& x, gpuStream_t stream) {
  cdna::run(x.params, forced_plan(x.wanted, x.params, cdna::this_gpu()), stream);
}

}  // namespace mla_fp8::gpu
