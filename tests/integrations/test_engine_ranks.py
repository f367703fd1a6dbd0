"""What ci/engines does in the processes of an engine's ranks: caches filled, kernels counted, weights."""

import collections
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mla_fp8

FOLDER = Path(__file__).parents[2] / "ci" / "engines"


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_ranks_fill_their_caches_and_count_their_kernels(monkeypatch, capsys):
    """Pages lie in memory with others between them, as vLLM has them; a rank's values are its own."""
    import engine  # noqa: PLC0415
    import parts  # noqa: PLC0415
    import ranks  # noqa: PLC0415
    import report  # noqa: PLC0415

    def event(name, begin):
        of_gpu = torch.autograd.DeviceType.CUDA
        return SimpleNamespace(
            name=name, id=1, device_type=of_gpu, time_range=SimpleNamespace(start=begin, end=begin + 3)
        )

    launches = (
        "gather_queries_kernel",
        "exchange_states_kernel",
        "exchange_scores_kernel",
        "sparse_decode_kernel",
    )
    steps: list[int] = []

    def events():
        return [
            event(name, 20 * step + 5 * i) for step in range(steps[-1]) for i, name in enumerate(launches)
        ]

    profiler = SimpleNamespace(start=lambda: None, stop=lambda: None, events=events)
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group = SimpleNamespace(rank_in_group=0)
    state = SimpleNamespace(get_dcp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    monkeypatch.setattr(ranks, "PAGES_AT_ONCE", 2)
    layout, index_layout = ranks.layouts()
    row, key = layout.bytes_per_token, index_layout.bytes_per_entry
    memory = torch.full((3, 64, row + key + 20), 255, dtype=torch.uint8).flatten(1)
    rows, keys = (
        memory[:, at : at + 64 * width].unflatten(1, (64, width)) for at, width in ((0, row), (64 * row, key))
    )
    layers = {"rows": SimpleNamespace(kv_cache=rows), "keys": SimpleNamespace(kv_cache=keys), "mlp": object()}
    worker = ranks.Worker()
    worker.device = torch.device("cpu")
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    worker.vllm_config = config
    llm = SimpleNamespace(collective_rpc=lambda method: [getattr(worker, method)()])
    monkeypatch.setattr(engine, "generate", lambda llm, ids, new: steps.append(new))
    options = ["--out", "x", "--kv", "two", "--layers", "1", "--loaded", "70", "--batches", "2"]
    found = engine.timed_loaded(llm, engine.parse(["--who", "ranks", *options]))
    assert "TIMED 2 x 70 12 us of kernels, 20 a step" in capsys.readouterr().out

    values = mla_fp8.dequantize_kv(rows.contiguous(), torch.arange(192), layout=layout, page_size=64)
    assert values.isfinite().all() and 0.3 < values.float().std() < 3
    of_keys = keys.contiguous().view(3, -1)
    assert of_keys[:, : 64 * 128].view(torch.float8_e4m3fn).float().std(1).min() > 0.9
    assert of_keys[:, 64 * 128 :].contiguous().view(torch.float32).min() >= 0.5
    assert (memory[:, 64 * (row + key) :] == 255).all()
    before, group.rank_in_group = rows.clone(), 1
    worker.mla_fp8_fill()
    assert not torch.equal(before, rows)

    name, result = "ranks-128-two-speed", {"ok": True, "layers": 1, "calls": {}, "init_s": 1} | found
    ((label, what, sides),) = report.steps({name: result})
    assert label == "128-two-speed" and (what["requests"], what["context"]) == ("2", "70")
    assert sides["ranks"].parts["exchange of ranks"] == (9, 3) and isinstance(sides["ranks"], parts.Step)
    assert not report.problems({name: result}) and "2 x 70: 20" in report.table({name: result}, {name})
    wrong = report.problems({name: result | {"layers": 2}})
    assert len(wrong) == 3 and "exchange_scores ran 1 times, expected 2" in wrong[2]


def test_weights_of_ranks_differ_where_each_has_a_part():
    import model  # noqa: PLC0415

    class ReplicatedLinear:
        tp_size, tp_rank = 2, 0

        def load(self) -> None:
            pass

    class RowParallelLinear(ReplicatedLinear):
        pass

    def weight(kind: type, rank: int) -> torch.Tensor:
        layer = kind()
        layer.tp_rank = rank
        param = torch.nn.Parameter(torch.empty(8, 4), requires_grad=False)
        param.weight_loader = layer.load
        model.fill(param, "weight", collections.Counter())
        return param.data

    assert torch.equal(*(weight(ReplicatedLinear, rank) for rank in (0, 1)))
    assert not torch.equal(*(weight(RowParallelLinear, rank) for rank in (0, 1)))
