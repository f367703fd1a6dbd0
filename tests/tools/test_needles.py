"""The demo's layers, all their ops, with weights that answer needles: answers are lost when accuracy is.

What is right is known, and the logits behind each question are compared with plain PyTorch in float64. Then
each op is broken a little, and the same judgement must see it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import needles
import pytest
import torch
from torch import Tensor

from mla_fp8.prefill import STRATEGIES, SparsePrefillChunkCache
from mla_fp8.tools.demo import layer as ops
from mla_fp8.tools.demo.teacher import FLASH_MLA_LAYOUTS
from mla_fp8.tools.demo.workload import Workload

TEXTS, CHUNK, DECODED = 2, 224, 24
# Error of the logits, relative to their size, that a format may cost: a fifth more than it does on a CPU.
COST = {
    "bf16": 0.0031, "dsv4": 0.017, "dsv32": 0.022, "dsv41": 0.023, "fp8_e4m3": 0.025, "dsv41_fp4": 0.066,
}  # fmt: skip
CASES = [(name, layout) for name, spec in needles.SPECS.items() for layout in spec.layouts]


@dataclass(frozen=True)
class Answers:
    right: float  # share of the questions
    error: float  # of the logits, relative

    def good(self, layout: str) -> bool:
        rows = layout.rsplit("+", maxsplit=1)[-1].removesuffix("_fnuz").removesuffix("_512")
        return self.right == 1 and self.error <= COST[rows]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Waking the other threads would take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def questions(name: str) -> tuple[needles.Weights, needles.Texts, Tensor]:
    spec = needles.SPECS[name]
    weights, texts = needles.Weights(spec), needles.texts(spec.layers[0], TEXTS, seed=0)
    return weights, texts, needles.exact(weights, spec, texts)


@torch.inference_mode()
def answer(name: str, layout: str, device: str) -> Answers:
    """Prompts in chunks, their ends token by token; neighbours in turn by all strategies and both calls."""
    spec, (weights, t, exact) = needles.SPECS[name], questions(name)
    texts = [bytes(line.tolist()) for line in t.tokens]
    prompts = [len(text) - DECODED - 8 * r for r, text in enumerate(texts)]
    workload = Workload(spec, texts, prompts, CHUNK, 0, device)
    model, pages = needles.Made(spec, weights, workload.max_len, device), workload.pages()
    workspace, (layer,) = workload.workspace(), workload.layer_ops(layout, pages, model)
    logits = torch.full((*t.tokens.shape, needles.SYMBOLS), float("nan"), device=device)
    readout = weights.readout.float().to(device)
    for phase, batch in workload.batches():
        pages.advance(batch)
        chunk = ops.new_chunk(batch, pages, workspace) if phase == "prefill" else None

        def attend(_: int, x: ops.Projected, batch=batch, chunk=chunk) -> Tensor:
            prepared = layer.prepare(x, batch)
            if chunk:
                outs = [layer.prefill(prepared, chunk, strategy) for strategy in STRATEGIES]
            else:
                outs = [layer.decode(prepared, batch)]
                if layout in FLASH_MLA_LAYOUTS:
                    outs.append(layer.decode_like_flash_mla(prepared, batch))
            tokens = torch.arange(len(x.q), device=device)
            return layer.epilogue(torch.stack(outs)[tokens % len(outs), tokens], batch)

        logits[batch.request, batch.pos] = model.forward(batch, attend) @ readout
    found = logits.cpu().double()[torch.arange(TEXTS)[:, None], t.ask]
    return Answers(
        right=float((found.argmax(-1) == t.answer).double().mean()),
        error=float((found - exact).norm() / exact.norm()),
    )


@pytest.mark.parametrize("name", needles.SPECS)
def test_exact_attention_answers_every_question(name: str) -> None:
    _, texts, exact = questions(name)
    assert torch.equal(exact.argmax(-1), texts.answer)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_question_is_answered_from_every_layout(name: str, layout: str, device: str) -> None:
    found = answer(name, layout, device)
    assert found.good(layout), found


Op = Callable[..., object]


def given(op: Op, **changes: Callable[[object], object]) -> Op:
    """The op with some of its keywords changed."""
    return lambda *args, **options: op(*args, **options | {k: f(options[k]) for k, f in changes.items()})


def one_argument(op: Op, at: int, change: Callable[[Tensor], Tensor]) -> Op:
    return lambda *args, **options: op(*args[:at], change(args[at]), *args[at + 1 :], **options)


def doubled_scales(insert: Op) -> Op:
    """One tile of each row has twice its scale."""

    def broken(*args, layout, page_size, **options):
        result, slots = insert(*args, layout=layout, page_size=page_size, **options), args[6]
        _, scale, _ = layout.views(args[7], page_size)
        at = slots // page_size, slots % page_size
        if scale.dtype == torch.float32:
            scale[(*at, 1)] *= 2
        else:
            scale.view(torch.uint8)[(*at, 1)] += 1
        return result

    return broken


def queries_of_the_next_position(insert: Op) -> Op:
    def broken(*args, **options):
        late = one_argument(insert, 5, lambda positions: positions + 1)(*args, **options)
        insert(*args, **options)
        return late

    return broken


def slightly(scale: float) -> float:
    return 1.01 * scale


def none(_: object) -> None:
    return None


# What is broken, in which layer and layout it must be seen, the op, and how.
FAULTS: dict[str, tuple[str, str, str, Callable[[Op], Op]]] = {
    "a scale of the window's rows": ("v4_window", "dsv4", "qk_norm_rope_insert", doubled_scales),
    "a scale of V3.2's rows": ("v32", "dsv32", "qk_norm_rope_insert", doubled_scales),
    "RoPE of queries": ("v4_window", "bf16_512", "qk_norm_rope_insert", queries_of_the_next_position),
    "RoPE of queries, V3.2": ("v32", "bf16", "qk_norm_rope_insert", queries_of_the_next_position),
    "the norm of queries": (
        "v4_window", "bf16_512", "qk_norm_rope_insert", lambda op: given(op, norm_q=lambda old: not old),
    ),
    "the norm's weight": (
        "v4_window", "bf16_512", "qk_norm_rope_insert", lambda op: one_argument(op, 2, lambda w: w * 0 + 1),
    ),
    "the compressor's positional part": (
        "v4_4", "bf16_512", "compress_kv", lambda op: one_argument(op, 5, lambda ape: 0 * ape),
    ),
    "the compressor's weight": (
        "v4_128", "bf16_512", "compress_kv", lambda op: one_argument(op, 6, lambda w: w * 0 + 1),
    ),
    "the compressor's RoPE": (
        "v41_2", "bf16_512", "compress_kv", lambda op: one_argument(op, 8, lambda sin: -sin),
    ),
    "the compressor's slots": (
        "v41_1", "bf16_512", "compress_kv", lambda op: one_argument(op, 9, lambda slots: slots.roll(1)),
    ),
    "index keys": ("v32", "bf16", "quantize_index_k", lambda op: one_argument(op, 0, lambda k: -k)),
    "where index keys are": (
        "v4_4", "bf16_512", "quantize_index_k", lambda op: one_argument(op, 1, lambda slots: slots.roll(1)),
    ),
    "the indexer's queries": (
        "v41_2", "bf16_512", "index_topk", lambda op: one_argument(op, 0, lambda q: q.roll(1, 0)),
    ),
    "the indexer's lengths": (
        "v41_1", "bf16_512", "index_topk", lambda op: one_argument(op, 4, lambda lens: lens // 2),
    ),
    "slots of entries": (
        "v32", "bf16", "topk_to_slots", lambda op: one_argument(op, 1, lambda pages: pages.roll(1, 1)),
    ),
    "the scale of logits in decode": (
        "v4_4", "bf16_512", "sparse_decode", lambda op: given(op, sm_scale=slightly),
    ),
    "the sink in decode": ("v4_128", "bf16_512", "sparse_decode", lambda op: given(op, attn_sink=none)),
    "the second cache in decode": (
        "v4_4", "bf16_512", "sparse_decode", lambda op: given(op, extra_indices=lambda x: 0 * x - 1),
    ),
    "the scale of logits in FlashMLA's call": (
        "v4_4", "dsv4", "flash_mla_with_kvcache", lambda op: given(op, softmax_scale=lambda x: 1.2 * x),
    ),
    "the output's rotation": ("v4_window", "bf16_512", "inverse_rope", lambda op: lambda o, *args, out: o),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_op_that_loses_accuracy_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, layout, op, broken = FAULTS[fault]
    monkeypatch.setattr(ops, op, broken(getattr(ops, op)))
    found = answer(name, layout, "cpu")
    assert not found.good(layout), found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", needles.SPECS)
def test_each_strategy_that_loses_accuracy_is_seen(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, layout = SparsePrefillChunkCache.attend, needles.SPECS[name].layouts[-1]

    def broken(*args, **options):
        options["sm_scale"] *= 1.05 if options["strategy"] == strategy else 1
        return attend(*args, **options)

    monkeypatch.setattr(SparsePrefillChunkCache, "attend", broken)
    found = answer(name, layout, "cpu")
    assert not found.good(layout), found
