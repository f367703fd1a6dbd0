import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import KV_LAYOUTS, reference

PAGE_SIZE = 64
LAYOUTS = ["dsv4", "dsv32", "fp8_e4m3", "bf16"]


def work(layout, num_rows, device):
    """Random slots into a workspace. The clone moves as many bytes, read + written, as the op."""
    kv_cache = layout.empty(-(-num_rows // PAGE_SIZE), PAGE_SIZE, device).zero_()
    scale = torch.ones(1, device=device) if layout.needs_scale else None
    options = {"page_size": PAGE_SIZE, "scale": scale}
    latent = torch.randn(num_rows, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(num_rows, device=device)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout.name, **options)
    num_bytes = num_rows * (layout.bytes_per_token + 2 * layout.head_dim_qk)
    same_bytes = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
    return Work(
        label=f"{layout.name} slots={num_rows}",
        run=lambda: mla_fp8.dequantize_kv(kv_cache, slots, layout=layout.name, out=latent, **options),
        num_bytes=num_bytes,
        baselines={
            "clone": same_bytes.clone,
            "torch": lambda: reference.dequantize_kv(kv_cache, slots, layout=layout, **options),
        },
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    works = [work(KV_LAYOUTS[name], n, device) for name in LAYOUTS for n in (1, 128, 8192, 65536)]
    run("dequantize_kv", works)
