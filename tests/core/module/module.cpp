#include "core/module/core.h"

PYBIND11_MODULE(_mla_fp8_core, m) {
  using namespace mla_fp8::test;
  bind_codecs(m);
  bind_layouts(m);
  bind_isas(m);
  bind_plans(m);
  bind_index(m);
}
