"""Calls written for AITER's ragged paged attention get their result from our op."""

import inspect

import pytest
import torch
from error_cases import check_refused, named
from ragged_cases import all_dtypes, check, fp8_dtypes, hnd, make_case

import mla_fp8
from mla_fp8.compat.aiter import paged_attention_ragged

pytestmark = pytest.mark.op("paged_attention_ragged")
SIGNATURE = (
    "out workspace_buffer query key_cache value_cache scale kv_indptr kv_page_indices kv_last_page_lens "
    "block_size max_num_partitions alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale "
    "v_scale fp8_out_scale partition_size mtp"
)
NAMES = SIGNATURE.split(" ")
PARTITIONS = 3


def call(args, options, kv_cache_dtype=None, **changes) -> dict:
    """The same problem by AITER's names, in its order; the workspace has the size that AITER asks for."""
    q, k_cache, v_cache, indptr, indices, last_page_len = args
    tokens, heads, dim = q.shape[0], q.shape[1], v_cache.shape[3]
    num_bytes = tokens * heads * PARTITIONS * (4 * dim + 8)
    values = (
        torch.full((tokens, heads, dim), float("nan"), dtype=q.dtype, device=q.device),
        torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=q.device),
        q, k_cache, v_cache, options["sm_scale"], indptr, indices, last_page_len, k_cache.shape[1],
        PARTITIONS, None, kv_cache_dtype or ("auto" if k_cache.element_size() > 1 else "fp8"), "NHD", 0.0,
        options.get("k_scale", torch.ones(1, device=q.device)),
        options.get("v_scale", torch.ones(1, device=q.device)), None, 256, options.get("q_len", 1),
    )  # fmt: skip
    return dict(zip(NAMES, values, strict=True)) | changes


def result(arguments: dict) -> torch.Tensor:
    """By position, as AITER is called."""
    out = paged_attention_ragged(*arguments.values())
    assert out is arguments["out"]
    return out


def compare(args, options, out) -> None:
    _, lse = mla_fp8.paged_attention_ragged(*args, **options)
    check(args, options, (out, lse))


def test_names_and_order_are_those_of_the_package():
    assert list(inspect.signature(paged_attention_ragged).parameters) == NAMES


@all_dtypes
@pytest.mark.parametrize("q_len", [1, 2])
def test_gives_what_the_op_gives(dtype, q_len, device):
    """Scales that come with a bf16 cache are not looked at, as AITER's callers always pass some."""
    args, options = make_case(device, dtype, lengths=(5, 64, 130, 17), q_len=q_len)
    compare(args, options, result(call(args, options)))


@fp8_dtypes
def test_hnd_caches_and_both_names_of_fp8(dtype, device):
    args, options = make_case(device, dtype, memory=hnd)
    swapped = {"key_cache": args[1].transpose(1, 2), "value_cache": args[2].transpose(1, 2)}
    for name in ("fp8", "fp8_e4m3"):
        arguments = call(args, options, name, kv_cache_layout="HND", block_size=16, **swapped)
        compare(args, options, result(arguments))


def test_pages_of_one_token_need_no_last_lengths(device):
    """SGLang's way to call it: the page list is the list of slots."""
    args, options = make_case(device, shape=(8, 2, 64, 64, 1))
    want = result(call(args, options))
    out = result(call(args, options, kv_last_page_lens=None))
    full = torch.tensor([n > 0 for n in args[5].tolist()], device=device)
    assert torch.equal(out[full], want[full])
    with pytest.raises(ValueError, match="block_size without kv_last_page_lens must be 1, got 16"):
        result(call(*make_case(device), kv_last_page_lens=None))


@pytest.mark.parametrize(
    "workspace",
    [
        lambda x: x[:0],
        lambda x: x[4:],  # of no use to vectors of 16 bytes
        lambda x: x[::2],
        lambda x: x[: x.numel() // 4 * 4].view(torch.float32),
        lambda x: x[: x.numel() // 2 * 2].view(torch.bfloat16),
    ],
)
def test_any_workspace_will_do(workspace, device):
    args, options = make_case(device)
    arguments = call(args, options)
    compare(args, options, result(arguments | {"workspace_buffer": workspace(arguments["workspace_buffer"])}))


def test_a_soft_cap_and_zero_requests(device):
    args, options = make_case(device)
    compare(args, options | {"logits_soft_cap": 2.0}, result(call(args, options, logits_soft_cap=2.0)))
    args, options = make_case(device, lengths=())
    assert result(call(args, options)).shape == (0, 8, 64)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"workspace_buffer": None}, "workspace_buffer must be a tensor, got None"),
        ({"query": [1.0]}, "query must be a tensor, got [1.0]"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be auto or fp8 or fp8_e4m3, got 'fp8_e5m2'"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype must be fp8 for a cache of torch.float8_e4m3fn, got"),
        ({"kv_cache_layout": "SHD"}, "kv_cache_layout must be NHD or HND, got 'SHD'"),
        ({"alibi_slopes": torch.zeros(8)}, "alibi_slopes must be None, got"),
        ({"fp8_out_scale": torch.ones(1)}, "fp8_out_scale must be None, got"),
        ({"k_scale": None}, "k_scale must be the layer's scale with an FP8 cache, got None"),
        ({"v_scale": None}, "v_scale must be the layer's scale with an FP8 cache, got None"),
        ({"block_size": 8}, "key_cache must have shape [*, 8, *, 64], got [23, 16, 2, 64]"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(change, message, device):
    """SGLang #24129: scales are of a layer and required; e5m2 is not read, whatever its bytes."""
    args, options = make_case(device, torch.float8_e4m3fn)
    arguments = call(args, options) | change
    check_refused(paged_attention_ragged, arguments, message, named(message))


def test_an_fp8_cache_says_its_encoding(device):
    """SGLang #24129, vLLM #42893: the same bytes are other numbers; nobody guesses from the GPU."""
    args, options = make_case(device, torch.float8_e4m3fn)
    arguments = call(args, options)
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].view(torch.uint8)
    message = "dtype of key_cache must be torch.float8_e4m3fn or torch.float8_e4m3fnuz, got torch.uint8"
    check_refused(paged_attention_ragged, arguments, message, ValueError)
