"""Random calls of every op with hostile values, each with the check of its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fuzz_oracle as oracle
import numpy as np
import torch
from fuzz_formats import FOLLOWS, HEAD_DIM_V, LAYOUTS, Array, Layout, bf16_bits, bf16_values
from torch import Tensor

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
POISON = 0xFF  # NaN in every format but fnuz, where 0x80 is


@dataclass
class Call:
    op: str
    arguments: dict[str, Any]  # of mla_fp8.<op>
    check: Callable[[tuple[Tensor, ...]], None]  # raises AssertionError


class Random:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def often(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def ints(
        self, n: int, low: int, high: int, hostile: float = 0.0, also: tuple[int, ...] = ()
    ) -> list[int]:
        """In [low, high), and some of what nobody should pass."""
        bad = (-1, -2, INT_MIN, INT_MAX, 1 << 30, *also)
        return [
            int(self.pick(*bad) if self.often(hostile) else self.rng.integers(low, max(high, low + 1)))
            for _ in range(n)
        ]

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)

    def bf16(self, *shape: int, size: float = 1.0) -> Array:
        """Bits."""
        return bf16_bits(self.normal(*shape) * size)


def tensor(x: Array) -> Tensor:
    """A copy with torch's strides, which NumPy's empty arrays do not have."""
    return torch.from_numpy(np.ascontiguousarray(x)).clone(memory_format=torch.contiguous_format)


def int32(x: Any) -> Tensor:
    return tensor(np.asarray(x, dtype=np.int32))


def from_bits(bits: Array) -> Tensor:
    return tensor(bits.view(np.int16)).view(torch.bfloat16)


def assert_close(name: str, got: Tensor, want: Array, error: Any) -> None:
    got = got.double().numpy()
    with np.errstate(invalid="ignore"):
        right = (got == want) | (np.abs(got - want) <= error)
    assert right.all(), f"{name} at {np.argwhere(~right)[0].tolist()}: {got[~right][0]} for {want[~right][0]}"


class Cache:
    """Pages of tokens; what is not in ``usable`` is full of NaN."""

    def __init__(self, r: Random, layout: Layout, usable_pages: bool = False) -> None:
        self.layout, self.page_size, self.num_pages = layout, r.pick(1, 2, 3, 16, 61), r.pick(0, 1, 2, 5)
        page_bytes = layout.page_bytes(self.page_size)
        if page_bytes % 16 and self.num_pages > 1:
            self.num_pages = 1  # pages are 16-byte aligned
        gap = r.pick(0, 0, 16, 4096)
        poison = 0x80 if layout.fnuz else POISON
        self.tensor = torch.full((self.num_pages, page_bytes + gap), poison, dtype=torch.uint8)[
            :, :page_bytes
        ]
        self.pages = self.tensor.numpy()  # the same memory
        self.scale = float(np.float32(r.pick(1.0, 0.37, 2.0**-6, 3e3))) if layout.scales == "layer" else 1.0
        self.num_slots = self.num_pages * self.page_size
        self.usable = [s for s in range(self.num_slots) if usable_pages or r.often(0.6)]
        size = r.pick(1.0, 1.0, 0.01, 30.0)
        rows = r.bf16(self.num_slots, layout.dim, size=size)
        for s in self.usable:
            page, row = divmod(s, self.page_size)
            layout.store(self.pages[page], self.page_size, row, rows[s], self.scale, None)

    def row(self, slot: int) -> Array:
        page, row = divmod(slot, self.page_size)
        return self.layout.load(self.pages[page], self.page_size, row, self.scale)

    def rows(self, slots: list[int]) -> Array:
        return np.array([self.row(s) for s in slots], dtype=np.float32).reshape(-1, self.layout.dim)

    def slots(self, r: Random, n: int) -> list[int]:
        """Usable ones, and ones that are none."""
        outside = (self.num_slots, self.num_slots + 1, -self.num_slots)
        if not self.usable:
            return r.ints(n, 0, 1, 1.0, outside)
        return [s if s < 0 or s >= len(self.usable) else self.usable[s] for s in
                (x if x < len(self.usable) else max(x, self.num_slots) for x in
                 r.ints(n, 0, len(self.usable), 0.15, outside))]  # fmt: skip

    def options(self) -> dict[str, Any]:
        scale = torch.tensor([self.scale]) if self.layout.scales == "layer" else None
        return {"layout": self.layout.name, "page_size": self.page_size, "scale": scale}


def queries(r: Random, dim: int, num_tokens: int) -> Array:
    return r.bf16(num_tokens, r.pick(1, 2, 3, 8, 13, 16, 17, 64, 128), dim, size=r.pick(1.0, 0.1, 8.0))


def sink_of(r: Random, heads: int) -> Array | None:
    if r.often():
        return None
    return np.array(
        [r.pick(0.0, 1.5, -3.0, np.inf, -np.inf, 1e30, -1e30) for _ in range(heads)], dtype=np.float32
    )


def sparse_check(
    q: Array, scopes: list[list[Array]], sm_scale: float, sink: Array | None
) -> Callable[[tuple[Tensor, ...]], None]:
    """``scopes[i][t]``: the rows of token t."""

    def check(results: tuple[Tensor, ...]) -> None:
        out, *max_logits, lse = results
        assert out.shape == (*q.shape[:2], HEAD_DIM_V) and lse.shape == q.shape[:2]
        for t in range(len(q)):
            k = np.concatenate([scope[t] for scope in scopes])[:, None]
            want = oracle.attend(bf16_values(q[t]), k, k[..., :HEAD_DIM_V], sm_scale, sink)
            assert_close(f"lse[{t}]", lse[t], want.lse, want.lse_error)
            assert_close(f"out[{t}]", out[t], want.out, want.out_error)
            for x in max_logits:
                assert_close(f"max_logits[{t}]", x[t], want.max_logits, want.lse_error)

    return check


def listed(r: Random, cache: Cache, num_tokens: int, prefix: str) -> tuple[dict[str, Any], list[Array]]:
    """Indices into a cache with their lengths, and the rows that they stand for."""
    topk = r.pick(0, 1, 5, 63, 64, 65, 200)
    indices = [cache.slots(r, topk) for _ in range(num_tokens)]
    lengths = r.ints(num_tokens, 0, topk + 2, 0.2) if r.often() else None
    arguments = {
        f"{prefix}indices": int32(indices).view(num_tokens, topk),
        f"{prefix}topk_length": None if lengths is None else int32(lengths),
    }
    rows = [
        cache.rows(oracle.listed_slots(x, None if lengths is None else lengths[t], cache.num_slots))
        for t, x in enumerate(indices)
    ]
    return arguments, rows


def paged(r: Random, cache: Cache, start: list[int], num_tokens: int) -> tuple[dict[str, Any], list[Array]]:
    max_pages, requests, size = r.pick(0, 1, 4), len(start) - 1, cache.page_size
    table = [r.ints(max_pages, 0, cache.num_pages, 0.15, (cache.num_pages,)) for _ in range(requests)]
    lens = r.ints(num_tokens, 0, max_pages * size + 5, 0.2)
    slots = [oracle.entry_slots(table, start, n, t, cache.num_slots, size) for t, n in enumerate(lens)]
    arguments = {"extra_page_table": int32(table).view(requests, max_pages), "extra_topk_length": int32(lens)}
    return arguments, [cache.rows(x) for x in slots]


def extra_cache(
    r: Random, main: Cache, num_tokens: int, start: list[int] | None = None
) -> tuple[dict[str, Any], list[list[Array]]]:
    if r.often():
        return {}, []
    mixed, by_pages = main.layout.name in FOLLOWS and r.often(), start is not None and r.often()
    extra = Cache(r, FOLLOWS[main.layout.name] if mixed else main.layout, usable_pages=by_pages)
    if main.layout.scales == "layer":  # both have the layer's scale
        extra.scale = main.scale
    arguments, rows = (
        paged(r, extra, start, num_tokens) if by_pages else listed(r, extra, num_tokens, "extra_")
    )
    arguments |= {"extra_kv_cache": extra.tensor, "extra_page_size": extra.page_size}
    return arguments | ({"extra_layout": extra.layout.name} if mixed else {}), [rows]


def in_any_batch(r: Random, op: str) -> dict[str, bool]:  # some calls
    options = {"batch_invariant": True, "return_max_logits": False}
    return {} if r.often() else {name: x for name, x in options.items() if op != "sparse_decode" or x}


def sparse_paged(r: Random, op: str) -> Call:
    cache, num_tokens = Cache(r, r.pick(*LAYOUTS)), r.pick(0, 1, 2, 5)
    q = queries(r, cache.layout.dim, num_tokens)
    sink, sm_scale = sink_of(r, q.shape[1]), r.pick(0.05, 0.002, 1.0)
    arguments, rows = listed(r, cache, num_tokens, "")
    extra, more = extra_cache(r, cache, num_tokens)
    arguments = {
        "q": from_bits(q), "kv_cache": cache.tensor, **arguments, **extra, **cache.options(),
        "sm_scale": sm_scale, "attn_sink": None if sink is None else tensor(sink), **in_any_batch(r, op),
    }  # fmt: skip
    return Call(op, arguments, sparse_check(q, [rows, *more], sm_scale, sink))


def sparse_decode(r: Random) -> Call:
    return sparse_paged(r, "sparse_decode")


def sparse_prefill_paged(r: Random) -> Call:
    return sparse_paged(r, "sparse_prefill_paged")


def sparse_prefill(r: Random) -> Call:
    dim, num_tokens, num_rows, topk = (
        r.pick(512, 576),
        r.pick(0, 1, 4),
        r.pick(0, 1, 70),
        r.pick(0, 1, 65, 130),
    )
    wide = np.full((num_rows, dim + 8), BF16_POISON, dtype=np.uint16)
    usable = [i for i in range(num_rows) if r.often()]
    wide[usable, :dim] = r.bf16(len(usable), dim)
    q, sm_scale = queries(r, dim, num_tokens), 0.05
    sink = sink_of(r, q.shape[1])
    indices = [[usable[i % len(usable)] if 0 <= i < num_rows and usable else -1 if 0 <= i < num_rows else i
                for i in r.ints(topk, 0, num_rows, 0.2, (num_rows,))] for _ in range(num_tokens)]  # fmt: skip
    rows = [bf16_values(wide[oracle.listed_slots(x, None, num_rows), :dim]) for x in indices]
    arguments = {
        "q": from_bits(q), "kv": from_bits(wide)[:, :dim], "indices": int32(indices).view(num_tokens, topk),
        "sm_scale": sm_scale, "attn_sink": None if sink is None else tensor(sink),
    }  # fmt: skip
    return Call("sparse_prefill", arguments | in_any_batch(r, ""), sparse_check(q, [rows], sm_scale, sink))


BF16_POISON = 0xFFFF


def starts(r: Random, num_requests: int, num_tokens: int) -> list[int]:
    """Where the queries of each request begin; some tokens may be nobody's."""
    cuts = sorted(r.ints(num_requests, 0, num_tokens + 1))
    first = r.pick(0, 0, 7, -5)
    return [first, *(first + c for c in cuts)]


def sparse_prefill_window(r: Random) -> Call:
    cache = Cache(r, r.pick(*LAYOUTS), usable_pages=True)
    num_tokens, num_requests = r.pick(0, 1, 5), r.pick(0, 1, 3)
    max_pages, window = r.pick(0, 1, 4), r.pick(1, 5, 70, INT_MAX, 2**63 - 1)
    table = [r.ints(max_pages, 0, cache.num_pages, 0.15, (cache.num_pages,)) for _ in range(num_requests)]
    table = [[p if p < cache.num_pages else max(p, cache.num_pages) for p in row] for row in table]
    start, lens = (
        starts(r, num_requests, num_tokens),
        r.ints(num_requests, 0, max_pages * cache.page_size + 5, 0.2),
    )
    q, sm_scale = queries(r, cache.layout.dim, num_tokens), 0.05
    sink = sink_of(r, q.shape[1])
    slots = [oracle.window_slots(table, start, lens, t, cache.num_slots, cache.page_size, window)
             for t in range(num_tokens)]  # fmt: skip
    extra, more = extra_cache(r, cache, num_tokens, start)
    arguments = {
        "q": from_bits(q),
        "kv_cache": cache.tensor,
        "page_table": int32(table).view(num_requests, max_pages),
        "query_start_loc": int32(start),
        "seq_lens": int32(lens),
        **extra,
        **cache.options(),
        "sm_scale": sm_scale,
        "window_size": window,
        "attn_sink": None if sink is None else tensor(sink),
    }
    check = sparse_check(q, [[cache.rows(x) for x in slots], *more], sm_scale, sink)
    return Call("sparse_prefill_window", arguments | in_any_batch(r, ""), check)


def ragged_pages(r: Random, num_pages: int, num_requests: int) -> tuple[list[int], list[int], list[int]]:
    pages = r.ints(r.pick(0, 3, 9), 0, num_pages, 0.2, (num_pages,))
    pages = [p if p < num_pages else max(p, num_pages) for p in pages]
    indptr = r.ints(num_requests + 1, 0, len(pages) + 1, 0.1)
    return (indptr if r.often(0.3) else sorted(indptr)), pages, r.ints(num_requests, 0, 70, 0.1)


def ragged_check(
    q: Array,
    k: Callable[[int, int], Array],
    v: Callable[[int, int], Array],
    dims: tuple[int, int],
    pages: tuple,
    num_pages: int,
    page_size: int,
    options: dict[str, Any],
    sink: Array | None,
) -> Callable[[tuple[Tensor, ...]], None]:
    """``k(page, row)``: [KV heads, dim]."""
    indptr, ids, last = pages
    group, q_len = q.shape[1] // dims[0], options["q_len"]

    def check(results: tuple[Tensor, ...]) -> None:
        out, lse = results
        for t in range(len(q)):
            request, i = divmod(t, q_len)
            keys = oracle.ragged_slots(
                indptr, ids, last[request], request, q_len - 1 - i, num_pages, page_size
            )
            kk, vv = (
                np.array([x(*at) for at in keys])
                .reshape(len(keys), dims[0], -1 if keys else dim)
                .repeat(group, 1)
                for x, dim in ((k, q.shape[2]), (v, dims[1]))
            )
            want = oracle.attend(q[t], kk, vv, options["sm_scale"], sink, options["logits_soft_cap"])
            assert_close(f"lse[{t}]", lse[t], want.lse, want.lse_error)
            assert_close(f"out[{t}]", out[t], want.out, want.out_error)

    return check


def ragged_options(r: Random) -> dict[str, Any]:
    return {
        "sm_scale": r.pick(0.05, 1.0),
        "logits_soft_cap": r.pick(0.0, 0.0, 5.0),
        "q_len": r.pick(1, 1, 2, 3),
        "num_splits": r.pick(0, 1, 2, 7, 128),
    }


def paged_attention_ragged(r: Random) -> Call:
    dtype = r.pick(torch.bfloat16, torch.float16)
    cache_dtype = r.pick(dtype, dtype, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    options, page_size, num_pages, num_requests = (
        ragged_options(r),
        r.pick(1, 3, 16),
        r.pick(0, 1, 4),
        r.pick(0, 1, 3),
    )
    kv_heads, dim, dim_v = r.pick(1, 2), r.pick(16, 64, 128), r.pick(16, 48, 128)
    heads = kv_heads * r.pick(1, 3, 16, 17)
    q = tensor(r.normal(num_requests * options["q_len"], heads, dim)).to(dtype)
    k, v = (tensor(r.normal(num_pages, page_size, kv_heads, n)).to(cache_dtype) for n in (dim, dim_v))
    scales = {}
    if cache_dtype.itemsize == 1:
        scales = {
            name: tensor(np.abs(r.normal(r.pick(1, kv_heads))) + 0.1) for name in ("k_scale", "v_scale")
        }
    kf, vf = (x.double().numpy() * (scales[n].double().numpy()[:, None] if scales else 1)
              for x, n in ((k, "k_scale"), (v, "v_scale")))  # fmt: skip
    pages, sink = ragged_pages(r, num_pages, num_requests), sink_of(r, heads)
    arguments = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        **dict(zip(RAGGED, map(int32, pages), strict=True)),
        **options,
        **scales,
        "page_size": page_size,
        "attn_sink": None if sink is None else tensor(sink),
    }
    check = ragged_check(
        q.double().numpy(),
        lambda p, i: kf[p, i],
        lambda p, i: vf[p, i],
        (kv_heads, dim_v),
        pages,
        num_pages,
        page_size,
        options,
        sink,
    )
    return Call("paged_attention_ragged", arguments, check)


RAGGED = ("kv_indptr", "kv_indices", "kv_last_page_len")


def paged_attention_ragged_latent(r: Random) -> Call:
    cache, options, num_requests = (
        Cache(r, r.pick(*LAYOUTS), usable_pages=True),
        ragged_options(r),
        r.pick(0, 1, 3),
    )
    q = r.bf16(num_requests * options["q_len"], r.pick(1, 3, 16, 17), cache.layout.dim, size=0.5)
    pages, sink = ragged_pages(r, cache.num_pages, num_requests), sink_of(r, q.shape[1])
    arguments = {
        "q": from_bits(q),
        "kv_cache": cache.tensor,
        **dict(zip(RAGGED, map(int32, pages), strict=True)),
        **options,
        **cache.options(),
        "attn_sink": None if sink is None else tensor(sink),
    }

    def row(page: int, i: int) -> Array:
        return cache.row(page * cache.page_size + i)[None]

    check = ragged_check(bf16_values(q), row, lambda p, i: row(p, i)[:, :HEAD_DIM_V], (1, HEAD_DIM_V), pages,
                         cache.num_pages, cache.page_size, options, sink)  # fmt: skip
    return Call("paged_attention_ragged_latent", arguments, check)
