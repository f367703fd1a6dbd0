"""The specification, which all other tests trust, against PyTorch's own scaled_dot_product_attention."""

import pytest
import sdpa
import torch
from assertions import assert_same
from ragged_cases import make_case as make_ragged_case
from sparse_cases import V4_SCOPES, make_case

from mla_fp8 import KV_LAYOUTS, reference
from mla_fp8.backends import reference as backend
from mla_fp8.call import SparseCall
from mla_fp8.layout import get_layout

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("extra", [None, V4_SCOPES], ids=["one cache", "two caches"])
@pytest.mark.parametrize("layout", ["dsv32", "dsv4", "bf16"])
def test_sparse_attention(layout, extra, sink, device):
    """Holes, hostile indices, lengths of any kind, tokens without keys: make_scope."""
    case = make_case(KV_LAYOUTS[layout], device, num_q_heads=3, topk=40, extra=extra, sink=sink)
    want = sdpa.of_case(case)
    assert want[2].isneginf().any() and want[2].isfinite().any()
    assert_close(case.expected(), want)


CALLS = [(x, x) for x in KV_LAYOUTS.values() if not x.extra_only]
CALLS += [(KV_LAYOUTS[first], x) for x in KV_LAYOUTS.values() for first in x.extra_of]


@pytest.mark.parametrize("layout, extra", CALLS, ids=lambda x: x.name)
def test_the_backend_of_that_name_hands_it_the_whole_call(layout, extra, device):
    """In float64 over the pages: latents that the layout stores without error."""
    case = make_case(layout, device, num_q_heads=3, topk=40, extra=V4_SCOPES | {"layout": extra})
    given = case.options() | dict(zip(("q", "kv_cache", "indices"), case.arguments(), strict=True))
    call = SparseCall.of("sparse_prefill_paged", given | {"q": case.q.double()}, get_layout)
    assert_close(backend.sparse_prefill_paged(call), sdpa.of_case(case))
    out, _, lse = backend.sparse_prefill_paged(call)
    assert_same(backend.sparse_decode(call), (out, lse))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("q_len", [1, 2])
def test_paged_attention_ragged(q_len, sink):
    args, options = make_ragged_case("cpu", lengths=(5, 2, 64, 17), shape=(6, 2, 32, 48, 7), q_len=q_len)
    q, k_cache, v_cache, indptr, pages, last = args
    attn_sink = torch.randn(6) if sink else None
    got = reference.paged_attention_ragged(q.double(), *args[1:], **options, attn_sink=attn_sink)
    want = []
    for r in range(4):
        of_request = pages[indptr[r] : indptr[r + 1]].long()
        num_keys = (len(of_request) - 1) * 7 + int(last[r])
        k, v = (x[of_request].flatten(0, 1)[:num_keys].double() for x in (k_cache, v_cache))
        k, v = (x.transpose(0, 1).repeat_interleave(3, 0) for x in (k, v))  # a KV head for three query heads
        for i in range(q_len):
            seen = num_keys - (q_len - 1 - i)
            token = q[r * q_len + i].double()
            out, _, lse = sdpa.attend(token, k[:, :seen], v[:, :seen], options["sm_scale"], attn_sink)
            want.append((out, lse))
    assert_close(got, [torch.stack(x) for x in zip(*want, strict=True)])


def test_merged_halves_are_the_whole(device):
    q, k, v = (torch.randn(4, n, 16, dtype=torch.float64, device=device) for n in (1, 30, 30))
    (out_a, _, lse_a), (out_b, _, lse_b), (out, _, lse) = (
        sdpa.attend(q[:, 0], k[:, part], v[:, part], 0.3, None)
        for part in (slice(12), slice(12, None), slice(None))
    )
    assert_close(reference.merge_attention_states(out_a, lse_a, out_b, lse_b), (out, lse))
