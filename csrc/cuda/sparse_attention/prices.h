#pragma once
// Prices of a CTA on sm_90 (H100 and H200): coefficients of us_of (plan_sm90.h). benchmarks/fit_prices.py
// writes rows for which it has forced plans; docs/notebook/kernels/plans.md says what the others were fitted
// to.
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu::model {

// A CTA reads FP8 rows of a query, bf16 rows, or rows of two layouts; or FP8 rows for a tile of queries that
// has a CTA, that all CTAs share, or that has a list. Queries that could share lists, and go alone, are many:
// most of their rows come while others are worked on.
enum class Reads { kFp8, kBf16, kPair, kTiles, kSharedTiles, kLists, kAlone };

// A launch has waves of CTAs; keys, merges in clusters, and runs of a CTA in all waves; bytes of all queries'
// rows; results that an SM's CTAs leave for a second grid.
struct Work {
  double waves = 0, keys = 0, bytes = 0, merges = 0, runs = 0, left = 0;
};
struct Price {
  Kernel kernel;
  Schedule schedule;
  int heads;
  Reads reads;
  struct Of {
    double wave_us, key_ns, byte_ps = 0, merge_us = 0, run_us = 0, left_us = 0;
  } of;
  // us added between an engine's other kernels, which drive this code out of the instruction caches. Rows
  // with values in bf16 (dsv4) take more code.
  struct {
    double fp8_values = 0, bf16_values = 0;
  } cold_us = {};
  double us_of(const Work& w) const {
    return of.wave_us * w.waves + of.key_ns * 1e-3 * w.keys + of.byte_ps * 1e-6 * w.bytes +
           of.merge_us * w.merges + of.run_us * w.runs + of.left_us * w.left;
  }
};

// Kernel, schedule, heads, rows; us per wave, ns per key, ps per byte; us per merge in a cluster, per run,
// per result left; us of cold code with FP8 values and with bf16 values.
inline constexpr Price kPrices[] = {
    {Kernel::kFewHeads, Schedule::kSplit, 8, Reads::kFp8, {6.6, 11.8, 0.14, 1.2}, {-0.2, 1.5}},
    {Kernel::kFewHeads, Schedule::kSplit, 8, Reads::kBf16, {7.6, 17.3, 0.14, 0.8}},
    {Kernel::kFewHeads, Schedule::kSplit, 8, Reads::kPair, {4.9, 16.6, 0.14, 2.0}},
    {Kernel::kFewHeads, Schedule::kSplit, 16, Reads::kFp8, {8.6, 16.0, 0.05, 0.7}, {0.5, 1.5}},
    {Kernel::kFewHeads, Schedule::kSplit, 16, Reads::kBf16, {8.5, 17.4, 0.12, 0.3}},
    {Kernel::kFewHeads, Schedule::kSplit, 16, Reads::kPair, {6.2, 18.6, 0.14, 1.5}},
    {Kernel::kFewHeads, Schedule::kSplit, 32, Reads::kBf16, {7.3, 24.0, 0.14, 4.2}},
    {Kernel::kManyHeads, Schedule::kSplit, 32, Reads::kFp8, {8.4, 19.8, 0.14}, {2.0, 6.0}},
    {Kernel::kManyHeads, Schedule::kSplit, 32, Reads::kPair, {6.1, 26.0, 0.14}},
    {Kernel::kManyHeads, Schedule::kSplit, 64, Reads::kFp8, {11.0, 27.1, 0.08}, {5.2, 7.2}},
    {Kernel::kManyHeads, Schedule::kSplit, 64, Reads::kPair, {10.8, 31.6, 0.14}},
    {Kernel::kManyHeads, Schedule::kParts, 32, Reads::kFp8, {6.5, 22.9, 0.05, 0, 0, 2.7}, {1.2, 2.0}},
    {Kernel::kManyHeads, Schedule::kParts, 32, Reads::kPair, {6.3, 25.1, 0.11, 0, 0, 2.7}},
    {Kernel::kManyHeads, Schedule::kParts, 64, Reads::kFp8, {7.9, 30.6, 0.03, 0, 0, 3.9}, {2.0, 5.2}},
    {Kernel::kManyHeads, Schedule::kParts, 64, Reads::kPair, {8.1, 32.4, 0.14, 0, 0, 3.6}},
    {Kernel::kFewHeads, Schedule::kSegments, 8, Reads::kFp8, {5.4, 10.0, 0.094, 1.45, 1.6}},
    {Kernel::kFewHeads, Schedule::kSegments, 16, Reads::kFp8, {7.0, 14.1, 0.074, 0.9, 1.7}},
    {Kernel::kManyHeads, Schedule::kSegments, 32, Reads::kFp8, {6.8, 22.1, 0.033, 0, 1.8}},
    {Kernel::kManyHeads, Schedule::kSegments, 64, Reads::kFp8, {4.9, 26.3, 0.070, 0, 7.4}},
    {Kernel::kManyHeads, Schedule::kRuns, 32, Reads::kFp8, {6.5, 20.0, 0.1, 0, 1.2, 2.5}},
    {Kernel::kManyHeads, Schedule::kRuns, 64, Reads::kFp8, {7.4, 29.9, 0.05, 0, 1.0, 5.2}},
    {Kernel::kFewHeads, Schedule::kWalk, 8, Reads::kAlone, {1.99, 13.5}},
    {Kernel::kFewHeads, Schedule::kWalk, 16, Reads::kAlone, {3.23, 18.1}},
    {Kernel::kManyHeads, Schedule::kWalk, 32, Reads::kAlone, {4.75, 23.8}},
    {Kernel::kFewHeads, Schedule::kSplit, 8, Reads::kAlone, {6.27, 11.2, 0.03, 1.14}},
    {Kernel::kFewHeads, Schedule::kSplit, 16, Reads::kAlone, {8.17, 15.2, 0.03, 0.665}},
    {Kernel::kManyHeads, Schedule::kSplit, 32, Reads::kAlone, {7.98, 18.8, 0.03}},
    {Kernel::kManyHeads, Schedule::kSplit, 32, Reads::kTiles, {8.4, 19.8, 0.14}},
    {Kernel::kManyHeads, Schedule::kSplit, 64, Reads::kTiles, {11.0, 27.1, 0.14}},
    {Kernel::kManyHeads, Schedule::kSplit, 32, Reads::kSharedTiles, {17.0, 27.6, 0, 0, 0.35}},
    {Kernel::kManyHeads, Schedule::kSplit, 48, Reads::kSharedTiles, {17.0, 31.4, 0, 0, 0.35}},
    {Kernel::kManyHeads, Schedule::kSplit, 64, Reads::kSharedTiles, {17.0, 33.7, 0, 0, 0.35}},
    {Kernel::kManyHeads, Schedule::kSplit, 32, Reads::kLists, {8.4, 29.7}},
    {Kernel::kManyHeads, Schedule::kSplit, 48, Reads::kLists, {9.4, 32.3}},
    {Kernel::kManyHeads, Schedule::kSplit, 64, Reads::kLists, {10.3, 37.0}},
};

}  // namespace mla_fp8::gpu::model
