"""Kernels that are not ours, behind one op each (``torch.ops.mla_fp8_backends``) that no compiler looks into;
whoever watches the ops sees which call they serve."""

from collections.abc import Callable
from typing import Any

import torch

from .._fake import attention_outputs, fake_of
from .._torch_private import schema_of
from ..call import OPS, SparseCall
from ..layout import layout_of_id, wrong_dtype
from . import ADAPTERS

ops = torch.ops.mla_fp8_backends  # each with the arguments of ours, and adapter=
_library = torch.library.Library("mla_fp8_backends", "DEF")


def _define(op: str) -> None:
    """The op with the schema of ours, and the name of the adapter."""
    schema = schema_of(getattr(torch.ops.mla_fp8, op))
    text = str(schema).removeprefix("mla_fp8::")
    _library.define(text.replace("*, ", "*, str adapter, ", 1))
    names = [argument.name for argument in schema.arguments]
    _library.impl(op, _implementation(op, names), "CompositeExplicitAutograd")
    fake_of(_library, op)(attention_outputs(len(schema.returns)))


def _implementation(op: str, names: list[str]) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor, adapter: str, **options: Any) -> Any:
        given = dict(zip(names, tensors, strict=False)) | options
        call = SparseCall.of(op, given, layout_of_id)
        _check_dtypes(call)
        _check_shapes(call)
        _check_scale(call)
        return getattr(ADAPTERS[adapter], op)(call)

    return run


def _check_dtypes(call: SparseCall) -> None:
    """As our own kernels do: other packages would take the cache's bytes for what the layout says."""
    names = ("kv" if call.op == "sparse_prefill" else "kv_cache", "extra_kv_cache")
    for name, scope in zip(names, call.scopes, strict=False):
        if wrong := wrong_dtype(scope.layout, scope.kv):
            raise RuntimeError(f"mla_fp8.{call.op}: {name} {wrong}")


def _check_shapes(call: SparseCall) -> None:
    """Of indices and lengths: broadcast, they would be of other tokens."""
    tokens = call.q.shape[0]
    for prefix, scope in zip(("", "extra_"), call.scopes, strict=False):
        for name, x, dims in (("indices", scope.indices, 2), ("topk_length", scope.length, 1)):
            if x is not None and (x.dim() != dims or x.shape[0] != tokens):
                shape = f"[{tokens}{', *' * (dims - 1)}]"
                raise RuntimeError(
                    f"mla_fp8.{call.op}: {prefix}{name} must have shape {shape}, got {[*x.shape]}"
                )


def _check_scale(call: SparseCall) -> None:
    """As our own kernels do."""
    wanted = call.layout.needs_scale
    if wanted == (call.scale is None):
        must, got = ("given", "None") if wanted else ("None", "a tensor")
        raise RuntimeError(
            f"mla_fp8.{call.op}: scale must be {must} for layout {call.layout.name}, got {got}"
        )


for _op in OPS:
    _define(_op)
