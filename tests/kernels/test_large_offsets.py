"""Addresses past 2^31, on a GPU that has the memory. The CPU has strided equivalents in test_<op>.py."""

import pytest
import torch

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference


def free_gpu_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


pytestmark = pytest.mark.device(free_gpu_bytes() >= 24 << 30, "a GPU with 24 GiB free")

LAYOUT = KV_LAYOUTS["dsv4"]
PAGE_SIZE = 256
ROWS = 2**31 // 512 + 1000  # of 512 elements: more than 2^31 elements


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    torch.cuda.empty_cache()


def test_cache_past_two_to_the_31_bytes():
    page_bytes = LAYOUT.page_bytes(PAGE_SIZE)
    num_pages = 2 * (2**31 // page_bytes) + 20  # past 2^32 too
    kv_cache = torch.full((num_pages, page_bytes), 0xA5, dtype=torch.uint8, device="cuda")
    pages = torch.tensor([0, 2**31 // page_bytes, 2**31 // page_bytes + 1, num_pages // 2, num_pages - 1])
    slots = (pages[:, None] * PAGE_SIZE + torch.tensor([0, 17, PAGE_SIZE - 1])).flatten().cuda()
    latent = torch.randn(len(slots), 512, device="cuda").bfloat16()
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=LAYOUT, page_size=PAGE_SIZE)

    few = torch.full((len(pages), page_bytes), 0xA5, dtype=torch.uint8)
    few_slots = torch.arange(len(pages))[:, None] * PAGE_SIZE + torch.tensor([0, 17, PAGE_SIZE - 1])
    reference.quantize_kv(latent.cpu(), few_slots.flatten(), few, layout=LAYOUT, page_size=PAGE_SIZE)
    assert torch.equal(kv_cache[pages.cuda()].cpu(), few)
    untouched = torch.ones(num_pages, dtype=torch.bool)
    untouched[pages] = False
    for first in range(0, num_pages, 4096):
        chunk = kv_cache[first : first + 4096][untouched[first : first + 4096].cuda()]
        assert (chunk == 0xA5).all()

    for dtype in (torch.int32, torch.int64):
        out = mla_fp8.dequantize_kv(kv_cache, slots.to(dtype), layout=LAYOUT, page_size=PAGE_SIZE)
        want = reference.dequantize_kv(few, few_slots.flatten(), layout=LAYOUT, page_size=PAGE_SIZE)
        assert torch.equal(out.cpu(), want)
    paged = mla_fp8.dequantize_kv_paged(
        kv_cache,
        pages[:, None].int().cuda(),
        *(torch.full((len(pages),), PAGE_SIZE, dtype=torch.int32, device="cuda") for _ in range(2)),
        torch.arange(len(pages), dtype=torch.int32, device="cuda") * PAGE_SIZE,
        layout=LAYOUT,
        page_size=PAGE_SIZE,
        num_rows=len(pages) * PAGE_SIZE,
    )
    assert torch.equal(paged[few_slots.flatten().cuda()].cpu(), want)


def test_latent_and_output_rows_past_two_to_the_31_elements():
    num_pages = 40
    latent = torch.zeros(ROWS, 512, dtype=torch.bfloat16, device="cuda")
    latent[-2000:] = torch.randn(2000, 512, device="cuda")
    slots = torch.full((ROWS,), -1, dtype=torch.int32, device="cuda")
    slots[-2000:] = torch.randperm(num_pages * 64, device="cuda")[:2000].int()
    kv_cache = LAYOUT.empty(num_pages, 64, "cuda").fill_(0xA5)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=LAYOUT, page_size=64)
    want = torch.full_like(kv_cache, 0xA5)
    mla_fp8.quantize_kv(latent[-2000:], slots[-2000:], want, layout=LAYOUT, page_size=64)
    assert (want != 0xA5).any() and torch.equal(kv_cache, want)
    del latent

    slots[:-2000] = slots[-2000:].repeat(ROWS // 2000)[: ROWS - 2000]
    out = mla_fp8.dequantize_kv(kv_cache, slots, layout=LAYOUT, page_size=64)
    for part in (slice(0, 2000), slice(ROWS - 2000, ROWS)):
        assert torch.equal(
            out[part], mla_fp8.dequantize_kv(kv_cache, slots[part], layout=LAYOUT, page_size=64)
        )


def test_combined_rows_past_two_to_the_31_elements():
    num_tokens = 2**31 // 640 + 1000
    rows = torch.randint(0, 5000, (1000, 512), dtype=torch.int32, device="cuda")
    topk_indices = rows.repeat(num_tokens // 1000 + 1, 1)[:num_tokens]

    def combine(first):
        count = num_tokens - first
        loc = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        length = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
        zero = torch.zeros_like(length)
        return mla_fp8.combine_topk_swa_indices(
            topk_indices[first:], loc, length, length, zero, zero, window_size=128, compress_ratio=4, topk=512
        )

    whole, tail = combine(0), combine(num_tokens - 3000)
    for x, y in zip(whole, tail, strict=True):
        assert torch.equal(x[-3000:], y)


def test_padded_heads_past_two_to_the_31_elements():
    num_tokens = 2**31 // (64 * 576) + 100
    q = torch.randn(num_tokens, 1, 576, device="cuda").bfloat16()
    out, _ = mla_fp8.pad_q_heads(q, None, num_heads=64)
    for part in (slice(0, 100), slice(num_tokens - 100, num_tokens)):
        assert torch.equal(out[part, 0], q[part, 0]) and not out[part, 1:].any()


def test_merged_states_past_two_to_the_31_elements():
    num_tokens = 2**31 // (128 * 512) + 100
    one = torch.randn(num_tokens, 1, 512, device="cuda").bfloat16()
    lse_a, lse_b = torch.randn(2, num_tokens, 128, device="cuda")
    out, lse = mla_fp8.merge_attention_states(
        one.expand(-1, 128, -1), lse_a, one.flip(0).expand(-1, 128, -1), lse_b
    )
    for part in (slice(0, 100), slice(num_tokens - 100, num_tokens)):
        want, want_lse = mla_fp8.merge_attention_states(
            one[part].expand(-1, 128, -1),
            lse_a[part].contiguous(),
            one.flip(0)[part].expand(-1, 128, -1),
            lse_b[part].contiguous(),
        )
        assert torch.equal(out[part], want) and torch.equal(lse[part], want_lse)
