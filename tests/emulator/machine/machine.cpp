// Executes AMD code objects: loads them as the HIP runtime does, sets registers up as a kernel's descriptor
// says, and runs workgroups on this computer's threads, wave by wave up to the next barrier.
#include <elf.h>
#include <pmmintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "emulator/machine/engine.h"
#include "emulator/machine/wave.h"

namespace emulator {

struct Module {
  Gpu gpu;
  char* image = nullptr;  // where the segments lie
  size_t image_bytes = 0;
  struct Symbol {
    uint64_t address, size;
  };
  std::map<std::string, Symbol> symbols;
};

// The parts of amdhsa_kernel_descriptor_t that matter.
struct Descriptor {
  uint32_t lds, scratch, kernarg;
  char reserved0[4];
  int64_t entry;  // from the descriptor
  char reserved1[20];
  uint32_t rsrc3, rsrc1, rsrc2;
  uint16_t properties, preload;
};
static_assert(offsetof(Descriptor, rsrc3) == 44 && sizeof(Descriptor) == 64);

struct Kernel {
  Module* module;
  std::string name;
  Descriptor descriptor;
  const uint32_t* text;           // its machine code
  std::vector<Instruction> code;  // by word
};

namespace {

// With FAKE_HIP_COUNTS=FILE, a line per kernel and place in its code when the process ends: GPU, kernel,
// byte, instruction, how often a wave has executed it.
class Counts {
 public:
  bool wanted() const { return file_ != nullptr; }
  void add(const Kernel& kernel, const std::vector<uint64_t>& executed) {
    const std::lock_guard lock(mutex_);
    for (size_t w = 0; w < executed.size(); ++w)
      if (executed[w] > 0)
        counts_[kernel.module->gpu.name + " " + kernel.name + " " + std::to_string(4 * w) + " " +
                kernel.code[w].opcode->name] += executed[w];
  }
  ~Counts() {
    std::FILE* out = wanted() ? std::fopen(file_, "w") : nullptr;
    if (!out) return;
    for (const auto& [what, count] : counts_)
      std::fprintf(out, "%s %llu\n", what.c_str(), static_cast<unsigned long long>(count));
    std::fclose(out);
  }

 private:
  const char* file_ = std::getenv("FAKE_HIP_COUNTS");
  std::mutex mutex_;
  std::map<std::string, uint64_t> counts_;
} counts;

constexpr uint32_t kJunk = 0xffc1a5a5;  // a NaN: what registers hold before they are written
constexpr unsigned kKeepsSubnormals = 15;
const bool kWatching = (Allocations::watch(), true);  // when the library is loaded, before tensors are made

template <class T>
T at(const char* base, uint64_t offset, uint64_t index = 0) {
  T value;
  std::memcpy(&value, base + offset + index * sizeof(T), sizeof value);
  return value;
}

[[noreturn]] void refuse(const std::string& what) { throw Fault("code object: " + what); }

void map_segments(Module& m, const char* elf, const Elf64_Ehdr& header) {
  uint64_t top = 0;
  for (int k = 0; k < header.e_phnum; ++k)
    if (const auto p = at<Elf64_Phdr>(elf, header.e_phoff, k); p.p_type == PT_LOAD)
      top = std::max<uint64_t>(top, p.p_vaddr + p.p_memsz);
  m.image_bytes = (top + 0xffff) & ~0xffffull;
  void* image = mmap(nullptr, m.image_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (image == MAP_FAILED) refuse("no memory");
  m.image = static_cast<char*>(image);
  for (int k = 0; k < header.e_phnum; ++k)
    if (const auto p = at<Elf64_Phdr>(elf, header.e_phoff, k); p.p_type == PT_LOAD)
      std::memcpy(m.image + p.p_vaddr, elf + p.p_offset, p.p_filesz);
}

void read_sections(Module& m, const char* elf, const Elf64_Ehdr& header) {
  const auto section = [&](unsigned k) { return at<Elf64_Shdr>(elf, header.e_shoff, k); };
  for (unsigned k = 0; k < header.e_shnum; ++k) {
    const Elf64_Shdr s = section(k);
    if (s.sh_type == SHT_RELA) {
      for (uint64_t r = 0; r < s.sh_size / sizeof(Elf64_Rela); ++r) {
        const auto rela = at<Elf64_Rela>(elf, s.sh_offset, r);
        constexpr unsigned kRelative64 = 13;
        if (ELF64_R_TYPE(rela.r_info) != kRelative64) refuse("a relocation that is not R_AMDGPU_RELATIVE64");
        const uint64_t value = reinterpret_cast<uint64_t>(m.image) + static_cast<uint64_t>(rela.r_addend);
        std::memcpy(m.image + rela.r_offset, &value, sizeof value);
      }
    } else if (s.sh_type == SHT_DYNSYM) {
      const char* strings = elf + section(s.sh_link).sh_offset;
      for (uint64_t y = 0; y < s.sh_size / sizeof(Elf64_Sym); ++y) {
        const auto symbol = at<Elf64_Sym>(elf, s.sh_offset, y);
        m.symbols[strings + symbol.st_name] = {symbol.st_value, symbol.st_size};
      }
    }
  }
}

// One launch. Workers take workgroups from a counter; the first fault stops them all.
class Launch {
 public:
  Launch(const Kernel& kernel, const void* params, size_t params_size, const Grid& grid, unsigned seed)
      : kernel_(kernel),
        grid_(grid),
        seed_(seed),
        params_(params_size + 64),
        memory_(ranges(params, params_size)) {
    const Descriptor& d = kernel.descriptor;
    const auto insist = [&](bool holds, const std::string& what) {
      if (!holds) throw Fault(kernel.module->gpu.name + " kernel " + kernel.name + ": " + what);
    };
    insist(d.kernarg == params_size,
           "takes " + std::to_string(d.kernarg) + " bytes of parameters, got " + std::to_string(params_size));
    insist(d.scratch == 0, "uses scratch memory, which is not known");
    insist(d.preload == 0, "preloads parameters, which is not known");
    insist((d.rsrc1 >> 16 & 15) == kKeepsSubnormals, "flushes subnormals");
    insist((d.properties & ~0x2f) == 0 || (d.properties & ~0x2f) == 64, "wants registers that are not known");
  }

  void run() {
    blocks_.resize(grid_.blocks);
    for (unsigned b = 0; b < grid_.blocks; ++b) blocks_[b] = b;
    if (seed_) std::shuffle(blocks_.begin(), blocks_.end(), std::mt19937(seed_));
    const unsigned workers = std::clamp(std::thread::hardware_concurrency(), 1u, grid_.blocks);
    static std::vector<std::unique_ptr<Workgroup>> groups;  // launches come one at a time
    while (groups.size() < workers) groups.push_back(std::make_unique<Workgroup>());
    // Small launches are over before a thread would have begun.
    constexpr auto kAlone = std::chrono::milliseconds(2);
    work(*groups[0], std::chrono::steady_clock::now() + kAlone);
    std::vector<std::thread> threads;
    constexpr auto kForever = std::chrono::steady_clock::time_point::max();
    if (next_ < grid_.blocks && !stop_) {
      for (unsigned k = 1; k < workers; ++k) threads.emplace_back([this, k] { work(*groups[k], kForever); });
      work(*groups[0], kForever);
    }
    for (std::thread& thread : threads) thread.join();
    if (stop_) throw Fault(fault_);
  }

 private:
  std::vector<Allocations::Range> ranges(const void* params, size_t bytes) {
    const uintptr_t args = (reinterpret_cast<uintptr_t>(params_.data()) + 63) & ~uintptr_t{63};
    args_ = reinterpret_cast<char*>(args);
    std::memcpy(args_, params, bytes);
    const auto u16 = [&](size_t offset, unsigned value) { std::memcpy(packet_ + offset, &value, 2); };
    const auto u32 = [&](size_t offset, unsigned value) { std::memcpy(packet_ + offset, &value, 4); };
    u16(4, grid_.threads), u16(6, 1), u16(8, 1);                    // workgroup size
    u32(12, grid_.blocks * grid_.threads), u32(16, 1), u32(20, 1);  // grid size
    std::vector<Allocations::Range> all = Allocations::live();
    const auto add = [&](const void* begin, size_t size) {
      all.push_back({reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(begin) + size});
    };
    add(args_, bytes);
    add(packet_, sizeof packet_);
    add(kernel_.module->image, kernel_.module->image_bytes);
    return all;
  }

  // Until no workgroup is left, or it is too late to begin another.
  void work(Workgroup& group, std::chrono::steady_clock::time_point deadline) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80);  // round to nearest, keep subnormals
    try {
      prepare(group);
      for (unsigned b; !stop_ && (b = next_++) < grid_.blocks;) {
        run_block(group, blocks_[b]);
        if (std::chrono::steady_clock::now() > deadline) break;
      }
      counts.add(kernel_, group.executed);
    } catch (const Stopped&) {
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex_);
      if (!stop_) fault_ = e.what();
      stop_ = true;
    }
    _mm_setcsr(mode);
  }

  void prepare(Workgroup& group) {
    group.gpu = &kernel_.module->gpu;
    group.kernel = &kernel_.name;
    group.stop = &stop_;
    group.memory = &memory_;
    group.executed.assign(counts.wanted() ? kernel_.code.size() : 0, 0);
    group.lds.resize(kernel_.descriptor.lds);
    group.shadow.writer.resize(kernel_.descriptor.lds);
    group.shadow.reader.resize(kernel_.descriptor.lds);
    const unsigned waves = (grid_.threads + kLanes - 1) / kLanes;
    while (group.waves.size() < waves) group.waves.push_back(std::make_unique<Wave>());
  }
  static std::vector<unsigned> order_of(unsigned waves) {
    std::vector<unsigned> order(waves);
    for (unsigned k = 0; k < waves; ++k) order[k] = k;
    return order;
  }

  static void forget_accesses(Workgroup& group) {
    std::fill(group.shadow.writer.begin(), group.shadow.writer.end(), 0);
    std::fill(group.shadow.reader.begin(), group.shadow.reader.end(), 0);
  }

  void start_wave(Workgroup& group, Wave& w, unsigned id, unsigned block) {
    const Descriptor& d = kernel_.descriptor;
    w.group = &group;
    w.id = static_cast<int>(id);
    // Those before the accumulation registers.
    w.registers = static_cast<int>(std::min(((d.rsrc1 & 63) + 1) * 8, ((d.rsrc3 & 63) + 1) * 4));
    w.code = kernel_.code.data();
    w.text = kernel_.text;
    w.code_words = kernel_.code.size();
    w.pc = 0;
    w.state = Wave::State::kRunning;
    w.scc = true;
    w.branches_back = 0;
    w.last_range = {};
    w.vm.clear(), w.lgkm.clear();
    w.pending_s.fill(0);
    w.pending_v.fill(255);
    std::fill_n(w.pending_v.begin(), w.registers, 0);
    std::fill_n(&w.v[0][0], w.registers * kLanes, kJunk);
    w.s.fill(kJunk);
    const unsigned lanes = std::min<unsigned>(kLanes, grid_.threads - id * kLanes);
    w.set_exec(lanes == kLanes ? ~0ull : (1ull << lanes) - 1);
    for (unsigned l = 0; l < lanes; ++l) w.v[0][l] = id * kLanes + l;
    // User registers in the order of their property bits, then the workgroup's number.
    size_t r = 0;
    const auto put = [&](const void* p) {
      const auto value = reinterpret_cast<uint64_t>(p);
      w.s[r++] = static_cast<uint32_t>(value);
      w.s[r++] = static_cast<uint32_t>(value >> 32);
    };
    if (d.properties & 1) r += 4;  // scratch
    if (d.properties & 2) put(packet_);
    if (d.properties & 4) put(nullptr);  // queue
    if (d.properties & 8) put(args_);
    if (d.properties & 32) r += 2;  // flat scratch
    if (d.properties & 64) r += 1;  // size of scratch
    r = d.rsrc2 >> 1 & 31;
    if (d.rsrc2 >> 7 & 1) w.s[r++] = block;
    for (int axis = 1; axis < 3; ++axis)
      if (d.rsrc2 >> (7 + axis) & 1) w.s[r++] = 0;
  }

  static void run_wave(Wave& w) {
    while (w.state == Wave::State::kRunning) {
      if (w.pc >= w.code_words) throw Fault("kernel " + *w.group->kernel + " leaves its code");
      const Instruction& i = w.code[w.pc];
      if (!i.execute) w.fault("cannot be executed");
      w.next = w.pc + i.words;
      w.temporaries = 0;
      if (!w.group->executed.empty()) ++w.group->executed[w.pc];
      i.execute(w, i);
      w.pc = w.next;
    }
  }

  void run_block(Workgroup& group, unsigned block) {
    std::vector<unsigned> order = order_of((grid_.threads + kLanes - 1) / kLanes);
    std::mt19937 random(seed_ + block);
    std::fill(group.lds.begin(), group.lds.end(), 0xff);
    forget_accesses(group);
    for (const unsigned k : order) start_wave(group, *group.waves[k], k, block);
    for (bool running = true; running;) {
      if (seed_) std::shuffle(order.begin(), order.end(), random);
      for (const unsigned k : order) run_wave(*group.waves[k]);
      running = false;
      for (const unsigned k : order) {  // a barrier does not wait for waves that have ended
        Wave& w = *group.waves[k];
        if (w.state != Wave::State::kAtBarrier) continue;
        w.state = Wave::State::kRunning;
        running = true;
      }
      forget_accesses(group);
    }
  }

  const Kernel& kernel_;
  const Grid grid_;
  const unsigned seed_;
  std::vector<char> params_;
  char* args_ = nullptr;
  alignas(64) char packet_[64] = {};
  Allocations::Snapshot memory_;
  std::vector<unsigned> blocks_;
  std::atomic<unsigned> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::string fault_;
};

}  // namespace

Module* load_module(std::string_view code_object, const std::string& gpu) {
  auto* m = new Module;
  m->gpu = {gpu, gpu == "gfx942", gpu == "gfx90a"};
  const auto header = at<Elf64_Ehdr>(code_object.data(), 0);
  map_segments(*m, code_object.data(), header);
  read_sections(*m, code_object.data(), header);
  return m;
}

// Every instruction of the kernel must be one that is known, whether it will be reached or not.
Kernel* find_kernel(Module& m, const std::string& name) {
  const auto descriptor = m.symbols.find(name + ".kd");
  const auto function = m.symbols.find(name);
  if (descriptor == m.symbols.end() || function == m.symbols.end()) return nullptr;
  auto* kernel = new Kernel{&m, name, at<Descriptor>(m.image, descriptor->second.address), nullptr, {}};
  const char* entry = m.image + descriptor->second.address + kernel->descriptor.entry;
  kernel->text = reinterpret_cast<const uint32_t*>(entry);
  kernel->code.resize(function->second.size / sizeof(uint32_t));
  std::vector<uint32_t> words(kernel->text, kernel->text + kernel->code.size());
  words.resize(words.size() + 2);  // the last instruction may be taken for a longer one
  for (size_t w = 0; w < kernel->code.size(); w += kernel->code[w].words) {
    kernel->code[w] = decode(&words[w]);
    if (!kernel->code[w].execute)
      throw Fault(m.gpu.name + " kernel " + name + ": " + describe(kernel->code[w]) + " at byte " +
                  std::to_string(4 * w));
  }
  return kernel;
}

void launch(Kernel& kernel, const void* params, size_t params_size, const Grid& grid, unsigned seed) {
  Launch(kernel, params, params_size, grid, seed).run();
}

}  // namespace emulator
