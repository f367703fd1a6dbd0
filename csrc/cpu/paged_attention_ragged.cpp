// paged_attention_ragged on the CPU: decode attention over the pages of each request. FP8 is read as it is.
//
// A unit of work is a query token, a KV head, up to kRaggedHeadTile of the query heads that share it, and a
// split of the request's keys. It takes the keys that the token sees in order, sixteen at a time: it stages K
// and V as float, computes scores (a key a lane) and an online softmax, and accumulates. All arithmetic is
// float32. Its order depends on the request and the number of splits alone, and splits are merged in order.
// Buffers have a fixed size.
//
// Bound: FMAs, from about four query heads a KV head on; below that the conversion to float.
#include "cpu/decode.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

constexpr int kKeys = kLanes;  // keys of a block, one a lane
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr int kMaxDim = 576;  // dims of a latent; separate caches have fewer

// Sixteen values by half_to_float of dtype.h.
MLA_SIMD F32 load_half(const uint16_t* p) {
  const U32 x = load_u16(p), magnitude = and_(x, set1(0x7fffu));
  const U32 sign = shift_left<16>(and_(x, set1(0x8000u))), shifted = shift_left<13>(magnitude);
  const U32 normal = add(shifted, set1(112u << 23)), special = add(shifted, set1(224u << 23));  // inf, NaN
  const U32 subnormal = bits(mul(to_float(magnitude), set1(0x1p-24f)));
  const U32 value = select(greater(set1(0x400u), magnitude), subnormal, normal);
  return from_bits(or_(select(greater(magnitude, set1(0x7bffu)), special, value), sign));
}

// Elements i to i + 15 of a cache row, exactly; FP8 without its scale.
template <CacheDtype kDtype>
MLA_SIMD F32 load_row(const uint8_t* row, int i) {
  if constexpr (kDtype == CacheDtype::kBf16) return load_bf16(reinterpret_cast<const uint16_t*>(row) + i);
  if constexpr (kDtype == CacheDtype::kF16) return load_half(reinterpret_cast<const uint16_t*>(row) + i);
  if constexpr (kDtype == CacheDtype::kE4m3fn) return load_e4m3<Format::kE4m3fn>(row + i);
  if constexpr (kDtype == CacheDtype::kE4m3fnuz) return load_e4m3<Format::kE4m3fnuz>(row + i);
}

// The buffers of a unit of work.
struct alignas(64) Scratch {
  float q[kRaggedHeadTile][kMaxDim];
  float k[kMaxDim][kKeys];  // transposed: lanes are keys
  float v[kKeys][kMaxDim];
  float acc[kRaggedHeadTile][kMaxDim];     // sums of weight * v, relative to max_logit
  float scores[kRaggedHeadTile][kKeys];    // logits * log2(e); then the softmax weights 2^(logit - max_logit)
  float rescale[kRaggedHeadTile][kLanes];  // factor of acc and weight_sum when max_logit grows, in every lane
  float weight_sum[kRaggedHeadTile][kLanes];  // a partial sum a lane
  float max_logit[kRaggedHeadTile];
  // Where the block's keys lie. The last block of a request has fewer than kKeys.
  int num_keys;
  int64_t page[kKeys], row[kKeys];
  alignas(64) uint16_t latent[kMaxDim];
};

// Calls fn(constant<n>{}, first head) for blocks of n heads whose accumulators stay in registers.
template <class Fn>
MLA_SIMD void for_head_blocks(int num_heads, Fn&& fn) {
  int head = 0;
  for (; head + 8 <= num_heads; head += 8) fn(constant<8>{}, head);
  for (; head + 4 <= num_heads; head += 4) fn(constant<4>{}, head);
  for (; head < num_heads; ++head) fn(constant<1>{}, head);
}

// Stages rows that hold kDtype: separate K and V, or a latent of one format. Keys that the block lacks are
// zeros, so they add nothing.
template <CacheDtype kDtype>
struct Plain {
  MLA_SIMD void stage(const PagedAttentionRaggedParams& p, int64_t kv_head, Scratch& s) {
    const auto k_row = [&](int key) {
      return p.k_cache + s.page[key] * p.k_cache_stride_page + s.row[key] * p.k_cache_stride_row +
             kv_head * p.k_cache_stride_head;
    };
    for (int d = 0; d < p.head_dim; d += kLanes) {
      F32 x[kKeys];
      for (int key = 0; key < kKeys; ++key)
        x[key] = key < s.num_keys ? load_row<kDtype>(k_row(key), d) : set1(0.0f);
      transpose(x);
      for (int i = 0; i < kLanes; ++i) store(s.k[d + i], x[i]);
    }
    for (int key = 0; key < s.num_keys; ++key) {
      const uint8_t* row = p.v_cache + s.page[key] * p.v_cache_stride_page +
                           s.row[key] * p.v_cache_stride_row + kv_head * p.v_cache_stride_head;
      for (int d = 0; d < p.head_dim_v; d += kLanes) store(s.v[key] + d, load_row<kDtype>(row, d));
    }
    for (int key = s.num_keys; key < kKeys; ++key) memset(s.v[key], 0, sizeof s.v[key]);
  }
};

// Stages latents with scales of their own, decoded as by dequantize_kv.
template <KvLayoutId kId>
struct Packed {
  MLA_SIMD void stage(const PagedAttentionRaggedParams& p, int64_t, Scratch& s) {
    memset(s.k, 0, sizeof s.k);
    memset(s.v, 0, sizeof s.v);
    for (int key = 0; key < s.num_keys; ++key) {
      const uint8_t* page = p.k_cache + s.page[key] * p.k_cache_stride_page;
      decode_row<kId>(page, s.row[key], p.page_size, 1.0f, s.latent);
      for (int d = 0; d < p.head_dim; ++d) s.k[d][key] = bf16_to_float(s.latent[d]);
      for (int d = 0; d < p.head_dim_v; d += kLanes) store(s.v[key] + d, load_bf16(s.latent + d));
    }
  }
};

// Calls fn(Source) for the way in which the cache stores a row.
template <class Fn>
MLA_SIMD void with_source(const PagedAttentionRaggedParams& p, Fn&& fn) {
  const bool packed = p.is_latent && kv_layout(p.layout).num_tiles() > 0;
  if (!packed) return with_cache_dtype(p.cache_dtype, [&](auto dtype) { fn(Plain<dtype>{}); });
  with_kv_layout(p.layout, [&](auto id) {
    if constexpr (kv_layout(id).num_tiles() > 0 && !kv_layout(id).extra_only()) fn(Packed<id>{});
  });
}

MLA_SIMD void compute_scores(Scratch& s, int num_heads, int head_dim) {
  for_head_blocks(num_heads, [&](auto block, int head) __attribute__((always_inline)) {
    F32 sum[block];
    for (int h = 0; h < block; ++h) sum[h] = set1(0.0f);
    for (int d = 0; d < head_dim; ++d) {
      const F32 k = load(s.k[d]);
      for (int h = 0; h < block; ++h) sum[h] = fma(set1(s.q[head + h][d]), k, sum[h]);
    }
    for (int h = 0; h < block; ++h) store(s.scores[head + h], sum[h]);
  });
}

// tanh by way of 2^x, with an absolute error of 2e-7. Small numbers go by their series, as a large cap
// multiplies that error.
MLA_SIMD F32 tanh(F32 x) {
  const U32 sign = and_(bits(x), set1(kSignMask)), magnitude = and_(bits(x), set1(~kSignMask));
  const F32 e = exp2_nonpositive(mul(from_bits(magnitude), set1(-2.0f * kLog2E)));
  float numerator[kLanes], denominator[kLanes];
  store(numerator, sub(set1(1.0f), e));
  store(denominator, add(set1(1.0f), e));
  for (int i = 0; i < kLanes; ++i) numerator[i] /= denominator[i];
  const F32 y = from_bits(magnitude), square = mul(y, y);
  const F32 series = mul(y, sub(set1(1.0f), mul(square, sub(set1(1.0f / 3), mul(square, set1(2.0f / 15))))));
  const F32 result = select(less(y, set1(kSmallTanh)), series, load(numerator));
  return from_bits(or_(bits(result), sign));
}

// Turns scores of the first num_keys keys into weights relative to the largest logit so far; others are 0.
MLA_SIMD void online_softmax(Scratch& s, int num_heads, int num_keys, float logit_scale, float soft_cap) {
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<float>(i);
  const Mask valid = less(load(lane), set1(static_cast<float>(num_keys)));
  const F32 minus_infinity = set1(-INFINITY);

  for (int h = 0; h < num_heads; ++h) {
    F32 logits = mul(load(s.scores[h]), set1(logit_scale));
    if (soft_cap > 0) logits = mul(tanh(mul(logits, set1(1.0f / soft_cap))), set1(soft_cap));
    logits = select(valid, mul(logits, set1(kLog2E)), minus_infinity);

    const float previous = s.max_logit[h], largest = reduce_max(logits);
    s.max_logit[h] = largest > previous ? largest : previous;
    // While every logit is -inf, the base is 0: weights become 0, not NaN.
    const F32 base = set1(s.max_logit[h] == -INFINITY ? 0.0f : s.max_logit[h]);
    const F32 weights = exp2_nonpositive(sub(logits, base));
    const F32 rescale = exp2_nonpositive(sub(set1(previous), base));
    store(s.scores[h], weights);
    store(s.rescale[h], rescale);
    store(s.weight_sum[h], fma(load(s.weight_sum[h]), rescale, weights));
  }
}

MLA_SIMD void accumulate_values(Scratch& s, int num_heads, int head_dim_v) {
  for_head_blocks(num_heads, [&](auto block, int head) __attribute__((always_inline)) {
    for (int d = 0; d < head_dim_v; d += kLanes) {
      F32 acc[block];
      for (int h = 0; h < block; ++h) acc[h] = mul(load(s.acc[head + h] + d), load(s.rescale[head + h]));
      for (int key = 0; key < kKeys; ++key) {
        const F32 v = load(s.v[key] + d);
        for (int h = 0; h < block; ++h) acc[h] = fma(set1(s.scores[head + h][key]), v, acc[h]);
      }
      for (int h = 0; h < block; ++h) store(s.acc[head + h] + d, acc[h]);
    }
  });
}

// Calls fn(page, row) for keys [begin, end) of the request, in order.
template <class Fn>
MLA_SIMD void for_each_key(const PagedAttentionRaggedParams& p, const RequestPages& pages, int64_t begin,
                           int64_t end, Fn&& fn) {
  for (int64_t i = begin / p.page_size; i * p.page_size < end; ++i) {
    const int64_t page = p.kv_indices[pages.first + i], first = i * p.page_size;
    if (page < 0 || page >= p.num_pages) continue;
    const int64_t from = begin > first ? begin - first : 0;
    const int64_t to = end - first < p.page_size ? end - first : p.page_size;
    for (int64_t row = from; row < to; ++row) fn(page, row);
  }
}

// The workspace: the splits' outputs, [split, token, head, head_dim_v], then their lse.
MLA_SIMD int64_t rows_per_part(const PagedAttentionRaggedParams& p) { return p.num_tokens() * p.num_q_heads; }
MLA_SIMD float* split_lse(const PagedAttentionRaggedParams& p) {
  return p.workspace + p.num_splits * rows_per_part(p) * p.head_dim_v;
}

MLA_SIMD void store_rounded(const PagedAttentionRaggedParams& p, int64_t token, int64_t head, const float* x,
                            float factor) {
  uint16_t* out = static_cast<uint16_t*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  for (int d = 0; d < p.head_dim_v; ++d) {
    const float value = x[d] * factor;
    out[d] = p.dtype == Dtype::kBf16 ? float_to_bf16(value) : float_to_half(value);
  }
}

template <class Source>
void attend(const PagedAttentionRaggedParams& p, int64_t unit, Scratch& s) {
  const int group = p.num_q_heads / p.num_kv_heads, head_tiles = ceil_div(group, kRaggedHeadTile);
  const int64_t split = unit % p.num_splits;
  unit /= p.num_splits;
  const int64_t token = unit / head_tiles / p.num_kv_heads, kv_head = unit / head_tiles % p.num_kv_heads;
  const RequestPages pages = find_pages(p, token / p.q_len);
  const int64_t visible = pages.num_keys - (p.q_len - 1 - token % p.q_len);
  const int64_t per_split = align_up(ceil_div(pages.num_keys, int64_t{p.num_splits}), int64_t{kKeys});
  const int64_t begin = split * per_split, end = begin + per_split < visible ? begin + per_split : visible;
  const int first = static_cast<int>(unit % head_tiles) * kRaggedHeadTile;  // among the group's heads
  const int num_heads = group - first < kRaggedHeadTile ? group - first : kRaggedHeadTile;
  const int64_t first_q_head = kv_head * group + first;

  for (int h = 0; h < num_heads; ++h) {
    const uint16_t* q =
        static_cast<const uint16_t*>(p.q) + token * p.q_stride_token + (first_q_head + h) * p.q_stride_head;
    for (int d = 0; d < p.head_dim; d += kLanes)
      store(s.q[h] + d, p.dtype == Dtype::kBf16 ? load_bf16(q + d) : load_half(q + d));
    memset(s.acc[h], 0, sizeof s.acc[h]);
    memset(s.weight_sum[h], 0, sizeof s.weight_sum[h]);
    s.max_logit[h] = -INFINITY;
  }

  // Scales multiply the logits and the output, so that elements of the cache enter exactly.
  const float logit_scale = p.k_scale ? p.sm_scale * p.k_scale[kv_head * p.k_scale_stride] : p.sm_scale;
  const float out_scale = p.v_scale ? p.v_scale[kv_head * p.v_scale_stride] : 1.0f;

  s.num_keys = 0;
  const auto process_block = [&] {
    Source::stage(p, kv_head, s);
    compute_scores(s, num_heads, p.head_dim);
    online_softmax(s, num_heads, s.num_keys, logit_scale, p.logits_soft_cap);
    accumulate_values(s, num_heads, p.head_dim_v);
    s.num_keys = 0;
  };
  for_each_key(p, pages, begin, end, [&](int64_t page, int64_t row) {
    s.page[s.num_keys] = page;
    s.row[s.num_keys] = row;
    if (++s.num_keys == kKeys) process_block();
  });
  if (s.num_keys > 0) process_block();

  const bool whole = p.num_splits == 1;
  for (int h = 0; h < num_heads; ++h) {
    const int64_t head = first_q_head + h, at = token * p.num_q_heads + head;
    const int64_t part = split * rows_per_part(p) + at;
    const float sum = reduce_add(load(s.weight_sum[h])), lse = s.max_logit[h] * kLn2 + std::log(sum);
    const float sink = whole && p.attn_sink ? std::exp(p.attn_sink[head] - s.max_logit[h] * kLn2) : 0.0f;
    const float factor = sum == 0 ? 0.0f : out_scale / (sum + sink);  // without a key acc is 0, too
    (whole ? p.lse[at] : split_lse(p)[part]) = lse;
    if (whole) {
      store_rounded(p, token, head, s.acc[h], factor);
    } else {
      for (int d = 0; d < p.head_dim_v; ++d) p.workspace[part * p.head_dim_v + d] = s.acc[h][d] * factor;
    }
  }
}

void merge(const PagedAttentionRaggedParams& p, int64_t token, int64_t head) {
  const int64_t at = token * p.num_q_heads + head, rows = rows_per_part(p);
  const float* lse = split_lse(p) + at;
  float largest = -INFINITY, sum = 0.0f, out[kMaxDim] = {};
  for (int i = 0; i < p.num_splits; ++i) largest = lse[i * rows] > largest ? lse[i * rows] : largest;
  const float base = largest == -INFINITY ? 0.0f : largest;
  for (int i = 0; i < p.num_splits; ++i) {
    const float weight = std::exp(lse[i * rows] - base);
    if (weight == 0.0f) continue;  // a part of weight 0 counts for nothing, whatever it holds
    const float* part = p.workspace + (i * rows + at) * p.head_dim_v;
    for (int d = 0; d < p.head_dim_v; ++d) out[d] += weight * part[d];
    sum += weight;
  }
  const float sink = p.attn_sink ? std::exp(p.attn_sink[head] - base) : 0.0f;
  store_rounded(p, token, head, out, sum == 0.0f ? 0.0f : 1.0f / (sum + sink));
  p.lse[at] = largest + std::log(sum);
}

}  // namespace

// Attends for units [begin, end) of query tokens x KV heads x tiles of query heads x splits.
void paged_attention_ragged(const PagedAttentionRaggedParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  Scratch scratch;
  with_source(p, [&](auto source) {
    for (int64_t unit = begin; unit < end; ++unit) attend<decltype(source)>(p, unit, scratch);
  });
}

// Merges the splits of rows [begin, end) of query tokens x query heads.
void merge_ragged_splits(const PagedAttentionRaggedParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  for (int64_t row = begin; row < end; ++row) merge(p, row / p.num_q_heads, row % p.num_q_heads);
}

}  // namespace mla_fp8::cpu::MLA_ISA
