"""Several query tokens, the sink, splits and their workspace."""

import pytest
import torch
from assertions import assert_same
from ragged_cases import INF, NAN, all_dtypes, check, make_case

import mla_fp8

pytestmark = pytest.mark.op("paged_attention_ragged")


@all_dtypes
@pytest.mark.parametrize("q_len", [2, 4, 19])
def test_each_query_token_sees_one_key_more_than_the_one_before(q_len, dtype, device):
    args, options = make_case(device, dtype, q_len=q_len, lengths=(5, 0, 33, 1, 70, 17))
    out, lse = check(args, options)
    last = mla_fp8.paged_attention_ragged(
        args[0][q_len - 1 :: q_len].contiguous(), *args[1:], **options | {"q_len": 1}
    )
    torch.testing.assert_close(out[q_len - 1 :: q_len], last[0], rtol=2**-6, atol=1e-2)
    torch.testing.assert_close(lse[q_len - 1 :: q_len], last[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [NAN, INF])
def test_key_that_a_query_token_does_not_see_never_reaches_it(value, device):
    args, options = make_case(device, q_len=3, lengths=(40, 35))
    expected = mla_fp8.paged_attention_ragged(*args, **options)
    _, k_cache, v_cache, indptr, pages, _ = args
    k_cache[pages[indptr[1] - 1], 6] = v_cache[pages[indptr[1] - 1], 6] = value  # position 38 of 40
    out, lse = mla_fp8.paged_attention_ragged(*args, **options)
    assert not out[1:3].isfinite().any()
    seen_by_neither = [0, 3, 4, 5]
    assert_same(
        (out[seen_by_neither], lse[seen_by_neither]),
        (expected[0][seen_by_neither], expected[1][seen_by_neither]),
    )


@all_dtypes
def test_sink_takes_weight_from_the_keys_and_is_not_in_lse(dtype, device):
    args, options = make_case(device, dtype)
    _, lse = mla_fp8.paged_attention_ragged(*args, **options)
    sink = torch.tensor([-INF, -80.0, -1.0, 0.0, 1.0, 4.0, 80.0, INF], device=device)
    out, same_lse = check(args, options | {"attn_sink": sink})
    assert_same([same_lse], [lse])
    assert (out[:, 7] == 0).all() and (out[1] == 0).all()


@all_dtypes
@pytest.mark.parametrize("num_splits", [1, 2, 7, 128])
def test_any_number_of_splits(num_splits, dtype, device):
    """Most splits have no key at all, or none that the first query token sees."""
    args, options = make_case(device, dtype, q_len=2, lengths=(5, 0, 33, 1, 130, 300, 17))
    options |= {"attn_sink": torch.randn(8, device=device), "num_splits": num_splits}
    expected = check(args, options)
    tokens = 14
    workspace = torch.full((num_splits * tokens * 8 * 65,), NAN, device=device)
    out = torch.full((tokens, 8, 64), NAN, device=device, dtype=args[0].dtype)
    lse = torch.full((tokens, 8), NAN, device=device)
    result = mla_fp8.paged_attention_ragged(*args, **options, out=out, lse=lse, workspace=workspace)
    assert_same(result, expected)


def test_workspace_that_is_too_small_means_fewer_splits(device):
    args, options = make_case(device, lengths=(300, 200))
    for elements in (0, 1, 3 * 2 * 8 * 65, 100_000):
        outputs = {"out": torch.empty_like(args[0]), "lse": torch.empty(2, 8, device=device)}
        check(
            args,
            options,
            mla_fp8.paged_attention_ragged(
                *args, **options, **outputs, workspace=torch.full((elements,), NAN, device=device)
            ),
        )
