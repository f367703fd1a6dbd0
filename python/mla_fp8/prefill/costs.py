"""What each way through a prefill layer costs: a measured table per GPU, and one formula."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

PerHeads = tuple[tuple[int, float], ...]  # (up to so many heads, nanoseconds); more: in blocks of the last


@dataclass(frozen=True)
class Costs:
    """Nanoseconds. docs/notebook/guide.md says where each was measured."""

    row: float  # gather and dequantise one row into the workspace
    reference: float  # find the distinct rows: per index, and per row of the region
    select: float  # the same, per layer
    look_up: float  # slots in place of workspace rows, per layer that finds the chunk's tables ready
    workspace_key: PerHeads  # attention over bf16 rows: one query token, one key
    window_key: PerHeads  # the same in layers that have nothing but a window
    paged_key: PerHeads  # attention straight from FP8 pages
    paged_token: PerHeads  # the same, per query token whatever its keys
    grouped_key: PerHeads = ()  # from FP8 pages, of neighbours that share nine tenths of their keys
    grouped: float = 0.0  # the same, per layer: its lists of keys, and a launch for those that go alone
    entries_key: PerHeads = ()  # over bf16 rows, of all entries, which neighbours share; none: nowhere


COSTS: dict[str, Costs] = {
    "cpu": Costs(
        # begin cpu prices: written by docs/gen/prices.py from benchmarks/results
        row=130, paged_key=((8, 60.5), (16, 88.2), (64, 207), (128, 381),),
        workspace_key=((16, 63.7), (64, 189),), window_key=((16, 63.7), (64, 189),),
        # end cpu prices
        reference=8, select=60_000, look_up=60_000, paged_token=((64, 0),),
    ),
    "sm90": Costs(
        # begin prices: written by docs/gen/prices.py from benchmarks/results
        row=0.489, reference=0.0393, select=106_000,
        workspace_key=((8, 0.193), (16, 0.236), (32, 0.222), (64, 0.255),),
        window_key=((8, 0.0677), (16, 0.122), (32, 0.229), (64, 0.321),),
        paged_key=((8, 0.12), (16, 0.154), (32, 0.213), (64, 0.324), (128, 0.646),),
        paged_token=((8, 11.8), (16, 25.2), (32, 33.3), (64, 72.4), (128, 22.1),),
        grouped_key=((8, 0.0852), (16, 0.132), (32, 0.232),),
        # end prices
        look_up=4_000, grouped=9_000,
        entries_key=((8, 0.029), (16, 0.054), (32, 0.109), (64, 0.205),),
    ),
}  # fmt: skip
# Of a GPU that nobody measured: the ratios matter, and they differ less. Its kernel has no tiles.
DEFAULT = replace(COSTS["sm90"], entries_key=(), grouped_key=())
# `entries_key` is of calls whose heads and tokens make as many rows: tiles of 64 for half the SMs.
ENTRIES_ROWS = 66 * 64


@dataclass(frozen=True)
class LayerShape:
    """The numbers of one layer and chunk that the choice may look at: no tensor values."""

    num_tokens: int
    num_q_heads: int
    topk: int  # entries that a token may select
    window_size: int
    num_entries: int  # of all requests
    num_window_rows: int
    num_keys: int  # entries and window of all tokens, as far as they reach: see count_keys
    all_entries: bool = False  # of the past, which the kernel finds by itself
    grouped: bool = False  # neighbours that choose mostly the same entries fill a tile

    @property
    def max_selected(self) -> int:
        """How many different entries the chunk can refer to."""
        return min(self.num_entries, self.num_tokens * self.topk)


def predict(shape: LayerShape, arch: str) -> dict[str, float]:
    """Nanoseconds of each strategy."""
    costs = COSTS.get(arch, DEFAULT)
    keys, indices = shape.num_keys, shape.num_tokens * (shape.topk + shape.window_size)
    window = shape.num_window_rows * costs.row
    prices = costs.workspace_key if shape.topk else costs.window_key
    if shape.all_entries and shape.num_tokens * shape.num_q_heads >= ENTRIES_ROWS:
        prices = costs.entries_key or prices
    from_workspace = keys * for_heads(prices, shape.num_q_heads) + window
    find = costs.select + (shape.num_entries + indices) * costs.reference
    from_pages = keys * for_heads(costs.paged_key, shape.num_q_heads)
    from_pages += shape.num_tokens * for_heads(costs.paged_token, shape.num_q_heads)
    if shape.grouped and costs.grouped_key:  # where that does not pay, the kernel's plan lets them go alone
        in_groups = costs.grouped + keys * for_heads(costs.grouped_key, shape.num_q_heads)
        from_pages = min(from_pages, in_groups)
    return {
        "whole": from_workspace + shape.num_entries * costs.row,
        "selected": from_workspace + shape.max_selected * costs.row + find,
        "direct": from_pages + costs.look_up,
    }


def count_keys(lengths: Iterable[tuple[int, int]], ratio: int, topk: int, window_size: int) -> int:
    """What the last tokens of each request, (its length, how many), can attend to: no more than is before."""
    return sum(
        _reach(n, ratio, topk) - _reach(n - queries, ratio, topk)
        + _reach(n, 1, window_size) - _reach(n - queries, 1, window_size)
        for n, queries in lengths
    )  # fmt: skip


def _reach(num_tokens: int, ratio: int, most: int) -> int:
    """The sum of ``min(n // ratio, most)`` for n = 1 .. num_tokens, 0 without a ratio."""
    if ratio == 0 or num_tokens <= 0:
        return 0
    growing = min(num_tokens, ratio * most)
    groups, rest = divmod(growing, ratio)
    return ratio * groups * (groups - 1) // 2 + groups * (rest + 1) + (num_tokens - growing) * most


def for_heads(prices: PerHeads, num_q_heads: int) -> float:
    most, price = prices[-1]
    if num_q_heads > most:
        return price * -(-num_q_heads // most)
    return next(price for heads, price in prices if num_q_heads <= heads)
