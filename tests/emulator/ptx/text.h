#pragma once
// Reading PTX text: blanks, comments, brackets, declarations, numbers.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace emulator::ptx {

[[noreturn]] void fail_at(uint32_t line, const std::string& what);

inline bool in_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
         c == '%';
}

// A text, and the line at which one is.
struct Reader {
  std::string_view text;
  size_t at = 0;
  uint32_t line = 1;

  void step();
  void skip();  // blanks and comments
  bool ends();
  bool starts_with(std::string_view word) const { return text.substr(at, word.size()) == word; }
  bool take(char c);
  void rest_of_line();
  std::string until(std::string_view ends);  // one of these, without comments
  void skip_body();                          // up to behind the brace that closes one just taken
  std::vector<std::string> parameters();     // in parentheses, if it is at some
  std::string name();                        // if it is at one
};

std::string trimmed(std::string_view s);
std::vector<std::string> split(std::string_view s, char at);  // outside of brackets
uint32_t align_up(uint32_t x, uint32_t to);
// An operand: 12, -3, 0x10, 0f3F800000.
uint64_t number(std::string s, uint32_t line);

// `.align 8 .b8 name[16]`, `.b64 name`; 0 bytes: `name[]`.
struct Variable {
  std::string name;
  uint32_t bytes = 0, align = 0;
};
Variable variable(std::string_view declaration);

}  // namespace emulator::ptx
