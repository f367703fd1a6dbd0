// compress_kv on the CPU: writes the rows that tokens close, then the state. Online, it folds tokens block by
// block. A pooled dim has the same float32 arithmetic, in the same order, as on GPUs
// (csrc/cuda/compress_kv/pool.cuh).
#include <algorithm>

#include "cpu/encode.h"
#include "cpu/isa.h"
#include "cpu/norm_rope.h"
#include "cpu/pool.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

constexpr int kMaxWindow = 128;  // rows

// Two rows: the weight of the larger score is 1, or NaN where the softmax is, so one exp2 is left.
MLA_SIMD F32 pool_pair(const WindowRow* rows, int d) {
  const F32 first = score_of(rows[0], d), second = score_of(rows[1], d);
  const Mask is_later = less(first, second);
  const F32 one = fma(select(is_later, second, first), set1(0.0f), set1(1.0f));
  const F32 distance = from_bits(or_(bits(sub(first, second)), set1(kSignMask)));  // negative
  const F32 lesser = exp2_nonpositive(mul(distance, set1(kLog2E)));
  const F32 of_first = select(is_later, lesser, one), of_second = select(is_later, one, lesser);
  const F32 value = fma(of_second, load(rows[1].kv + d), mul(of_first, load(rows[0].kv + d)));
  return div(value, add(of_first, of_second));
}

MLA_SIMD F32 pool(const WindowRow* rows, int count, int d) {
  if (count == 2) return pool_pair(rows, d);
  if (count <= kGroup) {
    const Pooled all = pool_group(rows, count, d);
    return div(all.value, all.sum);
  }
  Pooled part[kMaxWindow / kGroup];
  int parts = count / kGroup;
  for (int i = 0; i < parts; ++i) part[i] = pool_group(rows + i * kGroup, kGroup, d);
  for (parts /= 2; parts > 0; parts /= 2)  // pairs of neighbours
    for (int i = 0; i < parts; ++i) part[i] = join(part[2 * i], part[2 * i + 1]);
  return div(part[0].value, part[0].sum);
}

const float* input_row(const CompressKvParams& p, const CompressRequest& r, int64_t position) {
  return static_cast<const float*>(p.kv_score) + (r.first + position - r.start) * p.kv_score_stride_token;
}
float* state_row(const CompressKvParams& p, const CompressRequest& r, int64_t position) {
  return p.state + r.state * p.state_stride_slot + position % p.depth * p.state_stride_row;
}

// Finds the rows of the window that the token at `close` closes; returns their number.
int window_rows(const CompressKvParams& p, const CompressRequest& r, int64_t close, WindowRow* rows) {
  const int half = p.width() / 2;
  int count = 0;
  for (int64_t q = close + 1 - p.window(); q <= close; ++q) {
    if (q < 0) continue;  // before the sequence
    const float* row = q >= r.start ? input_row(p, r, q) : state_row(p, r, q);
    const int part = p.ratio == 4 && q > close - p.ratio ? kHeadDimV : 0;
    const float* bias = p.ape ? p.ape + q % p.ratio * half + part : nullptr;
    rows[count++] = {row + part, row + half + part, bias};
  }
  return count;
}

// Turns 512 pooled floats into the latent and cache row of token `t` of the call, at position `close`.
void finish(const CompressKvParams& p, float* pooled, int64_t t, int64_t close) {
  if (p.round_pooled)
    for (int i = 0; i < kHeadDimV; i += kLanes)
      store(pooled + i, from_bits(shift_left<16>(to_bf16(load(pooled + i)))));
  const float factor = rms_factor(pooled, p.eps);
  alignas(64) uint16_t latent[kHeadDimV];
  for (int i = 0; i < kHeadDimV; i += kLanes) {
    const F32 weight = p.weight_is_float ? load(static_cast<const float*>(p.norm_weight) + i)
                                         : load_bf16(static_cast<const uint16_t*>(p.norm_weight) + i);
    const F32 normed = mul(mul(load(pooled + i), set1(factor)), weight);
    store(pooled + i, normed);
    store_u16(latent + i, to_bf16(normed));
  }
  if (p.out_latent) memcpy(p.out_latent + t * p.out_latent_stride_token, latent, sizeof latent);

  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[t]
                                         : static_cast<const int32_t*>(p.slot_mapping)[t];
  Rotation rotation;
  if (slot < 0 || slot >= p.num_slots) return;
  if (!load_rotation_at(p.table, close + 1 - p.ratio, false, rotation)) return;
  const int first = kHeadDimV - p.table.dim();
  if (p.round_pooled) {
    rotate(latent + first, p.table.half, rotation, latent + first);
  } else {  // from float: the one rounding
    for (int i = 0; i < p.table.half; ++i) {
      const float a = pooled[first + 2 * i], b = pooled[first + 2 * i + 1];
      const float c = rotation.cos[i], s = rotation.sin[i];
      latent[first + 2 * i] = float_to_bf16(a * c - b * s);
      latent[first + 2 * i + 1] = float_to_bf16(a * s + b * c);
    }
  }
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;
  with_kv_layout(p.layout, [&](auto id) {
    constexpr KvLayout kL = kv_layout(id);
    if constexpr (kL.head_dim_qk() == kHeadDimV) {
      const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
      encode_row<id, Dtype::kBf16>(page, slot % p.page_size, p.page_size, latent, latent + kL.nope_dim,
                                   layer_scale, format_max(kL.nope_format));
    }
  });
}

void close_block(const CompressKvParams& p, const CompressRequest& r, int64_t t, int64_t close) {
  alignas(64) float pooled[kHeadDimV];
  if (p.ratio == 1) {
    for (int i = 0; i < kHeadDimV; i += kLanes) {
      const int64_t at = t * p.kv_score_stride_token + i;
      store(pooled + i, p.is_bf16 ? load_bf16(static_cast<const uint16_t*>(p.kv_score) + at)
                                  : load(static_cast<const float*>(p.kv_score) + at));
    }
  } else {
    WindowRow rows[kMaxWindow];
    const int count = window_rows(p, r, close, rows);
    // The rows of the next block, if they are few, are prefetched meanwhile. They need not exist.
    const float* next = input_row(p, r, close + 1);
    const int ahead = p.ratio <= 4 ? p.ratio : 0;
    for (int d = 0; d < kHeadDimV; d += kLanes) {
      for (int row = 0; row < ahead; ++row)
        for (int part = d; part < p.width(); part += kHeadDimV)
          __builtin_prefetch(next + row * p.kv_score_stride_token + part);
      store(pooled + d, pool(rows, count, d));
    }
  }
  finish(p, pooled, t, close);
}

MLA_SIMD Mask is_zero(F32 sum) { return equal(bits(sum), set1(uint32_t{0})); }  // no score had a weight

// Folds one token more into max, sum and mean [3][512], strictly one after another. While no score has a
// weight, the mean is 0, or NaN as 0 times a value may be.
MLA_SIMD void fold(float* running, const float* row, const float* bias, bool begins) {
  for (int d = 0; d < kHeadDimV; d += kLanes) {
    const WindowRow at{row, row + kHeadDimV, bias};
    const F32 score = score_of(at, d), kv = load(row + d);
    F32 top = score, sum = set1(1.0f), mean = kv;
    if (!begins) {
      const F32 before = load(running + d);
      top = max(score, before);
      const F32 old = mul(load(running + kHeadDimV + d), weight_of(before, top));
      const F32 weight = weight_of(score, top);
      sum = add(old, weight);
      const F32 value = fma(kv, weight, mul(load(running + 2 * kHeadDimV + d), old));
      mean = div(value, select(is_zero(sum), set1(1.0f), sum));
    }
    store(running + d, top);
    store(running + kHeadDimV + d, sum);
    store(running + 2 * kHeadDimV + d, mean);
  }
}

// Folds positions first to end - 1, of one block of tokens. The state has those before them in the block.
void fold_block(const CompressKvParams& p, const CompressRequest& r, int64_t first, int64_t end) {
  alignas(64) float running[3 * kHeadDimV], pooled[kHeadDimV];
  if (first % p.ratio != 0) memcpy(running, state_row(p, r, first - 1), sizeof running);
  for (int64_t q = first; q < end; ++q) {
    const float* bias = p.ape ? p.ape + q % p.ratio * kHeadDimV : nullptr;
    fold(running, input_row(p, r, q), bias, q % p.ratio == 0);
    if (r.is_kept(q, p.depth)) memcpy(state_row(p, r, q), running, sizeof running);
    if (CompressRequest::closes(q, p.ratio)) {
      for (int d = 0; d < kHeadDimV; d += kLanes) {  // NaN without a weight, as a softmax is
        const Mask is_none = is_zero(load(running + kHeadDimV + d));
        store(pooled + d, select(is_none, set1(NAN), load(running + 2 * kHeadDimV + d)));
      }
      finish(p, pooled, r.first + q - r.start, q);
    }
  }
}

// Folds the block that begins at token t, or that the request begins in. A request's first token also folds
// the blocks that have rows to be kept: so one thread reads the state, then writes it. Returns the token to
// continue with.
int64_t fold_from(const CompressKvParams& p, const CompressRequest& r, int64_t t) {
  const int64_t position = r.start + t - r.first, end = r.end();
  const auto fold_up_to_next = [&](int64_t first) {
    const int64_t next = std::min(first - first % p.ratio + p.ratio, end);
    fold_block(p, r, first, next);
    return next;
  };
  const int64_t oldest_kept = std::max<int64_t>(end - p.depth, 0),
                kept_block = oldest_kept - oldest_kept % p.ratio;
  if (position == r.start) {
    const int64_t next = fold_up_to_next(position);
    for (int64_t q = std::max(next, kept_block); q < end;) q = fold_up_to_next(q);
  } else if (position % p.ratio == 0 && position < kept_block) {
    fold_up_to_next(position);
  }
  return t + std::min(p.ratio - position % p.ratio, end - position);
}

}  // namespace

void compress_kv(const CompressKvParams& p, CompressPhase phase, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  for (int64_t t = begin, next; t < end; t = next) {
    next = t + 1;
    const int64_t request = find_request(p.query_start_loc, p.num_requests, t);
    if (request < 0) continue;
    const CompressRequest r = compress_request(p, request, p.ratio > 1);
    const int64_t position = r.start + t - r.first;
    if (r.state < 0 || t < r.first || position >= r.end()) continue;
    if (phase == CompressPhase::kFold) {
      next = fold_from(p, r, t);
    } else if (phase == CompressPhase::kClose) {
      if (CompressRequest::closes(position, p.ratio)) close_block(p, r, t, position);
    } else if (r.is_kept(position, p.depth)) {
      memcpy(state_row(p, r, position), input_row(p, r, position), sizeof(float) * p.width());
    }
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
