import torch

import mla_fp8
from harness import Work, copies, run
from mla_fp8 import reference

HEAD_DIM = 512


def work(num_tokens, num_heads, dtype, device):
    out_a, out_b = (torch.randn(num_tokens, num_heads, HEAD_DIM, device=device).to(dtype) for _ in "ab")
    lse_a, lse_b = (torch.randn(num_tokens, num_heads, device=device) for _ in "ab")
    states = (out_a, lse_a, out_b, lse_b)
    out, lse = mla_fp8.merge_attention_states(*states)
    return Work(
        label=f"tokens={num_tokens} heads={num_heads} {str(dtype).removeprefix('torch.')}",
        run=lambda: mla_fp8.merge_attention_states(*states, out=out, lse=lse),
        num_bytes=3 * (out.nbytes + lse.nbytes),
        baselines={
            "copy": copies(3 * out.nbytes, device),
            "torch": lambda: reference.merge_attention_states(*states),
        },
    )


def partial(num_states, num_tokens, num_heads, device):
    outs = torch.randn(num_states, num_tokens, num_heads, HEAD_DIM, device=device).bfloat16()
    lses = torch.randn(num_states, num_tokens, num_heads, device=device)
    out, lse = mla_fp8.merge_partial_states(outs, lses)
    num_bytes = outs.nbytes + lses.nbytes + out.nbytes + lse.nbytes
    return Work(
        label=f"states={num_states} tokens={num_tokens} heads={num_heads}",
        run=lambda: mla_fp8.merge_partial_states(outs, lses, out=out, lse=lse),
        num_bytes=num_bytes,
        baselines={
            "copy": copies(num_bytes, device),
            "torch": lambda: reference.merge_partial_states(outs, lses),
        },
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(1, 128, torch.bfloat16), (128, 64, torch.bfloat16), (512, 128, torch.bfloat16)]
    cases += [(4096, 64, torch.bfloat16), (512, 128, torch.float16), (256, 128, torch.float32)]
    works = [work(*case, device) for case in cases]
    works += [partial(*case, device) for case in ((2, 32, 64), (4, 32, 32), (8, 32, 16), (8, 512, 16))]
    run("merge_attention_states", works)
