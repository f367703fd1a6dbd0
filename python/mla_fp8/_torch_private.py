"""What this package takes of PyTorch's private names, and what takes their place where one is missing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from . import _libraries

__all__ = [
    "constant_to_the_compiler",
    "has_kernel",
    "may_have_tangents",
    "op_names",
    "schema_of",
    "version_of",
    "without_torch_function",
]

Function = TypeVar("Function")
_LIBRARIES = {"CPU": ("cpu",), "Meta": ("cpu",), "CUDA": ("cuda", "hip")}  # dispatch keys of each library


def op_names(namespace: str) -> list[str]:
    """Names of the ops in a namespace, without it. Elsewhere: of all schemas that the JIT knows."""
    prefix, known = f"{namespace}::", getattr(torch._C, "_dispatch_get_all_op_names", None)
    names = known() if known is not None else [s.name for s in torch._C._jit_get_all_schemas()]
    return sorted({name.removeprefix(prefix) for name in names if name.startswith(prefix)})


def has_kernel(op: str, key: str) -> bool:
    """Whether ``mla_fp8::op`` is registered for a dispatch key. Elsewhere: whether that library is loaded."""
    asked = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    if asked is not None:
        return bool(asked(f"mla_fp8::{op}", key))
    names = [f"libmla_fp8_{device}.so" for device in _LIBRARIES.get(key, ())]
    return any(_libraries.status.get(name) == "loaded" for name in names)


def schema_of(op: Any) -> Any:
    """The FunctionSchema of ``torch.ops.<namespace>.<name>``."""
    schema = getattr(op.default, "_schema", None)
    return torch._C._get_schema(op._qualified_op_name, "") if schema is None else schema


def may_have_tangents() -> bool:
    """Whether forward-mode autograd is on. Elsewhere: it may be, and each tensor is asked."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def version_of(x: torch.Tensor) -> int | None:
    """How often a tensor was written in place; None where nobody counts: in inference mode, or elsewhere."""
    return None if x.is_inference() else getattr(x, "_version", None)


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside, methods of tensors' subclasses are those of Tensor. Elsewhere: also functions of modes."""
    found = (getattr(torch._C, f"DisableTorchFunction{kind}", None) for kind in ("Subclass", ""))
    disable: Callable[[], AbstractContextManager[Any]] = next(filter(None, found), nullcontext)
    return disable()


def constant_to_the_compiler(function: Function) -> Function:
    """Decorator: torch.compile calls the function when it traces, and takes the result for a constant.

    ``torch.compiler.assume_constant_result``, without its import of the compiler, which takes a second.
    """
    if _compiler_reads_marks():
        function._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return function
    return torch.compiler.assume_constant_result(function)  # type: ignore[no-any-return]


def _compiler_reads_marks() -> bool:
    package = find_spec("torch")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "_dynamo" / "decorators.py"
    return source.exists() and "_dynamo_marked_constant" in source.read_text(errors="replace")
