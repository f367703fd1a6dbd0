"""No op has derivatives: no result claims any, and a call whose caller would want them is refused."""

import torch
from torch.autograd import forward_ad

from ._torch_private import may_have_tangents, op_names

__all__ = ["refuse_gradients", "refuse_gradients_of"]

# torch's own default would let results of torch.ops.mla_fp8.* claim a gradient, and give zeros for it.
_library = torch.library.Library("mla_fp8", "IMPL")
for _op in op_names("mla_fp8"):
    _library.impl(_op, torch.library.fallthrough_kernel, "Autograd")


def refuse_gradients(op: str, **arguments: object) -> None:
    """RuntimeError if autograd follows a tensor of them, backward (unless under ``no_grad``) or forward."""
    refuse_gradients_of(op, arguments)


def refuse_gradients_of(op: str, arguments: dict[str, object]) -> None:
    backward, forward = torch.is_grad_enabled(), may_have_tangents()
    if not (backward or forward):
        return
    for name, x in arguments.items():  # what is no tensor at all is the op's to refuse
        if isinstance(x, torch.Tensor) and ((backward and x.requires_grad) or (forward and _has_tangent(x))):
            raise RuntimeError(
                f"mla_fp8.{op}: {name} must not require grad, as the package is for inference and has no "
                "derivatives; call it under torch.no_grad(), or with a detached tensor"
            )


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None
