"""Decode context parallelism of vLLM (DeepSeek V3.2, GLM-5) on our ops, for the backend MLA_FP8. Off unless
VLLM_PLUGINS names ``mla_fp8_context_parallel``.

===================  ========================================================================================
limits of FlashMLA   lifted: vLLM refuses 32 heads of a rank, other paddings of all heads, and bf16 caches
choice, queries,     :class:`mla_fp8.context_parallel.Exchange`, one for all layers. More tokens than vLLM has
results              memory of its own for go by collectives
slots                this rank's own, packed, and how many: of decode from the merge of choices where
                     ``mla_fp8_layer_ops`` serves the layer, else topk_to_slots
queries              those of ``mla_fp8_layer_ops`` are whole: nobody concatenates them
drafts               rows with a choice of their own, as in vLLM: a draft chooses among what it sees
===================  ========================================================================================

Prefill context parallelism and micro-batches stay vLLM's, and so does the exchange of other models.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import probes
from .._torch_private import without_torch_function
from ..context_parallel import Exchange
from ..layout import HEAD_DIM_V
from ..ops.topk_to_slots import topk_to_slots
from . import vllm_slots
from .log import logger, say_once
from .vllm_logits import Logits

NAME = "mla_fp8_context_parallel"
ATTENTION = "vllm.v1.attention.backends.mla.flashmla_sparse"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
_state = SimpleNamespace(on=False, exchange=None)
_MOST_CANDIDATES = 4096
_LOGGER = logging.getLogger("mla_fp8")
_NEEDS: probes.Needs = {
    ATTENTION: {
        "MIN_HEADS_FOR_BF16_PREFILL": (),
        "FlashMLASparseBackend.get_builder_cls": (),
        "FlashMLASparseMetadataBuilder": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        "FlashMLASparseImpl._compute_fp8_decode_padded_heads": ("num_heads",),
        "FlashMLASparseImpl._forward_bf16_kv": (
            "q", "kv_c_and_k_pe_cache", "topk_indices", "attn_metadata", "actual_num_heads",
        ),
    },
    "vllm.v1.attention.ops.dcp": {"MLADCPManager": ()},
    "vllm.distributed.parallel_state": {"get_pcp_group": ()},
    INDEXER: {"_merge_dcp_topk_global": (
        "logits", "topk_indices", "topk_tokens", "dcp_rank", "dcp_world_size", "cp_interleave", "row_starts",
    )},
}  # fmt: skip


def register() -> None:
    """Entry point: switches it on, or logs why not. Re-entrant."""
    reason = why_not()
    if reason:
        _LOGGER.warning("%s is not used in vLLM: %s", NAME, reason)
        return
    _state.on = True


def why_not() -> str | None:
    """Why this vLLM's context parallelism cannot be ours, or None."""
    return probes.why_not_call(_NEEDS)


def switched_on() -> bool:
    return bool(_state.on)


def serves(impl: Any) -> bool:
    """Whether ranks have a part of this layer's keys each, and attention to them is ours."""
    return switched_on() and impl.dcp_world_size > 1 and impl.pcp_world_size == 1


def num_ranks() -> int:
    """Ranks that have a part of the keys each, as vLLM's indexer sees it."""
    try:
        return int(import_module(INDEXER).get_dcp_group().world_size)
    except AssertionError:  # vLLM's, where nothing is distributed
        return 1


def merges() -> bool:
    """Whether what ranks choose becomes the choice of all here; not with prefill context parallelism."""
    if not switched_on():
        return False
    try:
        return bool(import_module("vllm.distributed.parallel_state").get_pcp_group().world_size == 1)
    except AssertionError:
        return True


def merges_decode(lens: Tensor) -> bool:
    """Whether vLLM merges what ranks choose for these lengths of decode: as the step's metadata says."""
    if not merges() or num_ranks() == 1:
        return False
    for metadata in import_module(INDEXER).get_forward_context().attn_metadata.values():
        step: Any = getattr(metadata, "decode", None)
        if hasattr(step, "global_seq_lens") and step.seq_lens.data_ptr() == lens.data_ptr():
            return step.global_seq_lens is not None
    return False


def around_merge(original: Callable[..., None], *args: Any, **options: Any) -> None:
    """vLLM's _merge_dcp_topk_global: what each rank chose among its own entries becomes the choice of all.

    What DeepGEMM and vLLM's top-k chose on a rank is taken, too: ranks without entries have empty logits.
    """
    if not merges():
        return original(*args, **options)
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    logits, positions, world = given["logits"], given["topk_indices"], given["dcp_world_size"]
    own = logits.candidates if isinstance(logits, Logits) else None
    if world == 1:  # of drafts that all ranks make
        if own is not None:
            positions.copy_(own[1])
        return None
    if own is None:
        logits = logits.looked_at("the merge of ranks") if isinstance(logits, Logits) else logits
        own = _candidates(logits, positions, given.get("row_starts"))
    pages = logits.pages if isinstance(logits, Logits) and vllm_slots.wanted() else None
    table, page_size, next_n = pages or (None, 1, 1)
    _, slots, lens = _exchange_of_choice(*positions.shape).merge_topk(
        own[0].view(torch.float32),
        own[1],
        topk=given["topk_tokens"],
        interleave=given["cp_interleave"],
        page_table=table,
        page_size=page_size,
        next_n=next_n,
        out_positions=positions,
    )
    if table is not None and slots is not None:
        vllm_slots.offer_of_rank(slots, lens, table, page_size)
    return None


def _exchange_of_choice(rows: int, columns: int) -> Exchange:
    exchange: Exchange | None = _state.exchange
    if exchange is not None and rows <= exchange.max_tokens and columns <= exchange.max_candidates:
        return exchange
    return _collectives(import_module(INDEXER).get_dcp_group())


@functools.cache
def _collectives(group: Any) -> Exchange:
    return Exchange(
        group.device_group, 1 << 30, group.world_size, max_candidates=_MOST_CANDIDATES, symmetric=False
    )


def _candidates(logits: Tensor, positions: Tensor, row_starts: Tensor | None) -> Tensor:
    """[2, rows, topk] int32 of logits that were computed."""
    own = torch.stack([torch.zeros_like(positions), positions])
    if logits.shape[1] > 0:
        columns = positions.clamp_min(0).long()
        columns = columns if row_starts is None else columns + row_starts[:, None]
        own[0] = logits.gather(1, columns.clamp_max(logits.shape[1] - 1)).view(torch.int32)
    return own


def slots_of_rank(impl: Any, positions: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
    """(slots, lens) of this rank's own keys among ``positions [rows, topk]`` of requests."""
    if metadata.num_decode_tokens == metadata.num_actual_tokens == len(positions):
        group = getattr(impl, "index_group", None)
        known = vllm_slots.of_rank(group, len(positions), metadata.block_table, metadata.block_size)
        if known is not None:
            return known
    return topk_to_slots(
        positions,
        metadata.block_table,
        page_size=metadata.block_size,
        row_to_request=metadata.req_id_per_token[: len(positions)],
        world_size=impl.dcp_world_size,
        rank=impl.dcp_rank,
        interleave=metadata.cp_kv_cache_interleave_size,
    )


def make_builder(theirs: ModuleType) -> type:
    """vLLM's builder of metadata without its refusals, which exchanges by us."""

    class Builder(theirs.FlashMLASparseMetadataBuilder):  # type: ignore[misc, name-defined]
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
            ranks = vllm_config.parallel_config
            if ranks.decode_context_parallel_size == 1 or ranks.prefill_context_parallel_size > 1:
                super().__init__(kv_cache_spec, layer_names, vllm_config, device)
                return
            with _without_limits(theirs):
                super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            layers = vllm_config.compilation_config.static_forward_context
            for name in layer_names:
                _exchange_by_us(layers[name], vllm_config)

    return Builder


@contextmanager
def _without_limits(theirs: ModuleType) -> Iterator[None]:
    """vLLM's builder asks these two whether FlashMLA returns the lse of every token, of all ranks' heads."""
    impl = theirs.FlashMLASparseImpl
    fewest, padded = theirs.MIN_HEADS_FOR_BF16_PREFILL, vars(impl)["_compute_fp8_decode_padded_heads"]
    theirs.MIN_HEADS_FOR_BF16_PREFILL = 1 << 30  # type: ignore[attr-defined]
    impl._compute_fp8_decode_padded_heads = staticmethod(lambda num_heads: 64)
    try:
        yield
    finally:
        theirs.MIN_HEADS_FOR_BF16_PREFILL = fewest  # type: ignore[attr-defined]
        impl._compute_fp8_decode_padded_heads = padded


class Whole(Tensor):
    """Queries with their RoPE part. To concatenate that once more gives the queries as they are."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.cat:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        with without_torch_function():
            return args[0][0].as_subclass(Tensor)


class Ranks:
    """In place of what vLLM's manager of a layer calls around attention."""

    def __init__(self, few: Exchange, many: Exchange) -> None:
        self.few, self.many = few, many

    def query_gather(self, query: Tensor) -> Tensor:
        """In a graph that breaks at attention :class:`Whole` is lost: its RoPE part comes once more."""
        exchange = self._of(query)
        return exchange.gather_queries(query[..., : exchange.head_dim_qk])

    def combine(
        self, partial_output: Tensor, partial_lse: Tensor, *, seq_lens: Tensor, query_start_loc: Tensor
    ) -> Tensor:
        """Rows without own keys have lse -inf, so nobody has to look at lengths."""
        return self._of(partial_output).merge(partial_output, partial_lse)[0]

    def _of(self, rows: Tensor) -> Exchange:
        return self.few if len(rows) <= self.few.max_tokens else self.many


@functools.cache
def _ranks_of(
    group: Any, device: torch.device, few: int, many: int, num_heads: int, head_dim_qk: int, topk: int
) -> Ranks:
    options: dict[str, Any] = {"head_dim_qk": head_dim_qk, "device": device}
    heads = num_heads * group.world_size
    ranks = Ranks(
        Exchange(group.device_group, few, heads, max_candidates=topk, **options),
        Exchange(group.device_group, many, heads, symmetric=False, **options),
    )
    logger().info(
        "mla_fp8 exchanges the choice, queries and results of %d ranks over %s: %d query heads of all, "
        "up to %d tokens; more by collectives",
        group.world_size,
        ranks.few.transport,
        heads,
        few,
    )
    return ranks


def why_vllms(layer: Any, vllm_config: Any) -> str | None:
    """Why the exchange of a layer that serves() stays vLLM's, or None."""
    if max(vllm_config.parallel_config.num_ubatches, 1) > 1:
        return "micro-batches, which exchange at the same time"
    if vllm_config.model_config.dtype is not torch.bfloat16 or layer.kv_lora_rank != HEAD_DIM_V:
        return f"results of {layer.kv_lora_rank} x {vllm_config.model_config.dtype}"
    return None


def _exchange_by_us(layer: Any, vllm_config: Any) -> None:
    manager = layer.dcp_manager
    reason = why_vllms(layer, vllm_config)
    if reason:
        say_once(f"mla_fp8: the exchange of context parallelism stays vLLM's for {reason}")
        return
    topk = getattr(vllm_config.model_config.hf_text_config, "index_topk", 0)
    ranks = _ranks_of(
        manager.group,
        manager.device,
        manager.max_num_tokens,
        vllm_config.scheduler_config.max_num_batched_tokens,
        layer.num_heads,
        layer.kv_lora_rank + layer.qk_rope_head_dim,
        topk if topk <= _MOST_CANDIDATES else 0,
    )
    manager.query_gather, manager.combine = ranks.query_gather, ranks.combine
    _state.exchange = ranks.few
