// inverse_rope and inverse_rope_quantize on the CPU, head by head; bound by memory.
#include "cpu/encode.h"
#include "cpu/isa.h"
#include "cpu/norm_rope.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

// Head `head` of a token rotated back into `out`, which may be where it lies; zeros without a rotation.
MLA_SIMD void rotate_back(const AttendedHeads& h, int64_t token, int64_t head, const Rotation* rotation,
                          uint16_t* out) {
  const uint16_t* o = h.o + token * h.o_stride_token + head * h.o_stride_head;
  const int64_t untouched = h.head_dim - h.table.dim();
  if (!rotation) {
    memset(out, 0, sizeof(uint16_t) * h.head_dim);
    return;
  }
  if (out != o) memcpy(out, o, sizeof(uint16_t) * untouched);
  rotate(o + untouched, h.table.half, *rotation, out + untouched);
}

void quantize_head(const InverseRopeQuantizeParams& p, const uint16_t* row, uint8_t* out, float* scales) {
  constexpr Format kFormat = Format::kE4m3fn;
  constexpr float kMax = format_max(kFormat);
  for (int first = 0; first < p.heads.head_dim; first += p.tile) {
    const float amax = finite_amax<Dtype::kBf16>(row, first, p.tile);
    float* scale = scales + first / p.tile * p.scale_stride_tile;
    if (p.power_of_two) {
      const uint8_t exponent = tile_scale_exponent(amax, p.kAmaxFloor, 0.0f, kMax);
      encode<kFormat, Dtype::kBf16>(out, row, first, p.tile, ue8m0_reciprocal(exponent), kMax);
      *scale = ue8m0_to_float(exponent);
    } else {
      *scale = (amax > p.kAmaxFloor ? amax : p.kAmaxFloor) / kMax;
      encode_divided<kFormat, Dtype::kBf16>(out + first, row + first, p.tile, *scale, kMax);
    }
  }
}

}  // namespace

void inverse_rope(const InverseRopeParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  Rotation rotation;
  for (int64_t token = begin; token < end; ++token) {
    const Rotation* r = load_rotation(p.heads.table, token, true, rotation) ? &rotation : nullptr;
    for (int64_t head = 0; head < p.heads.num_heads; ++head)
      rotate_back(p.heads, token, head, r, p.out + token * p.out_stride_token + head * p.out_stride_head);
  }
}

void inverse_rope_quantize(const InverseRopeQuantizeParams& p, uint16_t* row, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  const int64_t per_group = p.heads_per_group(), dim = p.heads.head_dim;
  Rotation rotation;
  for (int64_t token = begin; token < end; ++token) {
    float* scales = p.out_scale + token * p.scale_stride_token;
    if (token >= p.heads.num_tokens) {  // only pads the scales
      for (int64_t group = 0; group < p.num_groups; ++group)
        for (int64_t tile = 0; tile < per_group * dim / p.tile; ++tile)
          scales[group * p.scale_stride_group + tile * p.scale_stride_tile] = 0;
      continue;
    }
    const Rotation* r = load_rotation(p.heads.table, token, true, rotation) ? &rotation : nullptr;
    for (int64_t head = 0; head < p.heads.num_heads; ++head) {
      const int64_t group = head / per_group, column = head % per_group * dim;
      rotate_back(p.heads, token, head, r, row);
      quantize_head(p, row, p.out + token * p.out_stride_token + group * p.out_stride_group + column,
                    scales + group * p.scale_stride_group + column / p.tile * p.scale_stride_tile);
    }
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
