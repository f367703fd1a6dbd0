#pragma once
// The walk: a CTA goes through queries, with the roles of a split. Q comes while the query before ends, and
// the value warps survey the query after the next.
//
//   barrier            arrivals of a phase       waits     protects
//   stage, weights, QK done, kBarrierLogits as in split (smem.cuh)
//   q                  a logits warp, the bytes  logits    q: may be read as it came
//   end full           4 logits warps            values    factors[buffer]: may be read
//   end empty          8 value warps             logits    the same: may be written
//   survey full        8 value warps             all       maps[buffer]: may be read
//   survey empty       all warps                 values    the same: may be written
//
// The logits warps pass a query's factors through buffer number % 2; `number` counts the CTA's queries.
#include "cuda/sparse_attention/sm90/many_heads/logits.cuh"
#include "cuda/sparse_attention/sm90/many_heads/values.cuh"
#include "cuda/sparse_attention/sm90/walk.cuh"

namespace mla_fp8::gpu {

template <class C>
struct QueryEnds {
  uint8_t* bytes;
  uint32_t smem;
  __device__ explicit QueryEnds(uint8_t* p) : bytes(p), smem(shared_address(p)) {}
  __device__ uint32_t full(int number) const { return smem + MLA_SMEM(C, end_barriers) + number % 2 * 16; }
  __device__ uint32_t empty(int number) const { return full(number) + 8; }
  __device__ float* factors(int number) const {
    return reinterpret_cast<float*>(bytes + MLA_SMEM(C, factors)) + number % 2 * C::kHeads;
  }
  __device__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full(i), C::kLogitWarps * kWarpArrivals);
      mbarrier_init(empty(i), kConsumerWarps * kWarpArrivals);
    }
  }
};

// The logits of a walk: queries one after the other, with their Q and their ends.
template <class C>
class WalkLogits : BlockLogits<C> {
 public:
  using Base = BlockLogits<C>;

  __device__ WalkLogits(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : Base(params, smem, warp, lane), surveys_(smem, 0), ends_(smem) {}

  __device__ void run() {
    int block = 0, number = 0;  // `number` counts the CTA's queries
    unsigned i = WalkItem<C>::first(params_, 0);
    copy_query(i);
#pragma unroll 1
    for (; i < WalkItem<C>::count(params_); ++number) {
      const WalkItem<C> item(params_, i);
      i = WalkItem<C>::next(params_, i);
      convert_query(item, number);
      this->begin_query();
      const int end = block + ceil_div(surveys_.read(number, lane_).num_keys, C::kBlockKeys);
      surveys_.release(number, lane_);
#pragma unroll 1
      for (; block < end; ++block) this->attend(block, [] {});
      copy_query(i);
      end_item(item, number);
    }
  }

 private:
  using Base::lane_, Base::member_, Base::p_, Base::params_, Base::x_;

  // One warp copies the next Q, as it is, when all are done with this one, while this query ends.
  __device__ void copy_query(unsigned i) const {
    if (member_ == 0 && i < WalkItem<C>::count(params_))
      WgmmaQuery<C>::copy_octets(p_, WalkItem<C>(params_, i), x_.smem, lane_);
  }
  // Converts Q to wgmma's order in its place, two octets at a time: registers are short.
  __device__ void convert_query(const WalkItem<C>& item, int number) const {
    int lane = lane_;  // else all addresses of Q would be found once, before the first query, and spilled
    asm volatile("" : "+r"(lane));
    constexpr int kPartHeads = 4, kParts = C::kHeads / kPartHeads;
#pragma unroll 1
    for (int part = member_; part < kParts; part += C::kLogitWarps) {
      WgmmaQuery<C, kPartHeads> q;
      q.load_copied(p_, item, x_.bytes, part, lane, number);
      named_barrier(kBarrierLogits, Base::kLogitThreads);
      q.store(x_.bytes, part, lane);
    }
    named_barrier(kBarrierLogits, Base::kLogitThreads);
  }

  __device__ void end_item(const WalkItem<C>& item, int number) {
    wait_until_free<2>(ends_.empty(number), number);
    this->end_query([&](int in_cta, float base, float sum, float largest) {
      const int head = item.first_head + in_cta;
      write_head(p_, item.query, head, base, sum, largest);
      ends_.factors(number)[in_cta] = output_factor<typename C::R>(p_, head, base, sum);
    });
    mbarrier_arrive_warp(ends_.full(number), lane_);
  }

  const WalkSurveys<C> surveys_;
  const QueryEnds<C> ends_;
};

// The value warps of a walk. Done with a query, they survey the keys of the query after the next: they wait
// for logits more than logits wait for them.
template <class C>
class WalkValues : BlockValues<C> {
 public:
  using Base = BlockValues<C>;

  __device__ WalkValues(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : Base(smem, warp, lane), params_(params), surveys_(smem, 0), ends_(smem), warp_in_cta_(warp) {}

  // Each piece of code is there once: code between products has to stay in the instruction cache.
  __device__ void run() {
    unsigned i = WalkItem<C>::first(params_, 0), ahead = i;  // the items of queries `number` and `number` + 2
    int block = 0;
#pragma unroll 1
    for (int number = -2; number < 0 || i < WalkItem<C>::count(params_); ++number) {
      if (number >= 0) {
        const int num_blocks = ceil_div(surveys_.read(number, lane_).num_keys, C::kBlockKeys);
        surveys_.release(number, lane_);
        this->clear();
        this->attend(block, num_blocks);
        block += num_blocks;
        wait_until_full<2>(ends_.full(number), number);
        this->store_item(params_.p, WalkItem<C>(params_, i), ends_.factors(number));
        mbarrier_arrive_warp(ends_.empty(number), lane_);
        i = WalkItem<C>::next(params_, i);
      }
      if (ahead >= WalkItem<C>::count(params_)) continue;
      const Keys keys(params_.p, WalkItem<C>(params_, ahead).query);
      surveys_.write(number + 2, params_.p, keys, warp_in_cta_, lane_);
      ahead = WalkItem<C>::next(params_, ahead);
    }
  }

 private:
  using Base::first_chunk_, Base::g_, Base::kOctets, Base::lane_, Base::out_, Base::t_, Base::warp_;

  // Stores O as bf16, straight from the fragments.
  __device__ void store_item(const SparseAttentionParams& p, const WalkItem<C>& item,
                             const float* factors) const {
    uint16_t* const row = p.out + item.query * p.out_stride_token + item.first_head * p.out_stride_head +
                          first_chunk_ * kChunkDims + warp_ * 16;
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = n * kOctetHeads + 2 * t_ + c;
        const float factor = factors[head];
        const bool real = item.first_head + head < p.num_q_heads;
        uint16_t* const out = row + head * p.out_stride_head;
#pragma unroll
        for (int chunk = 0; chunk < C::kChunks; ++chunk) {
          const DimPair pair =
              pair_dims(this->is_bf16(chunk), g_, out_[chunk][n][c] * factor, out_[chunk][n][c + 2] * factor);
          if (real) *reinterpret_cast<uint32_t*>(out + chunk * kChunkDims + pair.dim) = pair.values;
        }
      }
  }

  const KernelParams& params_;
  const WalkSurveys<C> surveys_;
  const QueryEnds<C> ends_;
  const int warp_in_cta_;
};

// All threads call it, a barrier after those of init_barriers are made.
template <class C>
__device__ __forceinline__ void walk(const KernelParams& params, uint8_t* smem, int warp, int lane) {
  if (warp >= C::kFirstProducer) {
    run_walk_producers<C>(params, smem, warp - C::kFirstProducer, lane);
  } else if (warp >= kConsumerWarps) {
    set_registers<C::kLogitRegisters, C::kThreads>();
    WalkLogits<C>(params, smem, warp - kConsumerWarps, lane).run();
  } else {
    take_registers<C::kValueRegisters>();
    WalkValues<C>(params, smem, warp, lane).run();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    many_heads_walk_kernel(const __grid_constant__ KernelParams params) {
  const auto init = [](uint8_t* smem) {
    init_barriers<C>(smem, WalkSurveys<C>(smem, 0), QueryEnds<C>(smem));
  };
  run_cta(init, [&](uint8_t* smem, int warp, int lane) {
    wait_for_previous_grid();
    if (WalkItem<C>::has_any(params)) walk<C>(params, smem, warp, lane);
  });
}

}  // namespace mla_fp8::gpu
