from collections.abc import Sequence

import torch

from .._arguments import call_op
from .._fake import fake_returns_nothing
from ..layout import KVLayout, get_layout

__all__ = ["copy_host_rows", "store_host_rows"]

Caches = torch.Tensor | Sequence[torch.Tensor]


def copy_host_rows(
    host_caches: Caches,
    hot_caches: Caches,
    host_rows: torch.Tensor,
    hot_rows: torch.Tensor,
    counts: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    *,
    layout: str | KVLayout,
    host_page_size: int,
    hot_page_size: int,
    max_blocks: int = 16,
) -> None:
    """Copy rows of caches in host memory to a hot buffer, as :func:`resolve_hot_rows` planned.

    Experimental. One launch, on the caller's stream, by few blocks: 16 reach nearly all of the bus.

    Args:
        host_caches: A cache of this layout in pinned memory, or one of each of up to 16 layers; their pages
            and page strides are equal. In CUDA graphs they stay where they are.
        hot_caches: As many on the GPU; written.
        host_rows: [num_rows, k] or [n] int32 or int64, any row stride. A negative row is none. One past the
            end of its cache leaves zeros.
        hot_rows: Of the same shape. A row that does not exist is not written; one that is named twice holds
            either.
        counts: [num_rows] int32: how many columns count, by default all.
        num_valid_rows: [1] int32: rows behind are padding.
        layout: Of all caches.
        host_page_size: Rows of a page.
        hot_page_size: Rows of a page.
        max_blocks: Blocks of the launch, each of 512 threads.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. RuntimeError for host memory that is not
            pinned.
    """
    rows = (host_rows, hot_rows, counts, num_valid_rows)
    _copy("copy_host_rows", host_caches, hot_caches, *rows, layout=layout, host_page_size=host_page_size,
          hot_page_size=hot_page_size, max_blocks=max_blocks)  # fmt: skip


def store_host_rows(
    hot_caches: Caches,
    host_caches: Caches,
    hot_rows: torch.Tensor,
    host_rows: torch.Tensor,
    *,
    layout: str | KVLayout,
    host_page_size: int,
    hot_page_size: int,
    max_blocks: int = 16,
) -> None:
    """Copy rows the other way, as the newest ones are.

    Experimental. Its arguments are those of :func:`copy_host_rows`; the hot caches are read, those of the
    host written.

    Args:
        hot_caches: Read.
        host_caches: Written.
        hot_rows: [num_rows, k] or [n] int32 or int64.
        host_rows: Of the same shape.
        layout: Of all caches.
        host_page_size: Rows of a page.
        hot_page_size: Rows of a page.
        max_blocks: Blocks of the launch.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`copy_host_rows`.
    """
    _copy("store_host_rows", hot_caches, host_caches, hot_rows, host_rows, layout=layout,
          host_page_size=host_page_size, hot_page_size=hot_page_size, max_blocks=max_blocks)  # fmt: skip


def copy_rows_at(
    from_addresses: torch.Tensor,
    to_addresses: torch.Tensor,
    from_rows: torch.Tensor,
    to_rows: torch.Tensor,
    *,
    layout: KVLayout,
    page_size: int,
) -> None:
    """Rows between caches that are known by address alone, [layers] uint64: for ``compat``. Unchecked."""
    call_op("_copy_rows_at", from_addresses, to_addresses, from_rows, to_rows, layout=layout.id,
            from_page_size=page_size, to_page_size=page_size)  # fmt: skip


def _copy(
    op: str,
    source: Caches,
    target: Caches,
    *rows: torch.Tensor | None,
    layout: str | KVLayout,
    **options: int,
) -> None:
    caches = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (source, target))
    call_op(op, *caches, *rows, layout=get_layout(layout).id, **options)


fake_returns_nothing("copy_host_rows", "store_host_rows", "_copy_rows_at")
