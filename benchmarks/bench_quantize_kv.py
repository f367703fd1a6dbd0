import torch

import mla_fp8
from harness import Work, run
from mla_fp8 import KV_LAYOUTS, reference

PAGE_SIZE = 64
LAYOUTS = ["dsv4", "dsv32", "fp8_e4m3", "bf16"]


def work(layout, num_tokens, device):
    """Tokens into random slots. The clone moves as many bytes, read + written, as the op."""
    latent = torch.randn(num_tokens, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    slot_mapping = torch.randperm(num_tokens, device=device)
    kv_cache = layout.empty(-(-num_tokens // PAGE_SIZE), PAGE_SIZE, device).zero_()
    scale = torch.ones(1, device=device) if layout.needs_scale else None
    args, options = (latent, slot_mapping, kv_cache), {"page_size": PAGE_SIZE, "scale": scale}
    num_bytes = num_tokens * (2 * layout.head_dim_qk + layout.bytes_per_token)
    same_bytes = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
    return Work(
        label=f"{layout.name} tokens={num_tokens}",
        run=lambda: mla_fp8.quantize_kv(*args, layout=layout.name, **options),
        num_bytes=num_bytes,
        baselines={
            "clone": same_bytes.clone,
            "torch": lambda: reference.quantize_kv(*args, layout=layout, **options),
        },
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    works = [work(KV_LAYOUTS[name], n, device) for name in LAYOUTS for n in (1, 128, 8192, 65536)]
    run("quantize_kv", works)
