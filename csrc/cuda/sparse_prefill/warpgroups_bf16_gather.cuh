#pragma once
// The warpgroup that fetches: Q of each item and the rows of its keys, into swizzled tiles.
#include "cuda/barrier.cuh"
#include "cuda/sparse_prefill/warpgroups_bf16_config.cuh"
#include "cuda/warp.cuh"

namespace mla_fp8::gpu {

template <class C>
class RowsGather {
 public:
  __device__ RowsGather(const RowsParams& params, RowsSmem<C> smem, int thread)
      : params_(params),
        smem_(smem),
        warp_(thread / kWarpSize),
        lane_(thread % kWarpSize),
        chunk_(thread % 8),
        key_(key_of(warp_, lane_)),
        offset_{offset(row(0)), offset(row(1))} {}

  __device__ void run() {
    RowsItems<C> items(params_);
    ValidKeys valid_keys{}, next_valid_keys{};
    Entry ahead{};
    int num_first = 0, num_second = 0;                                       // blocks of either buffer so far
    for (int i = -1;; ++i, items.advance(), valid_keys = next_valid_keys) {  // item -1 has no keys
      const RowsSource& item = *items;
      if (i >= 0 && !fetch_q(item, i)) break;
      prefetch_q(items.next());
      const int num_blocks = C::num_blocks(item.length), num_steps = max(num_blocks, 1);
      for (int block = 0; block < num_steps; ++block) {
        // Once both buffers have been filled there is time for the next item's keys.
        if (block == min(2, num_steps - 1)) next_valid_keys = find_valid_keys(items.next(), i + 1);
        const bool is_last = block == num_steps - 1;
        const Entry now = ahead;
        ahead = entry(is_last ? items.next() : item, is_last ? next_valid_keys : valid_keys,
                      is_last ? 0 : block + 1);
        if (num_blocks > 0) fetch_block(item, block, now, block % 2 == 0 ? num_first++ : num_second++);
      }
    }
    cp_async_wait_all();
  }

 protected:
  // A warp has eight of a block's first 32 rows, eight of the others and, of a tail, half of it or nothing; a
  // thread four of these rows, and one of the tail: 16 bytes of each in every tile.
  static constexpr int kRows = 4, kHalf = 2, kAllRows = kRows + (C::kTail > 0);
  __device__ int row(int i) const {
    return i < kRows ? i / 2 * 32 + warp_ * 8 + i % 2 * 4 + lane_ / 8 : 64 + warp_ * 4 + lane_ / 8;
  }
  __device__ uint32_t offset(int row) const { return row * 128 + ((chunk_ ^ row % 8) * 16); }
  // The first 16 lanes find a key each, of the warp's rows; eight more those of a tail.
  static constexpr int kNoKey = 1 << 29;  // past every length
  __device__ static int key_of(int warp, int lane) {
    if (lane < 16) return lane / 8 * 32 + warp * 8 + lane % 8;
    return lane < 16 + C::kTail ? 64 + lane - 16 : kNoKey;
  }
  __device__ int lane_of(int i) const {  // that knows row(i)
    return i < kRows ? i * 4 + lane_ / 8 : 16 + (warp_ * 4 + lane_ / 8) % 8;
  }
  __device__ static bool has_tail(int block) { return C::kTail > 0 && block % 2 == 0; }

  // What is listed for a key: the slot in one of the caches, or a page and where in the window it is.
  struct SlotEntry {
    int value;
  };
  struct AnyEntry {
    int value;
    unsigned position;  // in the request of a window; or kSlotOf + a cache
    static constexpr unsigned kSlotOf = 1u << 31;
    __device__ bool is_page() const { return position < kSlotOf; }
    __device__ int scope() const { return position > kSlotOf; }
  };
  using Entry = std::conditional_t<C::kSelected, SlotEntry, AnyEntry>;

  // As KeySource.
  class Source {
   public:
    using Key = Entry;
    __device__ Source(const RowsGather& gather, const RowsSource& item) : gather_(gather), item_(item) {}
    __device__ unsigned length() const { return item_.num_entries; }
    __device__ bool is_window() const { return gather_.is_window(); }
    __device__ int entry(unsigned position) const {
      const unsigned first_length = item_.first_length;
      const int32_t* list = item_.entries;
      if (C::kAny && position >= first_length) list = item_.extra - first_length;
      return position < length() ? __ldg(list + position) : -1;
    }
    __device__ bool is_slot(int entry, unsigned position) const {
      const bool is_extra = C::kAny && position >= static_cast<unsigned>(item_.first_length);
      const KvScope(&scopes)[2] = gather_.params_.p.scopes;
      return entry >= 0 && entry < (is_extra ? scopes[1].num_slots : scopes[0].num_slots);
    }
    __device__ Entry at(unsigned position) const {
      if (position >= length()) return {-1};
      if constexpr (C::kSelected) {
        return {__ldg(item_.entries + position)};
      } else {
        const unsigned first_length = item_.first_length;
        if (C::kAny && position >= first_length)
          return {__ldg(item_.extra + (position - first_length)), Entry::kSlotOf + 1};
        if (!gather_.is_window()) return {__ldg(item_.entries + position), Entry::kSlotOf};
        const unsigned in_request = item_.first_position + position;
        const int64_t page = gather_.params_.page_size[0](in_request);
        return {page < gather_.params_.p.window.max_pages ? __ldg(item_.entries + page) : -1, in_request};
      }
    }
    __device__ bool is_valid(Entry entry) const {
      if constexpr (C::kSelected)
        return entry.value >= 0 && entry.value < gather_.params_.p.scopes[0].num_slots;
      else return gather_.address(entry) != nullptr;
    }

   private:
    const RowsGather& gather_;
    const RowsSource& item_;
  };

  // The warps survey the keys of the CTA's i-th item.
  __device__ KeySurvey survey(const RowsSource& item, int i) const {
    const uint32_t surveys = smem_.smem + C::kSurveys + i % 2 * 4 * kSurveyBytes;
    survey_keys<4, 8>(Source(*this, item), warp_, lane_, surveys, [] {});
    named_barrier(kBarrierGather, kGroupThreads);
    return read_surveys<4>(surveys, lane_);
  }
  // From then on the item has only its valid keys. All have read the counts of the item before.
  __device__ ValidKeys find_valid_keys(RowsSource& item, int i) const {
    if constexpr (!C::kCounted) return {};
    const KeySurvey found = survey(item, i);
    const uint32_t counts = smem_.smem + C::kCounts;
    if (found.has_gaps()) [[unlikely]] {
      count_keys<4>(Source(*this, item), warp_, lane_, counts);
      named_barrier(kBarrierGather, kGroupThreads);
    }
    item.length = found.num_keys;
    return {found, counts, lane_};
  }
  // Of this lane's key in a block.
  __device__ Entry entry(RowsSource item, ValidKeys valid_keys, int block) const {
    const int key = C::first_key(block) + key_;
    const bool is_key = key < item.length && (C::kTail == 0 || has_tail(block) || lane_ < 16);
    if constexpr (C::kCounted) return valid_keys.find(Source(*this, item), is_key ? key : -1);
    else return Source(*this, item).at(is_key ? key : item.num_entries);
  }
  // Where a key lies; null: nowhere.
  __device__ const uint8_t* address(const AnyEntry& entry) const {
    if (!entry.is_page()) return slot_address(entry.scope(), entry.value);
    const Divider& page_size = params_.page_size[0];
    const int64_t position = entry.position;
    return row_address(0, entry.value, position - page_size(position) * page_size.divisor());
  }
  __device__ const uint8_t* slot_address(int scope, int slot) const {
    const Divider& page_size = params_.page_size[scope];
    const int64_t page = page_size(slot);
    return slot < 0 ? nullptr : row_address(scope, page, slot - page * page_size.divisor());
  }
  __device__ const uint8_t* row_address(int scope, int64_t page, int64_t row) const {
    const KvScope& s = params_.p.scopes[scope];
    if (page < 0 || page * s.page_size + row >= s.num_slots) return nullptr;
    return s.kv_cache + page * s.kv_cache_stride_page + row * (C::kDims * 2);
  }
  __device__ bool is_window() const { return C::kNeighbours || (C::kAny && params_.p.is_window); }

  // This thread's chunk of its rows; zeros where there is none.
  template <int kCount>
  struct Rows {
    const uint8_t* at[kCount];
    bool valid[kCount];
    int count = kCount;
  };
  template <int kCount>
  __device__ void copy_tiles(uint32_t dst, int tile_bytes, const Rows<kCount>& rows, int first, int count,
                             int first_row = 0, int last_row = kCount) const {
    for (int tile = first; tile < first + count; ++tile)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i >= first_row && i < last_row && (i < kRows || i < rows.count))
          cp_async_16(
              dst + tile * tile_bytes + (i < kRows ? offset_[i % 2] + i / 2 * 32 * 128 : offset(row(i))),
              rows.at[i] + tile * C::kTileDims * 2, rows.valid[i]);
  }

  __device__ const uint8_t* q_row(const RowsItem& item, RowPlace place) const {
    const SparseAttentionParams& p = params_.p;
    return reinterpret_cast<const uint8_t*>(p.q + (item.token + place.token) * p.q_stride_token +
                                            (item.first_head + place.head) * p.q_stride_head);
  }
  // Tells the other warpgroups what comes next, too. Whether something does.
  __device__ bool fetch_q(const RowsItem& item, int count) const {
    Rows<kRows> rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const RowPlace place = row_place<C>(params_, row(i));
      rows.valid[i] = item.has(place, params_.p.num_q_heads);
      rows.at[i] = q_row(item, rows.valid[i] ? place : RowPlace{0, 0}) + chunk_ * 16;
    }
    mbarrier_wait(smem_.q_empty(), (count & 1) ^ 1);
    if (warp_ == 0 && lane_ == 0) {
      smem_.set_item(item);
      mbarrier_arrive(smem_.q_full());
    }
    if (item.length > 0) copy_tiles(smem_.q_tile(0), C::kTileBytes, rows, 0, C::kTiles);
    mbarrier_arrive_cp_async(smem_.q_full());
    return item.num_tokens > 0;
  }
  __device__ void prefetch_q(const RowsItem& item) const {
    if (chunk_ >= 4 || item.length == 0) return;
    const RowPlace place = row_place<C>(params_, (warp_ * 4 + lane_ / 8) * 4 + chunk_);
    if (item.has(place, params_.p.num_q_heads)) bulk_prefetch_l2(q_row(item, place), C::kDims * 2);
  }

  using BlockRows = Rows<kAllRows>;
  // Where this thread's rows are. Returns which of the lanes' keys there are, as take_rows.
  __device__ uint32_t find(const RowsSource& item, int block, const Entry& entry, BlockRows& rows) const {
    if constexpr (!C::kSelected) {
      rows.count = has_tail(block) && warp_ < 2 ? kAllRows : kRows;
      return take_rows(address(entry), rows);
    } else {
      const uint8_t* const kv = params_.p.scopes[0].kv_cache;
      const uint32_t found = __ballot_sync(kFullWarp, Source(*this, item).is_valid(entry));
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t slot = __shfl_sync(kFullWarp, entry.value, lane_of(i));
        rows.valid[i] = found >> lane_of(i) & 1;
        rows.at[i] = kv + (rows.valid[i] ? slot * params_.row_stride + chunk_ * 16 : 0);
      }
      return found;
    }
  }
  // The same from the lanes' addresses of their keys.
  template <int kCount>
  __device__ uint32_t take_rows(const uint8_t* at, Rows<kCount>& rows) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint64_t row = __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(at), lane_of(i));
      rows.valid[i] = row != 0;
      rows.at[i] =
          row != 0 ? reinterpret_cast<const uint8_t*>(row) + chunk_ * 16 : params_.p.scopes[0].kv_cache;
    }
    return __ballot_sync(kFullWarp, at != nullptr);
  }

  // The warp's part of a block's mask.
  __device__ void publish_mask(int buffer, uint32_t found) const {
    if (lane_ != 0) return;
    smem_.set_mask(buffer, warp_, found);
    mbarrier_arrive(smem_.full(buffer, 0));
  }

  __device__ void fetch_block(const RowsSource& item, int block, const Entry& entry, int count) const {
    const int buffer = block % 2;
    BlockRows rows;
    const uint32_t found = find(item, block, entry, rows);
    const int parity = (count & 1) ^ 1;
    const auto copy = [&](int piece, int first_row, int last_row) {
      copy_tiles(smem_.tile(buffer, 0), C::key_tile_bytes(buffer), rows, C::first_tile(piece),
                 C::num_tiles(piece), first_row, last_row);
    };
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      mbarrier_wait(smem_.half_empty(buffer, part), parity);
      copy(2 * part, 0, kHalf);
      copy(2 * part + 1, 0, kHalf);
      mbarrier_wait(smem_.empty(buffer, part), parity);
#pragma unroll
      for (int piece = 2 * part; piece < 2 * part + 2; ++piece) {
        copy(piece, kHalf, kAllRows);
        mbarrier_arrive_cp_async(smem_.full(buffer, piece));
      }
      if (part == 0) publish_mask(buffer, found);
    }
    if constexpr (C::kHasRope) {
      mbarrier_wait(smem_.empty(buffer, C::kRopePart), parity);
      copy(C::kRopePiece, 0, kRows);
      mbarrier_arrive_cp_async(smem_.full(buffer, C::kRopePiece));
    }
  }

  const RowsParams& params_;
  const RowsSmem<C> smem_;
  const int warp_, lane_, chunk_, key_;
  const uint32_t offset_[2];  // of row(0), row(1)
};

}  // namespace mla_fp8::gpu
