"""The cases of bench_sparse_prefill.py."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bench_sparse_decode import CUDA, HEADS, NUM_SLOTS, PROMPT_ROWS, RATIO
from row_kinds import ROW_KINDS, RowKind, expected_keys

from mla_fp8 import KV_LAYOUTS

WINDOW = 128
REAL_ROWS = min(NUM_SLOTS, 128 << 10)
REAL_TOKENS = 2048 if CUDA else 4  # but of prompts


@dataclass(frozen=True)
class Shape:
    layout: str
    num_q_heads: int
    num_tokens: int
    topk: int
    window: int
    rows: int  # that the top-k entries choose among
    bf16: bool = False  # from a workspace instead of pages
    layer: bool = False
    kind: RowKind | None = None  # of the top-k entries; None: every index valid
    entries_layout: str = ""  # that of the window

    @property
    def label(self) -> str:
        kind = ("layer " if self.layer else "") + ("bf16 " if self.bf16 else "")
        window = f"+{self.window}" if self.window else ""
        size = f" {self.rows >> 10}K" if self.topk else ""
        rows = f": {self.kind.label}" if self.kind else ""
        layouts = "+".join(filter(None, (self.layout, self.entries_layout)))
        return f"{kind}{layouts} {self.topk}{window}{size} h{self.num_q_heads} t{self.num_tokens}{rows}"

    @property
    def ratio(self) -> int:
        return RATIO if self.window else 1

    @property
    def before(self) -> int:
        """Tokens before the first query, as many as windows reach."""
        prompt_from = None if self.kind is None else self.kind.prompt_from
        return WINDOW - 1 if prompt_from is None else min(prompt_from, WINDOW - 1)

    @property
    def keys(self) -> int:
        if self.kind is None:
            return self.num_tokens * (self.topk + self.window)
        in_windows = expected_keys(RowKind("", prompt_from=self.before), self.num_tokens, self.window, 1)
        return int(in_windows + expected_keys(self.kind, self.num_tokens, self.topk, self.ratio))

    @property
    def flops(self) -> int:
        layout = KV_LAYOUTS[self.layout]
        return 2 * self.keys * self.num_q_heads * (layout.head_dim_qk + layout.head_dim_v)

    @property
    def num_bytes(self) -> int:
        """Each byte once: the caches, Q and the output."""
        layout = KV_LAYOUTS[self.layout]
        entries = KV_LAYOUTS[self.entries_layout or self.layout]
        tokens = self.num_tokens * self.num_q_heads * (layout.head_dim_qk + layout.head_dim_v) * 2
        row, entry = (layout.head_dim_qk * 2 if self.bf16 else x.bytes_per_token for x in (layout, entries))
        in_windows = self.num_tokens + self.before if self.window else 0
        return tokens + (self.rows * entry if self.topk else 0) + in_windows * row


def shapes() -> Iterator[Shape]:
    heads = (8, 16, 32, 64)
    for h, rows in itertools.product(heads, (32 << 10, 128 << 10)):
        yield Shape("dsv32", h, 4096, 2048, 0, rows)
        yield Shape("dsv4", h, 4096, 512, WINDOW, rows)
        yield Shape("dsv4", h, 8192, 512, WINDOW, rows)
        yield Shape("dsv4", h, 4096, 1024, WINDOW, rows)
    for h, layout in itertools.product(HEADS, ("dsv41", "dsv4")):
        yield Shape(layout, h, 4096, 512, WINDOW, 32 << 10, entries_layout="dsv41_fp4")
    for h in heads:
        yield Shape("dsv4", h, 8192, 0, WINDOW, 0)
        yield Shape("dsv4", h, 8192, 0, WINDOW, 0, bf16=True)
        yield Shape("dsv4", h, 8192, 0, WINDOW, 0, bf16=True, layer=True)
    for h in (16, 32, 64, 128):
        yield Shape("dsv32", h, 256, 2048, 0, 128 << 10)
        yield Shape("dsv4", h, 256, 1024, WINDOW, 128 << 10)
    for h in (8, 16, 32, 64):
        yield Shape("dsv4", h, 4096, 512, WINDOW, 64 << 10, bf16=True)
    for h in (16, 32, 64, 128):
        yield Shape("bf16_512", h, 4096, 512, WINDOW, 64 << 10)
    for rows in (8 << 10, 64 << 10):
        yield Shape("dsv4", 64, 4096, 512, 0, rows, bf16=True)
        yield Shape("dsv4", 128, 4096, 1024, 0, rows, bf16=True)
    for rows in (32 << 10, 128 << 10):
        yield Shape("dsv32", 64, 4096, 2048, 0, rows, bf16=True)
        yield Shape("dsv32", 128, 4096, 2048, 0, rows, bf16=True)
    for h, rows in itertools.product((8, 16, 64), (32 << 10, 128 << 10)):
        yield Shape("dsv32", h, 8192, 2048, 0, rows, layer=True)
        yield Shape("dsv4", h, 8192, 512, WINDOW, rows // 4, layer=True)
    for h, rows in itertools.product((32, 64), (32 << 10, 128 << 10)):
        yield Shape("dsv32", h, 8192, 2048, 0, rows, bf16=True, layer=True)
        yield Shape("dsv4", h, 8192, 512, WINDOW, rows // 4, bf16=True, layer=True)
    for h, bf16 in itertools.product((16, 32, 64, 128), (False, True)):
        if not (bf16 and h == 16):
            yield Shape("dsv32", h, 256, 2048, 0, 128 << 10, bf16=bf16, layer=True)
            yield Shape("dsv4", h, 256, 1024, WINDOW, 32 << 10, bf16=bf16, layer=True)


def cpu_shapes() -> Iterator[Shape]:
    for h in HEADS:
        yield Shape("dsv32", h, 16, 2048, 0, 4 << 10)
        yield Shape("dsv4", h, 16, 512, WINDOW, 4 << 10)


def real_shapes() -> Iterator[Shape]:
    """Heads innermost: they share their indices."""
    kinds = [kind for kind in ROW_KINDS if kind.s_q == 1]
    forms = (("dsv32", 2048, 0), ("dsv4", 512, WINDOW))
    for kind, bf16, (layout, topk, window) in itertools.product(kinds, (False, True), forms):
        tokens = REAL_TOKENS if kind.prompt_from is None else PROMPT_ROWS
        for h in HEADS:
            yield Shape(layout, h, tokens, topk, window, REAL_ROWS, bf16=bf16, kind=kind)
