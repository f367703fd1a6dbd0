#pragma once
// What a CTA of index_topk's scan on Hopper has in shared memory beside keys and queries: its lists, how long
// they are, and what it knows of its units.
#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90.cuh"
#include "cuda/indexer/sm90_math.cuh"

namespace mla_fp8::gpu::sm90_index {

// Places of a list that a warp takes at a time, of units of up to `rows` rows. 0: those that it fills at
// once, as lists are short where rows share the memory.
MLA_HD constexpr int list_chunk(int rows) { return rows > 2 ? 0 : 32; }
// What may come to a list after a look at it: two rounds, and places that those warps have not filled.
MLA_HD constexpr int list_slack(int rows, int warps) {
  return 2 * (rows > 2 ? kTileKeys : 2 * kTileKeys) + warps * list_chunk(rows);
}
// So that lists of that many rows, at most two of more than 2048, leave room for eight stages.
MLA_HD constexpr int list_capacity(int topk, int rows) {
  return topk > 2048 || rows == 1 ? 7168 : rows > 2 ? 3584 : 5888;
}

// The part of a unit that a CTA scans.
struct ScanWork {
  int64_t unit_begin, unit_end;  // tiles
  int32_t column;                // the first
  int tiles;
  // Tiles from `inside` on, that many, lie in all rows of the unit.
  int inside, num_inside;
};

// What the units' loop needs lies here: registers are for the tiles' loop.
struct ScanShared {
  Barriers ring;
  uint64_t round[2];
  IndexShare share;
  IndexUnit units[2];  // in turns
  int64_t begin, end;  // tiles of the CTA's share
  ScanWork works[2];   // of those units
  union {
    MathTeam::Smem select;
    GroupTeam::Smem group_select[kGroups];
  };
  uint64_t low[kIndexGroupRows], high[kIndexGroupRows];  // no candidate is outside
  uint32_t threshold[kIndexGroupRows];                   // keys from here on join
  // Places of a list that are taken, those of them that are not filled, and where a list that shrank ends.
  int32_t count[kIndexGroupRows], unfilled[kIndexGroupRows], kept[kIndexGroupRows];
  uint32_t nearly_full[4];  // by round
};

struct ScanArgs {
  KeyBoxes boxes;
  IndexTopkArgs topk;
  int num_stages, lines, panels;
  int capacity;  // of a list
  bool has_pins, may_take_two;
};

}  // namespace mla_fp8::gpu::sm90_index
