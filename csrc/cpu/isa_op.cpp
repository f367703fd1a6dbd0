#include "cpu/isa.h"
#include "registration.h"

namespace mla_fp8 {

std::string cpu_isa() { return cpu::best_isa().name; }

}  // namespace mla_fp8
