// Sparse MLA attention on the CPU, for one query token and a group of its heads.
//
//   for each block of 64 selected keys            (masked indices are dropped here: they cost nothing)
//     stage   the latents as bf16 for all heads, and V once more as pairs of keys
//     logits  = sm_scale * q K^T                   4 heads x 4 keys in registers, bf16 dot products
//     weights = exp(logits - running max)          online softmax in float; rounded to bf16 for the product
//     out     = rescale * out + weights V          4 heads x 64 columns in registers
//
// Bound: arithmetic from 16 heads on: 2 * heads * (head_dim_qk + head_dim_v) FLOP a key, for about 1 KB read
// and decoded. A head's result depends on its own keys in their order alone. So it is the same in any batch,
// on any number of threads and with any instruction set.
#include <optional>

#include "cpu/decode.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

constexpr int kBlock = AttentionScratch::kBlock;
constexpr int kHeadTile = AttentionScratch::kHeadTile;
constexpr int kKeyTile = 4;
constexpr int kColumns = 64;  // columns of V that are worked on together: 4 vectors
constexpr int kPairTile = 2 * kColumns;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNegInf = -__builtin_inff();

template <KvLayoutId kId>
MLA_SIMD void prefetch_slot(const KvScope& s, int64_t slot) {
  constexpr KvLayout kL = kv_layout(kId);
  const int64_t row = slot % s.page_size;
  const uint8_t* page = s.kv_cache + slot / s.page_size * s.kv_cache_stride_page;
  const uint8_t* token = page + kL.token_offset(row);
  for (int i = 0; i < kL.token_stride(); i += 64) __builtin_prefetch(token + i);
  if constexpr (kL.scale_placement == ScalePlacement::kPageTail)
    __builtin_prefetch(page + kL.scale_offset(row, s.page_size));
}

struct Key {
  int scope;
  int64_t slot;
};

// Hands out a token's selected keys, scope after scope. Rows are scattered: each is prefetched while the
// kAhead keys before it are decoded, however many masked indices lie between.
template <KvLayoutId kId, KvLayoutId kExtra>
class Keys {
 public:
  Keys(const SparseAttentionParams& p, int64_t token) : p_(p), token_(token) {
    open(0);
    for (int i = 0; i < kAhead; ++i) find();
  }

  bool next(Key* key) {
    if (taken_ == found_) return false;
    *key = ahead_[taken_++ % kAhead];
    find();
    return true;
  }

 private:
  static constexpr int kAhead = 8;

  void open(int scope) {
    scope_ = scope, index_ = 0;
    if (scope < p_.num_scopes) selected_.emplace(p_, scope, token_);
  }

  void find() {
    for (; scope_ < p_.num_scopes; open(scope_ + 1)) {
      for (const int64_t end = selected_->length(); index_ < end;) {
        const int64_t slot = selected_->slot(index_++);
        if (slot < 0) continue;
        if (kId == kExtra || scope_ == 0) prefetch_slot<kId>(p_.scopes[scope_], slot);
        else prefetch_slot<kExtra>(p_.scopes[1], slot);
        ahead_[found_++ % kAhead] = {scope_, slot};
        return;
      }
    }
  }

  const SparseAttentionParams& p_;
  const int64_t token_;
  int scope_;
  int64_t index_;
  std::optional<Selection> selected_;
  uint64_t found_ = 0, taken_ = 0;
  Key ahead_[kAhead];
};

// Stages up to kBlock keys as bf16 latents, zeros up to a multiple of kKeyTile. Returns the number of keys.
template <KvLayoutId kId, KvLayoutId kExtra>
int stage_latents(const SparseAttentionParams& p, Keys<kId, kExtra>* keys, uint16_t* latents) {
  constexpr int kDim = kv_layout(kId).head_dim_qk();
  static_assert(kDim == kv_layout(kExtra).head_dim_qk());
  int count = 0;
  for (Key key; count < kBlock && keys->next(&key); ++count) {
    const KvScope& s = p.scopes[key.scope];
    const uint8_t* page = s.kv_cache + key.slot / s.page_size * s.kv_cache_stride_page;
    const int64_t row = key.slot % s.page_size;
    uint16_t* const latent = latents + count * kDim;
    // A uniform FP8 layout's scale multiplies logits and output instead, so this is exact.
    if (kId == kExtra || key.scope == 0) decode_row<kId>(page, row, s.page_size, 1.0f, latent);
    else decode_row<kExtra>(page, row, s.page_size, 1.0f, latent);
  }
  const int padded = align_up(count, kKeyTile);
  memset(latents + count * kDim, 0, 2 * (padded - count) * kDim);
  return count;
}

// V as tile_output reads it: [kHeadDimV / 64][pairs of keys][64 columns][2 keys].
void interleave_v(const uint16_t* latents, int dim, int num_pairs, uint16_t* v_pairs) {
  for (int pair = 0; pair < num_pairs; ++pair) {
    const uint16_t *low = latents + 2 * pair * dim, *high = low + dim;
    for (int column = 0; column < kHeadDimV; column += 2 * kLanes) {
      uint16_t* dst = v_pairs + (column / kColumns * (kBlock / 2) + pair) * kPairTile + column % kColumns * 2;
      Bf16x32 first, second;
      interleave(load_pairs(low + column), load_pairs(high + column), &first, &second);
      store_pairs(dst, first);
      store_pairs(dst + 2 * kLanes, second);
    }
  }
}

// logits[h][k] = scale * q[h] . latents[k], for the heads of a tile and all keys of the block.
template <int kDim>
void tile_logits(const uint16_t* const q[kHeadTile], const uint16_t* latents, int num_keys, float scale,
                 float* logits) {
  for (int key = 0; key < num_keys; key += kKeyTile) {
    const uint16_t* k = latents + key * kDim;
    F32 sum[kHeadTile * kKeyTile];
    for (int i = 0; i < kHeadTile * kKeyTile; ++i) sum[i] = set1(0.0f);
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      Bf16x32 keys[kKeyTile];
#pragma GCC unroll 4
      for (int j = 0; j < kKeyTile; ++j) keys[j] = load_pairs(k + j * kDim + d);
#pragma GCC unroll 4
      for (int h = 0; h < kHeadTile; ++h) {
        const Bf16x32 query = load_pairs(q[h] + d);
#pragma GCC unroll 4
        for (int j = 0; j < kKeyTile; ++j) sum[h * kKeyTile + j] = dot(sum[h * kKeyTile + j], query, keys[j]);
      }
    }
    float tile[kHeadTile * kKeyTile];
    store(tile, mul(reduce_add_16(sum), set1(scale)));
    for (int h = 0; h < kHeadTile; ++h)
      memcpy(logits + h * kBlock + key, tile + h * kKeyTile, kKeyTile * sizeof(float));
  }
}

// Online softmax of a head over a block. Logits become weights; max and sum are updated, and rescale is set.
void block_softmax(float* logits, int num_keys, uint16_t* weights, float* max_value, float* sum,
                   float* rescale) {
  const int padded = align_up(num_keys, kLanes);
  for (int i = num_keys; i < padded; ++i) logits[i] = kNegInf;
  F32 block_max = set1(kNegInf);
  for (int i = 0; i < padded; i += kLanes) block_max = max(block_max, load(logits + i));
  const float found = reduce_max(block_max);
  const float new_max = found > *max_value ? found : *max_value;
  const float reference = new_max == kNegInf ? 0.0f : new_max;  // every logit -inf: weights are 0, not NaN

  F32 total = set1(0.0f);
  for (int i = 0; i < padded; i += kLanes) {
    const F32 x = mul(sub(load(logits + i), set1(reference)), set1(kLog2E));
    const F32 weight = exp2_nonpositive(x);
    total = add(total, weight);
    store_u16(weights + i, to_bf16(weight));
  }
  float lanes[kLanes];
  store(lanes, exp2_nonpositive(set1((*max_value - reference) * kLog2E)));
  *rescale = lanes[0];
  *sum = *sum * lanes[0] + reduce_add(total);
  *max_value = new_max;
}

// acc[h][64 columns] = rescale[h] * acc + weights[h] . v_pairs, for the heads of a tile.
void tile_output(const uint16_t* weights, const uint16_t* v_pairs, int num_pairs, const float* rescale,
                 float* acc) {
  constexpr int kVectors = kColumns / kLanes;
  F32 sum[kHeadTile * kVectors];
  for (int h = 0; h < kHeadTile; ++h)
    for (int c = 0; c < kVectors; ++c)
      sum[h * kVectors + c] = mul(load(acc + h * kHeadDimV + c * kLanes), set1(rescale[h]));
  for (int pair = 0; pair < num_pairs; ++pair) {
    Bf16x32 v[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) v[c] = load_pairs(v_pairs + pair * kPairTile + c * 2 * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < kHeadTile; ++h) {
      const Bf16x32 weight = broadcast_pair(weights + h * kBlock + 2 * pair);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) sum[h * kVectors + c] = dot(sum[h * kVectors + c], weight, v[c]);
    }
  }
  for (int h = 0; h < kHeadTile; ++h)
    for (int c = 0; c < kVectors; ++c) store(acc + h * kHeadDimV + c * kLanes, sum[h * kVectors + c]);
}

// out = acc * factor as bf16, with columns back in order.
void write_head(const float* acc, float factor, uint16_t* out) {
  for (int column = 0; column < kHeadDimV; column += 2 * kLanes) {
    float ordered[2 * kLanes];
    for (int half = 0; half < 2; ++half)
      for (int lane = 0; lane < kLanes; ++lane)
        ordered[interleave_column(half, lane)] = acc[column + half * kLanes + lane] * factor;
    store_u16(out + column, to_bf16(load(ordered)));
    store_u16(out + column + kLanes, to_bf16(load(ordered + kLanes)));
  }
}

template <KvLayoutId kId, KvLayoutId kExtra>
void attend(const SparseAttentionParams& p, int64_t token, int first_head, int num_heads,
            AttentionScratch s) {
  constexpr KvLayout kL = kv_layout(kId);
  const int padded_heads = align_up(num_heads, kHeadTile);
  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  memset(s.accumulator, 0, sizeof(float) * padded_heads * kHeadDimV);
  for (int h = 0; h < padded_heads; ++h) s.max[h] = kNegInf, s.sum[h] = 0.0f;

  const auto q_row = [&](int h) {  // padding heads repeat the last head
    const int head = first_head + (h < num_heads ? h : num_heads - 1);
    return p.q + token * p.q_stride_token + head * p.q_stride_head;
  };
  Keys<kId, kExtra> keys(p, token);
  while (const int num_keys = stage_latents<kId, kExtra>(p, &keys, s.latents)) {
    const int num_pairs = align_up(num_keys, kKeyTile) / 2;
    interleave_v(s.latents, kL.head_dim_qk(), num_pairs, s.v_pairs);
    for (int h = 0; h < padded_heads; h += kHeadTile) {
      const uint16_t* q[kHeadTile];
      for (int i = 0; i < kHeadTile; ++i) q[i] = q_row(h + i);
      tile_logits<kL.head_dim_qk()>(q, s.latents, num_keys, p.sm_scale * layer_scale, s.logits + h * kBlock);
      for (int i = h; i < h + kHeadTile; ++i)
        block_softmax(s.logits + i * kBlock, num_keys, s.weights + i * kBlock, s.max + i, s.sum + i,
                      s.rescale + i);
    }
    for (int column = 0; column < kHeadDimV; column += kColumns)
      for (int h = 0; h < padded_heads; h += kHeadTile)
        tile_output(s.weights + h * kBlock, s.v_pairs + column / kColumns * (kBlock / 2) * kPairTile,
                    num_pairs, s.rescale + h, s.accumulator + h * kHeadDimV + column);
  }

  for (int h = 0; h < num_heads; ++h) {
    const int head = first_head + h;
    const bool empty = s.sum[h] == 0.0f;
    // The sink joins the denominator alone. exp2 of a large difference is infinity, which makes out 0.
    const float sink = p.attn_sink && !empty ? std::exp2((p.attn_sink[head] - s.max[h]) * kLog2E) : 0.0f;
    const float factor = empty ? 0.0f : layer_scale / (s.sum[h] + sink);
    write_head(s.accumulator + h * kHeadDimV, factor,
               p.out + token * p.out_stride_token + head * p.out_stride_head);
    p.lse[token * p.num_q_heads + head] = empty ? kNegInf : s.max[h] + std::log(s.sum[h]);
    if (p.max_logits) p.max_logits[token * p.num_q_heads + head] = s.max[h];
  }
}

}  // namespace

void sparse_attention(const SparseAttentionParams& p, int64_t token, int first_head, int num_heads,
                      AttentionScratch scratch) {
  const SubnormalMode mode(Subnormals::kFlush);
  with_kv_layouts(p.layouts(),
                  [&](auto id, auto extra) { attend<id, extra>(p, token, first_head, num_heads, scratch); });
}

}  // namespace mla_fp8::cpu::MLA_ISA
