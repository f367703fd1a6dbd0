"""A small stack of layers with the shapes of DeepSeek V4, V4.1 or V3.2 and seeded random weights.

It is the surroundings of the ops, not the subject: embedding, projections and the residual stream in plain
PyTorch, float64 or float32. Between a layer's projections there are ops alone (layer.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...index_layout import INDEX_DIM
from ...layout import HEAD_DIM_V, KV_LAYOUTS, KVLayout
from .pages import Batch

CONTEXT = 8  # bytes that enter a token's embedding, so that equal bytes have different latents
INDEX_HEADS = 8
EPS = 1e-6
_WIDTHS = {1: 1, 2: 2, 4: 4, 128: 2}  # of a token's row for the compressor, in latents


@dataclass(frozen=True)
class Layer:
    """``ratio`` tokens make one compressed entry (0: none), ``topk`` of which each query selects (0: all)."""

    ratio: int
    window: int
    topk: int = 0
    num_blocks: int = 0  # of entries that the indexer publishes for each query, for layers behind
    # The layer whose entries and index keys this one has in place of its own: it selects in the blocks that
    # one published.
    source: int | None = None

    @property
    def writes_entries(self) -> bool:
        return self.ratio > 0 and self.source is None

    @property
    def compresses(self) -> bool:
        """Whether entries are its compressor's. Without a window they are the latents themselves."""
        return self.writes_entries and self.window > 0

    @property
    def score_width(self) -> int:
        return HEAD_DIM_V * _WIDTHS[self.ratio] if self.compresses else 0

    @property
    def pooled_tokens(self) -> int:
        """Tokens that an entry is made of: with ratio 4 those of the block before too."""
        return 8 if self.ratio == 4 else self.ratio

    def max_entries(self, num_tokens: int) -> int:
        return num_tokens // self.ratio if self.ratio else 0

    def num_selected(self, num_tokens: int) -> int:
        """Width of the selected entries for sequences of at most ``num_tokens``."""
        return min(self.topk or num_tokens, self.max_entries(num_tokens))

    def num_hot(self, num_tokens: int) -> int:
        """Slots of a hot buffer, a tenth of the entries."""
        return max(self.max_entries(num_tokens) // 10, 1)


@dataclass(frozen=True)
class Spec:
    layers: tuple[Layer, ...]
    # That can hold this model's latent; "a+b": a the window, b the entries. The last one is unquantised.
    layouts: tuple[str, ...]
    page_tokens: int  # a page of a compressed cache holds page_tokens / ratio entries
    norm_q: bool = False
    num_q_heads: int = 8
    hidden: int = 256

    @property
    def latent(self) -> KVLayout:
        return KV_LAYOUTS[self.layouts[-1]]  # whose rope is what the model rotates

    @property
    def sm_scale(self) -> float:
        return float(self.latent.head_dim_qk**-0.5)

    @property
    def turns_back(self) -> bool:
        """Whether V has the rotated dims, so that the output carries the keys' positions."""
        return self.latent.head_dim_v > self.latent.nope_dim


MODELS = {
    "v4": Spec(
        layers=(Layer(0, 128), Layer(4, 128, topk=128), Layer(128, 128), Layer(4, 128, topk=128)),
        layouts=("dsv4", "dsv4_fnuz", "fp8_e4m3_512", "fp8_e4m3_512_fnuz", "bf16_512"),
        page_tokens=256,
        norm_q=True,
    ),
    "v41": Spec(
        layers=(  # the window alone, an indexer by itself, one that publishes, one that consumes
            Layer(0, 128),
            Layer(2, 128, topk=128),
            Layer(1, 128, topk=64, num_blocks=16),
            Layer(1, 128, topk=64, source=2),
        ),
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
class Projected:
    """What a layer's projections hand to the ops for one batch."""

    q: Tensor  # [num_tokens, num_q_heads, head_dim_qk] bf16
    kv: Tensor  # [num_tokens, head_dim_qk] bf16: 512, then what V3.2 rotates
    kv_score: Tensor  # [num_tokens, score_width] float32: of the compressor
    index_q: Tensor  # [num_tokens, INDEX_HEADS, INDEX_DIM] float32
    index_weights: Tensor  # [num_tokens, INDEX_HEADS] float32
    index_k: Tensor  # [num_tokens, INDEX_DIM] bf16: of tokens, in layers without a compressor


@dataclass(frozen=True)
class Constants:
    """What a layer's ops are given beside the projections, float32 for every dtype of the model."""

    cos: Tensor  # [max_len, rope_dim / 2]
    sin: Tensor
    # Norm weights of unequal size, as trained latents have them: that is what tiles with own scales are for.
    kv_weight: Tensor  # [512]
    entry_weight: Tensor  # [512]
    ape: Tensor | None  # [ratio, score_width / 2]: ratios 4 and 128
    index_k: Tensor  # [512, INDEX_DIM]: from the compressor's latents to index keys
    attn_sink: Tensor  # [num_q_heads]


Attend = Callable[[int, Projected], Tensor]  # -> [num_tokens, num_q_heads, head_dim_v], turned back


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rope_table(max_len: int, rope_dim: int, device: str) -> tuple[Tensor, Tensor]:
    frequency = 1e4 ** -(torch.arange(0, rope_dim, 2, dtype=torch.float64, device=device) / rope_dim)
    angle = torch.arange(max_len, device=device)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


class LayerWeights:
    def __init__(
        self, layer: Layer, spec: Spec, table: tuple[Tensor, Tensor], random: Callable[..., Tensor]
    ) -> None:
        heads, dim, hidden = spec.num_q_heads, spec.latent.head_dim_qk, spec.hidden

        def projection(columns: int) -> Tensor:
            return random(hidden, columns).div_(hidden**0.5)

        self.q, self.kv, self.kv_score = map(projection, (heads * dim, dim, layer.score_width))
        self.index_q, self.index_weights, self.index_k = map(
            projection, (INDEX_HEADS * INDEX_DIM, INDEX_HEADS, INDEX_DIM)
        )
        self.out = random(heads * HEAD_DIM_V, hidden) / (heads * HEAD_DIM_V) ** 0.5
        has_ape = layer.compresses and layer.ratio > 2
        self.constants = Constants(
            *table,
            kv_weight=(0.75 * random(HEAD_DIM_V)).exp().float(),
            entry_weight=(0.75 * random(HEAD_DIM_V)).exp().float(),
            ape=random(layer.ratio, layer.score_width // 2).float() if has_ape else None,
            index_k=(random(HEAD_DIM_V, INDEX_DIM) / HEAD_DIM_V**0.5).float(),
            attn_sink=random(heads).float(),
        )


class Model:
    def __init__(self, spec: Spec, *, max_len: int, seed: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:  # drawn in float32: every dtype gets the same weights
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.spec = spec
        self.embedding = random(CONTEXT, 256, spec.hidden)
        table = rope_table(max_len, spec.latent.rope_dim, device)
        self.layers = [LayerWeights(layer, spec, table, random) for layer in spec.layers]

    @property
    def constants(self) -> list[Constants]:
        return [weights.constants for weights in self.layers]

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """The final hidden state of each token, ``[num_tokens, hidden]``."""
        decay = 0.7 ** torch.arange(CONTEXT, device=batch.pos.device)
        x = sum(
            (decay[k] * self.embedding[k, batch.context[:, k]] for k in range(CONTEXT)), start=torch.zeros(())
        )
        x = x.to(self.embedding.dtype)
        for i, weights in enumerate(self.layers):
            out = attend(i, self._project(weights, rms_norm(x)))
            x = x + out.to(x.dtype).flatten(1) @ weights.out
        return rms_norm(x)

    def _project(self, weights: LayerWeights, hidden: Tensor) -> Projected:
        heads = (self.spec.num_q_heads, -1)
        return Projected(
            q=(hidden @ weights.q).unflatten(-1, heads).bfloat16(),
            kv=(hidden @ weights.kv).bfloat16(),
            kv_score=(hidden @ weights.kv_score).float(),
            index_q=(hidden @ weights.index_q).unflatten(-1, (INDEX_HEADS, -1)).float(),
            index_weights=(hidden @ weights.index_weights).float(),
            index_k=(hidden @ weights.index_k).bfloat16(),
        )
