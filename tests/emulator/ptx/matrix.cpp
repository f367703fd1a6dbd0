// Matrices: ldmatrix, stmatrix, movmatrix, mma, wgmma. A warpgroup's product is done by each warp for its 16
// rows, when it comes by: operands in shared memory must be there then, and stay until the wait.
#include <algorithm>
#include <vector>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {
namespace {

// ---- 8 x 8 elements of 16 bits --------------------------------------------------------------------------
//
// Lanes 8 m to 8 m + 7 have the addresses of matrix m's rows; lane 4 r + c then has elements 2 c and 2 c + 1
// of row r, of the transposed matrix if so wanted.

using Matrix = uint16_t[8][8];

void to_lanes(const Matrix& x, bool transposed, uint64_t* d) {
  uint32_t pairs[kLanes];
  if (transposed)
    for (int l = 0; l < kLanes; ++l) pairs[l] = x[l % 4 * 2][l / 4] | uint32_t{x[l % 4 * 2 + 1][l / 4]} << 16;
  else std::memcpy(pairs, x, sizeof x);
  std::copy(pairs, pairs + kLanes, d);
}
void from_lanes(const uint64_t* s, bool transposed, Matrix& x) {
  for (int l = 0; l < kLanes; ++l)
    for (int h = 0; h < 2; ++h) {
      const int r = l / 4, c = l % 4 * 2 + h;
      (transposed ? x[c][r] : x[r][c]) = static_cast<uint16_t>(s[l] >> (16 * h));
    }
}
void load_matrices(Warp& w, const Instruction& i) {
  const int count = i.num_regs - 1;
  const uint64_t* a = w.operand(i, count);
  for (int m = 0; m < count; ++m) {
    Matrix x;
    for (int r = 0; r < 8; ++r) {
      const auto address = static_cast<uint32_t>(a[8 * m + r] + static_cast<uint64_t>(i.offset[0]));
      if (address % 16) w.fail("ldmatrix: a row at no multiple of 16 bytes");
      std::memcpy(x[r], at_shared(w, address, 16), 16);
      note_read(w, address, 16);
    }
    to_lanes(x, i.extra, w.result(i, m));
  }
}
void store_matrices(Warp& w, const Instruction& i) {
  const int count = i.num_regs - 1;
  const uint64_t* a = w.operand(i, 0);
  for (int m = 0; m < count; ++m) {
    Matrix x;
    from_lanes(w.operand(i, 1 + m), i.extra, x);
    for (int r = 0; r < 8; ++r) {
      const auto address = static_cast<uint32_t>(a[8 * m + r] + static_cast<uint64_t>(i.offset[0]));
      if (address % 16) w.fail("stmatrix: a row at no multiple of 16 bytes");
      std::memcpy(to_shared(w, address, 16, true), x[r], 16);
      note_write(w, address, 16, Races::How::kStore);
    }
  }
}
void transpose_matrix(Warp& w, const Instruction& i) {
  Matrix x;
  from_lanes(w.operand(i, 1), false, x);
  to_lanes(x, true, w.result(i));
}

// ---- products -------------------------------------------------------------------------------------------

enum Element { kF16, kBf16, kE4m3 };
template <Element kElement>
float value(uint64_t bits) {
  if constexpr (kElement == kF16) return from_f16(static_cast<uint16_t>(bits));
  else if constexpr (kElement == kBf16) return from_bf16(static_cast<uint16_t>(bits));
  else return e4m3_to_float(static_cast<uint8_t>(bits));
}
template <Element kElement>
struct Shape {
  static constexpr int kBits = kElement == kE4m3 ? 8 : 16, kPerRegister = 32 / kBits,
                       kDepth = 8 * kPerRegister;
};
constexpr int kMostColumns = 256;  // of a product

// A [16 x kDepth]: registers 0 and 1 are rows g and g + 8 of the first half of k, 2 and 3 of the second.
template <Element kElement>
using A = float[16][Shape<kElement>::kDepth];
template <Element kElement>
void read_a(Warp& w, const Instruction& i, int first, A<kElement>& a) {
  using S = Shape<kElement>;
  for (int k = 0; k < 4; ++k) {
    const uint64_t* r = w.operand(i, first + k);
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < S::kPerRegister; ++e)
        a[l / 4 + k % 2 * 8][k / 2 * S::kDepth / 2 + l % 4 * S::kPerRegister + e] =
            value<kElement>(r[l] >> (S::kBits * e));
  }
}
// B [kDepth x 8 n]: of each eight columns all of k.
using Eight = float __attribute__((vector_size(32)));
template <Element kElement>
using B = Eight[kMostColumns / 8][Shape<kElement>::kDepth];
// D [16 x 8 n] += A B: lane 4 g + t has rows g and g + 8, columns 2 t and 2 t + 1 of each eight.
template <int kDepth>
void multiply(Warp& w, const Instruction& i, int first_c, bool accumulate, const float (&a)[16][kDepth],
              const Eight (*b)[kDepth], int columns) {
  for (int n = 0; n < columns / 8; ++n)
    for (int half = 0; half < 2; ++half) {
      Eight sums[8] = {};  // by row
      for (int k = 0; k < kDepth; ++k)
        for (int r = 0; r < 8; ++r) sums[r] += a[8 * half + r][k] * b[n][k];
      for (int odd = 0; odd < 2; ++odd) {
        const int reg = 4 * n + 2 * half + odd;
        const uint64_t* c = w.operand(i, first_c + reg);
        uint64_t* d = w.result(i, reg);
        for (int l = 0; l < kLanes; ++l)
          d[l] = put((accumulate ? get<float>(c[l]) : 0.0f) + sums[l / 4][l % 4 * 2 + odd]);
      }
    }
}

template <Element kElement>
void mma(Warp& w, const Instruction& i) {  // {d}, {a}, {b}, {c}
  using S = Shape<kElement>;
  A<kElement> a;
  read_a<kElement>(w, i, 4, a);
  Eight b[1][S::kDepth];
  for (int k = 0; k < 2; ++k) {
    const uint64_t* r = w.operand(i, 8 + k);
    for (int l = 0; l < kLanes; ++l)
      for (int e = 0; e < S::kPerRegister; ++e)
        b[0][k * S::kDepth / 2 + l % 4 * S::kPerRegister + e][l / 4] =
            value<kElement>(r[l] >> (S::kBits * e));
  }
  multiply(w, i, 10, true, a, b, 8);
}

// Of an operand in shared memory: where element (row, k) of a matrix lies. Rows are those of A, columns of B.
struct Descriptor {
  uint32_t start, leading, stride;
  bool swizzled;

  explicit Descriptor(Warp& w, uint64_t bits)
      : start((bits & 0x3fff) << 4),
        leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4),
        swizzled(bits >> 62 == 1) {
    if (bits >> 62 > 1 || (bits >> 49 & 7) != 0)
      w.fail("wgmma: a descriptor of a kind that is not known here");
  }
  // `by_rows`: elements of a row are neighbours in k; else those of a k are neighbours in rows.
  uint32_t address(int row, int k, int element_bytes, bool by_rows) const {
    const auto u = [](int x) { return static_cast<uint32_t>(x); };
    const int byte = (by_rows ? k : row) * element_bytes, line = by_rows ? row : k;
    if (!swizzled)  // 8 lines of 16 bytes
      return start + u(line / 8) * stride + u(byte / 16) * leading + u(line % 8 * 16 + byte % 16);
    // 8 lines of 128 bytes, whose chunks of 16 are swizzled by their address.
    const uint32_t plain =
        start + u(line / 8) * stride + u(byte / 128) * leading + u(line % 8 * 128 + byte % 128);
    return plain ^ (plain >> 7 & 7) << 4;
  }
};

template <Element kElement>
void warpgroup_mma(Warp& w, const Instruction& i) {  // {d}, {a} or A, B, p, 1, 1 (, by columns...)
  using S = Shape<kElement>;
  constexpr int kBytes = S::kBits / 8;
  const int columns = i.results * 2;
  if (columns > kMostColumns || columns % 8) w.fail("wgmma: " + std::to_string(columns) + " columns");
  int at = i.results;
  A<kElement> a;
  B<kElement> b;
  InFlight operands{w.id, w.products, {}};
  // `rows` of a matrix from `first` on, 16 bytes at a time: f(row, k, the element there).
  const auto each_element = [&](const Descriptor& d, int first, int rows, bool by_rows, auto f) {
    constexpr int kChunk = 16 / kBytes;
    const int lines = by_rows ? rows : S::kDepth, elements = by_rows ? S::kDepth : rows;
    for (int line = 0; line < lines; ++line)
      for (int from = 0; from < elements; from += kChunk) {
        const uint32_t address = by_rows ? d.address(first + line, from, kBytes, true)
                                         : d.address(first + from, line, kBytes, false);
        const char* bytes = at_shared(w, address, 16);
        const uint32_t chunk = (address - kSharedBase) / 16;
        if (const unsigned writer = w.cta->unfenced[chunk])
          w.fail("wgmma reads what warp " + std::to_string(writer - 1) +
                 " has stored without a proxy fence since");
        operands.chunks.push_back(static_cast<uint16_t>(chunk)), ++w.cta->readers[chunk];
        note_read(w, address, 16);
        for (int e = 0; e < kChunk; ++e) {
          uint16_t bits = 0;
          std::memcpy(&bits, bytes + e * kBytes, kBytes);
          f(by_rows ? line : from + e, by_rows ? from + e : line, value<kElement>(bits));
        }
      }
  };
  const bool a_in_registers = i.extra & 1;
  const int flags = at + (a_in_registers ? 4 : 1) + 4;  // behind p, 1, 1
  const auto flag = [&](int k) { return flags + k < i.num_regs && (w.operand(i, flags + k)[0] & 1) != 0; };
  if (a_in_registers) {
    read_a<kElement>(w, i, at, a);
    at += 4;
  } else {
    const Descriptor d(w, w.operand(i, at++)[0]);
    each_element(d, static_cast<int>(w.id % 4) * 16, 16, !flag(0),
                 [&](int r, int k, float x) { a[r][k] = x; });
  }
  const Descriptor d(w, w.operand(i, at++)[0]);
  each_element(d, 0, columns, !flag(a_in_registers ? 0 : 1),
               [&](int n, int k, float x) { b[n / 8][k][n % 8] = x; });
  w.cta->in_flight.push_back(std::move(operands));
  const bool accumulate = w.operand(i, at++)[0] & 1;
  if (w.operand(i, at)[0] != 1 || w.operand(i, at + 1)[0] != 1) w.fail("wgmma: negated operands");
  multiply(w, i, 0, accumulate, a, b, columns);
}

// Every lane of a warp, of a warpgroup every warp on its own.
template <Handler kHandler>
void aligned(Warp& w, const Instruction& i) {
  if (w.active != w.alive()) return w.wait(Group::kLanesOf);
  if (w.active != ~Mask{0}) w.fail("not all lanes of the warp are here");
  kHandler(w, i);
}
void nothing(Warp&, const Instruction&) {}
void commit_group(Warp& w, const Instruction&) { ++w.products; }
void wait_group(Warp& w, const Instruction& i) {  // until so many are in flight
  const uint64_t most = w.operand(i, 0)[0];
  std::erase_if(w.cta->in_flight, [&](const InFlight& f) {
    const bool is_done = f.warp == w.id && f.group + most < w.products;
    if (is_done)
      for (const uint16_t chunk : f.chunks) --w.cta->readers[chunk];
    return is_done;
  });
}

}  // namespace

Handler find_matrix(const Opcode& opcode, const Operands& operands, Instruction& i) {
  i.extra = has(opcode, "trans");
  if (opcode[0] == "ldmatrix") return has(opcode, "m8n8") ? aligned<load_matrices> : nullptr;
  if (opcode[0] == "stmatrix") return has(opcode, "m8n8") ? aligned<store_matrices> : nullptr;
  if (opcode[0] == "movmatrix") return aligned<transpose_matrix>;
  if (opcode[0] == "mma" && has(opcode, "m16n8k16") && has(opcode, "f32"))
    return has(opcode, "bf16") ? aligned<mma<kBf16>> : aligned<mma<kF16>>;
  if (opcode[0] != "wgmma") return nullptr;
  if (opcode[1] == "commit_group") return aligned<commit_group>;
  if (opcode[1] == "wait_group") return aligned<wait_group>;
  if (opcode[1] == "fence") return aligned<nothing>;
  i.extra = operands[1].kind == Operand::kVector;
  if (has(opcode, "bf16")) return aligned<warpgroup_mma<kBf16>>;
  if (has(opcode, "f16")) return aligned<warpgroup_mma<kF16>>;
  if (has(opcode, "e4m3")) return aligned<warpgroup_mma<kE4m3>>;
  return nullptr;
}

}  // namespace emulator::ptx
