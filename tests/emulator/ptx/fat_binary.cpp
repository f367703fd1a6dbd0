#include "emulator/ptx/fat_binary.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace emulator::ptx {
namespace {

// A fat binary: its header, then for each image a header and its bytes.
struct FatBinaryHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct ImageHeader {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;  // up to the next image
  uint32_t packed_bytes, options_at;
  uint16_t minor, major;
  uint32_t arch;
  uint64_t name, flags, zero, plain_bytes;
};
constexpr uint32_t kMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;
constexpr uint64_t kPackedByLz4 = 0x2000, kPackedByZstd = 0x8000;

// The LZ4 block format: literals, then a copy of bytes that were written before, again and again. A token has
// the length of both, each of which may go on in bytes behind it.
std::string unpack_lz4(std::string_view packed, uint64_t plain_bytes) {
  constexpr size_t kLeastCopy = 4;
  std::string plain;
  plain.reserve(plain_bytes);
  size_t at = 0;
  const auto byte = [&] { return static_cast<uint8_t>(packed.at(at++)); };
  const auto length = [&](unsigned of_token) {
    size_t total = of_token;
    if (of_token == 15)
      for (uint8_t more = 255; more == 255; total += more) more = byte();
    return total;
  };
  while (at < packed.size()) {
    const uint8_t token = byte();
    const size_t literals = length(token >> 4);
    plain += packed.substr(at, literals);
    at += literals;
    if (at >= packed.size()) break;  // the last literals are followed by no copy
    const size_t low = byte(), distance = low | size_t{byte()} << 8;
    if (distance == 0 || distance > plain.size()) break;
    for (size_t left = length(token & 15) + kLeastCopy; left > 0;
         --left)  // may copy what it has just written
      plain += plain[plain.size() - distance];
  }
  if (plain.size() != plain_bytes) throw std::runtime_error("the PTX in a fat binary is not LZ4");
  return plain;
}

}  // namespace

std::vector<std::string> texts_in_fat_binary(const char* fat_binary, unsigned arch) {
  FatBinaryHeader header;
  std::memcpy(&header, fat_binary, sizeof header);
  if (header.magic != kMagic) throw std::runtime_error("no fat binary");
  std::vector<std::string> texts;
  const char* const end = fat_binary + header.header_bytes + header.bytes;
  for (const char* at = fat_binary + header.header_bytes; at < end;) {
    ImageHeader image;
    std::memcpy(&image, at, sizeof image);
    const char* const bytes = at + image.header_bytes;
    at += image.header_bytes + image.bytes;
    if (image.kind != kPtx || image.arch != arch) continue;
    if (image.flags & kPackedByZstd)
      throw std::runtime_error("the PTX is packed by zstd; build the tests' library with MLA_FP8_TESTS=1");
    std::string text = image.flags & kPackedByLz4 ? unpack_lz4({bytes, image.packed_bytes}, image.plain_bytes)
                                                  : std::string(bytes, image.bytes);
    text.resize(std::strlen(text.c_str()));  // zeros end it
    texts.push_back(std::move(text));
  }
  return texts;
}

}  // namespace emulator::ptx
