"""index_topk over pools of keys in SGLang's own indexer of GLM-5.3-Flash, without a GPU."""

import without_gpu

without_gpu.pretend_sglang()

import os
from types import SimpleNamespace

os.environ["SGLANG_PLUGINS"] = "mla_fp8,mla_fp8_index_topk"

import pytest
import torch
from index_cases import random_problem
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa import dsa_indexer, dsa_indexer_kpool, dsa_topk_backend
from sglang.srt.plugins.hook_registry import HookRegistry

from mla_fp8.integrations import sglang as plugin
from mla_fp8.integrations import sglang_indexer

KPOOL, TOPK, METHOD = 4, 128, dsa_topk_backend.TopkTransformMethod


@pytest.fixture(scope="module", autouse=True)
def plugged():
    plugin.register()
    sglang_indexer.register()
    HookRegistry.apply_hooks()
    yield
    sglang_indexer.switch(False)


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: SimpleNamespace(index_page_size=64))


class IndexerKPool(dsa_indexer_kpool.IndexerKPool):
    def __init__(self, cache: torch.Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.cache, self.index_kpool, self.index_topk = cache, KPOOL, TOPK

    def _get_index_k_read_buffer(self, pool, layer_id):
        return self.cache


class Step:
    """A problem over pools, and `behind` tokens more of each row; SGLang's tables of both."""

    def __init__(self, lens: list[int], **options) -> None:
        torch.manual_seed(len(lens))
        self.problem = random_problem("cpu", lens, heads=32, **options)
        rows = len(self.problem.q)
        pages = self.problem.page_table
        self.pages_of_tokens = (pages[:, :, None] * KPOOL + torch.arange(KPOOL)).flatten(1).int()
        self.pools, _, self.lens = self.problem.want_topk(TOPK // KPOOL)
        self.seen = options.get("row_lens", self.problem.seq_lens)
        self.tokens = (self.seen * KPOOL + torch.arange(rows) % KPOOL).int()
        self.table = torch.stack([torch.randperm(1 << 12) for _ in range(len(pages))]).int()
        self.q = torch.cat([self.problem.q, self.problem.q[:2]])  # two rows that pad
        self.weights = torch.cat([self.problem.weights, self.problem.weights[:2]])[..., None]

    def want(self, of) -> list[list[int]]:
        """By `of` (row, token)."""
        found = []
        for row, (pools, tokens) in enumerate(zip(self.pools.tolist(), self.tokens.tolist(), strict=True)):
            own = [p * KPOOL + i for p in pools if p >= 0 for i in range(KPOOL)]
            own += range(tokens - tokens % KPOOL, tokens)
            found.append([of(row, t) for t in own] + [-1] * (TOPK + KPOOL - 1 - len(own)))
        return found

    def assert_chosen(self, got: torch.Tensor, of) -> None:
        assert got.dtype is torch.int32 and got[:-2].tolist() == self.want(of) and (got[-2:] == -1).all()


def metadata(step: Step, kind: str, **of):
    names = (
        "kpool_write_plan", "pooled_cache_seqlens_int32", "pooled_topk_v2_plan", "pooled_real_page_table",
        "pooled_paged_mqa_schedule_metadata", "pooled_index_kpool", "kpool_extend_plan",
    )  # fmt: skip
    offsets = torch.arange(len(step.tokens)).int() * 5000
    found = SimpleNamespace(**dict.fromkeys(names), page_table_1=step.table, topk_indices_offset=offsets)
    vars(found).update(of)
    envs.SGLANG_DSA_FUSE_TOPK.set(kind != "positions")
    return SimpleNamespace(
        attn_metadata=found, get_page_table_64=lambda: step.pages_of_tokens,
        get_seqlens_int32=lambda: step.tokens, get_seqlens_expanded=lambda: step.tokens,
        topk_transform_method=METHOD.RAGGED if kind == "rows of a copy" else METHOD.PAGED,
    )  # fmt: skip


def mode(verify: bool):
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: verify, is_draft_extend_v2=lambda: False)
    )


KINDS = pytest.mark.parametrize("kind", ["slots", "positions", "rows of a copy"])


def of_kind(kind: str, table_row):
    return {
        "slots": lambda row, t: int(table_row(row)[t]), "positions": lambda _, t: t,
        "rows of a copy": lambda row, t: 5000 * row + t,
    }[kind]  # fmt: skip


def test_nothing_that_we_build_on_is_missing():
    assert sglang_indexer.why_not("GLM-5.3-Flash") is None
    assert set(sglang_indexer.HOOKS["GLM-5.3-Flash"]) <= HookRegistry._patched


@KINDS
@pytest.mark.parametrize("verify", [False, True])
def test_decode_and_drafts_choose_pools(kind, verify):
    """A row of both tables for each query, drafts or not; with SGLang's pooled table, and without."""
    step = Step([200, 9, 0, 75])
    step.seen = step.tokens // KPOOL
    given = metadata(step, kind)
    if verify:
        given.attn_metadata.kpool_write_plan = SimpleNamespace(
            pool_seqlens_per_q=step.seen.int(), pool_schedule_metadata=None, pool_topk_v2_plan=None
        )
    indexer = IndexerKPool(step.problem.index_cache)
    got = indexer._get_topk_paged(mode(verify), 0, step.q, step.weights, given)
    step.assert_chosen(got, of_kind(kind, lambda row: step.table[row]))


@KINDS
def test_prompts_choose_pools(kind):
    """Rows of three requests in one call, over pages."""
    starts, request = torch.tensor([0, 2, 3, 7]).int(), torch.tensor([0, 0, 1, 2, 2, 2, 2]).int()
    seen = torch.tensor([99, 100, 64, 230, 231, 232, 233]).int()
    step = Step([100, 64, 233], num_rows=7, row_lens=seen, query_start_loc=starts)
    plan = SimpleNamespace(
        cp=None, pooled_seq_lens_expanded=seen, seq_lens_expanded=step.tokens,
        ragged_paged_page_table=step.table, ragged_paged_page_table_row_index=request,
    )  # fmt: skip
    given = metadata(step, kind, kpool_extend_plan=plan, cu_seqlens_q=starts)
    indexer = IndexerKPool(step.problem.index_cache)
    got = indexer._get_topk_ragged_kpool_plan(None, 0, step.q, step.weights, given)
    step.assert_chosen(got, of_kind(kind, lambda row: step.table[int(request[row])]))
