// common/kv_layout.h: the table and its address arithmetic.
#include "common/kv_layout.h"

#include "core/module/core.h"

namespace mla_fp8::test {

void bind_layouts(py::module_& m) {
  py::class_<KvLayout>(m, "KvLayout")
      .def_readonly("name", &KvLayout::name)
      .def_readonly("nope_dim", &KvLayout::nope_dim)
      .def_readonly("rope_dim", &KvLayout::rope_dim)
      .def_readonly("tile_dim", &KvLayout::tile_dim)
      .def_readonly("amax_floor", &KvLayout::amax_floor)
      .def_readonly("scale_floor", &KvLayout::scale_floor)
      .def_readonly("page_align", &KvLayout::page_align)
      .def_property_readonly("nope_format", [](const KvLayout& l) { return mla_fp8::name(l.nope_format); })
      .def_property_readonly("rope_format", [](const KvLayout& l) { return mla_fp8::name(l.rope_format); })
      .def_property_readonly("scale_format", [](const KvLayout& l) { return mla_fp8::name(l.scale_format); })
      .def_property_readonly("head_dim_qk", &KvLayout::head_dim_qk)
      .def_property_readonly("extra_only", &KvLayout::extra_only)
      .def_property_readonly("num_tiles", &KvLayout::num_tiles)
      .def_property_readonly("scale_itemsize", &KvLayout::scale_itemsize)
      .def_property_readonly("scale_bytes", &KvLayout::scale_bytes)
      .def_property_readonly("nope_bytes", &KvLayout::nope_bytes)
      .def_property_readonly("rope_bytes", &KvLayout::rope_bytes)
      .def_property_readonly("rope_offset", &KvLayout::rope_offset)
      .def_property_readonly("token_stride", &KvLayout::token_stride)
      .def_property_readonly("bytes_per_token", &KvLayout::bytes_per_token)
      .def("page_bytes", &KvLayout::page_bytes)
      .def("token_offset", &KvLayout::token_offset)
      .def("scale_offset", &KvLayout::scale_offset);

  py::list layouts;  // in the order of KvLayoutId
  for (int i = 0; i < kNumKvLayouts; ++i) layouts.append(kv_layout(static_cast<KvLayoutId>(i)));
  m.attr("KV_LAYOUTS") = layouts;

  py::list pairs;  // (first, extra)
  for (const KvPair& pair : kMixedPairs)
    pairs.append(py::make_tuple(static_cast<int>(pair.first), static_cast<int>(pair.extra)));
  m.attr("KV_PAIRS") = pairs;
}

}  // namespace mla_fp8::test
