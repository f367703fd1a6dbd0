import torch

from .._arguments import call_op, need_tensors
from .._fake import attention_outputs, fake, fake_returns_nothing
from ..arch import num_processors
from ..dispatch import attend
from ..layout import HEAD_DIM_V, KVLayout, get_layout

__all__ = ["plan_shared_keys", "sparse_attention_workspace", "sparse_decode"]


def sparse_attention_workspace(
    num_tokens: int, *, num_q_heads: int, device: torch.device | str, batch_invariant: bool = False
) -> int:
    """Size of a ``workspace`` for any call of attention with so many tokens.

    For :func:`sparse_decode` and the ``sparse_prefill*`` ops. Most shapes need none. In those that do, CTAs
    that share a token's keys meet in it: a smaller one is used as far as it goes, and costs speed alone.

    Args:
        num_tokens: Rows of q.
        num_q_heads: Query heads, 1 to 128.
        device: Where the call runs.
        batch_invariant: As in the call. A workspace that is too small then raises.

    Returns:
        A number of float32 elements; 0 on a CPU.

    Raises:
        RuntimeError: For numbers out of range, or a GPU that is not there.
    """
    processors = num_processors(device)
    size = call_op("sparse_attention_workspace", num_tokens, num_q_heads, max(processors, 1), batch_invariant)
    return size if processors else 0  # of a CPU the numbers are checked all the same


def plan_shared_keys(
    indices: torch.Tensor,
    *,
    query_groups: int,
    num_q_heads: int,
    layout: str | KVLayout,
    num_slots: int,
    topk_length: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_num_slots: int | None = None,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make the lists of keys that the tokens of a group share, for all layers with these indices.

    Experimental. ``sparse_decode(..., query_groups=)`` makes them in every call without ``shared_keys``.

    Args:
        indices: As in :func:`sparse_decode`.
        query_groups: As in :func:`sparse_decode`, 2 or more.
        num_q_heads: Query heads.
        layout: Of the cache.
        num_slots: Rows of the cache: its pages times their size.
        topk_length: As in :func:`sparse_decode`.
        extra_indices: As in :func:`sparse_decode`.
        extra_topk_length: As in :func:`sparse_decode`.
        extra_num_slots: Rows of the second cache, with ``extra_indices``.
        query_start_loc: As in :func:`sparse_decode`.
        out: [num_tiles, words] int32, contiguous.

    Returns:
        [num_tiles, words] int32, a line per tile of at most 64 / num_q_heads and 8 tokens of a group. Column
        0 is the length of the list, or -1 where the tile's tokens go alone, as all do but on Hopper. From
        column 4 on come the slots, each once, those of the second cache with the sign bit. Then comes a byte
        for each, whose bit i says that token i of the tile attends to it.

    Raises:
        TypeError: For what is no tensor.
        ValueError: For an unknown layout.
        RuntimeError: For any other argument: its name, what was expected, what came. On AMD GPUs, which have
            no kernel for it.
    """
    options = {
        "query_groups": query_groups,
        "num_q_heads": num_q_heads,
        "layout": get_layout(layout).id,
        "num_slots": num_slots,
        "topk_length": topk_length,
        "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length,
        "extra_num_slots": extra_num_slots,
        "query_start_loc": query_start_loc,
    }
    if out is None:
        return call_op("plan_shared_keys", indices, **options)  # type: ignore[no-any-return]
    call_op("plan_shared_keys_out", indices, **options, out=out)
    return out


def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    extra_layout: str | KVLayout | None = None,
    scale: torch.Tensor | None = None,
    batch_invariant: bool = False,
    query_groups: int = 1,
    shared_keys: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query token to the cache slots that it selected.

    With ``out``, ``lse`` and ``workspace`` nothing is allocated.

    Args:
        q: [num_tokens, num_q_heads, head_dim_qk] bfloat16, 1 to 128 heads.
        kv_cache: [num_pages, page_bytes] uint8, or an engine's view of it; see :class:`mla_fp8.KVLayout`.
        indices: [num_tokens, topk] int32. Slots: page * page_size + row. Those outside the cache, such as
            -1, are masked.
        layout: Of the cache: a name of ``KV_LAYOUTS``, or an engine's, such as ``"fp8_ds_mla"``.
        page_size: Rows of a page, any number.
        sm_scale: A logit is sm_scale * (q . k).
        topk_length: [num_tokens] int32. Only the first n indices of a token count.
        attn_sink: [num_q_heads] float32, an extra logit without a value.
        extra_kv_cache: A second cache, in the same softmax.
        extra_indices: [num_tokens, extra_topk] int32, of the second cache.
        extra_topk_length: [num_tokens] int32, of ``extra_indices``.
        extra_page_size: Rows of a page of the second cache.
        extra_layout: Of the second cache, by default that of the first, or one whose ``extra_of`` names it.
        scale: 1 element, float32: the layer's scale, for ``fp8_e4m3*`` layouts alone.
        batch_invariant: A token's bits depend on its query, its keys in their order and the number of heads
            alone, in all four ops. Always so on a CPU.
        query_groups: Experimental. So many consecutive tokens, the drafts of a request, have mostly the same
            keys, which are then fetched once. It is a hint for 8, 16 or 32 heads over ``dsv4`` or
            ``dsv32`` on Hopper; elsewhere, and with ``batch_invariant``, nothing changes.
        shared_keys: Experimental. What :func:`plan_shared_keys` made of these indices.
        query_start_loc: Experimental. [num_requests + 1] int32, the first token of each request; element 0 is
            subtracted. Groups are then the first ``query_groups`` tokens of each request, however many it
            has. Tokens of no group go alone.
        out: [num_tokens, num_q_heads, 512] bfloat16, any strides of tokens and heads.
        lse: [num_tokens, num_q_heads] float32, contiguous.
        workspace: float32, of :func:`sparse_attention_workspace` elements.
        backend: ``"auto"``, or a name that :func:`explain` lists. Others than ours allocate in any case.

    Returns:
        (out, lse). out is 0 and lse -inf where a token attends to nothing. lse is a natural logarithm, and
        leaves the sink out.

    Raises:
        TypeError: For what is no tensor, or no whole number.
        ValueError: For an unknown layout, or a backend that cannot run this: with every reason.
        RuntimeError: For any other argument: its name, what was expected, what came.
    """
    name = "sparse_decode"
    if not (isinstance(q, torch.Tensor) and isinstance(kv_cache, torch.Tensor)):
        need_tensors(name, q=q, kv_cache=kv_cache)
    given = {
        "q": q, "kv_cache": kv_cache, "indices": indices, "layout": layout, "page_size": page_size,
        "sm_scale": sm_scale, "topk_length": topk_length, "attn_sink": attn_sink,
        "extra_kv_cache": extra_kv_cache, "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length, "extra_page_size": extra_page_size,
        "extra_layout": extra_layout, "scale": scale, "batch_invariant": batch_invariant or None,
        "query_groups": None if query_groups == 1 else query_groups, "shared_keys": shared_keys,
        "query_start_loc": query_start_loc,
    }  # fmt: skip
    return attend(name, given, backend, out=out, lse=lse, workspace=workspace)  # type: ignore[no-any-return]


fake("sparse_decode")(attention_outputs(2))


@fake("_flash_mla_decode")
def _(q: torch.Tensor, *unused: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch, s_q, heads, _ = q.shape
    out = q.new_empty((batch, s_q, heads, HEAD_DIM_V))
    return out, q.new_empty((batch, s_q, heads), dtype=torch.float32).mT


fake_returns_nothing("sparse_decode_out")


_FEW_TILES = 48  # csrc/ops/shared_keys.h


def shared_keys_shape(
    indices: torch.Tensor,
    query_groups: int,
    num_q_heads: int,
    extra_indices: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> tuple[int, int]:
    """(tiles, words of each) of the lists that :func:`plan_shared_keys` makes, or an op in its workspace."""
    num_tokens, keys = indices.shape
    if extra_indices is not None:
        keys += extra_indices.shape[1]
    query_groups, num_q_heads = max(1, query_groups), max(1, num_q_heads)  # tracing refuses no numbers
    query_groups = torch.sym_min(query_groups, torch.sym_max(num_tokens, 1))
    groups = -(-num_tokens // query_groups) if query_start_loc is None else query_start_loc.shape[0] - 1
    tiles = -(-query_groups // max(1, min(8, 64 // num_q_heads)))  # of a group
    if groups * tiles <= _FEW_TILES and query_groups >= 4 * tiles:
        tiles *= 2
    room = -(-(-(-query_groups // tiles) * keys) // 16) * 16
    return groups * tiles, 4 + room + room // 4


@fake("plan_shared_keys")
def _(
    indices: torch.Tensor,
    *,
    query_groups: int,
    num_q_heads: int,
    extra_indices: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    shape = shared_keys_shape(indices, query_groups, num_q_heads, extra_indices, query_start_loc)
    return indices.new_empty(shape)


fake_returns_nothing("plan_shared_keys_out")
