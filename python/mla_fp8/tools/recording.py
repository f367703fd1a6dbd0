"""Recorded attention calls, as files that ``python -m mla_fp8 replay`` runs again, anywhere.

A file in the safetensors format: tensors ``<call>.<argument>``, the other arguments as JSON in its header. Of
a cache only the pages that the call may read are kept, and the indices renamed to fit, so that a call of a
serving engine with a cache of many GB is a file of a few MB.
"""

import inspect
import json
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._arguments import shown
from .._torch_private import schema_of
from ..call import OPS, SparseCall
from ..layout import KVLayout, get_layout, layout_of_id

COUNTED = ("paged_attention_ragged", "paged_attention_ragged_latent")  # no second backend to replay them with
_KEY = "mla_fp8.calls"


@dataclass
class Call:
    """Arguments of ``mla_fp8.<op>`` by name: the tensors, then the rest (``layout`` by name)."""

    op: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]

    def arguments(self, device: torch.device | str) -> dict[str, Any]:
        return {name: tensor.to(device) for name, tensor in self.tensors.items()} | self.options

    @property
    def layout(self) -> KVLayout | None:
        return get_layout(self.options["layout"]) if "layout" in self.options else None

    @property
    def layout_name(self) -> str:
        """As ``SparseCall.layout_name``; empty without a paged cache."""
        return " + ".join(self.options[n] for n in ("layout", "extra_layout") if n in self.options)

    def sparse(self, device: torch.device | str) -> SparseCall:
        return SparseCall.of(self.op, self.arguments(device), get_layout)

    def __str__(self) -> str:
        num_tokens, num_heads, _ = self.tensors["q"].shape
        window = [f"windows of {self.options['window_size']}"] if "window_size" in self.options else []
        scopes = [self.tensors[n].shape[1] for n in ("indices", "extra_indices") if n in self.tensors]
        entries = ["all entries"] if "extra_page_table" in self.tensors else []
        keys = " + ".join([*window, *(f"{width} indices" for width in scopes), *entries])
        caches = [self.tensors[n] for n in ("kv", "kv_cache", "extra_kv_cache") if n in self.tensors]
        kept = " + ".join(f"{len(cache)} {'pages' if self.layout else 'rows'}" for cache in caches)
        layout = f" {self.layout_name}" if self.layout else ""
        return f"{self.op}{layout}, {num_tokens} tokens, {num_heads} heads, {keys} into {kept}"


def save(path: str | Path, calls: list[Call]) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    tensors = {f"{i}.{name}": tensor for i, call in enumerate(calls) for name, tensor in call.tensors.items()}
    header = [{"op": call.op, "options": call.options} for call in calls]
    save_file(tensors, path, metadata={_KEY: json.dumps(header)})


def load(path: str | Path) -> list[Call]:
    """Raises ValueError, which names the call, if the file holds anything else than recorded calls."""
    from safetensors import safe_open  # noqa: PLC0415

    with safe_open(path, framework="pt") as file:
        header = (file.metadata() or {}).get(_KEY)
        if header is None:
            raise ValueError(f"{path} was not written by mla_fp8.testing.record")
        tensors: dict[str, dict[str, Tensor]] = {}
        for key in file.keys():  # noqa: SIM118 (not a dict)
            number, _, name = key.partition(".")
            mapped = file.get_tensor(key)  # at any address; kernels want theirs aligned
            tensors.setdefault(number, {})[name] = mapped.clone()
    calls = json.loads(header)
    if not isinstance(calls, list):
        raise ValueError(f"{path}: its header must be a list of calls, got {shown(calls)}")
    return [_call(f"{path}: call {i}", call, tensors.get(str(i), {})) for i, call in enumerate(calls)]


def _call(where: str, call: Any, tensors: dict[str, Tensor]) -> Call:
    """ValueError for one that is no call of its op."""
    op, options = (call.get(n) for n in ("op", "options")) if isinstance(call, dict) else (None, None)
    if op not in OPS:
        raise ValueError(f"{where}: op must be one of {', '.join(OPS)}, got {shown(op)}")
    if not isinstance(options, dict):
        raise ValueError(f"{where}: options must be given by name, got {shown(options)}")
    parameters = inspect.signature(getattr(import_module("mla_fp8"), op)).parameters
    given = tensors | options
    unknown = [name for name in given if name not in parameters or name == "backend"]
    missing = [n for n, p in parameters.items() if p.default is p.empty and given.get(n) is None]
    if unknown or missing:
        what = f"has no {unknown[0]}" if unknown else f"needs {missing[0]}"
        raise ValueError(f"{where}: {op} {what}, got {', '.join(given) or 'nothing'}")
    for name in ("layout", "extra_layout"):
        if options.get(name) is not None:
            get_layout(options[name])
    return Call(op, tensors, options)


def referenced(
    indices: Tensor, length: Tensor | None, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """(pages, renamed): the pages that a call may read, and its indices into a cache of only those.

    Indices outside the cache stay as they are, and outside. Those that do not count (beyond ``length``) and
    fall into a page that is not kept become -1.
    """
    inside = (indices >= 0) & (indices < num_pages * page_size)
    counts = inside
    if length is not None:
        counts = inside & (torch.arange(indices.shape[1], device=indices.device) < length[:, None])
    pages = (indices[counts] // page_size).unique().long()
    position = torch.full((num_pages + 1,), -1, dtype=torch.int64, device=indices.device)
    position[pages] = torch.arange(len(pages), device=indices.device)
    kept = position[torch.where(inside, indices // page_size, num_pages).long()]
    slots = torch.where(kept >= 0, kept * page_size + indices % page_size, -1)
    return pages, torch.where(inside, slots, indices).to(indices.dtype)


def packed_pages(kv_cache: Tensor, pages: Tensor, layout: KVLayout, page_size: int) -> Tensor:
    """Those pages of a cache, or of FlashMLA's view of one, as ``[len(pages), page_bytes]``."""
    content = kv_cache.view(torch.uint8)[pages].flatten(1)
    packed = layout.empty(len(pages), page_size, kv_cache.device).zero_()
    packed[:, : content.shape[1]] = content
    return packed


def extract(op: str, arguments: dict[str, Any]) -> Call:
    """A call that owns all it needs, on the CPU, from the arguments of ``torch.ops.mla_fp8.<op>``.

    ``shared_keys`` are left out: they name slots of the whole cache, and ``query_groups`` makes them again.
    """
    arguments = {name: value for name, value in arguments.items() if name != "shared_keys"}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    options = {name: x for name, x in arguments.items() if x is not None and not isinstance(x, Tensor)}
    if "layout" in options:
        options |= {n: layout_of_id(options[n]).name for n in ("layout", "extra_layout") if n in options}
        for prefix in ("", "extra_"):
            if f"{prefix}kv_cache" in tensors:
                layout = get_layout(options.get(f"{prefix}layout", options["layout"]))
                kv_cache, page_size = tensors[f"{prefix}kv_cache"], options[f"{prefix}page_size"]
                table = f"{prefix}page_table"
                if table in tensors:
                    pages, tensors[table] = referenced(tensors[table], None, len(kv_cache), 1)
                else:
                    pages, tensors[f"{prefix}indices"] = referenced(
                        tensors[f"{prefix}indices"],
                        tensors.get(f"{prefix}topk_length"),
                        len(kv_cache),
                        page_size,
                    )
                tensors[f"{prefix}kv_cache"] = packed_pages(kv_cache, pages, layout, page_size)
    else:
        rows, tensors["indices"] = referenced(
            tensors["indices"], tensors.get("topk_length"), len(tensors["kv"]), 1
        )
        tensors["kv"] = tensors["kv"][rows]
    return Call(
        op, {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, options
    )


def shared_by_neighbours(call: Call) -> str | None:
    """How many keys a query has in common with the one before it; None of a call without indices of slots.

    Queries that share none are of different requests, or padding: they do not count.
    """
    rows, scopes = [set[tuple[int, int]]() for _ in call.tensors["q"]], call.sparse("cpu").scopes
    if all(scope.indices is None for scope in scopes):
        return None
    for i, scope in enumerate(scopes):
        num_slots = len(scope.kv) * scope.page_size
        for row, slots in enumerate([] if scope.indices is None else scope.indices.tolist()):
            counted = slots if scope.length is None else slots[: max(int(scope.length[row]), 0)]
            rows[row].update((i, slot) for slot in counted if 0 <= slot < num_slots)
    shares = [len(a & b) / len(b) for a, b in pairwise(rows) if a & b]
    if not shares:
        return "no neighbours share keys"
    mean = sum(shares) / len(shares)
    return f"{len(shares)} of {len(rows) - 1} neighbours share keys, {mean:.2f} of them on average"


class Recorder(TorchDispatchMode):
    """Sees every op called inside its ``with``; keeps the attention calls, whichever backend serves them."""

    def __init__(self, max_calls: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_calls, self.calls, self.missed = max_calls, list[Call](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))  # first: it checks its arguments
        op = func.name().split("::")[1].removesuffix("_out")
        if op in OPS + COUNTED and func.namespace in ("mla_fp8", "mla_fp8_backends"):
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if op in COUNTED or capturing or len(self.calls) == self.max_calls:
                self.missed += 1
            else:
                # Of the op itself: what an _out form, or one of another backend, has besides is no input.
                inputs = [a.name for a in schema_of(getattr(torch.ops.mla_fp8, op)).arguments]
                given = dict(zip(inputs, args, strict=False)) | (kwargs or {})
                self.calls.append(extract(op, {name: given[name] for name in inputs if name in given}))
        return result
