// prepare_keys on the CPU: for each token its latent, q_a and the indexer's key; bound by memory.
#include "ops/prepare_keys.h"

#include "cpu/index_row.h"
#include "cpu/insert_latent.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

void keep_latent(const NormRopeInsertParams& p, int64_t token, const uint16_t* latent) {
  memcpy(p.out_kv + token * p.out_kv_stride_token, latent, sizeof(uint16_t) * kHeadDimV);
  if (p.out_k_rope)
    memcpy(p.out_k_rope + token * p.out_k_rope_stride_token, latent + kHeadDimV,
           sizeof(uint16_t) * p.table.dim());
}

// Loads sixteen weights, bf16 or float.
MLA_SIMD F32 load_weights(const void* weight, bool is_float, int i) {
  return is_float ? load(static_cast<const float*>(weight) + i)
                  : load_bf16(static_cast<const uint16_t*>(weight) + i);
}

// RMSNorm of q_a. The order of additions: the squares of eight neighbours, then those of the eight 256
// further on, in order (fma); then halves of the 32 sums. Elements that the last 256 lack count as zeros.
void norm_q_a(const QaNormParams& p, int64_t token) {
  alignas(64) uint16_t row[kMaxQaDim] = {};
  memcpy(row, p.q_a + token * p.q_a_stride_token, sizeof(uint16_t) * p.dim);
  F32 sums[2] = {set1(0.0f), set1(0.0f)};
  constexpr int kEights = 8;
  for (int first = 0; first < p.dim; first += kSquares) {
    for (int half = 0; half < 2; ++half) {
      F32 x[kEights];
      for (int i = 0; i < kEights; ++i) x[i] = load_bf16(row + first + half * kSquares / 2 + i * kLanes);
      transpose(x);  // lane l of x[i]: element i of the l-th eight
      for (int i = 0; i < kEights; ++i) sums[half] = fma(x[i], x[i], sums[half]);
    }
  }
  const float mean = reduce_add(add(sums[0], sums[1])) / static_cast<float>(p.dim);
  const F32 factor = set1(inverse_root(mean + p.eps));
  uint16_t* out = p.out_q_a + token * p.out_q_a_stride_token;
  for (int i = 0; i < p.dim; i += kLanes) {
    const int count = std::min<int>(kLanes, static_cast<int>(p.dim) - i);
    alignas(64) float weight[kLanes] = {};
    for (int j = 0; j < count && count < kLanes; ++j)
      weight[j] = p.weight_is_float ? static_cast<const float*>(p.weight)[i + j]
                                    : bf16_to_float(static_cast<const uint16_t*>(p.weight)[i + j]);
    const F32 w = count < kLanes ? load(weight) : load_weights(p.weight, p.weight_is_float, i);
    uint16_t normed[kLanes];
    store_u16(normed, to_bf16(mul(mul(load_bf16(row + i), factor), w)));
    memcpy(out + i, normed, sizeof(uint16_t) * count);
  }
}

// The sum of a row: a tree over eight neighbours, then halves of the sixteen sums.
MLA_SIMD float sum_of_row(const F32 (&x)[kIndexVectors]) {
  F32 y[kIndexVectors];
  for (int i = 0; i < kIndexVectors; ++i) y[i] = x[i];
  transpose(y);  // lane l of y[i]: element i of the l-th eight
  return reduce_add(add(add(add(y[0], y[1]), add(y[2], y[3])), add(add(y[4], y[5]), add(y[6], y[7]))));
}

// LayerNorm, rounded to bf16.
void layer_norm(const IndexKeyParams& p, const uint16_t* src, uint16_t* dst) {
  F32 x[kIndexVectors], squares[kIndexVectors];
  for (int i = 0; i < kIndexVectors; ++i) x[i] = load_bf16(src + i * kLanes);
  const F32 mean = set1(sum_of_row(x) * (1.0f / kIndexDim));
  for (int i = 0; i < kIndexVectors; ++i) {
    x[i] = sub(x[i], mean);
    squares[i] = mul(x[i], x[i]);
  }
  const F32 factor = set1(inverse_root(sum_of_row(squares) * (1.0f / kIndexDim) + p.eps));
  for (int i = 0; i < kIndexVectors; ++i) {
    F32 y = mul(mul(x[i], factor), load_weights(p.weight, p.weight_is_float, i * kLanes));
    if (p.bias) y = add(y, load_weights(p.bias, p.weight_is_float, i * kLanes));
    store_u16(dst + i * kLanes, to_bf16(y));
  }
}

void insert_index_key(const IndexKeyParams& p, int64_t token, const Rotation* rotation) {
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[token]
                                         : static_cast<const int32_t*>(p.slot_mapping)[token];
  if (slot < 0 || slot >= p.num_slots || !rotation) return;
  alignas(64) uint16_t row[kIndexDim];
  layer_norm(p, p.k + token * p.k_stride_token, row);
  uint16_t* rotated = row + p.first_dim;
  rotate_pairs(rotated, p.is_neox, p.table.half, *rotation, rotated);
  F32 x[kIndexVectors];
  for (int i = 0; i < kIndexVectors; ++i) x[i] = load_bf16(row + i * kLanes);
  if (p.hadamard) hadamard(x);
  const IndexLayout l = index_layout(p.layout);
  const int64_t at = slot % p.page_size;
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;
  uint8_t *values = page + l.value_offset(at), *scales = page + l.scale_offset(at, p.page_size);
  if (p.layout == IndexLayoutId::kIndexFp4) return encode_index_fp4(p.scaling, x, values, scales);
  const float scale = encode_index_fp8(p.scaling, x, values);
  memcpy(scales, &scale, sizeof scale);
}

}  // namespace

void prepare_keys(const PrepareKeysParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  const NormRopeInsertParams& latents = p.latents;
  Rotation rotation, of_index;
  with_kv_layout(latents.layout, [&](auto id) {
    constexpr int kDim = kv_layout(id).head_dim_qk();
    alignas(64) uint16_t latent[kDim];
    for (int64_t token = begin; token < end; ++token) {
      const bool is_kept = latents.out_kv != nullptr;
      if (is_kept || token < latents.num_insert) {
        const bool known = load_rotation(latents.table, token, false, rotation);
        const float factor =
            latents.kv_weight ? rms_factor(latents.kv + token * latents.kv_stride_token, latents.eps) : 0.0f;
        if (known) make_latent<id>(latents, token, rotation, factor, latent);
        else memset(latent, 0, sizeof latent);
        if (is_kept) keep_latent(latents, token, latent);
        if (known && token < latents.num_insert) insert_latent<id>(latents, token, latent);
      }
      if (p.queries.dim > 0) norm_q_a(p.queries, token);
      if (token < p.index.num_insert)
        insert_index_key(p.index, token,
                         load_rotation(p.index.table, token, false, of_index) ? &of_index : nullptr);
    }
  });
}

}  // namespace mla_fp8::cpu::MLA_ISA
