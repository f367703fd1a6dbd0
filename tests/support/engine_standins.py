"""Stand-ins for what our integrations build on in vLLM and SGLang, with their names and signatures."""

import enum
import logging
import sys
import types
from types import SimpleNamespace

import peer_standins

from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat.sglang import LAYOUTS
from mla_fp8.integrations import flash_mla_calls, log, vllm_sparse, vllm_v4


class AttentionBackendEnum(enum.Enum):
    FLASHMLA_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
    CUSTOM = None

    def is_overridden(self):
        return self in registered

    def get_path(self):
        return registered.get(self, self.value)


registered = {}  # of AttentionBackendEnum


class FlashMLASparseBackend:
    supported_kv_cache_dtypes = ("auto", "bfloat16", "fp8_ds_mla", "fp8", "nvfp4_ds_mla")

    @staticmethod
    def get_name():
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls():
        return FlashMLASparseImpl

    @classmethod
    def is_sparse(cls):
        return True

    @classmethod
    def supports_compute_capability(cls, capability):
        return capability.major in (9, 10)

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_sink(cls):
        return False


class HiSparseMLAIndexGroup:
    pass


def triton_convert_req_index_to_global_index(
    req_id,
    block_table,
    token_indices,
    BLOCK_SIZE=64,
    NUM_TOPK_TOKENS=2048,
    BLOCK_STRIDE_ROWS=None,
    return_valid_counts=False,
    HAS_PREFILL_WORKSPACE=False,
    prefill_workspace_request_ids=None,
    prefill_workspace_starts=None,
):
    """Slots of positions, -1 where it was; asked for, how many are valid, too. Of prompts: rows."""
    assert BLOCK_STRIDE_ROWS is None
    assert token_indices.shape[1] == NUM_TOPK_TOKENS and len(req_id) == len(token_indices)
    valid = token_indices >= 0
    safe = token_indices.where(valid, 0).long()
    slots = block_table[req_id[:, None].long(), safe // BLOCK_SIZE] * BLOCK_SIZE + safe % BLOCK_SIZE
    if HAS_PREFILL_WORKSPACE:
        ids = prefill_workspace_request_ids[: len(slots), None].long()
        slots = slots.where(ids < 0, prefill_workspace_starts[ids.clamp_min(0)] + safe)
    slots = slots.where(valid, -1).int()
    return (slots, valid.sum(1).int()) if return_valid_counts else slots


class FlashMLASparseImpl:
    index_group = None

    @staticmethod
    def _compute_fp8_decode_padded_heads(num_heads):
        return 64 if num_heads <= 64 else 128

    def __init__(self, num_heads, scale):
        self.softmax_scale, self.dcp_world_size = scale, 1
        self.fp8_decode_padded_heads = self._compute_fp8_decode_padded_heads(num_heads)

    def _convert_logical_to_physical_topk(
        self, logical_topk_indices, attn_metadata, *, block_stride_rows, return_valid_counts
    ):
        return triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[: len(logical_topk_indices)],
            attn_metadata.block_table,
            logical_topk_indices,
            attn_metadata.block_size,
            logical_topk_indices.shape[1],
            block_stride_rows,
            return_valid_counts,
        )

    def _forward_fp8_kv_mixed_batch(
        self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata, kernel_metadata=None
    ):
        return "vLLM's own mixed batch"

    def _forward_fp8_kv_separate_prefill_decode(self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata):
        return "vLLM's own prefill and decode"

    def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
        raise AssertionError("FlashMLA was called")

    def _bf16_flash_mla_kernel(
        self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None, actual_num_heads=None, out=None
    ):
        raise AssertionError("FlashMLA was called")


def compute_global_topk_indices_and_lens(
    topk_indices, token_to_req_indices, block_table, block_size, is_valid_token
):
    request, is_valid = (x[: len(topk_indices)] for x in (token_to_req_indices, is_valid_token))
    slots, lengths = triton_convert_req_index_to_global_index(
        request, block_table, topk_indices, block_size, topk_indices.shape[1], None, True
    )
    return slots, lengths * is_valid


class DeepseekV4FlashMLAAttention:
    @classmethod
    def get_padded_num_q_heads(cls, num_heads):
        if num_heads > 128:
            raise ValueError(f"vLLM's own limit: {num_heads} heads")
        return 64 if num_heads <= 64 else 128

    def _forward_prefill(
        self, q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata
    ):
        output.fill_(-7)  # vLLM's own

    def _forward_decode(self, q, kv_cache, swa_metadata, attn_metadata, swa_only, output):
        """Each draft is a request of its own; ``case`` has its keys."""
        call = sys.modules["vllm.v1.attention.ops.flashmla"].flash_mla_with_kvcache
        call(**decode_call(self.case), out=output[:, None])


def init_logger(name):
    return logging.getLogger(f"mla_fp8.of_{name}")


def _methods(cls) -> dict:
    return {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}


def copied(function):
    """The same in an object of its own, as what is taken over is replaced in every module that holds it."""
    code, name, defaults = function.__code__, function.__name__, function.__defaults__
    return types.FunctionType(code, function.__globals__, name, defaults)


def vllm(monkeypatch, plugins=None) -> SimpleNamespace:
    """vLLM with its registry, its FlashMLA backend, and FlashMLA's functions where vLLM keeps them."""
    registered.clear()

    def register_backend(backend, class_path=None, is_mamba=False):
        registered[backend] = class_path

    peer_standins.install(monkeypatch, "vllm").__version__ = "0.99"
    peer_standins.install(monkeypatch, "vllm.v1.attention.backends.mla.flashmla_sparse")
    names = {
        "vllm.v1.attention.backends.registry": (register_backend, AttentionBackendEnum),
        "vllm.v1.attention.backends.mla.flashmla_sparse": (
            FlashMLASparseBackend, FlashMLASparseImpl, HiSparseMLAIndexGroup,
            triton_convert_req_index_to_global_index,
        ),
        **{
            module: (
                type(vllm_v4.LAYER, (), _methods(DeepseekV4FlashMLAAttention) | {"__module__": module}),
                compute_global_topk_indices_and_lens,
            )
            for module in vllm_v4.MODULES.values()
        },
        "vllm.logger": (init_logger,),
        "vllm.v1.attention.ops.flashmla": (
            copied(peer_standins.flash_mla_with_kvcache), copied(peer_standins.flash_mla_sparse_fwd),
        ),
        "vllm.envs": (),
    }  # fmt: skip
    modules = {name: peer_standins.install(monkeypatch, name, *given) for name, given in names.items()}
    modules["vllm.envs"].VLLM_PLUGINS = plugins
    modules["vllm"] = peer_standins.install(monkeypatch, "vllm")
    modules["vllm"].__version__ = "0.99"
    vllm_sparse.log_once.cache_clear()
    log.say_once.cache_clear()
    return SimpleNamespace(registered=registered, modules=modules)


class HookType(enum.Enum):
    AROUND = "around"
    REPLACE = "replace"


def sgl_flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    descale_q=None,
    descale_k=None,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    kv_format=None,
    *,
    use_legacy=True,
):
    return "SGLang's own", kv_format


def sgl_flash_mla_sparse_fwd(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, *, use_legacy=True
):
    return "SGLang's own"


class DeepseekSparseAttnBackend:
    def _forward_flashmla_sparse(
        self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None, attn_sink=None
    ):
        return "SGLang's own"

    def _forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
        return "SGLang's own"


class DeepseekV4AttnBackend:
    speculative_num_draft_tokens = None

    def forward(self, q, k, v, layer, forward_batch, *args, **kwargs):
        return self.attention(q)


class MqaAttentionBase:
    def _kernel_num_heads(self, num_tokens):
        return 64


def get_platform():
    return SimpleNamespace(is_sm120=False, is_sm90=True)


def dequantize_k_cache_paged_dsa(quant_k_cache, page_table_1_flattened, group_size=128):
    return "SGLang's own"


def dequantize_k_cache_paged_dsv4(quant_k_cache, page_table_1_flattened, page_size, out=None, layout="v4"):
    return "SGLang's own"


class KVLayout(str, enum.Enum):
    V4 = "v4"
    V41 = "v41"
    V41_FP4 = "v41_fp4"
    V41_NEW = "v41_new"

    def page_bytes(self, page_size):
        return KV_LAYOUTS[LAYOUTS[self.value.removesuffix("_new")]].page_bytes(page_size)


class EnvStr:
    def __init__(self, default):
        self.default, self.given = default, None

    def get(self):
        return self.default if self.given is None else self.given

    def is_set(self):
        return self.given is not None


def select_dsv4_kv_layout():
    return "SGLang's own"


def get_exec():
    return SimpleNamespace(kernel=SimpleNamespace(dsv4_attn_backend="flashmla"))


def sglang(monkeypatch, plugins="") -> dict:
    """SGLang with its hook registry; returns what was registered: {target: (hook, type)}."""
    registered = {}

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type=None, *, source=None):
            registered[target] = (hook, hook_type)

    def renamed(function, name):
        function.__name__ = name
        return function

    peer_standins.install(monkeypatch, "sglang").__version__ = "0.5.23"
    names = {
        "sglang.kernels.ops.attention.flash_mla_interface": (
            renamed(sgl_flash_mla_with_kvcache, "flash_mla_with_kvcache"),
            renamed(sgl_flash_mla_sparse_fwd, "flash_mla_sparse_fwd"),
        ),
        "sglang.kernels.ops.attention.dsa.dequant_k_cache": (dequantize_k_cache_paged_dsa,),
        "sglang.kernels.ops.attention.dsv4.dequant_k_cache": (dequantize_k_cache_paged_dsv4,),
        "sglang.srt.layers.attention.dsa_backend": (DeepseekSparseAttnBackend,),
        "sglang.srt.layers.attention.deepseek_v4_backend": (DeepseekV4AttnBackend,),
        "sglang.srt.models.deepseek_v4": (MqaAttentionBase, get_platform),
        "sglang.srt.mem_cache.deepseek_v4_memory_pool": (select_dsv4_kv_layout, get_exec, get_platform),
        "sglang.kernels.ops.attention.dsv4.kv_layout": (KVLayout,),
        "sglang.srt.plugins.hook_registry": (HookRegistry, HookType),
        "sglang.srt.environ": (),
    }
    for name, given in names.items():
        module = peer_standins.install(monkeypatch, name, *given)
    module.envs = SimpleNamespace(
        SGLANG_PLUGINS=EnvStr(plugins), SGLANG_DSV4_KV_LAYOUT=EnvStr("v4"),
        SGLANG_DSV4_COMPRESSED_KV_LAYOUT=EnvStr("auto"),
        SGLANG_ENABLE_DETERMINISTIC_INFERENCE=EnvStr(""),
    )  # fmt: skip
    monkeypatch.setattr(flash_mla_calls._v41_rows, "on", False)
    log.say_once.cache_clear()
    peer_standins.install(monkeypatch, "sglang").__version__ = "0.5.23"
    return registered


def decode_call(case) -> dict:
    """The arguments of flash_mla_with_kvcache for a case of sparse attention."""
    main, *extra = case.scopes
    arguments = {
        "q": case.q[:, None],
        "k_cache": case.layout.flash_mla_view(main.kv_cache, main.page_size),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": object(),
        "softmax_scale": case.sm_scale,
        "is_fp8_kvcache": True,
        "indices": main.indices[:, None],
        "attn_sink": case.attn_sink,
        "topk_length": main.length,
    }
    for s in extra:
        arguments |= {
            "extra_k_cache": s.layout.flash_mla_view(s.kv_cache, s.page_size),
            "extra_indices_in_kvcache": s.indices[:, None],
            "extra_topk_length": s.length,
        }
    return arguments
