"""DeepSeek V4 in vLLM on a Hopper GPU, without what is no attention and would have to be brought along.

| vLLM's own | not packed, because | in its place |
|---|---|---|
| hyper-connections in TileLang, unless packed | 36 MB, a CUDA compiler at run time | vLLM's own in PyTorch |
| compressor in CuTe DSL | 95 MB | vLLM's Triton kernel for other GPUs: the same cache |
| routed experts (FP4) | no part of attention | the shared expert alone |
| FP8 weights | random weights have no scales | bf16, as for a model without quantization |

vLLM's own are: projections, rotation and norm of queries, cache writes, indexer (DeepGEMM), index kernels,
gathers, attention, their metadata and graphs.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import torch

# By compress_ratio: window alone, 4 with an indexer, 128.
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
HEADS_OF_GROUP = 8  # of the grouped output projection, whatever the number of heads
PAGE = 256  # tokens of a page


def write_config(folder: Path, heads: int, layers: int, vocabulary: int, max_length: int) -> None:
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
        "vocab_size": vocabulary, "hidden_size": 2048, "moe_intermediate_size": 1024,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 1,
        "layer_types": [KINDS[layer % len(KINDS)] for layer in range(layers)],
        "mlp_layer_types": ["moe"] * layers, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
        "o_groups": heads // HEADS_OF_GROUP, "o_lora_rank": 1024, "sliding_window": 128,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "hc_mult": 4, "hc_sinkhorn_iters": 3, "num_nextn_predict_layers": 0,
        "max_position_embeddings": 2 * max_length, "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def register() -> None:
    """The replacements of the table above, before a model is made."""
    sys.modules["vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"] = _compressor()
    from vllm.models.deepseek_v4.nvidia import model

    if importlib.util.find_spec("tilelang") is None:
        for function in (_pre_broadcast, _pre, _post_pre, _post, _head):
            setattr(model, NAMES[function], function)
    model.DeepseekV4MoE = _shared_expert(model)
    original = model.collect_moe_layers
    model.collect_moe_layers = lambda owner, layers, *args, **options: original(owner, (), *args, **options)


def _compressor() -> types.ModuleType:
    module = types.ModuleType("sparse_attn_compress_cutedsl")

    def compress(*, store_full_kv, store_full_fp8, fp8_scale, **options):
        from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as triton_kernels

        if store_full_kv:
            raise ValueError("the compressor in Triton writes packed FP8 caches, got one of plain rows")
        triton_kernels.compress_norm_rope_store_triton(**options)

    module._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL = compress
    return module


def _shared_expert(model) -> type[torch.nn.Module]:
    class SharedExpert(torch.nn.Module):
        use_native_mega_moe = False  # vLLM's warm-up asks

        def __init__(self, vllm_config, prefix="", **unused) -> None:
            super().__init__()
            config = vllm_config.model_config.hf_config
            self.shared_experts = model.DeepseekV4MLP(
                hidden_size=config.hidden_size,
                intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
                hidden_act=config.hidden_act,
                swiglu_limit=config.swiglu_limit,
                quant_config=vllm_config.quant_config,
                prefix=f"{prefix}.shared_experts",
            )

        def forward(self, hidden_states, input_ids=None, mega_gate_metadata=None):
            return self.shared_experts(hidden_states)

    return SharedExpert


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def _pre(residual, *mix, norm_weight, norm_eps):
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post, comb, x = mhc_pre_torch(residual, *mix)
    return post, comb, _normed(x, norm_weight, norm_eps)


def _pre_broadcast(x, fn, *mix, fn_broadcast, **norm):
    residual = x[:, None].repeat(1, fn.shape[1] // x.shape[1], 1)
    return residual, *_pre(residual, fn, *mix, **norm)


def _post(x, residual, post, comb):
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return mhc_post_torch(x, residual, post, comb)


def _post_pre(x, residual, post, comb, *mix, n_splits, tile_n, **norm):
    residual = _post(x, residual, post, comb)
    return residual, *_pre(residual, *mix, **norm)


def _head(streams, fn, scale, base, rms_eps, eps):
    x = streams.flatten(1).float()
    mixes = torch.rsqrt(x.square().mean(1, keepdim=True) + rms_eps) * (x @ fn.T)
    weights = torch.sigmoid(mixes * scale + base) + eps
    return torch.einsum("tm,tmh->th", weights, streams.float()).to(streams.dtype)


NAMES = {
    _pre_broadcast: "mhc_pre_broadcast_tilelang", _pre: "mhc_pre_tilelang", _post: "mhc_post_tilelang",
    _post_pre: "mhc_fused_post_pre_tilelang", _head: "hc_head_fused_kernel_tilelang",
}  # fmt: skip
