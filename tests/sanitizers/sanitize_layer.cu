// The ops around attention once each, in every shape of their kernels, for compute-sanitizer: hostile slots,
// positions, requests and states. compress_kv's chains of calls are compared bit for bit with one call.
//   sanitize_layer [FIRST STEP]   cases FIRST, FIRST + STEP, ...: several processes share them
#include <cuda_runtime.h>

#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ops/compress_kv.h"
#include "ops/inverse_rope.h"
#include "ops/norm_rope_insert.h"
#include "sanitizers/sanitize.h"

namespace mla_fp8::gpu {
namespace {

constexpr int kPageSize = 5, kMaxPos = 400, kHalf = 32;
constexpr uint8_t kPoison = 0xa5;

std::mt19937 random_bits;

class Inputs : public Device {
 public:
  float* floats(size_t size) {
    std::normal_distribution<float> normal;
    std::vector<float> values(size);
    for (float& x : values) x = normal(random_bits);
    return upload(values);
  }
  uint16_t* bf16(size_t size) {
    std::vector<uint16_t> values(size);
    for (uint16_t& x : values)
      x = static_cast<uint16_t>(0x3f00 + (random_bits() % 2 << 15) + random_bits() % 256);
    return upload(values);
  }
  RopeTable table(const std::vector<int64_t>& positions) {
    return {.cos = floats(kMaxPos * kHalf),
            .sin = floats(kMaxPos * kHalf),
            .cos_stride_pos = kHalf,
            .cos_stride_pair = 1,
            .sin_stride_pos = kHalf,
            .sin_stride_pair = 1,
            .max_pos = kMaxPos,
            .half = kHalf,
            .vector = true,
            .positions = upload(positions),
            .positions_are_int64 = true};
  }
};

// Numbers of [0, end) with some that no tensor has.
std::vector<int64_t> hostile(int count, int64_t end) {
  const int64_t others[] = {-1, end, INT64_MIN, INT64_MAX};
  std::vector<int64_t> values(count);
  for (int i = 0; i < count; ++i) values[i] = random_bits() % 5 ? i % end : others[random_bits() % 4];
  return values;
}

bool report(bool right, const std::string& what) {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::printf("%s %s\n", right ? "ok   " : "WRONG", what.c_str());
  std::fflush(stdout);
  return right;
}

// ---- compress_kv ------------------------------------------------------------------------------------------

struct Compressed {
  std::vector<uint8_t> cache;
  std::vector<uint16_t> latents;
};

// The requests' tokens from position `start` on, in calls of at most `chunk` tokens of each request.
Compressed compress(Inputs& device, CompressKvParams p, const float* rows, const std::vector<int>& lens,
                    int start, int chunk) {
  const int total = [&] {
    int sum = 0;
    for (int len : lens) sum += len;
    return sum;
  }();
  const int num_rows = static_cast<int>(lens.size()) * (kMaxPos / p.ratio + 1);
  const KvLayout layout = kv_layout(p.layout);
  const int pages = (num_rows + kPageSize - 1) / kPageSize;
  const size_t cache_bytes = pages * layout.page_bytes(kPageSize);
  p.num_slots = pages * kPageSize;
  p.page_size = kPageSize;
  p.kv_cache = device.upload(std::vector<uint8_t>(cache_bytes, kPoison));
  p.kv_cache_stride_page = layout.page_bytes(kPageSize);
  if (p.ratio > 1) {  // beyond the last request's: a slot that stays as it is
    p.num_states = static_cast<int64_t>(lens.size()) + 1;
    p.state_stride_row = p.state_width();
    p.state_stride_slot = p.depth * p.state_stride_row;
    std::vector<float> state(p.num_states * p.state_stride_slot, p.online ? 1.0f : 0.5f);
    p.state = device.upload(state);
  }
  std::vector<uint16_t> latents(static_cast<size_t>(total) * kHeadDimV);
  for (int done = 0; done < kMaxPos; done += chunk) {
    std::vector<int32_t> loc{7}, starts, state_slots;
    std::vector<int64_t> slots;
    std::vector<int> of_token;
    for (int r = 0, first = 0; r < static_cast<int>(lens.size()); first += lens[r++]) {
      const int count = std::max(0, std::min(chunk, lens[r] - done));
      loc.push_back(loc.back() + count);
      starts.push_back(start + done);
      state_slots.push_back(r);
      for (int i = 0; i < count; ++i) {
        slots.push_back(r * (kMaxPos / p.ratio + 1) + (start + done + i) / p.ratio);
        of_token.push_back(first + done + i);
      }
    }
    if (of_token.empty()) break;
    const int n = static_cast<int>(of_token.size());
    // A request whose state does not exist, and one that starts nowhere: skipped.
    loc.insert(loc.end(), {loc.back(), loc.back()});
    starts.insert(starts.end(), {3, INT32_MIN});
    state_slots.insert(state_slots.end(), {INT32_MAX, 0});
    p.num_tokens = n;
    p.num_requests = static_cast<int64_t>(starts.size());
    p.query_start_loc = device.upload(loc);
    p.start_pos = device.upload(starts);
    p.state_slots = device.upload(state_slots);
    p.slot_mapping = device.upload(slots);
    p.slots_are_int64 = true;
    std::vector<float> input(static_cast<size_t>(n) * p.width()),
        all = download(rows, size_t(total) * p.width());
    for (int i = 0; i < n; ++i)
      std::memcpy(&input[size_t(i) * p.width()], &all[size_t(of_token[i]) * p.width()], 4 * p.width());
    p.kv_score = device.upload(input);
    p.kv_score_stride_token = p.width();
    p.out_latent = device.upload(std::vector<uint16_t>(size_t(n) * kHeadDimV, 0));
    p.out_latent_stride_token = kHeadDimV;
    compress_kv(p, nullptr);
    const auto out = download(p.out_latent, size_t(n) * kHeadDimV);
    for (int i = 0; i < n; ++i)
      std::memcpy(&latents[size_t(of_token[i]) * kHeadDimV], &out[size_t(i) * kHeadDimV], 2 * kHeadDimV);
  }
  return {download(p.kv_cache, cache_bytes), latents};
}

bool run_compress(KvLayoutId layout, int ratio, bool online) {
  random_bits.seed(ratio);
  Inputs device;
  CompressKvParams p{};
  p.ratio = ratio;
  p.online = online;
  p.round_pooled = true;
  p.layout = layout;
  p.table = device.table({0});
  p.depth = ratio == 1 ? 0 : online ? 2 : p.window();
  p.eps = 1e-6f;
  p.norm_weight = device.floats(kHeadDimV);
  p.weight_is_float = true;
  p.scale = device.upload(std::vector<float>{0.01f});
  if (ratio > 2) p.ape = device.floats(static_cast<size_t>(ratio) * p.width() / 2);
  const std::vector<int> lens{1, 150, 0, 33, 300, 2};
  const float* rows = device.floats(size_t{486} * p.width());
  bool right = true;
  for (const int start : {0, 5}) {
    const Compressed whole = compress(device, p, rows, lens, start, kMaxPos);
    for (const int chunk : {1, 7, 130}) {
      if (chunk == 1 && ratio == 128) continue;  // 300 calls: too many for a sanitizer
      const Compressed parts = compress(device, p, rows, lens, start, chunk);
      right = report(parts.cache == whole.cache && parts.latents == whole.latents,
                     "compress_kv " + std::to_string(ratio) + (online ? " online" : "") + ", from " +
                         std::to_string(start) + ", calls of " + std::to_string(chunk)) &&
              right;
    }
  }
  return right;
}

// ---- insert and inverse -----------------------------------------------------------------------------------

bool run_insert(KvLayoutId id, bool norm_q, bool in_place) {
  random_bits.seed(3);
  Inputs device;
  const KvLayout layout = kv_layout(id);
  constexpr int kTokens = 37, kHeads = 5, kPages = 6;
  const int more = layout.head_dim_qk() - kHeadDimV;
  NormRopeInsertParams p{};
  p.layout = id;
  p.num_tokens = kTokens;
  p.num_insert = kTokens - 2;
  p.num_slots = kPages * kPageSize;
  p.page_size = kPageSize;
  p.table = device.table(hostile(kTokens, kMaxPos));
  p.kv = device.bf16(kTokens * kHeadDimV);
  p.kv_stride_token = kHeadDimV;
  if (more > 0) p.k_rope = device.bf16(size_t(kTokens) * more), p.k_rope_stride_token = more;
  p.kv_weight = device.floats(kHeadDimV);
  p.weight_is_float = true;
  p.eps = 1e-6f;
  p.slot_mapping = device.upload(hostile(kTokens - 2, p.num_slots));
  p.slots_are_int64 = true;
  p.scale = device.upload(std::vector<float>{0.01f});
  p.kv_cache = device.upload(std::vector<uint8_t>(kPages * layout.page_bytes(kPageSize), kPoison));
  p.kv_cache_stride_page = layout.page_bytes(kPageSize);
  p.num_q_heads = kHeads;
  p.num_heads = in_place ? kHeads : kHeads + 2;
  p.head_dim = kHeadDimV;
  p.norm_q = norm_q;
  p.q = device.bf16(size_t{kTokens} * kHeads * kHeadDimV);
  p.q_stride_token = kHeads * kHeadDimV, p.q_stride_head = kHeadDimV;
  const size_t out_size = size_t{kTokens} * p.num_heads * kHeadDimV;
  p.out_q = in_place ? const_cast<uint16_t*>(p.q) : device.upload(std::vector<uint16_t>(out_size, 0x7fff));
  p.out_q_stride_token = p.num_heads * kHeadDimV, p.out_q_stride_head = kHeadDimV;
  norm_rope_insert(p, nullptr);
  bool right = true;  // no bf16 of the poison is left
  for (const uint16_t x : download(p.out_q, out_size)) right = right && x != 0x7fff;
  return report(right, std::string("norm_rope_insert ") + layout.name + (norm_q ? ", q normed" : "") +
                           (in_place ? ", in place" : ""));
}

bool run_inverse(int tokens, int heads, int groups, int tile, bool power_of_two) {
  random_bits.seed(4);
  Inputs device;
  const size_t values = size_t(tokens) * heads * kHeadDimV;
  const AttendedHeads h{.num_tokens = tokens,
                        .num_heads = heads,
                        .head_dim = kHeadDimV,
                        .table = device.table(hostile(tokens, kMaxPos)),
                        .o = device.bf16(values),
                        .o_stride_token = heads * kHeadDimV,
                        .o_stride_head = kHeadDimV};
  const int64_t dim = heads / groups * kHeadDimV, tiles = dim / tile, rows = (tokens + 3) / 4 * 4;
  InverseRopeQuantizeParams q{.heads = h, .num_groups = groups, .tile = tile, .power_of_two = power_of_two};
  q.out = device.upload(std::vector<uint8_t>(values, 0x7f));
  q.out_stride_token = dim, q.out_stride_group = tokens * dim;
  q.out_scale = device.upload(std::vector<float>(groups * tiles * rows, NAN));
  q.scale_stride_token = 1, q.scale_stride_group = tiles * rows, q.scale_stride_tile = rows;
  q.num_scale_rows = rows;
  inverse_rope_quantize(q, nullptr);
  bool right = true;
  for (const float x : download(q.out_scale, groups * tiles * rows)) right = right && !std::isnan(x);
  for (const uint8_t x : download(q.out, values)) right = right && x != 0x7f;
  for (const bool in_place : {false, true}) {
    InverseRopeParams p{.heads = h};
    p.out = in_place ? const_cast<uint16_t*>(h.o) : device.upload(std::vector<uint16_t>(values, 0x7fff));
    p.out_stride_token = heads * kHeadDimV, p.out_stride_head = kHeadDimV;
    inverse_rope(p, nullptr);
    for (const uint16_t x : download(p.out, values)) right = right && x != 0x7fff;
  }
  return report(right, "inverse_rope, " + std::to_string(tokens) + " tokens, " + std::to_string(heads) +
                           " heads, " + std::to_string(groups) + " groups, tiles of " + std::to_string(tile));
}

// Calls run() for cases `first`, `first` + `step`, ..
class Cases {
 public:
  Cases(int first, int step) : next_(first), step_(step) {}
  template <class Run>
  void add(const Run& run) {
    if (count_++ != next_) return;
    next_ += step_;
    right_ = run() && right_;
  }
  bool right() const { return right_; }

 private:
  int count_ = 0, next_, step_;
  bool right_ = true;
};

bool run_cases(Cases cases) {
  for (const KvLayoutId id : {KvLayoutId::kDsv4, KvLayoutId::kDsv41Fp4}) {
    for (const int ratio : {1, 2, 4, 128}) cases.add([&] { return run_compress(id, ratio, false); });
    cases.add([&] { return run_compress(id, 128, true); });
  }
  for (const KvLayoutId id :
       {KvLayoutId::kDsv4, KvLayoutId::kDsv41, KvLayoutId::kDsv32, KvLayoutId::kFp8E4m3})
    for (const bool norm_q : {false, true})
      for (const bool in_place : {false, true}) cases.add([&] { return run_insert(id, norm_q, in_place); });
  for (const bool power_of_two : {false, true})
    for (const int tile : {32, 128}) {
      cases.add([&] { return run_inverse(1, 8, 1, tile, power_of_two); });
      cases.add([&] { return run_inverse(21, 6, 3, tile, power_of_two); });
      cases.add([&] { return run_inverse(300, 24, 3, tile, power_of_two); });
    }
  return cases.right();
}

}  // namespace
}  // namespace mla_fp8::gpu

int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, step = argc > 2 ? std::atoi(argv[2]) : 1;
  return mla_fp8::gpu::run_cases({first, step}) ? 0 : 1;
}
