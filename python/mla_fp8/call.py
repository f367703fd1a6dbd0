"""One sparse attention call: what the wrappers make of their arguments, and all that a backend sees."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .layout import KVLayout, row_layout

Pair = tuple[Tensor, Tensor]  # out, lse
Triple = tuple[Tensor, Tensor, Tensor]  # out, max_logits, lse

OPS = ("sparse_decode", "sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window")
FEATURES = {
    "two caches": "a second cache in the same softmax",
    "batch_invariant": "the same bits in any batch",
}


class Scope(NamedTuple):
    """One cache, and what each query token attends to in it."""

    kv: Tensor  # [num_pages, page_bytes]; rows [num_rows, head_dim_qk] in sparse_prefill
    layout: KVLayout
    page_size: int  # 1 for rows
    indices: Tensor | None  # [num_tokens, width] int32 slots; None: those of the call's window, or of pages
    length: Tensor | None = None  # [num_tokens] int32: only the first n indices or entries count
    page_table: Tensor | None = None  # [num_requests, max_pages] int32, of entries in place of indices


class Window(NamedTuple):
    """A sliding window by its geometry: see :func:`mla_fp8.sparse_prefill_window`."""

    page_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    size: int


class SparseCall(NamedTuple):
    """A call of one of OPS; a tuple, as the compiler looks through those.

    What the wrappers ask of it is a field or a method: torch 2.10 does not trace a tuple's properties.
    """

    op: str
    q: Tensor  # [num_tokens, num_q_heads, head_dim_qk] bf16
    scopes: tuple[Scope, ...]  # one cache or two, in one softmax
    sm_scale: float
    attn_sink: Tensor | None = None  # [num_q_heads] float32
    scale: Tensor | None = None  # of the layer: fp8_e4m3* only
    window: Window | None = None
    batch_invariant: bool = False
    query_groups: int = 1  # over pages by index: so many consecutive tokens have mostly the same keys
    shared_keys: Tensor | None = None  # what plan_shared_keys made of them
    query_start_loc: Tensor | None = None  # [num_requests + 1] int32: a group is of a request

    @classmethod
    def of(cls, op: str, given: Mapping[str, Any], find_layout: Callable[[Any], KVLayout]) -> "SparseCall":
        """From the arguments of ``mla_fp8.<op>`` by name; ``find_layout`` of what stands for a layout there.

        RuntimeError for a part of a second cache.
        """
        kv = given["kv"] if op == "sparse_prefill" else given["kv_cache"]
        layout = find_layout(given["layout"]) if "layout" in given else row_layout(given["q"])
        main = Scope(kv, layout, given.get("page_size", 1), given.get("indices"), given.get("topk_length"))
        parts = {name: given.get(name) for name in EXTRA}
        if parts["extra_layout"] is not None:
            parts["extra_layout"] = find_layout(parts["extra_layout"])
        extra = second_scope(op, layout, *parts.values())
        window = None
        if op == "sparse_prefill_window":
            window = Window(*(given[name] for name in _WINDOW))
        return cls(
            op, given["q"], (main, *extra), given["sm_scale"], given.get("attn_sink"),
            given.get("scale"), window, given.get("batch_invariant", False), given.get("query_groups", 1),
            given.get("shared_keys"), None if window else given.get("query_start_loc"),
        )  # fmt: skip

    @property
    def layout(self) -> KVLayout:
        """Of the first cache; for backends, which the compiler does not trace."""
        return self.scopes[0].layout

    def layout_name(self) -> str:
        """Of all caches: ``"dsv41"``, ``"dsv41 + dsv41_fp4"``."""
        return " + ".join(dict.fromkeys([scope.layout.name for scope in self.scopes]))

    def features(self) -> tuple[str, ...]:
        """What the call wants of FEATURES."""
        two_caches = ("two caches",) if len(self.scopes) > 1 else ()
        return (*two_caches, "batch_invariant") if self.batch_invariant else two_caches


# A second scope and a window, by the names of the ops' arguments.
EXTRA = (
    "extra_kv_cache", "extra_layout", "extra_page_size", "extra_indices", "extra_topk_length",
    "extra_page_table",
)  # fmt: skip
_WINDOW = ("page_table", "query_start_loc", "seq_lens", "window_size")


def second_scope(
    op: str,
    first: KVLayout,
    kv_cache: Tensor | None,
    layout: KVLayout | None,
    page_size: int | None,
    indices: Tensor | None,
    length: Tensor | None,
    page_table: Tensor | None = None,
) -> tuple[Scope, ...]:
    """The second cache, or none; its layout is by default that of the first.

    RuntimeError, as the op raises it, for a part of one without the rest.
    """
    if page_table is not None:
        _check_entry_pages(op, kv_cache, page_size, indices, length)
        assert kv_cache is not None and page_size is not None
        return (Scope(kv_cache, layout or first, page_size, None, length, page_table),)
    if kv_cache is not None and page_size is not None and indices is not None:
        return (Scope(kv_cache, layout or first, page_size, indices, length),)
    if kv_cache is None and page_size is None and indices is None and length is None and layout is None:
        return ()
    parts = ((kv_cache, "a cache"), (indices, "indices"), (page_size, "a page size"))
    if any(part is not None for part, _ in parts):
        got = ", ".join(f"no {name.removeprefix('a ')}" if part is None else name for part, name in parts)
        if op == "sparse_prefill_window":
            got = got.replace("no indices", "no indices (and no extra_page_table)")
        raise RuntimeError(
            f"mla_fp8.{op}: extra_kv_cache, extra_indices and extra_page_size must be given together, "
            f"got {got}"
        )
    name, got = ("extra_topk_length", "a tensor") if layout is None else ("extra_layout", layout.name)
    raise RuntimeError(f"mla_fp8.{op}: {name} must be None without extra_kv_cache, got {got}")


def _check_entry_pages(
    op: str, kv_cache: Tensor | None, page_size: int | None, indices: Tensor | None, length: Tensor | None
) -> None:
    """Of a second cache by its page table."""
    parts = ((kv_cache, "a cache"), (page_size, "a page size"), (length, "lengths"))
    if any(part is None for part, _ in parts):
        got = ", ".join(f"no {name.removeprefix('a ')}" if part is None else name for part, name in parts)
        raise RuntimeError(
            f"mla_fp8.{op}: extra_kv_cache, extra_page_table, extra_page_size and extra_topk_length must be "
            f"given together, got {got}"
        )
    if indices is not None:
        raise RuntimeError(f"mla_fp8.{op}: extra_indices must be None with extra_page_table, got a tensor")
