// common/fp8.h, common/dtype.h and hip/e4m3.h, element by element.
#include "common/fp8.h"

#include "common/dtype.h"
#include "core/module/core.h"
#include "hip/e4m3.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mla_fp8::test {
namespace {

template <Format kFormat>
void bind_e4m3(py::module_& m, const char* name) {
  py::module_ format = m.def_submodule(name);
  format.attr("max") = format_max(kFormat);
  format.def("decode", py::vectorize([](uint8_t x) { return e4m3_to_float<kFormat>(x); }), py::arg("codes"));
  format.def("encode", py::vectorize([](float x, float max) { return float_to_e4m3<kFormat>(x, max); }),
             py::arg("x"), py::arg("max") = format_max(kFormat));
}

// The same conversions by other means. A code lies in one byte of a word, all ones in the others.
template <Format kFormat>
void bind_hip_e4m3(py::module_& m, const char* name) {
  py::module_ format = m.def_submodule(name);
  format.attr("max") = format_max(kFormat);
  format.def("decode", py::vectorize([](uint8_t x, int byte) {
               const uint32_t others = ~(0xffu << (8 * byte));
               return gpu::widen_e4m3<kFormat>(uint32_t{x} << (8 * byte) | others, byte);
             }),
             py::arg("codes"), py::arg("byte") = 0);
  format.def("encode", py::vectorize([](float x, float max) {
               x = x < -max ? -max : x > max ? max : x;
               return static_cast<uint8_t>(gpu::narrow_e4m3<kFormat>(x));
             }),
             py::arg("x"), py::arg("max") = format_max(kFormat));
}

// `with FlushDenormals():` puts the calling thread into the mode of torch.set_flush_denormal(True).
class FlushDenormals {
 public:
#if defined(__x86_64__)
  static constexpr bool kAvailable = true;
  void enter() { _mm_setcsr((saved_ = _mm_getcsr()) | 0x8040); }  // FTZ | DAZ
  void exit(const py::args&) { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = 0;
#else
  static constexpr bool kAvailable = false;
  void enter() {}
  void exit(const py::args&) {}
#endif
};

}  // namespace

void bind_codecs(py::module_& m) {
  bind_e4m3<Format::kE4m3fn>(m, "e4m3fn");
  bind_e4m3<Format::kE4m3fnuz>(m, "e4m3fnuz");
  bind_hip_e4m3<Format::kE4m3fn>(m, "hip_e4m3fn");
  bind_hip_e4m3<Format::kE4m3fnuz>(m, "hip_e4m3fnuz");
  // Without a NaN: one is 0. Decoded as readers do.
  py::module_ e2m1 = m.def_submodule("e2m1");
  e2m1.attr("max") = format_max(Format::kE2m1);
  e2m1.def("decode", py::vectorize([](uint8_t code) {
             const auto e4m3 = static_cast<uint8_t>(e2m1x4_to_e4m3(code));
             return e4m3_to_float<Format::kE4m3fn>(e4m3) * kE2m1Unit;
           }));
  e2m1.def("encode", py::vectorize([](float x) { return float_to_e2m1(x, 0); }));
  m.def("e2m1x4_to_e4m3", py::vectorize([](uint16_t codes) { return e2m1x4_to_e4m3(codes); }));
  m.def("e2m1_tile_scale",
        py::vectorize([](float amax, float scale_floor) { return e2m1_tile_scale(amax, scale_floor); }),
        py::arg("amax"), py::arg("scale_floor"));
  m.def("halve_e4m3fn", py::vectorize(gpu::halve_e4m3fn));
  m.def("bf16_to_float", py::vectorize([](uint16_t x) { return bf16_to_float(x); }));
  m.def("float_to_bf16", py::vectorize([](float x) { return float_to_bf16(x); }));
  m.def("half_to_float", py::vectorize([](uint16_t x) { return half_to_float(x); }));
  m.def("ue8m0_to_float", py::vectorize([](uint8_t x) { return ue8m0_to_float(x); }));
  m.def("ue8m0_reciprocal", py::vectorize([](uint8_t x) { return ue8m0_reciprocal(x); }));
  m.def("tile_scale_exponent",
        py::vectorize([](float amax, float amax_floor, float scale_floor, float fp8_max) {
          return tile_scale_exponent(amax, amax_floor, scale_floor, fp8_max);
        }),
        py::arg("amax"), py::arg("amax_floor"), py::arg("scale_floor"), py::arg("fp8_max"));
  py::class_<FlushDenormals>(m, "FlushDenormals")
      .def(py::init())
      .def_property_readonly_static("available", [](const py::object&) { return FlushDenormals::kAvailable; })
      .def("__enter__", &FlushDenormals::enter)
      .def("__exit__", &FlushDenormals::exit);
}

}  // namespace mla_fp8::test
