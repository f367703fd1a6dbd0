// Memory instructions: scalar loads, LDS, global and FLAT. They take effect at once; that their results are
// not used before s_waitcnt is what Wave::touch checks.
#include <algorithm>
#include <cstring>

#include "emulator/machine/lanes.h"

namespace emulator {
namespace {

template <class F>
void each_lane(const Wave& w, F f) {
  for (u64 rest = w.exec(); rest; rest &= rest - 1) f(std::countr_zero(rest));
}

// ---- the range check
std::string hex(u64 x) {
  char text[20];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}
void check_range(Wave& w, u64 address, size_t bytes, const char* what) {
  if (w.last_range.has(address, bytes)) return;
  const Allocations::Range* range = w.group->memory->after(address);
  if (range && range->has(address, bytes)) {
    w.last_range = *range;
    return;
  }
  std::string where = "nothing is allocated";
  if (const Allocations::Range* near = w.group->memory->nearest(address)) {
    const u64 size = near->end - near->begin;
    where = address < near->begin ? std::to_string(near->begin - address) + " bytes before"
                                  : std::to_string(address + bytes - near->end) + " bytes beyond";
    where += " an allocation of " + std::to_string(size);
  }
  w.fault(std::string(what) + " " + std::to_string(bytes) + " bytes at " + hex(address) + ": " + where);
}

// ---- scalar loads
template <int kWords>
void load_scalar(Wave& w, I i) {
  const u64 address = (w.scalar64(i, i.src[0]) + static_cast<u64>(static_cast<int64_t>(i.offset))) & ~3ull;
  check_range(w, address, 4 * kWords, "reads");
  u32 words[kWords];
  std::memcpy(words, reinterpret_cast<const void*>(address), sizeof words);
  for (int k = 0; k < kWords; ++k) w.set_scalar(i.sdst + k, words[k]);
  w.issue(w.lgkm, {Pending::kScalar, false, i.sdst, kWords});
}

// ---- LDS
// One lane's access: within the workgroup's LDS, aligned, and not what another wave touches between the same
// two barriers, unless both read.
[[noreturn]] void refuse_lds(Wave& w, u32 address, u32 bytes, bool writes) {
  const Workgroup& group = *w.group;
  const std::string at = " LDS at " + std::to_string(address);
  if (uint64_t{address} + bytes > group.lds.size())
    w.fault("touches" + at + ", of which its kernel has " + std::to_string(group.lds.size()) + " bytes");
  if (address % bytes) w.fault("touches" + at + ", which is not aligned");
  const auto me = static_cast<uint8_t>(w.id + 1);
  for (u32 k = 0;; ++k) {
    const uint8_t wrote = group.shadow.writer[address + k], read = group.shadow.reader[address + k];
    const std::string byte = " LDS at " + std::to_string(address + k);
    if (wrote != 0 && wrote != me)
      w.fault((writes ? "writes" : "reads") + byte + ", which wave " + std::to_string(wrote - 1) +
              " wrote: no barrier is between them");
    if (writes && read != 0 && read != me)
      w.fault("writes" + byte + ", which " +
              (read == LdsShadow::kSeveral ? "others" : "wave " + std::to_string(read - 1)) +
              " read: no barrier is between them");
  }
}
template <bool kWrites, u32 kBytes>
void access_lds(Wave& w, u32 address) {
  Workgroup& group = *w.group;
  if (uint64_t{address} + kBytes > group.lds.size() || address % kBytes)
    refuse_lds(w, address, kBytes, kWrites);
  const auto me = static_cast<uint8_t>(w.id + 1);
  uint8_t *writer = &group.shadow.writer[address], *reader = &group.shadow.reader[address];
  const auto others = [me](const uint8_t* who) {  // whether any byte is another wave's
    uint8_t any = 0;
    for (u32 k = 0; k < kBytes; ++k) any |= static_cast<uint8_t>(who[k] != 0 && who[k] != me);
    return any != 0;
  };
  if (others(writer) || (kWrites && others(reader))) refuse_lds(w, address, kBytes, kWrites);
  if (kWrites) std::memset(writer, me, kBytes);
  else
    for (u32 k = 0; k < kBytes; ++k) reader[k] = reader[k] == 0 || reader[k] == me ? me : LdsShadow::kSeveral;
}

template <int kBytes>
void read_lds_at(Wave& w, int dst, const u32* base, u32 offset) {
  constexpr int kRegisters = (kBytes + 3) / 4;
  for (int r = 0; r < kRegisters; ++r) w.touch_for_load(dst + r, w.lgkm, Pending::kLds);
  u32 addresses[kLanes];  // the destination may be the address
  std::memcpy(addresses, base, sizeof addresses);
  each_lane(w, [&](int lane) {
    const u32 address = addresses[lane] + offset;
    access_lds<false, kBytes>(w, address);
    u32 words[kRegisters] = {};
    std::memcpy(words, &w.group->lds[address], kBytes);
    for (int r = 0; r < kRegisters; ++r) w.v[dst + r][lane] = words[r];
  });
}
template <int kBytes>
void write_lds_at(Wave& w, int data, const u32* base, u32 offset) {
  constexpr int kRegisters = (kBytes + 3) / 4;
  for (int r = 0; r < kRegisters; ++r) w.touch(data + r, "reads");
  each_lane(w, [&](int lane) {
    const u32 address = base[lane] + offset;
    access_lds<true, kBytes>(w, address);
    u32 words[kRegisters];
    for (int r = 0; r < kRegisters; ++r) words[r] = w.v[data + r][lane];
    std::memcpy(&w.group->lds[address], words, kBytes);
  });
}

template <int kBytes>
void read_lds(Wave& w, I i) {
  read_lds_at<kBytes>(w, i.dst, w.source(i, 0), static_cast<u32>(i.offset));
  w.issue(w.lgkm, {Pending::kLds, false, i.dst, (kBytes + 3) / 4});
}
void read_lds_i8(Wave& w, I i) {
  read_lds_at<1>(w, i.dst, w.source(i, 0), static_cast<u32>(i.offset));
  each_lane(w, [&](int lane) {
    u32& x = w.v[i.dst][lane];
    x = static_cast<u32>(static_cast<int8_t>(x));
  });
  w.issue(w.lgkm, {Pending::kLds, false, i.dst, 1});
}
template <int kBytes>
void write_lds(Wave& w, I i) {
  write_lds_at<kBytes>(w, i.src[1] - kFirstVgpr, w.source(i, 0), static_cast<u32>(i.offset));
  w.issue(w.lgkm, {Pending::kLds, true, 0, 0});
}
// Two addresses: offsets in units of the element, or of 64 elements.
template <int kBytes, int kUnit = kBytes>
void read_lds_twice(Wave& w, I i) {
  u32 base[kLanes];
  std::memcpy(base, w.source(i, 0), sizeof base);
  for (int half = 0; half < 2; ++half)
    read_lds_at<kBytes>(w, i.dst + half * kBytes / 4, base, i.offsets[half] * static_cast<u32>(kUnit));
  w.issue(w.lgkm, {Pending::kLds, false, i.dst, kBytes / 2});
}
template <int kBytes, int kUnit = kBytes>
void write_lds_twice(Wave& w, I i) {
  for (int half = 0; half < 2; ++half)
    write_lds_at<kBytes>(w, i.src[1 + half] - kFirstVgpr, w.source(i, 0),
                         i.offsets[half] * static_cast<u32>(kUnit));
  w.issue(w.lgkm, {Pending::kLds, true, 0, 0});
}
// Each lane's value of another lane, by its number times four. One that exec leaves out has none to give.
void permute_lanes(Wave& w, I i) {
  const u32 *from = w.source(i, 0), *data = w.source(i, 1);
  alignas(64) u32 result[kLanes] = {};
  each_lane(w, [&](int l) {
    const u32 lane = (from[l] + static_cast<u32>(i.offset)) / 4 % kLanes;
    if (!w.active[lane]) w.fault("reads lane " + std::to_string(lane) + ", which is not active");
    result[l] = data[lane];
  });
  w.write(i, result);
  w.issue(w.lgkm, {Pending::kLds, false, i.dst, 1});
}

// ---- global memory, and FLAT: global or LDS, as each lane's address says
struct Addresses {
  u64 of[kLanes];
};
Addresses addresses(Wave& w, I i) {
  Addresses a;
  const u32* low = w.vgpr(i.src[0] - kFirstVgpr, "reads");
  const u64 offset = static_cast<u64>(static_cast<int64_t>(i.offset));
  if (i.saddr >= 0) {
    const u64 base = w.scalar64(i, i.saddr) + offset;
    for (int l = 0; l < kLanes; ++l) a.of[l] = base + low[l];
  } else {
    const u32* high = w.vgpr(i.src[0] - kFirstVgpr + 1, "reads");
    for (int l = 0; l < kLanes; ++l) a.of[l] = (low[l] | u64{high[l]} << 32) + offset;
  }
  return a;
}
void check_global(Wave& w, u64 address, size_t bytes, const char* what) {
  check_range(w, address, bytes, what);
  if (address % std::min<size_t>(bytes, 4))
    w.fault(std::string(what) + " at " + hex(address) + ", which is not aligned");
}
bool is_lds(u64 address) { return address >> 32 == kLdsAperture; }
// A FLAT instruction counts in both counters: its registers wait for both.
template <bool kFlat>
void issue_global(Wave& w, const Pending& p) {
  w.issue(w.vm, p);
  if (kFlat) w.issue(w.lgkm, p);
}

template <int kBytes, bool kFlat = false, bool kSigned = false>
void load(Wave& w, I i) {
  constexpr int kRegisters = (kBytes + 3) / 4;
  const Addresses a = addresses(w, i);
  const auto kind = kFlat ? Pending::kFlat : Pending::kGlobal;
  for (int r = 0; r < kRegisters; ++r) w.touch_for_load(i.dst + r, w.vm, kind);
  each_lane(w, [&](int lane) {
    u32 words[kRegisters] = {};
    if (kFlat && is_lds(a.of[lane])) {
      const auto offset = static_cast<u32>(a.of[lane]);
      access_lds<false, kBytes>(w, offset);
      std::memcpy(words, &w.group->lds[offset], kBytes);
    } else {
      check_global(w, a.of[lane], kBytes, "reads");
      std::memcpy(words, reinterpret_cast<const void*>(a.of[lane]), kBytes);
    }
    if (kSigned) words[0] = static_cast<u32>(as_signed(words[0] << (32 - 8 * kBytes)) >> (32 - 8 * kBytes));
    for (int r = 0; r < kRegisters; ++r) w.v[i.dst + r][lane] = words[r];
  });
  issue_global<kFlat>(w, {kind, false, i.dst, kRegisters});
}
template <int kBytes, bool kFlat = false>
void store(Wave& w, I i) {
  constexpr int kRegisters = (kBytes + 3) / 4;
  const Addresses a = addresses(w, i);
  const int data = i.src[1] - kFirstVgpr;
  for (int r = 0; r < kRegisters; ++r) w.touch(data + r, "reads");
  bool to_lds = false;
  each_lane(w, [&](int lane) {
    u32 words[kRegisters];
    for (int r = 0; r < kRegisters; ++r) words[r] = w.v[data + r][lane];
    if (kFlat && is_lds(a.of[lane])) {
      const auto offset = static_cast<u32>(a.of[lane]);
      access_lds<true, kBytes>(w, offset);
      std::memcpy(&w.group->lds[offset], words, kBytes);
      to_lds = true;
    } else {
      check_global(w, a.of[lane], kBytes, "writes");
      std::memcpy(reinterpret_cast<void*>(a.of[lane]), words, kBytes);
    }
  });
  issue_global<kFlat>(w, {kFlat ? Pending::kFlat : Pending::kGlobal, to_lds, 0, 0});
}
void atomic_add(Wave& w, I i) {
  const Addresses a = addresses(w, i);
  const u32* data = w.source(i, 1);
  if (i.returns) w.touch(i.dst, "writes");
  each_lane(w, [&](int lane) {
    check_global(w, a.of[lane], 4, "adds to");
    const u32 before = __atomic_fetch_add(reinterpret_cast<u32*>(a.of[lane]), data[lane], __ATOMIC_SEQ_CST);
    if (i.returns) w.v[i.dst][lane] = before;
  });
  w.issue(w.vm, {Pending::kGlobal, false, i.dst, static_cast<int16_t>(i.returns)});
}

constexpr Format SM = Format::kSmem, DS = Format::kDs, FL = Format::kFlat, GL = Format::kGlobal;
constexpr Opcode kMemory[] = {
    {SM, 0, "s_load_dword", load_scalar<1>},
    {SM, 1, "s_load_dwordx2", load_scalar<2>},
    {SM, 2, "s_load_dwordx4", load_scalar<4>},
    {SM, 3, "s_load_dwordx8", load_scalar<8>},
    {SM, 4, "s_load_dwordx16", load_scalar<16>},
    {DS, 13, "ds_write_b32", write_lds<4>},
    {DS, 14, "ds_write2_b32", write_lds_twice<4>},
    {DS, 15, "ds_write2st64_b32", write_lds_twice<4, 256>},
    {DS, 30, "ds_write_b8", write_lds<1>},
    {DS, 31, "ds_write_b16", write_lds<2>},
    {DS, 54, "ds_read_b32", read_lds<4>},
    {DS, 55, "ds_read2_b32", read_lds_twice<4>},
    {DS, 56, "ds_read2st64_b32", read_lds_twice<4, 256>},
    {DS, 57, "ds_read_i8", read_lds_i8},
    {DS, 58, "ds_read_u8", read_lds<1>},
    {DS, 60, "ds_read_u16", read_lds<2>},
    {DS, 63, "ds_bpermute_b32", permute_lanes},
    {DS, 77, "ds_write_b64", write_lds<8>},
    {DS, 78, "ds_write2_b64", write_lds_twice<8>},
    {DS, 79, "ds_write2st64_b64", write_lds_twice<8, 512>},
    {DS, 118, "ds_read_b64", read_lds<8>},
    {DS, 119, "ds_read2_b64", read_lds_twice<8>},
    {DS, 120, "ds_read2st64_b64", read_lds_twice<8, 512>},
    {DS, 223, "ds_write_b128", write_lds<16>},
    {DS, 255, "ds_read_b128", read_lds<16>},
    {FL, 16, "flat_load_ubyte", load<1, true>},
    {FL, 18, "flat_load_ushort", load<2, true>},
    {FL, 20, "flat_load_dword", load<4, true>},
    {FL, 21, "flat_load_dwordx2", load<8, true>},
    {FL, 23, "flat_load_dwordx4", load<16, true>},
    {FL, 28, "flat_store_dword", store<4, true>},
    {FL, 29, "flat_store_dwordx2", store<8, true>},
    {FL, 31, "flat_store_dwordx4", store<16, true>},
    {GL, 16, "global_load_ubyte", load<1>},
    {GL, 17, "global_load_sbyte", load<1, false, true>},
    {GL, 18, "global_load_ushort", load<2>},
    {GL, 19, "global_load_sshort", load<2, false, true>},
    {GL, 20, "global_load_dword", load<4>},
    {GL, 21, "global_load_dwordx2", load<8>},
    {GL, 22, "global_load_dwordx3", load<12>},
    {GL, 23, "global_load_dwordx4", load<16>},
    {GL, 24, "global_store_byte", store<1>},
    {GL, 26, "global_store_short", store<2>},
    {GL, 28, "global_store_dword", store<4>},
    {GL, 29, "global_store_dwordx2", store<8>},
    {GL, 30, "global_store_dwordx3", store<12>},
    {GL, 31, "global_store_dwordx4", store<16>},
    {GL, 66, "global_atomic_add", atomic_add},
};

}  // namespace

Table memory_table() { return {kMemory, std::size(kMemory)}; }

}  // namespace emulator
