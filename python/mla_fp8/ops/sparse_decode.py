import torch

from .._arguments import expect_tensors
from .._fake import attention_outputs, fake, fake_returns_nothing
from ..call import Scope, SparseCall, second_scope
from ..dispatch import attend, extra_layout_of, layout_of
from ..layout import KVLayout, get_layout


def sparse_attention_workspace(
    num_tokens: int, *, num_q_heads: int, num_sms: int, batch_invariant: bool = False
) -> int:
    """fp32 elements of ``workspace`` that ``sparse_decode_out`` and ``sparse_prefill*_out`` have use for.

    ``torch.ops.mla_fp8.sparse_*_out`` allocate nothing. Where the portable kernel runs, small batches are
    fast only if several CTAs share a token's keys. They meet in the caller's ``workspace``: as many as it has
    room for, without one a single CTA. With ``batch_invariant`` a workspace that is too small raises
    RuntimeError. ``num_sms`` is the GPU's. On Hopper the portable kernel runs for ``_fnuz`` layouts alone,
    but ``sparse_prefill_window_out`` with ``extra_page_table`` has use for a workspace, too, and so has
    ``sparse_decode_out`` for a few tokens of 17 heads and more: up to 1.3 times as fast with it. On AMD GPUs
    a kernel like the portable one runs for all layouts.
    """
    return torch.ops.mla_fp8.sparse_attention_workspace(  # type: ignore[no-any-return]
        num_tokens, num_q_heads, num_sms, batch_invariant
    )


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The lists of keys that ``sparse_decode(..., query_groups=)`` makes, for layers with the same indices.

    =================  =====================  =====  =======================================================
    indices            [num_tokens, topk]     int32  and lengths: as :func:`sparse_decode` gets them
    query_groups                                     2 or more consecutive tokens of a request
    num_slots                                        of the cache: its pages times their size
    extra_num_slots                                  of the second cache, with ``extra_indices``
    out                [num_tiles, words]     int32  optional; contiguous
    =================  =====================  =====  =======================================================

    A group's tokens are cut into tiles of at most 64 / num_q_heads and 8 tokens, or smaller ones where there
    are few groups. The result has a line for each tile. Column 0 is the length of its list, or -1 where its
    tokens go alone (all do on a CPU and on NVIDIA GPUs but Hopper's; for AMD's there is no kernel). From
    column 4 on come the slots, each once, those of the second cache with the sign bit. Behind the room for
    all of them each has a byte, whose bit i says that the tile's token i attends to it.

    Returns the lists. Raises RuntimeError naming the argument, what was expected and what came.
    """
    expect_tensors(
        "plan_shared_keys", topk_length=topk_length, extra_indices=extra_indices,
        extra_topk_length=extra_topk_length, out=out,
    )  # fmt: skip
    options = {
        "query_groups": query_groups,
        "num_q_heads": num_q_heads,
        "layout": get_layout(layout).id,
        "num_slots": num_slots,
        "topk_length": topk_length,
        "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length,
        "extra_num_slots": extra_num_slots,
    }
    if out is None:
        return torch.ops.mla_fp8.plan_shared_keys(indices, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.plan_shared_keys_out(indices, **options, out=out)
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
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query token to the cache slots that it selected. Returns ``(out, lse)``.

    ===========  =======================================  =====  ============================================
    q            [num_tokens, num_q_heads, head_dim_qk]   bf16   1 to 128 heads
    kv_cache     [num_pages, page_bytes]                  uint8  see :class:`mla_fp8.KVLayout`
    indices      [num_tokens, topk]                       int32  slots: page * page_size + row; outside the
                                                                 cache (-1): masked
    page_size                                                    rows of a page, any number of them
    sm_scale                                                     a logit is sm_scale * (q . k)
    topk_length  [num_tokens]                             int32  only the first n indices count
    attn_sink    [num_q_heads]                            fp32   an extra logit without a value
    extra_*      a second cache with its own indices, page size and layout, attended to jointly
    scale        one element                              fp32   the layer's scale: ``fp8_e4m3*`` only
    shared_keys  :func:`plan_shared_keys`                 int32  of these indices, for several layers
    out          [num_tokens, num_q_heads, 512]           bf16   0 where nothing is attended
    lse          [num_tokens, num_q_heads]                fp32   natural log, sink excluded, -inf if nothing
    ===========  =======================================  =====  ============================================

    ``extra_layout`` is by default that of the first cache. It may also be ``dsv41_fp4``, next to ``dsv41`` or
    ``dsv4``, and ``dsv4`` next to ``dsv4_fnuz``: see ``KVLayout.extra_of``.

    There is nothing to plan ahead. What several CTAs do for a row is merged in the launch. The portable
    kernel, and Hopper's for a few tokens of 17 heads and more, merge in a second launch, through a workspace
    that is allocated here.

    ``query_groups``: so many consecutive tokens, the drafts of a request, have mostly the same keys. With 8,
    16 or 32 heads over ``dsv4`` or ``dsv32`` pages a Hopper GPU then fetches and converts a key once for up
    to 64 / num_q_heads of them; tokens that share too few go alone. The lists that this takes are made in
    the call, or once for several by :func:`plan_shared_keys`. Elsewhere, and with ``batch_invariant``, it
    changes nothing. A token's last bits then depend on the keys of its group, on no other.

    Without groups a row's result never depends on what the other rows hold. With ``batch_invariant`` (always
    so on the CPU) it depends neither on how many rows there are nor on its place among them.

    ``layout`` may be an engine's name such as ``"fp8_ds_mla"``. ``backend`` is a name of the dispatch table.
    Raises ValueError with every reason if that cannot run this, RuntimeError naming the argument for bad
    input.
    """
    name, layout = "sparse_decode", layout_of(layout, q, kv_cache, page_size, backend)
    extra_kind = extra_layout_of(extra_layout, q, extra_kv_cache, extra_page_size, backend)
    extra = second_scope(
        name, layout, extra_kv_cache, extra_kind, extra_page_size, extra_indices, extra_topk_length
    )
    main = Scope(kv_cache, layout, page_size, indices, topk_length)
    expect_tensors(name, shared_keys=shared_keys)
    call = SparseCall(
        name, q, (main, *extra), sm_scale, attn_sink, scale, None, batch_invariant, query_groups, shared_keys
    )
    return attend(call, backend)  # type: ignore[no-any-return]


fake("sparse_decode")(attention_outputs(2))
fake_returns_nothing("sparse_decode_out")


_FEW_TILES = 48  # csrc/ops/shared_keys.h


def shared_keys_shape(
    indices: torch.Tensor, query_groups: int, num_q_heads: int, extra_indices: torch.Tensor | None = None
) -> tuple[int, int]:
    """(tiles, words of each) of the lists that :func:`plan_shared_keys` makes, or an op in its workspace."""
    num_tokens, keys = indices.shape
    if extra_indices is not None:
        keys += extra_indices.shape[1]
    query_groups, num_q_heads = max(1, query_groups), max(1, num_q_heads)  # tracing refuses no numbers
    groups = -(-num_tokens // query_groups)
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
    **options: object,
) -> torch.Tensor:
    return indices.new_empty(shared_keys_shape(indices, query_groups, num_q_heads, extra_indices))


fake_returns_nothing("plan_shared_keys_out")
