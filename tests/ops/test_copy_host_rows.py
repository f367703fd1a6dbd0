"""copy_host_rows and store_host_rows move the bytes of rows, of every layout, and no other byte."""

import pytest
import torch
from error_cases import check_refused, named

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.hot_rows_reference import copy_rows

pytestmark = pytest.mark.op("copy_host_rows")
HOST_PAGE, HOT_PAGE = 5, 4


def cache(layout, pages, page_size, device, pinned=False):
    """Random bytes, in pages that lie apart."""
    size = layout.page_bytes(page_size)
    wide = torch.randint(0, 256, (pages, -(-size // 16) * 16 + 48), dtype=torch.uint8)
    wide = wide.pin_memory() if pinned else wide.to(device)
    return wide, wide[:, :size]


def both_ways(layout, host_rows, hot_rows, device, counts=None, layers=1, into_host=False):
    """The call and the specification on the same bytes; what lies between pages is compared, too."""
    sizes = {"host_page_size": HOST_PAGE, "hot_page_size": HOT_PAGE}
    host = [cache(layout, 6, HOST_PAGE, "cpu", device == "cuda") for _ in range(layers)]
    hot = [cache(layout, 7, HOT_PAGE, device) for _ in range(layers)]
    want_host, want_hot = ([(w.cpu().clone(), v.shape[1]) for w, v in x] for x in (host, hot))
    lists = [x.tolist() if x.dim() == 2 else [x.tolist()] for x in (host_rows, hot_rows)]
    of_lists = [list(zip(*two, strict=True)) for two in zip(*lists, strict=True)]
    ends = [None if counts is None else max(counts[i], 0) for i in range(len(of_lists))]
    pairs = [pair for x, end in zip(of_lists, ends, strict=True) for pair in x[:end]]
    for (a, size_a), (b, size_b) in zip(want_host, want_hot, strict=True):
        source, target = (b[:, :size_b], a[:, :size_a]) if into_host else (a[:, :size_a], b[:, :size_b])
        pages = (HOT_PAGE, HOST_PAGE) if into_host else (HOST_PAGE, HOT_PAGE)
        copy_rows(source, target, [p[::-1] for p in pairs] if into_host else pairs, layout=layout,
                  source_page_size=pages[0], target_page_size=pages[1])  # fmt: skip
    caches = ([v for _, v in host], [v for _, v in hot])
    rows = (host_rows.to(device), hot_rows.to(device))
    if into_host:
        mla_fp8.store_host_rows(*caches[::-1], *rows[::-1], layout=layout, **sizes)
    else:
        given = None if counts is None else torch.tensor(counts, dtype=torch.int32, device=device)
        mla_fp8.copy_host_rows(*caches, *rows, given, layout=layout, **sizes, max_blocks=3)
    if device == "cuda":
        torch.cuda.synchronize()
    for got, want in zip(host + hot, want_host + want_hot, strict=True):
        assert torch.equal(got[0].cpu(), want[0])


@pytest.mark.parametrize("into_host", [False, True], ids=["to the GPU", "to the host"])
@pytest.mark.parametrize("name", KV_LAYOUTS)
def test_rows_of_every_layout(name, into_host, device):
    host, hot = torch.randperm(30)[:26], torch.randperm(28)[:26]
    both_ways(KV_LAYOUTS[name], host, hot, device, into_host=into_host)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_plan_of_lists_with_counts(dtype, device):
    host = torch.randint(0, 30, (40, 3)).to(dtype)
    hot = torch.full((40, 4), -1).to(dtype)[:, :3]
    hot[torch.arange(28), torch.arange(28) % 3] = torch.randperm(28).to(dtype)
    counts = torch.randint(-2, 5, (40,)).tolist()
    both_ways(KV_LAYOUTS["dsv4"], host, hot, device, counts)


def test_layers_in_one_call(device):
    host, hot = torch.randperm(30)[:26], torch.randperm(28)[:26]
    both_ways(KV_LAYOUTS["dsv41_fp4"], host, hot, device, layers=16)


@pytest.mark.parametrize("into_host", [False, True])
def test_rows_that_do_not_exist_are_skipped_and_a_source_past_the_end_leaves_zeros(into_host, device):
    host = torch.tensor([-1, 3, 30, 1 << 31, 4, -(1 << 40), 29, (1 << 40) + 1])
    hot = torch.tensor([2, -1, 5, 6, 28, 7, 1 << 31, 27])
    both_ways(KV_LAYOUTS["dsv4"], host, hot, device, into_host=into_host)


def test_nothing_to_copy(device):
    none = torch.zeros(0, dtype=torch.int64)
    both_ways(KV_LAYOUTS["dsv32"], none, none, device)
    both_ways(KV_LAYOUTS["dsv32"], none.view(0, 4), none.view(0, 4), device)
    both_ways(KV_LAYOUTS["dsv32"], none.view(4, 0), none.view(4, 0), device, [1] * 4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"host_caches": []}, "host_caches must hold 1 to 16 caches, got 0"),
        ({"host_caches": [torch.zeros(1, 2624, dtype=torch.uint8)] * 2}, "hot_caches must hold 2 caches"),
        (
            {"hot_caches": torch.zeros(1, 64, dtype=torch.uint8)},
            "hot_caches[0] must have shape [*, 2624], got",
        ),
        (
            {"host_rows": torch.zeros(3)},
            "host_rows must have dtype torch.int32 or torch.int64, got torch.float",
        ),
        ({"hot_rows": torch.zeros(4, dtype=torch.int32)}, "hot_rows must have shape [3], got [4]"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, "counts must have shape [1], got [3]"),
        ({"layout": "dsv5"}, "layout must be one of"),
        ({"max_blocks": 0}, "max_blocks must be in [1, 65536], got 0"),
        ({"host_page_size": 0}, "host_page_size must be in [1, 16777216], got 0"),
    ],
)
def test_what_is_wrong_is_refused(changes, message):
    rows = torch.zeros(3, dtype=torch.int32)
    given = {
        "host_caches": torch.zeros(1, 2624, dtype=torch.uint8), "host_rows": rows, "hot_rows": rows,
        "hot_caches": torch.zeros(1, 2624, dtype=torch.uint8), "counts": None, "layout": "dsv32",
        "host_page_size": 4, "hot_page_size": 4,
    }  # fmt: skip
    check_refused(mla_fp8.copy_host_rows, given | changes, message, named(message))


def test_caches_of_layers_are_alike():
    caches = [torch.zeros(pages, 2624, dtype=torch.uint8) for pages in (2, 3)]
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=r"hot_caches\[1\] must have the pages and the page stride of the first"
    ):
        mla_fp8.copy_host_rows(
            [caches[0]] * 2, caches, rows, rows, layout="dsv32", host_page_size=4, hot_page_size=4
        )


@pytest.mark.device(torch.cuda.is_available(), "cuda")
def test_memory_that_is_not_pinned_is_refused():
    host, hot = (
        torch.zeros(1, 2624, dtype=torch.uint8),
        torch.zeros(1, 2624, dtype=torch.uint8, device="cuda"),
    )
    rows = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"host_caches\[0\] must be in pinned memory"):
        mla_fp8.copy_host_rows(host, hot, rows, rows, layout="dsv32", host_page_size=4, hot_page_size=4)
