// Loads, stores, atomics, and addresses from one space to another. Every access is checked: it lies in memory
// that somebody has allocated, at a multiple of its size.
#include <cstdio>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {
namespace {

std::string hex(uint64_t x) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

// Not inlined: what texts of failures are made by would keep the accesses from being so.
[[noreturn, gnu::noinline]] void refuse_shared(Warp& w, uint32_t address, size_t bytes, const Cta* cta) {
  if (!cta) w.fail("no CTA has the shared address " + hex(address));
  if (cta->warps_left == 0) w.fail("shared memory of a CTA that has ended, " + hex(address));
  w.fail(std::to_string(bytes) + " bytes of shared memory at " + hex(address & ((1u << kClusterShift) - 1)) +
         ", which ends at " + hex(kSharedBase + cta->shared.size()));
}
[[noreturn, gnu::noinline]] void refuse_global(Warp& w, uint64_t address, size_t bytes) {
  const auto* near = w.launch->memory->nearest(address);
  w.fail(std::to_string(bytes) + " bytes at " + hex(address) + " are in no allocation; the nearest one is " +
         (near ? hex(near->begin) + " to " + hex(near->end) : "none"));
}
[[noreturn, gnu::noinline]] void refuse_alignment(Warp& w, uint64_t address, size_t unit) {
  w.fail("an access of " + std::to_string(unit) + " bytes at " + hex(address));
}

}  // namespace

char* at_shared(Warp& w, uint32_t address, size_t bytes) {
  const uint32_t rank = address >> kClusterShift, offset = address & ((1u << kClusterShift) - 1);
  Cta* cta = w.cta;
  if (rank > 0) {
    cta = rank <= cta->cluster->ctas.size() ? &cta->cluster->ctas[rank - 1] : nullptr;
    if (!cta || cta->warps_left == 0) refuse_shared(w, address, bytes, cta);
  }
  if (offset < kSharedBase || offset - kSharedBase + bytes > cta->shared.size())
    refuse_shared(w, address, bytes, cta);
  return cta->shared.data() + (offset - kSharedBase);
}

char* to_shared(Warp& w, uint32_t address, size_t bytes, bool is_store) {
  char* const to = at_shared(w, address, bytes);
  const uint32_t rank = address >> kClusterShift, offset = address & ((1u << kClusterShift) - 1);
  Cta& cta = rank > 0 ? w.cta->cluster->ctas[rank - 1] : *w.cta;
  for (uint32_t at = (offset - kSharedBase) / 16; at <= (offset - kSharedBase + bytes - 1) / 16; ++at) {
    if (cta.readers[at] > 0)
      w.fail("shared memory at " + hex(offset) + " is an operand of a product that nobody has waited for");
    cta.unfenced[at] = is_store && rank == 0 ? static_cast<uint8_t>(w.id + 1) : 0;
  }
  return to;
}

void note_read(Warp& w, uint32_t address, size_t bytes) {
  Cluster& c = *w.cta->cluster;
  const uint32_t rank = address >> kClusterShift, offset = address & ((1u << kClusterShift) - 1);
  if (c.races) c.races->read(w, rank > 0 ? c.ctas[rank - 1] : *w.cta, offset - kSharedBase, bytes);
}
void note_write(Warp& w, uint32_t address, size_t bytes, Races::How how) {
  Cluster& c = *w.cta->cluster;
  const uint32_t rank = address >> kClusterShift, offset = address & ((1u << kClusterShift) - 1);
  if (c.races) c.races->write(w, rank > 0 ? c.ctas[rank - 1] : *w.cta, offset - kSharedBase, bytes, how);
}

char* at_global(Warp& w, uint64_t address, size_t bytes) {
  if (!w.range.has(address, bytes)) {
    const auto* found = w.launch->memory->after(address);
    if (!found || !found->has(address, bytes)) refuse_global(w, address, bytes);
    w.range = *found;
  }
  return reinterpret_cast<char*>(address);
}

char* at_local(Warp& w, int lane, uint64_t address, size_t bytes) {
  const uint32_t size = w.launch->kernel->local_bytes;
  if (address + bytes > size) w.fail("local memory at " + hex(address) + " of " + hex(size));
  return w.local.data() + static_cast<size_t>(lane) * size + address;
}

char* at_generic(Warp& w, int lane, uint64_t address, size_t bytes) {
  if (address & kSharedWindow) return at_shared(w, static_cast<uint32_t>(address), bytes);
  if (address & kLocalWindow) return at_local(w, lane, address & ~kLocalWindow, bytes);
  return at_global(w, address, bytes);
}

namespace {

enum class Space { kGeneric, kGlobal, kShared, kLocal, kParam };

// At a multiple of `unit`, a power of two.
template <Space kSpace, bool kWrites = false>
char* at(Warp& w, int lane, uint64_t address, size_t bytes, size_t unit) {
  if (address & (unit - 1)) refuse_alignment(w, address, unit);
  if (kWrites && (kSpace == Space::kShared || (kSpace == Space::kGeneric && (address & kSharedWindow))))
    return to_shared(w, static_cast<uint32_t>(address), bytes, true);
  if constexpr (kSpace == Space::kGlobal) return at_global(w, address, bytes);
  else if constexpr (kSpace == Space::kShared) return at_shared(w, static_cast<uint32_t>(address), bytes);
  else if constexpr (kSpace == Space::kLocal) return at_local(w, lane, address, bytes);
  else if constexpr (kSpace == Space::kGeneric) return at_generic(w, lane, address, bytes);
  else {
    const auto begin = reinterpret_cast<uint64_t>(w.launch->params);
    if (address < begin || address + bytes > begin + w.launch->kernel->params_bytes)
      w.fail("a parameter that is none");
    return reinterpret_cast<char*>(address);
  }
}

template <Space kSpace>
bool is_shared(uint64_t address) {
  return kSpace == Space::kShared || (kSpace == Space::kGeneric && (address & kSharedWindow));
}

template <Space kSpace, class T, int kCount>
void load(Warp& w, const Instruction& i) {
  constexpr size_t kBytes = sizeof(T) * kCount;
  const uint64_t* base = w.operand(i, kCount);
  uint64_t* d[kCount];
  for (int k = 0; k < kCount; ++k) d[k] = w.result(i, k);
  const bool notes = w.cta->cluster->races != nullptr;
  each_lane(w.active, [&](int l) {
    const uint64_t address = base[l] + static_cast<uint64_t>(i.offset[0]);
    const char* from = at<kSpace>(w, l, address, kBytes, kBytes);
    if (notes && is_shared<kSpace>(address)) note_read(w, static_cast<uint32_t>(address), kBytes);
    T values[kCount];
    std::memcpy(values, from, kBytes);
    for (int k = 0; k < kCount; ++k) d[k][l] = put(values[k]);
  });
}
template <Space kSpace, class T, int kCount>
void store(Warp& w, const Instruction& i) {
  constexpr size_t kBytes = sizeof(T) * kCount;
  const uint64_t *base = w.operand(i, 0), *s[kCount];
  for (int k = 0; k < kCount; ++k) s[k] = w.operand(i, 1 + k);
  const bool notes = w.cta->cluster->races != nullptr;
  each_lane(w.active, [&](int l) {
    const uint64_t address = base[l] + static_cast<uint64_t>(i.offset[0]);
    char* to = at<kSpace, true>(w, l, address, kBytes, kBytes);
    T values[kCount];
    for (int k = 0; k < kCount; ++k) values[k] = get<T>(s[k][l]);
    // Nobody can tell who has written what was there already.
    if (notes && is_shared<kSpace>(address) && std::memcmp(to, values, kBytes) != 0)
      note_write(w, static_cast<uint32_t>(address), kBytes, Races::How::kStore);
    std::memcpy(to, values, kBytes);
  });
}

template <Space kSpace, bool kLoads>
Handler of_type(const std::string& type, int count) {
  const auto choose = [&]<class T>(T) -> Handler {
    if (count == 1) return kLoads ? load<kSpace, T, 1> : store<kSpace, T, 1>;
    if (count == 2) return kLoads ? load<kSpace, T, 2> : store<kSpace, T, 2>;
    if (count == 4) return kLoads ? load<kSpace, T, 4> : store<kSpace, T, 4>;
    return nullptr;
  };
  if (type == "u8" || type == "b8") return choose(uint8_t{});
  if (type == "s8") return choose(int8_t{});
  if (type == "u16" || type == "b16") return choose(uint16_t{});
  if (type == "s16") return choose(int16_t{});
  if (type == "u32" || type == "b32" || type == "f32") return choose(uint32_t{});
  if (type == "s32") return choose(int32_t{});
  if (type == "u64" || type == "b64" || type == "s64" || type == "f64") return choose(uint64_t{});
  return nullptr;
}
template <bool kLoads>
Handler of_space(const Opcode& opcode, int count) {  // of a vector
  const std::string& type = opcode.back();
  if (has(opcode, "global")) return of_type<Space::kGlobal, kLoads>(type, count);
  if (has(opcode, "shared") || has(opcode, "shared::cluster") || has(opcode, "shared::cta"))
    return of_type<Space::kShared, kLoads>(type, count);
  if (has(opcode, "local")) return of_type<Space::kLocal, kLoads>(type, count);
  if (has(opcode, "param")) return of_type<Space::kParam, kLoads>(type, count);
  return of_type<Space::kGeneric, kLoads>(type, count);
}

// Blocks run on several threads: what is global is atomic here, too.
template <Space kSpace, class T, auto kFunction>
void atomic(Warp& w, const Instruction& i) {  // d, [a], b; of red: [a], b
  const bool returns = i.extra;
  const uint64_t* base = w.operand(i, returns);
  const uint64_t* b = w.operand(i, returns + 1);
  each_lane(w.active, [&](int l) {
    const uint64_t address = base[l] + static_cast<uint64_t>(i.offset[0]);
    auto* to = reinterpret_cast<T*>(at<kSpace>(w, l, address, sizeof(T), sizeof(T)));
    if (is_shared<kSpace>(address))
      note_write(w, static_cast<uint32_t>(address), sizeof(T), Races::How::kAtomic);
    T old = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(to, &old, static_cast<T>(kFunction(old, get<T>(b[l]))), false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
    if (returns) w.result(i)[l] = put(old);
  });
}
template <Space kSpace, class T>
void compare_and_swap(Warp& w, const Instruction& i) {  // d, [a], expected, b
  uint64_t* d = w.result(i);
  const uint64_t *base = w.operand(i, 1), *expected = w.operand(i, 2), *b = w.operand(i, 3);
  each_lane(w.active, [&](int l) {
    const uint64_t address = base[l] + static_cast<uint64_t>(i.offset[0]);
    auto* to = reinterpret_cast<T*>(at<kSpace>(w, l, address, sizeof(T), sizeof(T)));
    if (is_shared<kSpace>(address))
      note_write(w, static_cast<uint32_t>(address), sizeof(T), Races::How::kAtomic);
    T old = get<T>(expected[l]);
    __atomic_compare_exchange_n(to, &old, get<T>(b[l]), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    d[l] = put(old);
  });
}
template <Space kSpace>
Handler find_atomic(const Opcode& opcode) {
  const auto of = [&]<class T>(T) -> Handler {
    if (has(opcode, "cas")) return compare_and_swap<kSpace, T>;
    if (has(opcode, "add")) return atomic<kSpace, T, ([](T a, T b) { return static_cast<T>(a + b); })>;
    if (has(opcode, "max")) return atomic<kSpace, T, ([](T a, T b) { return a > b ? a : b; })>;
    if (has(opcode, "min")) return atomic<kSpace, T, ([](T a, T b) { return a < b ? a : b; })>;
    if (has(opcode, "or")) return atomic<kSpace, T, ([](T a, T b) { return static_cast<T>(a | b); })>;
    if (has(opcode, "and")) return atomic<kSpace, T, ([](T a, T b) { return static_cast<T>(a & b); })>;
    if (has(opcode, "exch")) return atomic<kSpace, T, ([](T, T b) { return b; })>;
    return nullptr;
  };
  const std::string& type = opcode.back();
  if (type == "u32" || type == "b32") return of(uint32_t{});
  if (type == "s32") return of(int32_t{});
  if (type == "u64" || type == "b64") return of(uint64_t{});
  if (type == "s64") return of(int64_t{});
  return nullptr;
}

template <uint64_t kSet, uint64_t kClear>
void convert_address(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t* a = w.operand(i, 1);
  each_lane_alone(w.active, [&](int l) { d[l] = (a[l] | kSet) & ~kClear; });
}
void nothing(Warp&, const Instruction&) {}

// mapa: what lies at this shared address in another CTA.
void map_address(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *rank = w.operand(i, 2);
  each_lane(w.active, [&](int l) {
    if (rank[l] >= w.cta->cluster->ctas.size()) w.fail("mapa: no CTA " + std::to_string(rank[l]));
    d[l] = (static_cast<uint32_t>(a[l]) & ((1u << kClusterShift) - 1)) | (rank[l] + 1) << kClusterShift;
  });
}

}  // namespace

Handler find_memory(const Opcode& opcode, const Operands&, Instruction& i) {
  const std::string& what = opcode[0];
  if (what == "ld") return of_space<true>(opcode, i.num_regs - 1);
  if (what == "st") return of_space<false>(opcode, i.num_regs - 1);
  if (what == "atom" || what == "red") {
    i.extra = what == "atom";
    if (has(opcode, "global")) return find_atomic<Space::kGlobal>(opcode);
    if (has(opcode, "shared")) return find_atomic<Space::kShared>(opcode);
    return find_atomic<Space::kGeneric>(opcode);
  }
  if (what == "cvta") {
    const bool from_generic = opcode[1] == "to";
    if (has(opcode, "shared"))
      return from_generic ? convert_address<0, kSharedWindow> : convert_address<kSharedWindow, 0>;
    if (has(opcode, "local"))
      return from_generic ? convert_address<0, kLocalWindow> : convert_address<kLocalWindow, 0>;
    return convert_address<0, 0>;
  }
  if (what == "mapa") return map_address;
  if (what == "prefetch" || what == "prefetchu" || what == "createpolicy") return nothing;
  return nullptr;
}

}  // namespace emulator::ptx
