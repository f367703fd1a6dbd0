// PTX text to instructions. Names become numbers, device functions become part of their callers.
#include <algorithm>
#include <cctype>
#include <type_traits>
#include <utility>

#include "emulator/ptx/program.h"
#include "emulator/ptx/text.h"

namespace emulator::ptx {
namespace {

using Parts = Opcode;  // of a text

// How many of the first operands are results.
int count_results(const Parts& opcode, const std::vector<Operand>& operands) {
  static constexpr const char* kNone[] = {"st",       "red",        "cp",  "stmatrix",
                                          "prefetch", "setmaxnreg", "bra", "ret"};
  const std::string& what = opcode[0];
  if (operands.empty() || std::find(std::begin(kNone), std::end(kNone), what) != std::end(kNone)) return 0;
  if (what.starts_with("bar") && !has(opcode, "red")) return 0;
  if (what == "mbarrier" && opcode[1] == "init") return 0;
  if (what == "wgmma" && opcode[1] != "mma_async") return 0;
  const bool two = what == "shfl" && operands.size() == 6;  // d|p
  return static_cast<int>(operands[0].regs.size()) + two;
}

class Compiler {
 public:
  Compiler(Module& module, Kernel& kernel) : module_(module), kernel_(kernel) {}

  void run(const Module::Code& code) {
    Reader reader{code.text, 0, code.line};
    push();
    reader.name();
    for (const std::string& p : reader.parameters()) {
      const Variable v = variable(p);
      kernel_.params_bytes = align_up(kernel_.params_bytes, v.align);
      here().symbols[v.name] = {Symbol::kParameter, kernel_.params_bytes};
      kernel_.params_bytes += v.bytes;
    }
    for (const auto& [name, bytes] : module_.globals) {
      const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
      here().symbols[name] = {Symbol::kConstant, begin};
      kernel_.globals.push_back({begin, begin + bytes.size()});
    }
    statements(reader);
    emit({"ret"}, {}, {}, reader.line);  // the end of a kernel's text is one
    resolve();
    share_registers(kernel_, static_cast<size_t>(num_regs_));
  }

 private:
  static constexpr const char* kReturn = "return";  // the label behind a function

  struct Symbol {
    enum Kind { kConstant, kDynamicShared, kLocal, kParameter } kind;
    uint64_t value;
  };
  struct Scope {
    int parent;
    std::map<std::string, int> regs;
    std::map<std::string, Symbol> symbols;
    std::map<std::string, uint32_t> labels;
    bool is_function = false;  // in place of a call
  };
  struct Branch {
    uint32_t at;
    int scope;
    std::string label;
  };

  // ---- statements ----

  void statements(Reader& r) {  // between the next braces
    r.until("{");
    r.take('{');
    for (int depth = 0; !r.ends();) {
      if (r.take('{')) {
        push();
        ++depth;
      } else if (r.take('}')) {
        if (depth-- == 0) return;
        pop();
      } else {
        statement(r);
      }
    }
  }
  void push() {
    scopes_.emplace_back().parent = scope_;
    scope_ = static_cast<int>(scopes_.size()) - 1;
  }
  void pop() { scope_ = here().parent; }

  void statement(Reader& r) {
    if (r.starts_with(".loc ") || r.starts_with(".loc\t") || r.starts_with(".file")) return r.rest_of_line();
    const uint32_t line = r.line;
    size_t end = r.at;
    while (end < r.text.size() && in_name(r.text[end])) ++end;
    if (end > r.at && r.text.substr(end, 1) == ":" &&
        r.text.substr(end, 2) != "::") {  // which no semicolon ends
      here().labels[std::string(r.text.substr(r.at, end - r.at))] = place();
      while (r.at <= end) r.step();
      return;
    }
    const std::string text = trimmed(r.until(";"));
    r.take(';');
    if (text.empty()) return;
    if (text[0] == '.') directive(text, line);
    else instruction(text, line);
  }

  void directive(const std::string& text, uint32_t line) {
    const size_t end = std::min(text.find_first_of(" \t"), text.size());
    const std::string what = text.substr(0, end), rest = trimmed(text.substr(end));
    if (what == ".reg") {
      for (const std::string& name : split(rest.substr(rest.find_first_of(" \t")), ',')) {
        const size_t many = name.find('<');
        if (many == name.npos) here().regs[name] = num_regs_++;
        else
          for (int i = 0; i < std::stoi(name.substr(many + 1)); ++i)
            here().regs[name.substr(0, many) + std::to_string(i)] = num_regs_++;
      }
    } else if (what == ".shared") {
      share(here(), variable(rest));
    } else if (what == ".local" || what == ".param") {  // a call's parameters are memory of the thread
      const Variable v = variable(rest);
      kernel_.local_bytes = align_up(kernel_.local_bytes, std::max(v.align, 16u));
      here().symbols[v.name] = {Symbol::kLocal, kernel_.local_bytes};
      kernel_.local_bytes += v.bytes;
    } else if (what != ".pragma") {
      fail_at(line, "unknown directive " + text);
    }
  }

  void instruction(const std::string& text, uint32_t line) {
    Instruction i;
    size_t at = 0;
    if (text[0] == '@') {
      i.if_not = text[1] == '!';
      const size_t begin = i.if_not ? 2 : 1, end = text.find_first_of(" \t");
      i.guard = operand(text.substr(begin, end - begin), line).regs.at(0);
      at = text.find_first_not_of(" \t\n", end);
    }
    const size_t end = std::min(text.find_first_of(" \t\n", at), text.size());
    const std::string rest = trimmed(text.substr(end));
    Parts opcode = split(text.substr(at, end - at), '.');
    if (opcode[0] == "call") return call(rest, line);
    std::vector<Operand> operands;
    for (const std::string& list : split(rest, ','))
      for (const std::string& one : list[0] == '[' ? Parts{list} : split(list, '|'))
        operands.push_back(operand(one, line));
    if (opcode.size() > 1 && opcode[1] == "param")
      for (const Operand& o : operands)
        if (o.kind == Operand::kAddress && !o.name.empty() && symbol(o.name)->kind == Symbol::kLocal)
          opcode[1] = "local";
    emit(opcode, operands, i, line);
  }

  // (results), function, (arguments): the function's text in place of the call.
  void call(const std::string& text, uint32_t line) {
    const Parts parts = split(text, ',');
    const auto list = [](const std::string& s) { return split(s.substr(1, s.size() - 2), ','); };
    const size_t at = parts[0][0] == '(' ? 1 : 0;
    const std::string& name = parts.at(at);
    const auto found = module_.functions.find(name);
    if (found == module_.functions.end()) fail_at(line, "no function " + name);
    Reader r{found->second.text, 0, found->second.line};
    std::map<std::string, Symbol> symbols;
    const auto bind = [&](const Parts& names, const Parts& values) {
      if (names.size() != values.size()) fail_at(line, "the arguments are not those of " + name);
      for (size_t i = 0; i < names.size(); ++i) symbols[variable(names[i]).name] = *symbol(values[i]);
    };
    bind(r.parameters(), at == 1 ? list(parts[0]) : Parts{});
    r.name();
    bind(r.parameters(), parts.size() > at + 1 ? list(parts[at + 1]) : Parts{});
    push();
    const int scope = scope_;
    here().symbols = symbols;
    here().is_function = true;
    statements(r);
    scope_ = scope;
    here().labels[kReturn] = place();
    pop();
  }

  // ---- operands ----

  Scope& here() { return scopes_[static_cast<size_t>(scope_)]; }
  // Outwards from a scope until `find` has found something.
  template <class Find>
  std::invoke_result_t<Find, Scope&> lookup(int scope, Find find) {
    for (; scope >= 0; scope = scopes_[static_cast<size_t>(scope)].parent)
      if (auto found = find(scopes_[static_cast<size_t>(scope)])) return found;
    return {};
  }
  template <class T>
  static T* find_in(std::map<std::string, T>& map, const std::string& name) {
    const auto it = map.find(name);
    return it == map.end() ? nullptr : &it->second;
  }
  const Symbol* symbol(const std::string& name) {
    const Symbol* const found = lookup(scope_, [&](Scope& s) { return find_in(s.symbols, name); });
    if (found) return found;
    // Shared memory of the whole file is that of the kernels that use it. Without a size it is dynamic.
    const Variable* const shared = find_in(module_.shared, name);
    if (!shared) return nullptr;
    if (shared->bytes == 0) scopes_[0].symbols[name] = {Symbol::kDynamicShared, 0};
    else share(scopes_[0], *shared);
    return &scopes_[0].symbols[name];
  }
  void share(Scope& scope, const Variable& v) {
    kernel_.static_shared = align_up(kernel_.static_shared, v.align);
    scope.symbols[v.name] = {Symbol::kConstant, kSharedBase + kernel_.static_shared};
    kernel_.static_shared += v.bytes;
  }
  int special(const std::string& name) {
    for (const Special& s : kernel_.specials)
      if (s.name == name) return s.reg;
    kernel_.specials.push_back({name, num_regs_});
    return num_regs_++;
  }
  // Constants are negative until the registers have been counted.
  int constant(uint64_t value) {
    const auto [it, is_new] = constants_.try_emplace(value, -1 - static_cast<int>(constants_.size()));
    if (is_new) kernel_.constants.insert(kernel_.constants.end(), 32, value);
    return it->second;
  }
  int of_symbol(const Symbol& s) {
    if (s.kind == Symbol::kDynamicShared) return special(".dynamic_shared");
    if (s.kind == Symbol::kParameter) return special(".params+" + std::to_string(s.value));
    return constant(s.value);
  }

  Operand operand(const std::string& s, uint32_t line) {
    if (s == "_") return {Operand::kSink, {num_regs_++}};
    if (s[0] == '{') {
      Operand o{Operand::kVector};
      for (const std::string& member : split(s.substr(1, s.size() - 2), ','))
        o.regs.push_back(operand(member, line).regs.at(0));
      return o;
    }
    if (s[0] == '[') {
      const Parts parts = split(s.substr(1, s.size() - 2), ',');
      const size_t sign = std::min(parts[0].find_first_of("+-", 1), parts[0].size());
      Operand o = operand(trimmed(parts[0].substr(0, sign)), line);
      if (o.regs.empty()) fail_at(line, "no address: " + s);
      o.kind = Operand::kAddress;
      if (sign < parts[0].size())
        o.offset =
            static_cast<int64_t>(number(trimmed(parts[0].substr(sign + (parts[0][sign] == '+'))), line));
      if (parts.size() > 1)
        for (const int r : operand(parts[1], line).regs) o.regs.push_back(r);
      return o;
    }
    if (s[0] == '!') {
      Operand o = operand(s.substr(1), line);
      o.negated = true;
      return o;
    }
    if (std::isdigit(static_cast<unsigned char>(s[0])) || s[0] == '-')
      return {Operand::kConstant, {constant(number(s, line))}};
    if (const int* reg = lookup(scope_, [&](Scope& scope) { return find_in(scope.regs, s); }))
      return {Operand::kRegister, {*reg}};
    if (const Symbol* found = symbol(s)) return {Operand::kConstant, {of_symbol(*found)}, 0, s};
    if (s[0] == '%') return {Operand::kRegister, {special(s)}};
    return {Operand::kSymbol, {}, 0, s};
  }

  // ---- instructions ----

  uint32_t place() const { return static_cast<uint32_t>(kernel_.code.size()); }

  void emit(const Parts& opcode, const std::vector<Operand>& operands, Instruction i, uint32_t line) {
    const bool returns = opcode[0] == "ret" && lookup(scope_, [](Scope& s) { return s.is_function; });
    const bool jumps = returns || opcode[0] == "bra";
    if (jumps) branches_.push_back({place(), scope_, returns ? kReturn : operands.at(0).name});
    std::vector<int> regs;
    int addresses = 0;
    for (const Operand& o : operands) {
      if (o.kind == Operand::kSymbol && !jumps) fail_at(line, "no name: " + o.name);
      regs.insert(regs.end(), o.regs.begin(), o.regs.end());
      if (o.kind == Operand::kAddress && addresses < 2) i.offset[addresses++] = o.offset;
    }
    const std::string name = joined(opcode);
    kernel_.operands.push_back(std::make_unique<int[]>(regs.size() + 1));
    std::copy(regs.begin(), regs.end(), kernel_.operands.back().get());
    i.line = line;
    i.opcode = &module_.opcodes.try_emplace(name, name).first->second;
    i.regs = kernel_.operands.back().get(), i.num_regs = static_cast<int>(regs.size());
    i.results = count_results(opcode, operands);
    i.accumulates = opcode[0] == "wgmma";
    i.run = find_handler(returns ? Parts{"bra"} : opcode, operands, i);
    if (!i.run) fail_at(line, "unknown instruction " + name);
    kernel_.code.push_back(i);
  }
  void resolve() {
    for (const auto& [at, scope, label] : branches_) {
      const uint32_t* to = lookup(scope, [&](Scope& s) { return find_in(s.labels, label); });
      if (!to) fail_at(kernel_.code[at].line, "no label " + label);
      kernel_.code[at].target = *to;
    }
  }

  Module& module_;
  Kernel& kernel_;
  std::vector<Scope> scopes_;  // of braces; the first is the kernel's
  int scope_ = -1, num_regs_ = 0;
  std::map<uint64_t, int> constants_;
  std::vector<Branch> branches_;
};

}  // namespace

// Directives of a line each; the others end with a semicolon or a body.
void load(Module& module, std::string ptx) {
  const std::string_view text = module.texts.emplace_back(std::move(ptx));
  static constexpr const char* kLines[] = {".version", ".target", ".address_size", ".file", ".loc"};
  for (Reader r{text}; !r.ends();) {
    if (r.take(';')) continue;
    if (std::any_of(std::begin(kLines), std::end(kLines),
                    [&](const char* word) { return r.starts_with(word); })) {
      r.rest_of_line();
      continue;
    }
    const uint32_t line = r.line;
    const size_t begin = r.at;
    const std::string header = r.until(";{=");
    const auto behind = [&](std::string_view word) {
      const size_t at = header.find(word);
      return at == header.npos ? std::string() : trimmed(header.substr(at + word.size()));
    };
    const std::string entry = behind(".entry"), function = behind(".func");
    if (!entry.empty() || !function.empty()) {
      if (!r.take('{')) continue;  // a declaration
      r.skip_body();
      const std::string_view word = entry.empty() ? ".func" : ".entry",
                             whole = text.substr(begin, r.at - begin);
      const Module::Code code{whole.substr(whole.find(word) + word.size()), line};
      Reader head{code.text};
      head.parameters();
      (entry.empty() ? module.functions : module.kernels)[head.name()] = code;
    } else if (const std::string shared = behind(".shared"); !shared.empty()) {
      const Variable v = variable(shared);
      module.shared[v.name] = v;
    } else if (const std::string global = behind(".global"); !global.empty()) {
      if (r.take('=')) fail_at(line, "a variable with a value: " + header);
      const Variable v = variable(global);
      module.globals[v.name].assign(v.bytes, 0);
    } else if (!behind(".section").empty()) {
      if (r.take('{')) r.skip_body();
    } else {
      fail_at(line, "unknown directive " + header);
    }
  }
}

const Kernel& compile(Module& module, const std::string& name) {
  auto& kernel = module.compiled[name];
  if (!kernel) {
    auto compiled = std::make_unique<Kernel>();
    compiled->name = name;
    Compiler(module, *compiled).run(module.kernels.at(name));
    kernel = std::move(compiled);
  }
  return *kernel;
}

}  // namespace emulator::ptx
