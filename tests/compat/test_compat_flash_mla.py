"""Calls written for the flash_mla package get its results from our ops."""

import inspect
from dataclasses import replace

import engine_standins
import pytest
import torch
from assertions import assert_attention, assert_same
from draft_cases import draft_case, plan_of, without_lengths
from error_cases import check_refused, named
from sparse_cases import V4_SCOPES, Case, make_case, packed_layouts

from mla_fp8 import KV_LAYOUTS
from mla_fp8.backends import flash_mla as flash_mla_backend
from mla_fp8.backends import packages
from mla_fp8.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from mla_fp8.testing import assert_within_flash_mla_tolerance

BATCH, S_Q = 3, 2
INF = float("inf")


def decode_case(layout, device: str, **shape) -> Case:
    """Six query tokens as three batches of two, which share a length; token 1 has no keys."""
    case = make_case(layout, device, num_tokens=BATCH * S_Q, **shape)
    scopes = [replace(s, length=s.length[::S_Q].repeat_interleave(S_Q)) for s in case.scopes]
    usable = [s.rows.isfinite().all(1).nonzero().flatten().int() for s in case.scopes]
    for s, slots in zip(scopes, usable, strict=True):  # tokens 2 and 3 attend to all their indices
        s.length[:4] = s.indices.shape[1]
        s.indices[2:4] = slots[torch.randint(len(slots), s.indices[2:4].shape, device=device)]
    return replace(case, scopes=scopes)


def decode_arguments(case: Case) -> dict:
    """The same problem as flash_mla_with_kvcache takes it."""
    caches = [s.layout.flash_mla_view(s.kv_cache, s.page_size) for s in case.scopes]
    indices = [s.indices.unflatten(0, (BATCH, S_Q)) for s in case.scopes]
    lengths = [s.length[::S_Q].contiguous() for s in case.scopes]
    arguments = {
        "q": case.q.unflatten(0, (BATCH, S_Q)),
        "k_cache": caches[0],
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "softmax_scale": case.sm_scale,
        "is_fp8_kvcache": True,
        "indices": indices[0],
        "attn_sink": case.attn_sink,
        "topk_length": lengths[0],
    }
    if len(caches) > 1:
        arguments |= {
            "extra_k_cache": caches[1],
            "extra_indices_in_kvcache": indices[1],
            "extra_topk_length": lengths[1],
        }
    return arguments


def prefill_arguments(case: Case) -> dict:
    scope = case.scopes[0]
    return {
        "q": case.q,
        "kv": scope.rows[:, None],
        "indices": scope.indices[:, None],
        "sm_scale": case.sm_scale,
        "attn_sink": case.attn_sink,
        "topk_length": scope.length,
    }


def prefill_case(name: str, device: str) -> Case:
    return make_case(KV_LAYOUTS[name], device, page_size=1)


def scattered(x: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of 2 in the last dimension, so no kernel can read them in place."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def inside(x: torch.Tensor, before: int = 8) -> torch.Tensor:
    """The same values behind so many columns of a larger tensor, whose others are NaN, or slots."""
    around = float("nan") if x.is_floating_point() else 0
    return torch.nn.functional.pad(x, (before, 8), value=around)[..., before:-8]


def test_names_and_order_are_those_of_the_package():
    decode = inspect.signature(flash_mla_with_kvcache).parameters
    ours = [name for name, p in decode.items() if p.kind is p.KEYWORD_ONLY]
    assert ours == ["query_groups", "shared_keys"]
    assert " ".join(decode).removesuffix(f" {' '.join(ours)}") == (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
        "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache "
        "topk_length extra_topk_length kv_format"  # the last one is its forks'
    )
    prefill = inspect.signature(flash_mla_sparse_fwd).parameters
    assert " ".join(prefill) == "q kv indices sm_scale d_v attn_sink topk_length"
    assert prefill["d_v"].default == 512


@packed_layouts
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_decode_agrees_with_float64(layout, dtype, device):
    case = decode_case(layout, device)
    arguments = decode_arguments(case)
    arguments["k_cache"] = arguments["k_cache"].view(dtype)
    out, lse = flash_mla_with_kvcache(**arguments)
    exact, _, exact_lse = case.expected()
    assert out.shape == (BATCH, S_Q, 16, 512) and lse.shape == (BATCH, 16, S_Q)
    ours = lse.mT.flatten(0, 1)
    assert ours[1].isposinf().all() and (out[0, 1] == 0).all() and ours[[0, 2, 3]].isfinite().all()
    assert_within_flash_mla_tolerance(out.flatten(0, 1), ours.where(ours != INF, -INF), exact, exact_lse)


@packed_layouts
@pytest.mark.parametrize("lists_before", [False, True])
def test_drafts_share_keys_if_the_caller_says_so(layout, lists_before, device):
    batch, s_q, heads = (150 if device == "cuda" else 5), 4, 8
    case = draft_case(layout, device, batch, s_q, num_q_heads=heads, extra_topk=30)
    alone = draft_arguments(case, s_q)
    given = {"query_groups": s_q}
    if lists_before:
        given["shared_keys"] = plan_of(case, s_q)
    out, lse = flash_mla_with_kvcache(**alone, **given)
    assert out.shape == (batch, s_q, heads, 512) and lse.shape == (batch, heads, s_q)
    assert_attention(case, (out.flatten(0, 1), lse.mT.flatten(0, 1)))
    if device == "cpu":
        assert_same((out, lse), flash_mla_with_kvcache(**alone))
    with pytest.raises(RuntimeError, match="query_groups must be in"):
        flash_mla_with_kvcache(**alone, query_groups=0)


def draft_arguments(case: Case, s_q: int) -> dict:
    """Without lengths, which FlashMLA has of a request."""
    arguments = engine_standins.decode_call(without_lengths(case))
    for name in ("q", "indices", "extra_indices_in_kvcache"):
        arguments[name] = arguments[name].squeeze(1).unflatten(0, (-1, s_q))
    return arguments


@pytest.mark.parametrize(
    "name, kv_format", [("dsv41", "V41"), ("dsv32_nope", "V32_NO_ROPE"), ("dsv4", "V4"), ("dsv4", None)]
)
def test_the_formats_of_its_forks(name, kv_format, device):
    case = decode_case(KV_LAYOUTS[name], device)
    out, lse = flash_mla_with_kvcache(**decode_arguments(case), kv_format=kv_format)
    want_out, want_lse = case.decode()
    assert torch.equal(out.flatten(0, 1), want_out)
    assert torch.equal(lse.mT.flatten(0, 1), want_lse.where(want_lse != -INF, INF))


@pytest.mark.parametrize("name", KV_LAYOUTS["dsv41_fp4"].extra_of)
def test_the_second_cache_may_have_fp4_rows(name, device):
    extra = V4_SCOPES | {"layout": KV_LAYOUTS["dsv41_fp4"]}
    case = decode_case(KV_LAYOUTS[name], device, extra=extra)
    out, _ = flash_mla_with_kvcache(**decode_arguments(case), kv_format={"dsv41": "V41"}.get(name))
    assert torch.equal(out.flatten(0, 1), case.decode()[0])


@pytest.mark.parametrize("name", ["dsv41", "dsv32_nope"])
def test_rows_of_528_bytes_have_to_be_named(name, device):
    """FlashMLA itself has a third format of that size since its release of 2026-09-30."""
    arguments = decode_arguments(decode_case(KV_LAYOUTS[name], device))
    with pytest.raises(ValueError, match="must be V41 or V32_NO_ROPE for rows of 528 bytes, got None"):
        flash_mla_with_kvcache(**arguments)


def test_formats_that_do_not_fit_are_refused(device):
    case = decode_case(KV_LAYOUTS["dsv41"], device, extra=V4_SCOPES | {"layout": KV_LAYOUTS["dsv41_fp4"]})
    arguments = decode_arguments(case)
    with pytest.raises(ValueError, match="None or one of V32, V4, V41, V32_NO_ROPE, got 'V5'"):
        flash_mla_with_kvcache(**arguments, kv_format="V5")
    with pytest.raises(ValueError, match="head_dim of q and the bytes of a row of k_cache must be 512 with"):
        flash_mla_with_kvcache(**arguments, kv_format="V4")
    with pytest.raises(
        ValueError, match=r"a row of extra_k_cache must have .* bytes next to dsv32_nope, got"
    ):
        flash_mla_with_kvcache(**arguments, kv_format="V32_NO_ROPE")


def test_two_caches_of_different_page_sizes(device):
    case = decode_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES)
    out, lse = flash_mla_with_kvcache(**decode_arguments(case))
    want_out, want_lse = case.decode()
    assert torch.equal(out.flatten(0, 1), want_out)
    assert torch.equal(lse.mT.flatten(0, 1), want_lse.where(want_lse != -INF, INF))
    assert lse.isposinf().any() and not lse.isneginf().any()


def test_defaults(device):
    case = decode_case(KV_LAYOUTS["dsv32"], device, sink=False)
    case.scopes[0].indices[4:] = -1  # without lengths these tokens would see poison
    arguments = decode_arguments(case)
    del arguments["softmax_scale"], arguments["topk_length"], arguments["attn_sink"]
    case = replace(case, scopes=[replace(case.scopes[0], length=None)], sm_scale=case.q.shape[-1] ** -0.5)
    assert torch.equal(flash_mla_with_kvcache(**arguments)[0].flatten(0, 1), case.decode()[0])


def test_metadata_takes_what_older_callers_pass_and_serves_any_shape(device):
    metadata, num_splits = get_mla_metadata(torch.zeros(3), 128, 1, num_heads_q=128, topk=2048)
    assert num_splits is None
    for layout, topk in (("dsv32", 100), ("dsv4", 37)):
        case = decode_case(KV_LAYOUTS[layout], device, topk=topk)
        arguments = decode_arguments(case) | {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
        assert torch.equal(flash_mla_with_kvcache(**arguments)[0].flatten(0, 1), case.decode()[0])


@packed_layouts
@pytest.mark.parametrize(
    "spread",
    [scattered, lambda x: x.mT.contiguous().mT, inside, lambda x: inside(x, 4)],
    ids=["every other", "transposed", "inside another", "misaligned"],
)
@pytest.mark.parametrize("lengths", [True, False])
def test_decode_takes_any_strides(layout, spread, lengths, device):
    extra = V4_SCOPES if layout.name == "dsv4" else None
    arguments = decode_arguments(decode_case(layout, device, extra=extra))
    others = ("attn_sink", "topk_length", "extra_topk_length")
    if not lengths:  # whose copies, and those of sinks, are another way
        arguments |= dict.fromkeys(others[1:])
        others = ()
    want = flash_mla_with_kvcache(**arguments)
    for name in ("q", "indices", "extra_indices_in_kvcache"):
        if arguments.get(name) is not None:
            arguments[name] = spread(arguments[name])
    for name in others:
        if arguments.get(name) is not None:
            arguments[name] = scattered(arguments[name])
    cache = arguments["k_cache"]
    pages = torch.full((len(cache), cache.stride(0) + 576), 0xFF, dtype=torch.uint8, device=device)
    pages[:, :-576] = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1))
    arguments["k_cache"] = layout.flash_mla_view(pages[:, :-576], cache.shape[1])
    assert_same(flash_mla_with_kvcache(**arguments), want)


def test_zero_batches(device):
    arguments = decode_arguments(decode_case(KV_LAYOUTS["dsv32"], device))
    for name in ("q", "indices", "topk_length"):
        arguments[name] = arguments[name][:0]
    out, lse = flash_mla_with_kvcache(**arguments)
    assert out.shape == (0, S_Q, 16, 512) and lse.shape == (0, 16, S_Q)


@pytest.mark.parametrize("name", ["bf16", "bf16_512"])
def test_prefill_agrees_with_float64(name, device):
    case = prefill_case(name, device)
    out, max_logits, lse = flash_mla_sparse_fwd(**prefill_arguments(case))
    exact, exact_max, exact_lse = case.expected()
    assert lse[1].isposinf().all() and max_logits[1].isneginf().all() and (out[1] == 0).all()
    assert_within_flash_mla_tolerance(out, lse.where(lse != INF, -INF), exact, exact_lse)
    torch.testing.assert_close(max_logits.double(), exact_max, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bf16", "bf16_512"])
def test_prefill_takes_any_strides(name, device):
    arguments = prefill_arguments(prefill_case(name, device))
    want = flash_mla_sparse_fwd(**arguments)
    misaligned = torch.nn.functional.pad(arguments["kv"], (1, 7))[..., 1:-7]  # each row by 2 bytes
    for changes in (
        {k: scattered(arguments[k]) for k in ("q", "kv", "indices", "attn_sink", "topk_length")},
        {"kv": misaligned, "q": arguments["q"].mT.contiguous().mT},
        {k: inside(arguments[k]) for k in ("q", "kv", "indices")},
    ):
        for got, expected in zip(flash_mla_sparse_fwd(**(arguments | changes)), want, strict=True):
            assert torch.equal(got, expected)


def test_prefill_reads_an_aligned_slice_in_place(device):
    arguments = prefill_arguments(prefill_case("bf16_512", device))
    kv = torch.nn.functional.pad(arguments["kv"], (8, 16), value=float("nan"))
    seen = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mla_fp8" in str(function):
                seen.append(args[1].data_ptr())
            return function(*args, **(kwargs or {}))

    with Recorder():
        flash_mla_sparse_fwd(**(arguments | {"kv": kv[..., 8:-16]}))
    assert seen == [kv.data_ptr() + 16]


def test_compiles_to_one_graph(device):
    arguments = decode_arguments(decode_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES))
    compiled = torch.compile(flash_mla_with_kvcache, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**arguments), flash_mla_with_kvcache(**arguments), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dense", [{"indices": None}, {"causal": True}, {"is_fp8_kvcache": False}], ids=str)
def test_dense_decode_and_bf16_caches_are_refused(dense, device):
    arguments = decode_arguments(decode_case(KV_LAYOUTS["dsv32"], device)) | dense
    check_refused(flash_mla_with_kvcache, arguments, f"{next(iter(dense))} must be", ValueError)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: {"q": None}, "q must be a tensor, got None"),
        (lambda a: {"k_cache": 3}, "k_cache must be a tensor, got 3"),
        (lambda a: {"topk_length": [8] * 3}, "topk_length must be a tensor, got [8, 8, 8]"),
        (lambda a: {"attn_sink": 0.5}, "attn_sink must be a tensor, got 0.5"),
        (lambda a: {"extra_indices_in_kvcache": 1}, "extra_indices_in_kvcache must be a tensor, got 1"),
        (lambda a: {"head_dim_v": 576}, "head_dim_v must be 512, got 576"),
        (lambda a: {"q": a["q"][0]}, "q must have shape [*, *, *, *], got [2, 16, 576]"),
        (lambda a: {"k_cache": a["k_cache"][:, :, 0]}, "k_cache must have shape [*, *, 1, *], got"),
        (lambda a: {"q": a["q"][..., :512]}, "a row of k_cache must be 576 with"),
        (lambda a: {"indices": a["indices"][:2]}, "indices must have shape [3, 2, *], got [2, 2, 100]"),
        (lambda a: {"topk_length": a["topk_length"][:1]}, "topk_length must have shape [3], got [1]"),
        (lambda a: {"q": a["q"].float()}, "q must have dtype torch.bfloat16, got torch.float32"),
        (lambda a: {"indices": a["indices"].long()}, "indices must have dtype torch.int32, got torch.int64"),
        (lambda a: {"extra_k_cache": a["k_cache"]}, "must be given together"),
    ],
)  # fmt: skip
def test_wrong_decode_arguments_are_named(change, message, device):
    arguments = decode_arguments(decode_case(KV_LAYOUTS["dsv32"], device))
    check_refused(flash_mla_with_kvcache, arguments | change(arguments), message, named(message))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: {"d_v": 576}, "d_v must be 512, got 576"),
        (lambda a: {"kv": None}, "kv must be a tensor, got None"),
        (lambda a: {"indices": [[0]]}, "indices must be a tensor, got [[0]]"),
        (lambda a: {"attn_sink": [0.5]}, "attn_sink must be a tensor, got [0.5]"),
        (lambda a: {"kv": a["kv"].expand(-1, 2, -1)}, "kv must have shape [*, 1, 512], got"),
        (lambda a: {"indices": a["indices"][:, 0]}, "indices must have shape [6, 1, *], got [6, 100]"),
        (lambda a: {"kv": a["kv"].half()}, "kv must have dtype torch.bfloat16, got torch.float16"),
        (lambda a: {"topk_length": a["topk_length"][:2]}, "topk_length must have shape [6], got [2]"),
    ],
)  # fmt: skip
def test_wrong_prefill_arguments_are_named(change, message, device):
    arguments = prefill_arguments(prefill_case("bf16_512", device))
    check_refused(flash_mla_sparse_fwd, arguments | change(arguments), message, named(message))


def the_package():
    """The real one, where it is installed and runs."""
    module, reason = packages.locate(flash_mla_backend.DECODE)
    if module is None:
        pytest.skip(reason)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return module


def full(case: Case) -> Case:
    """Only what the package defines: no index that it would follow out of the cache."""
    for s in case.scopes:
        s.indices[(s.indices < 0) | (s.indices >= len(s.rows))] = -1
        s.length.clamp_(0, s.indices.shape[1])
        beyond = torch.arange(s.indices.shape[1], device=s.indices.device) >= s.length[:, None]
        s.indices[beyond] = -1
    return case


@packed_layouts
@pytest.mark.parametrize("num_q_heads", [64, 128])
def test_decode_gives_what_the_package_gives(layout, num_q_heads):
    package = the_package()
    extra = V4_SCOPES | {"topk": 64} if layout.name == "dsv4" else None
    case = decode_case(layout, "cuda", num_q_heads=num_q_heads, topk=128, extra=extra)
    arguments = decode_arguments(full(case))
    changes = {"tile_scheduler_metadata": package.get_mla_metadata()[0]}
    if layout.name == "dsv32":
        changes["topk_length"] = None  # which the package does not take here; indices beyond it are -1
    theirs = package.flash_mla_with_kvcache(**arguments | changes)
    ours = flash_mla_with_kvcache(**arguments)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    assert ours[1].isposinf().equal(theirs[1].isposinf()) and ours[1].isposinf().any()
    torch.testing.assert_close(ours[0], theirs[0], rtol=2.01 / 64, atol=2e-3)
    torch.testing.assert_close(ours[1], theirs[1], rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bf16", "bf16_512"])
@pytest.mark.parametrize("num_q_heads", [64, 128])
def test_prefill_gives_what_the_package_gives(name, num_q_heads):
    package = the_package()
    case = full(make_case(KV_LAYOUTS[name], "cuda", page_size=1, num_q_heads=num_q_heads, topk=128))
    arguments = prefill_arguments(case)
    theirs = package.flash_mla_sparse_fwd(**arguments)
    ours = flash_mla_sparse_fwd(**arguments)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    assert ours[2].isposinf().equal(theirs[2].isposinf()) and ours[2].isposinf().any()
    torch.testing.assert_close(ours[0], theirs[0], rtol=2.01 / 64, atol=2e-3)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-4)
