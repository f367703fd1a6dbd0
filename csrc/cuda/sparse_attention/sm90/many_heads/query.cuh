#pragma once
// Brings Q from global memory into the order in which wgmma reads it as the B operand of K Q^T.
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

// A warp's heads of Q: eight, in CTAs of up to 32 heads four. kLanes lanes share a head, and take eight dims
// each in turn. So a warp loads 64 bytes or more of a head at once, and loads and stores meet no bank
// conflicts. Q is loaded before a barrier, and stored after it.
template <class C, int kHeads_ = (C::kHeads > 32 ? 8 : 4)>
struct WgmmaQuery {
  using R = typename C::R;
  static constexpr int kHeads = kHeads_, kLanes = kWarpSize / kHeads;
  static constexpr int kRounds = R::kDims / (8 * kLanes), kFp8Rounds = R::kFp8Dims / (8 * kLanes);
  static constexpr int kHeadBytes = R::kDims * 2;
  uint4 dims[kRounds];

  // One warp copies Q as it is, [head][dim], to where store() will put it. The copy engine has it on its way
  // before anything is known of the keys, and past the loads of their entries.
  template <class Item>
  __device__ static void copy(const SparseAttentionParams& p, const Item& w, uint32_t smem, int lane) {
    const uint32_t to = smem + MLA_SMEM(C, q), bar = smem + MLA_SMEM(C, q_barrier);
    const int heads = w.num_heads(p, C::kHeads);
    if (lane == 0) mbarrier_arrive_expect(bar, heads * kHeadBytes);
    __syncwarp();
    if (w.is_q_dense(p, R::kDims)) {
      if (lane == 0) bulk_copy(to, w.q_of_head(p, 0), heads * kHeadBytes, bar);
    } else {
      for (int head = lane; head < heads; head += kWarpSize)
        bulk_copy(to + head * kHeadBytes, w.q_of_head(p, head), kHeadBytes, bar);
    }
  }
  // Copies octets to where they will be.
  template <class Item>
  __device__ static void copy_octets(const SparseAttentionParams& p, const Item& w, uint32_t smem, int lane) {
    const uint32_t to = smem + MLA_SMEM(C, q), bar = smem + MLA_SMEM(C, q_barrier);
    const int heads = w.num_heads(p, C::kHeads), at_once = w.is_q_dense(p, R::kDims) ? kOctetHeads : 1;
    if (lane == 0) mbarrier_arrive_expect(bar, heads * kHeadBytes);
    __syncwarp();
    for (int head = lane * at_once; head < heads; head += kWarpSize * at_once)
      bulk_copy(to + head / kOctetHeads * C::kQOctetBytes + head % kOctetHeads * kHeadBytes,
                w.q_of_head(p, head), min(at_once, heads - head) * kHeadBytes, bar);
  }
  // Waits for Q and loads it. `i`: how many were copied before.
  template <class Item>
  __device__ void load_copied(const SparseAttentionParams& p, const Item& w, const uint8_t* smem, int warp,
                              int lane, int i = 0) {
    wait_until_full<1>(shared_address(smem) + MLA_SMEM(C, q_barrier), i);
    // Lanes without a head take the last one of the warp: nobody reads what comes of it.
    const int first_head = warp * kHeads, heads = w.num_heads(p, C::kHeads) - first_head;
    if (heads <= 0) {
#pragma unroll
      for (uint4& x : dims) x = uint4{};
      return;
    }
    const int head = first_head + min(lane / kLanes, heads - 1);
    const int octet = C::kWalks ? head / kOctetHeads * C::kQOctetBytes : 0;
    const uint8_t* const row =
        smem + MLA_SMEM(C, q) + octet + (C::kWalks ? head % kOctetHeads : head) * kHeadBytes;
    const uint8_t* const units[2] = {row + octuple(0, lane) * 16, row + octuple(1, lane) * 16};
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      dims[i] = *reinterpret_cast<const uint4*>(units[i % 2] + i / 2 * (2 * kLanes * 16));
  }
  // Stores Q times q_factor, and the factors in q_scale.
  __device__ void store(uint8_t* smem, int warp, int lane) const {
    uint32_t largest = 0;
    const auto note = [&](uint32_t pair) { largest = larger_magnitudes(largest, pair); };
#pragma unroll
    for (int i = 0; i < kRounds; ++i) note(dims[i].x), note(dims[i].y), note(dims[i].z), note(dims[i].w);
    largest = larger_of_two(largest);
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2)
      largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    const int head = warp * kHeads + lane / kLanes;
    const float factor = q_factor(largest);
    if (head >= C::kHeads) return fence_proxy_async();
    if (lane % kLanes == 0) reinterpret_cast<float*>(smem + MLA_SMEM(C, q_scale))[head] = factor;

    // Core matrices of 8 heads x 8 dims, 16 bytes a head.
    constexpr int kHalf = C::kQHalfBytes;
    const int second = lane % 2;  // second half of a k-step
    uint8_t* const at =
        smem + MLA_SMEM(C, q) + head / kOctetHeads * C::kQOctetBytes + head % kOctetHeads * 16;
    uint8_t* const steps[2] = {at + octuple(0, lane) / 2 * C::kQStepBytes,
                               at + octuple(1, lane) / 2 * C::kQStepBytes};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      uint8_t* const step = steps[i % 2] + i / 2 * (kLanes * C::kQStepBytes);
      const bool fp8 = i < kFp8Rounds;
      const auto scaled = [&](uint32_t pair) { return q_pair(pair, factor, fp8); };
      const uint4& x = dims[i];
      if (fp8) {  // K's fragments hold dims 4t .. 4t + 3 as k = 2t, 2t + 1, 2t + 8, 2t + 9
        *reinterpret_cast<uint2*>(step + second * 8) = {scaled(x.x), scaled(x.z)};
        *reinterpret_cast<uint2*>(step + kHalf + second * 8) = {scaled(x.y), scaled(x.w)};
      } else {
        *reinterpret_cast<uint4*>(step + second * kHalf) = {scaled(x.x), scaled(x.y), scaled(x.z),
                                                            scaled(x.w)};
      }
    }
    fence_proxy_async();
  }

 private:
  // The octuple of dims that a lane takes in round i; it moves on by 2 kLanes every second round. With four
  // lanes a head, every other head begins 64 bytes further, as rows of [head][dim] begin in the same bank.
  __device__ static int octuple(int i, int lane) {
    static_assert(kLanes > 4 || (kRounds % 2 == 0 && kFp8Rounds % 2 == 0));
    return (kLanes > 4 ? i : i ^ (lane / kLanes & 1)) * kLanes + lane % kLanes;
  }
};

}  // namespace mla_fp8::gpu
