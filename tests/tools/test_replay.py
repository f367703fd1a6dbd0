"""Recorded calls are self-contained, small, and give the same bits again; replay tells right from wrong."""

import functools
import re

import pytest
import torch
from draft_cases import draft_case, plan_of
from op_samples import SAMPLES, sparse_prefill_entries

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.__main__ import main
from mla_fp8.backends import table
from mla_fp8.testing import record
from mla_fp8.tools import recording, replay

safetensors_torch = pytest.importorskip("safetensors.torch")
NUM_PAGES, PAGE_SIZE, EXTRA_PAGE_SIZE, TOKENS, HEADS = 12, 16, 4, 5, 8
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def poisoned_cache(layout, page_size, pages, device):
    """Random rows in these pages, NaN bytes in all others."""
    kv_cache = layout.empty(NUM_PAGES, page_size, device).fill_(0xFF)
    slots = (torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)).flatten().to(device)
    latent = torch.randn(len(slots), layout.head_dim_qk, device=device).bfloat16()
    scale = torch.tensor([0.5], device=device) if layout.needs_scale else None
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=page_size, scale=scale)
    return kv_cache, scale


def decode_call(name, device):
    """Uses pages 2, 7, 11 of one cache and page 3 of another; everything else is NaN."""
    layout = KV_LAYOUTS[name]
    kv_cache, scale = poisoned_cache(layout, PAGE_SIZE, [2, 7, 11], device)
    extra, _ = poisoned_cache(layout, EXTRA_PAGE_SIZE, [3], device)
    pages = torch.tensor([2, 7, 11])[torch.randint(3, (TOKENS, 24))]
    indices = (pages * PAGE_SIZE + torch.randint(PAGE_SIZE, pages.shape)).int()
    indices[0, :4] = torch.tensor([-1, INT_MIN, INT_MAX, NUM_PAGES * PAGE_SIZE])
    indices[:, 20:] = 5 * PAGE_SIZE  # page 5 does not count: beyond topk_length
    q = torch.randn(TOKENS, HEADS, layout.head_dim_qk, device=device).bfloat16()
    arguments = {
        "layout": name, "page_size": PAGE_SIZE, "sm_scale": 0.05, "scale": scale,
        "topk_length": torch.tensor([20, 0, 7, 1, 20], dtype=torch.int32, device=device),
        "attn_sink": torch.randn(HEADS, device=device), "extra_kv_cache": extra,
        "extra_indices": torch.arange(12, 16, dtype=torch.int32, device=device).repeat(TOKENS, 1),
        "extra_page_size": EXTRA_PAGE_SIZE,
    }  # fmt: skip
    return (q, kv_cache, indices.to(device)), arguments


@pytest.mark.parametrize("name", ["dsv32", "dsv4", "fp8_e4m3", "bf16_512", "dsv4_fnuz"])
def test_a_replayed_call_gives_the_same_bits_from_the_pages_that_it_reads(name, device, tmp_path):
    tensors, options = decode_call(name, device)
    with record(tmp_path / "calls") as recorder:
        want = mla_fp8.sparse_decode(*tensors, **options)
    assert want[0].isfinite().all() and recorder.missed == 0
    (call,) = recording.load(tmp_path / "calls")
    assert call.op == "sparse_decode" and call.options["layout"] == name
    assert len(call.tensors["kv_cache"]) == 3 and len(call.tensors["extra_kv_cache"]) == 1
    got = mla_fp8.sparse_decode(**call.arguments(device))
    assert got[0].equal(want[0]) and got[1].equal(want[1])


def test_lists_of_shared_keys_are_made_again_and_neighbours_are_counted(device, tmp_path, capsys):
    """Lists name slots of the whole cache, of which a recording has a part."""
    group = 4
    case = draft_case(KV_LAYOUTS["dsv4"], device, 6, group, extra_topk=40, overlap=0.75, holes=0.0)
    with record(tmp_path / "calls"):
        case.decode(query_groups=group, shared_keys=plan_of(case, group))
    (call,) = recording.load(tmp_path / "calls")
    assert call.options["query_groups"] == group and "shared_keys" not in call.tensors
    assert main(["replay", str(tmp_path / "calls"), "--seconds", "0", "--device", device]) == 0
    shared = re.search(r"(\d+) of 23 neighbours share keys, ([\d.]+) of them", capsys.readouterr().out)
    assert 18 <= int(shared[1]) <= 23 and 0.3 < float(shared[2]) < 0.8


def test_neighbours_without_a_key_in_common_do_not_count(device, tmp_path):
    slots = torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1], [40, 41, 42, 43], [40, 41, 99, 500]]).int()
    kv_cache = KV_LAYOUTS["dsv4"].empty(4, 16, device).zero_()
    q = torch.zeros(4, 8, 512, device=device).bfloat16()
    with record(tmp_path / "calls"):
        mla_fp8.sparse_decode(q, kv_cache, slots.to(device), layout="dsv4", page_size=16, sm_scale=1.0)
        mla_fp8.sparse_decode(
            q[::2], kv_cache, slots[::2].to(device), layout="dsv4", page_size=16, sm_scale=1.0
        )
    calls = recording.load(tmp_path / "calls")
    assert [recording.shared_by_neighbours(call) for call in calls] == [
        "2 of 3 neighbours share keys, 1.00 of them on average", "no neighbours share keys",
    ]  # fmt: skip


def test_views_of_other_kernels_are_recorded_like_the_cache(device, tmp_path):
    """dsv4 pads its pages: FlashMLA's view of one is shorter than the page."""
    (q, kv_cache, indices), options = decode_call("dsv4", device)
    want = mla_fp8.sparse_decode(q, kv_cache, indices, **options)
    with record(tmp_path / "calls"):
        view = KV_LAYOUTS["dsv4"].flash_mla_view(kv_cache, PAGE_SIZE)
        mla_fp8.sparse_decode(q, view, indices, **options)
    (call,) = recording.load(tmp_path / "calls")
    assert mla_fp8.sparse_decode(**call.arguments(device))[0].equal(want[0])


def test_hostile_indices_stay_what_they_are_and_uncounted_ones_never_name_a_page():
    indices = torch.tensor([[9, INT_MIN, 200, 3, INT_MAX, 7]], dtype=torch.int32)
    length = torch.tensor([4], dtype=torch.int32)
    pages, renamed = recording.referenced(indices, length, num_pages=5, page_size=2)
    assert pages.tolist() == [1, 4]
    assert renamed.tolist() == [[2 + 1, INT_MIN, 200, 0 + 1, INT_MAX, -1]]
    assert renamed.dtype == torch.int32


def test_prefill_keeps_the_rows_of_the_workspace_that_it_reads(device, tmp_path):
    kv = torch.full((1000, 576), torch.nan, device=device).bfloat16()
    kv[300:310] = torch.randn(10, 576, device=device)
    q = torch.randn(3, HEADS, 576, device=device).bfloat16()
    indices = torch.randint(300, 310, (3, 32), dtype=torch.int32, device=device)
    with record(tmp_path / "calls"):
        want = mla_fp8.sparse_prefill(q, kv, indices, sm_scale=0.05)
    (call,) = recording.load(tmp_path / "calls")
    assert len(call.tensors["kv"]) <= 10
    assert all(
        a.equal(b) for a, b in zip(mla_fp8.sparse_prefill(**call.arguments(device)), want, strict=True)
    )


def test_ops_called_directly_and_their_out_forms_are_recorded(device, tmp_path):
    tensors, options = decode_call("dsv4", device)
    options |= {"layout": KV_LAYOUTS["dsv4"].id}
    out, lse = torch.ops.mla_fp8.sparse_decode(*tensors, **options)
    with record(tmp_path / "calls", max_calls=2) as recorder:
        torch.ops.mla_fp8.sparse_decode(*tensors, **options)
        torch.ops.mla_fp8.sparse_decode_out(
            *tensors, **options, out=torch.zeros_like(out), lse=torch.zeros_like(lse)
        )
        torch.ops.mla_fp8.sparse_prefill_paged(*tensors, **options)
    first, second = recording.load(tmp_path / "calls")
    assert recorder.missed == 1
    assert first.op == second.op == "sparse_decode" and set(first.tensors) == set(second.tensors)


def test_a_call_into_the_callers_memory_is_recorded_as_one_that_can_be_made_again(device, tmp_path):
    tensors, options = decode_call("dsv4", device)
    want = mla_fp8.sparse_decode(*tensors, **options)
    with record(tmp_path / "calls"):
        mla_fp8.sparse_decode(*tensors, **options, out=torch.zeros_like(want[0]))
    (call,) = recording.load(tmp_path / "calls")
    assert mla_fp8.sparse_decode(**call.arguments(device))[0].equal(want[0])


def test_calls_that_other_backends_serve_are_recorded(tmp_path):
    tensors, options = decode_call("dsv4", "cpu")
    options |= {"layout": KV_LAYOUTS["dsv4"].id}
    with record(tmp_path / "calls"):
        torch.ops.mla_fp8_backends.sparse_decode(*tensors, adapter="reference", **options)
    (call,) = recording.load(tmp_path / "calls")
    assert "adapter" not in call.options
    want = mla_fp8.sparse_decode(*tensors, **(options | {"layout": "dsv4"}))
    assert mla_fp8.sparse_decode(**call.arguments("cpu"))[0].equal(want[0])


def window_call(device):
    """Requests of 3 and 2 queries; page 5 is one that no window reaches, and is in the table."""
    (q, kv_cache, _), options = decode_call("dsv4", device)
    tables = ([[2, 7, 5], [11, -1, INT_MAX]], [0, 3, TOKENS], [PAGE_SIZE + 9, 12])
    tables = (torch.tensor(x, dtype=torch.int32, device=device) for x in tables)
    kept = (
        "layout",
        "page_size",
        "sm_scale",
        "attn_sink",
        "extra_kv_cache",
        "extra_indices",
        "extra_page_size",
    )
    return (q, kv_cache, *tables), {name: options[name] for name in kept} | {"window_size": 20}


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    ran = []
    for path in (tmp_path / "nowhere" / "calls", tmp_path):
        with pytest.raises(OSError, match=str(path)), record(path):
            ran.append(True)
    assert not ran


def test_windows_are_recorded_with_the_pages_of_their_table(device, tmp_path, capsys):
    tensors, options = window_call(device)
    with record(tmp_path / "calls") as recorder:
        want = mla_fp8.sparse_prefill_window(*tensors, **options)
    (call,) = recording.load(tmp_path / "calls")
    assert call.op == "sparse_prefill_window" and recorder.missed == 0
    assert len(call.tensors["kv_cache"]) == 4 and len(call.tensors["extra_kv_cache"]) == 1
    got = mla_fp8.sparse_prefill_window(**call.arguments(device))
    assert want[0].isfinite().all() and all(a.equal(b) for a, b in zip(got, want, strict=True))
    assert main(["replay", str(tmp_path / "calls"), "--seconds", "0", "--device", device]) == 0
    assert "windows of 20 + 4 indices" in capsys.readouterr().out


def test_entries_are_recorded_with_the_pages_of_their_table(device, tmp_path, capsys):
    tensors, options = sparse_prefill_entries(device)
    options["extra_page_table"] = torch.tensor([[1, 1], [-1, 1]], dtype=torch.int32, device=device)
    with record(tmp_path / "calls") as recorder:
        want = mla_fp8.sparse_prefill_window(*tensors, **options)
    (call,) = recording.load(tmp_path / "calls")
    assert recorder.missed == 0 and len(call.tensors["extra_kv_cache"]) == 1
    got = mla_fp8.sparse_prefill_window(**call.arguments(device))
    assert want[0].isfinite().all() and all(a.equal(b) for a, b in zip(got, want, strict=True))
    assert main(["replay", str(tmp_path / "calls"), "--seconds", "0", "--device", device]) == 0
    assert "windows of 3 + all entries" in capsys.readouterr().out


def test_every_public_attention_call_is_kept_or_counted(tmp_path):
    made = ("sparse_decode", "sparse_prefill", "sparse_prefill_paged", "sparse_prefill_window")
    counted = ("paged_attention_ragged", "paged_attention_ragged_latent")
    with record(tmp_path / "calls") as recorder:
        for name in made + counted:
            tensors, options = SAMPLES[name]("cpu")
            for backend in ("native", "reference") if name in made else (None,):
                asked = {"backend": backend} if backend else {}
                getattr(mla_fp8, name)(*tensors, **options, **asked)
    assert [call.op for call in recording.load(tmp_path / "calls")] == [x for x in made for _ in range(2)]
    assert recorder.missed == len(counted)


def test_what_was_recorded_is_written_when_the_model_raises(tmp_path):
    tensors, options = decode_call("dsv4", "cpu")
    with pytest.raises(ZeroDivisionError), record(tmp_path / "calls"):
        mla_fp8.sparse_decode(*tensors, **options)
        raise ZeroDivisionError
    assert len(recording.load(tmp_path / "calls")) == 1


def test_a_file_without_calls_says_so(tmp_path, capsys):
    with record(tmp_path / "calls"):
        pass
    assert main(["replay", str(tmp_path / "calls")]) == 2
    assert "holds no calls" in capsys.readouterr().err


def test_a_call_that_raises_is_not_recorded(tmp_path):
    (q, kv_cache, indices), options = decode_call("dsv4", "cpu")
    with record(tmp_path / "calls") as recorder, pytest.raises(RuntimeError, match="indices"):
        mla_fp8.sparse_decode(q, kv_cache, indices.long(), **options)
    assert recorder.calls == []


def test_no_tokens_replay(device, tmp_path, capsys):
    (q, kv_cache, indices), options = decode_call("dsv4", device)
    few = {"topk_length", "extra_indices"}
    options = {name: x[:0] if name in few else x for name, x in options.items()}
    with record(tmp_path / "calls"):
        mla_fp8.sparse_decode(q[:0], kv_cache, indices[:0], **options)
    assert main(["replay", str(tmp_path / "calls"), "--seconds", "0", "--device", device]) == 0
    assert "0 tokens" in capsys.readouterr().out


def test_the_exact_result_is_that_of_the_whole_cache(tmp_path):
    """More tokens than the reference takes at once, against one float64 attention over everything."""
    (q, kv_cache, indices), options = decode_call("dsv32", "cpu")
    q, indices = (torch.cat([x] * 4) for x in (q, indices))
    extra = {name: torch.cat([options[name]] * 4) for name in ("topk_length", "extra_indices")}
    options |= extra
    with record(tmp_path / "calls") as recorder:
        mla_fp8.sparse_decode(q, kv_cache, indices, **options)
    out, lse = replay.exact(recorder.calls[0], "cpu")
    want, want_lse = mla_fp8.sparse_decode(q, kv_cache, indices, **options, backend="reference")
    assert out.dtype == torch.float64 and len(out) == len(q)
    assert (out - want.double()).abs().max() < 0.01 * want.abs().max()
    assert lse.float().allclose(want_lse, atol=1e-5)


def test_replay_lists_every_backend_and_fails_when_one_is_off(tmp_path, capsys, monkeypatch):
    tensors, options = decode_call("dsv4", "cpu")
    with record(tmp_path / "calls"):
        mla_fp8.sparse_decode(*tensors, **options)
    command = ["replay", str(tmp_path / "calls"), "--seconds", "0", "--device", "cpu"]
    assert main(command) == 0
    *lines, verdict, worst = capsys.readouterr().out.splitlines()[3:]
    assert verdict.startswith("All 1 calls are right. Worst: call 0 by native, rms error ")
    assert worst == f"  {recording.load(tmp_path / 'calls')[0]}"
    assert [line.split()[0] for line in lines] == [b.name for b in table.TABLE if "sparse_decode" in b.ops]

    right = mla_fp8.sparse_decode

    @functools.wraps(right)
    def off(*tensors, backend, **options):
        out, lse = right(*tensors, **options, backend=backend)
        return out * 1.02 if backend == "native" else out, lse

    monkeypatch.setattr(mla_fp8, "sparse_decode", off)
    assert main(command) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "OFF: rms error" in next(x for x in printed if x.startswith("  native"))
    assert printed[-2].startswith("1 of 1 calls are OFF. Worst: call 0 by native, rms error 2.0")
    assert printed[-2].endswith("(bound 0.01): rms error above 0.01")


def found(rms: float, *complaints: str) -> replay.Verdict:
    return replay.Verdict(rms, rms, 0.0, complaints)


@pytest.mark.parametrize(
    "verdicts, says",
    [
        ([{"native": found(1e-3)}, {"native": found(3e-3), "reference": found(4e-3)}], "All 2 .*1 by native"),
        ([{"native": found(2e-3, "lse error")}, {"native": found(9e-3)}], "1 of 2 .*0 by native.*: lse"),
        ([{"native": found(1e-3)}, {"native": found(float("nan"), "rms")}], "1 of 2 .*1 by native.* nan "),
        ([{"reference": found(1e-3)}, {}], "All 2 .*0 by reference"),
        ([{}, {}], "No backend could run"),
    ],
)  # fmt: skip
def test_replay_names_the_worst_call(verdicts, says):
    tensors, options = decode_call("dsv4", "cpu")
    names = ("q", "kv_cache", "indices")
    call = recording.Call("sparse_decode", dict(zip(names, tensors, strict=True)), options)
    assert re.match(says, replay.summary([call, call], verdicts))


@pytest.mark.parametrize(
    "broken",
    [
        lambda out, lse: (out * torch.nan, lse),
        lambda out, lse: (out, lse + 1),
        lambda out, lse: (out, lse.nan_to_num(neginf=0.0)),
    ],
)
def test_verdict_sees_nan_and_a_wrong_lse(broken):
    tensors, options = decode_call("dsv4", "cpu")
    options["extra_indices"].fill_(-1)
    out, lse = mla_fp8.sparse_decode(*tensors, **options)
    assert lse.isneginf().any()
    want = out.double(), lse.double()
    assert not replay.verdict((out, lse), want).complaints
    assert replay.verdict(broken(out, lse), want).complaints


def test_files_of_others_are_refused(tmp_path, capsys):
    safetensors_torch.save_file({"x": torch.zeros(1)}, tmp_path / "model")
    (tmp_path / "text").write_text("no tensors")
    for name, message in (("model", "was not written by mla_fp8"), ("text", "text: "), ("none", "none")):
        assert main(["replay", str(tmp_path / name)]) == 2
        assert message.lower() in capsys.readouterr().err.lower()
