"""Records the attention calls of a program into a file, and replays them against float64: a bug report.

python examples/record_and_replay.py [--device cuda] [--file calls.safetensors]
"""

import argparse
import subprocess
import sys

import torch

import mla_fp8
from mla_fp8 import testing


def model(device: str) -> None:
    """Stands for your model: two decode steps."""
    layout = mla_fp8.KV_LAYOUTS["dsv32"]
    cache = layout.empty(num_pages=8, page_size=64, device=device)
    latent = torch.randn(512, layout.head_dim_qk, device=device).bfloat16()
    slots = torch.arange(512, device=device)
    mla_fp8.quantize_kv(latent, slots, cache, layout=layout, page_size=64)
    for _ in range(2):
        q = torch.randn(3, 16, layout.head_dim_qk, device=device).bfloat16()
        indices = torch.randint(512, (3, 128), dtype=torch.int32, device=device)
        mla_fp8.sparse_decode(
            q, cache, indices, layout=layout, page_size=64, sm_scale=layout.head_dim_qk**-0.5
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--file", default="calls.safetensors")
    options = parser.parse_args()
    torch.manual_seed(0)
    with testing.record(options.file):
        model(options.device)
    replay = [sys.executable, "-m", "mla_fp8", "replay", options.file]
    print(" ".join(["python", *replay[1:]]), flush=True)
    return subprocess.call(replay)  # 1 if a backend is wrong


if __name__ == "__main__":
    sys.exit(main())
