"""SGLang's decode context parallelism of DSA (DeepSeek V3.2, GLM-5) on Hopper: SGLang has no kernel for it.
Off unless SGLANG_PLUGINS names ``mla_fp8_context_parallel`` beside ``mla_fp8``.

=========  ================================================================================================
attention  ``--dsa-decode-backend`` and ``--dsa-prefill-backend`` flashmla_kv, or flashmla_sparse over bf16
           rows: of all heads to this rank's own keys. SGLang's own exchange gets the lse in base 2
slots      topk_to_slots: slot s of the ranks is slot s // ranks of rank s % ranks
queries,   :class:`mla_fp8.context_parallel.Exchange` with ``--dcp-comm-backend a2a``, as many tokens as a
results    CUDA graph has; SGLang's own exchange of more. With ``--dcp-replicate-q-proj`` each rank makes all
           queries of decode
=========  ================================================================================================

SGLang's own: index keys, which every rank has, and cache writes.
"""

import functools
import logging
import math
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mla_fp8_plugins import named_in_sglang

from .. import probes
from ..context_parallel import Exchange
from ..layout import HEAD_DIM_V
from ..ops.topk_to_slots import topk_to_slots
from .hooks import register_in_sglang

NAME = "mla_fp8_context_parallel"
_ATTENTION = "sglang.srt.layers.attention.dsa_backend"
_LAYER = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"
_CONTEXT = "sglang.srt.runtime_context"
_LEAST, _ROPE_DIM = 8, 64  # of queries that nobody exchanges; of queries
_LOGGER = logging.getLogger("sglang.mla_fp8")
_state = SimpleNamespace(on=False, exchange=None)


def serves(backend: Any) -> bool:
    """Whether ranks have a part of the keys each, and attention to them is ours."""
    return bool(_state.on and backend.dcp_size > 1)


def slots_of_rank(backend: Any, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(slots, lens) of this rank's own keys among ``slots [rows, topk]`` of all ranks."""
    return topk_to_slots(
        slots,
        _one_page(slots.device),
        page_size=1 << 24,
        next_n=max(len(slots), 1),
        world_size=backend.dcp_size,
        rank=backend.dcp_rank,
    )


def of_rank(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What the backend returns of a rank: SGLang's own exchange expects base 2."""
    return out, lse if _exchange_of(len(out)) else lse.mul_(1 / math.log(2))


def _exchange_of(rows: int) -> Exchange | None:
    exchange: Exchange | None = _state.exchange
    ours = exchange is not None and rows <= exchange.max_tokens
    return exchange if ours and import_module(_CONTEXT).get_parallel().dcp_comm_backend == "a2a" else None


def init_cuda_graph_state(original: Callable[..., None], self: Any, max_bs: int, max_num_tokens: int) -> None:
    """Of the backend: it knows the largest step, and all ranks call it before the first."""
    original(self, max_bs, max_num_tokens)
    if not serves(self) or (_state.exchange and max_num_tokens <= _state.exchange.max_tokens):
        return
    _one_page(torch.device(self.device))
    parallel = import_module(_CONTEXT).get_parallel()
    _state.exchange = Exchange(
        parallel.dcp_group.device_group,
        max_num_tokens,
        self.num_dcp_q_heads,
        head_dim_qk=_LEAST if parallel.dcp_replicate_q_proj else HEAD_DIM_V + _ROPE_DIM,
        device=self.device,
    )
    _LOGGER.info(
        "mla_fp8 exchanges the queries and results of %d ranks over %s, up to %d tokens",
        self.dcp_size,
        _state.exchange.transport,
        max_num_tokens,
    )


def all_gather_q_for_mla_decode(
    original: Callable[..., tuple[Tensor, Tensor]], q_nope_out: Tensor, q_pe: Tensor
) -> tuple[Tensor, Tensor]:
    """SGLang's where no merge of ours follows: runs for tuning, or a second micro-batch."""
    exchange, widths = _exchange_of(len(q_pe)), [q_nope_out.shape[-1], q_pe.shape[-1]]
    if (
        exchange is None
        or exchange.head_dim_qk != sum(widths)
        or exchange.merge_is_due
        or import_module(_LAYER).get_in_autotune_dummy_run()
    ):
        return original(q_nope_out, q_pe)
    nope, rope = exchange.gather_queries(q_nope_out, q_pe).split(widths, dim=-1)
    return nope, rope


def dcp_a2a_lse_reduce(
    original: Callable[..., Tensor],
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    is_lse_base_on_e: bool = True,
    cuda_graph_buffers: dict[str, Tensor] | None = None,
    comm_backend: str = "a2a",
) -> Tensor:
    exchange = _exchange_of(len(cp_attn_out))
    if exchange is None or is_lse_base_on_e:
        return original(
            cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e, cuda_graph_buffers, comm_backend
        )
    return exchange.merge(cp_attn_out, cp_attn_lse)[0]


# target: (what runs around it, what of it is called by which parameters)
HOOKS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    f"{_ATTENTION}.DeepseekSparseAttnBackend.init_cuda_graph_state": (
        init_cuda_graph_state, ("max_bs", "max_num_tokens"),
    ),
    f"{_LAYER}.all_gather_q_for_mla_decode": (all_gather_q_for_mla_decode, ("q_nope_out", "q_pe")),
    f"{_LAYER}.dcp_a2a_lse_reduce": (
        dcp_a2a_lse_reduce,
        ("cp_attn_out", "cp_attn_lse", "cp_group", "is_lse_base_on_e", "cuda_graph_buffers", "comm_backend"),
    ),
}  # fmt: skip


def register() -> None:
    """Entry point: switches it on and registers the hooks, or logs why not."""
    reason = why_not() if "mla_fp8" in named_in_sglang() else "SGLANG_PLUGINS does not name mla_fp8"
    if reason:
        _LOGGER.warning("%s is not used in SGLang: %s", NAME, reason)
        return
    _state.on = True
    register_in_sglang({target: hook for target, (hook, _) in HOOKS.items()})


def why_not() -> str | None:
    """The first thing that this SGLang lacks of what we build on, or None."""
    needs: dict[str, dict[str, tuple[str, ...]]] = {_CONTEXT: {"get_parallel": ()}}
    for module in (_ATTENTION, _LAYER):
        needs[module] = {
            target.removeprefix(f"{module}."): passed
            for target, (_, passed) in HOOKS.items()
            if target.startswith(f"{module}.")
        }
    return probes.why_not_call(needs)


@functools.cache
def _one_page(device: torch.device) -> Tensor:
    """A table by which a number is its own slot."""
    return torch.zeros(1, 1, dtype=torch.int32, device=device)
