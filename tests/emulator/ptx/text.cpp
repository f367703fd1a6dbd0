#include "emulator/ptx/text.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <stdexcept>

namespace emulator::ptx {
namespace {

bool is_blank(char c) { return std::isspace(static_cast<unsigned char>(c)); }
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }

}  // namespace

void fail_at(uint32_t line, const std::string& what) {
  throw std::runtime_error("PTX line " + std::to_string(line) + ": " + what);
}

void Reader::step() {
  if (text[at] == '\n') ++line;
  ++at;
}
void Reader::rest_of_line() {
  while (at < text.size() && text[at] != '\n') step();
}
void Reader::skip() {
  while (at < text.size()) {
    if (starts_with("//")) rest_of_line();
    else if (is_blank(text[at])) step();
    else return;
  }
}
bool Reader::ends() {
  skip();
  return at >= text.size();
}
bool Reader::take(char c) {
  if (ends() || text[at] != c) return false;
  step();
  return true;
}
std::string Reader::until(std::string_view ends) {
  std::string found;
  for (skip(); at < text.size() && ends.find(text[at]) == ends.npos;) {
    if (starts_with("//")) skip();
    else found += text[at], step();
  }
  return found;
}
void Reader::skip_body() {
  for (int depth = 1; at < text.size(); step()) {
    if (text[at] == '{') ++depth;
    if (text[at] == '}' && --depth == 0) {
      step();
      return;
    }
  }
  fail_at(line, "a brace is not closed");
}
std::vector<std::string> Reader::parameters() {
  if (!take('(')) return {};
  const std::string list = until(")");
  take(')');
  return split(list, ',');
}

std::string Reader::name() {
  std::string found;
  for (skip(); at < text.size() && in_name(text[at]); step()) found += text[at];
  return found;
}

std::string trimmed(std::string_view s) {
  while (!s.empty() && is_blank(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_blank(s.back())) s.remove_suffix(1);
  return std::string(s);
}
std::vector<std::string> split(std::string_view s, char at) {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  for (const char c : s) {
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (c == at && depth == 0) parts.push_back(trimmed(part)), part.clear();
    else part += c;
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}
uint32_t align_up(uint32_t x, uint32_t to) { return (x + to - 1) / to * to; }

uint64_t number(std::string s, uint32_t line) {
  try {
    if (s.starts_with("0f")) return std::stoul(s.substr(2), nullptr, 16);
    if (s.starts_with("0d")) return std::stoull(s.substr(2), nullptr, 16);
    if (s.ends_with("U")) s.pop_back();
    return s[0] == '-' ? static_cast<uint64_t>(std::stoll(s, nullptr, 0)) : std::stoull(s, nullptr, 0);
  } catch (const std::exception&) { fail_at(line, "no number: " + s); }
}

Variable variable(std::string_view declaration) {
  Variable v;
  uint32_t element = 1;
  std::istringstream words{std::string(declaration)};
  for (std::string word; words >> word;) {
    if (word == ".align") {
      words >> v.align;
    } else if (word.size() > 2 && word[0] == '.' && is_digit(word[2])) {  // .b8, .u64
      element = static_cast<uint32_t>(std::stoul(word.substr(2))) / 8;
    } else if (word[0] != '.') {
      const size_t bracket = word.find('[');
      v.name = word.substr(0, bracket);
      const std::string count =
          bracket == word.npos ? "1" : word.substr(bracket + 1, word.find(']') - bracket - 1);
      v.bytes = count.empty() ? 0 : element * static_cast<uint32_t>(std::stoul(count));
    }
  }
  v.align = std::max(v.align, element);
  return v;
}

}  // namespace emulator::ptx
