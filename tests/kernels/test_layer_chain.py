"""A layer of V4 between its projections: prologue, compressor, indexer, attention and epilogue on these ops.

Each step against float64 on the data that the test kept; on a GPU the whole layer in one CUDA graph.
"""

import pytest
import torch
from norm_rope_cases import rope_tables

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS, index_reference, reference

LAYOUT, PAGE_SIZE, EPS, HEADS, RATIO, WINDOW = KV_LAYOUTS["dsv4"], 64, 1e-6, 8, 4, 128
INDEX, INDEX_HEADS, TOPK, ENTRY_PAGE = INDEX_LAYOUTS["index_fp8"], 8, 24, 16
ENTRY_PAGES = [2, 0, 3, 1]
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
        self.cache = LAYOUT.empty(MAX_LEN // PAGE_SIZE, PAGE_SIZE, device).zero_()
        self.entries = LAYOUT.empty(len(ENTRY_PAGES), ENTRY_PAGE, device).zero_()
        self.index = INDEX.empty(len(ENTRY_PAGES), ENTRY_PAGE, device).fill_(0xFF)
        self.index_k = torch.randn(512, 128, device=device) / 512**0.5
        self.latent = torch.full((MAX_LEN, 512), float("nan"), dtype=torch.bfloat16, device=device)
        self.state = torch.full((1, 8 + 4, 2048), float("nan"), device=device)

    def step(self, x):
        """``x``: q, kv, kv_score, the indexer's q and weights, positions, slots of entries and window."""
        q = mla_fp8.qk_norm_rope_insert(
            x["q"], x["kv"], self.weight, self.cos, self.sin, x["positions"], x["positions"], self.cache,
            layout=LAYOUT, page_size=PAGE_SIZE, eps=EPS, norm_q=True,
        )  # fmt: skip
        latent = self.latent[: len(q)]
        mla_fp8.compress_kv(
            x["kv_score"], x["starts"], x["start_pos"], self.state, x["state_slots"], self.ape,
            self.entry_weight, self.cos, self.sin, x["entry_slots"], self.entries,
            ratio=RATIO, layout=LAYOUT, page_size=ENTRY_PAGE, eps=EPS, out_latent=latent,
        )  # fmt: skip
        keys = (latent.float() @ self.index_k).bfloat16()  # what no token closes has no slot
        mla_fp8.quantize_index_k(keys, x["key_slots"], self.index, layout=INDEX, page_size=ENTRY_PAGE)
        chosen, selected, lens = mla_fp8.index_topk(
            x["index_q"].view(torch.float8_e4m3fn), x["index_weights"], self.index, x["entry_pages"],
            x["seq_lens"], layout=INDEX, page_size=ENTRY_PAGE, topk=TOPK, query_start_loc=x["starts"],
            compress_ratio=RATIO,
        )  # fmt: skip
        slots, _ = mla_fp8.topk_to_slots(chosen, x["entry_pages"], page_size=ENTRY_PAGE, next_n=len(q))
        out, _ = mla_fp8.sparse_decode(
            q, self.cache, x["window"], layout=LAYOUT, page_size=PAGE_SIZE, sm_scale=SM_SCALE,
            attn_sink=self.sink, extra_kv_cache=self.entries, extra_indices=selected,
            extra_topk_length=lens, extra_page_size=ENTRY_PAGE, backend="native",
        )  # fmt: skip
        codes, scale = mla_fp8.inverse_rope_quantize(out, self.cos, self.sin, x["positions"], num_groups=1)
        return q, out, chosen, selected, slots, codes, scale


def inputs_of(tokens, first, n, device):
    """Of tokens first .. first + n - 1; `tokens` has q, kv and kv_score of all."""
    positions = torch.arange(first, first + n, device=device)
    seen = torch.arange(WINDOW, device=device) + positions[:, None] - WINDOW + 1
    ints = {
        "starts": [0, n], "start_pos": [first], "state_slots": [0], "seq_lens": [first + n],
        "entry_pages": [ENTRY_PAGES],
    }  # fmt: skip
    pages = torch.tensor(ENTRY_PAGES, device=device)
    entry = positions // RATIO
    slots = pages[entry // ENTRY_PAGE] * ENTRY_PAGE + entry % ENTRY_PAGE
    return {
        **{name: x[first : first + n].clone() for name, x in tokens.items()},
        "positions": positions,
        "entry_slots": slots,
        "key_slots": torch.where((positions + 1) % RATIO == 0, slots, -1),
        "window": seen.where(seen >= 0, -1).int(),
        **{name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in ints.items()},
    }


def random_tokens(device, n=MAX_LEN):
    return {
        "q": torch.randn(n, HEADS, 512, device=device).bfloat16(),
        "kv": torch.randn(n, 512, device=device).bfloat16(),
        "kv_score": torch.randn(n, 2048, device=device),
        "index_q": torch.randn(n, INDEX_HEADS, 128, device=device).to(torch.float8_e4m3fn).view(torch.uint8),
        "index_weights": torch.randn(n, INDEX_HEADS, device=device),
    }


def exact_steps(layer, tokens, chosen):
    """q, rows, entries, attention to what was chosen and its output rotated back, all in float64."""
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
    scopes = [(rows, inputs_of(tokens, 0, MAX_LEN, cos.device)["window"], None), (entries, chosen, None)]
    out, _, _ = reference.sparse_attention(q, scopes, sm_scale=SM_SCALE, attn_sink=layer.sink)
    return q, rows, entries, out, turn64(out, cos, sin, -1)


def assert_best(layer, tokens, chosen):
    """No entry is left out that is better than one that was taken, by more than sums may err."""
    values, scales = index_reference.index_keys(layer.index, INDEX, ENTRY_PAGE)
    pages = torch.tensor(ENTRY_PAGES, device=chosen.device)
    at = (pages[:, None] * ENTRY_PAGE + torch.arange(ENTRY_PAGE, device=chosen.device)).flatten()
    q = tokens["index_q"].view(torch.float8_e4m3fn)
    logits = index_reference.logits_of(q, tokens["index_weights"], values[at], scales[at], None)
    seen = (torch.arange(MAX_LEN, device=at.device)[:, None] + 1) // RATIO
    past = torch.arange(MAX_LEN // RATIO, device=at.device) < seen
    taken = torch.zeros(len(q), len(at) + 1, dtype=torch.bool, device=at.device)
    taken = taken.scatter(1, chosen.long().where(chosen >= 0, len(at)), True)[:, :-1]
    assert (taken & ~past).sum() == 0 and torch.equal(taken.sum(1), seen[:, 0].clamp_max(TOPK))
    least = logits.masked_fill(~taken, torch.inf).amin(1)
    most = logits.masked_fill(taken | ~past, -torch.inf).amax(1)
    assert (most <= least + 2e-3 * logits.masked_fill(~past, 0).abs().amax(1)).all()


def assert_near(got, want, error):
    assert (got.double() - want).norm() <= error * want.norm()


@pytest.mark.parametrize("steps", [[256], [100, 1, 1, 5, 149], [1] * 16 + [240]], ids=len)
def test_each_step_is_near_float64_and_no_step_knows_how_the_tokens_came(steps, device):
    layer, tokens = Layer(device), random_tokens(device)
    results, first = [], 0
    for n in steps:
        results.append(layer.step(inputs_of(tokens, first, n, device)))
        first += n
    whole = [
        torch.cat([y.float() if y.dtype.itemsize == 1 else y for y in x]) for x in zip(*results, strict=True)
    ]
    q, out, chosen, selected, slots, codes, scale = whole
    assert torch.equal(selected, slots)
    assert_best(layer, tokens, chosen)
    want_q, rows, entries, want_out, back = exact_steps(layer, tokens, chosen)
    assert_near(q, want_q, 3e-3)
    at = torch.arange(MAX_LEN, device=device)
    stored = mla_fp8.dequantize_kv(layer.cache, at, layout=LAYOUT, page_size=PAGE_SIZE)
    assert_near(stored, rows, 3e-2)
    at = inputs_of(tokens, 0, MAX_LEN, device)["entry_slots"][::RATIO].contiguous()
    stored = mla_fp8.dequantize_kv(layer.entries, at, layout=LAYOUT, page_size=ENTRY_PAGE)
    assert_near(stored, entries, 3e-2)
    assert_near(out, want_out, 4e-2)
    projected = codes.view(MAX_LEN, -1, 128) * scale.view(MAX_LEN, -1, 1)
    assert_near(projected.view(back.shape), back, 6e-2)


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
def test_a_whole_layer_in_a_cuda_graph():
    tokens = random_tokens("cuda")
    eager, graphed = Layer("cuda"), Layer("cuda")
    for name, x in vars(eager).items():
        if isinstance(x, torch.Tensor):
            getattr(graphed, name).copy_(x)
    for layer in (eager, graphed):
        layer.step(inputs_of(tokens, 0, 100, "cuda"))
    static = inputs_of(tokens, 100, 4, "cuda")
    kept = {name: getattr(graphed, name).clone() for name in ("cache", "entries", "index", "state")}
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
