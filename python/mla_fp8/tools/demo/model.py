"""A small attention stack with the shapes of DeepSeek V4, V4.1 or V3.2 and seeded random weights.

It is the surroundings of the attention ops, not the subject: plain PyTorch in one dtype, float64 or float32.
What every version of the model shares are the inputs of the ops: q and latent, rounded to bf16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import KV_LAYOUTS, KVLayout
from .pages import Batch

CONTEXT = 8  # bytes that enter a token's embedding, so that equal bytes have different latents
INDEX_DIM = 64


@dataclass(frozen=True)
class Layer:
    """``ratio`` tokens make one compressed entry (0: none), ``topk`` of which each query selects (0: all)."""

    ratio: int
    window: int
    topk: int = 0

    def max_entries(self, num_tokens: int) -> int:
        return num_tokens // self.ratio if self.ratio else 0

    def num_selected(self, num_tokens: int) -> int:
        """Width of the topk indices for sequences of at most ``num_tokens``."""
        return min(self.topk or num_tokens, self.max_entries(num_tokens))


@dataclass(frozen=True)
class Spec:
    layers: tuple[Layer, ...]
    # That can hold this model's latent; "a+b": a the window, b the entries. The last one is unquantised.
    layouts: tuple[str, ...]
    page_tokens: int  # a page of a compressed cache holds page_tokens / ratio entries
    num_q_heads: int = 8
    hidden: int = 256

    @property
    def latent(self) -> KVLayout:
        return KV_LAYOUTS[self.layouts[-1]]  # whose rope is what the model rotates

    @property
    def sm_scale(self) -> float:
        return float(self.latent.head_dim_qk**-0.5)


MODELS = {
    "v4": Spec(
        layers=(Layer(0, 128), Layer(4, 128, topk=128), Layer(128, 128), Layer(4, 128, topk=128)),
        layouts=("dsv4", "dsv4_fnuz", "fp8_e4m3_512", "fp8_e4m3_512_fnuz", "bf16_512"),
        page_tokens=256,
    ),
    "v41": Spec(
        layers=(Layer(0, 128), Layer(2, 128, topk=128), Layer(1, 128, topk=128)),
        layouts=("dsv41", "dsv41+dsv41_fp4", "dsv4", "dsv4+dsv41_fp4", "bf16_512"),
        page_tokens=64,
    ),
    "v32": Spec(
        layers=(Layer(1, 0, topk=256), Layer(1, 0, topk=256), Layer(1, 0, topk=256)),
        layouts=("dsv32", "dsv32_fnuz", "fp8_e4m3", "fp8_e4m3_fnuz", "bf16"),
        page_tokens=64,
    ),
}


@dataclass(frozen=True)
class AttentionInputs:
    """What one layer hands to the cache and to attention for one batch."""

    q: Tensor  # [num_tokens, num_q_heads, head_dim_qk] bf16
    latent: Tensor  # [num_tokens, head_dim_qk] bf16: stored by layers with a window
    entries: Tensor  # [n, head_dim_qk] bf16: the compressed entries that this batch completes
    entry_request: Tensor  # [n]
    entry_index: Tensor  # [n]
    topk_indices: Tensor  # [num_tokens, topk] int32, request-local entries, -1 = none
    attn_sink: Tensor  # [num_q_heads] float32


Attend = Callable[[int, AttentionInputs], Tensor]  # -> [num_tokens, num_q_heads, head_dim_v]


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, pos: Tensor, rope_dim: int, sign: int = 1) -> Tensor:
    """Rotary embedding of the last ``rope_dim`` elements; ``sign=-1`` undoes it."""
    frequency = 1e4 ** -(torch.arange(0, rope_dim, 2, device=x.device) / rope_dim)
    angle = (sign * pos[:, None] * frequency).to(x.dtype)
    if x.dim() == 3:  # [tokens, heads, dim]
        angle = angle[:, None]
    even, odd = x[..., -rope_dim::2], x[..., 1 - rope_dim :: 2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.cat([x[..., :-rope_dim], torch.stack(turned, -1).flatten(-2)], -1)


class LayerWeights:
    def __init__(self, spec: Spec, random: Callable[..., Tensor]) -> None:
        heads, dim = spec.num_q_heads, spec.latent.head_dim_qk
        self.q = random(spec.hidden, heads * dim) / spec.hidden**0.5
        self.kv = random(spec.hidden, dim) / spec.hidden**0.5
        self.gate = random(spec.hidden) / spec.hidden**0.5
        self.index_q = random(spec.hidden, INDEX_DIM) / spec.hidden**0.5
        self.index_k = random(dim, INDEX_DIM) / dim**0.5
        self.out = (
            random(heads * spec.latent.head_dim_v, spec.hidden) / (heads * spec.latent.head_dim_v) ** 0.5
        )
        # Channels of unequal size, as trained latents have them: that is what tiles with own scales are for.
        self.kv_gain = (0.75 * random(dim)).exp()
        self.attn_sink = random(heads)


class History:
    """What compressor and indexer remember of each request in one layer."""

    def __init__(self, layer: Layer, spec: Spec, num_requests: int, max_len: int, like: Tensor) -> None:
        self.latent = like.new_zeros(num_requests, max_len, spec.latent.head_dim_qk)  # normed, not rotated
        self.gate = like.new_zeros(num_requests, max_len)
        self.index_keys = like.new_zeros(num_requests, layer.max_entries(max_len), INDEX_DIM)


class Model:
    def __init__(self, spec: Spec, *, seed: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:  # drawn in float32: every dtype gets the same weights
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.spec = spec
        self.embedding = random(CONTEXT, 256, spec.hidden)
        self.layers = [LayerWeights(spec, random) for _ in spec.layers]

    def new_history(self, num_requests: int, max_len: int) -> list[History]:
        return [
            History(layer, self.spec, num_requests, max_len, self.embedding) for layer in self.spec.layers
        ]

    def forward(self, batch: Batch, history: list[History], attend: Attend) -> Tensor:
        """The final hidden state of each token, ``[num_tokens, hidden]``. Appends to ``history``."""
        latent = self.spec.latent
        decay = 0.7 ** torch.arange(CONTEXT, device=batch.pos.device)
        x = sum(
            (decay[k] * self.embedding[k, batch.context[:, k]] for k in range(CONTEXT)), start=torch.zeros(())
        )
        x = x.to(self.embedding.dtype)
        for i, (layer, weights) in enumerate(zip(self.spec.layers, self.layers, strict=True)):
            hidden = rms_norm(x)
            inputs = self._attention_inputs(layer, weights, hidden, batch, history[i])
            out = attend(i, inputs).to(x.dtype)
            if latent.head_dim_v > latent.nope_dim:  # rope is part of V: take the key's position out again
                out = rotate(out, batch.pos, latent.rope_dim, sign=-1)
            x = x + out.flatten(1) @ weights.out
        return rms_norm(x)

    def _attention_inputs(
        self, layer: Layer, weights: LayerWeights, hidden: Tensor, batch: Batch, history: History
    ) -> AttentionInputs:
        rope_dim, max_len = self.spec.latent.rope_dim, history.latent.shape[1]
        q = rms_norm((hidden @ weights.q).unflatten(-1, (self.spec.num_q_heads, -1)))
        normed = rms_norm(hidden @ weights.kv)
        request, entry = batch.completed_entries(layer.ratio)
        entries = normed[:0]
        if layer.ratio:
            history.latent[batch.request, batch.pos] = normed
            history.gate[batch.request, batch.pos] = hidden @ weights.gate
            members = entry[:, None] * layer.ratio + torch.arange(layer.ratio, device=entry.device)
            share = history.gate[request[:, None], members].softmax(-1)
            entries = rms_norm((share[:, None] @ history.latent[request[:, None], members]).squeeze(1))
            history.index_keys[request, entry] = entries @ weights.index_k
        return AttentionInputs(
            q=rotate(q, batch.pos, rope_dim).bfloat16(),
            latent=rotate(normed * weights.kv_gain, batch.pos, rope_dim).bfloat16(),
            entries=rotate(entries * weights.kv_gain, entry * layer.ratio, rope_dim).bfloat16(),
            entry_request=request,
            entry_index=entry,
            topk_indices=_select(
                layer, hidden @ weights.index_q, batch, history, layer.num_selected(max_len)
            ),
            attn_sink=weights.attn_sink.float(),
        )


def _select(layer: Layer, index_q: Tensor, batch: Batch, history: History, topk: int) -> Tensor:
    """The entries that each token attends to: those of its past, the best ``topk`` first."""
    selected = torch.full((len(index_q), topk), -1, dtype=torch.int32, device=index_q.device)
    if not topk:
        return selected
    candidates = torch.arange(history.index_keys.shape[1], device=index_q.device)
    past = candidates < ((batch.pos + 1) // layer.ratio)[:, None]
    if not layer.topk:
        return torch.where(past, candidates, -1).int()
    for request, rows in enumerate(batch.rows_of_requests()):
        scores = (index_q[rows] @ history.index_keys[request].T).where(past[rows], float("-inf"))
        best = scores.topk(topk)
        selected[rows] = torch.where(best.values.isfinite(), best.indices, -1).int()
    return selected
