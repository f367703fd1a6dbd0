"""Stand-ins for what our integrations build on in vLLM and SGLang, with their names and signatures."""

import enum
import types
from types import SimpleNamespace

import peer_standins
import torch


class AttentionBackendEnum(enum.Enum):
    FLASHMLA_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
    CUSTOM = None


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


class FlashMLASparseImpl:
    @staticmethod
    def _compute_fp8_decode_padded_heads(num_heads):
        return 64 if num_heads <= 64 else 128

    def __init__(self, num_heads, scale):
        self.softmax_scale = scale
        self.fp8_decode_padded_heads = self._compute_fp8_decode_padded_heads(num_heads)

    def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
        raise AssertionError("FlashMLA was called")

    def _bf16_flash_mla_kernel(
        self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None, actual_num_heads=None
    ):
        raise AssertionError("FlashMLA was called")


def copied(function):
    """The same in an object of its own, as what is taken over is replaced in every module that holds it."""
    code, name, defaults = function.__code__, function.__name__, function.__defaults__
    return types.FunctionType(code, function.__globals__, name, defaults)


def vllm(monkeypatch, plugins=None) -> SimpleNamespace:
    """vLLM with its registry, its FlashMLA backend, and FlashMLA's functions where vLLM keeps them."""
    registered = {}

    def register_backend(backend, class_path=None, is_mamba=False):
        registered[backend] = class_path

    peer_standins.install(monkeypatch, "vllm").__version__ = "0.99"
    peer_standins.install(monkeypatch, "vllm.v1.attention.backends.mla.flashmla_sparse")
    names = {
        "vllm.v1.attention.backends.registry": (register_backend, AttentionBackendEnum),
        "vllm.v1.attention.backends.mla.flashmla_sparse": (FlashMLASparseBackend, FlashMLASparseImpl),
        "vllm.v1.attention.ops.flashmla": (
            copied(peer_standins.flash_mla_with_kvcache), copied(peer_standins.flash_mla_sparse_fwd),
        ),
        "vllm.envs": (),
    }  # fmt: skip
    modules = {name: peer_standins.install(monkeypatch, name, *given) for name, given in names.items()}
    modules["vllm.envs"].VLLM_PLUGINS = plugins
    modules["vllm"] = peer_standins.install(monkeypatch, "vllm")
    modules["vllm"].__version__ = "0.99"
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


def dequantize_k_cache_paged_dsa(quant_k_cache, page_table_1_flattened, group_size=128):
    return "SGLang's own"


def dequantize_k_cache_paged_dsv4(quant_k_cache, page_table_1_flattened, page_size, out=None, layout="v4"):
    return "SGLang's own"


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
        "sglang.srt.plugins.hook_registry": (HookRegistry, HookType),
        "sglang.srt.environ": (),
    }
    for name, given in names.items():
        module = peer_standins.install(monkeypatch, name, *given)
    module.envs = SimpleNamespace(SGLANG_PLUGINS=SimpleNamespace(get=lambda: plugins))
    peer_standins.install(monkeypatch, "sglang").__version__ = "0.5.23"
    return registered


def expected(case) -> tuple[torch.Tensor, torch.Tensor]:
    out, _, lse = case.expected()
    return out, lse
