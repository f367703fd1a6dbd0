#pragma once
// Whether accesses to shared memory are ordered. Each warp has a clock, and knows how far the others' clocks
// were when it last heard of them: barriers pass on what those who arrive know (happens-before). Two
// accesses to a word by different warps, one of them a write, are a race if the later one does not know of
// the earlier, in whatever order this machine has executed them. Copies that go on by themselves have clocks
// of their own, one for all that a warp has issued, which are known to whoever has waited for them.
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator::ptx {

struct Cta;
struct Warp;

class Races {
 public:
  static bool are_wanted();  // FAKE_CUDA_RACES

  Races(unsigned ctas, unsigned warps_of_cta, size_t shared_bytes);

  // Of `bytes` from an offset in a CTA's shared memory on. Atomics race with all but atomics.
  void read(Warp& w, const Cta& of, size_t offset, size_t bytes);
  enum class How { kStore, kAtomic, kCopy };
  void write(Warp& w, const Cta& of, size_t offset, size_t bytes, How how);

  // Barriers, by where they lie. Who arrives passes on what it knows; the end of a phase makes it known to
  // those who wait for that.
  void make(const void* barrier) { barriers_.erase(barrier); }
  void arrive(const Warp& w, const void* barrier);
  void end_phase(const void* barrier);
  void wait(const Warp& w, const void* barrier);
  // Copies that a warp has issued up to now; who has waited for them, or a barrier that they arrive at. Where
  // the arrival is cp.async's, it comes after what the warp had heard of others when it asked for it.
  uint32_t copies(const Warp& w) const { return issued_[index(w)]; }
  void wait_for_copies(const Warp& w);
  void arrive_copies(const Warp& w, uint32_t copies, const void* barrier);
  std::vector<uint32_t> heard(const Warp& w) const;
  void arrive_copies(const Warp& w, uint32_t copies, const std::vector<uint32_t>& heard, const void* barrier);

 private:
  using Clocks = std::vector<uint32_t>;  // of warps, then of what they have copied
  struct Access {
    uint32_t clock = 0, line = 0;
  };
  // Of a word the last one, which may have written some of its bytes.
  struct Write : Access {
    uint32_t who = 0;  // in Clocks
    uint8_t bytes = 0;
    bool is_atomic = false;
  };
  struct Barrier {
    Clocks arriving, known;
  };

  unsigned index(const Warp& w) const;
  unsigned copier(const Warp& w) const { return warps_ + index(w); }
  static void learn(Clocks& to, const Clocks& from);
  std::string name(uint32_t who) const;
  [[noreturn]] void fail(Warp& w, const Cta& of, size_t offset, const char* what, const Access& before,
                         uint32_t who, const char* did) const;

  const unsigned warps_of_cta_, warps_;
  const size_t words_;  // of a CTA
  std::vector<Clocks> clocks_;
  Clocks issued_;              // copies, by warp
  std::vector<Write> writes_;  // by CTA, word
  std::vector<Access> reads_;  // by CTA, word, warp of that CTA
  std::unordered_map<const void*, Barrier> barriers_;
};

}  // namespace emulator::ptx
