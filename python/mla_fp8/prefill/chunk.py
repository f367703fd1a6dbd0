"""A prefill chunk: what its layers share, when that is stale, and one layer's attention by the way that is
predicted to be fastest."""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from .._torch_private import version_of
from ..arch import arch_of
from ..dispatch import can_run
from ..ops.build_swa_token_ids import build_swa_token_ids
from . import plans
from .checks import check_strategy, expect_at_least, expect_chunk, expect_kind, expect_lengths, expect_rows
from .costs import predict
from .layer import LayerCaches
from .lengths import bounded_lengths
from .tables import Tables
from .ways import WAYS, fills_tiles, needs_no_indices
from .workspace import STRATEGIES, PrefillWorkspace, capturing, num_window_rows

__all__ = ["SparsePrefillChunkCache"]

MAX_QUERY_GROUP = 65536  # of the ops
_NAME = "mla_fp8.SparsePrefillChunkCache"


class SparsePrefillChunkCache:
    """A chunk's geometry, window slots and index rows, once for all layers of a forward.

    Its use raises RuntimeError once it is stale: after :meth:`invalidate`, once a newer chunk was built on
    the workspace, or once one of the tensors below was written. Nobody sees such writes in inference mode. It
    is also stale outside the CUDA graph capture that it was built in. Whoever replays a graph that writes
    these tensors calls :meth:`invalidate`.

    Args:
        workspace: A :class:`PrefillWorkspace`.
        seq_lens: [num_requests] int32: tokens that are cached, those of the chunk too. A negative one counts
            as 0, one above the host's as the host's.
        query_lens: [num_requests] int32: tokens of the chunk, bounded in the same way.
        page_table: [num_requests, max_pages] int32: pages of the caches of entries.
        req_pool_indices: As in :func:`build_swa_token_ids`, with a window.
        req_to_token: As in :func:`build_swa_token_ids`, with a window.
        full_to_swa: As in :func:`build_swa_token_ids`, with a window.
        window_size: Tokens of a window, its query's among them; 0: no layer has one.
        seq_lens_host: ``seq_lens`` as the host knows them, or upper bounds: a CUDA graph may be replayed with
            shorter requests.
        query_lens_host: ``query_lens`` in the same way.
        query_start_loc: [num_requests + 1] int32: the rows of q, if they are not the whole chunk.
        query_pos: [num_tokens] int32: their positions.
        num_tokens: Rows of q, by default the sum of ``query_lens_host``.

    Raises:
        TypeError: For an argument of another type.
        ValueError: For any other argument: its name, what was expected, what came.
    """

    def __init__(
        self,
        workspace: PrefillWorkspace,
        seq_lens: Tensor,
        query_lens: Tensor,
        page_table: Tensor,
        req_pool_indices: Tensor | None = None,
        req_to_token: Tensor | None = None,
        full_to_swa: Tensor | None = None,
        *,
        window_size: int,
        seq_lens_host: Sequence[int],
        query_lens_host: Sequence[int],
        query_start_loc: Tensor | None = None,
        query_pos: Tensor | None = None,
        num_tokens: int | None = None,
    ) -> None:
        expect_kind(_NAME, "workspace", workspace, PrefillWorkspace)
        expect_at_least(_NAME, "window_size", window_size, 0)
        sources: dict[str, Tensor | None] = {
            "seq_lens": seq_lens, "query_lens": query_lens, "page_table": page_table,
            "req_pool_indices": req_pool_indices, "req_to_token": req_to_token, "full_to_swa": full_to_swa,
            "query_start_loc": query_start_loc, "query_pos": query_pos,
        }  # fmt: skip
        expect_chunk(_NAME, sources)
        seq_lens_host = expect_lengths(_NAME, "seq_lens_host", seq_lens_host, len(seq_lens))
        query_lens_host = expect_lengths(_NAME, "query_lens_host", query_lens_host, len(seq_lens))
        if num_tokens is not None:
            expect_at_least(_NAME, "num_tokens", num_tokens, 0)
        seq_lens = bounded_lengths(seq_lens, seq_lens_host)
        query_lens = bounded_lengths(query_lens, query_lens_host)
        if query_start_loc is None:
            query_start_loc = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int()
        if not window_size:
            swa = query_start_loc[:0], torch.zeros_like(seq_lens), torch.zeros_like(query_start_loc)
        elif req_pool_indices is None or req_to_token is None or full_to_swa is None:
            raise ValueError(
                f"{_NAME}: expected req_pool_indices, req_to_token and full_to_swa with a window, got None"
            )
        else:
            ids, _, gather_lens, offsets = build_swa_token_ids(
                seq_lens, query_lens, req_pool_indices, req_to_token, full_to_swa, window_size=window_size,
                capacity=num_window_rows(seq_lens_host, query_lens_host, window_size),
            )  # fmt: skip
            swa = ids, gather_lens, offsets
        self.tables = Tables(
            window_size, sum(query_lens_host) if num_tokens is None else num_tokens, seq_lens, page_table,
            query_start_loc, query_pos, seq_lens_host, query_lens_host, *swa,
        )  # fmt: skip
        self.workspace, self.window_size, self.num_tokens = workspace, window_size, self.tables.num_tokens
        self._built_in_capture = capturing()
        self._versions = {name: (x, version_of(x)) for name, x in sources.items() if x is not None}
        workspace.chunk = self

    def invalidate(self) -> None:
        """Makes every later use raise."""
        if self.workspace.chunk is self:
            self.workspace.chunk = None

    def attend(
        self,
        q: Tensor,
        layer: LayerCaches,
        topk_indices: Tensor | None = None,
        *,
        sm_scale: float,
        attn_sink: Tensor | None = None,
        strategy: str = "auto",
        backend: str = "auto",
        query_groups: int = 1,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, ...]:
        """Attend in one layer.

        Args:
            q: As in :func:`mla_fp8.sparse_prefill`, and so are ``sm_scale``, ``attn_sink`` and ``backend``.
            layer: The layer's caches.
            topk_indices: [num_tokens, topk] int32: entries of the token's request, a negative one is none. By
                default all entries of its past.
            strategy: ``"auto"``, ``"whole"``, ``"selected"`` or ``"direct"``.
            query_groups: Experimental. So many consecutive tokens choose mostly the same entries, which
                ``"direct"`` then shares.
            batch_invariant: As in :func:`mla_fp8.sparse_decode`, by ``"direct"``.

        Returns:
            (out, max_logits, lse), as :func:`mla_fp8.sparse_prefill`; with ``batch_invariant`` (out, lse).

        Raises:
            RuntimeError: If the chunk is stale.
            TypeError, ValueError: For an argument of another type, or another value.
        """
        check_strategy(strategy, ("auto", *STRATEGIES))
        self._check(q, layer, topk_indices, query_groups)
        options = {"sm_scale": sm_scale, "attn_sink": attn_sink, "backend": backend}
        if batch_invariant:
            _check_batch_invariant(q, layer, topk_indices, strategy)
            strategy, options = "direct", options | {"batch_invariant": True, "return_max_logits": False}
        if strategy == "auto":
            strategy = self._choose(q, layer, topk_indices, backend, query_groups)
        if strategy == "direct":
            options["query_groups"] = query_groups
        return WAYS[strategy](self.tables, self.workspace, layer, q, topk_indices, options)

    def predict(
        self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None = None, *, query_groups: int = 1
    ) -> dict[str, float]:
        """Nanoseconds of each strategy for these arguments of :meth:`attend`, as the cost table has it.

        Refuses what :meth:`attend` refuses.
        """
        self._check(q, layer, topk_indices, query_groups)
        return self._predict(q, layer, topk_indices, "auto", query_groups)

    def _predict(
        self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None, backend: str, query_groups: int
    ) -> dict[str, float]:
        by_geometry = needs_no_indices(self.tables, layer, q, topk_indices, backend)
        grouped = fills_tiles(layer, q, query_groups, backend)
        arch = arch_of(q.device.type, q.device.index)
        return predict(self.tables.shape(q, layer, topk_indices, by_geometry, grouped), arch)

    def _choose(
        self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None, backend: str, query_groups: int
    ) -> str:
        nanoseconds = self._predict(q, layer, topk_indices, backend, query_groups)
        if not can_run("sparse_prefill_paged", q, layer.layout_name, backend):
            del nanoseconds["direct"]
        return min(nanoseconds, key=nanoseconds.__getitem__)

    def _check(self, q: Tensor, layer: LayerCaches, topk_indices: Tensor | None, query_groups: int) -> None:
        """Whether the cache may be used, and with these arguments."""
        if self.workspace.chunk is not self:
            raise RuntimeError(
                f"{_NAME}: the chunk is stale: it was invalidated, or a newer chunk uses its workspace"
            )
        if capturing() != self._built_in_capture:
            raise RuntimeError(
                f"{_NAME}: the chunk is stale: build and use must be inside the same CUDA graph capture, or "
                "both outside"
            )
        for name, (tensor, version) in self._versions.items():
            if version_of(tensor) != version:
                raise RuntimeError(f"{_NAME}: the chunk is stale: {name} was written after it was built")
        expect_kind(_NAME, "layer", layer, LayerCaches)
        if layer.window and not self.window_size:
            raise ValueError(f"{_NAME}: window_size must be positive for a layer with a window, got 0")
        dim = layer.layout_of_entries.head_dim_qk  # of the window's layout as well
        expect_rows(_NAME, "q", q, torch.bfloat16, self.num_tokens, None, dim)
        if topk_indices is not None:
            expect_rows(_NAME, "topk_indices", topk_indices, torch.int32, self.num_tokens, None)
        if not isinstance(query_groups, Integral) or not 1 <= query_groups <= MAX_QUERY_GROUP:
            raise ValueError(f"{_NAME}: query_groups must be in [1, {MAX_QUERY_GROUP}], got {query_groups!r}")


def _check_batch_invariant(q: Tensor, layer: LayerCaches, topk_indices: Tensor | None, strategy: str) -> None:
    if strategy not in ("auto", "direct"):
        raise ValueError(f"{_NAME}: strategy must be auto or direct with batch_invariant, got {strategy!r}")
    arch, layout = arch_of(q.device.type, q.device.index), layer.layout_name
    of_any_width = arch == "cpu" or (arch == "sm90" and plans.in_any_width(layout))
    if layer.entries and topk_indices is None and not of_any_width:  # as wide as the longest request's
        raise ValueError(
            f"{_NAME}: topk_indices must be given with batch_invariant for {layout} on {arch}, got None"
        )
