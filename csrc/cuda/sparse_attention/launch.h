#pragma once
// Runs the kernel that a plan names.
#include <bit>
#include <iterator>
#include <utility>

#include "common/stream.h"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

void launch_plan(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream);

void launch_portable(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream);
void launch_bf16_tiles(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream);
void launch_shared_keys(const SparseAttentionParams& p, int most_shared, int32_t* lists, gpuStream_t stream);
// Kernels with many instances are compiled in slices, each a translation unit (CMakeLists.txt). Runs the
// plan's instance if the slice has it, and returns whether it has.
template <Kernel kKernel, int kSlice>
bool launch_slice(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream);

// An instance of a kernel is a variant over a layout or a pair that it reads. Slice s has the instances s, s
// + kSlices, ...
constexpr int instance_number(size_t variant, KvPair pair) {
  int number = 0;
  for (size_t i = 0; i < variant; ++i)
    if (kVariants[i].kernel == kVariants[variant].kernel) number += std::popcount(kVariants[i].kinds());
  return number + std::popcount(kVariants[variant].kinds() & ((1u << Rows::kind(pair)) - 1));
}
// Runs fn(constant<variant>{}, constant<layout>{}, constant<extra layout>{}) for the instance that plan and
// problem name, if the slice has it, and returns whether it has. The variant is an index of kVariants.
// Without a second cache both layouts are the first one's.
template <Kernel kKernel, int kSlice, int kSlices, class Fn>
bool with_variant_of_slice(const SparseAttentionParams& p, const Plan& plan, Fn&& fn) {
  const Variant& v = plan.variant;
  bool found = false;
  with_kv_layouts(p.layouts(), [&](auto id, auto extra) {
    const auto run_if_named = [&](auto i) {
      constexpr Variant kVariant = kVariants[i()];
      constexpr KvPair kPair{id(), extra()};
      if constexpr (kVariant.kernel == kKernel && kVariant.reads(kPair) &&
                    instance_number(i(), kPair) % kSlices == kSlice) {
        if (v.schedule != kVariant.schedule || v.heads != kVariant.heads || v.producers != kVariant.producers)
          return;
        found = true;
        fn(i, id, extra);
      }
    };
    [&]<size_t... i>(std::index_sequence<i...>) {
      (run_if_named(constant<i>{}), ...);
    }(std::make_index_sequence<std::size(kVariants)>{});
  });
  return found;
}
template <Kernel kKernel, class Fn>
void with_variant(const SparseAttentionParams& p, const Plan& plan, Fn&& fn) {
  if (!with_variant_of_slice<kKernel, 0, 1>(p, plan, fn)) throw no_such_kernel(plan);
}

}  // namespace mla_fp8::gpu
