"""What the kernels of an engine's step are for, by their names, and where a step's time goes."""

import re

# The first pattern that fits names the part. Names are those of vLLM 0.33, SGLang 0.5.23, DeepGEMM, FlashMLA,
# cuBLAS and PyTorch; ours begin with mla_fp8. The order matters: a name says more in front than behind.
PARTS = (
    ("hyper-connections", r"mhc|\bhc_|_hc_|sinkhorn|prenorm_gemm"),
    ("experts", r"moe|expert|topkGating|grouped_topk|align_block"),
    (
        "sampling",
        r"gumbel|argmax|ArgMax|topk_topp|[Ss]ampl(e|ing)_?|logprob|rejection_|_penalties_"
        r"|_temperature_|_min_p_"
        r"|_bad_words_|_bias_kernel|SoftMax|softmax_warp|LogSoftMax|multinomial|RadixSort|bincount|_ranks_",
    ),
    (
        "inputs of a step",
        r"_prepare_|_compute_slot_mappings|_gather_block_tables|_post_update|slot_mapping|req_to_token"
        r"|get_mla_metadata|metadata|seqlen|seq_lens|_expand_idx_mapping|_expand_page|block_table|embed"
        r"|_combine_sampled|position|_local_seq|write_req|_swa_meta|paged_mqa_logits_meta|compute_.*_loc",
    ),
    (
        "indexer",
        r"mqa_logits|index_scan|index_merge|index_logits|cp_gather_indexer|TopKUnified|topKPerRow"
        r"|(persistent|sampled|cooperative)_topk|topk_transform|fast_topk|FilteredTopK|RadixTopK"
        r"|_upcast_logits"
        r"|_block_scores|_finalize_candidates|_keylist|_mask_candidates|fp32_logits",
    ),
    (
        "queries",
        r"_fused_q_kernel|ConcatMLAQ|concat_mla_absorb_q|hadamard|act_quant|fused_indexer_q|q_norm_rope"
        r"|prepare_queries|pad_q_heads|QNormRope|indexer_q|FusedRope|rope_inplace|rotary|_q_kv_norm_quant",
    ),
    ("rows of pages", r"gather_and_upconvert|gather_k_cache|dequantize"),
    (
        "keys and caches",
        r"norm_rope|NormRope|concat_and_cache|concat_mla|fused_deepseek|fused_store|compress|prepare_keys"
        r"|set_mla_kv|set_k_and_s|quantize_kv|quantize_index_k|quantize_and_insert|indexer_k|index_k(?!ernel)"
        r"|rope_(plain|quant)_insert|_store_latent|save_ring|store_cache|quant_k_cache|k_cache|kv_buffer",
    ),
    (
        "indices",
        r"convert_req_index|remap|combine_topk|global_topk|topk_to_slots|topk_lens|build_swa|plan_shared"
        r"|short_context_topk|transform_index|pack_topk|translate|create_.*_indices|safe_lengths",
    ),
    (
        "attention",
        r"mla_fp8.*(attention|decode|prefill|few_heads|many_heads|bf16_tiles|merge|parts)|sparse_attn"
        r"|flash_mla|flash_fwd|splitkv|sparse_(decode|prefill)|smxx::|sm90::(decode|prefill)|inv_rope"
        r"|inverse_rope"
        r"|merge_attn|merge_state|mla_combine",
    ),
    (
        "GEMMs",
        r"nvjet|gemm|Gemm|GEMM|gemv|cublas|cutlass|xmma|splitKreduce|splitK|_bmm|einsum|matmul"
        r"|dot_kernel|ll_bf16",
    ),
    ("norms, activation", r"[Rr]ms_?[Nn]orm|RMSNorm|[Ll]ayer_?[Nn]orm|act_and_mul|silu|swiglu|norm_kernel"),
    ("communication", r"all_?reduce|nccl|AllReduce|all_gather|cross_device"),
    (
        "copies, fills",
        r"Memcpy|Memset|copy|FillFunctor|CatArray|masked_fill|index_elementwise|indexSelect"
        r"|gather_kernel|scatter",
    ),
)
ALL = (*(part for part, _ in PARTS), "rest")
# The rest of a layer: what this package may change, beside what it cannot.
NOT_OURS = ("GEMMs", "experts", "hyper-connections", "communication", "sampling", "inputs of a step")
MOST_OF_REST = 0.05


def part_of(kernel: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, kernel)), "rest")


class Step:
    """A step's kernels, (microseconds, launches) by name, as those of a layer by part."""

    def __init__(self, kernels: dict[str, tuple[float, float]], layers: int) -> None:
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
        """Launches that are neither of NOT_OURS nor the engine's norms and activation."""
        return sum(n for part, (_, n) in self.parts.items() if part not in (*NOT_OURS, "norms, activation"))

    def longest(self, part: str, most: int = 3) -> list[str]:
        named = sorted((us, name) for name, (us, _) in self.kernels.items() if part_of(name) == part)
        return [f"{us:.1f} us {name[:90]}" for us, name in named[::-1][:most]]

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
