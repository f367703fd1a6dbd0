#pragma once
// The gather of two CTAs with 64 heads each of one query, over FP8 pages. Each converts 32 keys of every
// block to bf16 in its own shared memory, and copies them to the other's. To convert all 64 would take longer
// than the products. Over two layouts each lane knows its key's, whose elements are exact in bf16.
//
// A warp has eight keys, a lane 16 dims of one key in each panel. An index is loaded two blocks ahead. The
// bytes of its row are loaded one block ahead, to where the codes of this block lay: registers bound what can
// be under way. All these loads share a scoreboard, so they are waited for once, where a block begins. So
// invalid keys keep their places: leaving them out spilled registers, and each load of a spilled register
// waits for all others (docs/notebook/kernels/bf16_tiles.md).
#include <type_traits>

#include "cuda/sparse_attention/sm90/bf16_tiles/gather.cuh"

namespace mla_fp8::gpu {

__device__ const uint4 kZeroRow[576 / 16] = {};

template <class C>
class PairGather : TileGather<C> {
 public:
  __device__ PairGather(const TileParams& params, TileSmem<C> smem, int thread)
      : Base(params, smem, thread),
        rank_(blockIdx.x % 2),
        eighth_(lane_ % 8),
        quarter_(lane_ / 8),
        at_((rank_ * 4 + warp_) * C::kEightKeysBytes + eighth_ * 128),
        to_peer_(cluster_address(smem.smem, 1 - rank_) - smem.smem) {}

  __device__ void run() {
    Cursor ahead = first_item(blockIdx.x);
    Place next = find(look_up(ahead), found_);
    take(next);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) load(next, panel);
    advance(ahead);
    uint32_t next_found;
    next = find(look_up(ahead), next_found);
    advance(ahead);
    LookUp after = look_up(ahead);
    unsigned num_items = 0, num_blocks[2] = {0, 0};  // so far
    for (int64_t tile = blockIdx.x;; tile += gridDim.x) {
      const TileSource item = RowTiles<C>(params_).source(tile);
      if (!this->fetch_q(item, num_items++)) break;
      for (int block = 0; block < C::num_blocks(item.length); ++block) {
        const int buffer = block % 2, parity = (num_blocks[buffer]++ & 1) ^ 1;
        mbarrier_wait(smem_.empty(buffer, 0), parity);
        if (lane_ == 0) smem_.set_mask(buffer, warp_, found_);
#pragma unroll
        for (int panel = 0; panel < C::kPiecePanels; ++panel) {
          convert(buffer, panel);
          load(next, panel);
        }
        send(buffer, 0);
        advance(ahead);
        const LookUp later = look_up(ahead);
        mbarrier_wait(smem_.empty(buffer, 1), parity);
#pragma unroll
        for (int panel = C::kPiecePanels; panel < C::kPanels; ++panel) {
          convert(buffer, panel);
          load(next, panel);
        }
        take(next);
        found_ = next_found;
        send(buffer, 1);
        next = find(after, next_found);
        after = later;
      }
    }
    cp_async_wait_all();
  }

 private:
  using Base = TileGather<C>;
  using Base::is_window, Base::key_, Base::lane_, Base::params_, Base::smem_, Base::warp_;
  // The layouts of the first cache, and of e2m1 rows in the second.
  static constexpr KvLayout kL = kv_layout(C::kId), kE2m1 = kv_layout(C::kExtraId);
  static constexpr bool kMixed = C::kExtraId != C::kId;
  static constexpr int kFp8Panels = kL.nope_dim / C::kPanelDims, kTilesOfPanel = C::kPanelDims / kL.tile_dim;
  static_assert(kL.scale_format == ScaleFormat::kUe8m0 && kTilesOfPanel >= 1 && kTilesOfPanel <= 2);
  static_assert(kFp8Panels >= C::kPanels - 1 && kL.rope_format == Format::kBf16);
  static_assert(!kMixed || (kE2m1.nope_format == Format::kE2m1 && kE2m1.nope_dim == C::kDims &&
                            kE2m1.scale_format == ScaleFormat::kE4m3 && kE2m1.tile_dim == 16));
  static_assert(sizeof(kZeroRow) >= kL.token_stride());

  // The blocks of all items, in their order.
  struct Cursor {
    TileSource item;
    int block, num_blocks;  // none: the end
  };
  // The first item from `tile` on that has keys.
  __device__ Cursor first_item(int64_t tile) const {
    for (;; tile += gridDim.x) {
      const TileSource item = RowTiles<C>(params_).source(tile);
      const int num_blocks = C::num_blocks(item.length);
      if (num_blocks > 0 || item.num_queries == 0) return {item, 0, num_blocks};
    }
  }
  __device__ void advance(Cursor& c) const {
    if (++c.block >= c.num_blocks) c = first_item(c.item.tile + gridDim.x);
  }

  // The index of this lane's key.
  struct LookUp {
    int entry, scope;
    unsigned position;  // in a window
  };
  __device__ LookUp look_up(const Cursor& c) const {
    const int key = C::first_key(c.block) + key_;
    const bool is_extra = key >= c.item.first_length;
    const int32_t* list = is_extra ? c.item.extra - c.item.first_length : c.item.entries;
    const unsigned position = c.item.first_position + key;
    int64_t i = key;
    bool held = key < c.item.length;
    if (is_window() && !is_extra) {
      i = params_.page_size[0](position);
      held = held && i < params_.p.window.max_pages;
    }
    return {held ? __ldg(list + i) : -1, is_extra, position};
  }
  // The place of the key that this lane converts; `found`: as for set_mask. An invalid key has the bytes of a
  // valid one of the warp's: zero weight times NaN reaches no query that has not got that NaN anyway. Without
  // a valid one it has zeros.
  struct Place {
    const uint8_t* row;  // this lane's dims of the first panel
    const uint8_t* scales;
    bool e2m1;
  };
  __device__ Place find(const LookUp& x, uint32_t& found) const {
    constexpr KvLayout kFirst = kL, kSecond = kE2m1;
    const bool e2m1 = kMixed && x.scope != 0;
    const KvScope& s = params_.p.scopes[x.scope];
    const Divider& page_size = params_.page_size[x.scope];
    const bool in_window = is_window() && x.scope == 0;
    const int64_t slot = in_window ? static_cast<int64_t>(x.position) : max(x.entry, 0);
    const int64_t quotient = page_size(slot), page = in_window ? x.entry : quotient;
    const int row = static_cast<int>(slot - quotient * page_size.divisor());
    const bool valid = x.entry >= 0 && page * s.page_size + row < s.num_slots;
    found = __ballot_sync(kFullWarp, valid);
    const uint8_t* base = s.kv_cache + page * s.kv_cache_stride_page;
    const uint32_t mine = found >> (rank_ * 8) & 0xff;  // lanes that look up this CTA's keys
    const int from = mine >> eighth_ & 1 ? eighth_ : __ffs(mine) - 1;
    const int64_t in_page = e2m1 ? kSecond.token_offset(row) : kFirst.token_offset(row);
    const int64_t scales =
        e2m1 ? kSecond.scale_offset(row, s.page_size) : kFirst.scale_offset(row, s.page_size);
    const int lane = rank_ * 8 + max(from, 0);  // the lane that has found it
    const bool is_e2m1 = kMixed && (__ballot_sync(kFullWarp, e2m1) >> lane & 1);
    const auto at = reinterpret_cast<const uint8_t*>(
        __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(base + in_page), lane));
    const uint32_t to_scales = __shfl_sync(kFullWarp, static_cast<uint32_t>(scales - in_page), lane);
    const auto zeros = reinterpret_cast<const uint8_t*>(kZeroRow);
    if (from < 0) return {zeros, zeros, is_e2m1};
    // The row is loaded half a block later or more.
    if (quarter_ == 0) bulk_prefetch_l2(at, is_e2m1 ? kSecond.token_stride() : kFirst.token_stride());
    if (quarter_ == 1) prefetch_l2(at + to_scales);
    return {at + quarter_ * (is_e2m1 ? 8 : 16), at + to_scales, is_e2m1};
  }

  __device__ static uint4 load_16(const uint8_t* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
  // Makes the key whose codes have been loaded the one to convert.
  __device__ void take(const Place& at) {
    scales_ = __ldg(reinterpret_cast<const Scales*>(at.scales));
    e2m1_ = at.e2m1;
  }
  // Loads a lane's dims of a panel: 16 e4m3, two chunks of 8 bf16, or 16 e2m1 with the word of their scale.
  __device__ void load(const Place& at, int panel) {
    if (kMixed && at.e2m1) {
      uint4& x = panel < kFp8Panels ? codes_[panel] : rope_[0];
      const uint2 codes = __ldg(reinterpret_cast<const uint2*>(at.row + panel * (C::kPanelDims / 2)));
      x.x = codes.x, x.y = codes.y;
      x.z = __ldg(reinterpret_cast<const uint32_t*>(at.scales) + panel);
    } else if (panel < kFp8Panels) {
      codes_[panel] = load_16(at.row + panel * C::kPanelDims);
    } else {
      rope_[0] = load_16(at.row + kL.rope_offset());
      rope_[1] = load_16(at.row + kL.rope_offset() + 64);
    }
  }

  // The scale of a lane's dims of a panel, as two bf16. Products with it are exact, as in dequantize_kv.
  __device__ uint32_t scale(int panel) const {
    const uint32_t words[] = {scales_.x, scales_.y, last_words().x, last_words().y};
    const int first = panel * kTilesOfPanel;
    const int shift = first % 4 * 8 + (kTilesOfPanel == 2 ? quarter_ / 2 * 8 : 0);
    const uint32_t exponent = words[first / 4] >> shift & 0xff;
    return both_bf16(ue8m0_to_float(static_cast<uint8_t>(exponent)));
  }
  __device__ uint2 last_words() const {
    if constexpr (kTilesOfPanel == 2) return {scales_.z, scales_.w};
    else return {};
  }
  __device__ static uint4 decode(uint32_t codes, uint32_t more, uint32_t scale) {
    const Words<2> x = e4m3x4_to_16bit<kL.nope_format, Dtype::kBf16>(codes);
    const Words<2> y = e4m3x4_to_16bit<kL.nope_format, Dtype::kBf16>(more);
    return {mul_bf16x2(x[0], scale), mul_bf16x2(x[1], scale), mul_bf16x2(y[0], scale),
            mul_bf16x2(y[1], scale)};
  }
  // Converts eight e2m1 by tables of both bytes of their magnitudes.
  __device__ static uint4 decode_e2m1(uint32_t codes, uint32_t scale) {
    uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t magnitudes = codes >> 16 * half & 0x7777u;
      const uint32_t lower = __byte_perm(0xc0800000u, 0xc0804000u, magnitudes);
      const uint32_t upper = __byte_perm(0x3f3f3f00u, 0x40404040u, magnitudes) |
                             (__byte_perm(codes << 4, codes, half == 0 ? 0x5140 : 0x7362) & 0x80808080u);
      words[2 * half] = mul_bf16x2(__byte_perm(lower, upper, 0x5140), scale);
      words[2 * half + 1] = mul_bf16x2(__byte_perm(lower, upper, 0x7362), scale);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ void convert(int buffer, int panel) const {
    const uint32_t to = smem_.panel(buffer, panel) + at_;
    const uint32_t chunk = (2 * quarter_ ^ eighth_) * 16;
    if (kMixed && e2m1_) {
      const uint4& x = panel < kFp8Panels ? codes_[panel] : rope_[0];
      const float scale = unpack<Dtype::kF16>(e4m3x2_to_f16(__byte_perm(x.z, 0, 0x4440u + quarter_))).x;
      const uint32_t s = __byte_perm(__float_as_uint(scale), 0, 0x3232);
      store_shared_16(to + chunk, decode_e2m1(x.x, s));
      store_shared_16(to + (chunk ^ 16), decode_e2m1(x.y, s));
    } else if (panel < kFp8Panels) {
      const uint4& x = codes_[panel];
      const uint32_t s = scale(panel);
      store_shared_16(to + chunk, decode(x.x, x.y, s));
      store_shared_16(to + (chunk ^ 16), decode(x.z, x.w, s));
    } else {
      const uint32_t chunk = (quarter_ ^ eighth_) * 16;
      store_shared_16(to + chunk, rope_[0]);
      store_shared_16(to + (chunk ^ 64), rope_[1]);
    }
  }
  // Sends the warp's keys of a piece to the other CTA, whose own come back.
  __device__ void send(int buffer, int piece) const {
    constexpr int kBytes = C::kPiecePanels * C::key_panel_bytes(0);
    const uint32_t full = smem_.full(buffer, piece);
    fence_proxy_async();
    mbarrier_arrive_expect_warp(full, kBytes, lane_);
    if (lane_ == 0) {
      const uint32_t first_key = smem_.panel(buffer, C::first_panel(piece)) + at_;  // lane 0 has it
      bulk_copy_to_cluster(first_key + to_peer_, first_key, kBytes, full + to_peer_);
    }
    __syncwarp();
  }

  const int rank_, eighth_, quarter_;
  const uint32_t at_, to_peer_;        // this lane's key in a panel; from an address to the peer's
  uint4 codes_[kFp8Panels], rope_[2];  // this lane's key
  using Scales = std::conditional_t<kTilesOfPanel == 2, uint4, uint2>;
  Scales scales_;
  bool e2m1_;
  uint32_t found_;
};

}  // namespace mla_fp8::gpu
