import torch
from bench_dequantize_kv import PAGE_SIZE, make_slots

import mla_fp8
from harness import Work, copies, gpu_rotation, load_triton_baselines, run
from mla_fp8 import KV_LAYOUTS, reference

CPU_CASES = [
    (name, n, "random")
    for name in ("dsv4", "dsv32", "dsv41", "dsv41_fp4", "dsv32_nope", "fp8_e4m3", "bf16")
    for n in (1, 128, 8192, 65536)
]
GPU_CASES = [
    (name, n, order)
    for name in ("dsv4", "dsv32", "dsv41", "dsv41_fp4", "dsv32_nope", "fp8_e4m3", "bf16")
    for n in (1, 128, 4096, 32768)
    for order in ("random", "paged")
]


def work(layout, num_tokens, order, device):
    """Tokens into a cache. The copy moves as many bytes, read + written, as the op."""
    rounds = gpu_rotation(num_tokens * layout.head_dim_qk * 2)
    num_slots = max(-(-num_tokens * rounds // PAGE_SIZE) * PAGE_SIZE, (4 << 20) if device == "cuda" else 0)
    kv_cache = layout.empty(num_slots // PAGE_SIZE, PAGE_SIZE, device).zero_()
    latents = [
        torch.randn(num_tokens, layout.head_dim_qk, device=device).bfloat16() for _ in range(min(rounds, 32))
    ]
    slots = make_slots(num_tokens * rounds, num_slots, order, device).split(num_tokens)
    options = {"page_size": PAGE_SIZE, "scale": torch.ones(1, device=device) if layout.needs_scale else None}
    num_bytes = num_tokens * (2 * layout.head_dim_qk + layout.bytes_per_token + slots[0].itemsize)

    def rotate(fn):
        return [lambda i=i: fn(latents[i % len(latents)], slots[i]) for i in range(rounds)]

    few = kv_cache[: -(-num_tokens // PAGE_SIZE)]
    near = make_slots(num_tokens, len(few) * PAGE_SIZE, "random", device)
    baselines = {
        "copy": copies(num_bytes, device),
        "torch": lambda: reference.quantize_kv(latents[0], near, few, layout=layout, **options),
    }
    if layout.num_tiles and layout.rope_dim and (triton := load_triton_baselines(device)):
        baselines["triton"] = rotate(lambda x, s: triton.quantize_kv(x, s, kv_cache, layout, PAGE_SIZE))
        triton.quantize_kv(latents[0], near, few, layout, PAGE_SIZE)
        got = few.clone()
        mla_fp8.quantize_kv(latents[0], near, few, layout=layout, **options)
        assert torch.equal(got, few)
    return Work(
        label=f"{layout.name} tokens={num_tokens} {order}",
        run=rotate(lambda x, s: mla_fp8.quantize_kv(x, s, kv_cache, layout=layout, **options)),
        num_bytes=num_bytes,
        baselines=baselines,
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = GPU_CASES if device == "cuda" else CPU_CASES
    run("quantize_kv", (work(KV_LAYOUTS[name], n, order, device) for name, n, order in cases))
