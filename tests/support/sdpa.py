"""Attention by PyTorch's scaled_dot_product_attention in float64: an oracle that shares no line with ours."""

import torch
from sparse_cases import Case
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [heads, dim_v], largest logit, lse) of one query token ``q`` [heads, dim] over keys
    [heads, num_keys, dim], all in float64.

    A sink is a key without a value, whose logit comes as a bias. The values of the second call are the unit
    vectors, so that its result are the weights; a weight and its logit give the lse.
    """
    heads, num_keys, _ = k.shape
    if num_keys == 0:
        nothing = q.new_full((heads,), float("-inf"))
        return q.new_zeros(heads, v.shape[-1]), nothing, nothing
    options = {"scale": sm_scale}
    weights = scaled_dot_product_attention(
        q[:, None], k, torch.eye(num_keys).to(k).expand(heads, -1, -1), **options
    )
    logits = sm_scale * (k * q[:, None]).sum(-1)
    top, at = logits.max(-1)
    lse = top - weights[:, 0].gather(1, at[:, None])[:, 0].log()
    if attn_sink is not None:
        bias = torch.cat([q.new_zeros(heads, num_keys), attn_sink.to(q)[:, None]], 1)
        options["attn_mask"] = bias[:, None]
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return scaled_dot_product_attention(q[:, None], k, v, **options)[:, 0], top, lse


def of_case(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(out, max_logits, lse) of every token over the rows that the test kept, gathered one by one."""
    results = []
    for t, q in enumerate(case.q.double()):
        rows = []
        for scope in case.scopes:
            width = scope.indices.shape[1]
            count = width if scope.length is None else min(max(int(scope.length[t]), 0), width)
            rows += [scope.rows[i] for i in scope.indices[t, :count].tolist() if 0 <= i < len(scope.rows)]
        k = torch.stack(rows).double() if rows else q.new_empty(0, q.shape[-1])
        k = k.expand(len(q), -1, -1)
        results.append(attend(q, k, k[..., : case.layout.head_dim_v], case.sm_scale, case.attn_sink))
    return tuple(torch.stack(x) for x in zip(*results, strict=True))
