"""The demo at a size of seconds: its bounds hold, and they break when something is broken on purpose."""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fp8 import KV_LAYOUTS, layer_reference, reference
from mla_fp8.__main__ import main
from mla_fp8.prefill import tables
from mla_fp8.tools.demo import around, exact, hot, layer, run
from mla_fp8.tools.demo.model import EPS, MODELS, Constants, Layer, rope_table
from mla_fp8.tools.demo.pages import Batch, Pages
from mla_fp8.tools.demo.teacher import STEPS, LayerError, TeacherForced
from mla_fp8.tools.demo.workload import Workload

SMALL = ["--heads", "2", "--tokens", "280", "--chunk", "96", "--decode-steps", "2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny ops: waking the other threads would take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_workload(device: str = "cpu") -> Workload:
    """One layer with a window alone, one with entries too; one layout with scales and one without."""
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    workload = run.make_workload(parser.parse_args([*SMALL, "--device", device]))
    layers = workload.spec.layers[0], replace(workload.spec.layers[1], topk=16)
    spec = replace(workload.spec, layers=layers, layouts=("dsv4", "bf16_512"))
    return replace(workload, spec=spec)


def teacher_forced(workload: Workload) -> TeacherForced:
    teacher = TeacherForced(workload)
    teacher.run(lambda message: None)
    return teacher


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_tables_and_exit_status(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--all", "--model", model, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    verdict, tables = out.split("Chart: ")
    assert verdict.startswith("Passed: all bounds hold in ") and "VIOLATED" not in tables
    for layout in MODELS[model].layouts:
        assert f"\n  {layout:<19}layers err by " in verdict
        assert tables.count(f"{layout:<19}") == len(MODELS[model].layers) + 1


def test_two_layouts_are_shown_unasked_and_progress_ends_with_the_last(tmp_path, capsys) -> None:
    assert main(["demo", *SMALL, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Passed: all bounds hold in 4 layers x 2 layouts ")
    assert [out.count(f"\n  {layout:<19}layers err by ") for layout in MODELS["v4"].layouts] == [
        1,
        0,
        0,
        0,
        1,
    ]
    assert "fnuz" not in out
    *_, before, last = err.splitlines()
    steps = re.match(r"\[(\d+)/(\d+), \d+ s\] bf16_512 alone", last)
    assert steps and steps[1] == steps[2] and before.endswith("] dsv4 alone")


def test_a_violated_bound_is_the_first_thing_said_and_fails_the_run(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(LayerError, "ok", property(lambda error: error.max_error == 0.0))
    assert main(["demo", *SMALL, "--all", "--out", str(tmp_path)]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    failed = r"FAILED: 20 bounds do not hold in 4 layers x 5 layouts \(\d+ s\). 1 is the bound:"
    assert re.fullmatch(failed, first)
    assert second.startswith("  layer 0, dsv4: q 0.99")


def test_a_chart_that_cannot_be_written_costs_no_verdict(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "error_and_size.png").mkdir()
    assert main(["demo", *SMALL, "--out", str(tmp_path)]) == 0
    verdict, tables = capsys.readouterr().out.split("Chart: not drawn, ")
    assert verdict.startswith("Passed: all bounds hold in ")
    assert "error_and_size.png" in tables.splitlines()[0]


def test_bounds_hold_and_fp8_errs_more_than_bf16(device: str) -> None:
    errors = teacher_forced(small_workload(device=device)).errors
    assert all(error.ok for error in errors.values())
    for i in range(2):
        assert errors[i, "dsv4"].rms_error > 2 * errors[i, "bf16_512"].rms_error


def planted(monkeypatch: pytest.MonkeyPatch, op: str, bug: Callable[..., Any]) -> dict[int, LayerError]:
    """The errors of ``bf16_512``, which rounds least, by layer, with ``bug(op, ...)`` for ``op(...)``."""
    original = getattr(layer, op)
    monkeypatch.setattr(layer, op, lambda *args, **options: bug(original, *args, **options))
    found = teacher_forced(small_workload()).errors
    return {i: error for (i, layout), error in found.items() if layout == "bf16_512"}


def steps_violated(error: LayerError) -> set[str]:
    return {step for step, ratio in error.ratios.items() if not ratio <= 1.0}


def test_wrong_scale_violates_the_storage_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    original = layer.qk_norm_rope_insert

    def insert(*args: Any, **options: Any) -> torch.Tensor:
        q = original(*args, **options)
        if options["layout"].name == "dsv4":
            options["layout"].views(args[7], options["page_size"])[1].view(torch.uint8)[:, 0, :1] += 1
        return q

    monkeypatch.setattr(layer, "qk_norm_rope_insert", insert)
    errors = teacher_forced(small_workload()).errors
    assert "stored" in steps_violated(errors[0, "dsv4"])
    assert errors[0, "bf16_512"].ok  # it has no scales


def test_query_heads_without_their_norm_violate_the_bound_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = planted(monkeypatch, "qk_norm_rope_insert", lambda op, *args, norm_q, **options: op(
        *args, norm_q=not norm_q, **options))  # fmt: skip
    assert [steps_violated(error) for error in errors.values()] == [{"q"}, {"q"}]


def test_a_compressor_without_its_bias_violates_the_storage_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = planted(monkeypatch, "compress_kv", lambda op, *args, **options: op(
        *args[:5], torch.zeros_like(args[5]), *args[6:], **options))  # fmt: skip
    assert errors[0].ok and steps_violated(errors[1]) == {"stored"}


def test_a_state_that_is_lost_between_batches_violates_the_storage_bound(monkeypatch) -> None:
    def compress(op: Callable[..., None], *args: Any, **options: Any) -> None:
        op(*args, **options)
        args[3].zero_()

    errors = planted(monkeypatch, "compress_kv", compress)
    assert errors[0].ok and steps_violated(errors[1]) == {"stored"}


def test_entries_that_are_not_the_best_violate_the_bound_of_the_index(monkeypatch) -> None:
    errors = planted(monkeypatch, "index_topk", lambda op, q, weights, *args, **options: op(
        q, -weights, *args, **options))  # fmt: skip
    assert errors[0].ok and steps_violated(errors[1]) == {"index"}


def test_index_keys_at_other_slots_violate_the_storage_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = planted(monkeypatch, "quantize_index_k", lambda op, k, *args, **options: op(
        k.roll(1, 0), *args, **options))  # fmt: skip
    assert errors[0].ok and steps_violated(errors[1]) == {"stored"}


def test_another_position_violates_the_bound_of_the_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = planted(monkeypatch, "inverse_rope", lambda op, o, cos, sin, pos, **options: op(
        o, cos, sin, (pos - 1).clamp_min(0), **options))  # fmt: skip
    assert [steps_violated(error) for error in errors.values()] == [{"epilogue"}, {"epilogue"}]


def test_window_that_is_one_too_long_violates_the_attention_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    original = tables.combine_topk_swa_indices
    monkeypatch.setattr(
        tables,
        "combine_topk_swa_indices",
        lambda *args, **options: original(
            *args, **{**options, "window_size": options["window_size"] + (options["window_size"] > 0)}
        ),
    )
    errors = teacher_forced(small_workload()).errors
    assert steps_violated(errors[0, "bf16_512"]) == {"attention"}


def test_indices_of_another_request_violate_the_attention_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def roll(op: Callable[..., Any], *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        return tuple(x.roll(1, 0) for x in op(*args, **options))

    errors = planted(monkeypatch, "topk_to_slots", roll)
    assert errors[0].ok and steps_violated(errors[1]) == {"attention"}


def test_slots_are_those_that_the_indexer_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []

    def choose(op: Callable[..., Any], *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        found.append((chosen := op(*args, **options))[1])
        return tuple(chosen)

    def translate(op: Callable[..., Any], *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        slots, lens = op(*args, **options)
        while found:
            assert torch.equal(found.pop(), slots)
        return slots, lens

    original = layer.index_topk
    monkeypatch.setattr(layer, "index_topk", lambda *args, **options: choose(original, *args, **options))
    errors = planted(monkeypatch, "topk_to_slots", translate)
    assert not found and all(error.ok for error in errors.values())


def two_levels() -> Workload:
    """A layer that publishes blocks and two that choose in them, of a third of the entries."""
    workload = small_workload()
    layers = MODELS["v41"].layers[2:]
    publisher = replace(layers[0], topk=16, num_blocks=6)
    consumer = replace(layers[1], topk=16, source=0)
    spec = replace(MODELS["v41"], layers=(publisher, consumer, consumer), layouts=("dsv41", "bf16_512"))
    return replace(workload, spec=replace(spec, num_q_heads=2))


def errors_of_levels(monkeypatch: pytest.MonkeyPatch, op: str, bug: Callable[..., Any]) -> list[set[str]]:
    """Of each layer the steps that are violated with ``bug(op, ...)`` for ``op(...)``."""
    original = getattr(layer, op)
    monkeypatch.setattr(layer, op, lambda *args, **options: bug(original, *args, **options))
    found = teacher_forced(two_levels()).errors
    return [steps_violated(found[i, "bf16_512"]) for i in range(3)]


def test_layers_that_choose_in_blocks_hold_their_bounds_and_write_no_entries() -> None:
    teacher = teacher_forced(two_levels())
    assert all(error.ok for error in teacher.errors.values())
    published, *others = teacher._layers["dsv41"]
    assert all(x.entries is published.entries and x.index is published.index for x in others)
    assert published.num_bytes > others[0].num_bytes == published.swa.data.nbytes


def test_entries_outside_of_the_blocks_violate_the_bound_of_the_index(monkeypatch) -> None:
    steps = errors_of_levels(monkeypatch, "index_topk", lambda op, *args, candidate_blocks, **options: op(
        *args, **options))  # fmt: skip
    assert steps == [set(), {"index"}, {"index"}]


def test_blocks_that_are_not_the_best_violate_the_bound_of_the_index(monkeypatch) -> None:
    def publish(op: Callable[..., Any], *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        *chosen, blocks = op(*args, **options)
        first = torch.arange(blocks.shape[1]).int()
        return (*chosen, torch.where(blocks >= 0, first, -1))

    assert errors_of_levels(monkeypatch, "index_topk_blocks", publish) == [{"index"}, set(), set()]


def test_entries_of_another_layer_violate_the_attention_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = two_levels()
    before = layer.LayerOps.decode

    def decode(ops: layer.LayerOps, *args: Any) -> torch.Tensor:
        if ops.source:
            ops.entries = replace(ops.entries, data=ops.entries.data.roll(1, 0))
        return before(ops, *args)

    monkeypatch.setattr(layer.LayerOps, "decode", decode)
    found = teacher_forced(workload).errors
    assert ["attention" in steps_violated(found[i, "bf16_512"]) for i in range(3)] == [False, True, True]


def test_nan_is_not_ok() -> None:
    assert LayerError().ok
    for step in STEPS:
        assert not LayerError(ratios=dict.fromkeys(STEPS, 0.0) | {step: float("nan")}).ok


def test_exact_attention_is_the_specification(device: str) -> None:
    q = torch.randn(9, 3, 512, device=device).bfloat16()
    rows = torch.randn(40, 512, device=device).bfloat16()
    rows[0] = float("nan")
    indices = torch.randint(1, 40, (9, 12), device=device)
    indices[torch.rand(9, 12, device=device) < 0.3] = -1
    sink = torch.randn(3, device=device)
    expected = reference.sparse_attention(q.double(), [(rows, indices, None)], sm_scale=0.1, attn_sink=sink)[
        0
    ]
    out = exact.attention(q, rows, indices, sink, 0.1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    bounded, bound = exact.attention_and_bound(q, rows, indices, sink, 0.1, bf16_rows=True)
    assert torch.equal(out, bounded)
    assert ((out.bfloat16().double() - out).abs() <= bound).all()


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_storage_bound_is_reached_and_never_exceeded_by_the_reference(layout: str, device: str) -> None:
    fmt = KV_LAYOUTS[layout]
    latent = (torch.randn(64, fmt.head_dim_qk, device=device) * 3).bfloat16()
    scale = torch.tensor([0.017], device=device) if fmt.needs_scale else None
    data, slots = fmt.empty(1, 64, device), torch.arange(64, device=device)
    reference.quantize_kv(latent, slots, data, layout=fmt, page_size=64, scale=scale)
    cached = reference.dequantize_kv(data, slots, layout=fmt, page_size=64, scale=scale)
    error = (cached.double() - latent.double()).abs()
    bound = exact.storage_bound(latent, fmt, scale)
    assert (error <= bound).all()
    if fmt.nope_format != "bf16":
        assert (error[bound > 0] / bound[bound > 0]).max() > 0.9


@pytest.mark.parametrize("layer_of", [Layer(4, 128), Layer(128, 128), Layer(2, 128), Layer(1, 128)])
def test_exact_entries_are_the_specification(layer_of: Layer) -> None:
    """And its float32 and bf16 roundings stay within the errors that go with them."""
    n, window = 300, layer_of.pooled_tokens
    scores, ratio = torch.randn(n, layer_of.score_width), layer_of.ratio
    ape = torch.randn(ratio, layer_of.score_width // 2) if ratio > 2 else None
    table, weight = rope_table(n, 64, "cpu"), torch.randn(512)
    constants = Constants(*table, weight, weight, ape, torch.zeros(512, 128), torch.zeros(1))
    close = torch.arange(ratio - 1, n, ratio)
    at = (close[:, None] + torch.arange(1 - window, 1)).clamp_min(0)
    pooled = around.pooled(scores[at], close, constants, layer_of)
    rows = [list(scores[max(0, p + 1 - window) : p + 1]) for p in close.tolist()]
    want = [
        layer_reference.pooled_window(r, ape, p, ratio) for r, p in zip(rows, close.tolist(), strict=True)
    ]
    torch.testing.assert_close(pooled.value, torch.stack(want), rtol=1e-12, atol=1e-12)
    options = {"ratio": ratio, "eps": EPS, "round_pooled": True}
    got = layer_reference.compressed_rows(pooled.value.float(), close, weight, *table, **options)
    for rounded, near in zip(got, around.entry(pooled, close, constants, layer_of), strict=True):
        distance = (rounded.double() - near.value).abs()
        assert (distance <= near.error).all() and (distance / near.error).max() > 0.5


def test_ring_forgets_exactly_the_tokens_that_it_overwrote(device: str) -> None:
    pages = Pages(num_requests=2, max_len=50, max_extend=6, window=5, page_tokens=4, device=device)
    ring = 3 * 4  # ceil((6 + 5) / 4) pages
    for done in range(0, 48, 6):
        batch = Batch.of([bytes(50), bytes(50)], [done, done], [6, 6], 1, device)
        pages.advance(batch)
        held = pages.full_to_swa[pages.req_to_token.long()]
        positions = torch.arange(50, device=device).expand(2, -1)
        assert torch.equal(held >= 0, (positions < done + 6) & (positions >= done + 6 - ring))
        assert held[held >= 0].unique().numel() == int((held >= 0).sum())  # no slot twice


def test_requests_too_short_for_an_entry_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--heads", "1", "--tokens", "3", "--decode-steps", "1", "--out", str(tmp_path)]
    assert main(["demo", *small]) == 0
    assert "0 of 0 entries of 4 + window 128" in capsys.readouterr().out


def test_text_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_bytes(b"too short")
    assert main(["demo", "--text", str(tmp_path / "short.txt")]) == 2
    assert "expected more than" in capsys.readouterr().err


@pytest.mark.parametrize("model", MODELS)
def test_decode_from_a_hot_buffer_of_a_tenth_has_the_same_outputs(model, tmp_path, capsys) -> None:
    assert main(["demo", *SMALL, "--hot-buffer", "--model", model, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    said = re.findall(r"from a hot buffer of a tenth: the same outputs; ([\d.]+)% of the chosen", out)
    assert len(said) == 2 and all(0 < float(share) < 100 for share in said)


def hot_workload() -> Workload:
    """A layer whose hot buffer has far fewer slots than its decode chooses in all."""
    workload = small_workload()
    spec = replace(workload.spec, layers=(replace(workload.spec.layers[1], topk=2),), layouts=("dsv4",))
    return replace(workload, spec=spec)


def test_a_row_that_was_not_copied_changes_the_outputs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    workload = replace(hot_workload(), device=device)
    want = run.run_free(workload, "dsv4")
    got = run.run_free(workload, "dsv4", on_host=True)
    assert got.same_bits(want) and got.found_and_loaded[1] > 0 and got.cache_bytes < want.cache_bytes
    original = hot.copy_host_rows
    copies: list[int] = []

    def copy(*args: Any, **options: Any) -> None:
        copies.append(1)
        if len(copies) != 2:
            original(*args, **options)

    monkeypatch.setattr(hot, "copy_host_rows", copy)
    assert not run.run_free(workload, "dsv4", on_host=True).same_bits(want)
