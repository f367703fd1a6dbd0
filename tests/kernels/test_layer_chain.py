"""A layer of V4 from projection to projection on these ops: prologue, compressor, attention, epilogue.

Each step against float64 on the data that the test kept; on a GPU the whole layer in one CUDA graph.
"""

import pytest
import torch
from norm_rope_cases import rope_tables

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

LAYOUT, PAGE_SIZE, EPS, HEADS, RATIO, WINDOW = KV_LAYOUTS["dsv4"], 64, 1e-6, 8, 4, 128
MAX_LEN = 256
SM_SCALE = 512**-0.5


def norm64(x):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turn64(x, cos, sin, sign=1):
    """x [T, ..., 512] float64; cos, sin [T, 32]."""
    shape = (len(x), *[1] * (x.dim() - 2), 32)
    c, s = cos.double().view(shape), sign * sin.double().view(shape)
    a, b = x[..., 448::2], x[..., 449::2]
    return torch.cat([x[..., :448], torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)], -1)


class Layer:
    """The buffers of one request, and a step of n tokens of it."""

    def __init__(self, device):
        self.device = device
        self.cos, self.sin = rope_tables(device, max_pos=MAX_LEN)
        self.weight, self.entry_weight = (1 + torch.randn(2, 512, device=device) / 8).bfloat16()
        self.ape = torch.randn(RATIO, 1024, device=device)
        self.sink = torch.randn(HEADS, device=device)
        self.cache, self.entries = (
            LAYOUT.empty(MAX_LEN // PAGE_SIZE, PAGE_SIZE, device).zero_() for _ in "ab"
        )
        self.state = torch.full((1, 8 + 4, 2048), float("nan"), device=device)

    def step(self, x):
        """``x``: q, kv, kv_score, positions, rows of entries, indices of both caches."""
        q = mla_fp8.qk_norm_rope_insert(
            x["q"], x["kv"], self.weight, self.cos, self.sin, x["positions"], x["positions"], self.cache,
            layout=LAYOUT, page_size=PAGE_SIZE, eps=EPS, norm_q=True,
        )  # fmt: skip
        mla_fp8.compress_kv(
            x["kv_score"], x["starts"], x["start_pos"], self.state, x["state_slots"], self.ape,
            self.entry_weight, self.cos, self.sin, x["entry_slots"], self.entries,
            ratio=RATIO, layout=LAYOUT, page_size=PAGE_SIZE, eps=EPS,
        )  # fmt: skip
        out, _ = mla_fp8.sparse_decode(
            q, self.cache, x["window"], layout=LAYOUT, page_size=PAGE_SIZE, sm_scale=SM_SCALE,
            attn_sink=self.sink, extra_kv_cache=self.entries, extra_indices=x["selected"],
            extra_page_size=PAGE_SIZE, backend="native",
        )  # fmt: skip
        return q, out, *mla_fp8.inverse_rope_quantize(out, self.cos, self.sin, x["positions"], num_groups=1)


def inputs_of(tokens, first, n, device):
    """Of tokens first .. first + n - 1; `tokens` has q, kv and kv_score of all."""
    positions = torch.arange(first, first + n, device=device)
    seen = torch.arange(WINDOW, device=device) + positions[:, None] - WINDOW + 1
    entries = torch.arange(MAX_LEN // RATIO, device=device).expand(n, -1)
    ints = {"starts": [0, n], "start_pos": [first], "state_slots": [0]}
    return {
        **{name: x[first : first + n].clone() for name, x in tokens.items()},
        "positions": positions,
        "entry_slots": positions // RATIO,
        "window": seen.where(seen >= 0, -1).int(),
        "selected": entries.where(entries < ((positions + 1) // RATIO)[:, None], -1).int(),
        **{name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in ints.items()},
    }


def random_tokens(device, n=MAX_LEN):
    return {
        "q": torch.randn(n, HEADS, 512, device=device).bfloat16(),
        "kv": torch.randn(n, 512, device=device).bfloat16(),
        "kv_score": torch.randn(n, 2048, device=device),
    }


def exact_steps(layer, tokens):
    """q, rows, entries, attention and its output rotated back, all in float64."""
    cos, sin = layer.cos.double(), layer.sin.double()
    q = turn64(norm64(tokens["q"].double()), cos, sin)
    rows = turn64(norm64(tokens["kv"].double()) * layer.weight.double(), cos, sin)
    x, ape, entries = tokens["kv_score"].double(), layer.ape.double(), []
    for last in range(RATIO - 1, MAX_LEN, RATIO):
        own, before = x[last + 1 - RATIO : last + 1], x[max(0, last + 1 - 2 * RATIO) : last + 1 - RATIO]
        values = torch.cat([before[:, :512], own[:, 512:1024]])
        scores = torch.cat([before[:, 1024:1536] + ape[: len(before), :512], own[:, 1536:] + ape[:, 512:]])
        entries.append((scores.softmax(0) * values).sum(0))
    first = torch.arange(0, MAX_LEN, RATIO, device=cos.device)
    entries = turn64(norm64(torch.stack(entries)) * layer.entry_weight.double(), cos[first], sin[first])
    lists = inputs_of(tokens, 0, MAX_LEN, cos.device)
    scopes = [(rows, lists["window"], None), (entries, lists["selected"], None)]
    out, _, _ = reference.sparse_attention(q, scopes, sm_scale=SM_SCALE, attn_sink=layer.sink)
    return q, rows, entries, out, turn64(out, cos, sin, -1)


def assert_near(got, want, error):
    assert (got.double() - want).norm() <= error * want.norm()


@pytest.mark.parametrize("steps", [[256], [100, 1, 1, 5, 149], [1] * 16 + [240]], ids=len)
def test_each_step_is_near_float64_and_no_step_knows_how_the_tokens_came(steps, device):
    layer, tokens = Layer(device), random_tokens(device)
    results, first = [], 0
    for n in steps:
        results.append(layer.step(inputs_of(tokens, first, n, device)))
        first += n
    q, out, codes, scale = (torch.cat(x) if i < 2 else torch.cat([y.float() for y in x])
                            for i, x in enumerate(zip(*results, strict=True)))  # fmt: skip
    want_q, rows, entries, want_out, back = exact_steps(layer, tokens)
    assert_near(q, want_q, 3e-3)
    slots = torch.arange(MAX_LEN, device=device)
    options = {"layout": LAYOUT, "page_size": PAGE_SIZE}
    assert_near(mla_fp8.dequantize_kv(layer.cache, slots, **options), rows, 3e-2)
    assert_near(mla_fp8.dequantize_kv(layer.entries, slots[: MAX_LEN // RATIO], **options), entries, 3e-2)
    assert_near(out, want_out, 4e-2)
    projected = codes.view(MAX_LEN, -1, 128) * scale.view(MAX_LEN, -1, 1)
    assert_near(projected.view(back.shape), back, 6e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_whole_layer_in_a_cuda_graph():
    tokens = random_tokens("cuda")
    eager, graphed = Layer("cuda"), Layer("cuda")
    for name, x in vars(eager).items():
        if isinstance(x, torch.Tensor):
            getattr(graphed, name).copy_(x)
    for layer in (eager, graphed):
        layer.step(inputs_of(tokens, 0, 100, "cuda"))
    static = inputs_of(tokens, 100, 4, "cuda")
    kept = {name: getattr(graphed, name).clone() for name in ("cache", "entries", "state")}
    graphed.step(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = graphed.step(static)
    for name, x in kept.items():
        getattr(graphed, name).copy_(x)
    for first in range(100, MAX_LEN, 4):
        fresh = inputs_of(tokens, first, 4, "cuda")
        for name, x in static.items():
            x.copy_(fresh[name])
        graph.replay()
        for got, want in zip(results, eager.step(fresh), strict=True):
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    for name in kept:
        assert torch.equal(*(getattr(x, name).view(torch.uint8) for x in (eager, graphed)))
