"""Who attends in an engine: calls counted; and attention replaced by exact arithmetic, the yardstick."""

import collections
from importlib import import_module

import torch

CALLS = collections.Counter()


def count_calls(ours: bool) -> None:
    """Calls of FlashMLA's kernels and of our ops from Python. A graph's kernels were calls at its capture."""
    theirs = import_module("vllm.third_party.flashmla.flash_mla_interface")
    theirs.flash_mla_cuda = _Counted("FlashMLA", theirs.flash_mla_cuda)
    if ours:
        attend = import_module("mla_fp8.integrations.attend")
        attend._ops = _Counted("mla_fp8", attend._ops)


class _Counted:
    def __init__(self, label: str, functions: object) -> None:
        self.label, self.functions = label, functions

    def __getattr__(self, name: str):
        function = getattr(self.functions, name)

        def counted(*args, **options):
            CALLS[f"{self.label}.{name}"] += 1
            return function(*args, **options)

        return counted


def exact_attention() -> None:
    """Our plug-in's calls in plain PyTorch and float32, from the bytes of the cache as specified."""
    attend = import_module("mla_fp8.integrations.attend")
    reference = import_module("mla_fp8.reference")
    torch.backends.cuda.matmul.allow_tf32 = False

    def over(q, gather, num_slots, indices, sm_scale, topk_length, out):
        result = q.new_empty(*q.shape[:2], reference.HEAD_DIM_V) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for tokens in torch.arange(len(q), device=q.device).split(48):
            chosen = indices[tokens].long()
            valid = (chosen >= 0) & (chosen < num_slots)
            if topk_length is not None:
                column = torch.arange(chosen.shape[1], device=q.device)
                valid &= column < topk_length[tokens][:, None]
            rows = gather(chosen.where(valid, 0)).float().masked_fill(~valid[:, :, None], 0)
            logits = torch.einsum("thd,tkd->thk", q[tokens].float(), rows) * sm_scale
            logits.masked_fill_(~valid[:, None], float("-inf"))
            lse[tokens] = logits.logsumexp(2)
            weights = (logits - lse[tokens][:, :, None]).exp().nan_to_num(0)
            result[tokens] = torch.einsum("thk,tkd->thd", weights, rows[..., : result.shape[2]]).bfloat16()
        return result, lse

    def over_pages(q, kv_cache, indices, *, layout, page_size, sm_scale, topk_length=None, out=None):
        pages = kv_cache.view(-1, page_size, kv_cache.shape[-1])

        def gather(slots):
            rows = pages[slots // page_size, slots % page_size]
            if layout.fp8_dtype is None:
                return rows
            flat = rows.view(torch.uint8).flatten(0, 1)  # pages of one row
            return reference.dequantize_cache(flat, layout=layout, page_size=1).view(*slots.shape, -1)

        return over(q, gather, len(pages) * page_size, indices, sm_scale, topk_length, out)

    def over_rows(q, kv, indices, *, sm_scale, topk_length=None, out=None):
        result, lse = over(q, lambda slots: kv[slots], len(kv), indices, sm_scale, topk_length, out)
        return result, lse, lse

    attend.over_pages, attend.over_rows = over_pages, over_rows
