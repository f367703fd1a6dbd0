#include "emulator/ptx/races.h"

#include <algorithm>
#include <cstdlib>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {

bool Races::are_wanted() {
  static const bool wanted = std::getenv("FAKE_CUDA_RACES") != nullptr;
  return wanted;
}

Races::Races(unsigned ctas, unsigned warps_of_cta, size_t shared_bytes)
    : warps_of_cta_(warps_of_cta),
      warps_(ctas * warps_of_cta),
      words_(shared_bytes / 4 + 1),
      clocks_(warps_, Clocks(2 * size_t{warps_}, 0)),
      issued_(warps_, 0),
      writes_(ctas * words_),
      reads_(ctas * words_ * warps_of_cta) {
  for (unsigned w = 0; w < warps_; ++w) clocks_[w][w] = 1;
}

unsigned Races::index(const Warp& w) const { return w.cta->rank * warps_of_cta_ + w.id; }
void Races::learn(Clocks& to, const Clocks& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t k = 0; k < from.size(); ++k) to[k] = std::max(to[k], from[k]);
}
std::string Races::name(uint32_t who) const {
  const uint32_t warp = who % warps_;
  return std::string(who >= warps_ ? "a copy of " : "") + "CTA " + std::to_string(warp / warps_of_cta_) +
         " warp " + std::to_string(warp % warps_of_cta_);
}
void Races::fail(Warp& w, const Cta& of, size_t offset, const char* what, const Access& before, uint32_t who,
                 const char* did) const {
  w.fail(std::string("a race: it ") + what + " shared memory of CTA " + std::to_string(of.rank) + " at " +
         std::to_string(offset + kSharedBase) + ", which " + name(who) + did + " in PTX line " +
         std::to_string(before.line) + "; no barrier orders these");
}

// Of a word those bytes, a bit each, that lie between two offsets.
static uint8_t bytes_between(size_t word, size_t begin, size_t end) {
  uint8_t bits = 0;
  for (size_t byte = 0; byte < 4; ++byte)
    bits |= static_cast<uint8_t>((4 * word + byte >= begin && 4 * word + byte < end) << byte);
  return bits;
}

void Races::read(Warp& w, const Cta& of, size_t offset, size_t bytes) {
  const Clocks& knows = clocks_[index(w)];
  const uint32_t line = w.launch->kernel->code[w.group().pc].line;
  for (size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    const Write& last = writes_[of.rank * words_ + word];
    if (last.clock > knows[last.who] && (last.bytes & bytes_between(word, offset, offset + bytes)))
      fail(w, of, 4 * word, "reads", last, last.who, " has written");
    if (&of == w.cta) reads_[(of.rank * words_ + word) * warps_of_cta_ + w.id] = {knows[index(w)], line};
  }
}

void Races::write(Warp& w, const Cta& of, size_t offset, size_t bytes, How how) {
  const Clocks& knows = clocks_[index(w)];
  const uint32_t line = w.launch->kernel->code[w.group().pc].line;
  const uint32_t who = how == How::kCopy ? copier(w) : index(w);
  // Who issues a copy does not know of it yet.
  const uint32_t now = how == How::kCopy ? ++issued_[index(w)] : knows[who];
  const char* const what = how == How::kCopy ? "copies to" : "writes to";
  for (size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    Write& last = writes_[of.rank * words_ + word];
    const uint8_t mine = bytes_between(word, offset, offset + bytes);
    if (last.clock > knows[last.who] && (last.bytes & mine) && !(last.is_atomic && how == How::kAtomic))
      fail(w, of, 4 * word, what, last, last.who, " has written");
    const Access* const reads = &reads_[(of.rank * words_ + word) * warps_of_cta_];
    for (unsigned other = 0; other < warps_of_cta_; ++other)
      if (const uint32_t reader = of.rank * warps_of_cta_ + other; reads[other].clock > knows[reader])
        fail(w, of, 4 * word, what, reads[other], reader, " has read");
    last.clock = now, last.line = line, last.who = who, last.is_atomic = how == How::kAtomic;
    last.bytes = mine;
  }
}

void Races::arrive(const Warp& w, const void* barrier) {
  Clocks& own = clocks_[index(w)];
  learn(barriers_[barrier].arriving, own);
  ++own[index(w)];
}
void Races::end_phase(const void* barrier) {
  Barrier& b = barriers_[barrier];
  learn(b.known, b.arriving);
  b.arriving.clear();
}
void Races::wait(const Warp& w, const void* barrier) { learn(clocks_[index(w)], barriers_[barrier].known); }

void Races::wait_for_copies(const Warp& w) { clocks_[index(w)][copier(w)] = issued_[index(w)]; }
void Races::arrive_copies(const Warp& w, uint32_t copies, const void* barrier) {
  Clocks& arriving = barriers_[barrier].arriving;
  arriving.resize(2 * size_t{warps_});
  arriving[copier(w)] = std::max(arriving[copier(w)], copies);
}
Races::Clocks Races::heard(const Warp& w) const {
  Clocks clocks = clocks_[index(w)];
  clocks[index(w)] = clocks[copier(w)] = 0;  // its own accesses are not released
  return clocks;
}
void Races::arrive_copies(const Warp& w, uint32_t copies, const Clocks& heard, const void* barrier) {
  arrive_copies(w, copies, barrier);
  learn(barriers_[barrier].arriving, heard);
}

}  // namespace emulator::ptx
