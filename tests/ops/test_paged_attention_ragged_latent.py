import pytest
import torch
from assertions import assert_same
from code_cases import (
    assert_reads_every_code,
    assert_reads_the_largest_scales,
    e4m3_layouts,
    largest_scales,
)
from emulation import is_cpu_kernel
from ragged_cases import INF, NAN, int32

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference
from mla_fp8.testing import assert_as_accurate_as

pytestmark = pytest.mark.op("paged_attention_ragged_latent")
every_layout = pytest.mark.parametrize("name", [x.name for x in KV_LAYOUTS.values() if not x.extra_only])


def nan_code(layout):
    """A byte that makes every field of a record NaN: e4m3, scale and rope alike, as far as one byte can."""
    return 0x80 if "fnuz" in layout.name else 0xFF


def make_case(device, name, *, lengths=(5, 0, 64, 1, 130, 17), num_heads=16, page_size=16, q_len=1):
    """``(args, options)``: pages whose unused rows are poisoned."""
    layout = KV_LAYOUTS[name]
    counts = [-(-n // page_size) for n in lengths]
    num_pages = sum(counts) + 3
    pages = (1 + torch.randperm(num_pages - 1))[: sum(counts)]
    indptr = torch.tensor([0, *counts]).cumsum(0)
    slots = torch.cat(
        [
            (pages[indptr[r] : indptr[r + 1], None] * page_size + torch.arange(page_size)).flatten()[:n]
            for r, n in enumerate(lengths)
        ]
    )
    latents = torch.randn(len(slots), layout.head_dim_qk) * torch.tensor([0.2, 1.0, 5.0, 1.0]).repeat(
        layout.head_dim_qk // 4
    )
    cache = torch.full((num_pages, layout.page_bytes(page_size)), nan_code(layout), dtype=torch.uint8)
    scale = torch.tensor([0.043]) if layout.needs_scale else None
    options = {"layout": layout, "page_size": page_size, "scale": scale}
    mla_fp8.quantize_kv(latents.bfloat16(), slots, cache, **options)
    q = torch.randn(len(lengths) * q_len, num_heads, layout.head_dim_qk).bfloat16()
    last = int32([(n - 1) % page_size + 1 if n else 0 for n in lengths], device)
    args = (q.to(device), cache.to(device), indptr.int().to(device), pages.int().to(device), last)
    options |= {"sm_scale": layout.head_dim_qk**-0.5, "q_len": q_len}
    return args, options | ({} if scale is None else {"scale": scale.to(device)})


def check(args, options, result=None):
    out, lse = mla_fp8.paged_attention_ragged_latent(*args, **options) if result is None else result
    options = {name: value for name, value in options.items() if name != "num_splits"}
    exact, exact_lse = reference.paged_attention_ragged_latent(args[0].double(), *args[1:], **options)
    rounded, _ = reference.paged_attention_ragged_latent(*args, **options)
    assert_as_accurate_as(out, rounded, exact, factor=2.0 if is_cpu_kernel(out.device.type) else 4.0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    return out, lse


@every_layout
@pytest.mark.parametrize("num_heads, page_size", [(16, 16), (5, 1), (40, 64)])
def test_matches_float64(name, num_heads, page_size, device):
    check(*make_case(device, name, num_heads=num_heads, page_size=page_size))


@every_layout
def test_several_query_tokens_a_sink_and_a_soft_cap(name, device):
    args, options = make_case(device, name, q_len=3, num_heads=8)
    options |= {"attn_sink": torch.randn(8, device=device), "logits_soft_cap": 20.0}
    check(args, options | {"num_splits": 3})


@every_layout
def test_is_sparse_decode_over_the_same_slots(name, device):
    args, options = make_case(device, name, lengths=(70, 33))
    q, cache, indptr, pages, _ = args
    slots = torch.full((2, 80), -1, dtype=torch.int32, device=device)
    for r, n in enumerate((70, 33)):
        own = pages[indptr[r] : indptr[r + 1], None] * 16 + torch.arange(16, device=device)
        slots[r, :n] = own.flatten()[:n]
    decode = {key: options[key] for key in ("layout", "page_size", "scale", "sm_scale")}
    want_out, want_lse = mla_fp8.sparse_decode(q, cache, slots, **decode)
    out, lse = mla_fp8.paged_attention_ragged_latent(*args, **options)
    torch.testing.assert_close(out, want_out, rtol=2**-6, atol=3e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


@every_layout
def test_pages_that_do_not_exist_are_masked(name, device):
    args, options = make_case(device, name, lengths=(64, 40))
    q, cache, indptr, pages, last = args
    for hole in (-1, len(cache), -(2**31), 2**31 - 1):
        holes = pages.clone()
        holes[1] = holes[4] = hole
        out, lse = check((q, cache, indptr, holes, last), options)
        assert out.isfinite().all() and lse.isfinite().all()
    nothing = torch.full_like(pages, -1)
    out, lse = check((q, cache, indptr, nothing, last), options)
    assert (out == 0).all() and (lse == -INF).all()


@every_layout
def test_key_that_a_query_token_does_not_see_never_reaches_it(name, device):
    args, options = make_case(device, name, q_len=2, lengths=(33,), num_heads=8)
    expected = mla_fp8.paged_attention_ragged_latent(*args, **options)
    _, cache, _, pages, _ = args
    layout = options["layout"]
    for view in layout.views(cache, 16):
        view[pages[2], 0].view(torch.uint8).fill_(nan_code(layout) if view.element_size() == 1 else 0xFF)
    out, lse = mla_fp8.paged_attention_ragged_latent(*args, **options)
    assert_same((out[0], lse[0]), (expected[0][0], expected[1][0]))
    assert not out[1].isfinite().any()


# Heads and queries of a request whose rows are less than a block of the portable kernel, and several blocks,
# some of which begin in the middle of a query.
several_queries = pytest.mark.parametrize(
    "num_heads, q_len", [(1, 16), (3, 5), (8, 2), (8, 4), (16, 3), (5, 19), (40, 3), (128, 2)]
)


@every_layout
@several_queries
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled(7)
def test_queries_of_a_request_share_its_keys(name, num_heads, q_len, num_splits, device):
    """Requests with fewer keys than queries, too, and the last keys in one part, or in two."""
    lengths = (70, 0, 3, 33, 97, 129)
    args, options = make_case(device, name, q_len=q_len, num_heads=num_heads, lengths=lengths)
    out, lse = check(args, options | {"num_splits": num_splits})
    for request, length in enumerate(lengths):
        for query in range(max(0, q_len - length)):
            token = request * q_len + query
            assert (out[token] == 0).all() and (lse[token] == -INF).all()


@several_queries
def test_last_keys_may_lie_in_pages_that_do_not_exist(num_heads, q_len, device):
    args, options = make_case(device, "dsv4", q_len=q_len, num_heads=num_heads, lengths=(40, 35), page_size=2)
    q, cache, indptr, pages, last = args
    holes = pages.clone()
    holes[indptr[1:].long() - 2] = torch.tensor([-1, len(cache)], dtype=torch.int32, device=device)
    check((q, cache, indptr, holes, last), options)


@pytest.mark.parametrize("name", ["dsv32", "dsv4", "fp8_e4m3", "bf16"])
@pytest.mark.parametrize("num_heads, q_len", [(1, 16), (8, 4), (16, 2), (5, 19)])
def test_none_of_the_last_keys_reaches_a_query_before_it(name, num_heads, q_len, device):
    """NaN in one of them at a time: all that sees it is NaN, all else has the bits that it had."""
    args, options = make_case(device, name, q_len=q_len, num_heads=num_heads, lengths=(45,))
    _, cache, _, pages, _ = args
    layout = options["layout"]
    expected = mla_fp8.paged_attention_ragged_latent(*args, **options)
    for position in range(45 - q_len + 1, 45):
        broken = cache.clone()
        for view in layout.views(broken, 16):
            poison = nan_code(layout) if view.element_size() == 1 else 0xFF
            view[pages[position // 16], position % 16].view(torch.uint8).fill_(poison)
        out, lse = mla_fp8.paged_attention_ragged_latent(args[0], broken, *args[2:], **options)
        first = position - (45 - q_len)  # the first query that sees it
        assert_same((out[:first], lse[:first]), (expected[0][:first], expected[1][:first]))
        assert out[first:].isnan().all() and lse[first:].isnan().all()


@e4m3_layouts
@largest_scales
def test_scales_may_be_as_large_as_a_float(layout, scale, device):
    def attend(q, cache, options):
        count = len(q)
        pages = (int32(range(count + 1), device), int32(range(count), device), int32([4] * count, device))
        return mla_fp8.paged_attention_ragged_latent(q, cache, *pages, **options)

    assert_reads_the_largest_scales(layout, device, scale, attend)


@e4m3_layouts
def test_every_code_is_exact_and_a_nan_is_its_request_s(layout, device):
    def attend(q, cache, options):
        count = len(q)
        pages = (int32(range(count + 1), device), int32(range(count), device), int32([1] * count, device))
        return mla_fp8.paged_attention_ragged_latent(q, cache, *pages, **options)

    assert_reads_every_code(layout, device, attend)


def test_strided_pages_and_outputs(device):
    args, options = make_case(device, "dsv4")
    q, cache, *pages = args
    wide = torch.full((len(cache), cache.shape[1] + 64), 0xFF, dtype=torch.uint8, device=device)
    wide[:, : cache.shape[1]] = cache
    out = torch.full((len(q), 18, 520), NAN, dtype=torch.bfloat16, device=device)
    lse = torch.full((len(q), 16), NAN, device=device)
    view = options["layout"].flash_mla_view(wide[:, : cache.shape[1]], 16)
    expected = mla_fp8.paged_attention_ragged_latent(*args, **options, num_splits=1)
    result = mla_fp8.paged_attention_ragged_latent(
        q, view, *pages, **options, num_splits=1, out=out[:, :16, :512], lse=lse
    )
    assert_same(result, expected)
    assert out[:, 16:].isnan().all() and out[..., 512:].isnan().all()


def wrong(name, message, change):
    return pytest.param(name, change, message, id=f"{name} {message[:30]}")


ERRORS = [
    wrong("q", "q must have dtype torch.bfloat16, got torch.float16", lambda t: t.half()),
    wrong("q", r"q must have shape \[\*, \*, 576\], got \[6, 16, 512\]", lambda t: t[..., :512]),
    wrong("kv_cache", "kv_cache must have dtype torch.uint8 or .*, got torch.float32", lambda t: t.float()),
    wrong(
        "layout", r"kv_cache must have shape \[\*, 10496\], got \[20, 9216\]", lambda t: KV_LAYOUTS["dsv32"]
    ),
    wrong("scale", "scale must be given for layout fp8_e4m3, got None", lambda t: None),
    wrong("kv_indices", "kv_indices must have dtype torch.int32, got torch.int64", lambda t: t.long()),
    wrong("q_len", r"q must have 18 tokens \(kv_indptr has 6 requests, q_len is 3\), got 6", lambda n: 3),
]


@pytest.mark.parametrize("name, change, message", ERRORS)
def test_errors_say_expected_and_got(name, change, message, device):
    args, options = make_case(device, "fp8_e4m3")
    names = ("q", "kv_cache", "kv_indptr", "kv_indices", "kv_last_page_len")
    arguments = dict(zip(names, args, strict=True)) | options
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=f"mla_fp8.paged_attention_ragged_latent: .*{message}"):
        mla_fp8.paged_attention_ragged_latent(**arguments)


def test_out_and_lse_come_together(device):
    args, options = make_case(device, "dsv32")
    with pytest.raises(
        ValueError,
        match=r"mla_fp8\.paged_attention_ragged_latent: expected all of out, lse or none, got no out",
    ):
        mla_fp8.paged_attention_ragged_latent(*args, **options, lse=torch.empty(6, 16, device=device))
    with pytest.raises(
        ValueError,
        match=r"mla_fp8\.paged_attention_ragged_latent: expected out and lse with a workspace, got neither",
    ):
        mla_fp8.paged_attention_ragged_latent(*args, **options, workspace=torch.empty(9, device=device))
