"""The table of ops of docs/support.md: what csrc/registration.h has for which device, and what ran there."""

import re

from results import ROOT, markdown

# What the ops of a line do, and how they were tested on NVIDIA GPUs other than Hopper.
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("write a cache, read it back", "emulated", ("quantize_kv", "dequantize_kv", "dequantize_kv_paged")),
    (
        "norm, RoPE, quantise, and back", "emulated",
        ("k_norm_rope_insert", "qk_norm_rope_insert", "compress_kv", "inverse_rope", "inverse_rope_quantize"),
    ),
    (
        "all between a layer's projections", "emulated",
        ("prepare_keys", "prepare_queries"),
    ),
    (
        "indices for prefill; pad heads", "emulated",
        ("build_swa_token_ids", "combine_topk_swa_indices", "combine_topk_swa_indices_ragged", "pad_q_heads"),
    ),
    ("attend in decode", "emulated, portable kernel", ("sparse_decode",)),
    (
        "attend in prompts", "emulated, portable kernel",
        ("sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window"),
    ),
    (
        "attend to whole pages", "emulated",
        ("paged_attention_ragged", "paged_attention_ragged_latent"),
    ),
    (
        "the indexer; keys that neighbours share", "emulated, portable kernel",
        ("quantize_index_k", "index_logits", "index_logits_ragged", "index_topk", "index_topk_ragged",
         "index_topk_blocks", "index_topk_ragged_blocks", "topk_to_slots", "plan_shared_keys"),
    ),
    ("join results", "emulated", ("merge_attention_states", "merge_partial_states")),
    (
        "rows in host memory, pools, ranks", "emulated",
        ("resolve_hot_rows", "copy_host_rows", "store_host_rows", "forget_rows", "pool_index_k",
         "merge_topk"),
    ),
)  # fmt: skip

# Compiled for Hopper, and not run on a GPU since they were written.
NOT_RUN: set[str] = set()


def registered(macro: str) -> set[str]:
    """The ops of a list, those of the lists in it included."""
    source = (ROOT / "csrc/registration.h").read_text()
    body = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*)", source)
    if body is None:
        raise SystemExit(f"csrc/registration.h has no {macro}")
    included = (registered(name) for name in re.findall(r"(MLA_FP8_\w+)\(X\)", body[1]))
    return set(re.findall(r"X\(([a-z]\w+)\)", body[1])).union(*included)


def table() -> str:
    cpu, cuda, hip = (registered(f"MLA_FP8_{device}_OPS") for device in ("CPU", "CUDA", "HIP"))
    listed = {op for *_, ops in GROUPS for op in ops}
    public = {op for op in cpu | cuda | hip if not op.endswith("_out")}
    if listed != public:
        raise SystemExit(f"docs/gen/support.py: ops without a line, or gone: {sorted(listed ^ public)}")
    rows = []
    for what, other, ops in GROUPS:
        states = [
            "ran" if set(ops) <= cpu else "",
            ("compiled" if NOT_RUN & set(ops) else "ran") if set(ops) <= cuda else "",
            other if set(ops) <= cuda else "",
            "emulated" if set(ops) <= hip else "no kernel",
        ]
        rows.append([", ".join(f"`{op}`" for op in ops), what, *states])
    return markdown(["op", "what", "CPU", "Hopper", "other NVIDIA", "ROCm"], rows)


def parts() -> dict[str, str]:
    return {"ops": table()}
