"""A layer of DeepSeek V3.2 or GLM-5 without a GPU: its projections, and what it has to give, in float64.

Small, with the model's widths where kernels fix them: latents of 512 + 64, index heads of 128.
"""

import torch
from torch import Tensor

HIDDEN, QA, HEADS, NOPE, ROPE, LATENT, V = 48, 64, 3, 32, 64, 512, 16
INDEX_HEADS, INDEX, MAX_POS = 8, 128, 256


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


class Weights:
    """``neox``: how the indexer rotates. They and what is drawn after them are alike in every run."""

    def __init__(self, neox: bool, table: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.neox, self.scale = neox, (NOPE + ROPE) ** -0.5
        self.qkv_a = random(HIDDEN, QA + LATENT + ROPE, scale=HIDDEN**-0.5)
        self.q_b = random(QA, HEADS * (NOPE + ROPE), scale=QA**-0.5)
        self.w_uk, self.w_uv = random(HEADS, NOPE, LATENT, scale=0.1), random(HEADS, LATENT, V, scale=0.05)
        self.q_norm, self.kv_norm = torch.rand(QA).bfloat16() + 0.5, torch.rand(LATENT).bfloat16() + 0.5
        self.wk, self.weights = random(HIDDEN, INDEX, scale=HIDDEN**-0.5), random(HIDDEN, INDEX_HEADS)
        self.wq_b = random(QA, INDEX_HEADS * INDEX, scale=QA**-0.5)
        self.k_norm, self.k_bias = torch.rand(INDEX) + 0.5, torch.randn(INDEX) * 0.1
        angle = torch.arange(MAX_POS)[:, None] * 0.9 ** torch.arange(ROPE // 2)
        self.table = torch.cat([angle.cos(), angle.sin()], -1).to(table)

    def rotated(self, x: Tensor, positions: Tensor, neox: bool) -> Tensor:
        """float64 ``x [T, ..., ROPE]``."""
        cos, sin = self.table.double()[positions].view(len(x), *[1] * (x.dim() - 2), ROPE).chunk(2, -1)
        a, b = x.chunk(2, -1) if neox else (x[..., ::2], x[..., 1::2])
        pair = (a * cos - b * sin, b * cos + a * sin)
        return torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)

    def latents(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """float64 [T, LATENT + ROPE]: the keys of attention."""
        _, kv, pe = (hidden.double() @ self.qkv_a.double()).split([QA, LATENT, ROPE], -1)
        return torch.cat([rms(kv, self.kv_norm), self.rotated(pe, positions, False)], -1)

    def query_latents(self, hidden: Tensor) -> Tensor:
        return rms((hidden.double() @ self.qkv_a.double())[:, :QA], self.q_norm)

    def attend(self, hidden: Tensor, positions: Tensor, keys: Tensor, seen: int) -> Tensor:
        """float64 [HEADS * V] of the last token of ``hidden``, over the first ``seen`` keys."""
        q = (self.query_latents(hidden[-1:]) @ self.q_b.double()).view(HEADS, NOPE + ROPE)
        pe = self.rotated(q[None, :, NOPE:], positions[-1:], False)[0]
        q = torch.cat([torch.einsum("hn,hnl->hl", q[:, :NOPE], self.w_uk.double()), pe], -1)
        weights = (q @ keys[:seen].T * self.scale).softmax(-1)
        return torch.einsum("hs,sl,hlv->hv", weights, keys[:seen, :LATENT], self.w_uv.double()).flatten()

    def index_keys(self, hidden: Tensor, positions: Tensor) -> Tensor:
        k = hidden.double() @ self.wk.double()
        k = torch.nn.functional.layer_norm(k, (INDEX,), self.k_norm.double(), self.k_bias.double(), 1e-6)
        return torch.cat([self.rotated(k[:, :ROPE], positions, self.neox), k[:, ROPE:]], -1)

    def index_queries(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """float64: queries, and the heads' weights with both constants."""
        q = (self.query_latents(hidden) @ self.wq_b.double()).view(-1, INDEX_HEADS, INDEX)
        q = torch.cat([self.rotated(q[..., :ROPE], positions, self.neox), q[..., ROPE:]], -1)
        return q, hidden.double() @ self.weights.double() * INDEX**-0.5 * INDEX_HEADS**-0.5


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
