"""A call of FlashMLA, unchanged, on our kernels: only the import differs.

python examples/flash_mla_call.py [--device cuda]
"""

import argparse

import torch

import mla_fp8
from mla_fp8.compat.flash_mla import (
    flash_mla_with_kvcache,
    get_mla_metadata,
)  # was: from flash_mla import ...

BATCH, HEADS, TOPK, PAGES, PAGE = 4, 64, 256, 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)

    # A cache as FlashMLA's users have it, in the bytes of DeepSeek V3.2.
    layout = mla_fp8.KV_LAYOUTS["dsv32"]
    cache = layout.empty(num_pages=PAGES, page_size=PAGE, device=device)
    latent = torch.randn(PAGES * PAGE, layout.head_dim_qk, device=device).bfloat16()
    slots = torch.arange(PAGES * PAGE, device=device)
    mla_fp8.quantize_kv(latent, slots, cache, layout=layout, page_size=PAGE)

    q = torch.randn(BATCH, 1, HEADS, layout.head_dim_qk, device=device).bfloat16()
    indices = torch.randint(PAGES * PAGE, (BATCH, 1, TOPK), dtype=torch.int32, device=device)
    metadata, _ = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q,
        layout.flash_mla_view(cache, PAGE),
        None,
        None,
        512,
        metadata,
        softmax_scale=layout.head_dim_qk**-0.5,
        is_fp8_kvcache=True,
        indices=indices,
    )
    direct, _ = mla_fp8.sparse_decode(
        q[:, 0], cache, indices[:, 0], layout=layout, page_size=PAGE, sm_scale=layout.head_dim_qk**-0.5
    )
    print(f"out {list(out.shape)}, lse {list(lse.shape)}; as sparse_decode: {torch.equal(out[:, 0], direct)}")
    assert torch.equal(out[:, 0], direct)


if __name__ == "__main__":
    main()
