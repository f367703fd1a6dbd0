"""DeepSeek V4 and V4.1 in SGLang on a Hopper GPU, without what is no attention and would have to be brought.

| SGLang's own | not packed, because | in its place |
|---|---|---|
| hyper-connections in TileLang, unless packed | 36 MB, a CUDA compiler at run time | its own in PyTorch |
| Sinkhorn iterations in TileLang, unless packed | the same | its own in Triton, for other GPUs |
| routed experts (FP4) | no part of attention | the shared expert alone |
| FP8 weights | random weights have no scales | bf16, as for a model without quantization |

SGLang's own are: projections, norms and rotations, cache writes, compressors, indexer (DeepGEMM), top-k,
index kernels, gathers, attention, their metadata and graphs. Query heads are padded as under tensor
parallelism: on one GPU SGLang hands FlashMLA the heads that a model has, and FlashMLA has 64 and 128.
"""

import functools
import importlib.util
import json
from importlib import import_module
from pathlib import Path

import torch

# Of V4's layers: the window alone, 4 with an indexer, 128.
RATIOS = (0, 4, 128)
# Of V4.1's: the window alone, 1 and 2 with entries and an indexer of their own, 2 with those of the last.
V41_RATIOS, V41_SOURCES = (0, 1, 2, 2), (1, 2)
# With two levels: of ratio 1 one has keys and publishes blocks, the others choose among these.
LEVELS_RATIOS, LEVELS_SOURCE, LEVELS_BLOCKS = (0, 1, 1, 1), 1, 128
HEADS_OF_GROUP = 8  # of the grouped output projection, whatever the number of heads
HAS_TILELANG = importlib.util.find_spec("tilelang") is not None
# In the environment. Without torch.compile, which SGLang uses for its hyper-connections in PyTorch.
SWITCHES = {} if HAS_TILELANG else {
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0", "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip


def write_config(
    folder: Path,
    heads: int,
    layers: int,
    vocabulary: int,
    max_length: int,
    v41: bool = False,
    levels: bool = False,
) -> None:
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
        "vocab_size": vocabulary, "hidden_size": 2048, "intermediate_size": 2048,
        "moe_intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 1, "compress_ratios": [RATIOS[i % len(RATIOS)] for i in range(layers)],
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_hash_layers": 0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "routed_scaling_factor": 1.0, "hidden_act": "silu",
        "first_k_dense_replace": 0, "moe_layer_freq": 1,
        "head_dim": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 448, "v_head_dim": 512,
        "kv_lora_rank": 512, "q_lora_rank": 1024, "o_groups": heads // HEADS_OF_GROUP, "o_lora_rank": 1024,
        "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn", "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": max_length // 2,
        },
        "max_position_embeddings": 2 * max_length, "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if v41:
        sources = [i for i in range(layers) if i % len(V41_RATIOS) in V41_SOURCES]
        config |= {
            "model_type": "deepseek_v41", "hc_pre_from_prev_sublayer": False,  # hyper-connections as V4's
            "compress_ratios": [V41_RATIOS[i % len(V41_RATIOS)] for i in range(layers)],
            "kv_source_layer_ids": sources, "index_source_layer_ids": sources,
        }  # fmt: skip
    if levels:
        ratios = [LEVELS_RATIOS[i % len(LEVELS_RATIOS)] for i in range(layers)]
        config |= {
            "compress_ratios": ratios, "kv_source_layer_ids": [LEVELS_SOURCE],
            "index_source_layer_ids": [i for i, ratio in enumerate(ratios) if ratio],
            "candidate_source_layer_id": LEVELS_SOURCE, "candidate_topk_blocks": LEVELS_BLOCKS,
            "candidate_block_size": 8, "index_n_heads": 32,
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def register() -> None:
    """The replacements of the table above, before a model is made."""
    if not HAS_TILELANG:
        mhc = import_module("sglang.kernels.ops.layernorm.mhc")
        mhc.hc_split_sinkhorn = mhc._hc_split_sinkhorn_triton
    deepseek_v2 = import_module("sglang.srt.models.deepseek_v2")
    model = import_module("sglang.srt.models.deepseek_v4")
    deepseek_v2.DeepseekV2MoE = _shared_expert(deepseek_v2)
    for name in ("_kernel_num_heads", "_local_attn_sink"):
        setattr(model.MqaAttentionBase, name, _as_one_of_two(getattr(model.MqaAttentionBase, name)))


def _shared_expert(deepseek_v2) -> type[torch.nn.Module]:
    class SharedExpert(torch.nn.Module):
        _shared_expert_tp1 = False

        def __init__(self, config, quant_config=None, prefix="", **unused) -> None:
            super().__init__()
            self.tp_size = import_module("sglang.srt.runtime_context").get_parallel().tp_size
            self.shared_experts = deepseek_v2.DeepseekV2MLP(
                hidden_size=config.hidden_size,
                intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
                hidden_act=config.hidden_act,
                quant_config=quant_config,
                reduce_results=False,
                prefix=f"{prefix}.shared_experts",
            )

        def forward(self, hidden_states, *unused, **unused_too) -> torch.Tensor:
            return self.shared_experts(hidden_states)

    return SharedExpert


def _as_one_of_two(method):
    """A method of SGLang's attention as the first rank of two runs it, with the heads of this one."""

    @functools.wraps(method)
    def called(self, *args, **options):
        size, self.attn_tp_size = self.attn_tp_size, max(2, self.attn_tp_size)
        try:
            return method(self, *args, **options)
        finally:
            self.attn_tp_size = size

    return called
