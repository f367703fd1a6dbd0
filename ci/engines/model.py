"""Models with DeepSeek V3.2's and GLM's attention and random weights, small in all other dimensions."""

import collections
import importlib.util
import json
import os
import sys
import types
import zlib
from pathlib import Path

import ranks
import torch
import v4_model

VOCABULARY = 4096
MAX_LENGTH = 8192
_GAIN = 1.5  # of every projection: above 1, attention matters to the logits
_HEAD_GAIN = 4  # of the output layer: logits of several units, as trained models have
_MOST_SINKS = 128
V4 = "MLA_FP8_ENGINE_IS_V4"  # "1" in the environment of an engine's processes


def register() -> None:
    """An entry point of vllm.general_plugins."""
    without_cutedsl()
    random_weights()
    name_triton_kernels()
    ranks.replace()
    if os.environ.get(V4) == "1":
        v4_model.register()


# What GLM-5.2 has in another way; layers "S" of the pattern attend to what the last "F" has chosen.
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "indexer_rope_interleave": True,
    "index_topk_pattern": "FSSSFS",
}  # fmt: skip
# GLM-5.3-Flash: its layers of MLA, which chooses pools of four keys and rotates nothing, without those of
# linear attention and without hyper-connections.
GLM_POOLS = {
    "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text", "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 256, "v_head_dim": 256, "index_n_heads": 32, "indexer_rope_interleave": True,
    "index_kpool": 4, "index_kpool_always_select_tail": True, "mla_use_nope": True, "mhc": False,
    "swiglu_limit": 10.0, "pad_token_id": 0, "num_nextn_predict_layers": 0,
}  # fmt: skip


def write_config(
    folder: Path, heads: int, layers: int, max_length: int, changes: dict[str, object] | None = None
) -> None:
    config = {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": 1,
        "first_k_dense_replace": 1000, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
        "hidden_act": "silu", "max_position_embeddings": 2 * max_length, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "tie_word_embeddings": False, "attention_bias": False,
        "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.02,
        "use_cache": True,
    } | (changes or {})  # fmt: skip
    if "index_kpool" in config:
        config["mlp_layer_types"] = ["dense"] * layers
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"config.{os.getpid()}"  # engines of a step write the same file
    own.write_text(json.dumps(config, indent=1))
    own.replace(folder / "config.json")


@torch.no_grad()
def fill(param: torch.Tensor, name: str, seen: collections.Counter) -> None:
    """A weight that keeps the variance. It depends on its name and shape alone, so that all engines have the
    same model; ``seen`` counts the weights that share both. A rank's part depends on the rank, too.
    """
    key = (name, () if name.endswith("attn_sink") else tuple(param.shape))
    shard = shard_of(param)
    if shard is not None and shard.tp_rank > 0:
        key = (*key, shard.tp_rank)
    g = torch.Generator(device=param.device).manual_seed(zlib.crc32(f"{key}{seen[key]}".encode()))
    seen[key] += 1
    if name.endswith("attn_sink"):  # padded to as many heads as the kernel takes: the same for each
        sinks = torch.randn(_MOST_SINKS, dtype=torch.float32, device=param.device, generator=g)
        param.copy_(sinks[: len(param)])
    elif param.dim() == 0 or (param.dim() == 1 and name.endswith("weight")):
        param.fill_(1)
    elif param.dim() == 1:
        param.normal_(0, 0.1, generator=g)
    else:
        std = _GAIN / param.shape[-1] ** 0.5
        if param.shape[0] == VOCABULARY:  # the embedding comes first, then the output layer
            is_head = seen[key] > 1 or name.startswith("lm_head")
            std = _HEAD_GAIN / param.shape[-1] ** 0.5 if is_head else 1.0
        elif hasattr(shard, "num_embeddings"):
            std = _HEAD_GAIN / param.shape[-1] ** 0.5 if "LMHead" in type(shard).__name__ else 1.0
        for part in param.data.view(-1, param.shape[-1]).split(4096):
            noise = torch.randn(part.shape, dtype=torch.float32, device=param.device, generator=g)
            part.copy_(noise * std)


def shard_of(param: torch.Tensor):
    """The layer of vLLM of whose weight a rank has this part, or None."""
    layer = getattr(getattr(param, "weight_loader", None), "__self__", None)
    whole = getattr(layer, "tp_size", 1) == 1 or type(layer).__name__ == "ReplicatedLinear"
    return None if whole else layer


def is_filled(param: torch.Tensor) -> bool:
    floating = torch.is_floating_point(param) and torch.finfo(param.dtype).bits >= 16
    return floating and param.device.type != "meta"


def random_weights() -> None:
    """vLLM's dummy weights are so small that attention hardly matters: `fill` in their place."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    original = weight_utils.initialize_single_dummy_weight
    seen = collections.Counter()

    def initialize(param, low=None, high=None, seed=1234, name=""):
        if not is_filled(param):
            return original(param, low, high, seed, name=name)
        fill(param, name, seen)
        return param

    for module in (weight_utils, dummy_loader):
        module.initialize_single_dummy_weight = initialize


def name_triton_kernels() -> None:
    """Many of vLLM's kernels in Triton are methods named ``kernel``. Profiles show their classes instead."""
    from vllm.model_executor.warmup import jit_warmup_triton_helper

    def name(cls, **unused) -> None:
        kernel = cls.__dict__.get("kernel")
        kernel = getattr(kernel, "__func__", kernel)  # a staticmethod's
        if hasattr(kernel, "repr"):
            kernel.repr = lambda _, name=cls.__name__: name

    base = jit_warmup_triton_helper.VllmTritonJitKernel
    for cls in base.__subclasses__():
        name(cls)
    base.__init_subclass__ = classmethod(name)


def without_cutedsl() -> None:
    """The rotation of V3.2's queries exists in CuTe DSL and in Triton: without that package, Triton's."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        absent = types.ModuleType("fused_q_cutedsl")
        absent.fused_q_cutedsl = None
        absent.is_fused_q_cutedsl_supported = lambda *args, **options: False
        sys.modules["vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"] = absent
