"""A layer of DeepSeek V4 between its projections: a prompt, then decode steps, then the same tokens at once.

The two ways to compute a token must agree: as the last token of a prompt, or step by step from the caches.

python examples/layer.py [--device cuda]
"""

import argparse
from dataclasses import dataclass

import torch

import mla_fp8

HEADS, RATIO, PAGE, EPS = 16, 4, 64, 1e-6
PROMPT, STEPS = 200, 6


@dataclass
class Weights:
    """What the model gives: rotations by position, and parameters of the compressor."""

    cos: torch.Tensor
    sin: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor


@dataclass
class Inputs:
    """What the projections of the layer give, a row per token."""

    q: torch.Tensor
    kv: torch.Tensor
    kv_score: torch.Tensor
    index_k: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor

    def part(self, begin: int, end: int) -> "Inputs":
        return Inputs(*(x[begin:end].clone() for x in vars(self).values()))


class Layer:
    """One request. An engine keeps caches, page tables and state for many."""

    def __init__(self, weights: Weights, device: str) -> None:
        self.layout, self.index_layout = mla_fp8.KV_LAYOUTS["dsv4"], mla_fp8.INDEX_LAYOUTS["index_fp8"]
        self.window = self.layout.empty(num_pages=8, page_size=PAGE, device=device)
        self.entries = self.layout.empty(num_pages=8, page_size=PAGE, device=device)
        self.index_cache = self.index_layout.empty(num_pages=8, page_size=PAGE, device=device)
        self.pages = torch.randperm(8, device=device).int().view(1, 8)
        self.state = torch.zeros(1, 8, 2048, device=device)
        self.weights, self.device = weights, device

    def __call__(self, x: Inputs, start: int) -> torch.Tensor:
        """[tokens, heads, 512] of the tokens from position `start` on."""
        tokens, w = len(x.q), self.weights
        positions = torch.arange(start, start + tokens, device=self.device)
        query_start_loc = torch.tensor([0, tokens], dtype=torch.int32, device=self.device)
        seq_lens = torch.tensor([start + tokens], dtype=torch.int32, device=self.device)
        slots = self.slots(positions)
        # Only the last token of an entry writes it.
        entry_slots = self.slots(positions // RATIO).where((positions + 1) % RATIO == 0, -1)
        paged = {"layout": self.layout, "page_size": PAGE}
        index_paged = {"layout": self.index_layout, "page_size": PAGE}

        q = mla_fp8.qk_norm_rope_insert(
            x.q, x.kv, w.norm, w.cos, w.sin, positions, slots, self.window, **paged, eps=EPS, norm_q=True
        )
        mla_fp8.compress_kv(
            x.kv_score,
            query_start_loc,
            torch.tensor([start], dtype=torch.int32, device=self.device),
            self.state,
            torch.zeros(1, dtype=torch.int64, device=self.device),
            w.ape,
            w.norm,
            w.cos,
            w.sin,
            entry_slots,
            self.entries,
            **paged,
            ratio=RATIO,
            eps=EPS,
        )
        mla_fp8.quantize_index_k(x.index_k, entry_slots, self.index_cache, **index_paged)
        _, selected, lens = mla_fp8.index_topk(
            x.index_q,
            x.index_weights,
            self.index_cache,
            self.pages,
            seq_lens,
            **index_paged,
            topk=512,
            compress_ratio=RATIO,
            query_start_loc=query_start_loc,
        )
        out, _, _ = mla_fp8.sparse_prefill_window(
            q,
            self.window,
            self.pages,
            query_start_loc,
            seq_lens,
            **paged,
            window_size=128,
            sm_scale=512**-0.5,
            attn_sink=torch.zeros(HEADS, device=self.device),
            extra_kv_cache=self.entries,
            extra_indices=selected,
            extra_topk_length=lens,
            extra_page_size=PAGE,
        )
        values, scales = mla_fp8.inverse_rope_quantize(out, w.cos, w.sin, positions, num_groups=2)
        assert values.shape[1] == 2 and scales is not None  # the output projection takes these
        return out

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        return self.pages[0, rows // PAGE].long() * PAGE + rows % PAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    tokens = PROMPT + STEPS
    angle = torch.arange(256.0, device=device)[:, None] * 10000 ** (-torch.arange(32, device=device) / 32)
    weights = Weights(
        angle.cos(), angle.sin(), torch.randn(RATIO, 1024, device=device), torch.ones(512, device=device)
    )
    x = Inputs(
        q=torch.randn(tokens, HEADS, 512, device=device).bfloat16(),
        kv=torch.randn(tokens, 512, device=device).bfloat16(),
        kv_score=torch.randn(tokens, 2048, device=device),
        index_k=torch.randn(tokens, 128, device=device).bfloat16(),
        index_q=torch.randn(tokens, 64, 128, device=device).to(torch.float8_e4m3fn),
        index_weights=torch.randn(tokens, 64, device=device),
    )

    at_once = Layer(weights, device)(x.part(0, tokens), 0)
    layer = Layer(weights, device)
    parts = [layer(x.part(0, PROMPT), 0)]
    parts += [layer(x.part(t, t + 1), t) for t in range(PROMPT, tokens)]
    error = float((torch.cat(parts) - at_once).float().norm() / at_once.float().norm())
    print(f"a prompt of {PROMPT} tokens and {STEPS} decode steps on {device}: {list(at_once.shape)}")
    print(f"relative difference between step by step and at once: {error:.1e}")
    assert error < 0.01


if __name__ == "__main__":
    main()
