#pragma once
// _mla_fp8_core, a test-only module that is never shipped: csrc/common, the CPU kernels of every
// instruction set and the plans of sparse attention on GPUs, for numpy and hypothesis, without torch. bf16
// travels as uint16.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace mla_fp8::test {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style>;  // with .noconvert(): no silent copies or casts

void bind_codecs(py::module_& m);
void bind_layouts(py::module_& m);
void bind_isas(py::module_& m);
void bind_plans(py::module_& m);
void bind_index(py::module_& m);  // after bind_isas

}  // namespace mla_fp8::test
