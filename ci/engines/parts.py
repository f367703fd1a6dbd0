"""What the kernels of an engine's step are for, by their names, and where a step's time goes."""

import functools
import re

# The first list with a word of the kernel's name says the part: words are regular expressions over the name
# in snake_case. Names are those of vLLM 0.33, SGLang 0.5.23, DeepGEMM, FlashMLA, cuBLAS and PyTorch. Ours
# begin with mla_fp8.
PARTS = {
    "hyper-connections": ("mhc", r"\bhc_", "_hc_", "sinkhorn", "prenorm_gemm"),
    "exchange of ranks": (
        "gather_queries", "exchange_(states|scores)", "merge_topk", "merge_partial", "correct_attn_cp",
        "direct_dcp", "lse_combine", "dispatch_output_lse", "signal_kernel", "nccl.*(gather|scatter|send)",
    ),
    "experts": ("moe", "expert", "topk_gating", "grouped_topk", "align_block"),
    "sampling": (
        "gumbel", "arg_?max", "topk_topp", "sampl", "logprob", "rejection_", "_penalties_", "_temperature_",
        "_min_p_", "_bad_words_", "_bias_kernel", "(?<!kpool_)soft_?max", "multinomial", "radix_sort",
        "bincount", "_ranks_", "softcap",
    ),
    "inputs of a step": (
        "_prepare_", "slot_mapping", "block_table", "_post_update", "req_to_token", "metadata", "seqlen",
        "seq_lens", "_expand_idx_mapping", "_expand_page", "embed", "position", "_local_seq", "write_req",
        "swa_meta", "compute_swa_?indices", "_apply_write", "_zero_kv_blocks", "_token_request_mapping",
        "compute_.*_loc", r"\balloc_(decode|extend)", "prepare_uniform",
    ),
    "indexer": (
        "mqa_logits", "index_scan", "index_merge", "index_logits", "gather_indexer", "topk_?unified",
        "topk_main", "top_?kper_row", "(persistent|sampled|cooperative)_topk", "topk_transform", "fast_topk",
        "filtered_topk", "radix_topk", "_upcast_logits", "_block_scores", "_finalize_candidates",
        "_keylist", "_mask_candidates", "fp32_logits", "index_(list|blocks)_kernel", "paged_indexer_topk",
        "pack_seq",
        "amax8_varlen",
    ),
    "queries": (
        "fused_q_kernel", "concat_mlaq", "concat_mla_absorb_q", "hadamard", "act_quant",
        "indexer_q(?!uant)", "q_?norm_rope", "prepare_queries", "pad_q_heads", "rope_inplace", "fused_rope",
        "rotary", "_q_kv_norm_quant", "deepseek_rope", "rope_tail", "triton_poi_fused_mul",
        "fwht",
    ),
    "rows of pages": ("gather_and_upconvert", "gather_k_?cache", "dequanti[sz]e", "get_k_and_s"),
    "keys and caches": (
        "norm_rope", "concat_and_cache", "concat_mla", "fused_store", "compress", "partial_states",
        "prepare_keys", "set_mla_kv", "set_k_and_s", "quantize_kv", "quantize_index_k",
        "kpool", "quantize_and_insert", "indexer_k", "index_k(?!ernel)", "rope_(plain|quant)_insert",
        "_store_latent", "save_ring", "store_cache", "quant_k_cache", "k_cache", "kv_buffer",
    ),
    "indices": (
        "convert_req_index", "remap", "combine_topk", "global_topk", "topk_to_slots", "topk_lens",
        "build_swa", "plan_shared", "short_context_topk", "transform_index", "pack_topk", "translate",
        "create_.*_indices", "safe_lengths", "swa_page_indices", "expand_pools",
    ),
    "attention": (
        "mla_fp8.*(attention|decode|prefill|few_heads|many_heads|bf16_tiles|merge|parts)", "sparse_attn",
        "flash_mla", "flash_fwd", "splitkv", "sparse_(decode|prefill)", "smxx::", "sm90::(decode|prefill)",
        "inv(erse)?_rope", "merge_attn", "merge_state", "mla_combine",
    ),
    "GEMMs": (
        "nvjet", "gemm", "gemv", "cublas", "cutlass", "xmma", "split_?k", "_bmm", "einsum", "matmul",
        "dot_kernel",
    ),
    "norms, activation": ("rms_?norm", "layer_?norm", "act_and_mul", "silu", "swiglu", "norm_kernel"),
    "communication": ("all_?reduce", "nccl", "all_gather", "cross_device"),
    "copies, fills": (
        "memcpy", "memset", "copy", "fill_?functor", "cat_?array", "masked_fill", "index_elementwise",
        "index_select", "gather_kernel", "scatter",
    ),
}  # fmt: skip
ALL = (*PARTS, "rest")
# The rest of a layer: what this package may change, beside what it cannot.
NOT_OURS = ("GEMMs", "experts", "hyper-connections", "communication", "sampling", "inputs of a step")
MOST_OF_REST = 0.05


@functools.cache
def part_of(kernel: str) -> str:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kernel).lower()
    return next((part for part, words in PARTS.items() if re.search("|".join(words), snake)), "rest")


class Step:
    """A step's kernels, (microseconds, launches, those in graphs) by name, as those of a layer by part."""

    def __init__(self, kernels: dict[str, tuple[float, float, float]], layers: int) -> None:
        self.kernels, self.layers = kernels, layers
        self.parts = {
            part: tuple(
                sum(each[i] for name, each in kernels.items() if part_of(name) == part) / layers
                for i in (0, 1)
            )
            for part in ALL
        }

    @property
    def whole(self) -> float:
        return sum(us for us, _ in self.parts.values())

    @property
    def ours(self) -> float:
        """Microseconds of what this package may change."""
        return sum(us for part, (us, _) in self.parts.items() if part not in NOT_OURS)

    @property
    def launches(self) -> float:
        """Launches of a layer that are neither of NOT_OURS nor the engine's norms and activation.

        What runs at most in half of the layers belongs to the step, and so does what runs beside a graph.
        """
        others = (*NOT_OURS, "norms, activation")
        where = 2 if any(in_graphs for *_, in_graphs in self.kernels.values()) else 1
        counts = [each[where] for name, each in self.kernels.items() if part_of(name) not in others]
        return sum(n for n in counts if 2 * n > self.layers) / self.layers

    def longest(self, part: str, most: int = 3) -> list[str]:
        named = sorted((us, name) for name, (us, *_) in self.kernels.items() if part_of(name) == part)
        return [f"{us:.1f} us {name[:90]}" for us, name in named[::-1][:most]]

    def named(self) -> list[str]:
        """Every kernel of the parts that `launches` counts, with its launches, those in graphs, and
        microseconds in a layer."""
        counted = [part for part in ALL if part not in (*NOT_OURS, "norms, activation")]
        return [
            f"{part}: {name[:90]}, {n / self.layers:.2f} x ({graph / self.layers:.2f}), "
            f"{us / self.layers:.2f} us"
            for part in counted
            for name, (us, n, graph) in sorted(self.kernels.items())
            if n and part_of(name) == part
        ]

    def problem(self) -> str | None:
        rest, whole = self.parts["rest"][0], self.whole
        if rest <= MOST_OF_REST * whole:
            return None
        return f"{rest / whole:.0%} of the step belong to no part: {'; '.join(self.longest('rest'))}"


def table(what: str, found: dict[str, Step]) -> str:
    """Microseconds of a layer by part, a column for each of ``found``, by whose kernels the engine ran."""
    lines = [f"| {what}: us of a layer | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    rows: list[tuple[str, list[float]]] = [
        (part, [step.parts[part][0] for step in found.values()]) for part in ALL
    ]
    rows.append(("whole GPU", [step.whole for step in found.values()]))
    rows.append((f"without {', '.join(NOT_OURS)}", [step.ours for step in found.values()]))
    rows.append(("launches of these, without norms", [step.launches for step in found.values()]))
    lines += [
        f"| {name} | " + " | ".join(f"{x:.1f}" for x in each) + " |" for name, each in rows if any(each)
    ]
    return "\n".join(lines)
