"""The CUDA kernels write the CPU kernels' bytes, on valid and on hostile inputs, and nothing besides.

What the bytes have to be is tested op by op, on both devices, in test_<op>.py.
"""

import pytest
import torch
from compress_cases import KIND_IDS, KINDS, Layer

import mla_fp8
from mla_fp8 import KV_LAYOUTS

pytestmark = pytest.mark.device(torch.cuda.is_available(), "a GPU")

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
HOSTILE = torch.tensor([INT_MIN, INT_MIN + 1, -(2**30), -1, 2**24, 2**30, INT_MAX - 1, INT_MAX])
LAYOUTS = list(KV_LAYOUTS.values())
all_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
seeds = pytest.mark.parametrize("seed", range(4), ids=lambda seed: f"seed{seed}")


def ints(*shape, low=0, high=100, hostile=0.0, dtype=torch.int32):
    """Random in [low, high), a share of them hostile."""
    x = torch.randint(low, high, shape)
    return torch.where(torch.rand(shape) < hostile, HOSTILE[torch.randint(len(HOSTILE), shape)], x).to(dtype)


def on_cuda(inputs):
    return {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}


def assert_same_bits(got, want):
    assert torch.equal(got.cpu().contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def scale_of(layout):
    return torch.tensor([0.0371]) if layout.needs_scale else None


def strided_cache(layout, num_pages, page_size, fill):
    """Pages with a gap behind each, and one more behind the last."""
    page_bytes = layout.page_bytes(page_size)
    stride = -(-page_bytes // 16) * 16 + 48
    memory = fill(num_pages * stride)
    return memory, lambda m: m.view(num_pages, stride)[:, :page_bytes]


@seeds
@all_layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_kv(layout, dtype, seed):
    torch.manual_seed(seed)
    page_size = (64, 1, 61, 2)[seed]
    num_pages = 200 // page_size + 2
    num_tokens, num_slots = 181, num_pages * page_size
    latent = torch.randn(num_tokens, layout.head_dim_qk) * 2.0 ** torch.randint(-30, 15, (num_tokens, 1))
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38])
    latent = torch.where(torch.rand(latent.shape) < 0.01, special[torch.randint(8, latent.shape)], latent)
    latent[::7] = 0
    slots = torch.randperm(num_slots)[:num_tokens]
    slots = torch.where(torch.rand(num_tokens) < 0.2, HOSTILE[torch.randint(8, (num_tokens,))], slots)
    slots_dtype = torch.int64 if seed % 2 else torch.int32
    if slots_dtype == torch.int64:
        slots[0], slots[1], slots[2] = 2**63 - 1, -(2**63), 2**40
    memory, view = strided_cache(
        layout, num_pages, page_size, lambda n: torch.full((n,), 0xA5, dtype=torch.uint8)
    )
    inputs = {"latent": latent.to(dtype), "slot_mapping": slots.to(slots_dtype), "scale": scale_of(layout)}
    fp8_max = 224.0 if layout.fp8_dtype and seed == 3 else None
    written = memory.cuda()
    for x, m in ((inputs, memory), (on_cuda(inputs), written)):
        mla_fp8.quantize_kv(**x, kv_cache=view(m), layout=layout, page_size=page_size, fp8_max=fp8_max)
    assert (memory != 0xA5).any()
    assert_same_bits(written, memory)


@seeds
@all_layouts
@pytest.mark.parametrize("norm_q", [True, False])
def test_norm_rope_insert(layout, norm_q, seed):
    """Every magnitude, NaN and infinities; both forms of the tables; hostile slots and positions."""
    torch.manual_seed(seed)
    page_size, num_tokens = (64, 1, 61, 2)[seed], 181
    num_pages = 200 // page_size + 2
    half = (32, 128, 0, 4)[seed] if layout.head_dim_qk == 512 else (32, 0)[seed % 2]
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38])
    rows = torch.randn(num_tokens, 6, 512) * 2.0 ** torch.randint(-30, 15, (num_tokens, 1, 1))
    rows = torch.where(torch.rand(rows.shape) < 1e-3, special[torch.randint(7, rows.shape)], rows).bfloat16()
    inputs = {"q": rows[:, :5].contiguous(), "kv": rows[:, 5]}
    table = torch.randn(60, 2 * half)
    cos, sin = (table[:, :half], table[:, half:]) if seed % 2 else (table[:, 0::2], table[:, 1::2])
    inputs |= {
        "kv_weight": (None, torch.randn(512), torch.randn(512).bfloat16(), torch.randn(512))[seed],
        "cos": cos,
        "sin": sin,
        "positions": ints(num_tokens, high=60, hostile=0.1),
        "slot_mapping": torch.where(
            torch.rand(num_tokens) < 0.1, -1, torch.randperm(num_pages * page_size)[:num_tokens]
        ),
        "k_rope": torch.randn(num_tokens, 64).bfloat16() if layout.head_dim_qk > 512 and half else None,
        "scale": scale_of(layout),
    }
    memory, view = strided_cache(
        layout, num_pages, page_size, lambda n: torch.full((n,), 0xA5, dtype=torch.uint8)
    )
    written, options = memory.cuda(), {"layout": layout, "page_size": page_size, "eps": 1e-6}
    want, got = (
        mla_fp8.qk_norm_rope_insert(**x, kv_cache=view(m), **options, norm_q=norm_q, num_heads=7)
        for x, m in ((inputs, memory), (on_cuda(inputs), written))
    )
    assert_same_bits(written, memory)
    assert_same_bits(got, want)
    in_place = on_cuda(inputs)
    mla_fp8.qk_norm_rope_insert(
        **in_place, kv_cache=view(written), **options, norm_q=norm_q, out_q=in_place["q"]
    )
    assert_same_bits(in_place["q"], want[:, :5])


@seeds
@pytest.mark.parametrize("round_pooled", [True, False])
@pytest.mark.parametrize("ratio, online", KINDS, ids=KIND_IDS)
def test_compress_kv(ratio, online, round_pooled, seed):
    """Bit for bit: the softmax is the same float32 operations. Any mix of requests, hostile slots."""
    torch.manual_seed(seed)
    layer = Layer(ratio, online, "cpu", layout=LAYOUTS[(1, 10, 3, 5)[seed]], round_pooled=round_pooled)
    lens = [[1] * 130, [700, 1, 1, 300], [5] * 40, [5000]][seed]
    n, num_states = sum(lens), len(lens) + 2
    state = None if ratio == 1 else torch.randn_like(layer.new_state(num_states, 7))
    if online:
        state[:, :, 512:1024].abs_().add_(1)
    rows = layer.rows(n)
    rows[::7, :4], rows[3::11, 9] = float("nan"), -float("inf")
    starts = torch.tensor([0, *lens]).cumsum(0).int() + 3
    inputs = {
        "kv_score": rows,
        "query_start_loc": starts,
        "start_pos": ints(len(lens), high=400, hostile=0.05),
        "state": state,
        "state_slots": torch.where(torch.rand(len(lens)) < 0.1, -1, torch.randperm(num_states)[: len(lens)]),
        "slot_mapping": torch.where(torch.rand(n) < 0.1, -1, torch.randperm(n)),
        **layer.constants,
        "scale": scale_of(layer.layout),
        "kv_cache": torch.full((-(-n // 64), layer.layout.page_bytes(64)), 0xA5, dtype=torch.uint8),
        "out_latent": torch.full((n, 512), 7.0).bfloat16(),
    }
    options = {"layout": layer.layout, "page_size": 64, "ratio": ratio, "online": online, "eps": 1e-6}
    got = on_cuda(inputs)
    for x in (inputs, got):
        mla_fp8.compress_kv(**x, **options, round_pooled=round_pooled)
    for name in ("out_latent", "kv_cache", "state"):
        if inputs[name] is not None:
            nan = inputs[name].isnan() if inputs[name].is_floating_point() else None
            same = (
                x if nan is None else x.masked_fill(nan.to(x.device), 0) for x in (got[name], inputs[name])
            )
            assert_same_bits(*same)


@seeds
def test_pool_index_k(seed):
    """Bit for bit: the softmax is the same float32 operations. Any mix of requests, hostile slots."""
    torch.manual_seed(seed)
    lens = [[1] * 130, [700, 1, 1, 300], [5] * 40, [5000]][seed]
    n, num_states = sum(lens), len(lens) + 2
    k, score = (torch.randn(2, n, 128) * 2).bfloat16()
    k[::97, :4], score[3::91, 9], score[:8, 5] = float("nan"), -float("inf"), -float("inf")
    state_k, state_score = torch.randn(2, num_states, 9, 128).bfloat16()
    inputs = {
        "k": k,
        "score": score,
        "query_start_loc": torch.tensor([0, *lens]).cumsum(0).int() + 3,
        "start_pos": ints(len(lens), high=400, hostile=0.05),
        "state_k": state_k,
        "state_score": state_score,
        "state_slots": torch.where(torch.rand(len(lens)) < 0.1, -1, torch.randperm(num_states)[: len(lens)]),
        "ape": torch.randn(4, 128),
        "slot_mapping": torch.where(torch.rand(n) < 0.1, -1, torch.randperm(n)),
        "index_cache": torch.full((-(-n // 64), 64 * 132), 0xA5, dtype=torch.uint8),
    }
    got = on_cuda(inputs)
    for x in (inputs, got):
        mla_fp8.pool_index_k(**x, page_size=64)
    for name in ("index_cache", "state_k", "state_score"):
        assert_same_bits(got[name], inputs[name])


@seeds
@pytest.mark.parametrize("tile", [32, 128])
@pytest.mark.parametrize("num_tokens", [1, 70, 1000])
def test_inverse_rope(num_tokens, tile, seed):
    torch.manual_seed(seed)
    o = torch.randn(num_tokens, 9, 512) * 2.0 ** torch.randint(-40, 15, (num_tokens, 9, 1))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38])
    o = torch.where(torch.rand(o.shape) < 1e-3, special[torch.randint(7, o.shape)], o).bfloat16()
    table = torch.randn(60, 64)
    inputs = {"o": o[:, :8], "cos": table[:, 0::2], "sin": table[:, 1::2]}
    if seed % 2:
        inputs |= {"cos": table[:, :32], "sin": table[:, 32:]}
    inputs["positions"] = ints(num_tokens, high=60, hostile=0.1)
    want = mla_fp8.inverse_rope(**inputs)
    assert_same_bits(mla_fp8.inverse_rope(**on_cuda(inputs)), want)
    in_place = on_cuda(inputs)
    assert_same_bits(mla_fp8.inverse_rope(**in_place, out=in_place["o"]), want)
    options = {"num_groups": (1, 2, 8, 4)[seed], "tile": tile, "power_of_two": seed < 3}
    want = mla_fp8.inverse_rope_quantize(**inputs, **options)
    for x, y in zip(mla_fp8.inverse_rope_quantize(**on_cuda(inputs), **options), want, strict=True):
        assert x.stride() == y.stride()
        assert_same_bits(x, y)


def random_cache(layout, page_size):
    num_pages = 300 // page_size + 2
    return num_pages, strided_cache(
        layout, num_pages, page_size, lambda n: torch.randint(256, (n,), dtype=torch.uint8)
    )


def poisoned_rows(num_rows, layout):
    """Rows of a wider buffer: (whole, rows)."""
    return torch.full((num_rows, layout.head_dim_qk + 24), 0x5A5A, dtype=torch.int16).view(torch.bfloat16)


@seeds
@all_layouts
def test_dequantize_kv(layout, seed):
    """Any cache bytes: NaN codes and scales, infinite and subnormal scales, negative ones."""
    torch.manual_seed(seed)
    page_size = (64, 1, 61, 2)[seed]
    num_pages, (memory, view) = random_cache(layout, page_size)
    slots_dtype = torch.int64 if seed % 2 else torch.int32
    slots = ints(1003, high=num_pages * page_size, hostile=0.2, dtype=slots_dtype)
    if slots_dtype == torch.int64:
        slots[0], slots[1], slots[2] = 2**63 - 1, -(2**63), 2**40
    inputs = {"slots": slots, "scale": scale_of(layout)}
    whole, got = poisoned_rows(len(slots), layout), poisoned_rows(len(slots), layout).cuda()
    for x, m, out in ((inputs, memory, whole), (on_cuda(inputs), memory.cuda(), got)):
        rows = out[:, 8 : 8 + layout.head_dim_qk]
        mla_fp8.dequantize_kv(kv_cache=view(m), **x, layout=layout, page_size=page_size, out=rows)
    assert_same_bits(got, whole)


@seeds
@all_layouts
@pytest.mark.parametrize("hostile", [0.0, 0.2])
@pytest.mark.parametrize("num_requests", [0, 5, 70])
def test_dequantize_kv_paged(layout, num_requests, hostile, seed):
    torch.manual_seed(seed)
    page_size = (64, 1, 61, 2)[seed]
    num_pages, (memory, view) = random_cache(layout, page_size)
    seq_lens = ints(num_requests, high=40, hostile=hostile)
    inputs = {
        "page_table": ints(num_requests, 41, high=num_pages, hostile=0.1),
        "seq_lens": seq_lens,
        "gather_lens": torch.minimum(ints(num_requests, high=40, hostile=hostile), seq_lens),
        "row_offsets": ints(num_requests, high=500, hostile=hostile),  # in no order
        "scale": scale_of(layout),
    }
    whole, got = poisoned_rows(501, layout), poisoned_rows(501, layout).cuda()
    for x, m, out in ((inputs, memory, whole), (on_cuda(inputs), memory.cuda(), got)):
        rows = out[:, 8 : 8 + layout.head_dim_qk]
        mla_fp8.dequantize_kv_paged(kv_cache=view(m), **x, layout=layout, page_size=page_size, out=rows)
    assert_same_bits(got, whole)


def combine_inputs(num_tokens, num_requests, topk, hostile):
    lens = torch.randint(0, 2 * num_tokens // max(num_requests, 1) + 1, (num_requests,))
    start = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]) + 7
    seq_lens = ints(num_requests, high=6000, hostile=hostile)
    sprinkled = torch.rand(start.shape) < hostile
    return {
        "topk_indices": ints(num_tokens, topk + 3, low=-100, high=1500, hostile=0.05),
        "query_start_loc": torch.where(sprinkled, HOSTILE[torch.randint(8, start.shape)], start).int(),
        "seq_lens": seq_lens,
        "gather_lens": ints(num_requests, high=300, hostile=hostile),
        "compressed_base": ints(num_requests, high=10**6, hostile=hostile),
        "swa_base": ints(num_requests, high=10**6, hostile=hostile),
    }


@seeds
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("hostile", [0.0, 0.3])
@pytest.mark.parametrize(
    "num_tokens, num_requests, topk, window_size, compress_ratio",
    [
        (61, 1, 512, 128, 4),
        (61, 5, 1024, 128, 1),
        (300, 70, 509, 127, 3),
        (50, 3, 0, 128, 128),
        (50, 3, 7, 0, 2**40),
        (9, 2, 1, 3000, 1),
        (40, 0, 5, 5, 1),
        (0, 3, 5, 5, 1),
        (9001, 9, 2, 3, 4),  # ragged: several rows per warp
        (150_001, 9, 2, 3, 4),  # and more than one tile of a block's sum
    ],
)
def test_combine_topk_swa_indices(
    num_tokens, num_requests, topk, window_size, compress_ratio, hostile, ragged, seed
):
    torch.manual_seed(seed)
    inputs = combine_inputs(num_tokens, num_requests, topk, hostile)
    if seed % 2:
        inputs["query_pos"] = ints(num_tokens, low=-2, high=6000, hostile=hostile)
        inputs["compressed_lens"] = ints(num_requests, high=1500, hostile=hostile)
    options = {"window_size": window_size, "compress_ratio": compress_ratio, "topk": topk}
    op = mla_fp8.combine_topk_swa_indices_ragged if ragged else mla_fp8.combine_topk_swa_indices
    want, got = op(**inputs, **options), op(**on_cuda(inputs), **options)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)

    aligned = on_cuda(inputs)  # 16-byte loads and stores
    aligned["topk_indices"] = torch.nn.functional.pad(aligned["topk_indices"], (0, -(topk + 3) % 4))
    for x, y in zip(op(**aligned, **options), want, strict=True):
        assert_same_bits(x, y)


@seeds
@pytest.mark.parametrize("hostile", [0.0, 0.2])
@pytest.mark.parametrize("num_requests", [0, 1, 7, 256, 257, 1500])
@pytest.mark.parametrize("capacity", [0, 1, 5000])
def test_build_swa_token_ids(capacity, num_requests, hostile, seed):
    torch.manual_seed(seed)
    inputs = {
        "seq_lens": ints(num_requests, high=300, hostile=hostile),
        "extend_seq_lens": ints(num_requests, high=9, hostile=hostile),
        "req_pool_indices": ints(
            num_requests, high=40, hostile=hostile, dtype=(torch.int32, torch.int64)[seed % 2]
        ),
        "req_to_token": ints(40, 300, high=9000, hostile=0.05),
        "full_to_swa": ints(9000, low=-10, high=3000, hostile=0.05, dtype=torch.int64),
    }
    options = {"window_size": (1, 5, 128, INT_MAX)[seed], "capacity": capacity}
    want = mla_fp8.build_swa_token_ids(**inputs, **options)
    got = mla_fp8.build_swa_token_ids(**on_cuda(inputs), **options)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("head_dim", [576, 512, 24, 7, 0, 1544])
@pytest.mark.parametrize(
    "num_tokens, num_q_heads, num_heads", [(37, 8, 64), (1, 16, 16), (5, 0, 4), (0, 3, 8)]
)
def test_pad_q_heads(num_tokens, num_q_heads, num_heads, head_dim):
    torch.manual_seed(0)
    q = ints(num_tokens, num_q_heads, head_dim, low=-(2**15), high=2**15, dtype=torch.int16).view(
        torch.bfloat16
    )
    sink = torch.randn(num_q_heads)
    want = mla_fp8.pad_q_heads(q, sink, num_heads=num_heads)
    for x, y in zip(mla_fp8.pad_q_heads(q.cuda(), sink.cuda(), num_heads=num_heads), want, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [512, 24, 7, 1544])
def test_merge_attention_states(head_dim, dtype):
    """Not to the bit: exp and log differ. Where only one side counts, to the bit."""
    torch.manual_seed(0)
    inputs = [torch.randn(13, 5, head_dim).to(dtype), 3 * torch.randn(13, 5)]
    inputs += [torch.randn(13, 5, head_dim).to(dtype), 3 * torch.randn(13, 5)]
    inputs[1][::3] = -float("inf")
    inputs[3][::2] = -float("inf")
    inputs[0][::3] = float("nan")
    want, got = (
        mla_fp8.merge_attention_states(*inputs),
        mla_fp8.merge_attention_states(*(x.cuda() for x in inputs)),
    )
    one_sided = torch.isinf(inputs[1]) | torch.isinf(inputs[3])
    assert_same_bits(got[0].cpu()[one_sided], want[0][one_sided])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=2 * eps, atol=4e-7)
    torch.testing.assert_close(got[1].cpu(), want[1], rtol=1e-6, atol=1e-6)
