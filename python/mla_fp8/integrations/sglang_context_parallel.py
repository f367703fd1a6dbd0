"""SGLang's decode context parallelism of DSA (DeepSeek V3.2, GLM-5) on Hopper: SGLang has no kernel for it.
Off unless SGLANG_PLUGINS names ``mla_fp8_context_parallel`` beside ``mla_fp8``.

=========  ================================================================================================
attention  ``--dsa-decode-backend`` and ``--dsa-prefill-backend`` flashmla_kv, or flashmla_sparse over bf16
           rows: of all heads to this rank's own keys, with the lse in base 2, which SGLang expects of DSA
slots      topk_to_slots: slot s of the ranks is slot s // ranks of rank s % ranks
results    :class:`mla_fp8.context_parallel.Exchange` with ``--dcp-comm-backend a2a``, as many tokens as a
           CUDA graph has; SGLang's own exchange of more
=========  ================================================================================================

SGLang's own: index keys, which every rank has, the gather of queries where ``--dcp-replicate-q-proj`` is off,
and cache writes.
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
from ..ops.topk_to_slots import topk_to_slots
from .hooks import register_in_sglang

NAME = "mla_fp8_context_parallel"
_ATTENTION = "sglang.srt.layers.attention.dsa_backend"
_LAYER = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"
_CONTEXT = "sglang.srt.runtime_context"
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


def in_base_2(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What the backend returns of a rank."""
    return out, lse.mul_(1 / math.log(2))


def init_cuda_graph_state(original: Callable[..., None], self: Any, max_bs: int, max_num_tokens: int) -> None:
    """Of the backend: it knows the largest step, and all ranks call it before the first."""
    original(self, max_bs, max_num_tokens)
    if not serves(self) or (_state.exchange and max_num_tokens <= _state.exchange.max_tokens):
        return
    _one_page(torch.device(self.device))
    group = import_module(_CONTEXT).get_parallel().dcp_group.device_group
    _state.exchange = Exchange(
        group,
        max_num_tokens,
        self.num_dcp_q_heads,
        head_dim_qk=8,  # the least: queries are gathered elsewhere
        base=2.0,
        device=self.device,
    )
    _LOGGER.info(
        "mla_fp8 exchanges the results of %d ranks over %s, up to %d tokens",
        self.dcp_size,
        _state.exchange.transport,
        max_num_tokens,
    )


def dcp_a2a_lse_reduce(
    original: Callable[..., Tensor],
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    is_lse_base_on_e: bool = True,
    cuda_graph_buffers: dict[str, Tensor] | None = None,
    comm_backend: str = "a2a",
) -> Tensor:
    exchange: Exchange | None = _state.exchange
    ours = exchange is not None and comm_backend == "a2a" and not is_lse_base_on_e
    if exchange is None or not ours or len(cp_attn_out) > exchange.max_tokens:
        return original(
            cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e, cuda_graph_buffers, comm_backend
        )
    return exchange.merge(cp_attn_out, cp_attn_lse)[0]


# target: (what runs around it, what of it is called by which parameters)
HOOKS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    f"{_ATTENTION}.DeepseekSparseAttnBackend.init_cuda_graph_state": (
        init_cuda_graph_state, ("max_bs", "max_num_tokens"),
    ),
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
