// Machine code of GFX9 (gfx90a, gfx942, gfx950) to instructions, and back to text. Fields lie where AMD's
// instruction set manuals put them; opcode numbers are in the tables beside the semantics.
#include <cstdio>
#include <iterator>
#include <string_view>

#include "emulator/machine/wave.h"

namespace emulator {
namespace {

constexpr int kSdwa = 249, kDpp = 250, kOff = 127;  // operands that stand for something else
constexpr unsigned kVop3Vop2 = 256, kVop3Vop1 = 320, kVop3Own = 448;

uint32_t bits(uint32_t word, int first, int count) { return word >> first & ((1u << count) - 1); }
int32_t signed_bits(uint32_t word, int first, int count) {
  return static_cast<int32_t>(word << (32 - first - count)) >> (32 - count);
}
int16_t vgpr(uint32_t number) { return static_cast<int16_t>(kFirstVgpr + number); }
int16_t operand(uint32_t number) { return static_cast<int16_t>(number); }
uint8_t byte(uint32_t value) { return static_cast<uint8_t>(value); }

// The tables, by format and number.
std::array<Table, 6> tables() {
  return {scalar_table(), vector_table(), compare_table(), wide_table(), matrix_table(), memory_table()};
}
class Opcodes {
 public:
  Opcodes() {
    for (const Table& table : tables())
      for (size_t k = 0; k < table.count; ++k)
        at(table.first[k].format, table.first[k].number) = &table.first[k];
  }
  const Opcode* find(Format format, uint32_t number) const {
    return by_number_[static_cast<size_t>(format)][number & 1023];
  }
  // VOP3 is its own format and another encoding of VOPC, VOP2 and VOP1.
  const Opcode* find_vop3(uint32_t number) const {
    if (number < kVop3Vop2) return find(Format::kVopc, number);
    if (number < kVop3Vop1) return find(Format::kVop2, number - kVop3Vop2);
    if (number < kVop3Own) return find(Format::kVop1, number - kVop3Vop1);
    return find(Format::kVop3, number);
  }

 private:
  const Opcode*& at(Format format, uint32_t number) {
    return by_number_[static_cast<size_t>(format)][number];
  }
  std::array<std::array<const Opcode*, 1024>, static_cast<size_t>(Format::kFormats)> by_number_{};
};
const Opcodes& opcodes() {
  static const Opcodes table;
  return table;
}

void decode_scalar(Instruction& i, uint32_t w) {
  i.sdst = operand(bits(w, 16, 7));
  i.src[0] = operand(bits(w, 0, 8));
  if (w >> 23 == 0b101111101) {
    i.opcode = opcodes().find(Format::kSop1, bits(w, 8, 8));
  } else if (w >> 23 == 0b101111110) {
    i.opcode = opcodes().find(Format::kSopc, bits(w, 16, 7));
    i.src[1] = operand(bits(w, 8, 8));
  } else if (w >> 23 == 0b101111111) {
    i.opcode = opcodes().find(Format::kSopp, bits(w, 16, 7));
    i.src[0] = -1;
    i.offset = signed_bits(w, 0, 16);
  } else if (w >> 28 == 0b1011) {
    i.opcode = opcodes().find(Format::kSopk, bits(w, 23, 5));
    i.src[0] = -1;
    i.offset = signed_bits(w, 0, 16);
  } else {
    i.opcode = opcodes().find(Format::kSop2, bits(w, 23, 7));
    i.src[1] = operand(bits(w, 8, 8));
  }
}

void decode_sdwa(Instruction& i, uint32_t w, Format format) {
  i.plain = false;
  i.src[0] = operand(bits(w, 0, 8) + (bits(w, 23, 1) ? 0 : kFirstVgpr));
  i.part[0] = {byte(bits(w, 16, 3)), bits(w, 19, 1) != 0};
  i.negate = byte(bits(w, 20, 1) | bits(w, 28, 1) << 1);
  i.absolute = byte(bits(w, 21, 1) | bits(w, 29, 1) << 1);
  if (format != Format::kVop1) {
    if (bits(w, 31, 1)) i.src[1] = operand(static_cast<uint32_t>(i.src[1] - kFirstVgpr));
    i.part[1] = {byte(bits(w, 24, 3)), bits(w, 27, 1) != 0};
  }
  if (format == Format::kVopc) {
    if (bits(w, 15, 1)) i.sdst = operand(bits(w, 8, 7));
  } else {
    i.dst_part.select = byte(bits(w, 8, 3));
    i.keep = byte(bits(w, 11, 2));
    i.clamp = bits(w, 13, 1);
    i.omod = byte(bits(w, 14, 2));
  }
}

void decode_dpp(Instruction& i, uint32_t w) {
  i.plain = false;
  i.src[0] = vgpr(bits(w, 0, 8));
  i.dpp = operand(bits(w, 8, 9));
  i.bound_zero = bits(w, 19, 1);
  i.negate = byte(bits(w, 20, 1) | bits(w, 22, 1) << 1);
  i.absolute = byte(bits(w, 21, 1) | bits(w, 23, 1) << 1);
  i.bank_mask = byte(bits(w, 24, 4));
  i.row_mask = byte(bits(w, 28, 4));
}

// VOP1, VOP2 and VOPC of one word, with what may follow them.
void decode_vector(Instruction& i, const uint32_t* words) {
  const uint32_t w = words[0];
  Format format = Format::kVop2;
  i.dst = operand(bits(w, 17, 8));
  i.src[0] = operand(bits(w, 0, 9));
  i.src[1] = vgpr(bits(w, 9, 8));
  i.sdst = kVcc;
  if (w >> 25 == 0b0111111) {
    format = Format::kVop1;
    i.opcode = opcodes().find(format, bits(w, 9, 8));
    i.src[1] = -1;
    i.sdst = i.dst;
  } else if (w >> 25 == 0b0111110) {
    format = Format::kVopc;
    i.opcode = opcodes().find(format, bits(w, 17, 8));
    i.dst = -1;
  } else {
    const uint32_t number = bits(w, 25, 6);
    i.opcode = opcodes().find(format, number);
    if (number == 0 || (number >= 28 && number <= 30)) i.src[2] = kVcc;  // v_cndmask and carries
  }
  if (i.src[0] == kSdwa || i.src[0] == kDpp) {
    i.words = 2;
    i.src[0] == kSdwa ? decode_sdwa(i, words[1], format) : decode_dpp(i, words[1]);
  }
}

void decode_vop3(Instruction& i, const uint32_t* words) {
  const uint32_t w = words[0], x = words[1], number = bits(w, 16, 10);
  i.words = 2;
  i.opcode = opcodes().find_vop3(number);
  i.dst = operand(bits(w, 0, 8));
  i.src[0] = operand(bits(x, 0, 9));
  i.src[1] = operand(bits(x, 9, 9));
  i.src[2] = operand(bits(x, 18, 9));
  i.clamp = bits(w, 15, 1);
  i.omod = byte(bits(x, 27, 2));
  i.negate = byte(bits(x, 29, 3));
  if (i.opcode && i.opcode->flags & kCarries) {
    i.sdst = operand(bits(w, 8, 7));
    return;
  }
  i.absolute = byte(bits(w, 8, 3));
  i.op_sel = byte(bits(w, 11, 4));
  if (number < kVop3Vop2 || (i.opcode && i.opcode->flags & kScalarResult)) i.sdst = i.dst;
  if (number < kVop3Vop2) i.dst = -1;  // a comparison
  // Halves of registers are chosen by VOP3P alone here.
  if (i.op_sel) i.opcode = nullptr;
}

void decode_vop3p(Instruction& i, const uint32_t* words) {
  const uint32_t w = words[0], x = words[1];
  i.words = 2;
  i.opcode = opcodes().find(Format::kVop3p, bits(w, 16, 7));
  i.dst = operand(bits(w, 0, 8));
  i.src[0] = operand(bits(x, 0, 9));
  i.src[1] = operand(bits(x, 9, 9));
  i.src[2] = operand(bits(x, 18, 9));
  const bool matrix = i.opcode && std::string_view(i.opcode->name).starts_with("v_mfma");
  if (matrix) {  // accumulation registers, broadcasts and permutations of blocks are not known here
    if (bits(w, 8, 8) || bits(x, 27, 5)) i.opcode = nullptr;
    return;
  }
  i.negate_high = byte(bits(w, 8, 3));
  i.op_sel = byte(bits(w, 11, 3));
  i.op_sel_hi = byte(bits(x, 27, 2) | bits(w, 14, 1) << 2);
  i.clamp = bits(w, 15, 1);
  i.negate = byte(bits(x, 29, 3));
}

void decode_scalar_memory(Instruction& i, const uint32_t* words) {
  const uint32_t w = words[0];
  i.words = 2;
  i.opcode = opcodes().find(Format::kSmem, bits(w, 18, 8));
  i.sdst = operand(bits(w, 6, 7));
  i.src[0] = operand(bits(w, 0, 6) * 2);
  i.offset = signed_bits(words[1], 0, 21);
  if (bits(w, 14, 1) || !bits(w, 17, 1)) i.opcode = nullptr;  // an offset in a register
}

void decode_lds(Instruction& i, const uint32_t* words) {
  const uint32_t w = words[0], x = words[1];
  i.words = 2;
  i.opcode = opcodes().find(Format::kDs, bits(w, 17, 8));
  i.offset = static_cast<int32_t>(bits(w, 0, 16));
  i.offsets[0] = byte(bits(w, 0, 8));
  i.offsets[1] = byte(bits(w, 8, 8));
  for (int k = 0; k < 3; ++k) i.src[k] = vgpr(bits(x, 8 * k, 8));
  i.dst = operand(bits(x, 24, 8));
  if (bits(w, 16, 1) || bits(w, 25, 1)) i.opcode = nullptr;  // global data share; accumulation registers
}

void decode_memory(Instruction& i, const uint32_t* words) {
  const uint32_t w = words[0], x = words[1], segment = bits(w, 14, 2);
  i.words = 2;
  const Format format = segment == 2 ? Format::kGlobal : Format::kFlat;
  i.opcode = opcodes().find(format, bits(w, 18, 7));
  i.offset = segment == 2 ? signed_bits(w, 0, 13) : static_cast<int32_t>(bits(w, 0, 12));
  i.src[0] = vgpr(bits(x, 0, 8));
  i.src[1] = vgpr(bits(x, 8, 8));
  i.dst = operand(bits(x, 24, 8));
  if (segment == 2 && bits(x, 16, 7) != kOff) i.saddr = operand(bits(x, 16, 7));
  i.returns = bits(w, 16, 1);
  if (segment == 1 || segment == 3 || bits(w, 13, 1) || bits(x, 23, 1))
    i.opcode = nullptr;  // scratch; LDS; acc
}

std::string scalar_name(int number) {
  switch (number) {
    case kVcc: return "vcc";
    case kM0: return "m0";
    case kExec: return "exec";
    case kSharedBase: return "src_shared_base";
    default: break;
  }
  if (number < kSgprs) return "s" + std::to_string(number);
  if (number <= 192) return std::to_string(number - 128);
  if (number <= 208) return std::to_string(192 - number);
  constexpr const char* kFloats[] = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0"};
  return number >= 240 && number < 248 ? kFloats[number - 240] : "operand" + std::to_string(number);
}

}  // namespace

Instruction decode(const uint32_t* words) {
  Instruction i;
  const uint32_t w = words[0];
  i.encoding[0] = w;
  i.encoding[1] = words[1];
  if (w >> 30 == 2) decode_scalar(i, w);
  else if (w >> 31 == 0) decode_vector(i, words);
  else if (w >> 26 == 0b110000) decode_scalar_memory(i, words);
  else if (w >> 23 == 0b110100111) decode_vop3p(i, words);
  else if (w >> 26 == 0b110100) decode_vop3(i, words);
  else if (w >> 26 == 0b110110) decode_lds(i, words);
  else if (w >> 26 == 0b110111) decode_memory(i, words);
  if (!i.opcode) return i;
  const unsigned flags = i.opcode->flags;
  if (i.src[0] == kLiteral || i.src[1] == kLiteral || i.src[2] == kLiteral || flags & kLiteralFollows) {
    i.literal = words[i.words];
    ++i.words;
  }
  constexpr int kSignExtended = 1;  // SDWA: what to do with the rest of the destination
  if (i.dst_part.select != 6 && i.keep == kSignExtended) i.opcode = nullptr;
  if ((i.clamp && !(flags & kClamps)) || (i.omod && !(flags & kTruthTable))) i.opcode = nullptr;
  i.execute = i.opcode ? i.opcode->execute : nullptr;
  return i;
}

std::string describe(const Instruction& i) {
  if (!i.opcode) {
    char text[64];
    std::snprintf(text, sizeof text, "unknown instruction 0x%08x 0x%08x", i.encoding[0], i.encoding[1]);
    return text;
  }
  std::string text = i.opcode->name;
  const char* separator = " ";
  const auto add = [&](const std::string& name) {
    text += separator + name;
    separator = ", ";
  };
  const Format format = i.opcode->format;
  if (format == Format::kSopp) return text + " " + std::to_string(i.offset);
  const bool scalar = i.sdst >= 0 && (i.dst < 0 || i.opcode->flags & kScalarResult);
  const bool store = text.find("store") != text.npos || text.find("write_b") != text.npos ||
                     text.find("write2") != text.npos;
  if (scalar && format != Format::kSopc) add(scalar_name(i.sdst));
  else if (i.dst >= 0 && !store) add("v" + std::to_string(i.dst));
  if (i.opcode->flags & kCarries) add(scalar_name(i.sdst));
  for (const int16_t operand : i.src) {
    if (operand < 0) continue;
    if (operand >= kFirstVgpr) add("v" + std::to_string(operand - kFirstVgpr));
    else if (operand == kLiteral) add(std::to_string(i.literal));
    else add(scalar_name(operand));
  }
  if (i.saddr >= 0) add(scalar_name(i.saddr));
  return text;
}

}  // namespace emulator

// For the tests: the names of all instructions; those in `count` words of code, each after its word's number.
// A line each. They return the text's length, and write as much of it as there is room for.
extern "C" {

size_t emulator_instructions(char* text, size_t size) {
  std::string all;
  for (const emulator::Table& table : emulator::tables())
    for (size_t k = 0; k < table.count; ++k) all += table.first[k].name + std::string("\n");
  std::snprintf(text, size, "%s", all.c_str());
  return all.size();
}

size_t emulator_describe(const uint32_t* code, size_t count, char* text, size_t size) {
  std::vector<uint32_t> words(code, code + count);
  words.resize(count + 2);
  std::string all;
  for (size_t w = 0; w < count;) {
    const emulator::Instruction i = emulator::decode(&words[w]);
    all += std::to_string(w) + " " + emulator::describe(i) + "\n";
    w += i.words;
  }
  std::snprintf(text, size, "%s", all.c_str());
  return all.size();
}
}
