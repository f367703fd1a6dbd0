"""inverse_rope, and with the cast to FP8, against a copy of the same bytes."""

import torch

import mla_fp8
from harness import Work, copies, gpu_rotation, run
from mla_fp8 import layer_reference

MAX_POS = 8192
CASES = [
    (cast, heads, n)
    for cast in ("bf16", "in place", "fp8")
    for heads in (64, 8)
    for n in (1, 32, 128, 1024, 8192)
]


def work(cast: str, heads: int, num_tokens: int, device: str) -> Work:
    values = num_tokens * heads * 512
    num_bytes = {"bf16": 4 * values, "in place": 4 * values // 8, "fp8": 3 * values + values // 32}[cast]
    rounds = gpu_rotation(num_bytes)
    o = [torch.randn(num_tokens, heads, 512, device=device).bfloat16() for _ in range(rounds)]
    out = [torch.empty_like(x) for x in o] if cast == "bf16" else o
    table = torch.rand(MAX_POS, 64, device=device)
    at = torch.randint(MAX_POS, (num_tokens,), device=device)
    rest, groups = (table[:, :32], table[:, 32:], at), max(1, heads // 8)
    results = [mla_fp8.inverse_rope_quantize(x, *rest, num_groups=groups) for x in o] if cast == "fp8" else []

    def cast_to_fp8(i: int) -> None:
        codes, scale = results[i]
        mla_fp8.inverse_rope_quantize(o[i], *rest, num_groups=groups, out=codes, out_scale=scale)

    def turn(i: int) -> None:
        mla_fp8.inverse_rope(o[i], *rest, out=out[i])

    call = cast_to_fp8 if cast == "fp8" else turn
    baselines = {"copy": copies(num_bytes, device)}
    if device == "cpu" and num_tokens <= 128:
        baselines["torch"] = lambda: layer_reference.inverse_rope(o[0], *rest)
    return Work(
        label=f"{cast} heads={heads} tokens={num_tokens}",
        run=[lambda i=i: call(i) for i in range(rounds)],
        num_bytes=num_bytes,
        baselines=baselines,
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run("inverse_rope", (work(*case, device) for case in CASES))
