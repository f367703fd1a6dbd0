#pragma once
// The CPU kernels that exist once per instruction set. quantize_kv.cpp, dequantize_kv.cpp and
// sparse_attention.cpp are compiled for each row of MLA_FP8_CPU_ISAS into a namespace of its own; cpu::x() picks
// the best one that this machine runs.
#include <cstdint>
#include <span>

#include "ops/dequantize_kv.h"
#include "ops/quantize_kv.h"
#include "ops/sparse_attention.h"

#if defined(__x86_64__)
#define MLA_FP8_CPU_ISAS(X) X(plain) X(avx2) X(avx512) X(avx512_bf16)
#else
#define MLA_FP8_CPU_ISAS(X) X(plain)
#endif

namespace mla_fp8::cpu {

#define MLA_FP8_DECLARE_ISA(isa)                                                                  \
  namespace isa {                                                                                 \
  void quantize_kv(const QuantizeKvParams& params, int64_t begin, int64_t end);                   \
  void dequantize_kv(const DequantizeKvParams& params, int64_t begin, int64_t end);               \
  void dequantize_kv_paged(const DequantizeKvPagedParams& params, int64_t request, int64_t begin, \
                           int64_t end);                                                          \
  }
MLA_FP8_CPU_ISAS(MLA_FP8_DECLARE_ISA)
#undef MLA_FP8_DECLARE_ISA

// One row per instruction set, weakest first.
struct IsaKernels {
  const char* name;
  bool supported;  // by this machine
  decltype(&plain::quantize_kv) quantize_kv;
  decltype(&plain::dequantize_kv) dequantize_kv;
  decltype(&plain::dequantize_kv_paged) dequantize_kv_paged;
};
std::span<const IsaKernels> isa_table();
const IsaKernels& best_isa();

}  // namespace mla_fp8::cpu
