"""Names that PyTorch does not promise: _torch_private.py where torch has them, and where it has not."""

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import mla_fp8
from mla_fp8 import _libraries, _torch_private
from mla_fp8._torch_private import (
    constant_to_the_compiler,
    has_kernel,
    may_have_tangents,
    op_names,
    schema_of,
    version_of,
    without_torch_function,
)


@pytest.fixture(params=[True, False], ids=["as it is", "without the name"])
def without(request, monkeypatch):
    """Takes a name away from torch, or leaves it."""

    def take(holder, name):
        assert hasattr(holder, name)
        if not request.param:
            monkeypatch.delattr(holder, name)

    return take


def test_the_names_of_the_ops(without):
    without(torch._C, "_dispatch_get_all_op_names")
    names = op_names("mla_fp8")
    assert {"sparse_decode", "sparse_decode_out", "quantize_kv"} <= set(names)
    assert names == sorted(set(names)) and not any("::" in name for name in names)


def test_whether_an_op_has_a_kernel(without):
    without(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    assert has_kernel("sparse_decode", "CPU") and not has_kernel("sparse_decode", "XPU")
    if not any(_libraries.status.get(f"libmla_fp8_{gpu}.so") == "loaded" for gpu in ("cuda", "hip")):
        assert not has_kernel("sparse_decode", "CUDA")


def test_the_schema_of_an_op(without):
    op = torch.ops.mla_fp8.quantize_kv
    without(op.default, "_schema")
    assert [x.name for x in schema_of(op).arguments][:3] == ["latent", "slot_mapping", "kv_cache"]


def test_a_tangent_is_refused():
    rows, slots = torch.zeros(1, 576), torch.zeros(1, dtype=torch.int64)
    cache = mla_fp8.KV_LAYOUTS["dsv32"].empty(1, 4, "cpu")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, torch.ones_like(rows))
        with pytest.raises(RuntimeError, match="latent must not require grad"):
            mla_fp8.quantize_kv(dual, slots, cache, layout="dsv32", page_size=4)
    assert not may_have_tangents()


def test_without_the_level_every_tensor_is_asked(monkeypatch):
    monkeypatch.setattr(_torch_private, "forward_ad", object())
    assert may_have_tangents()
    rows, slots = torch.zeros(1, 576), torch.zeros(1, dtype=torch.int64)
    cache = mla_fp8.KV_LAYOUTS["dsv32"].empty(1, 4, "cpu")
    with torch.no_grad():
        mla_fp8.quantize_kv(rows, slots, cache, layout="dsv32", page_size=4)


def test_how_often_a_tensor_was_written():
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) == before + 1
    with torch.inference_mode():
        assert version_of(torch.zeros(2)) is None

    class Uncounted:
        def is_inference(self):
            return False

    assert version_of(Uncounted()) is None


def test_a_subclass_is_a_tensor_inside(without):
    without(torch._C, "DisableTorchFunctionSubclass")
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            with without_torch_function():
                return func(*args, **(kwargs or {}))

    x = torch.zeros(2).as_subclass(Watched)
    seen.clear()
    with without_torch_function():
        x.size()
    assert not seen
    x.size()
    assert seen


@pytest.mark.parametrize("marks", [True, False], ids=["as it is", "without the name"])
def test_a_constant_to_the_compiler_is_found_once(marks, monkeypatch):
    if not marks:
        monkeypatch.setattr(_torch_private, "_compiler_reads_marks", lambda: False)
    calls = []

    @constant_to_the_compiler
    def number():
        calls.append(1)
        return 3

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * number(), fullgraph=True, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(1)).item() == 3
    assert len(calls) <= 2  # while it is traced


def test_this_torch_reads_the_mark_and_our_import_does_not_import_its_compiler():
    assert _torch_private._compiler_reads_marks()
    code = "import sys, mla_fp8; print('torch._dynamo' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
