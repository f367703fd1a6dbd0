from itertools import pairwise

import pytest
import torch
from assertions import assert_same
from code_cases import largest_scales
from emulation import executes, is_cpu_kernel
from ragged_cases import (
    INF,
    INT_MAX,
    INT_MIN,
    LENGTHS,
    NAN,
    SHAPES,
    all_dtypes,
    check,
    fp8_dtypes,
    hnd,
    int32,
    make_case,
    padded_rows,
)

import mla_fp8
from mla_fp8.arch import arch_of

pytestmark = pytest.mark.op("paged_attention_ragged")


@all_dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_float64(shape, dtype, device):
    check(*make_case(device, dtype, shape))


@all_dtypes
@pytest.mark.parametrize("memory", [hnd, padded_rows])
def test_any_strides(memory, dtype, device):
    args, options = make_case(device, dtype, memory=memory)
    assert not args[1].is_contiguous()
    expected = check(args, options)
    contiguous = (args[0], args[1].contiguous(), args[2].contiguous(), *args[3:])
    assert_same(mla_fp8.paged_attention_ragged(*contiguous, **options), expected)


def test_values_may_be_a_view_of_the_keys(device):
    args, options = make_case(device, torch.float8_e4m3fn, SHAPES["mqa 192/176"])
    check((args[0], args[1], args[1][..., :176], *args[3:]), options)


@all_dtypes
@pytest.mark.parametrize("cap", [0.5, 30.0, 2.0**24, 3e38])  # the last two: as good as none
def test_soft_cap(cap, dtype, device):
    args, options = make_case(device, dtype)
    plain = mla_fp8.paged_attention_ragged(*args, **options)
    _, lse = check(args, options | {"sm_scale": 3.0, "logits_soft_cap": cap})
    assert not torch.equal(lse, plain[1])
    if cap > 1000:
        without = mla_fp8.paged_attention_ragged(*args, **options | {"sm_scale": 3.0})
        torch.testing.assert_close(lse, without[1])


@fp8_dtypes
def test_one_scale_is_that_scale_for_every_head(dtype, device):
    args, options = make_case(device, dtype, per_head_scales=False)
    expected = check(args, options)
    per_head = {name: options[name].expand(2).contiguous() for name in ("k_scale", "v_scale")}
    assert_same(mla_fp8.paged_attention_ragged(*args, **options | per_head), expected)


def all_codes(dtype, device):
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype)


@fp8_dtypes
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_every_fp8_value_is_exact(scale, dtype, device):
    """One key has weight 1, so out is v; a one-hot q makes the logit one element of k."""
    codes = all_codes(dtype, device)
    k_cache = codes.float().nan_to_num(0.0).to(dtype).view(1, 1, 1, 256)
    q = torch.eye(256, device=device, dtype=torch.bfloat16)[:, None]
    pages = (int32(range(257), device), int32([0] * 256, device), int32([1] * 256, device))
    scales = {
        "k_scale": torch.tensor([scale], device=device),
        "v_scale": torch.tensor([scale], device=device),
    }
    args = (q, k_cache, codes.view(1, 1, 1, 256), *pages)
    out, lse = mla_fp8.paged_attention_ragged(*args, sm_scale=1.0, **scales)
    expected = (codes.float() * scale).bfloat16()
    assert_same([out], [expected.expand(256, 1, 256)])
    torch.testing.assert_close(lse[:, 0], k_cache.flatten().float() * scale, rtol=1e-6, atol=0)


@fp8_dtypes
@largest_scales
def test_scales_may_be_as_large_as_a_float(scale, dtype, device):
    """The bits of a scale between 1 and 2, as powers of two change none."""
    (q, k, v, *pages), options = make_case(device, dtype)
    k, v = ((x.float() / 32).to(dtype) for x in (k, v))
    mantissa = torch.full((2,), scale * 2.0**-127, device=device)
    options |= {"k_scale": mantissa, "v_scale": mantissa}
    out, lse = mla_fp8.paged_attention_ragged(q, k, v, *pages, **options)
    options |= {name: torch.full_like(mantissa, scale) for name in ("k_scale", "v_scale")}
    options["sm_scale"] *= 2.0**-27
    q = q * 2.0**-100
    assert_same(mla_fp8.paged_attention_ragged(q, k, v, *pages, **options), (out * 2.0**127, lse))


def test_every_fp16_value_is_exact(device):
    if executes("gfx90a") or (device == "cuda" and arch_of("cuda", None) == "gfx90a"):
        pytest.skip("gfx90a's MFMA takes subnormal fp16 inputs as zero")
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(device)
    v_cache = values.view(-1, 1, 1, 256)
    requests = len(v_cache)
    args = (
        torch.zeros(requests, 1, 16, dtype=torch.float16, device=device),
        torch.zeros(requests, 1, 1, 16, dtype=torch.float16, device=device),
        v_cache,
        int32(range(requests + 1), device),
        int32(range(requests), device),
        int32([1] * requests, device),
    )
    out, _ = mla_fp8.paged_attention_ragged(*args, sm_scale=1.0)
    assert_same([out.flatten()], [values])


def test_logits_that_keep_growing(device):
    """Each block of keys outweighs everything before it: a stale or unscaled sum would show."""
    args, options = make_case(device, lengths=(200,))
    q, k_cache, _, _, kv_indices, _ = args
    q[:] = 1.0
    for i, page in enumerate(kv_indices.tolist()):
        ramp = torch.linspace(16 * i - 100, 16 * i - 84, 16, device=device) / 8
        k_cache[page] = torch.where(k_cache[page].isnan(), k_cache[page], ramp[:, None, None].bfloat16())
    check(args, options)


def test_flat_attention_sums_to_one(device):
    """Weights in FP8 would round 255 of these 256 keys away."""
    logits = torch.full((256, 1), -7.0, device=device)
    logits[0] = 0.0
    k_cache = (logits * torch.eye(16, device=device)[0]).bfloat16().view(16, 16, 1, 16)
    v_cache = torch.ones_like(k_cache)
    q = torch.eye(16, device=device, dtype=torch.bfloat16)[:1, None]
    args = (q, k_cache, v_cache, int32([0, 16], device), int32(range(16), device), int32([16], device))
    out, lse = mla_fp8.paged_attention_ragged(*args, sm_scale=1.0)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=2**-8, atol=0)
    torch.testing.assert_close(lse, logits.flatten().logsumexp(0).view(1, 1))


def test_request_without_keys_gives_zero_and_minus_infinity(device):
    args, options = make_case(device, lengths=(0, 3, 20, 16, 9))
    kv_indices, last_page_len = args[4].clone(), args[5].clone()
    last_page_len[1] = 0  # one page, none of its rows
    kv_indices[args[3][2] : args[3][4]] = -1  # pages, but none that exist
    args = (*args[:4], kv_indices, last_page_len)
    out, lse = check(args, options)
    assert (out[:4] == 0).all() and (lse[:4] == -INF).all()
    assert (out[4] != 0).any() and lse[4].isfinite().all()


def test_masked_page_is_as_if_it_were_not_listed(device):
    args, options = make_case(device, lengths=(64,))
    q, k_cache, v_cache, _, kv_indices, last = args
    expected = mla_fp8.paged_attention_ragged(*args, **options)
    for hole in (-1, len(k_cache), INT_MIN, INT_MAX):
        holes = int32([hole], device)
        listed = torch.cat([holes, kv_indices[:2], holes, holes, kv_indices[2:]])
        pages = (int32([0, len(listed)], device), listed, last)
        result = check((q, k_cache, v_cache, *pages), options)
        if is_cpu_kernel(device):  # a GPU's blocks of keys count the holes
            assert_same(result, expected)


HOSTILE = {
    "indptr INT_MAX": ("kv_indptr", INT_MAX),
    "indptr INT_MIN": ("kv_indptr", INT_MIN),
    "indptr past the end": ("kv_indptr", 10**6),
    "last_page_len INT_MAX": ("kv_last_page_len", INT_MAX),
    "last_page_len INT_MIN": ("kv_last_page_len", INT_MIN),
    "indices INT_MAX": ("kv_indices", INT_MAX),
    "indices INT_MIN": ("kv_indices", INT_MIN),
}


@pytest.mark.parametrize("name, value", HOSTILE.values(), ids=HOSTILE)
def test_hostile_index_values_stay_in_their_request(name, value, device):
    args, options = make_case(device, lengths=(40, 23, 50, 64))
    clean_k, clean_v = (cache.nan_to_num(1.0) for cache in args[1:3])  # any row may now be selected
    indices = dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), args[3:], strict=True))
    expected = mla_fp8.paged_attention_ragged(args[0], clean_k, clean_v, *indices.values(), **options)
    broken = indices[name].clone()
    broken[{"kv_indptr": 2, "kv_indices": 4, "kv_last_page_len": 1}[name]] = value
    args = (args[0], clean_k, clean_v, *(indices | {name: broken}).values())
    out, lse = check(args, options)
    untouched = [0, 3] if name == "kv_indptr" else [0, 2, 3]  # a boundary belongs to two requests
    assert_same((out[untouched], lse[untouched]), (expected[0][untouched], expected[1][untouched]))


def test_nan_in_a_selected_key_stays_in_its_request_and_kv_head(device):
    args, options = make_case(device, lengths=(40, 33))
    expected = mla_fp8.paged_attention_ragged(*args, **options)
    args[1][args[4][1], 3, 1, 5] = NAN  # KV head 1 of request 0
    out, lse = mla_fp8.paged_attention_ragged(*args, **options)
    assert out[0, 4:].isnan().all() and lse[0, 4:].isnan().all()
    assert_same((out[0, :4], lse[0, :4]), (expected[0][0, :4], expected[1][0, :4]))
    assert_same((out[1], lse[1]), (expected[0][1], expected[1][1]))


@all_dtypes
def test_result_is_repeatable_and_independent_of_the_batch(dtype, device):
    args, options = make_case(device, dtype, SHAPES["mqa 192/176"])
    options["num_splits"] = 3
    expected = mla_fp8.paged_attention_ragged(*args, **options)
    assert_same(mla_fp8.paged_attention_ragged(*args, **options), expected)
    for r, (begin, end) in enumerate(pairwise(args[3].tolist())):
        pages = (int32([0, end - begin], device), args[4][begin:end], args[5][r : r + 1])
        alone = mla_fp8.paged_attention_ragged(args[0][r : r + 1], *args[1:3], *pages, **options)
        assert_same(alone, (expected[0][r : r + 1], expected[1][r : r + 1]))


@pytest.mark.parametrize("lengths, num_splits", [((2000,), 8), ((900, 900, 900, 900, 900), 2), (LENGTHS, 1)])
def test_result_is_independent_of_the_thread_count(lengths, num_splits):
    """Few long requests are split on a CPU too, by their shapes alone."""
    if not is_cpu_kernel("cpu"):
        num_splits = 0
    args, options = make_case("cpu", shape=SHAPES["mqa 192/176"], lengths=lengths)
    num_threads = torch.get_num_threads()
    results = []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        results.append(mla_fp8.paged_attention_ragged(*args, **options))
    torch.set_num_threads(num_threads)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    assert_same(check(args, options | {"num_splits": num_splits}), results[0])


def test_result_is_independent_of_the_page_size(device):
    (q, k_cache, v_cache, *_), options = make_case(device, lengths=(64, 64))
    caches = [torch.randn_like(c.float()).to(c.dtype) for c in (k_cache, v_cache)]
    expected = None
    for page_size in (1, 4, 16):
        paged = [c.reshape(-1, page_size, *c.shape[2:]) for c in caches]
        n = 32 // page_size
        pages = (int32([0, n, 2 * n], device), int32(range(2 * n), device), int32([page_size] * 2, device))
        result = mla_fp8.paged_attention_ragged(q, *paged, *pages, **options)
        assert_same(result, expected or result)
        expected = result


def test_offsets_past_2_to_the_31(device):
    args, options = make_case(device, torch.float8_e4m3fn, lengths=(16,))
    q, k_cache, v_cache, *_ = args
    expected = mla_fp8.paged_attention_ragged(*args, **options)
    stride = 2**30 + 4096
    far = []
    for cache in (k_cache, v_cache):  # page 2 starts past 2^31 bytes; nothing between is touched
        pool = torch.empty(2 * stride + cache[0].numel(), dtype=torch.uint8, device=device).view(cache.dtype)
        view = pool.as_strided((3, *cache.shape[1:]), (stride, *cache.stride()[1:]))
        view[2] = cache[args[4][0]]
        far.append(view)
    far_args = (q, *far, args[3], int32([2], device), args[5])
    assert_same(mla_fp8.paged_attention_ragged(*far_args, **options), expected)


def test_out_form_writes_into_strided_buffers_and_nothing_else(device):
    args, options = make_case(device)
    wide_q = torch.full((len(LENGTHS), 12, 80), NAN, dtype=torch.bfloat16, device=device)
    wide_q[:, :8, :64] = args[0]
    args = (wide_q[:, :8, :64], *args[1:])
    buffer = torch.full((len(LENGTHS), 9, 128), NAN, dtype=torch.bfloat16, device=device)
    out, lse = buffer[:, :8, :64], torch.full((len(LENGTHS), 8), NAN, device=device)
    result = mla_fp8.paged_attention_ragged(*args, **options, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    check(args, options, result)
    assert buffer[:, 8].isnan().all() and buffer[:, :, 64:].isnan().all()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_nothing_to_attend(lengths, device):
    args, options = make_case(device, lengths=lengths)
    for caches in (args[1:3], [cache[:0] for cache in args[1:3]]):
        out, lse = mla_fp8.paged_attention_ragged(args[0], *caches, *args[3:], **options)
        assert out.shape == (len(lengths), 8, 64) and (out == 0).all() and (lse == -INF).all()


# test_schema compares tensors by arithmetic that PyTorch does not have for FP8.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    "dtype, checks", [(torch.float16, CHECKS), (torch.float8_e4m3fn, CHECKS[1:])], ids=["fp16", "fn"]
)
def test_opcheck(dtype, checks, device):
    args, options = make_case(device, dtype)
    options["page_size"] = 16
    torch.library.opcheck(torch.ops.mla_fp8.paged_attention_ragged.default, args, options, test_utils=checks)
    outputs = {"out": torch.empty_like(args[0]), "lse": torch.empty(len(LENGTHS), 8, device=device)}
    op = torch.ops.mla_fp8.paged_attention_ragged_out.default
    torch.library.opcheck(op, args, options | outputs, test_utils=checks)


def test_compiles_without_graph_breaks(device):
    args, options = make_case(device, torch.float8_e4m3fn)
    options["num_splits"] = 1  # as without a workspace
    compiled = torch.compile(mla_fp8.paged_attention_ragged, fullgraph=True, backend="aot_eager")
    expected = mla_fp8.paged_attention_ragged(*args, **options)
    assert_same(compiled(*args, **options), expected)
    outputs = {"out": torch.empty_like(expected[0]), "lse": torch.empty_like(expected[1])}
    assert_same(compiled(*args, **options, **outputs), expected)
