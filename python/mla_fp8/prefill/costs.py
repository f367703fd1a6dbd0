"""What each way through a prefill layer costs: a measured table per GPU, and one formula."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Nanoseconds, measured by ``benchmarks/bench_prefill_strategies.py``."""

    row: float  # gather and dequantise one row into the workspace
    reference: float  # find the distinct rows: per index, and per row of the region
    select: float  # the same, per layer
    workspace_key: float  # attention over bf16 rows: one query token, one key, up to 64 heads
    paged_key: float  # attention straight from FP8 pages


COSTS: dict[str, Costs] = {
    "cpu": Costs(row=90, reference=8, select=60_000, workspace_key=900, paged_key=950),
    "sm90": Costs(row=0.45, reference=0.03, select=60_000, workspace_key=0.25, paged_key=0.3),
}
DEFAULT = COSTS["sm90"]  # of a GPU that nobody measured: the ratios matter, and they differ less


@dataclass(frozen=True)
class LayerShape:
    """The numbers of one layer and chunk that the choice may look at: no tensor values."""

    num_tokens: int
    num_q_heads: int
    topk: int  # entries that a token may select
    window_size: int
    num_entries: int  # of all requests
    num_window_rows: int

    @property
    def max_selected(self) -> int:
        """How many different entries the chunk can refer to."""
        return min(self.num_entries, self.num_tokens * self.topk)


def predict(shape: LayerShape, arch: str) -> dict[str, float]:
    """Nanoseconds of each strategy."""
    costs = COSTS.get(arch, DEFAULT)
    indices = shape.num_tokens * (shape.topk + shape.window_size)
    keys = indices * -(-shape.num_q_heads // 64)
    from_workspace = keys * costs.workspace_key + shape.num_window_rows * costs.row
    find = costs.select + (shape.num_entries + indices) * costs.reference
    return {
        "whole": from_workspace + shape.num_entries * costs.row,
        "selected": from_workspace + shape.max_selected * costs.row + find,
        "direct": keys * costs.paged_key,
    }
