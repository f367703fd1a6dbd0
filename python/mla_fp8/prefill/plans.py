"""What the plans of Hopper's attention decide by layouts and heads, as they say it themselves."""

import functools

import torch


@functools.cache
def table() -> dict[str, tuple[str, ...]]:
    """Each line of ``attention_table`` (csrc/ops/sparse_attention.cpp): a name, and its values."""
    lines = torch.ops.mla_fp8.attention_table().splitlines()
    return {name: tuple(values) for name, *values in map(str.split, lines)}


def in_any_width(layout_name: str) -> bool:
    """Whether bits of ``batch_invariant`` do not depend on the width of a query's list."""
    return layout_name in table()["any_width"]


def fills_tiles(layout_name: str, heads: int, queries: int) -> bool:
    """Whether the heads of so many neighbours that share keys fill a CTA."""
    known = layout_name in table()["groups"] and str(heads) in table()["group_heads"]
    return known and queries * heads >= int(table()["tile_rows"][0])
