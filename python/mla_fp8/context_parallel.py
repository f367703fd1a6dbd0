"""Decode context parallelism: ranks that hold different keys of requests choose and attend together."""

import logging
import math
import socket
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ._arguments import call_op
from ._fake import fake_returns_nothing
from .layout import HEAD_DIM_V
from .ops.merge_partial_states import merge_partial_states
from .ops.merge_topk import merge_topk
from .ops.topk_to_slots import topk_to_slots

__all__ = ["Exchange"]

MAX_RANKS = 16  # of symmetric memory
_ALIGNMENT = 8  # bf16 of 16 bytes
_PIECE = 4  # candidates, likewise
_MOST_CANDIDATES = 4096
_PAGE = 256  # bytes that parts of the memory begin at multiples of
_log = logging.getLogger(__name__)
_said = set[str]()
_last_streams: dict[int, torch.cuda.Stream] = {}  # of a GPU's last call
# Its name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Attended = tuple[torch.Tensor, torch.Tensor]

fake_returns_nothing("_gather_queries", "_exchange_states", "_exchange_scores")


class Exchange:
    """What the ranks of a group exchange around top-k and attention, of which each holds a part of the keys.

    Experimental. A rank makes the queries of its own heads, attends with those of all heads to its own keys,
    and ends with the result of its own heads over all keys. On GPUs of one host that is one launch behind the
    top-k, one before attention and one behind it, over symmetric memory. Elsewhere collectives of the group
    do the same, and the log says so once.

    All ranks make the same calls in the same order, with as many tokens. Calls can be captured in CUDA
    graphs. A rank that waits longer than ``time_limit`` ends with a CUDA error.

    Calls of a GPU run one after another: one on another stream waits for the last, also of another Exchange.
    Graphs are not seen. A graph holds both halves of an :meth:`attend` or none, and no two run at once.

    Args:
        group: Of torch.distributed, with the ranks in the order of their heads. Making an Exchange is a
            collective call.
        max_tokens: Query tokens of a call, at most. They are the rows of :meth:`merge_topk`.
        num_heads: Query heads of all ranks together, a multiple of the ranks.
        head_dim_qk: Of the queries.
        max_candidates: Columns of :meth:`merge_topk`, at most: a multiple of 4, up to 4096.
        base: Of the lse that attention returns: e, as :func:`sparse_decode` has it, or 2.
        device: By default the current CUDA device, without one the CPU.
        time_limit: Seconds.
        symmetric: False for collectives in any case.

    Raises:
        ValueError: For numbers that do not fit each other.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        max_tokens: int,
        num_heads: int,
        *,
        head_dim_qk: int = 576,
        max_candidates: int = 0,
        base: float = math.e,
        device: torch.device | str | None = None,
        time_limit: float = 60.0,
        symmetric: bool = True,
    ) -> None:
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        if max_tokens < 1:
            raise ValueError(f"mla_fp8.Exchange: max_tokens must be at least 1, got {max_tokens}")
        if num_heads < 1 or num_heads % self.world_size:
            raise ValueError(
                f"mla_fp8.Exchange: num_heads must be a multiple of {self.world_size} (the ranks), "
                f"got {num_heads}"
            )
        if head_dim_qk < 1 or head_dim_qk % _ALIGNMENT:
            raise ValueError(
                f"mla_fp8.Exchange: head_dim_qk must be a multiple of {_ALIGNMENT}, got {head_dim_qk}"
            )
        if max_candidates % _PIECE or not 0 <= max_candidates <= _MOST_CANDIDATES:
            raise ValueError(
                f"mla_fp8.Exchange: max_candidates must be a multiple of {_PIECE} in "
                f"[0, {_MOST_CANDIDATES}], got {max_candidates}"
            )
        self.max_tokens, self.num_heads, self.head_dim_qk = max_tokens, num_heads, head_dim_qk
        self.max_candidates = max_candidates
        self.heads, self.base, self.time_limit = num_heads // self.world_size, base, time_limit
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default if device is None else device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._memory: dict[str, torch.Tensor] | None = None
        self.merge_is_due = False
        why_not = self._map_memory() if symmetric else ""
        if why_not:
            self._memory = None
            _say_once(f"context parallelism exchanges by collectives: {why_not}")

    @property
    def transport(self) -> str:
        """``"symmetric memory"`` or ``"collectives"``."""
        return "collectives" if self._memory is None else "symmetric memory"

    def attend(
        self,
        q: torch.Tensor,
        decode: Callable[[torch.Tensor], Attended],
        *,
        attn_sink: torch.Tensor | None = None,
    ) -> Attended:
        """``decode`` with the queries of all heads, merged over ranks.

        ``decode`` takes [num_tokens, num_heads, head_dim_qk], which is valid until attend returns. It returns
        out and lse of these over this rank's keys, without a sink.

        Args:
            q: [num_tokens, num_heads / ranks, head_dim_qk] bfloat16, of this rank's heads.
            decode: Attention to this rank's keys, such as a call of :func:`sparse_decode`.
            attn_sink: [num_heads / ranks] float32; it counts once, in the merge.

        Returns:
            (out, lse): [num_tokens, num_heads / ranks, 512] bfloat16 and [num_tokens, num_heads / ranks].

        Raises:
            ValueError: For another shape or dtype.
            RuntimeError: Between the two halves of another call.
        """
        gathered = self.gather_queries(q)
        try:
            return self.merge(*decode(gathered), attn_sink=attn_sink)
        finally:
            self.merge_is_due = False  # also after an error: nobody wants the result

    def gather_queries(self, q: torch.Tensor, q_rope: torch.Tensor | None = None) -> torch.Tensor:
        """The first half of :meth:`attend`. What it returns is valid until :meth:`merge` returns.

        With ``q_rope`` [num_tokens, num_heads / ranks, n], ``q`` has the first head_dim_qk - n columns alone.
        RuntimeError before the merge of the last one, whose queries others may still read.
        """
        rope_dim = 0 if q_rope is None else q_rope.shape[-1]
        self._check("q", q, (self.heads, self.head_dim_qk - rope_dim))
        if q_rope is not None:
            self._check("q_rope", q_rope, (self.heads, rope_dim))
        if self.merge_is_due:
            raise RuntimeError("mla_fp8.Exchange: expected merge after gather_queries, got gather_queries")
        self.merge_is_due = True
        if self._memory is None:
            q = q.contiguous() if q_rope is None else torch.cat([q, q_rope], dim=-1)
            gathered = q.new_empty((self.world_size, *q.shape))
            _all_gather(gathered.flatten(0, 1), q, group=self.group)
            return gathered.transpose(0, 1).flatten(1, 2)
        memory = self._memory
        _follow_last_call(self.device)
        call_op("_gather_queries", q, q_rope, **self._peers, queries=memory["queries"],
                flags=memory["query_flags"], calls=memory["query_calls"])  # fmt: skip
        return memory["queries"][: len(q)]

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, *, attn_sink: torch.Tensor | None = None
    ) -> Attended:
        """The second half of :meth:`attend`, which may also be called alone.

        ``out`` [num_tokens, num_heads, 512] and ``lse`` [num_tokens, num_heads] are of all heads over this
        rank's keys.
        """
        self._check("out", out, (self.num_heads, HEAD_DIM_V))
        self.merge_is_due = False
        if self._memory is None:
            return self._merge_by_collectives(out, lse, attn_sink)
        memory = self._memory
        merged = out.new_empty((len(out), self.heads, HEAD_DIM_V))
        merged_lse = lse.new_empty((len(out), self.heads))
        _follow_last_call(self.device)
        call_op("_exchange_states", out, lse, attn_sink=attn_sink, base=self.base, **self._peers,
                outs=memory["outs"], lses=memory["lses"], flags=memory["state_flags"],
                calls=memory["state_calls"], merged=merged, merged_lse=merged_lse)  # fmt: skip
        return merged, merged_lse

    def merge_topk(
        self,
        scores: torch.Tensor,
        positions: torch.Tensor,
        *,
        topk: int,
        interleave: int | None = None,
        page_table: torch.Tensor | None = None,
        page_size: int = 1,
        next_n: int = 1,
        out_positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What one rank with all keys would choose, from what each rank has chosen among its own.

        With ``page_table`` also the slots of this rank's own keys among them, as :func:`topk_to_slots` packs
        them.

        Args:
            scores: [num_rows, k] float32 of this rank, as :func:`index_topk` has them in ``out_scores``. k is
                a multiple of 4, at most ``max_candidates``; rows are 16-byte aligned.
            positions: [num_rows, k] int32; a negative one is no candidate. Rows are 16-byte aligned.
            topk: 1 to 4096.
            interleave: As in :func:`merge_topk`. ``page_table`` needs it.
            page_table: [num_requests, pages] int32 of this rank's pages.
            page_size: Rows of a page.
            next_n: Rows of a request.
            out_positions: [num_rows, topk] int32, any row stride.

        Returns:
            (positions, slots, lens): [num_rows, topk] int32 of the request, ascending, then -1; with
            ``page_table`` [num_rows, topk] int32, then -1, else None; how many slots there are, without
            ``page_table`` how many positions.

        Raises:
            ValueError: For another shape or dtype, or a page_table without interleave.
        """
        rows = len(scores)
        self._check_candidates(scores, positions)
        if page_table is not None and interleave is None:
            raise ValueError("mla_fp8.Exchange: interleave must be given with page_table, got None")
        if out_positions is None:
            out_positions = positions.new_empty((rows, topk))
        lens = positions.new_empty(rows)
        if self._memory is None:
            sent = torch.stack([scores.view(torch.int32), positions])
            got = sent.new_empty((self.world_size, *sent.shape))
            _all_gather(got.flatten(0, 1), sent, group=self.group)
            merge_topk(got[:, 0].view(torch.float32), got[:, 1], topk=topk, interleave=interleave,
                       out_positions=out_positions, out_lens=lens)  # fmt: skip
            if page_table is None or interleave is None:
                return out_positions, None, lens
            own, lens = topk_to_slots(
                out_positions, page_table, page_size=page_size, next_n=next_n, world_size=self.world_size,
                rank=self.rank, interleave=interleave,
            )  # fmt: skip
            return out_positions, own, lens
        slots = None if page_table is None else positions.new_empty((rows, topk))
        memory = self._memory
        _follow_last_call(self.device)
        call_op("_exchange_scores", scores, positions, topk=topk, interleave=interleave,
                page_table=page_table, page_size=page_size, next_n=next_n, **self._peers,
                candidates=memory["candidates"], flags=memory["score_flags"], calls=memory["score_calls"],
                out_positions=out_positions, out_slots=slots, out_lens=lens)  # fmt: skip
        return out_positions, slots, lens

    def _check_candidates(self, scores: torch.Tensor, positions: torch.Tensor) -> None:
        rows, most = self.max_tokens, self.max_candidates
        for name, x, dtype in (("scores", scores, torch.float32), ("positions", positions, torch.int32)):
            fits = x.dim() == 2 and len(x) <= rows and x.shape == scores.shape and x.shape[1] % _PIECE == 0
            if not fits or not 0 < x.shape[1] <= most or x.dtype != dtype:
                raise ValueError(
                    f"mla_fp8.Exchange: {name} must be [at most {rows}, at most {most}, "
                    f"a multiple of {_PIECE}] {str(dtype).removeprefix('torch.')}, got {list(x.shape)} "
                    f"{str(x.dtype).removeprefix('torch.')}"
                )

    def _check(self, name: str, x: torch.Tensor, shape: tuple[int, int]) -> None:
        if x.dim() != 3 or x.shape[1:] != shape or len(x) > self.max_tokens or x.dtype != torch.bfloat16:
            raise ValueError(
                f"mla_fp8.Exchange: {name} must be [at most {self.max_tokens}, {shape[0]}, {shape[1]}] "
                f"bfloat16, got {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            )

    def _merge_by_collectives(
        self, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None
    ) -> Attended:
        """The lse of a row travels behind it."""
        shape = (self.world_size, len(out), self.heads)
        sent = out.new_zeros((*shape, HEAD_DIM_V + _ALIGNMENT))
        received = torch.empty_like(sent)
        sent[..., :HEAD_DIM_V] = out.unflatten(1, shape[::2]).transpose(0, 1)
        of_lse = HEAD_DIM_V // 2  # floats before it
        sent.view(torch.float32)[..., of_lse] = lse.unflatten(1, shape[::2]).transpose(0, 1)
        dist.all_to_all_single(received, sent, group=self.group)
        lses = received.view(torch.float32)[..., of_lse]
        return merge_partial_states(received[..., :HEAD_DIM_V], lses, attn_sink=attn_sink, base=self.base)

    def _map_memory(self) -> str:
        """Maps the memory of all ranks. Returns why there is none, the same on all ranks, or nothing."""
        is_nvidia = self.device.type == "cuda" and torch.version.cuda is not None
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count if is_nvidia else 0
        ranks = self._of_all((socket.gethostname(), processors))
        if not all(processors for _, processors in ranks):
            return "not every rank has an NVIDIA GPU"
        if len({host for host, _ in ranks}) > 1:
            return "the ranks are on several hosts"
        if self.world_size > MAX_RANKS:
            return f"the group has {self.world_size} ranks, at most {MAX_RANKS} could"
        error = ""
        try:
            self._allocate(min(processors for _, processors in ranks))
        except (ImportError, RuntimeError) as raised:
            error = str(raised).strip().partition("\n")[0] or type(raised).__name__
        torch.cuda.synchronize(self.device)
        # Behind it the flags of all ranks are 0, before the first call of any.
        return next(filter(None, self._of_all(error)), "")

    def _of_all(self, x: Any) -> list[Any]:
        ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(ranks, x, group=self.group)
        return ranks

    def _allocate(self, processors: int) -> None:
        symmetric_memory = import_module("torch.distributed._symmetric_memory")  # CUDA builds alone need it
        flags = (self.world_size, processors)  # a CTA an SM: all of a call run at once
        states = (2, self.world_size, self.max_tokens, self.heads)
        parts = {
            "query_flags": (torch.int32, flags),
            "state_flags": (torch.int32, flags),
            "queries": (torch.bfloat16, (self.max_tokens, self.num_heads, self.head_dim_qk)),
            "outs": (torch.bfloat16, (*states, HEAD_DIM_V)),
            "lses": (torch.float32, states),
            "score_flags": (torch.int32, flags),
            "candidates": (torch.int32, (*states[:3], 2, self.max_candidates)),  # scores, positions
        }
        sizes = [-(math.prod(shape) * dtype.itemsize // -_PAGE) * _PAGE for dtype, shape in parts.values()]
        buffer = symmetric_memory.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        buffer.zero_()
        handle = symmetric_memory.rendezvous(buffer, self.group)
        own = handle.buffer_ptrs[self.rank]
        peers = [pointer - own for pointer in handle.buffer_ptrs]
        self._peers = {"peers": peers, "rank": self.rank, "time_limit": self.time_limit}
        pieces = zip(parts.items(), buffer.split(sizes), strict=True)
        self._memory = {
            name: piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (name, (dtype, shape)), piece in pieces
        }
        for name in ("query_calls", "state_calls", "score_calls"):
            self._memory[name] = torch.zeros(2, dtype=torch.int32, device=self.device)


def _follow_last_call(device: torch.device) -> None:
    """A call that waits holds every SM. What it waits for must not need one that another call holds."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    stream = torch.cuda.current_stream(device)
    last = _last_streams.setdefault(stream.device_index, stream)
    if last != stream:
        stream.wait_stream(last)
        _last_streams[stream.device_index] = stream


def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        _log.info(sentence)
