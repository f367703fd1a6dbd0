"""Real rows in the benchmarks: the indices mean what their table says, the results are FlashMLA's."""

import re
import runpy
import sys

import peer_standins
import pytest
import torch

from mla_fp8.tools import bench

sys.path.insert(0, str(bench.FOLDER))
import row_kinds
import summary
import table
from row_kinds import ROW_KINDS, RowKind, expected_keys, selected, windows

import harness

SETS, TOKENS, TOPK, SLOTS = 2, 64, 256, 4096
WINDOW = 16
kinds = pytest.mark.parametrize("kind", ROW_KINDS, ids=lambda kind: f"{kind.label} {kind.s_q}")
ratios = pytest.mark.parametrize("ratio", [1, 4])


def of(kind: RowKind, ratio: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return selected(kind, (SETS, TOKENS, TOPK), SLOTS, ratio, "cpu")


def kind_of(label: str, s_q: int = 1) -> RowKind:
    return next(kind for kind in ROW_KINDS if (kind.label, kind.s_q) == (label, s_q))


@kinds
@ratios
def test_a_row_is_as_long_as_its_context_and_has_its_holes(kind, ratio):
    indices, valid = of(kind, ratio)
    assert indices.dtype == valid.dtype == torch.int32 and (indices < SLOTS).all() and (indices >= -1).all()
    tokens = torch.full((TOKENS,), kind.context)
    if kind.prompt_from is not None:
        tokens = torch.arange(TOKENS) + kind.prompt_from + 1
    if kind.empty:
        tokens[TOKENS * 3 // 4 :] = 0
    assert valid.tolist() == [min(int(n) // ratio, TOPK) for n in tokens]
    inside = torch.arange(TOPK) < valid[:, None]
    assert (indices[:, ~inside] == -1).all()
    holes = (indices[:, inside] == -1).float().mean().item()
    assert holes == pytest.approx(kind.holes, abs=0.02) and (holes == 0) == (kind.holes == 0)
    counted = (indices[0] >= 0).sum().item()
    assert counted == pytest.approx(expected_keys(kind, TOKENS, TOPK, ratio), rel=0.1 if kind.holes else 0)


@ratios
@pytest.mark.parametrize("prompt_from", [0, 1000])
def test_a_prompt_attends_to_what_is_before(prompt_from, ratio):
    indices, valid = of(RowKind("", prompt_from=prompt_from), ratio)
    for token in range(TOKENS):
        entries = (prompt_from + token + 1) // ratio
        row = indices[0, token, : valid[token]].tolist()
        assert all(slot < entries for slot in row)
        assert entries > TOPK or row == list(range(entries))


def test_slots_are_in_common_sorted_or_repeated():
    half = of(kind_of("half in common"))[0]
    assert (half[:, :, : TOPK // 2] == half[:, :1, : TOPK // 2]).all()
    assert (half[:, 1:] == half[:, :-1]).float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert (of(kind_of("sorted"))[0].diff() >= 0).all()
    assert of(kind_of("one slot"))[0].unique().tolist() == [0]
    for s_q in (2, 4):
        request = of(kind_of("90 % in common", s_q))[0].unflatten(1, (-1, s_q))
        same = (request[:, :, 1:] == request[:, :, :1]).float().mean().item()
        assert 0.78 < same < 0.93  # both tokens chose the common key: 0.9 or 0.81
        assert (request[:, 1:] == request[:, :-1]).float().mean().item() < 0.01


@kinds
def test_a_window_ends_with_its_own_slot(kind):
    torch.manual_seed(0)
    indices, valid = windows(kind, (SETS, TOKENS, WINDOW), SLOTS, "cpu")
    assert indices.dtype == torch.int32 and (indices < SLOTS).all()
    last = indices.amax(-1)
    for token, count in enumerate(valid.tolist()):
        for chosen, end in zip(indices[:, token].tolist(), last[:, token].tolist(), strict=True):
            slots = list(range(end - count + 1, end + 1)) if count else []
            assert chosen == slots + [-1] * (WINDOW - count)
    if kind.prompt_from is not None:
        assert last.tolist() == [[kind.prompt_from + token for token in range(TOKENS)]] * SETS
    requests = last.unflatten(1, (-1, kind.s_q))
    assert (requests.diff() == 1).all()


def test_the_difference_is_of_the_worst_row():
    want = torch.ones(100, 4, 8)
    want[7] = 0
    assert harness.relative_difference(want, want) == 0
    off = want.clone()
    off[50] *= 1.05
    assert harness.relative_difference(off, want) == pytest.approx(0.05)
    off[7, 0, 0] = 1e-3
    assert harness.relative_difference(off, want) > 1
    off[3] = float("nan")
    assert not harness.relative_difference(off, want) <= harness.MAX_DIFFERENCE


def run(monkeypatch, op: str, *arguments: object) -> None:
    """The script as a process would run it, with what it imports from its folder forgotten afterwards."""
    for name in ("bench_sparse_decode", "sparse_prefill_shapes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(row_kinds, "ROW_KINDS", FEW)
    monkeypatch.setattr(harness, "ceilings", lambda: {"clone": 1.0, "copy_": 1.0, "matmul": 1.0})
    monkeypatch.setattr(sys, "argv", [op, "--real-rows", "--seconds", "0", *map(str, arguments)])
    runpy.run_path(str(bench.SCRIPTS[op]), run_name="__main__")


FEW_LABELS = ("context 512", "prompt from 0", "a quarter empty", "50 % holes", "90 % in common", "one slot")
FEW = [kind for kind in ROW_KINDS if kind.label.removesuffix(", lengths") in FEW_LABELS]
FORMS = {
    "sparse_decode": (["dsv32 2048", "dsv4 128+512"], FEW),
    "sparse_prefill": (
        [f"{bf16}{form} 4K" for bf16 in ("", "bf16 ") for form in ("dsv32 2048", "dsv4 512+128")],
        [kind for kind in FEW if kind.s_q == 1],
    ),
}
not_here = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-in is for CPUs; a GPU has the cases"
)


@not_here
@pytest.mark.parametrize("op", FORMS)
@pytest.mark.slow
def test_each_kind_runs_beside_flash_mla_and_is_summed_up(op, tmp_path, monkeypatch, capsys):
    peer_standins.flash_mla(monkeypatch)
    run(monkeypatch, op, "--csv", tmp_path, "--only", "h8 ", "--smoke")
    (path,) = tmp_path.iterdir()
    measured = table.cases(table.read_csv(path))
    forms, of_op = FORMS[op]
    assert len(measured) == len(forms) * len(of_op)
    for case in measured:
        assert case.op == f"{op}_real_rows" and case.ours.us > 0
        pages = op == "sparse_prefill" and not case.label.startswith("bf16")
        peers = {"flash_mla", "flash_mla, pages"} if pages else {"flash_mla"}
        assert set(case.peers) == peers
        assert 0 <= case.ours.difference <= harness.MAX_DIFFERENCE
    cases = {re.sub(r"( s_q\d)? h8 [bt]\d+", "", case.label) for case in measured}
    assert cases == {f"{form}: {kind.label}" for form in forms for kind in of_op}
    printed = capsys.readouterr().out
    assert printed.endswith(f"written to {path}\n{summary.markdown(measured)}")
    assert all(f"\n| {kind.label} | " in printed for kind in of_op)


@not_here
@pytest.mark.parametrize("op", FORMS)
@pytest.mark.slow
def test_a_result_unlike_flash_mla_s_fails(op, monkeypatch):
    module = peer_standins.flash_mla(monkeypatch)

    def two_percent_off(right):
        def wrong(*args, **kwargs):
            out, *rest = right(*args, **kwargs)
            return (out * 1.02, *rest)

        return wrong

    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        monkeypatch.setattr(module, name, two_percent_off(getattr(module, name)))
    with pytest.raises(SystemExit, match=r"differ from the baseline by over 0.01:\n.*context 512"):
        run(monkeypatch, op, "--only", f"h8 {'b' if op == 'sparse_decode' else 't'}4: context 512", "--smoke")


@not_here
@pytest.mark.parametrize("op", FORMS)
@pytest.mark.slow
def test_what_does_not_fit_the_limit_is_listed_and_keeps_its_rows(op, tmp_path, monkeypatch, capsys):
    run(monkeypatch, op, "--csv", tmp_path, "--only", "h8 ", "--smoke")
    (path,) = tmp_path.iterdir()
    before = table.read_csv(path)
    capsys.readouterr()
    run(monkeypatch, op, "--csv", tmp_path, "--limit", "0")
    forms, of_op = FORMS[op]
    assert f"not run within 0 s, {5 * len(forms) * len(of_op)} cases:" in (out := capsys.readouterr().out)
    assert all(f"  {row.case}\n" in out for row in before) and table.read_csv(path) == before


def test_the_summary_has_the_worst_and_the_best_of_each_kind():
    def case(label: str, **times: float) -> table.Case:
        rows = {table.OURS: 1.0} | times
        return table.Case("op", label, {name: table.Row("op", label, name, us) for name, us in rows.items()})

    measured = [
        case("dsv32 2048 h8 b32: full", flash_mla=2.1),
        case("dsv4 128+512 h8 b128: full", flash_mla=1.5),
        case("dsv32 2048 h16 b32: full", flash_mla=0.9),
        case("dsv32 2048 h8 b32: one slot", flash_mla=3.0),
        case("dsv32 2048 h8 b32", flash_mla=9.0),
    ]
    pages = case("dsv32 2048 128K h8 t2048: full", **{"flash_mla": 0.5, "flash_mla, pages": 4.0})
    workspace = case("bf16 dsv32 2048 128K h8 t2048: full", flash_mla=1.2)
    assert summary.markdown(measured) == (
        "| `op` against `flash_mla` | 8 heads | 16 heads |\n| --- | --- | --- |\n"
        "| full | 1.50 to 2.10x | 0.90 to 0.90x |\n| one slot | 3.00 to 3.00x |  |\n"
        "| all | 1.50 to 3.00x | 0.90 to 0.90x |\n"
    )
    both = summary.markdown([pages, workspace])
    assert "`op` against `flash_mla, pages` | 8 heads" in both and "| full | 4.00 to 4.00x |" in both
    assert "`op, bf16` against `flash_mla` | 8 heads" in both and "| full | 1.20 to 1.20x |" in both
    assert summary.markdown([case("dsv32 2048 h8 b32: full")]) == ""
