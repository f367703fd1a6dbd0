"""The demo at a size of seconds: its bounds hold, and they break when something is broken on purpose."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_fp8 import KV_LAYOUTS, reference
from mla_fp8.__main__ import main
from mla_fp8.prefill import tables
from mla_fp8.tools.demo import cache, exact, run
from mla_fp8.tools.demo.model import MODELS
from mla_fp8.tools.demo.pages import Batch, Pages
from mla_fp8.tools.demo.teacher import LayerError, TeacherForced
from mla_fp8.tools.demo.workload import Workload

SMALL = ["--heads", "2", "--tokens", "280", "--chunk", "96", "--decode-steps", "1"]


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
    spec = replace(workload.spec, layers=workload.spec.layers[:2], layouts=("dsv4", "bf16_512"))
    return replace(workload, spec=spec)


def teacher_forced(workload: Workload) -> TeacherForced:
    teacher = TeacherForced(workload)
    teacher.run(lambda message: None)
    return teacher


@pytest.mark.parametrize("model", MODELS)
def test_tables_and_exit_status(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--model", model, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    verdict, tables = out.split("Chart: ")
    assert verdict.startswith("Passed: all bounds hold in ") and "VIOLATED" not in tables
    for layout in MODELS[model].layouts:
        assert f"\n  {layout:<19}layers err by " in verdict
        assert tables.count(f"{layout:<19}") == len(MODELS[model].layers) + 1


def test_a_violated_bound_is_the_first_thing_said_and_fails_the_run(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(LayerError, "ok", property(lambda error: error.max_error == 0.0))
    assert main(["demo", *SMALL, "--out", str(tmp_path)]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    failed = r"FAILED: 20 bounds do not hold in 4 layers x 5 layouts \(\d+ s\). 1 is the bound:"
    assert re.fullmatch(failed, first)
    assert second.startswith("  layer 0, dsv4: stored ")


def test_bounds_hold_and_fp8_errs_more_than_bf16(device: str) -> None:
    errors = teacher_forced(small_workload(device=device)).errors
    assert all(error.ok for error in errors.values())
    for layer in range(2):
        assert errors[layer, "dsv4"].rms_error > 2 * errors[layer, "bf16_512"].rms_error


def test_wrong_scale_violates_the_storage_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cache.Store.write

    def write(
        store: cache.Store, latent: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        original(store, latent, slots, scale)
        store.layout.views(store.data, store.page_size)[1].view(torch.uint8)[:, 0, :1] += 1

    monkeypatch.setattr(cache.Store, "write", write)
    errors = teacher_forced(small_workload()).errors
    assert errors[0, "dsv4"].storage_ratio > 1
    assert errors[0, "bf16_512"].ok  # it has no scales


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
    assert not errors[0, "bf16_512"].ok


def test_indices_of_another_request_violate_the_attention_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Pages.entry_slots

    def entry_slots(pages: Pages, request: torch.Tensor, entry: torch.Tensor, ratio: int) -> torch.Tensor:
        slots = original(pages, request, entry, ratio)
        return slots.roll(1, 0) if slots.dim() == 2 else slots

    monkeypatch.setattr(Pages, "entry_slots", entry_slots)
    errors = teacher_forced(small_workload()).errors
    assert errors[0, "dsv4"].ok and not errors[1, "dsv4"].ok


def test_nan_is_not_ok() -> None:
    assert LayerError().ok
    assert not LayerError(kernel_ratio=float("nan")).ok
    assert not LayerError(storage_ratio=float("nan")).ok


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


def test_text_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_bytes(b"too short")
    assert main(["demo", "--text", str(tmp_path / "short.txt")]) == 2
    assert "expected more than" in capsys.readouterr().err
