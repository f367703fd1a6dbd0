// resolve_hot_rows on the CPU: one thread takes a request, with a hash table of its chosen entries.
#include "ops/resolve_hot_rows.h"

#include <algorithm>
#include <vector>

#include "common/parallel.h"

namespace mla_fp8::cpu {

namespace {

constexpr int32_t kNone = -1;

struct Chosen {
  int32_t key;   // kNone: empty
  int32_t slot;  // the slot that holds the entry, or kNone
};

// A hash table with open addressing, at most half full.
class Table {
 public:
  explicit Table(int64_t entries) {
    int64_t size = 2;
    while (size < 2 * entries) size *= 2;
    places_.assign(size, {kNone, kNone});
  }
  void clear() { std::fill(places_.begin(), places_.end(), Chosen{kNone, kNone}); }
  // The place of the key, or the gap where it belongs.
  Chosen& at(int32_t key) {
    const uint64_t mask = places_.size() - 1;
    uint64_t i = (static_cast<uint32_t>(key) * uint64_t{0x9e3779b97f4a7c15}) >> 32;
    for (;; ++i) {
      Chosen& place = places_[i & mask];
      if (place.key == key || place.key == kNone) return place;
    }
  }

 private:
  std::vector<Chosen> places_;
};

struct Scratch {
  Table table;
  std::vector<int32_t> keys;  // of the request's chosen entries; kNone: it has its answer
  std::vector<bool> is_used;  // each slot
  std::vector<int16_t> stale, used;
};

void mask_rows(const ResolveHotRowsParams& p, const PlainHotDivision& by, int64_t first, int64_t count) {
  for (int64_t row = first; row < first + count; ++row) {
    for (int64_t c = 0; c < p.topk; ++c) write_hot_row(p, by, row, c, -1, false);
    if (p.lens) p.lens[row] = 0;
    p.miss_counts[row] = 0;
  }
}

// Divides the slots, in their order, into `used`, whose entry is chosen, and `stale`. Returns used.size().
int64_t look_up_slots(const ResolveHotRowsParams& p, int64_t state, Scratch& s) {
  const int16_t* order = p.hot_order + state * p.hot_order_stride;
  const int32_t* held = p.hot_entries + state * p.hot_entries_stride;
  s.is_used.assign(p.num_hot, false);
  for (int32_t slot = p.num_hot; slot-- > 0;) {
    Chosen* place = held[slot] < 0 ? nullptr : &s.table.at(held[slot]);
    if (!place || place->key != held[slot]) continue;
    place->slot = slot;
    s.is_used[slot] = true;
  }
  s.stale.clear(), s.used.clear();
  for (int64_t i = 0; i < p.num_hot; ++i) {
    const int16_t slot = order[i];
    (slot >= 0 && slot < p.num_hot && s.is_used[slot] ? s.used : s.stale).push_back(slot);
  }
  return static_cast<int64_t>(s.used.size());
}

void resolve_request(const ResolveHotRowsParams& p, const PlainHotDivision& by, int64_t first, int64_t count,
                     int64_t request, int64_t state, Scratch& s) {
  const HotTables tables = hot_tables(p, request, state);
  s.table.clear();
  s.keys.clear();
  for (int64_t row = first; row < first + count; ++row)
    for (int64_t c = 0; c < p.topk; ++c) {
      const HotEntry e = hot_entry(p, by, tables, row, p.entries[row * p.entries_stride_row + c]);
      s.keys.push_back(e.key);
      if (e.key < 0) write_hot_row(p, by, row, c, e.row, true);
      else s.table.at(e.key) = {e.key, kNone};
    }
  const int64_t hits = look_up_slots(p, state, s);
  int32_t* held = p.hot_entries + state * p.hot_entries_stride;
  int32_t misses = 0;
  for (size_t i = 0; i < s.keys.size(); ++i) {
    const int64_t row = first + static_cast<int64_t>(i) / p.topk, column = static_cast<int64_t>(i) % p.topk;
    const int32_t key = s.keys[i];
    if (key < 0) continue;
    Chosen& place = s.table.at(key);
    constexpr int32_t kLost = -2;  // its slot does not exist
    if (place.slot == kNone) {
      // A state that another call has spoilt may have too few slots, or some that do not exist.
      const auto rank = static_cast<size_t>(misses);
      const int16_t victim = rank < s.stale.size() ? s.stale[rank] : static_cast<int16_t>(kNone);
      const bool exists = victim >= 0 && victim < p.num_hot;
      place.slot = exists ? int32_t{victim} : kLost;
      if (exists) held[victim] = key;
      write_miss(p, by, first, misses++, p.by_entry ? host_row_of_entry(p, by, tables, key) : key,
                 exists ? hot_row_of_slot(p, by, tables, victim) : -1);
    }
    write_hot_row(p, by, row, column, place.slot < 0 ? -1 : hot_row_of_slot(p, by, tables, place.slot),
                  place.slot >= 0 && s.is_used[place.slot]);
  }
  int16_t* order = p.hot_order + state * p.hot_order_stride;
  const auto loaded = s.stale.begin() + std::min<int64_t>(misses, s.stale.size());
  order = std::copy(loaded, s.stale.end(), order);
  order = std::copy(s.stale.begin(), loaded, order);
  std::copy(s.used.begin(), s.used.end(), order);
  for (int64_t i = 0; i < count; ++i) {
    p.miss_counts[first + i] = static_cast<int32_t>(std::clamp<int64_t>(misses - i * p.topk, 0, p.topk));
    if (!p.lens) continue;
    const int32_t* row = p.hot_rows + (first + i) * p.hot_rows_stride;
    p.lens[first + i] =
        static_cast<int32_t>(std::count_if(row, row + p.topk, [](int32_t r) { return r >= 0; }));
  }
  if (!p.counters) return;
  __atomic_fetch_add(&p.counters[0], hits, __ATOMIC_RELAXED);
  __atomic_fetch_add(&p.counters[1], misses, __ATOMIC_RELAXED);
}

// Whether rows before these have the state, too: then it is theirs.
bool is_taken(const ResolveHotRowsParams& p, const PlainHotDivision& by, int64_t first, int64_t state) {
  for (int64_t row = 0; row < first; ++row)
    if (hot_state(p, hot_request(p, by, row)) == state) return true;
  return false;
}

}  // namespace

void resolve_hot_rows(const ResolveHotRowsParams& p) {
  const PlainHotDivision by{p.host_page_size, p.hot_page_size, p.topk > 0 ? p.topk : 1, p.next_n};
  parallel_for(p.num_rows, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch{.table = Table(p.next_n * p.topk)};
    for (int64_t row = begin; row < end; ++row) {
      const int64_t request = hot_request(p, by, row), state = hot_state(p, request);
      if (state < 0) {
        mask_rows(p, by, row, 1);
        continue;
      }
      int64_t before = 0;  // rows of the same request before this one, at most next_n
      while (before < p.next_n && before < row && hot_request(p, by, row - before - 1) == request) ++before;
      if (before == p.next_n) mask_rows(p, by, row, 1);
      if (before > 0) continue;
      const int64_t count = hot_group_size(p, by, row, request);
      if (is_taken(p, by, row, state)) mask_rows(p, by, row, count);
      else resolve_request(p, by, row, count, request, state, scratch);
    }
  });
}

}  // namespace mla_fp8::cpu
