// inverse_rope and inverse_rope_quantize on the CPU, head by head; bound by memory.
#include "cpu/encode.h"
#include "cpu/isa.h"
#include "cpu/norm_rope.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

// Quantises tiles [begin, end) of a head. The scales of a few tiles come first, so that no code waits for the
// scale of its own tile.
template <int kTile>
MLA_SIMD void quantize_tiles(const InverseRopeQuantizeParams& p, const uint16_t* head, int begin, int end,
                             uint8_t* codes, float* scales) {
  constexpr Format kFormat = Format::kE4m3fn;
  constexpr float kMax = format_max(kFormat);
  constexpr int kAtOnce = 16;
  for (int first = begin; first < end; first += kAtOnce) {
    const int count = end - first < kAtOnce ? end - first : kAtOnce;
    uint8_t exponent[kAtOnce];
    float scale[kAtOnce];
    for (int i = 0; i < count; ++i) {
      const float amax = finite_amax<Dtype::kBf16>(head, (first + i) * kTile, kTile);
      exponent[i] = tile_scale_exponent(amax, p.kAmaxFloor, 0.0f, kMax);
      scale[i] =
          p.power_of_two ? ue8m0_to_float(exponent[i]) : (amax > p.kAmaxFloor ? amax : p.kAmaxFloor) / kMax;
      scales[(first + i) * p.scale_stride_tile] = scale[i];
    }
    if (p.power_of_two) {
      encode_tiles<kFormat, Dtype::kBf16, kTile>(codes, head, first * kTile, count, exponent, kMax);
    } else {
      for (int i = 0; i < count; ++i)
        encode_divided<kFormat, Dtype::kBf16>(codes, head, (first + i) * kTile, kTile, scale[i], kMax);
    }
  }
}

// Quantises a head; `row` is room for it.
template <int kTile>
MLA_SIMD void quantize_head(const InverseRopeQuantizeParams& p, const uint16_t* o, const Rotation* rotation,
                            uint16_t* row, uint8_t* out, float* scales) {
  const int dim = static_cast<int>(p.heads.head_dim), half = p.heads.table.half;
  // Tiles before the one with the first rotated dim are quantised where they lie.
  const int in_place = rotation ? (dim - 2 * half) / kTile : 0, rest = in_place * kTile;
  rotate_head(o + rest, dim - rest, half, rotation, false, row + rest);
  quantize_tiles<kTile>(p, o, 0, in_place, out, scales);
  quantize_tiles<kTile>(p, row, in_place, dim / kTile, out, scales);
}

template <int kTile>
void quantize_token(const InverseRopeQuantizeParams& p, int64_t token, uint16_t* row) {
  const int64_t per_group = p.heads_per_group(), dim = p.heads.head_dim;
  float* token_scales = p.out_scale + token * p.scale_stride_token;
  Rotation rotation;
  const bool is_padding = token >= p.heads.num_tokens;
  const Rotation* r =
      !is_padding && load_rotation(p.heads.table, token, true, rotation) ? &rotation : nullptr;
  const uint16_t* o = p.heads.o + token * p.heads.o_stride_token;
  for (int64_t group = 0; group < p.num_groups; ++group) {
    float* scales = token_scales + group * p.scale_stride_group;
    if (is_padding) {
      for (int64_t tile = 0; tile < per_group * dim / kTile; ++tile) scales[tile * p.scale_stride_tile] = 0;
      continue;
    }
    uint8_t* out = p.out + token * p.out_stride_token + group * p.out_stride_group;
    for (int64_t head = 0; head < per_group; ++head, o += p.heads.o_stride_head) {
      quantize_head<kTile>(p, o, r, row, out, scales);
      out += dim;
      scales += dim / kTile * p.scale_stride_tile;
    }
  }
}

}  // namespace

void inverse_rope(const InverseRopeParams& p, bool streamed, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  const AttendedHeads& h = p.heads;
  Rotation rotation;
  for (int64_t token = begin; token < end; ++token) {
    const Rotation* r = load_rotation(h.table, token, true, rotation) ? &rotation : nullptr;
    for (int64_t head = 0; head < h.num_heads; ++head)
      rotate_head(h.o + token * h.o_stride_token + head * h.o_stride_head, h.head_dim, h.table.half, r,
                  streamed, p.out + token * p.out_stride_token + head * p.out_stride_head);
  }
  if (streamed) end_streams();
}

void inverse_rope_quantize(const InverseRopeQuantizeParams& p, uint16_t* row, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  for (int64_t token = begin; token < end; ++token) {
    if (p.tile == 128) quantize_token<128>(p, token, row);
    else quantize_token<32>(p, token, row);
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
