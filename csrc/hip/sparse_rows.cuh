#pragma once
// Sparse attention on CDNA: its shared memory, and the gather that brings blocks of rows there. Stored bytes
// come into registers a block ahead, then go to shared memory as bf16 latents.
#include <bit>

#include "cuda/device/convert.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/paged_attention_ragged/matrix_tile.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/portable/partials.cuh"

namespace mla_fp8::gpu::cdna {

inline constexpr int kBlockKeys = 32, kWaves = 8, kThreads = kWaves * kWaveSize;
inline constexpr int kRowsPerWave = kBlockKeys / kWaves;
inline constexpr int kKeyTiles = kBlockKeys / kTile;
inline constexpr int kSoftmaxLanes = 8, kLaneKeys = kBlockKeys / kSoftmaxLanes;           // of a head
inline constexpr int kWaveColumns = kHeadDimV / kWaves, kColumns = kWaveColumns / kTile;  // of V; of a lane

// All that the kernel has to know of a cache's rows besides their format. These are numbers, not a template
// argument, so that layouts of one format share their kernels.
struct RowLayout {
  unsigned coded_dims, bf16_offset;  // the first elements are in the cache's format, the others bf16
  unsigned token_stride, scale_bytes,
      scale_offset;  // in the row; 0: scales lie in the page's tail
  ScaleFormat scale_format;
  bool has_scales;
  int tile_bits;  // a dim's tile is dim >> tile_bits

  constexpr explicit RowLayout(const KvLayout& l)
      : coded_dims(static_cast<unsigned>(l.nope_format == l.rope_format ? l.head_dim_qk() : l.nope_dim)),
        bf16_offset(static_cast<unsigned>(l.rope_offset())),
        token_stride(static_cast<unsigned>(l.token_stride())),
        scale_bytes(static_cast<unsigned>(l.scale_bytes())),
        scale_offset(l.scale_inline() ? static_cast<unsigned>(l.nope_bytes()) : 0),
        scale_format(l.scale_format),
        has_scales(l.tile_dim > 0),
        tile_bits(std::bit_width(static_cast<unsigned>(l.tile_dim)) - 1) {}
  bool operator==(const RowLayout&) const = default;
  // The scales of row `row` of the page.
  __device__ __forceinline__ const uint8_t* scales(const uint8_t* page, uint32_t row,
                                                   int64_t page_size) const {
    return scale_offset ? page + uint64_t{row} * token_stride + scale_offset
                        : page + page_size * token_stride + uint64_t{row} * scale_bytes;
  }
};

struct Args {
  PortableParams portable;
  RowLayout rows[2];  // of each scope
  Divider page_size[2];
  bool is_mixed;  // the scopes have different layouts
};

// A block's shared memory. kShares waves have the same keys and heads of S, each with a part of the dims.
template <int kDims, int kHeads>
struct Shared {
  static constexpr int kHeadTiles = kHeads / kTile, kShares = kWaves / kKeyTiles / kHeadTiles;
  static_assert(kShares * kKeyTiles * kHeadTiles == kWaves);
  // A row ends 8 bytes past a multiple of 128, so that the 16 rows of an operand fall into different banks.
  alignas(16) uint16_t latent[kBlockKeys][kDims + 4];
  alignas(16) float logits[kShares][kHeads][kBlockKeys + 4];
  alignas(16) uint16_t weights[kHeads][kBlockKeys + 4];
  float factor[kHeads];               // factor of what was summed up before this block
  float normalizer[kHeads];           // factor of all, at the end
  alignas(8) uint8_t map[kMapBytes];  // the query's valid keys
};

// broadcast of a lane known when compiling, with the same value in both warps: it is in a scalar register.
template <class T>
__device__ __forceinline__ T uniform_broadcast(T x, int lane) {
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &x, sizeof x);
#pragma unroll
  for (uint32_t& word : words) word = mla_read_uniform_lane(word, lane);
  memcpy(&x, words, sizeof x);
  return x;
}

// Eight elements of a row as stored: bf16, or codes in the first words.
struct Piece {
  Words<4> bytes;
  float scale;
};

// Whether the first 512 dims of rows with kDims are coded (or all is bf16). Rows of 576 dims are bf16, or
// coded up to dim 512 at least; elements behind dim 512 have no stored scale.
template <int kDims>
inline constexpr bool kFirstAreCoded = kDims > kHeadDimV;

template <Format kFormat, bool kIsCoded, bool kHasScales>
__device__ __forceinline__ Piece load_piece(const RowLayout& l, const uint8_t* row, const uint8_t* scales,
                                            unsigned dim) {
  constexpr unsigned kWords = format_bits(kFormat) / 4;  // words of eight elements
  Piece piece{{}, 1.0f};
  if (row == nullptr) return piece;
  if constexpr (kFormat == Format::kBf16) {
    piece.bytes = load_global<4>(row + dim * 2);
  } else if (!kIsCoded && dim >= l.coded_dims) {
    piece.bytes = load_global<4>(row + (l.bf16_offset + (dim - l.coded_dims) * 2));
  } else {
    const auto codes = load_global<kWords>(row + dim / 8 * kWords * 4);
#pragma unroll
    for (unsigned i = 0; i < kWords; ++i) piece.bytes[i] = codes[i];
    if (kHasScales && l.has_scales) {
      const unsigned tile = dim >> l.tile_bits;
      if constexpr (kFormat == Format::kE2m1)
        piece.scale = e4m3_to_float<Format::kE4m3fn>(*mla_global_pointer(scales + tile));
      else if (l.scale_format == ScaleFormat::kF32)
        piece.scale = bits_float(load_global<1>(scales + 4 * tile)[0]);
      else piece.scale = ue8m0_to_float(*mla_global_pointer(scales + tile));
    }
  }
  return piece;
}

// Decodes a piece to bf16. A code times a power of two is a bf16, and so is e2m1 times any e4m3. Only if a
// lane of the wave has another scale, or a NaN, are products rounded.
template <Format kFormat>
__device__ __forceinline__ Words<4> decode_piece(const Piece& piece, bool is_coded) {
  if constexpr (kFormat == Format::kBf16) {
    return piece.bytes;
  } else {
    if (!is_coded) return piece.bytes;
    Words<format_bits(kFormat) / 4> codes;
#pragma unroll
    for (int i = 0; i < format_bits(kFormat) / 4; ++i) codes[i] = piece.bytes[i];
    constexpr bool kIsE2m1 = kFormat == Format::kE2m1;
    constexpr uint32_t kMantissa = (1u << 23) - 1, kLargest = 253u << 23;  // 2^126
    const uint32_t scale = float_bits(piece.scale);
    bool is_exact = kIsE2m1 || ((scale & kMantissa) == 0 && scale <= kLargest);
    if constexpr (kAreHalved<kFormat>)
      is_exact &= ((nan_signs(codes[0]) | nan_signs(codes[1])) & kSigns) == 0;
    Words<4> decoded;
    if (kIsE2m1 || mla_wave_ballot(!is_exact) == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t e4m3 =
            kIsE2m1 ? e2m1x4_to_e4m3(codes[0] >> (16 * i) & 0xffffu) : codes[kIsE2m1 ? 0 : i];
        constexpr Format kCodes = kIsE2m1 ? Format::kE4m3fn : kFormat;
        const Float4 x = e4m3x4_times<kCodes>(e4m3, kIsE2m1 ? kE2m1Unit * piece.scale : piece.scale);
        decoded[2 * i] = pack_exact<Dtype::kBf16>(x.x[0], x.x[1]);
        decoded[2 * i + 1] = pack_exact<Dtype::kBf16>(x.x[2], x.x[3]);
      }
    } else {
      decoded = decode8<kFormat>(codes, piece.scale);
    }
    return decoded;
  }
}

// Gathers the keys of one split and their rows, in order of rank. A wave has kRowsPerWave rows of each block;
// lane i looks up row i % kRowsPerWave. A lane has 8 elements of the first 512 of each row. What is left of
// the wave's rows is one more piece of its first lanes.
template <Format kFirst, Format kExtra, int kDims>
class Gather {
  // Rows of both e4m3 encodings are loaded alike; only what a byte means differs.
  static constexpr bool kAlike = format_bits(kFirst) == format_bits(kExtra);
  static constexpr bool kHasRest = kDims > kHeadDimV;
  static constexpr int kRestPieces = (kDims - kHeadDimV) / 8;  // pieces of a row behind dim 512
  static_assert(kWaveSize * 8 == kHeadDimV && kRestPieces * kRowsPerWave <= kWaveSize);

 public:
  // A lane's pieces of a block. They are an object of their own: until loops are unrolled, clang keeps arrays
  // in memory, with all that lies next to them or that they refer to.
  struct Pieces {
    uint32_t is_other;  // bit i: the wave's row i has the second format
    Piece piece[kRowsPerWave + kHasRest];
  };

  __device__ __forceinline__ Gather(const Args& args, const Keys& keys,
                                    const ValidKeys<MapInShared>& valid_keys, int first, int end)
      : args_(args), source_(args.portable.p, keys), valid_keys_(valid_keys), next_(first), end_(end) {}

  // Loads the rows that the last call looked up, none in the first; looks up those of the next block.
  __device__ __forceinline__ void start(Pieces& pieces) {
    const uint8_t *own_row = nullptr, *own_scales = nullptr;  // null: zeros, and nothing is read
    // Scopes are not indexed: parameters would have to lie in memory for that.
    const auto locate = [&](const KvScope& s, const RowLayout& l, const Divider& page_size) {
      const auto slot = static_cast<uint32_t>(key_.slot);
      const uint32_t page = page_size.word(slot), row = slot - page * static_cast<uint32_t>(s.page_size);
      const uint8_t* const at = s.kv_cache + page * s.kv_cache_stride_page;
      own_row = at + uint64_t{row} * l.token_stride;
      own_scales = l.scales(at, row, s.page_size);
    };
    if (is_key_ && key_.scope == 0) locate(args_.portable.p.scopes[0], args_.rows[0], args_.page_size[0]);
    if (is_key_ && key_.scope == 1) locate(args_.portable.p.scopes[1], args_.rows[1], args_.page_size[1]);
    const int lane = this_lane();
    if constexpr (kFirst != kExtra) {
      const bool extra_is_other = !kAlike || args_.is_mixed;
      pieces.is_other = static_cast<uint32_t>(mla_wave_ballot(is_key_ && key_.scope == 1 && extra_is_other));
    }
#pragma unroll
    for (int i = 0; i < kRowsPerWave; ++i) {
      pieces.piece[i] = load(uniform_broadcast(own_row, i), uniform_broadcast(own_scales, i),
                             kFirst != kExtra && (pieces.is_other >> i & 1), lane * 8);
    }
    if constexpr (kHasRest) {
      const int i = lane / kRestPieces % kRowsPerWave;
      const uint8_t* const row = broadcast(own_row, i);
      const bool mine = lane < kRowsPerWave * kRestPieces;
      pieces.piece[kRowsPerWave] =
          load_piece<kFirst, false, false>(args_.rows[0], mine ? row : nullptr, nullptr, rest_dim(lane));
    }
    look_up();
  }

  // Writes the rows that start() has loaded to shared memory, as bf16 latents.
  template <class Smem>
  __device__ __forceinline__ void finish(Smem& smem, const Pieces& pieces) const {
    const int lane = this_lane(), first_row = threadIdx.x / kWaveSize * kRowsPerWave;
    uint32_t is_other = 0;  // in a scalar register again: the whole wave branches
    if constexpr (kFirst != kExtra) is_other = mla_read_uniform_lane(pieces.is_other, 0);
#pragma unroll
    for (int i = 0; i < kRowsPerWave; ++i) {
      store(smem.latent[first_row + i] + lane * 8,
            decode(pieces.piece[i], is_other >> i & 1, kFirstAreCoded<kDims>, lane * 8));
    }
    if constexpr (kHasRest) {
      // Either all of the rest is coded, or none.
      const Words<4> rest =
          decode_piece<kFirst>(pieces.piece[kRowsPerWave], args_.rows[0].coded_dims > kHeadDimV);
      if (lane < kRowsPerWave * kRestPieces)
        store(smem.latent[first_row + lane / kRestPieces] + rest_dim(lane), rest);
    }
  }

 private:
  // Opaque: the compiler would keep all that follows from the lane in registers from block to block.
  static __device__ __forceinline__ int this_lane() { return mla_opaque(wave_lane()); }
  static __device__ __forceinline__ unsigned rest_dim(int lane) {
    return kHeadDimV + lane % max(kRestPieces, 1) * 8;
  }

  __device__ __forceinline__ Piece load(const uint8_t* row, const uint8_t* scales, bool is_other,
                                        unsigned dim) const {
    if (!kAlike && is_other)
      return load_piece<kExtra, kFirstAreCoded<kDims>, true>(args_.rows[1], row, scales, dim);
    return load_piece<kFirst, kFirstAreCoded<kDims>, true>(args_.rows[0], row, scales, dim);
  }
  __device__ __forceinline__ Words<4> decode(const Piece& piece, bool is_other, bool is_coded,
                                             unsigned dim) const {
    if (kFirst != kExtra && is_other)
      return decode_piece<kExtra>(piece, is_coded || dim < args_.rows[1].coded_dims);
    return decode_piece<kFirst>(piece, is_coded || dim < args_.rows[0].coded_dims);
  }
  // Rows of latents are multiples of 8 bytes apart.
  static __device__ __forceinline__ void store(uint16_t* to, const Words<4>& x) {
    auto* const halves = reinterpret_cast<Words<2>*>(to);
    halves[0] = {x[0], x[1]};
    halves[1] = {x[2], x[3]};
  }

  __device__ __forceinline__ void look_up() {
    const int wave = threadIdx.x / kWaveSize, lane = wave_lane();
    const int rank = next_ + wave * kRowsPerWave + lane % kRowsPerWave;
    is_key_ = rank < end_;
    key_ = valid_keys_.find(source_, is_key_ ? rank : -1);
    next_ += kBlockKeys;
  }

  const Args& args_;
  const KeySource source_;
  const ValidKeys<MapInShared>& valid_keys_;
  int next_, end_;
  bool is_key_ = false;
  KeySource::Key key_;
};

}  // namespace mla_fp8::gpu::cdna
