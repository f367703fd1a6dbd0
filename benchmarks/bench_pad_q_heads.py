import torch

import mla_fp8
from harness import Work, copies, run
from mla_fp8 import reference


def work(num_tokens, num_q_heads, num_heads, device, head_dim=576):
    q = torch.randn(num_tokens, num_q_heads, head_dim, device=device).bfloat16()
    attn_sink = torch.randn(num_q_heads, device=device)
    out_q, out_attn_sink = mla_fp8.pad_q_heads(q, attn_sink, num_heads=num_heads)
    return Work(
        label=f"tokens={num_tokens} heads={num_q_heads}->{num_heads}",
        run=lambda: mla_fp8.pad_q_heads(
            q, attn_sink, num_heads=num_heads, out_q=out_q, out_attn_sink=out_attn_sink
        ),
        num_bytes=2 * (q.numel() + out_q.numel()),
        baselines={
            "copy": copies(2 * (q.numel() + out_q.numel()), device),
            "torch": lambda: reference.pad_q_heads(q, attn_sink, num_heads=num_heads),
        },
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(1, 8, 64), (128, 8, 64), (128, 16, 64), (2048, 16, 64), (8192, 8, 64)]
    run("pad_q_heads", [work(*case, device) for case in cases])
