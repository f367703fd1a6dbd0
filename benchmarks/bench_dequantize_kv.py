import torch

import mla_fp8
from harness import Work, copies, gpu_rotation, load_triton_baselines, run
from mla_fp8 import KV_LAYOUTS, reference

PAGE_SIZE = 64
CPU_CASES = [
    (name, n, "random")
    for name in ("dsv4", "dsv32", "dsv41", "dsv41_fp4", "dsv32_nope", "fp8_e4m3", "bf16")
    for n in (1, 128, 8192, 65536)
]
GPU_SIZES = {
    "dsv4": (1, 4096, 32768, 262144, 1 << 20),
    "dsv32": (4096, 32768, 262144, 1 << 20),
    "dsv41": (32768, 262144),
    "dsv41_fp4": (32768, 262144),
    "dsv32_nope": (32768, 262144),
}
GPU_SIZES |= {"fp8_e4m3": (32768, 1 << 20), "bf16": (32768, 1 << 20)}


def make_slots(num_rows, num_slots, order, device):
    """Of a cache larger than what is read: random slots, or those of random pages, in order within a page."""
    if order == "random":
        return torch.randperm(num_slots, device=device)[:num_rows].int()
    pages = torch.randperm(num_slots // PAGE_SIZE, device=device)[: -(-num_rows // PAGE_SIZE)]
    return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten()[:num_rows].int()


def work(layout, num_rows, order, device):
    """Slots into a workspace. The copy moves as many bytes, read + written, as the op."""
    rounds = gpu_rotation(num_rows * layout.head_dim_qk * 2)
    num_slots = max(-(-num_rows * rounds // PAGE_SIZE) * PAGE_SIZE, (4 << 20) if device == "cuda" else 0)
    kv_cache = layout.empty(num_slots // PAGE_SIZE, PAGE_SIZE, device)
    for part in kv_cache.split(1 << 14):  # codes, scales and rope that are finite and not subnormal
        part.random_(64, 120)
    scale = torch.ones(1, device=device) if layout.needs_scale else None
    options = {"page_size": PAGE_SIZE, "scale": scale}
    slots = make_slots(num_rows * rounds, num_slots, order, device).split(num_rows)
    outs = [
        torch.empty(num_rows, layout.head_dim_qk, dtype=torch.bfloat16, device=device) for _ in range(rounds)
    ]
    num_bytes = num_rows * (layout.bytes_per_token + 2 * layout.head_dim_qk + slots[0].itemsize)

    def rotate(fn):
        return [lambda i=i: fn(slots[i], outs[i]) for i in range(rounds)]

    baselines = {"copy": copies(num_bytes, device)}
    if num_rows <= 65536:
        few = kv_cache[: -(-num_rows // PAGE_SIZE)]
        near = make_slots(num_rows, len(few) * PAGE_SIZE, "random", device)
        baselines["torch"] = lambda: reference.dequantize_kv(few, near, layout=layout, **options)
    if layout.num_tiles and layout.rope_dim and (triton := load_triton_baselines(device)):
        baselines["triton"] = rotate(lambda s, o: triton.dequantize_kv(kv_cache, s, layout, PAGE_SIZE, o))
        triton.dequantize_kv(kv_cache, slots[0], layout, PAGE_SIZE, outs[0])
        want = mla_fp8.dequantize_kv(kv_cache, slots[0], layout=layout, **options)
        assert torch.equal(outs[0], want)
    return Work(
        label=f"{layout.name} slots={num_rows} {order}",
        run=rotate(lambda s, o: mla_fp8.dequantize_kv(kv_cache, s, layout=layout, out=o, **options)),
        num_bytes=num_bytes,
        baselines=baselines,
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu_cases = [
        (name, n, order) for name, sizes in GPU_SIZES.items() for n in sizes for order in ("random", "paged")
    ]
    cases = gpu_cases if device == "cuda" else CPU_CASES
    run("dequantize_kv", (work(KV_LAYOUTS[name], n, order, device) for name, n, order in cases))
