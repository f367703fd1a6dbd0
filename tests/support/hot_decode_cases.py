"""Requests whose rows lie on the host, with a hot buffer each, for tests of decode_hot_rows."""

import torch
from torch import Tensor

import mla_fp8
from mla_fp8 import KV_LAYOUTS

PAGE, PAGES, K, HOT, HEADS = 16, 12, 40, 96, 8


class Server:
    """Requests with a cache on the host and a hot buffer each that holds NaN where nothing was copied."""

    def __init__(self, name: str, device: str, requests: int = 5, next_n: int = 1) -> None:
        torch.manual_seed(0)
        self.layout, self.device, self.next_n, self.requests = KV_LAYOUTS[name], device, next_n, requests
        num_rows = requests * PAGES * PAGE
        self.rows = torch.randn(num_rows, self.layout.head_dim_qk).bfloat16()
        self.host = self.layout.empty(requests * PAGES, PAGE, "cpu")
        slots = torch.arange(num_rows)
        mla_fp8.quantize_kv(self.rows, slots, self.host, layout=self.layout, page_size=PAGE)
        self.stored = mla_fp8.dequantize_kv(self.host, slots, layout=self.layout, page_size=PAGE)
        self.whole = self.host.to(device)
        self.host = self.host.pin_memory() if device == "cuda" else self.host
        self.hot = self.layout.empty(requests, HOT, device).fill_(0xFF)
        self.held = torch.full((requests, HOT), -1, dtype=torch.int32, device=device)
        self.order = torch.arange(HOT, dtype=torch.int16, device=device).repeat(requests, 1)
        self.table = torch.randperm(requests * PAGES, device=device).view(requests, PAGES).int()
        self.hit_rows: Tensor | None = None  # of the last plan
        self.sink = torch.randn(HEADS, device=device)
        window = self.layout.empty(2, PAGE, device)
        latent = torch.randn(2 * PAGE, self.layout.head_dim_qk, device=device).bfloat16()
        mla_fp8.quantize_kv(latent, slots[: 2 * PAGE].to(device), window, layout=self.layout, page_size=PAGE)
        self.window = {"extra_kv_cache": window, "extra_page_size": PAGE}

    def choose(self, step: int) -> Tensor:
        """Entries, some none; drafts of a request choose much the same. Every other step half is new."""
        entries = torch.stack([torch.randperm(PAGES * PAGE // 2)[:K] for _ in range(self.requests)])
        entries = entries.repeat_interleave(self.next_n, 0) + PAGES * PAGE // 2 * (step % 2)
        entries[:, ::7] = torch.randint(-1, PAGES * PAGE, entries[:, ::7].shape)
        for row in entries:  # each once
            seen = torch.zeros(PAGES * PAGE, dtype=torch.bool)
            for i, entry in enumerate(row.tolist()):
                if entry >= 0 and seen[entry]:
                    row[i] = -1
                elif entry >= 0:
                    seen[entry] = True
        return entries.int().to(self.device)

    def resolve(self, entries: Tensor) -> tuple[Tensor, ...]:
        self.hit_rows = torch.empty_like(entries)
        rows = {f"out_{x}_rows": torch.empty_like(entries) for x in ("hot", "miss_host", "miss_hot")}
        return mla_fp8.resolve_hot_rows(
            entries, self.held, self.order, self.table, num_host_rows=len(self.rows), host_page_size=PAGE,
            next_n=self.next_n, **rows, out_miss_counts=torch.empty_like(entries[:, 0]),
            out_hit_rows=self.hit_rows,
        )  # fmt: skip

    def options(self, **more) -> dict:
        sizes = {"layout": self.layout, "host_page_size": PAGE, "hot_page_size": HOT}
        return (
            sizes
            | {"sm_scale": 0.04, "attn_sink": self.sink, "next_n": self.next_n}
            | {"hit_rows": self.hit_rows}
            | more
        )

    def slots(self, entries: Tensor) -> Tensor:
        request = torch.arange(len(entries), device=self.device)[:, None] // self.next_n
        page = self.table[request, entries.clamp_min(0).long() // PAGE]
        return (page * PAGE + entries % PAGE).where(entries >= 0, -1)

    def step(self, step: int, **more) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor, Tensor]:
        """(over the hot buffer, over all rows, queries, slots)."""
        entries = self.choose(step)
        q = torch.randn(len(entries), HEADS, self.layout.head_dim_qk, device=self.device).bfloat16()
        extra = {}
        if more.pop("has_window", False):
            extra = self.window | {"extra_indices": torch.randint(-1, 32, (len(q), 9)).int().to(self.device)}
        got = mla_fp8.decode_hot_rows(
            q, self.host, self.hot, *self.resolve(entries), **self.options(**more), **extra
        )
        slots = self.slots(entries)
        want = mla_fp8.sparse_decode(
            q, self.whole, slots, layout=self.layout, page_size=PAGE, sm_scale=0.04, attn_sink=self.sink,
            **extra,
        )  # fmt: skip
        return got, want, q, slots
