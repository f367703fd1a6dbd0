"""Layers that answer needles, for the demo's layer: texts, made weights, and the layer in plain PyTorch.

A text has needles (two key bytes and a value) between bytes of no meaning. Later it names a key, and the
layer must say the value: that of the nearer needle where one is told twice. Each model has one layer, so that
every op of it is needed. Weights are codes of bytes in a random basis that fills all dims of a latent.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from mla_fp8.index_layout import INDEX_DIM
from mla_fp8.layout import HEAD_DIM_V
from mla_fp8.tools.demo.model import CONTEXT, EPS, INDEX_HEADS, Constants, Layer, Model, Spec, rope_table

SYMBOLS = 64  # of each alphabet of bytes: filler, first key, second key, value
FIRST, SECOND, VALUE = SYMBOLS, 2 * SYMBOLS, 3 * SYMBOLS
CELL, TAIL = 8, 18  # tokens of a cell; cells behind the haystack: a needle, a far question, a near question
HEADS, TOPK, SINK = 2, 32, 14.5
V4 = ("dsv4", "dsv4_fnuz", "fp8_e4m3_512", "fp8_e4m3_512_fnuz", "bf16_512")
V41 = ("dsv41", "dsv41+dsv41_fp4", "dsv4", "dsv4+dsv41_fp4", "bf16_512")
V32 = ("dsv32", "dsv32_fnuz", "fp8_e4m3", "fp8_e4m3_fnuz", "bf16")

# Where a byte's code stands in the hidden state: of the token itself, the one before, the one before that.
_BLOCKS = ("value", "second", "second_before", "first_before", "first_before_that", "answer")
HIDDEN = len(_BLOCKS) * SYMBOLS + 32 + 1  # then filler's codes, then a constant


def _spec(layer: Layer, layouts: tuple[str, ...], page_tokens: int, *, norm_q: bool = False) -> Spec:
    return Spec((layer,), layouts, page_tokens, norm_q, HEADS, HIDDEN)


SPECS = {
    "v4_window": _spec(Layer(0, 128), V4, 256, norm_q=True),
    "v4_4": _spec(Layer(4, 128, topk=TOPK), V4, 256, norm_q=True),
    "v4_128": _spec(Layer(128, 128), V4, 256, norm_q=True),
    "v41_2": _spec(Layer(2, 128, topk=TOPK), V41, 64),
    "v41_1": _spec(Layer(1, 128, topk=TOPK), V41, 64),
    "v32": _spec(Layer(1, 0, topk=TOPK), V32, 64),
}


@dataclass(frozen=True)
class Texts:
    tokens: Tensor  # [texts, length]
    ask: Tensor  # [texts, questions]: the token behind which the answer comes
    answer: Tensor  # [texts, questions]: a value


def texts(layer: Layer, number: int, seed: int) -> Texts:
    g = torch.Generator().manual_seed(seed)

    def draw(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=g)

    block = {128: 128, 4: 16}.get(layer.ratio, CELL)  # an entry must not have two needles
    blocks = {0: 0, 128: 6}.get(layer.ratio, 320 // block)
    places = block - 2 - (8 if layer.ratio == 4 else 0)
    tokens = draw(SYMBOLS, number, blocks * block + TAIL * CELL)
    ask, answer = [], []
    for line in tokens:
        keys = torch.stack([torch.randperm(SYMBOLS, generator=g) for _ in range(2)], 1).tolist()

        def tell(at: int, key: list[int], value: int, line: Tensor = line) -> int:
            line[at : at + 3] = torch.tensor([FIRST + key[0], SECOND + key[1], VALUE + value])
            return at + 1  # where the question ends

        far = [(keys.pop(), int(draw(SYMBOLS, 1))) for _ in range(min(blocks, SYMBOLS - TAIL))]
        for b, (key, value) in enumerate(reversed(far)):  # the last ones are told first
            tell(b * block + int(draw(places, 1)), key, value)
        asked, near = [], []
        for cell in range(TAIL):
            at = blocks * block + cell * CELL + int(draw(CELL - 2, 1))
            if cell % 3 == 0:  # every other needle is of a key that was told far away
                key = far[-1 - cell // 6][0] if far and cell % 2 else keys.pop()
                near.append((key, int(draw(SYMBOLS, 1))))
                tell(at, *near[-1])
            else:
                known = far[:-4] if cell % 3 == 1 and far else near[-4:]
                key, value = known[int(draw(len(known), 1))]
                asked.append((tell(at, key, value), value))
        ask.append([x for x, _ in asked])
        answer.append([x for _, x in asked])
    return Texts(tokens, torch.tensor(ask), torch.tensor(answer))


def _basis(rows: int, columns: int, g: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=g, dtype=torch.float64))[0]


_AT = {name: slice(i * SYMBOLS, (i + 1) * SYMBOLS) for i, name in enumerate(_BLOCKS)}
_AT |= {"filler": slice(HIDDEN - 33, HIDDEN - 1), "one": slice(HIDDEN - 1, HIDDEN)}


def _hidden(columns: int, **parts: Tensor | float) -> Tensor:
    """A projection of the hidden state, by the blocks that it looks at."""
    w = torch.zeros(HIDDEN, columns, dtype=torch.float64)
    for name, part in parts.items():
        w[_AT[name]] = part
    return w


class Weights:
    """What `mla_fp8.tools.demo.model.LayerWeights` has, with an embedding and a readout; float64."""

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        layer, dim = spec.layers[0], spec.latent.head_dim_qk
        g = torch.Generator().manual_seed(seed)
        self._embed(g)

        # Orthogonal codes of a latent. Slow pairs of the rotated dims have a part of the value, five others
        # say how near.
        plain = dim - spec.latent.rope_dim
        codes = torch.zeros(dim, 3 * SYMBOLS + 32, dtype=torch.float64)
        codes[:plain] = _basis(plain, codes.shape[1], g)
        value, first, second, filler = codes.split([SYMBOLS, SYMBOLS, SYMBOLS, 32], 1)
        if spec.turns_back:
            slow = torch.randn(16, SYMBOLS, generator=g, dtype=torch.float64)
            value = 0.7**0.5 * value
            value[plain + 40 : plain + 56] = 0.3**0.5 * slow / slow.norm(dim=0)
        near = torch.zeros(dim, 1, dtype=torch.float64)
        near[[plain + i for i in (12, 14, 30, 32, 34)]] = 5**-0.5
        size = (0.3 * torch.randn(dim, 1, generator=g, dtype=torch.float64)).exp()
        size[min(plain, HEAD_DIM_V) :] = 1  # of rotated dims
        self.kv_weight = self.entry_weight = size[:HEAD_DIM_V, 0].float()

        # A latent: 30 % for the value, 55 % for the key, or 85 % for filler; 15 % for nearness.
        self.kv = _hidden(
            dim, value=0.30**0.5 * value.T, second_before=0.275**0.5 * second.T,
            first_before_that=0.275**0.5 * first.T, filler=0.85**0.5 * filler.T, one=0.15**0.5 * near.T,
        )  # fmt: skip
        length = HEAD_DIM_V**0.5  # of a latent behind its norm
        one = HIDDEN**0.5 / 2  # of a code behind that of the hidden state, in a needle's value
        if plain == HEAD_DIM_V:  # rotated dims are not normed
            self.kv[:, plain:] *= length / one
        q = _hidden(
            dim, second=0.425**0.5 * (second / size).T, first_before=0.425**0.5 * (first / size).T,
            one=0.15**0.5 * near.T,
        )  # fmt: skip
        q *= length * (3 / HIDDEN) ** 0.5 * (3 if spec.norm_q else 1)
        self.q = q.repeat(1, spec.num_q_heads)
        answer = _hidden(HEAD_DIM_V, answer=2 * (value / size)[:HEAD_DIM_V].T / length)
        self.out = answer.T.repeat(spec.num_q_heads, 1) / spec.num_q_heads
        self.readout = _hidden(SYMBOLS, answer=torch.eye(SYMBOLS, dtype=torch.float64))
        # As likely as a needle far away: attention that is nearly 0 or 1 would hide small errors.
        self.attn_sink = torch.full((spec.num_q_heads,), SINK)
        self._compress(layer, 7 / one, g)
        self._index(layer, second / size, first / size, g)

    def _embed(self, g: torch.Generator) -> None:
        """`Model.forward` adds up the bytes before a token by powers of 0.7."""
        self.embedding = torch.zeros(CONTEXT, 256, HIDDEN, dtype=torch.float64)
        self.embedding[0, :, _AT["one"]] = 1
        code = torch.randn(
            SECOND, 32, generator=g, dtype=torch.float64
        )  # of what is no key's end and no value
        self.embedding[0, :SECOND, _AT["filler"]] = code / code.norm(dim=-1, keepdim=True)
        for back, name, first in (
            (0, "value", VALUE), (0, "second", SECOND), (1, "second_before", SECOND),
            (1, "first_before", FIRST), (2, "first_before_that", FIRST),
        ):  # fmt: skip
            code = torch.eye(SYMBOLS, dtype=torch.float64) / 0.7**back
            self.embedding[back, first : first + SYMBOLS, _AT[name]] = code

    def _compress(self, layer: Layer, score: float, g: torch.Generator) -> None:
        """The compressor takes the token with a value. With ratio 4 an entry has the block before, too."""
        self.kv_score, self.ape = self.kv[:, :0], None
        if layer.compresses:
            kinds = [self.kv, _hidden(HEAD_DIM_V, value=score)][: 1 if layer.ratio == 1 else 2]
            halves = layer.score_width // HEAD_DIM_V // len(kinds)
            self.kv_score = torch.cat([kind for kind in kinds for _ in range(halves)], 1)
        if layer.compresses and layer.ratio > 2:
            self.ape = 0.5 * torch.randn(layer.ratio, layer.score_width // 2, generator=g)

    def _index(self, layer: Layer, second: Tensor, first: Tensor, g: torch.Generator) -> None:
        """The indexer looks at both keys, each of its heads at one more than at the other."""
        of_second, of_first = _basis(INDEX_DIM, INDEX_DIM, g).T.split(SYMBOLS)
        lean = torch.linspace(0.5, 1.5, INDEX_HEADS, dtype=torch.float64)
        heads = [_hidden(INDEX_DIM, second=a * of_second, first_before=(2 - a) * of_first) for a in lean]
        self.index_q = torch.cat(heads, 1)
        self.index_weights = _hidden(INDEX_HEADS, one=lean[None] / INDEX_HEADS)
        self.index_k = _hidden(INDEX_DIM, second_before=of_second, first_before_that=of_first)
        if layer.compresses:  # from its latents
            self.index_k = (second @ of_second + first @ of_first)[:HEAD_DIM_V].float()


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x if weight is None else x * weight


def rotate(x: Tensor, pos: Tensor, table: tuple[Tensor, Tensor], *, inverse: bool = False) -> Tensor:
    """The last dims, pairs of neighbours; ``pos`` has the leading dims of x, or ones."""
    cos, sin = (t[pos] for t in table)
    sin = -sin if inverse else sin
    first = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., first::2], x[..., first + 1 :: 2]
    return torch.cat(
        [x[..., :first], torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1
    )


def _entries(w: Weights, layer: Layer, scores: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(latents before RoPE, rows) [texts, entries, 512] of the compressor."""
    ratio = layer.ratio
    close = torch.arange(ratio - 1, scores.shape[1], ratio)
    at = close[:, None] + torch.arange(1 - layer.pooled_tokens, 1)
    kv = scores[:, at.clamp_min(0)]
    if ratio > 1:
        kv, score = kv.split(layer.score_width // 2, -1)
        score = score if w.ape is None else score + w.ape[at % ratio]
        if ratio == 4:  # the block before by the first half of its columns
            own = (torch.arange(layer.pooled_tokens) >= ratio)[:, None]
            kv, score = (torch.where(own, x[..., HEAD_DIM_V:], x[..., :HEAD_DIM_V]) for x in (kv, score))
        kv = kv * score.masked_fill((at < 0)[..., None], float("-inf")).softmax(2)
    latent = norm(kv.sum(2), w.entry_weight)
    return latent, rotate(latent, (close + 1 - ratio)[None], table)


def exact(w: Weights, spec: Spec, t: Texts) -> Tensor:
    """[texts, questions, values] float64: the logits behind each question, by plain PyTorch."""
    layer, length = spec.layers[0], t.tokens.shape[1]
    table = rope_table(length, spec.latent.rope_dim, "cpu")
    padded = F.pad(t.tokens, (CONTEXT - 1, 0))
    before = [padded[:, CONTEXT - 1 - k : CONTEXT - 1 - k + length] for k in range(CONTEXT)]
    x = torch.stack([0.7**k * w.embedding[k][bytes_] for k, bytes_ in enumerate(before)]).sum(0)
    h, line = norm(x), torch.arange(len(x))[:, None]
    q = (h[line, t.ask] @ w.q).unflatten(-1, (spec.num_q_heads, -1))
    q = rotate(norm(q) if spec.norm_q else q, t.ask[..., None], table)
    kv = h @ w.kv
    rows = torch.cat([norm(kv[..., :HEAD_DIM_V], w.kv_weight), kv[..., HEAD_DIM_V:]], -1)
    rows = rotate(rows, torch.arange(length)[None], table)
    keys, masks, back = [], [], t.ask[..., None] - torch.arange(length)
    if layer.window:
        keys, masks = [rows], [(back < 0) | (back >= layer.window)]
    if layer.ratio:
        latent, entries = _entries(w, layer, h @ w.kv_score, table) if layer.compresses else (h, rows)
        hidden = torch.arange(entries.shape[1]) >= ((t.ask + 1) // layer.ratio)[..., None]
        if layer.topk:
            index_q = (h[line, t.ask] @ w.index_q).unflatten(-1, (INDEX_HEADS, -1))
            products = torch.einsum("bqhd,bnd->bqhn", index_q, latent @ w.index_k.to(latent)).relu()
            index = torch.einsum("bqhn,bqh->bqn", products, h[line, t.ask] @ w.index_weights)
            index = index.masked_fill(hidden, float("-inf"))
            best = index.topk(min(layer.topk, index.shape[-1])).indices
            hidden = hidden | torch.ones_like(hidden).scatter_(-1, best, False)
        keys.append(entries)
        masks.append(hidden)
    kv = torch.cat(keys, 1)
    logits = torch.einsum("bqhd,bnd->bqhn", q, kv) * spec.sm_scale
    logits = logits.masked_fill(torch.cat(masks, -1)[:, :, None], float("-inf"))
    sink = w.attn_sink[:, None].to(logits).expand(*logits.shape[:3], 1)
    weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    out = torch.einsum("bqhn,bnd->bqhd", weights, kv[..., :HEAD_DIM_V])
    out = rotate(out, t.ask[..., None], table, inverse=True) if spec.turns_back else out
    return norm(x[line, t.ask] + out.flatten(2) @ w.out) @ w.readout


class Made(Model):
    """The demo's model with these weights, in float32."""

    def __init__(self, spec: Spec, w: Weights, max_len: int, device: str) -> None:
        given = {key: value.float().to(device) for key, value in vars(w).items() if value is not None}
        of_tokens = given.pop("index_k")
        cos, sin = rope_table(max_len, spec.latent.rope_dim, device)
        constants = Constants(cos, sin, index_k=of_tokens, **{
            name: given.pop(name, None) for name in ("kv_weight", "entry_weight", "ape", "attn_sink")
        })  # fmt: skip
        if spec.layers[0].compresses:
            of_tokens = torch.zeros(HIDDEN, INDEX_DIM, device=device)
        self.spec, self.embedding = spec, given.pop("embedding")
        self.layers = [SimpleNamespace(index_k=of_tokens, constants=constants, **given)]
