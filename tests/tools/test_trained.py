"""examples/trained: texts have one answer, training goes on where it stopped, engines know the names."""

import argparse
import csv
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/trained"))
import deepseek
import evaluate
import tasks
import train

import mla_fp8

CONFIG = replace(train.TINY_CONFIG, hidden=32, heads=1, q_rank=32, mlp=32, index_heads=2, topk=24)
PHASES = tuple(train.Phase(what, 96, 2, 2, 4, 1e-2, what=what) for what in ("dense", "indexer", "sparse"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(train, "TINY_CONFIG", CONFIG)
    monkeypatch.setattr(train, "TINY", PHASES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def training(out: Path, seconds: float | None = None) -> train.Training:
    return train.Training(argparse.Namespace(out=out, device="cpu", seed=0, tiny=True, seconds=seconds))


@pytest.mark.parametrize("values", [tasks.SHORT, tasks.LONG])
@pytest.mark.parametrize("at_end", [0, 3])
def test_a_question_has_one_answer_which_was_told_before(values: int, at_end: int) -> None:
    t = tasks.make(3, 512, 5, values, 8192, torch.Generator().manual_seed(0), at_end=at_end)
    assert len(t.answers) == 3 * (at_end or 5) * values
    for text, at in t.answers.tolist():
        line = t.tokens[text].tolist()
        first, second = (i for i, token in enumerate(line) if token == line[at])
        assert first < second == at and line[first - 1] == line[at - 1]


def test_prompts_end_with_a_key_and_answers_follow_it_in_the_text() -> None:
    asked, answers = evaluate.prompts(2048, 20, 8192)
    assert len(asked) == len(answers) == 20
    for prompt, answer in zip(asked, answers, strict=True):
        assert prompt[-2] == tasks.QUESTION and prompt.count(prompt[-1]) == 2
        where = prompt.index(prompt[-1])
        assert prompt[where - 1] == tasks.NEEDLE and prompt[where + 1 : where + 5] == answer
    assert asked[0][:-2] == asked[15][:-2] != asked[16][:-2]  # of one text, which is cached once


def test_scores_are_paired_with_stock_and_exact() -> None:
    def result(name: str, right: list[int], more: float = 0) -> dict:
        logprobs = [x - more for x in (-1.0, -2.0, -3.0, -4.0)][: len(right)]
        return {"name": name, "right": {"2048": [bool(x) for x in right]}, "logprob": {"2048": logprobs},
                "agreement": {"2048": [1.0, 0.5]}, "between_ms": 1.25}  # fmt: skip

    found = [
        result("stock_fp8", [1, 1, 0, 0], 0.25), result("ours_fp8_drafts", [1, 0, 0, 1]),
        result("stock_bf16", [0, 0, 0, 0]), result("exact_bf16", [1, 1], -0.125),
        result("ours_fp8_drafts", [0]) | {"between_ms": 1.5},
    ]  # fmt: skip
    scores, speed, again = (row for row in evaluate.rows(found) if row["engine"] == "ours_fp8_drafts")
    assert scores == {
        "engine": "ours_fp8_drafts", "length": "2048", "asked": 4, "right": 2,
        "stock_asked": 4, "stock_more": 1, "stock_fewer": 1, "stock_away": "2.50e-01",
        "exact_asked": 2, "exact_more": 0, "exact_fewer": 1, "exact_away": "1.25e-01",
        "logprob": "-2.5", "agreement": "5.00e-01",
    }  # fmt: skip
    assert speed == {"engine": "ours_fp8_drafts", "between_ms": "1.25"}
    assert again == {"engine": "ours_fp8_drafts", "between_ms": "1.5"}  # a repeated run


def test_engines_take_turns_in_rounds_and_nobody_waits_for_who_ended(tmp_path: Path) -> None:
    order: list[tuple[int, str]] = []
    (tmp_path / "ready.exact_bf16").touch()

    def engine(name: str) -> None:
        for round_ in range(3):
            with evaluate.turn(tmp_path, name, 3, round_):
                order.append((round_, name))

    engines = [threading.Thread(target=engine, args=(name,)) for name in ("stock_fp8", "ours_fp8")]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join(60)
    assert [round_ for round_, _ in order] == [0, 0, 1, 1, 2, 2]
    assert len(set(order)) == 6


def test_a_step_on_the_gpu_is_the_difference_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profiler:
        """A run of `new` tokens: a prompt of 5 kernels, then steps of a graph of 3 and a copy; 10 us each, of
        which 2 beside the one before.
        """

        def __init__(self, activities: list) -> None:
            pass

        def __enter__(self) -> "Profiler":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[SimpleNamespace]:
            ids = [-1 - i for i in range(5)] + [
                2 * i + (k == 3) for i in range(ran[-1] - 1) for k in range(4)
            ]
            gpu = torch.autograd.DeviceType.CUDA
            ranges = [SimpleNamespace(start=8.0 * at, end=8.0 * at + 10.0) for at in range(len(ids))]
            return [
                SimpleNamespace(id=i, time_range=time_range, device_type=gpu)
                for i, time_range in zip(ids, reversed(ranges), strict=True)
            ]

    ran: list[int] = []
    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(evaluate, "generate", lambda llm, batch, new: ran.append(new))
    assert evaluate.on_gpu(None, 4096) == {"gpu_ms": 0.032, "gpu_launches": 2.0}


def test_training_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    training(whole).run()
    one_step, left = train.Training.one_step, [7]

    def stops(self: train.Training, phase: train.Phase) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        one_step(self, phase)

    monkeypatch.setattr(train, "SAVE_SECONDS", 0)
    monkeypatch.setattr(train, "LOOK", 1)
    monkeypatch.setattr(train.Training, "one_step", stops)
    with pytest.raises(KeyboardInterrupt):
        training(parts).run()
    monkeypatch.setattr(train.Training, "one_step", one_step)
    training(parts).run()
    found = [torch.load(folder / "state.pt", weights_only=True)["model"] for folder in (whole, parts)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_phases_share_the_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(train.time, "time", lambda: now[0])
    monkeypatch.setattr(train, "LOOK", 1)

    def one_step(self: train.Training, phase: train.Phase) -> None:
        now[0] += 1

    monkeypatch.setattr(train.Training, "one_step", one_step)
    shares = ((PHASES[0], 0.5), (PHASES[1], 0.25), (PHASES[2], 1.0))
    phases = tuple(replace(phase, steps=1000, share=share) for phase, share in shares)
    monkeypatch.setattr(train, "TINY", phases)
    training(tmp_path, seconds=80).run()
    ended = json.loads((tmp_path / "training.json").read_text())
    assert [phase["steps"] for phase in ended] == [40, 10, 30]


def test_in_bf16_both_losses_of_sparse_steps_reach_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    monkeypatch.setattr(train.Training, "precision", lambda _: precision)
    t = training(tmp_path)
    t.phase = 2
    t.loss(PHASES[2]).backward()
    assert all(p.grad is not None and p.grad.any() for p in t.model.parameters())
    t.model.zero_grad()
    t.loss(PHASES[1]).backward()
    assert all((p.grad is not None) == (".indexer." in name) for name, p in t.model.named_parameters())


@torch.no_grad()
def test_half_of_the_first_heads_begin_with_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    m, seen = deepseek.Model(deepseek.Config(layers=1, heads=2, mlp=32, index_heads=1, max_length=256)), []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        deepseek.F, "scaled_dot_product_attention",
        lambda q, k, v, **options: seen.append((q, k)) or attend(q, k, v, **options),
    )  # fmt: skip
    m(torch.randint(4096, (1, 256)), torch.tensor([[0, 255]]))
    ((q, k),) = seen
    later = torch.ones(256, 256, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * 192**-0.5).masked_fill(later, float("-inf")).softmax(-1)[0]
    first, second = weights.diagonal(-1, 1, 2).mean(-1)
    assert first > 0.7 and second < 0.1


def test_a_phase_that_teaches_nothing_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = replace(PHASES[0], name="hopeless", enough=0.9)
    monkeypatch.setattr(train, "TINY", (PHASES[0], hopeless, *PHASES))
    with pytest.raises(SystemExit, match=r"not learnt in phase hopeless: 0\.\d+ right"):
        training(tmp_path).run()


def test_the_checkpoint_has_the_names_and_shapes_of_deepseek_v32(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file

    config = deepseek.Config()
    assert json.loads(config.as_json())["architectures"] == ["DeepseekV32ForCausalLM"]
    deepseek.save(deepseek.Model(CONFIG), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.self_attn"
    assert {name: tuple(x.shape) for name, x in state.items() if name.startswith(layer)} == {
        f"{layer}.q_a_proj.weight": (32, 32), f"{layer}.q_a_layernorm.weight": (32,),
        f"{layer}.q_b_proj.weight": (192, 32), f"{layer}.kv_a_proj_with_mqa.weight": (576, 32),
        f"{layer}.kv_a_layernorm.weight": (512,), f"{layer}.kv_b_proj.weight": (256, 512),
        f"{layer}.o_proj.weight": (32, 128), f"{layer}.indexer.wq_b.weight": (256, 32),
        f"{layer}.indexer.wk.weight": (128, 32), f"{layer}.indexer.k_norm.weight": (128,),
        f"{layer}.indexer.k_norm.bias": (128,), f"{layer}.indexer.weights_proj.weight": (2, 32),
    }  # fmt: skip
    assert all(x.dtype == torch.bfloat16 for x in state.values())


@torch.no_grad()
def test_sparse_attention_looks_at_the_best_keys_of_the_indexer_alone() -> None:
    torch.manual_seed(0)
    m = deepseek.Model(CONFIG)
    tokens, at = torch.randint(1024, (2, 64)), torch.tensor([[0, 63], [1, 40], [1, 20]])
    dense, sparse = (m(tokens, at, sparse=sparse)[0] for sparse in (False, True))
    torch.testing.assert_close(dense[2], sparse[2])  # it sees 21 tokens, fewer than are chosen
    assert not torch.allclose(dense[0], sparse[0], rtol=0.01)
    attention, x = m.model.layers[0].self_attn, torch.randn(1, 64, CONFIG.hidden)
    q_a = attention.q_a_layernorm(attention.q_a_proj(x))
    chosen = attention.chosen(x, q_a, m.angles[:64])[0, 0]
    rows = torch.arange(64)
    assert torch.equal(chosen.sum(-1), (rows + 1).clamp_max(CONFIG.topk))
    logits = attention.indexer(x, q_a, m.angles[:64], rows)[0]
    least = logits.masked_fill(~chosen, float("inf")).amin(-1)
    assert (logits.masked_fill(chosen, float("-inf")).amax(-1) <= least).all()


@torch.no_grad()
def test_the_layer_is_what_an_engine_computes_from_its_caches() -> None:
    """Attention over latents and the indexer's logits, by the ops, from what the checkpoint projects."""
    torch.manual_seed(0)
    layer = deepseek.Model(replace(CONFIG, heads=2)).bfloat16()
    attention, angles, n = layer.model.layers[0].self_attn, layer.angles[:48].float(), 48
    x = torch.randn(1, n, CONFIG.hidden).bfloat16()
    cos, sin, slots = angles.cos(), angles.sin(), torch.arange(n)
    cache = mla_fp8.KV_LAYOUTS["bf16"].empty(1, 64, "cpu")
    index_cache = mla_fp8.INDEX_LAYOUTS["index_fp8"].empty(1, 64, "cpu")
    rotated = {"index_neox": True, "index_rope_first": True}
    latent, k_pe = attention.kv_a_proj_with_mqa(x)[0].split([deepseek.LATENT, deepseek.ROPE], -1)
    mla_fp8.prepare_keys(
        latent, attention.kv_a_layernorm.weight, cos, sin, slots, slots, cache, k_pe,
        index_k=attention.indexer.wk(x)[0], index_k_weight=attention.indexer.k_norm.weight,
        index_k_bias=attention.indexer.k_norm.bias, index_cache=index_cache, layout="bf16", page_size=64,
        eps=deepseek.EPS, **rotated,
    )  # fmt: skip
    q_a = attention.q_a_layernorm(attention.q_a_proj(x))
    q_nope, q_pe = attention.q_b_proj(q_a)[0].unflatten(-1, (2, -1)).split([deepseek.NOPE, deepseek.ROPE], -1)
    heads = CONFIG.index_heads
    prepared = mla_fp8.prepare_queries(
        q_pe, attention.indexer.wq_b(q_a)[0].unflatten(-1, (heads, -1)), attention.indexer.weights_proj(x)[0],
        cos, sin, slots, weight_scale=deepseek.INDEX_DIM**-0.5, head_scale=heads**-0.5, **rotated,
    )  # fmt: skip
    of_keys, of_values = attention.kv_b_proj.weight.unflatten(0, (2, -1)).split(
        [deepseek.NOPE, deepseek.VALUE], 1
    )
    q = torch.cat([torch.einsum("nhd,hdl->nhl", q_nope, of_keys), prepared.q_pe], -1)
    seen = torch.where(slots <= slots[:, None], slots, -1).int()
    scale = (deepseek.NOPE + deepseek.ROPE) ** -0.5
    out, _ = mla_fp8.sparse_decode(q, cache, seen, layout="bf16", page_size=64, sm_scale=scale)
    out = attention.o_proj(torch.einsum("nhl,hdl->nhd", out, of_values).flatten(1))
    want, _ = attention(x, angles, sparse=False, rows=None)
    assert (out - want[0]).norm() < 0.02 * want.norm()

    logits = mla_fp8.index_logits(
        prepared.index_q, prepared.index_weights, index_cache, torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([n], dtype=torch.int32), layout="index_fp8", page_size=64, width=n, next_n=n,
    )  # fmt: skip
    wanted = attention.indexer(x, q_a, angles, slots)[0].float()
    past = slots <= slots[:, None]
    assert (logits.isneginf() == ~past).all()
    assert (logits - wanted)[past].norm() < 0.08 * wanted[past].norm()


def test_the_page_says_what_was_measured() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/guide/trained.md").read_text()
    with (root / "docs/data/trained.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pairs = [row[f"{other}_{what}"] for row in rows for other in evaluate.PAIRS for what in ("more", "fewer")]
    assert set(pairs) == {"", "0"} and "all differences are +0 -0" in page
