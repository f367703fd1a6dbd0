#pragma once
// The gather of the prefill kernels: row after row, each producer warp fills slots of one team.
#include "cuda/sparse_decode/producer.cuh"

namespace mla_fp8::gpu {

// One query token and kHeads of its heads. A CTA's C::kRows places take units in turns.
template <class C>
struct Unit {
  int64_t token;
  int first_head;

  // 32 bits: a division of 64 would be a function call, across which no register stays uniform.
  __device__ static unsigned count(const TeamParams& params) {
    return static_cast<unsigned>(params.p.num_tokens) * params.num_head_blocks;
  }
  __device__ static unsigned first(int row) { return blockIdx.x + gridDim.x * row; }
  __device__ static unsigned stride() { return gridDim.x * C::kRows; }

  __device__ Unit(const TeamParams& params, unsigned i)
      : token(i / params.num_head_blocks),
        first_head(static_cast<int>(i % params.num_head_blocks) * C::kHeads) {}
};

template <class C>
class RowProducer : Gather<C> {
 public:
  static constexpr int kTeamProducers = C::kProducers / C::kTeams;
  static constexpr int kSlotsPerBlock = C::kBlockSlots / kTeamProducers;  // of this producer
  static_assert(C::kProducers % C::kTeams == 0 && C::kBlockSlots % kTeamProducers == 0);

  __device__ RowProducer(const TeamParams& params, uint8_t* smem, int warp, int lane)
      : Gather<C>(params, smem, lane),
        params_(params),
        team_(warp / kTeamProducers),
        first_(warp % kTeamProducers),
        unit_(Unit<C>::first(team_ / C::kRowTeams)) {}

  // Indices are loaded two slots ahead, across rows.
  __device__ void run() {
    enter_unit();
    Selected now = advance(), next = advance();
    for (int i = 0; now.is_any; ++i) {
      const Selected after_next = advance();
      const int block = i / kSlotsPerBlock * C::kTeams + team_;
      this->fetch(block * C::kBlockSlots + first_ + i % kSlotsPerBlock * kTeamProducers, now.index);
      now = next, next = after_next;
    }
  }

 private:
  using typename Gather<C>::Index;
  struct Selected {
    Index index;
    bool is_any;  // the same in all lanes
  };

  // The first position of this producer in the next unit in which its team has a block.
  __device__ void enter_unit() {
    for (; unit_ < Unit<C>::count(params_); unit_ += Unit<C>::stride()) {
      keys_ = Keys(params_.p, Unit<C>(params_, unit_).token);
      position_ = team_ % C::kRowTeams * C::kBlockTokens;
      if (position_ < keys_.length) break;
    }
    position_ += first_ * kSlotTokens;
  }

  __device__ Selected advance() {
    if (unit_ >= Unit<C>::count(params_)) return {{-1, 0}, false};
    const Selected selected{this->index(keys_, position_), true};
    position_ += kTeamProducers * kSlotTokens;
    if (position_ % C::kBlockTokens == first_ * kSlotTokens) {  // past the block: to the team's next
      position_ += (C::kRowTeams - 1) * C::kBlockTokens;
      if (position_ - first_ * kSlotTokens >= keys_.length) {
        unit_ += Unit<C>::stride();
        enter_unit();
      }
    }
    return selected;
  }

  const TeamParams& params_;
  const int team_, first_;
  unsigned unit_;
  Keys keys_;     // of the unit
  int position_;  // in them
};

}  // namespace mla_fp8::gpu
