import torch

from .._arguments import all_given, call_op
from .._fake import fake, fake_returns_nothing

__all__ = ["resolve_hot_rows"]

HotRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def resolve_hot_rows(
    entries: torch.Tensor,
    hot_entries: torch.Tensor,
    hot_order: torch.Tensor,
    host_page_table: torch.Tensor | None = None,
    hot_page_table: torch.Tensor | None = None,
    resident_page_table: torch.Tensor | None = None,
    *,
    num_host_rows: int,
    host_page_size: int = 1,
    hot_page_size: int = 1,
    first_page: int = 0,
    by_entry: bool = False,
    row_to_request: torch.Tensor | None = None,
    next_n: int = 1,
    state_rows: torch.Tensor | None = None,
    entry_lens: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    out_hot_rows: torch.Tensor | None = None,
    out_miss_host_rows: torch.Tensor | None = None,
    out_miss_hot_rows: torch.Tensor | None = None,
    out_miss_counts: torch.Tensor | None = None,
    out_attention_rows: torch.Tensor | None = None,
    attention_page_stride: int = 0,
    out_lens: torch.Tensor | None = None,
    out_hit_rows: torch.Tensor | None = None,
) -> HotRows:
    """Find which chosen entries lie in a hot buffer, make room for the others, and plan what to copy.

    Experimental. An exact LRU for each request: the entries of its rows take the place of those used longest
    ago, the first chosen that of the oldest. Equal inputs give equal results. No row is copied.

    Args:
        entries: [num_rows, k] int32, of a request, or host rows without ``host_page_table``. What has no host
            row is none, as a negative one.
        hot_entries: [states, num_hot] int32: what each slot holds, -1 none. Starts as -1; updated.
        hot_order: [states, num_hot] int16: slots, that of the oldest use first. Starts as 0, 1, 2, ...;
            updated.
        host_page_table: [requests, pages] int32 or int64: pages of host memory.
        hot_page_table: [requests, pages] int32: of a request's slots; by default slot s of state i is row
            i * num_hot + s.
        resident_page_table: [states, pages] int32: pages of the hot buffer that hold entries in their own
            order. These are used as they are.
        num_host_rows: Rows of the host cache.
        host_page_size: Rows of a page.
        hot_page_size: Rows of a hot or resident page.
        first_page: Host and resident pages below it are none.
        by_entry: ``hot_entries`` holds entries, not their host rows.
        row_to_request: [num_rows] int32 or int64; a request's rows follow each other.
        next_n: Rows of a request; with ``row_to_request`` at most. Others are padding.
        state_rows: [requests] int32, by default the request. Of equal ones the first counts.
        entry_lens: [num_rows] int32 or int64, with one row a request: up to num_hot entries, entry e is slot
            e; beyond, the last entry is slot num_hot.
        num_valid_rows: [1] int32: rows behind are padding, -1 everywhere.
        counters: [2] int64, to which entries found and entries to load are added.
        out_hot_rows: [num_rows, k] int32, any row stride; with the next three.
        out_miss_host_rows: The same, or int64.
        out_miss_hot_rows: [num_rows, k] int32.
        out_miss_counts: [num_rows] int32.
        out_attention_rows: [num_rows, k] int32: hot rows if pages were ``attention_page_stride`` rows apart.
        attention_page_stride: With ``out_attention_rows``.
        out_lens: [num_rows] int32: entries that have a row.
        out_hit_rows: [num_rows, k] int32: hot rows, -1 for those of the plan.

    Returns:
        (hot_rows, miss_host_rows, miss_hot_rows, miss_counts): [num_rows, k] each, counts [num_rows]. The
        first says where each entry lies once :func:`copy_host_rows` has done the rest; of a request's plan
        each of its rows has up to k columns. In the caller's buffers, columns behind the count are not
        written.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for some of the first four
            buffers without the others, and for one of the others without those.
    """
    tables = (host_page_table, hot_page_table, resident_page_table)
    options = {
        "num_host_rows": num_host_rows, "host_page_size": host_page_size, "hot_page_size": hot_page_size,
        "first_page": first_page, "by_entry": by_entry, "row_to_request": row_to_request, "next_n": next_n,
        "state_rows": state_rows, "entry_lens": entry_lens, "num_valid_rows": num_valid_rows,
        "counters": counters,
    }  # fmt: skip
    outputs = {
        "out_hot_rows": out_hot_rows, "out_miss_host_rows": out_miss_host_rows,
        "out_miss_hot_rows": out_miss_hot_rows, "out_miss_counts": out_miss_counts,
    }  # fmt: skip
    more = {"out_attention_rows": out_attention_rows, "out_lens": out_lens, "out_hit_rows": out_hit_rows}
    if not all_given("resolve_hot_rows", **outputs):
        for name, buffer in more.items():
            if buffer is not None:
                raise ValueError(f"mla_fp8.resolve_hot_rows: expected {name} with out_hot_rows, got none")
        return call_op("resolve_hot_rows", entries, hot_entries, hot_order, *tables, **options)  # type: ignore[no-any-return]
    call_op(
        "resolve_hot_rows_out", entries, hot_entries, hot_order, *tables, **options, **outputs, **more,
        attention_page_stride=attention_page_stride,
    )  # fmt: skip
    return tuple(outputs.values())  # type: ignore[return-value]


@fake("resolve_hot_rows")
def _(entries: torch.Tensor, *tensors: object, **options: object) -> HotRows:
    rows = [entries.new_empty(entries.shape) for _ in range(3)]
    return rows[0], rows[1], rows[2], entries.new_empty((len(entries),))


fake_returns_nothing("resolve_hot_rows_out")
