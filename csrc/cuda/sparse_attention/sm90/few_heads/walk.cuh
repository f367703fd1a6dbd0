#pragma once
// The walk of few_heads: a CTA goes through queries, several at once.
#include "cuda/sparse_attention/sm90/few_heads/products.cuh"
#include "cuda/sparse_attention/sm90/few_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/walk.cuh"

namespace mla_fp8::gpu {

// ---- the end of an item ---------------------------------------------------------------------------------
//
// The team of a query finishes O. Two teams add up their parts, and each finishes half of the value dims.

template <class C>
class WalkFinish {
 public:
  static constexpr int kOctets = C::kOctets, kMembers = C::kMembers, kQueryWarps = C::kQueryTeams * kMembers;

  __device__ WalkFinish(const KernelParams& params, Consumer<C>& consumer, uint8_t* smem, int lane)
      : p_(params.p),
        o_(consumer),
        smem_(smem),
        second_(consumer.team() % C::kQueryTeams),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {}

  __device__ static void barrier(int place) { named_barrier(kBarrierQuery + place, kQueryWarps * kWarpSize); }

  // All warps of the query call it.
  __device__ void run(int64_t query, int first_head) {
    o_.write_stats(smem_);
    barrier(o_.query_place());  // Q has been read, too
    scale(query, first_head);
    // O is exchanged in the place of Q, in two parts. The second overwrites what its writer has just read.
    if constexpr (C::kQueryTeams == 2) {
      const int warp = o_.team() * kMembers + o_.member(), partner = warp ^ kMembers;
      exchange(0, warp, partner);
      exchange(1, partner, warp);
    }
    store(query, first_head);
  }

 private:
  static constexpr int kHalf = C::kChunks / C::kQueryTeams;  // chunks that a warp finishes
  static constexpr int kPartTiles = kHalf * 4 / 2;           // tiles of 16 dims in one part
  static constexpr int kPartBytes = kPartTiles * kOctets * 16 * kWarpSize;
  static_assert(C::kQueryTeams == 1 || kQueryWarps * kPartBytes <= C::kQBytes);

  // Divides O by the sums of both teams. Writes lse and max_logits.
  __device__ void scale(int64_t query, int first_head) {
    const int first_warp = o_.query_place() * kQueryWarps;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const int pair = n * kOctetHeads / 2 + t_;
      const auto stats = [&](int w) {
        return reinterpret_cast<const float4*>(
            smem_ + MLA_SMEM(C, warp_stats))[(first_warp + w) * C::kHeads / 2 + pair];
      };
      float base[2] = {kNoMax, kNoMax}, sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < kQueryWarps; w += kMembers) {  // a team has one base
        base[0] = fmaxf(base[0], stats(w).x);
        base[1] = fmaxf(base[1], stats(w).z);
      }
#pragma unroll
      for (int w = 0; w < kQueryWarps; ++w) {
        const float4 x = stats(w);
        sum[0] += x.y * fast_exp2(x.x - base[0]);
        sum[1] += x.w * fast_exp2(x.z - base[1]);
      }
      const int head = first_head + n * kOctetHeads + 2 * t_;
      float factor[2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
        factor[c] =
            fast_exp2(o_.max_[n][c] - base[c]) * output_factor<typename C::R>(p_, head + c, base[c], sum[c]);
      if (g_ == 0 && second_ == 0 && n == o_.member()) {
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int w = 0; w < kQueryWarps; ++w) {
          const float2 x = reinterpret_cast<const float2*>(
              smem_ + MLA_SMEM(C, warp_largest))[(first_warp + w) * C::kHeads / 2 + pair];
          largest[0] = fmaxf(largest[0], x.x), largest[1] = fmaxf(largest[1], x.y);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) write_head(p_, query, head + c, base[c], sum[c], largest[c]);
      }
      o_.rescale(n, factor[0], factor[1]);
    }
  }

  // The first team finishes the first half of a warp's chunks. A warp writes to `mine`, then reads `theirs`.
  __device__ void exchange(int part, int mine, int theirs) {
    uint8_t* const area = smem_ + MLA_SMEM(C, q) + o_.query_place() * C::kQBytes;
    const auto place = [&](int warp, int i) {
      return reinterpret_cast<float4*>(area + warp % kQueryWarps * kPartBytes) + i * kWarpSize + lane_;
    };
#pragma unroll
    for (int i = 0; i < kPartTiles; ++i)
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        const float (&a)[4] = tile(0, part * kPartTiles + i, n), (&b)[4] = tile(1, part * kPartTiles + i, n);
        *place(mine, i * kOctets + n) =
            second_ ? float4{a[0], a[1], a[2], a[3]} : float4{b[0], b[1], b[2], b[3]};
      }
    barrier(o_.query_place());
#pragma unroll
    for (int i = 0; i < kPartTiles; ++i)
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        const float4 x = *place(theirs, i * kOctets + n);
        float (&a)[4] = tile(0, part * kPartTiles + i, n), (&b)[4] = tile(1, part * kPartTiles + i, n);
        a[0] = (second_ ? b[0] : a[0]) + x.x, a[1] = (second_ ? b[1] : a[1]) + x.y;
        a[2] = (second_ ? b[2] : a[2]) + x.z, a[3] = (second_ ? b[3] : a[3]) + x.w;
      }
  }
  __device__ float (&tile(int half, int i, int n))[4] { return o_.out_[half * kHalf + i / 4][i % 4][n]; }

  // Stores the finished half, which lies in the place of the first.
  __device__ void store(int64_t query, int first_head) {
    uint16_t* const row =
        p_.out + query * p_.out_stride_token + (o_.member() * C::kChunks + second_ * kHalf) * kChunkDims;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const int head = first_head + n * kOctetHeads + 2 * t_;
      uint16_t* const out[2] = {row + head * p_.out_stride_head, row + (head + 1) * p_.out_stride_head};
      const bool real[2] = {head < p_.num_q_heads, head + 1 < p_.num_q_heads};
#pragma unroll
      for (int i = 0; i < kHalf * 4; ++i) {
        float (&o)[4] = tile(0, i, n);
        // Fragment rows g, g + 8 are dims 2g, 2g + 1. bf16 values are dims g, g + 8: neighbours swap.
        int dim = i * 16 + 2 * g_;
        if (C::R::kFp8Chunks == 0 ||
            ((C::kQueryTeams == 1 || second_) && o_.is_bf16((C::kQueryTeams - 1) * kHalf + i / 4))) {
          const bool odd = g_ % 2;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float got = __shfl_xor_sync(kFullWarp, odd ? o[c] : o[c + 2], 4);
            (odd ? o[c] : o[c + 2]) = got;
          }
          dim = i * 16 + (odd ? g_ + 7 : g_);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (real[c]) *reinterpret_cast<uint32_t*>(out[c] + dim) = pack_bf16(o[c], o[c + 2]);
      }
    }
  }

  const SparseAttentionParams& p_;
  Consumer<C>& o_;
  uint8_t* const smem_;
  const int second_, lane_, g_, t_;
};

// ---- a CTA ----------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void init_walk(uint8_t* smem) {
  Ring<C>{shared_address(smem)}.init();
  for (int place = 0; place < C::kQueries; ++place) WalkSurveys<C>(smem, place).init();
}
// All threads call it, a barrier later.
template <class C>
__device__ __forceinline__ void walk(const KernelParams& params, uint8_t* smem, int warp, int lane) {
  if (warp >= kConsumerWarps) return run_walk_producers<C>(params, smem, warp - kConsumerWarps, lane);
  constexpr int kQueryWarps = C::kQueryTeams * C::kMembers;
  take_registers<C::kConsumerRegisters>();
  Consumer<C> consumer(params, smem, warp, lane);
  WalkFinish<C> finish(params, consumer, smem, lane);
  const int place = consumer.query_place(), warp_in_place = warp % kQueryWarps;
  int block = consumer.team();  // in the ring's sequence
  const WalkSurveys<C> surveys(smem, place);
  // n counts the place's queries. Before query n the keys of query n + 1 are surveyed.
  unsigned i = 0, ahead = WalkItem<C>::first(params, place);
  for (int n = -1; n < 0 || i < WalkItem<C>::count(params);
       ++n, i = ahead, ahead = WalkItem<C>::next(params, ahead)) {
    const WalkItem<C> item(params, i), next(params, ahead);
    const bool has_next = ahead < WalkItem<C>::count(params);
    int lane = threadIdx.x % kWarpSize;
    asm volatile("" : "+r"(lane));  // else all addresses of Q would be found once, and spilled
    Query<C, kQueryWarps> q;
    if (n >= 0) q.load(params.p, item.query, item.first_head, warp_in_place, lane);
    if (has_next) surveys.write(n + 1, params.p, Keys(params.p, next.query), warp_in_place, lane);
    if (n < 0) continue;
    finish.barrier(place);  // the place of Q is free again
    q.store(smem + MLA_SMEM(C, q) + place * C::kQBytes,
            reinterpret_cast<float*>(smem + MLA_SMEM(C, q_scale)) + place * C::kHeads, warp_in_place, lane);
    finish.barrier(place);
    consumer.init();
    if (has_next) q.prefetch(params.p, next.query, next.first_head, warp_in_place, lane);
    const int num_keys = surveys.read(n, lane).num_keys;
    for (int first = consumer.team() % C::kQueryTeams * C::kBlockKeys; first < num_keys;
         first += C::kQueryTeams * C::kBlockKeys, block += C::kTeams)
      consumer.attend(block);
    finish.run(item.query, item.first_head);
  }
}

}  // namespace mla_fp8::gpu
