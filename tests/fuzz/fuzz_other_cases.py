"""Random calls of the ops around attention: caches, indices, states. Their bits and integers are compared."""

import fuzz_oracle as oracle
import numpy as np
import torch
from fuzz_cases import INT_MAX, INT_MIN, Cache, Call, Random, assert_close, from_bits, int32, starts, tensor
from fuzz_formats import FP4, LAYOUTS, bf16_bits, bf16_values
from torch import Tensor

POISON = 0xA5


def assert_equal(name: str, got: Tensor, want: object) -> None:
    want = np.asarray(want).reshape(got.shape)
    wrong = got.numpy() != want
    assert not wrong.any(), (
        f"{name} at {np.argwhere(wrong)[0].tolist()}: {got[wrong][0]} for {want[wrong][0]}"
    )


def same_bf16(name: str, got: Tensor, bits: np.ndarray) -> None:
    """Bit for bit, any NaN for any NaN."""
    found = got.contiguous().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(bf16_values(found)) & np.isnan(bf16_values(bits))
    wrong = (found != bits) & ~nan
    assert not wrong.any(), (
        f"{name} at {np.argwhere(wrong)[0].tolist()}: {found[wrong][0]:#x} for {bits[wrong][0]:#x}"
    )


def index_tensor(r: Random, slots: list[int]) -> Tensor:
    if r.often():
        return int32(slots)
    far = [int(r.pick(2**63 - 1, -(2**63), 2**40)) if not -(2**31) < s < INT_MAX else s for s in slots]
    return torch.tensor(far, dtype=torch.int64)


def quantize_kv(r: Random) -> Call:
    cache = Cache(r, r.pick(*LAYOUTS, FP4), usable_pages=True)
    layout, page_size = cache.layout, cache.page_size
    dtype = r.pick(torch.bfloat16, torch.float16, torch.float32)
    num_tokens = r.pick(0, 1, 5, 40)
    x = r.normal(num_tokens, layout.dim) * r.pick(
        1.0, 1e-6, 1e3, 1e30 if dtype is not torch.float16 else 100.0
    )
    for value in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 448.0, 2.0**-140):
        x[r.rng.random(x.shape) < 0.01] = value
    with np.errstate(over="ignore"):
        source = tensor(x.astype(np.float32)).to(dtype)
    bits = bf16_bits(source.float().numpy())
    if dtype is torch.bfloat16:
        bits = source.view(torch.int16).numpy().view(np.uint16)
    fp8_max = r.pick(None, 224.0, 4.0, 120.0) if layout.scales not in ("none", "e4m3") else None
    free = list(r.rng.permutation(cache.num_slots))
    slots = [int(free.pop()) if free and r.often(0.8) else r.pick(-1, INT_MIN, INT_MAX, cache.num_slots)
             for _ in range(num_tokens)]  # fmt: skip
    slots = slots[: r.pick(num_tokens, num_tokens // 2)]
    whole = torch.full((cache.num_pages, cache.pages.strides[0] or 16), POISON, dtype=torch.uint8)
    whole = whole[:, : layout.page_bytes(page_size)] if cache.num_pages else cache.tensor
    want = whole.numpy().copy()
    for t, slot in enumerate(slots):
        if 0 <= slot < cache.num_slots:
            page, row = divmod(slot, page_size)
            layout.store(want[page], page_size, row, bits[t], cache.scale, fp8_max)
    split = r.often(0.3)
    parts = {"latent": source[:, : layout.nope].contiguous(), "rope": source[:, layout.nope :].contiguous()}
    arguments = {
        "latent": source,
        "slot_mapping": index_tensor(r, slots),
        "kv_cache": whole,
        **cache.options(),
        "fp8_max": fp8_max,
    } | (parts if split else {})
    return Call("quantize_kv", arguments, lambda _: assert_equal("kv_cache", whole, want))


def dequantize_kv(r: Random) -> Call:
    cache = Cache(r, r.pick(*LAYOUTS, FP4), usable_pages=True)
    if r.often(0.3):  # bytes that no writer wrote
        cache.pages[:] = r.rng.integers(0, 256, cache.pages.shape)
    slots = r.ints(r.pick(0, 1, 40), 0, cache.num_slots, 0.2, (cache.num_slots,))
    held = [0 <= s < cache.num_slots for s in slots]
    zeros = np.zeros(cache.layout.dim, np.float32)
    rows = np.array([cache.row(s) if ok else zeros for s, ok in zip(slots, held, strict=True)], np.float32)
    want = bf16_bits(rows.reshape(len(slots), cache.layout.dim))
    arguments = {"kv_cache": cache.tensor, "slots": index_tensor(r, slots), **cache.options()}
    return Call("dequantize_kv", arguments, lambda results: same_bf16("row", results[0], want))


def dequantize_kv_paged(r: Random) -> Call:
    cache, num_requests, num_rows = (
        Cache(r, r.pick(*LAYOUTS, FP4), usable_pages=True),
        r.pick(0, 1, 3),
        r.pick(0, 1, 60),
    )
    max_pages = r.pick(0, 1, 4)
    table = [r.ints(max_pages, 0, cache.num_pages, 0.2, (cache.num_pages,)) for _ in range(num_requests)]
    lens = r.ints(num_requests, 0, max_pages * cache.page_size + 3, 0.2)
    gather, offsets, begin = [], [], r.pick(0, -3)
    for i in range(num_requests):  # requests share no rows: what is garbage is the last one's
        gather.append(r.ints(1, 0, 25, 0.4 if i + 1 == num_requests else 0.0)[0])
        offsets.append(begin)
        begin += max(gather[-1], 0) + r.pick(0, 0, 4)
    written = oracle.paged_rows(table, lens, gather, offsets, num_rows, cache.page_size)
    want = np.zeros((num_rows, cache.layout.dim), np.uint16)
    for row, slot in written.items():
        if 0 <= slot < cache.num_slots:
            want[row] = bf16_bits(cache.row(slot))
    arguments = {
        "kv_cache": cache.tensor,
        "page_table": int32(table).view(num_requests, max_pages),
        "seq_lens": int32(lens),
        "gather_lens": int32(gather),
        "row_offsets": int32(offsets),
        "num_rows": num_rows,
        **cache.options(),
    }
    return Call("dequantize_kv_paged", arguments, lambda results: same_bf16("row", results[0], want))


def build_swa_token_ids(r: Random) -> Call:
    n, rows, columns, slots, capacity = (
        r.pick(0, 1, 4),
        r.pick(1, 3),
        r.pick(0, 1, 40),
        r.pick(1, 50),
        r.pick(0, 7, 200),
    )
    lens, extend = r.ints(n, 0, 50, 0.1), r.ints(n, 0, 20, 0.1)
    pool = r.ints(n, 0, rows, 0.2, (rows,))
    tokens = [r.ints(columns, 0, slots, 0.2, (slots,)) for _ in range(rows)]
    swa = r.ints(slots, 0, 99, 0.2, (2**31, 2**63 - 1, -(2**63)))
    window = r.pick(1, 5, 70, INT_MAX)
    want = oracle.swa_ids(lens, extend, pool, tokens, swa, window, capacity)
    arguments = {
        "seq_lens": int32(lens),
        "extend_seq_lens": int32(extend),
        "req_pool_indices": index_tensor(r, pool),
        "req_to_token": int32(tokens).view(rows, columns),
        "full_to_swa": torch.tensor(swa, dtype=torch.int64),
        "window_size": window,
        "capacity": capacity,
    }

    def check(results: tuple[Tensor, ...]) -> None:
        for name, got, expected in zip(
            ("ids", "first_pos", "gather_lens", "offsets"), results, want, strict=True
        ):
            assert_equal(name, got, np.array(expected, np.int64))

    return Call("build_swa_token_ids", arguments, check)


def combine(r: Random, op: str) -> Call:
    num_tokens, n, topk, window, ratio = (
        r.pick(0, 1, 6),
        r.pick(1, 2, 4),
        r.pick(0, 1, 20),
        r.pick(0, 1, 30),
        r.pick(1, 4, 128),
    )
    entries = [r.ints(topk + r.pick(0, 3), 0, 30, 0.2) for _ in range(1)] * num_tokens
    entries = [r.ints(len(row), 0, 30, 0.2) for row in entries]
    start, lens, gather = starts(r, n, num_tokens), r.ints(n, 0, 60, 0.1), r.ints(n, 0, 70, 0.15)
    bases = [r.ints(n, 0, 500, 0.15) for _ in range(2)]
    positions = r.ints(num_tokens, 0, 60, 0.1) if r.often(0.3) else None
    entry_lens = r.ints(n, 0, 30, 0.1) if r.often(0.3) else None
    rows = [
        oracle.combined_row(t, entries[t], start, lens, gather, *bases, window, ratio, topk,
                            None if positions is None else positions[t], entry_lens)
        for t in range(num_tokens)
    ]  # fmt: skip
    arguments = {
        "topk_indices": int32(entries).view(num_tokens, len(entries[0]) if entries else topk),
        "query_start_loc": int32(start), "seq_lens": int32(lens), "gather_lens": int32(gather),
        "compressed_base": int32(bases[0]), "swa_base": int32(bases[1]),
        "window_size": window, "compress_ratio": ratio, "topk": topk,
        "query_pos": None if positions is None else int32(positions),
        "compressed_lens": None if entry_lens is None else int32(entry_lens),
    }  # fmt: skip

    def check(results: tuple[Tensor, ...]) -> None:
        if op == "combine_topk_swa_indices":
            indices, lens = results
            width = indices.shape[1]
            assert width % 128 == 0 and topk + window <= width < topk + window + 128
            assert_equal("lens", lens, [length for _, length in rows])
            assert_equal("indices", indices, [row + [-1] * (width - len(row)) for row, _ in rows])
        else:
            indptr, indices = results
            kept = [[x for x in row if x >= 0] for row, _ in rows]
            assert_equal("indptr", indptr, np.cumsum([0, *map(len, kept)]))
            flat = [x for row in kept for x in row]
            assert_equal("indices", indices, flat + [-1] * (num_tokens * (topk + window) - len(flat)))

    return Call(op, arguments, check)


def combine_topk_swa_indices(r: Random) -> Call:
    return combine(r, "combine_topk_swa_indices")


def combine_topk_swa_indices_ragged(r: Random) -> Call:
    return combine(r, "combine_topk_swa_indices_ragged")


def pad_q_heads(r: Random) -> Call:
    heads, num_tokens, dim = r.pick(1, 7, 64), r.pick(0, 1, 4), r.pick(0, 1, 64, 576)
    num_heads = heads + r.pick(0, 1, 57)
    q = from_bits(r.rng.integers(0, 1 << 16, (num_tokens, heads, dim)).astype(np.uint16))
    sink = tensor(r.normal(heads)) if r.often() else None

    def check(results: tuple[Tensor, ...]) -> None:
        padded = torch.nn.functional.pad(q.view(torch.int16), (0, 0, 0, num_heads - heads))
        assert torch.equal(results[0].view(torch.int16), padded)
        assert (results[1] is None) == (sink is None)
        if sink is not None:
            assert torch.equal(results[1][:heads], sink) and results[1][heads:].isneginf().all()

    return Call("pad_q_heads", {"q": q, "attn_sink": sink, "num_heads": num_heads}, check)


def merge_attention_states(r: Random) -> Call:
    shape, dim = (r.pick(0, 1, 4), r.pick(1, 5)), r.pick(0, 1, 64, 513)
    dtype = r.pick(torch.bfloat16, torch.float16, torch.float32)
    a, b = (tensor(r.normal(*shape, dim)).to(dtype) for _ in range(2))
    lse = [r.normal(*shape) * np.float32(r.pick(1.0, 30.0, 1e4)) for _ in range(2)]
    for x, side in zip(lse, (a, b), strict=True):
        gone = r.rng.random(shape) < 0.2
        x[gone] = -np.inf
        side[torch.from_numpy(gone)] = torch.nan
    want, want_lse = oracle.merged(
        a.double().numpy(), lse[0].astype(float), b.double().numpy(), lse[1].astype(float)
    )
    arguments = {"out_a": a, "lse_a": tensor(lse[0]), "out_b": b, "lse_b": tensor(lse[1])}

    def check(results: tuple[Tensor, ...]) -> None:
        size = np.abs(want_lse, where=np.isfinite(want_lse), out=np.zeros_like(want_lse))
        assert_close("lse", results[1], want_lse, 1e-6 * (1 + size))
        error = torch.finfo(dtype).eps * 8 + 2.0**-20 * size[..., None]
        assert_close("out", results[0], want, error)

    return Call("merge_attention_states", arguments, check)


def merge_partial_states(r: Random) -> Call:
    shape, dim = (r.pick(1, 2, 5), r.pick(0, 1, 4), r.pick(1, 3)), r.pick(0, 1, 64, 513)
    dtype, base = r.pick(torch.bfloat16, torch.float16, torch.float32), r.pick(np.e, 2.0)
    outs = tensor(r.normal(*shape, dim)).to(dtype)
    lses = r.normal(*shape) * np.float32(r.pick(1.0, 30.0, 1e4))
    gone = r.rng.random(shape) < 0.3
    lses[gone] = r.rng.choice(np.array([np.nan, np.inf, -np.inf], dtype=np.float32), size=shape)[gone]
    outs[torch.from_numpy(gone)] = torch.nan
    sink = r.normal(shape[2]) * np.float32(r.pick(1.0, 1e4)) if r.often() else None
    natural = np.where(gone, -np.inf, lses.astype(float)) * np.log(base)
    want_lse = np.logaddexp.reduce(natural, 0)
    total = want_lse if sink is None else np.logaddexp(want_lse, sink.astype(float))
    with np.errstate(invalid="ignore"):
        weights = np.where(gone, 0.0, np.exp(natural - total))
    want = (np.where(gone[..., None], 0.0, outs.double().numpy()) * weights[..., None]).sum(0)
    arguments = {
        "outs": outs, "lses": tensor(lses), "attn_sink": None if sink is None else tensor(sink), "base": base
    }  # fmt: skip

    def check(results: tuple[Tensor, ...]) -> None:
        size = np.abs(want_lse, where=np.isfinite(want_lse), out=np.zeros_like(want_lse))
        assert_close("lse", results[1], want_lse / np.log(base), 1e-6 * (1 + size))
        sinks = 0 if sink is None else np.abs(sink)
        error = torch.finfo(dtype).eps * 8 + 2.0**-20 * (size + sinks)[..., None]
        assert_close("out", results[0], want, error)

    return Call("merge_partial_states", arguments, check)
