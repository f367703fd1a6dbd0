#pragma once
// The gather for windows of up to 128 keys, with more than 32 heads. A CTA goes through consecutive queries:
// from one to the next only one key comes and one goes. The two blocks are a ring of 128 keys, the one at
// position p in row p % 128.
#include "cuda/sparse_attention/sm90/bf16_tiles/gather.cuh"

namespace mla_fp8::gpu {

inline constexpr unsigned kRingKeys = 128;

template <class C>
class WindowGather : TileGather<C> {
 public:
  __device__ WindowGather(const TileParams& params, TileSmem<C> smem, int thread)
      : TileGather<C>(params, smem, thread), thread_(thread) {}

  __device__ void run() {
    const int64_t end = first_item(blockIdx.x + 1);
    int count = 0;
    for (int64_t i = first_item(blockIdx.x); i < end; ++i) {
      const RowTile item = move_to(i);
      this->fetch_q(item, count++);
      if (i + 1 < end) this->prefetch_q({query(i + 1), 1, first_head(i + 1), 1});
      if (item.length > 0) fetch_keys();
      is_next_here_ = false;
      if (i + 1 < end && query(i + 1) != item.query && item.length > 0 && query_.queries > 1) fetch_ahead();
    }
    this->fetch_q(RowTile{}, count);
    cp_async_wait_all();
  }

 private:
  using TileGather<C>::params_;
  using TileGather<C>::smem_;
  enum class Change { kNone, kOne, kAll };

  __device__ int64_t first_item(unsigned block) const { return params_.num_tiles * block / gridDim.x; }
  __device__ int64_t query(int64_t i) const { return params_.num_head_blocks == 1 ? i : i / 2; }
  __device__ int first_head(int64_t i) const {
    return params_.num_head_blocks == 1 ? 0 : static_cast<int>(i % 2) * C::kHeads;
  }

  // Moves to an item: finds its query, and how its keys differ from the last one's.
  __device__ RowTile move_to(int64_t i) {
    const int64_t to = query(i);
    if (has_keys_ && to == last_query_) {
      change_ = Change::kNone;
    } else if (has_keys_ && query_.queries > 1 && is_next_here_) {
      change_ = Change::kOne;
      query_ = {query_.request, query_.position + 1, query_.queries - 1};
    } else {
      change_ = Change::kAll;
      query_ = find_query(params_.p.window, to);
    }
    last_query_ = to;
    has_keys_ = query_.request >= 0 && query_.position >= 0;
    return {to, 1, first_head(i), has_keys_ ? 1 : 0};
  }

  // The address of the key at a position; null: there is none.
  __device__ const uint8_t* key(int64_t position) const {
    const Divider& page_size = params_.page_size[0];
    if (position < 0 || position >= params_.p.window.max_pages * page_size.divisor()) return nullptr;
    const int64_t entry = page_size(position), row = position - entry * page_size.divisor();
    const int page = __ldg(params_.p.window.page_table +
                           query_.request * params_.p.window.page_table_stride_request + entry);
    return this->row_address(0, page, row);
  }

  // Loads the key that the next query adds: 64 threads hold it until its place is free.
  __device__ void fetch_ahead() {
    const uint8_t* const from = key(query_.position + 1);
    is_next_here_ = true, is_next_valid_ = from != nullptr;
    next_ = uint4{0, 0, 0, 0};
    if (from && thread_ < 64) next_ = __ldg(reinterpret_cast<const uint4*>(from) + thread_);
  }

  __device__ void fetch_keys() {
    if (change_ == Change::kAll) {
#pragma unroll
      for (int buffer = 0; buffer < 2; ++buffer) {
        wait(buffer);
        fetch_buffer(buffer);
        publish(buffer, true);
      }
    } else {
      exchange_key(change_ == Change::kOne);
    }
    ++fills_;
  }

  __device__ void wait(int buffer) const {
    for (int part = 0; part < C::kParts; ++part) wait_until_free<1>(smem_.empty(buffer, part), fills_);
  }
  __device__ void publish(int buffer, bool copies) const {
    this->publish_mask(buffer, buffer == 0 ? found_[0] : found_[1]);
    for (int piece = 0; piece < C::kPieces; ++piece) {
      if (copies) mbarrier_arrive_cp_async(smem_.full(buffer, piece));
      else mbarrier_arrive(smem_.full(buffer, piece));
    }
  }

  // Exchanges a key. A buffer is published again once both groups are done with its values, changed or not:
  // until then they read the weights that belong to it.
  __device__ void exchange_key(bool changes) {
    const int64_t last = query_.position, gone = last - params_.p.window.window_size;
    const int slot = static_cast<int>(last % kRingKeys);
    // A key that leaves a window of fewer than 128 becomes zeros: it may be no number.
    const bool clears = gone >= 0 && params_.p.window.window_size < kRingKeys;
    const int gone_slot = clears ? static_cast<int>(gone % kRingKeys) : slot;
    const auto in = [](int i, int slot, uint32_t bits) { return slot / 64 == i ? bits : 0; };
    const uint32_t goes = changes ? bit(gone_slot) : 0, changed = changes ? bit(slot) : 0;
    const uint32_t comes = is_next_valid_ ? changed : 0;
    const bool sets = thread_ < 64;  // else it clears
    const int mine = sets ? slot : clears ? gone_slot : -64;
    const uint4 chunk = sets ? next_ : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      found_[i] &= ~(in(i, gone_slot, goes) | in(i, slot, changed));
      found_[i] |= in(i, slot, comes);
      wait(i);
      if (changes && i == mine / 64) set_chunk(mine, thread_ % 64, chunk);
      fence_proxy_async();
      publish(i, false);
    }
  }
  // The bit of a slot among the warp's found keys; 0: it is another warp's.
  __device__ uint32_t bit(int slot) const {
    return slot % 32 / 8 == this->warp_ ? 1u << (slot % 64 / 32 * 8 + slot % 8) : 0;
  }
  __device__ void set_chunk(int slot, int i, uint4 x) const {
    const int row = slot % 64;
    store_shared_16(smem_.panel(slot / 64, i / 8) + row * 128 + ((i % 8 ^ row % 8) * 16), x);
  }

  // Fetches all keys of a buffer, zeros where there is none.
  __device__ void fetch_buffer(int buffer) {
    typename TileGather<C>::template Rows<TileGather<C>::kRows> rows;
    const int slot = buffer * 64 + this->key_;
    const int64_t age = (query_.position + kRingKeys - slot) % kRingKeys;
    const bool held = this->lane_ < 16 && age < params_.p.window.window_size;
    const uint32_t found = this->take_rows(held ? key(query_.position - age) : nullptr, rows);
    (buffer == 0 ? found_[0] : found_[1]) = found;
    this->copy_panels(smem_.panel(buffer, 0), C::kPanelBytes, rows, 0, C::kPanels);
  }

  const int thread_;
  // The query whose keys are there, or on their way.
  int64_t last_query_ = 0;
  WindowQuery query_;
  bool has_keys_ = false;
  Change change_;
  uint32_t found_[2] = {0, 0};  // this warp's keys of the ring
  int fills_ = 0;
  // The key that the next query adds.
  bool is_next_here_ = false, is_next_valid_;
  uint4 next_;
};

}  // namespace mla_fp8::gpu
