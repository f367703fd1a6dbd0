"""A decode step of DeepSeek V4: a window and entries, two FP8 caches in one softmax.

python examples/decode.py                    on a GPU if torch sees one, else on the CPU
python examples/decode.py --device cpu
"""

import argparse

import torch

import mla_fp8

REQUESTS, HEADS, WINDOW, ENTRIES = 4, 16, 128, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)

    layout = mla_fp8.KV_LAYOUTS["dsv4"]
    window = layout.empty(num_pages=8, page_size=256, device=device)
    entries = layout.empty(num_pages=32, page_size=64, device=device)

    # Write latents, one vector of 512 values per token, into both caches.
    tokens, pooled = 8 * 256, 32 * 64
    latent = torch.randn(tokens + pooled, layout.head_dim_qk, device=device).bfloat16()
    slots = torch.arange(tokens, device=device)
    mla_fp8.quantize_kv(latent[:tokens], slots, window, layout=layout, page_size=256)
    mla_fp8.quantize_kv(latent[tokens:], slots[:pooled], entries, layout=layout, page_size=64)

    # The last 128 tokens of each request, and the entries that an indexer selected. -1 is no entry.
    last = torch.stack([torch.arange(512 * (r + 1) - WINDOW, 512 * (r + 1)) for r in range(REQUESTS)])
    selected = torch.randint(pooled, (REQUESTS, ENTRIES), dtype=torch.int32, device=device)
    selected[0, 10:] = -1

    q = torch.randn(REQUESTS, HEADS, layout.head_dim_qk, device=device).bfloat16()
    sink = torch.zeros(HEADS, device=device)

    # Results go into memory of ours: with the three buffers a call allocates nothing.
    out = torch.empty(REQUESTS, HEADS, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(REQUESTS, HEADS, device=device)
    floats = mla_fp8.sparse_attention_workspace(REQUESTS, num_q_heads=HEADS, device=device)
    workspace = torch.empty(floats, device=device)

    def attend(backend: str, **buffers: torch.Tensor) -> torch.Tensor:
        return mla_fp8.sparse_decode(
            q,
            window,
            last.int().to(device),
            layout=layout,
            page_size=256,
            sm_scale=layout.head_dim_qk**-0.5,
            attn_sink=sink,
            extra_kv_cache=entries,
            extra_indices=selected,
            extra_page_size=64,
            backend=backend,
            **buffers,
        )[0]

    assert attend("auto", out=out, lse=lse, workspace=workspace) is out
    expected = attend("reference")
    print(mla_fp8.explain("sparse_decode", layout="dsv4", num_heads=HEADS, device=device).splitlines()[1])
    error = float((out - expected).float().norm() / expected.float().norm())
    print(f"{REQUESTS} requests, {HEADS} heads on {device}: out {list(out.shape)}, lse {list(lse.shape)}")
    print(f"relative difference from plain PyTorch: {error:.1e}")
    assert error < 0.01


if __name__ == "__main__":
    main()
