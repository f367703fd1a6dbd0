// mbarriers, and copies that go on by themselves. With a seed they are made late, in a random order: what
// reads without waiting finds what was there before.
#include <algorithm>
#include <utility>

#include "emulator/ptx/async.h"

namespace emulator::ptx {
namespace {

// ---- mbarrier: eight bytes of shared memory -------------------------------------------------------------

struct Barrier {
  uint64_t pending : 20, expected : 20, phase : 1;
  int64_t bytes : 23;  // that have been expected and have not come
};
static_assert(sizeof(Barrier) == 8);

Barrier read(const char* at) {
  Barrier b;
  std::memcpy(&b, at, sizeof b);
  return b;
}
// What arrived may have been the last of a phase.
void update(Cluster& c, char* at, Barrier b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1, b.pending = b.expected;
    if (c.races) c.races->end_phase(at);
  }
  std::memcpy(at, &b, sizeof b);
}
char* barrier_at(Warp& w, uint32_t address) {
  if (address % 8) w.fail("an mbarrier that does not lie at a multiple of 8");
  char* at = at_shared(w, address, sizeof(Barrier));
  const Barrier b = read(at);
  if (b.expected == 0 || b.pending > b.expected) w.fail("no mbarrier has been made where one is used");
  return at;
}
void arrive_at(Warp& w, char* at, int64_t expected_bytes) {
  Barrier b = read(at);
  if (b.pending == 0) w.fail("more arrivals at an mbarrier than its phase counts");
  --b.pending;
  b.bytes += expected_bytes;
  update(*w.cta->cluster, at, b);
}
// An arrival of the warp itself: what it knows goes with it.
void arrive_with_all(Warp& w, char* at, int64_t expected_bytes) {
  if (Races* races = w.cta->cluster->races.get()) races->arrive(w, at);
  arrive_at(w, at, expected_bytes);
}
// Of the first `copies` that the warp has issued.
void complete_bytes(Warp& w, char* at, int64_t bytes, uint32_t copies) {
  Barrier b = read(at);
  b.bytes -= bytes;
  if (Races* races = w.cta->cluster->races.get()) races->arrive_copies(w, copies, at);
  update(*w.cta->cluster, at, b);
}
uint32_t copies_of(const Warp& w) {
  const Races* races = w.cta->cluster->races.get();
  return races ? races->copies(w) : 0;
}

void make(Warp& w, const Instruction& i) {
  const uint64_t *a = w.operand(i, 0), *count = w.operand(i, 1);
  each_lane(w.active, [&](int l) {
    char* at =
        at_shared(w, static_cast<uint32_t>(a[l] + static_cast<uint64_t>(i.offset[0])), sizeof(Barrier));
    const uint64_t n = count[l] & 0xfffff;
    if (n == 0) w.fail("an mbarrier of no arrivals");
    const Barrier b{n, n, 0, 0};
    std::memcpy(at, &b, sizeof b);
    if (w.cta->cluster->races) w.cta->cluster->races->make(at);
  });
}
void arrive(Warp& w, const Instruction& i) {  // _, [a] (, bytes)
  const uint64_t *a = w.operand(i, 1), *bytes = i.num_regs > 2 ? w.operand(i, 2) : nullptr;
  each_lane(w.active, [&](int l) {
    arrive_with_all(w, barrier_at(w, static_cast<uint32_t>(a[l] + static_cast<uint64_t>(i.offset[0]))),
                    bytes ? static_cast<int64_t>(static_cast<uint32_t>(bytes[l])) : 0);
  });
}
// p, [a], parity. try_wait: lanes that would all have to ask again wait here.
void test(Warp& w, const Instruction& i) {
  uint64_t* p = w.result(i);
  const uint64_t *a = w.operand(i, 1), *parity = w.operand(i, 2);
  bool any = false;
  each_lane(w.active, [&](int l) {
    const char* at = barrier_at(w, static_cast<uint32_t>(a[l] + static_cast<uint64_t>(i.offset[0])));
    p[l] = read(at).phase != (parity[l] & 1);
    any |= p[l] != 0;
    if (p[l] && w.cta->cluster->races) w.cta->cluster->races->wait(w, at);
  });
  if (!any && i.extra) w.wait(Group::kMbarrier);
}

// ---- cp.async -------------------------------------------------------------------------------------------

void make_copy(const Warp::Copy& c) {
  std::memcpy(c.to, c.from, c.bytes);
  std::memset(c.to + c.bytes, 0, c.zeros);
}
void copy(Warp& w, const Instruction& i) {  // [to], [from], bytes (, bytes to read)
  const uint64_t *to = w.operand(i, 0), *from = w.operand(i, 1), *bytes = w.operand(i, 2),
                 *read = i.num_regs > 3 ? w.operand(i, 3) : bytes;
  each_lane(w.active, [&](int l) {
    const auto size = static_cast<uint32_t>(bytes[l]), reads = std::min(static_cast<uint32_t>(read[l]), size);
    const uint32_t address = static_cast<uint32_t>(to[l] + static_cast<uint64_t>(i.offset[0]));
    const uint64_t source = from[l] + static_cast<uint64_t>(i.offset[1]);
    if (address % size || (reads > 0 && source % size))
      w.fail("cp.async: an address that is no multiple of the size");
    Warp::Copy c{to_shared(w, address, size, false), nullptr, reads, size - reads};
    note_write(w, address, size, Races::How::kCopy);
    static const char nothing = 0;
    c.from = reads > 0 ? at_global(w, source, reads) : &nothing;
    if (w.launch->seed == 0) make_copy(c);
    else w.copies[l].push_back(c);
  });
}
void finish_copies(Warp& w, const Instruction&) {
  each_lane(w.active, [&](int l) { w.finish_copies(l); });
}
void arrive_after_copies(Warp& w, const Instruction& i) {
  const uint64_t* a = w.operand(i, 0);
  each_lane(w.active, [&](int l) {
    char* at = barrier_at(w, static_cast<uint32_t>(a[l] + static_cast<uint64_t>(i.offset[0])));
    Races* const races = w.cta->cluster->races.get();
    w.cta->cluster->issue([&w, at, races, copies = std::exchange(w.copies[l], {}), number = copies_of(w),
                           heard = races ? races->heard(w) : std::vector<uint32_t>{}] {
      for (const Warp::Copy& c : copies) make_copy(c);
      if (races) races->arrive_copies(w, number, heard, at);
      arrive_at(w, at, 0);
    });
  });
}

// ---- the copy engine ------------------------------------------------------------------------------------

// [to], [from], bytes, [mbarrier]; extra: from shared memory.
void bulk_copy(Warp& w, const Instruction& i) {
  const uint64_t *to = w.operand(i, 0), *from = w.operand(i, 1), *bytes = w.operand(i, 2),
                 *bar = w.operand(i, 3);
  each_lane(w.active, [&](int l) {
    const auto size = static_cast<uint32_t>(bytes[l]);
    if (to[l] % 16 || from[l] % 16 || size % 16) w.fail("cp.async.bulk: no multiple of 16 bytes");
    char* target = to_shared(w, static_cast<uint32_t>(to[l]), size, false);
    const char* source =
        i.extra ? at_shared(w, static_cast<uint32_t>(from[l]), size) : at_global(w, from[l], size);
    char* at = barrier_at(w, static_cast<uint32_t>(bar[l]));
    if (i.extra) note_read(w, static_cast<uint32_t>(from[l]), size);
    note_write(w, static_cast<uint32_t>(to[l]), size, Races::How::kCopy);
    w.cta->cluster->issue([=, &w, number = copies_of(w)] {
      std::memcpy(target, source, size);
      complete_bytes(w, at, size, number);
    });
  });
}

// [to], [map, {x, y, z}], [mbarrier]: a box of 128 bytes a row, swizzled.
void tensor_copy(Warp& w, const Instruction& i) {
  const uint64_t *to = w.operand(i, 0), *map_at = w.operand(i, 1), *bar = w.operand(i, 5);
  each_lane(w.active, [&](int l) {
    TensorMap map;
    std::memcpy(&map, reinterpret_cast<const void*>(map_at[l]), sizeof map);
    const auto coordinate = [&](int k) { return get<int32_t>(w.operand(i, 2 + k)[l]); };
    const int64_t x = coordinate(0), y = coordinate(1), z = coordinate(2);
    if (map.magic != TensorMap::kMagic) w.fail("no tensor map");
    if (to[l] % 1024) w.fail("a swizzled box that does not begin at a multiple of 1024");
    const uint32_t size = TensorMap::kRowBytes * map.box_rows;
    char* target = to_shared(w, static_cast<uint32_t>(to[l]), size, false);
    char* at = barrier_at(w, static_cast<uint32_t>(bar[l]));
    struct Chunk {
      char* to;
      const char* from;  // null: zeros
    };
    std::vector<Chunk> chunks;
    for (uint32_t row = 0; row < map.box_rows; ++row)
      for (uint32_t c = 0; c < TensorMap::kRowBytes / 16; ++c) {
        const int64_t byte = x + 16 * int64_t{c};
        const bool is_there = byte >= 0 && byte + 16 <= int64_t(map.row_bytes) && y + row >= 0 &&
                              y + row < int64_t(map.rows) && z >= 0 && z < int64_t(map.planes);
        const uint64_t source = map.base + static_cast<uint64_t>(byte) +
                                static_cast<uint64_t>(y + row) * map.row_stride +
                                static_cast<uint64_t>(z) * map.plane_stride;
        chunks.push_back({target + row * TensorMap::kRowBytes + (c ^ row % 8) * 16,
                          is_there ? at_global(w, source, 16) : nullptr});
      }
    note_write(w, static_cast<uint32_t>(to[l]), size, Races::How::kCopy);
    w.cta->cluster->issue([=, &w, number = copies_of(w)] {
      for (const Chunk& c : chunks)
        if (c.from) std::memcpy(c.to, c.from, 16);
        else std::memset(c.to, 0, 16);
      complete_bytes(w, at, size, number);
    });
  });
}

void nothing(Warp&, const Instruction&) {}

}  // namespace

std::string describe_wait(Warp& w) {
  const Instruction& i = w.launch->kernel->code[w.group().pc];
  if (!i.opcode->starts_with("mbarrier")) return "";
  const int lane = std::countr_zero(w.group().lanes);
  const auto address = static_cast<uint32_t>(w.operand(i, 1)[lane] + static_cast<uint64_t>(i.offset[0]));
  const Barrier b = read(at_shared(w, address, sizeof(Barrier)));
  return " at " + std::to_string(address) + ": phase " + std::to_string(b.phase) + " lacks " +
         std::to_string(b.pending) + " of " + std::to_string(b.expected) + " arrivals and " +
         std::to_string(b.bytes) + " bytes";
}

void Warp::finish_copies(int lane) {
  for (const Copy& c : copies[lane]) make_copy(c);
  copies[lane].clear();
  if (cta->cluster->races) cta->cluster->races->wait_for_copies(*this);
}

Handler find_async(const Opcode& opcode, const Operands&, Instruction& i) {
  if (opcode[0] == "mbarrier") {
    if (opcode[1] == "init") return make;
    if (opcode[1] == "arrive") return arrive;
    if ((opcode[1] == "try_wait" || opcode[1] == "test_wait") && has(opcode, "parity")) {
      i.extra = opcode[1] == "try_wait";
      return test;
    }
  }
  if (opcode[0] != "cp" || opcode[1] != "async") return nullptr;
  if (opcode[2] == "bulk") {
    if (opcode[3] == "prefetch") return nothing;
    if (opcode[3] == "tensor" && opcode[4] == "3d" && has(opcode, "tile")) return tensor_copy;
    i.extra = has(opcode, "shared::cta");
    return opcode[3] == "shared::cluster" ? bulk_copy : nullptr;
  }
  if (opcode[2] == "mbarrier") return arrive_after_copies;
  if (opcode[2] == "commit_group") return nothing;  // whoever waits for a group waits for all
  if (opcode[2] == "wait_all" || opcode[2] == "wait_group") return finish_copies;
  return copy;
}

}  // namespace emulator::ptx
