"""vLLM's and SGLang's compressors of V4.1: calls as engines make them, over what the specification says."""

import itertools

import pytest
import torch
from kv_cache_cases import poisoned_cache
from norm_rope_cases import rope_tables

import mla_fp8
from mla_fp8 import KV_LAYOUTS, layer_reference
from mla_fp8.compat import sglang_layer, vllm

PAGES, PAGE_SIZE, EPS, RING = 9, 16, 1e-6, 8
STEPS = [[5, 0, 12], [1, 7, 1], [1, 1, 1], [4, 4, 4]]  # tokens of each of three requests
WHO = [4, 1, 6]  # their states


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


class Engine:
    """Three requests from position 0 on: what a step hands to the ops, and what should come of all."""

    def __init__(self, ratio, device):
        self.ratio, self.device, self.done = ratio, device, [0, 0, 0]
        self.cos, self.sin = rope_tables(device, max_pos=64)
        self.weight = torch.randn(512, device=device).bfloat16()
        self.rows = [torch.randn(40, 512 * ratio, device=device) for _ in WHO]
        if ratio == 1:  # SGLang hands bf16
            self.rows = [x.bfloat16().float() for x in self.rows]

    def steps(self):
        """Of each: rows, positions, slots, request of each row, first row of each request."""
        for lens in STEPS:
            spans = [range(a, a + n) for a, n in zip(self.done, lens, strict=True)]
            x = torch.cat([rows[s.start : s.stop] for rows, s in zip(self.rows, spans, strict=True)])
            request = [r for r, span in enumerate(spans) for _ in span]
            pos = [p for span in spans for p in span]
            slots = [1 + 40 * r + p for r, p in zip(request, pos, strict=True)]  # of tokens; 0 is padding
            starts = [sum(lens[:i]) for i in range(4)]
            yield x, *(ints(t, self.device, torch.int64) for t in (pos, slots)), request, starts
            self.done = [span.stop for span in spans]

    def expected(self, round_pooled):
        """{(request, position): (latent, row)} of every closed entry."""
        found = {}
        for r, rows in enumerate(self.rows):
            n = sum(lens[r] for lens in STEPS)
            closed = layer_reference.compress_kv(
                rows[:n], ints([0, n], "cpu"), ints([0], "cpu"), {}, ints([0], "cpu"), None, self.weight,
                self.cos, self.sin, ratio=self.ratio, eps=EPS, round_pooled=round_pooled,
            )  # fmt: skip
            found |= {(r, p): (latent, row) for p, latent, row in closed}
        return found


def assert_near(got, want):
    """Pooling in float64 may round to the next bf16 now and then."""
    assert torch.equal(got.isnan(), want.isnan())
    distance = (got.double() - want.double()).abs()
    assert (distance <= 2**-6 * want.double().abs() + 1e-6).all() and (distance > 0).double().mean() < 0.01


@pytest.mark.parametrize("ratio", [1, 2])
def test_vllms_compressor_and_insert(ratio, device):
    engine = Engine(ratio, device)
    state = torch.full((8, RING, 1024), float("nan"), device=device)
    table = torch.cat([engine.cos, engine.sin], 1)
    layout, cache = KV_LAYOUTS["dsv4"], poisoned_cache(KV_LAYOUTS["dsv4"], PAGES, PAGE_SIZE, device)
    plain = torch.full((PAGES, PAGE_SIZE, 512), 7.0, dtype=torch.bfloat16, device=device)
    view = cache.as_strided(
        (PAGES, PAGE_SIZE, layout.bytes_per_token), (cache.stride(0), layout.bytes_per_token, 1)
    )
    found = {}
    for x, pos, slots, request, starts in engine.steps():
        blocks = ints([WHO[r] for r in request], device, torch.int64)
        ring_slots = blocks * RING + pos % RING if ratio == 2 else slots
        latent = torch.full((len(x), 512), float("nan"), dtype=torch.bfloat16, device=device)
        vllm.fused_save_compress_norm(
            x, pos, state if ratio == 2 else None, ring_slots, ints(starts, device),
            ints(request, device), engine.weight, EPS, ratio, latent,
        )  # fmt: skip
        entry_slots = slots // ratio
        vllm.rope_quant_insert(latent, pos, table, view, entry_slots, ratio)
        vllm.rope_quant_insert(latent, pos, table, plain, entry_slots, ratio)
        found |= {(r, p): y for r, p, y in zip(request, pos.tolist(), latent, strict=True)}
    want = engine.expected(round_pooled=False)
    for key, latent in found.items():
        if key in want:
            assert_near(latent, want[key][0])
        else:
            assert latent.isnan().all()  # written at the ends of groups alone
    used = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool, device=device)
    for (r, p), latent in found.items():
        if (r, p) in want:
            slot = (1 + 40 * r + p) // ratio
            at, first = ints([slot], device), ints([p + 1 - ratio], device)
            row = layer_reference.rotated(latent[None], engine.cos, engine.sin, first)
            assert torch.equal(plain.flatten(0, 1)[at.long()], row)
            alone = poisoned_cache(layout, PAGES, PAGE_SIZE, device)
            mla_fp8.quantize_kv(row, at, alone, layout=layout, page_size=PAGE_SIZE)
            options = {"layout": layout, "page_size": PAGE_SIZE}
            got, wanted = (mla_fp8.dequantize_kv(c, at, **options) for c in (cache, alone))
            assert torch.equal(got, wanted)
            used[slot] = True
    assert (plain.flatten(0, 1)[~used] == 7.0).all()


def test_vllms_compressor_refuses_what_it_does_not_have(device):
    x, slots = torch.randn(2, 512, device=device), torch.arange(2, device=device)
    latent, weight = torch.empty(2, 512, dtype=torch.bfloat16, device=device), torch.ones(512, device=device)
    with pytest.raises(ValueError, match="prev_rows must be None"):
        vllm.fused_save_compress_norm(x, slots, None, slots, None, None, weight, EPS, 1, latent, prev_rows=x)
    own = torch.zeros(2, 4, KV_LAYOUTS["dsv41"].bytes_per_token, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="kv_cache must have V4's rows"):
        vllm.rope_quant_insert(latent, slots, torch.zeros(9, 64, device=device), own, slots, 1)


@pytest.mark.parametrize("name", ["v4", "v41", "v41_fp4"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_sglangs_compressors(ratio, name, device):
    layout = KV_LAYOUTS[{"v4": "dsv4", "v41": "dsv41", "v41_fp4": "dsv41_fp4"}[name]]
    engine, cache = Engine(ratio, device), poisoned_cache(layout, PAGES, PAGE_SIZE, device)
    state = torch.full((8 * RING, 1024), float("nan"), device=device)
    freqs = torch.stack([engine.cos, engine.sin], -1).flatten(-2)
    rest = (engine.weight, EPS, freqs, cache)
    options, found = {"page_size": PAGE_SIZE, "layout": name}, {}
    for *tensors, request, starts in engine.steps():
        lens = [b - a for a, b in itertools.pairwise(starts)]
        is_verify = ratio == 2 and len(set(lens)) == 1  # as many rows of padding as a request has, else one
        more = lens[0] if is_verify else 1
        x, pos, slots = (torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in tensors)
        req = ints([WHO[r] for r in request] + [0] * more, device)
        out = torch.full((len(x), 512), float("nan"), dtype=torch.bfloat16, device=device)
        if ratio == 1:
            got = sglang_layer.c1_decode_norm_rope_store(
                x.bfloat16(), rest[0], pos, slots, *rest[1:], **options, out=out
            )
        elif is_verify:
            got = sglang_layer.c2_decode_norm_rope_store(
                x, state, rest[0], pos, req, slots, *rest[1:], ring_size=RING, draft_len=more, **options,
                out=out,
            )  # fmt: skip
        else:
            got = sglang_layer.c2_prefill_norm_rope_store(
                x, state, rest[0], pos, req, slots, *rest[1:], ints(starts[:3], device), ints(lens, device),
                ring_size=RING, **options, out=out,
            )  # fmt: skip
        assert got is out
        found |= {(r, p): y for r, p, y in zip(request, pos.tolist(), out, strict=False)}
    want = engine.expected(round_pooled=True)
    assert state[:RING].isnan().all()  # padding has left nothing
    for (r, p), latent in found.items():
        if (r, p) not in want:
            assert latent.isnan().all()
            continue
        assert_near(latent, want[r, p][0])
        at = ints([(1 + 40 * r + p) // ratio], device)
        row = layer_reference.rotated(latent[None], engine.cos, engine.sin, ints([p + 1 - ratio], device))
        alone = poisoned_cache(layout, PAGES, PAGE_SIZE, device)
        mla_fp8.quantize_kv(row, at, alone, layout=layout, page_size=PAGE_SIZE)
        both = (mla_fp8.dequantize_kv(c, at, layout=layout, page_size=PAGE_SIZE) for c in (cache, alone))
        assert torch.equal(*both)
    with pytest.raises(ValueError, match="layout must be one of v4, v41, v41_fp4, got 'uniform_fp8'"):
        sglang_layer.c1_decode_norm_rope_store(
            x, rest[0], pos, slots, *rest[1:], page_size=1, layout="uniform_fp8"
        )
