"""--enable-deterministic-inference in SGLang's own modules, without a GPU."""

import without_gpu

without_gpu.pretend_sglang()

import os
import sys
from types import ModuleType, SimpleNamespace

os.environ["SGLANG_PLUGINS"] = "mla_fp8"

import pytest
import torch
from index_cases import random_problem
from sglang.srt.arg_groups import choices, overrides
from sglang.srt.environ import envs
from sglang.srt.layers.attention import deepseek_v4_backend, dsa_backend
from sglang.srt.layers.attention.dsa import dsa_indexer, dsa_indexer_metadata, dsa_topk_backend
from sglang.srt.layers.attention.dsv4 import indexer as v4_indexer
from sglang.srt.plugins.hook_registry import HookRegistry

from mla_fp8.integrations import replay, same_bits, sglang_same_bits
from mla_fp8.integrations import sglang as plugin

TOPK = 128


@pytest.fixture(scope="module", autouse=True)
def plugged():
    plugin.register()
    HookRegistry.apply_hooks()


@pytest.fixture(autouse=True)
def switched_on():
    same_bits.switch(True)
    yield
    same_bits.switch(None)


def test_the_switch_is_sglangs():
    same_bits.switch(None)
    for on in (True, False):
        envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.set(on)
        same_bits.switch(None)
        assert same_bits.asked() is same_bits.on() is on


@pytest.mark.parametrize("backend", ["dsa", "dsv4"])
def test_the_refusal_is_lifted(backend):
    view = SimpleNamespace(enable_deterministic_inference=True, attention_backend=backend)
    assert overrides._deterministic_attention_backend(view) == {}
    assert backend in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    view.attention_backend = "cutlass_mla"
    with pytest.raises(ValueError, match="are supported for deterministic inference"):
        overrides._deterministic_attention_backend(view)


@pytest.mark.parametrize("fp8", [True, False])
def test_prompts_of_v32_go_over_pages_and_never_dense(fp8):
    def no() -> bool:
        return False

    backend = SimpleNamespace(
        _is_in_breakable_cuda_graph=no, _is_in_tc_piecewise_cuda_graph=no, _is_blackwell=no,
        _get_device_sm=no, dsa_kv_cache_store_fp8=fp8, dsa_prefill_impl="flashmla_auto",
        enable_auto_select_prefill_impl=True,
        supports_mha_one_shot=True, use_mha=True,
    )  # fmt: skip
    dsa_backend.DeepseekSparseAttnBackend.set_dsa_prefill_impl(backend, None)
    assert not backend.use_mha and not backend.supports_mha_one_shot
    assert backend.dsa_prefill_impl == ("flashmla_kv" if fp8 else "flashmla_sparse")


def test_prompts_of_v4_are_never_copied():
    assert deepseek_v4_backend.DeepseekV4AttnBackend._use_sparse_prefill(None, None, num_qo_tokens=9) is False
    plan = v4_indexer.C4IndexerBackendMixin._get_nonpaged_indexer_plan
    assert plan(None, c4_indexer=None, forward_batch=None, indexer_metadata=None) is None


class Indexer:
    index_topk, num_init_tokens, num_local_tokens = TOPK, 0, 0

    def __init__(self, cache):
        self.cache = cache

    def _get_index_k_read_buffer(self, pool, layer_id):
        return self.cache


def metadata(problem, row_lens, starts=None, offsets=None, unfused=False):
    ragged = offsets is not None
    method = dsa_topk_backend.TopkTransformMethod
    of = SimpleNamespace(
        real_page_table=problem.page_table, dsa_seqlens_expanded=row_lens, cu_seqlens_q=starts,
        topk_indices_offset=offsets,
    )  # fmt: skip
    return dsa_indexer_metadata.DSAIndexerMetadata(
        of, method.RAGGED if ragged else method.PAGED, force_unfused_topk=unfused
    )


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: SimpleNamespace(index_page_size=64))


def padded(problem):
    """Rows of q with two that pad."""
    q = torch.cat([problem.q, problem.q[:2]])
    return q, torch.cat([problem.weights, problem.weights[:2]])[..., None]


@pytest.mark.parametrize("next_n", [1, 3])
def test_v32_chooses_slots_by_index_topk_in_decode(next_n, pool):
    problem = random_problem("cpu", [700, 64, 300], heads=16, next_n=next_n)
    row_lens = (problem.seq_lens[:, None] - next_n + 1 + torch.arange(next_n)).flatten().int()
    q, weights = padded(problem)
    got = dsa_indexer.Indexer._get_topk_paged(
        Indexer(problem.index_cache), None, 0, q, weights, metadata(problem, row_lens)
    )
    assert torch.equal(got[:-2], problem.want_topk(TOPK)[1]) and (got[-2:] == -1).all()


@pytest.mark.parametrize("kind", ["slots", "positions", "rows of a copy"])
def test_v32_chooses_by_index_topk_in_prompts(kind, pool):
    starts = torch.tensor([0, 2, 3, 7]).int()
    row_lens = torch.tensor([299, 300, 64, 697, 698, 699, 700]).int()
    problem = random_problem(
        "cpu", [300, 64, 700], heads=16, num_rows=7, row_lens=row_lens, query_start_loc=starts
    )
    positions, slots, _ = problem.want_topk(TOPK)
    offsets = torch.tensor([0, 0, 300, 364, 364, 364, 364]).int()
    want = {
        "slots": slots, "positions": positions,
        "rows of a copy": torch.where(positions < 0, -1, positions + offsets[:, None]),
    }[kind]  # fmt: skip
    q, weights = padded(problem)
    options = {"offsets": offsets if kind == "rows of a copy" else None, "unfused": kind == "positions"}
    made = metadata(problem, row_lens, starts, **options)
    arguments = Indexer(problem.index_cache), False, None, 0, q, weights, made
    got = dsa_indexer.Indexer._get_topk_ragged(*arguments)
    assert torch.equal(got[:-2], want) and (got[-2:] == -1).all()
    room = torch.full((len(q) + 3, TOPK), -7, dtype=torch.int32)  # rows for a graph that has more
    assert dsa_indexer.Indexer._get_topk_ragged(*arguments, room) is room
    assert torch.equal(room[: len(q)], got) and (room[len(q) :] == -7).all()


@pytest.mark.parametrize("prompts", [False, True])
def test_choices_are_recorded_and_played_back(prompts, pool):
    starts = torch.tensor([0, 3, 6, 9]).int() if prompts else None
    problem = random_problem("cpu", [700, 64, 300], heads=16, next_n=3)
    row_lens = (problem.seq_lens[:, None] - 2 + torch.arange(3)).flatten().int()
    positions, slots, _ = problem.want_topk(TOPK)
    kept = []
    replay.record(lambda layer, chosen, requests: kept.append((layer, chosen.clone(), requests)))
    q, weights = padded(problem)
    made = metadata(problem, row_lens, starts)
    ways = dsa_indexer.Indexer
    arguments = Indexer(problem.index_cache), *((False,) if prompts else ()), None, 7, q, weights, made
    choose = ways._get_topk_ragged if prompts else ways._get_topk_paged
    assert torch.equal(choose(*arguments)[:-2], slots)
    ((layer, recorded, requests),) = kept
    assert layer == "7" and requests.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert torch.equal(recorded, positions)
    replay.play(lambda layer, chosen, requests: chosen.copy_(positions))
    problem.index_cache.zero_()  # another choice, but for the list
    got = choose(*arguments)
    replay.record(None)
    replay.play(None)
    assert torch.equal(got[:-2], slots)


def test_without_the_switch_sglangs_own_method_runs(pool):
    same_bits.switch(False)
    problem = random_problem("cpu", [70], heads=16)
    with pytest.raises((AttributeError, TypeError, AssertionError)):
        dsa_indexer.Indexer._get_topk_paged(
            Indexer(problem.index_cache), None, 0, *padded(problem), metadata(problem, problem.seq_lens)
        )


@pytest.mark.parametrize("version", ["topk_transform_paged", "topk_transform_paged_v2"])
def test_v4_chooses_by_index_topk_where_it_asks_deep_gemm_for_logits(version, monkeypatch):
    problem = random_problem("cpu", [700, 64, 300], heads=64)
    looked = []
    deep_gemm = ModuleType("deep_gemm")
    deep_gemm.fp8_paged_mqa_logits = lambda *args: looked.append(args) or problem.logits()
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    idle = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))
    v4_indexer.C4IndexerBackendMixin.forward_c4_indexer(None, None, None, None, idle)
    cache = problem.index_cache.view(-1, 64, 1, 132)
    seq_lens, table = problem.seq_lens, problem.page_table
    scores = deep_gemm.fp8_paged_mqa_logits(
        problem.q[:, None], cache, problem.weights, seq_lens[:, None], table, None, 704, False
    )
    slots, raw = (torch.full((3, TOPK), 7, dtype=torch.int32) for _ in range(2))
    more = (None, raw) if version.endswith("v2") else (raw,)
    getattr(v4_indexer, version)(scores, seq_lens, table, slots, 64, *more)
    want = problem.want_topk(TOPK)
    assert torch.equal(raw, want[0]) and torch.equal(slots, want[1]) and not looked
    assert torch.equal(scores + 0, problem.logits()) and looked  # whoever else looks at them gets DeepGEMM's


def test_the_hooks_are_all_there():
    assert sglang_same_bits.why_not() is None
    assert set(sglang_same_bits.HOOKS) <= HookRegistry._patched
