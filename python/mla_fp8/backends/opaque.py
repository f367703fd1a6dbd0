"""Kernels that are not ours, behind one op each (``torch.ops.mla_fp8_backends``) that no compiler looks into;
whoever watches the ops sees which call they serve."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ..layout import KV_LAYOUTS, KVLayout
from ..ops._fake import fake_of
from ..reference import HEAD_DIM_V

_library = torch.library.Library("mla_fp8_backends", "DEF")
_with_max_logits = {
    "sparse_decode": False,
    "sparse_prefill": True,
    "sparse_prefill_paged": True,
    "sparse_prefill_window": True,
}


def call(op: str, adapter: str, *tensors: torch.Tensor, **options: Any) -> Any:
    layout = options.get("layout")
    if isinstance(layout, KVLayout):
        options["layout"] = layout.id
    return getattr(torch.ops.mla_fp8_backends, op)(*tensors, adapter=adapter, **options)


def _define(op: str) -> None:
    """The op with the schema of ours, and the name of the adapter."""
    schema = str(getattr(torch.ops.mla_fp8, op).default._schema).removeprefix("mla_fp8::")
    _library.define(schema.replace("*, ", "*, str adapter, ", 1))
    _library.impl(op, _implementation(op), "CompositeExplicitAutograd")
    fake_of(_library, op)(_fake(_with_max_logits[op]))


def _implementation(op: str) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor, adapter: str, **options: Any) -> Any:
        if "layout" in options:
            options["layout"] = list(KV_LAYOUTS.values())[options["layout"]]
        return getattr(import_module(f"mla_fp8.backends.{adapter}"), op)(*tensors, **options)

    return run


def _fake(with_max_logits: bool) -> Callable[..., tuple[torch.Tensor, ...]]:
    def outputs(q: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, ...]:
        out = q.new_empty((q.shape[0], q.shape[1], HEAD_DIM_V), dtype=torch.bfloat16)
        numbers = [q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(1 + with_max_logits)]
        return out, *numbers

    return outputs


for _op in _with_max_logits:
    _define(_op)
