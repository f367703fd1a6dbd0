"""What a call costs the host above its op: the functions of this package that it goes through.

Microseconds are benchmarks/bench_call_overhead.py's; a number of calls is the same on every machine.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from assertions import assert_same
from op_samples import LAYOUT, SAMPLES

import mla_fp8
from mla_fp8.compat import flash_mla
from mla_fp8.integrations import attend

PACKAGE = str(Path(mla_fp8.__file__).parent)


def functions_of(call: Callable[[], object]) -> list[str]:
    """Functions of the package that a call goes through, the second time."""
    call()
    seen: list[str] = []

    def watch(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def function(name: str) -> Callable[[], object]:
    tensors, options = SAMPLES[name]("cpu")
    return lambda: getattr(mla_fp8, name)(*tensors, **options)


def plugin() -> Callable[[], object]:
    (q, cache, indices), options = SAMPLES["sparse_decode"]("cpu")
    out = q.new_empty(*q.shape[:2], 512)
    layout = mla_fp8.KV_LAYOUTS[LAYOUT]
    return lambda: attend.over_pages(q, cache, indices, **options | {"layout": layout, "out": out})


def compat_decode() -> Callable[[], object]:
    (q, cache, indices), options = SAMPLES["sparse_decode"]("cpu")
    indices[0] = -1
    pages = mla_fp8.KV_LAYOUTS[LAYOUT].flash_mla_view(cache, options["page_size"])
    return lambda: flash_mla.flash_mla_with_kvcache(
        q[:, None], pages, None, None, 512, None, is_fp8_kvcache=True, indices=indices[:, None]
    )


def compat_prefill() -> Callable[[], object]:
    (q, kv, indices), _ = SAMPLES["sparse_prefill"]("cpu")
    indices[0] = -1
    return lambda: flash_mla.flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], 0.04)


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (function("sparse_decode"), 12),
        (function("sparse_prefill"), 12),
        (function("sparse_prefill_paged"), 12),
        (function("quantize_kv"), 6),
        (plugin(), 18),
        (compat_decode(), 6),
        (compat_prefill(), 6),
    ],
    ids=["decode", "prefill", "prefill_paged", "quantize_kv", "plugin", "compat_decode", "compat_prefill"],
)
def test_a_call_goes_through_few_functions(call, most):
    with torch.no_grad():
        seen = functions_of(call)
    assert len(seen) <= most, seen


@pytest.mark.parametrize("phase, make", [("decode", compat_decode), ("prefill", compat_prefill)])
def test_compat_takes_a_short_way_with_the_results_of_the_long_one(phase, make, monkeypatch):
    call, name, taken = make(), f"_{phase}_as_given", []
    original = getattr(flash_mla, name)
    monkeypatch.setattr(flash_mla, name, lambda *args: taken.append(original(*args)) or taken[-1])
    got = call()
    assert got is taken[0] and got[-1].isposinf().any()
    monkeypatch.setattr(flash_mla, name, lambda *args: None)
    assert_same(got, call())
