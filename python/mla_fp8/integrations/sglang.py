"""SGLang: FlashMLA's sparse calls and the gathers before them run on our kernels, for DeepSeek V3.2 and V4.

Entry point ``mla_fp8`` of the group ``sglang.srt.plugins``. Calls that we do not have (dense decode; V4.1's
formats, but for sglang_v41_rows.py) go to SGLang's own functions. Tested with SGLang 0.5.23; what it builds
on is probed, and said if not there.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from .. import probes
from ..compat import sglang as ours
from ..layout import KV_LAYOUTS
from . import attend, drafts, flash_mla_calls, sglang_context_parallel, sglang_indexer, sglang_same_bits
from .hooks import register_in_sglang
from .log import say_once

_LOGGER = logging.getLogger("sglang.mla_fp8")
_CALLS = "sglang.kernels.ops.attention.flash_mla_interface"
_V32 = "sglang.kernels.ops.attention.dsa.dequant_k_cache"
_V4 = "sglang.kernels.ops.attention.dsv4.dequant_k_cache"
_V32_LAYER = "sglang.srt.layers.attention.dsa_backend"
_V4_LAYER = "sglang.srt.models.deepseek_v4"
_V4_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_PACKED = KV_LAYOUTS["dsv32"]
_V32_ROWS = {"V32": _PACKED, "V32_NO_ROPE": flash_mla_calls.NOPE}
MAX_HEADS = 128
_PROMPT_ROWS, _PROMPT_HEADS = 256, 16  # from so many rows on, up to so many heads
_FASTER = (
    "mla_fp8: with so few query heads prompts are faster straight from the FP8 pages: "
    "--dsa-prefill-backend flashmla_kv"
)


def _dequantize_v4(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    layout = options.get("layout", args[4] if len(args) > 4 else "v4")
    known = ours.LAYOUTS if flash_mla_calls.reads_v41_rows() else ("v4",)
    return (ours.dequantize_k_cache_paged_dsv4 if layout in known else original)(*args, **options)


def _dequantize_v32(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    cache = options.get("quant_k_cache", args[0] if args else None)
    if cache is None or cache.shape[-1] != _PACKED.bytes_per_token:  # without rope
        return original(*args, **options)
    return ours.dequantize_k_cache_paged_dsa(*args, **options)


def _forward_flashmla_sparse(
    original: Callable[..., Tensor],
    self: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """V3.2 over bf16 rows: heads as they are."""
    if sglang_context_parallel.serves(self):
        if self.dsa_kv_cache_store_fp8 or attn_sink is not None:
            raise ValueError(
                "mla_fp8: expected --dsa-prefill-backend flashmla_kv over FP8 pages with decode context "
                "parallelism, and no sinks: flashmla_sparse would gather rows that other ranks have"
            )
        slots, lens = sglang_context_parallel.slots_of_rank(self, page_table_1)
        of_rank = attend.over_rows(q_all, kv_cache[:, 0], slots, sm_scale=sm_scale, topk_length=lens)
        return sglang_context_parallel.of_rank(*of_rank)
    if topk_length is not None and len(topk_length) != len(q_all):
        topk_length = None  # of other rows
    is_prompt = len(q_all) >= _PROMPT_ROWS and q_all.shape[1] <= _PROMPT_HEADS
    if self.dsa_kv_cache_store_fp8 and is_prompt:
        say_once(_FASTER)
    options: dict[str, Any] = {"sm_scale": sm_scale, "topk_length": topk_length, "attn_sink": attn_sink}
    return attend.over_rows(q_all, kv_cache[:, 0], page_table_1, **options)[0]


def _forward_flashmla_kv(
    original: Callable[..., Tensor],
    self: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: Tensor,
) -> Tensor | tuple[Tensor, Tensor]:
    """V3.2 over its FP8 pages: heads as they are, lengths as the metadata has them."""
    layout = _V32_ROWS.get(self.flashmla_kv_format)
    if not self.dsa_kv_cache_store_fp8 or layout is None or self.kv_cache_dim != layout.bytes_per_token:
        return original(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)
    q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
    lengths = metadata.dsa_cache_seqlens_int32
    group = drafts.ALONE
    if drafts.switched_on():  # lengths are of the step's rows; those that pad it are behind
        queries = drafts.queries(len(lengths), len(metadata.cache_seqlens_int32), _drafts_of(self))
        group = drafts.Group(queries, _layers_with_these_slots(self, layer, metadata))
    of_ranks = sglang_context_parallel.serves(self)
    if of_ranks:
        page_table_1, lengths = sglang_context_parallel.slots_of_rank(self, page_table_1)
    out, lse = attend.over_pages(
        q,
        kv_cache.view(-1, self.physical_page_size, 1, self.kv_cache_dim),
        page_table_1,
        layout=layout,
        page_size=self.physical_page_size,
        sm_scale=sm_scale,
        topk_length=lengths if len(lengths) == len(q) else None,
        group=group,
    )
    return sglang_context_parallel.of_rank(out, lse) if of_ranks else out[:, None]


def _layers_with_these_slots(backend: Any, layer: Any, metadata: Any) -> drafts.Layers | None:
    """Layers that skip the choice of keys have that of the last one before them that does not."""
    pool = backend.token_to_kv_pool
    skips: list[bool] = getattr(pool, "skip_topk_layers", [])  # of this rank's layers, if any may
    if not any(skips):
        return None
    first = own = layer.layer_id - pool.start_layer
    while first > 0 and skips[first]:
        first -= 1
    if first == own and not any(skips[own + 1 : own + 2]):
        return None  # alone
    return drafts.Layers(metadata, "index group", first, id(layer))


def _kernel_num_heads(original: Callable[..., int], self: Any, num_tokens: int) -> int:
    """V4 under tensor parallelism: heads as they are, where its calls are FlashMLA's, and so ours."""
    padded = self.is_dsv41 and not flash_mla_calls.reads_v41_rows()  # with zeros: their kernels read them
    others = padded or self.n_local_heads > MAX_HEADS
    if others or import_module(_V4_LAYER).get_platform().is_sm120:
        return original(self, num_tokens)
    return int(self.n_local_heads)


def _forward(
    original: Callable[..., Any], self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
    *args: Any, **options: Any,
) -> Any:  # fmt: skip
    """V4's attention, which flattens the drafts of a request: says which rows they are."""
    queries = drafts.queries(len(q), forward_batch.batch_size, _drafts_of(self))
    with drafts.step(drafts.Group(queries)):
        return original(self, q, k, v, layer, forward_batch, *args, **options)


def _drafts_of(backend: Any) -> int:
    """Query tokens of a request in a step that verifies drafts."""
    return backend.speculative_num_draft_tokens or 1


# target: (what runs around it, what of it is called by which parameters)
_AROUND: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    f"{_CALLS}.flash_mla_with_kvcache": (
        flash_mla_calls.around_decode, ("indices", "extra_k_cache", "kv_format", "use_legacy"),
    ),
    f"{_CALLS}.flash_mla_sparse_fwd": (
        flash_mla_calls.around_prefill_base_2, ("attn_sink", "topk_length", "use_legacy"),
    ),
    f"{_V32}.dequantize_k_cache_paged_dsa": (
        _dequantize_v32, ("quant_k_cache", "page_table_1_flattened", "group_size"),
    ),
    f"{_V4}.dequantize_k_cache_paged_dsv4": (
        _dequantize_v4, ("quant_k_cache", "page_table_1_flattened", "page_size", "out", "layout"),
    ),
}  # fmt: skip
# By model, the methods without which query heads are padded. Compared parameter by parameter.
METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "V3.2": {
        f"{_V32_LAYER}.DeepseekSparseAttnBackend._forward_flashmla_sparse": _forward_flashmla_sparse,
        f"{_V32_LAYER}.DeepseekSparseAttnBackend._forward_flashmla_kv": _forward_flashmla_kv,
    },
    "V4": {f"{_V4_LAYER}.MqaAttentionBase._kernel_num_heads": _kernel_num_heads},
}
HOOKS = {target: hook for target, (hook, _) in _AROUND.items()}
# With drafts.py switched on; what of it is called by which parameters.
DRAFTS = f"{_V4_BACKEND}.DeepseekV4AttnBackend.forward"
_FORWARD = ("q", "k", "v", "layer", "forward_batch")


def register() -> None:
    """Entry point: registers the hooks, or logs why not."""
    reason = why_not()
    if reason:
        _LOGGER.warning("mla_fp8 is not used in SGLang%s: %s", _version(), reason)
        return
    padded = {model: why_not_methods(model) for model in METHODS}
    hooks = dict(HOOKS)
    for model, reason in padded.items():
        hooks |= METHODS[model] if reason is None else {}
    refused = sglang_same_bits.why_not()
    if refused is None:
        sglang_same_bits.lift_refusal()
        hooks |= sglang_same_bits.HOOKS
    for model, indexer in sglang_indexer.HOOKS.items():
        hooks |= indexer if sglang_indexer.why_not(model) is None else {}
    register_in_sglang(hooks)
    _LOGGER.info(
        "mla_fp8 serves FlashMLA's sparse calls and the gathers before them, for the formats V32, "
        "V32_NO_ROPE and V4; query heads of %s. SGLang's own: the indexer without mla_fp8_index_topk, "
        "cache writes, dense decode, V4.1's formats without mla_fp8_v41_rows. Deterministic inference is %s.",
        ", of ".join(f"{x} {'as they are' if y is None else f'padded: {y}'}" for x, y in padded.items()),
        "allowed" if refused is None else f"SGLang's own: {refused}",
    )


def register_query_groups() -> None:
    """Entry point: drafts of a request go as a group."""
    drafts.switch(True)
    module, name, attribute = DRAFTS.rsplit(".", 2)
    reason = probes.why_not_call({module: {f"{name}.{attribute}": _FORWARD}})
    if reason is None:
        register_in_sglang({DRAFTS: _forward})
    _LOGGER.info(
        "mla_fp8: the drafts of a request go as a group where the plan takes it, of V3.2; of V4%s",
        f" not: {reason}" if reason else "",
    )


def why_not() -> str | None:
    """The first thing that this SGLang lacks of what we build on, or None."""
    needs: dict[str, dict[str, tuple[str, ...]]] = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry.register": ("target", "hook", "hook_type"), "HookType.AROUND": (),
        }
    }  # fmt: skip
    for target, (_, passed) in _AROUND.items():
        module, _, name = target.rpartition(".")
        needs.setdefault(module, {})[name] = passed
    reason = probes.why_not_call(needs)
    if reason:
        return reason
    calls = import_module(_CALLS)
    for name, function, known in (
        ("flash_mla_with_kvcache", flash_mla_calls.decode, flash_mla_calls.KNOWN_DECODE),
        ("flash_mla_sparse_fwd", flash_mla_calls.prefill, flash_mla_calls.KNOWN_PREFILL),
    ):
        reason = probes.why_not_replace(getattr(calls, name), function, known)
        if reason:
            return f"{name} {reason}"
    return None


def why_not_methods(model: str) -> str | None:
    """Why the methods of a model's layer cannot be ours, or None."""
    for target, method in METHODS[model].items():
        module, name, attribute = target.rsplit(".", 2)
        reason = probes.why_not_call({module: {f"{name}.{attribute}": ()}})
        if reason:
            return reason
        reason = probes.why_not_replace(probes.find(import_module(module), f"{name}.{attribute}"), method)
        if reason:
            return f"{name}.{attribute} {reason}"
    return None


def _version() -> str:
    try:
        return f" {import_module('sglang').__version__}"
    except Exception:
        return ""
