"""GLM-5.3-Flash's indexer in a vLLM's own function, on its own metadata, without a GPU: by probe.py."""

import without_gpu

without_gpu.pretend_vllm()

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import vllm

# The package without its model, which imports torchvision.
package = ModuleType("vllm.models.glm5next")
package.__path__ = [str(Path(vllm.__file__).parent / "models/glm5next")]
sys.modules[package.__name__] = package

from vllm.config import CUDAGraphMode
from vllm.models.glm5next.nvidia import sparse_indexer as layer
from vllm.v1.attention.backends.mla import indexer

from mla_fp8 import INDEX_LAYOUTS
from mla_fp8 import index_reference as reference
from mla_fp8.integrations import vllm_indexer, vllm_pools

LAYOUT, POOL, RING, PAGE, PAGES, TOPK, HEADS = INDEX_LAYOUTS["index_fp8"], 4, 8, 64, 3, 32, 32
OWN, TAIL = "layer.k_cache", "layer.tail_cache"


@pytest.fixture(scope="module", autouse=True)
def plugins():
    """Loaded twice, as a vLLM may do it."""
    vllm.envs.VLLM_PLUGINS = [vllm_indexer.NAME]
    for _ in range(2):
        vllm_indexer.register()
    assert vllm_pools.why_not() is None and vllm_pools.layer_is_ours() and vllm_pools.layer_is_ours()


class Engine:
    """Requests with all tokens that they will have; vLLM's caches, block tables and builder of the tail."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.k = [torch.randn(n, 128).bfloat16() for n in lengths]
        self.gate = [torch.randn(n, 128).bfloat16() for n in lengths]
        self.ape = torch.nn.Parameter(torch.randn(POOL, 128))
        n = len(lengths)
        self.table = torch.randperm(n * PAGES).int().view(n, PAGES)
        memory = torch.full((n * PAGES, PAGE * 132 + 256), 0xA5, dtype=torch.uint8)  # pages further apart
        self.cache = memory.as_strided((n * PAGES, PAGE, 132), (memory.stride(0), 132, 1))
        self.tail_table = torch.randperm(n).int()[:, None] + 1  # block 0 is nobody's
        self.tail = torch.full((n + 1, 2, RING, 128), float("nan"), dtype=torch.bfloat16)
        self.builder = SimpleNamespace(
            kv_cache_spec=SimpleNamespace(block_size=RING),
            slot_mapping_buffer=torch.empty(512, dtype=torch.int64),
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8)),
        )  # fmt: skip

    def slot(self, request: int, position: int) -> int:
        """Of the pool that it closes."""
        pool = position // POOL
        return (
            int(self.table[request, pool // PAGE]) * PAGE + pool % PAGE if position % POOL == POOL - 1 else -1
        )

    def step(self, monkeypatch, batch: list[tuple[int, int, int]], padding: int = 0, wrong: int = 0):
        """batch: (request, first position, tokens), the last `wrong` of which are drafts of other tokens.

        Returns the rows of vLLM's buffer, and (request, position) of each.
        """
        given, rows = self.arguments(monkeypatch, batch, padding, wrong)
        out, total = given["topk_indices_buffer"], len(rows) + padding
        assert layer.sparse_attn_indexer_kpool(**given) is out
        assert (out[total + 1 :] == -5).all() and (out[total] == -1).all()
        return out[: len(rows)], rows

    def arguments(self, monkeypatch, batch: list[tuple[int, int, int]], padding: int = 0, wrong: int = 0):
        rows = [(r, p) for r, first, n in batch for p in range(first, first + n)]
        k, gate = (torch.stack([x[r][p] for r, p in rows]) for x in (self.k, self.gate))
        if wrong:
            k[-wrong:], gate[-wrong:] = 9.0, 9.0
        k, gate = (torch.cat([x, torch.full((padding, 128), torch.nan).bfloat16()]) for x in (k, gate))
        lens = torch.tensor([n for *_, n in batch] + [0] * bool(padding), dtype=torch.int32)
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        requests = torch.tensor([r for r, *_ in batch] + [0] * bool(padding))
        positions = torch.tensor([p for _, p in rows] + [0] * padding)
        total = len(rows) + padding
        common = SimpleNamespace(
            num_reqs=len(lens), num_actual_tokens=len(rows), max_query_len=int(lens.max()), max_seq_len=99,
            query_start_loc=starts, query_start_loc_cpu=starts, positions=positions,
            seq_lens=torch.tensor([p + n for _, p, n in batch] + [0] * bool(padding), dtype=torch.int32),
            slot_mapping=torch.full((total,), -1), is_prefilling=None,
            block_table_tensor=self.tail_table[requests] * (lens[:, None] > 0),
        )  # fmt: skip
        tail = indexer.KpoolTailMetadataBuilder.build(self.builder, 0, common)
        own = indexer.DeepseekV32IndexerMetadata(
            seq_lens=common.seq_lens, max_seq_len=99, num_decodes=0, num_decode_tokens=0, num_prefills=0,
            num_prefill_tokens=0, block_table=self.table[requests],
            slot_mapping=torch.tensor([self.slot(*row) for row in rows] + [-1] * padding),
        )  # fmt: skip
        context = SimpleNamespace(
            attn_metadata={OWN: own, TAIL: tail}, cudagraph_runtime_mode=CUDAGraphMode.NONE
        )
        monkeypatch.setattr(layer, "get_forward_context", lambda: context)
        self.q = torch.randint(-2, 3, (total, HEADS, 128)).to(torch.float8_e4m3fn)
        self.weights = torch.randint(-2, 3, (total, HEADS)).float()
        return {
            "hidden_states": torch.empty(total + 1, 1), "k_cache_prefix": OWN, "kv_cache": self.cache,
            "q_quant": self.q, "q_scale": None, "k": k, "weights": self.weights, "quant_block_size": 128,
            "scale_fmt": "ue8m0", "topk_tokens": TOPK, "head_dim": 128, "max_pool_len": 99,
            "total_seq_lens": 999, "skip_k_cache_insert": False, "gate_score": gate, "compress_ape": self.ape,
            "topk_indices_buffer": torch.full((total + 3, TOPK + POOL + 2), -5, dtype=torch.int32),
            "index_kpool": POOL, "positions": positions, "tail_kv_cache": self.tail, "tail_prefix": TAIL,
        }, rows  # fmt: skip

    def pages(self) -> torch.Tensor:
        return self.cache.as_strided((len(self.cache), PAGE * 132), (self.cache.stride(0), 1))

    def assert_chosen(self, got: torch.Tensor, rows: list[tuple[int, int]]) -> None:
        """By the logits of what is in the cache: pools, then the tokens behind the last whole one."""
        keys = reference.index_keys(self.pages().contiguous(), LAYOUT, PAGE)
        for i, (request, position) in enumerate(rows):
            pools = (position + 1) // POOL
            slots = [self.slot(request, p * POOL + POOL - 1) for p in range(pools)]
            k, scale = (x[slots] for x in keys)
            logits = reference.logits_of(self.q[i : i + 1], self.weights[i : i + 1], k, scale, None)
            chosen, _ = reference.index_topk(logits, [torch.ones(pools, dtype=torch.bool)], topk=TOPK // POOL)
            want = [p * POOL + j for p in chosen[0].tolist() if p >= 0 for j in range(POOL)]
            want += range(pools * POOL, position + 1)
            assert got[i].tolist() == want + [-1] * (got.shape[1] - len(want)), (request, position)

    def assert_stored(self, request: int, end: int) -> None:
        """All pools of the first `end` tokens, near float32's."""
        found = reference.pool_index_k(
            self.k[request][:end], self.gate[request][:end], torch.tensor([0, end]), torch.tensor([0]), {},
            torch.tensor([0]), self.ape.detach(),
        )  # fmt: skip
        slots = torch.tensor([self.slot(request, token) for token, _ in found])
        want = torch.zeros(len(self.cache), PAGE * 132, dtype=torch.uint8)
        reference.quantize_index_k(
            torch.stack([x for _, x in found]), slots, want, layout=LAYOUT, page_size=PAGE, hadamard=True
        )
        (got, scale), (exact, exact_scale) = (
            reference.index_keys(x, LAYOUT, PAGE) for x in (self.pages().contiguous(), want)
        )
        got, exact = (x[slots].float() * s[slots, None] for x, s in ((got, scale), (exact, exact_scale)))
        assert len(found) == end // POOL and (got - exact).abs().max() < 2.0**-3 * exact.abs().max()
        assert (got != exact).float().mean() < 0.05


def test_prompts_decode_and_drafts_in_a_life_of_requests(monkeypatch):
    """Chunks that end within a pool, rejected drafts, rows that pad a graph, a request that comes later."""
    engine = Engine([300, 120, 90])
    steps = [
        ([(0, 0, 150)], {}),
        ([(0, 150, 51), (1, 0, 37)], {}),
        ([(0, 201, 1), (1, 37, 1)], {"padding": 2}),
        ([(1, 38, 4), (0, 202, 4)], {"wrong": 3}),
        ([(0, 203, 4), (1, 42, 1), (2, 0, 60)], {}),
        ([(0, 207, 1), (2, 60, 2), (1, 43, 3)], {"wrong": 2, "padding": 1}),
        ([(1, 44, 1), (0, 208, 5), (2, 62, 3)], {}),
        ([(2, 65, 1), (0, 213, 1), (1, 45, 1)], {}),
    ]
    done = {}
    for batch, options in steps:
        got, rows = engine.step(monkeypatch, batch, **options)
        engine.assert_chosen(got, rows)
        done |= {r: first + n for r, first, n in batch}
        done[batch[-1][0]] -= options.get("wrong", 0)
        for request, end in done.items():
            engine.assert_stored(request, end)
    assert engine.tail[0].isnan().all()  # the block of nobody


def test_a_draft_models_further_steps_have_their_own_requests(monkeypatch):
    """vLLM changes positions in place; the same metadata is asked again."""
    engine = Engine([40, 40])
    engine.step(monkeypatch, [(0, 0, 5), (1, 0, 6)])
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    positions = torch.tensor([5, 6])
    common = SimpleNamespace(
        num_reqs=2, num_actual_tokens=2, max_query_len=1, max_seq_len=9, query_start_loc=starts,
        query_start_loc_cpu=starts, positions=positions, seq_lens=positions.int() + 1, is_prefilling=None,
        slot_mapping=torch.full((2,), -1), block_table_tensor=engine.tail_table,
    )  # fmt: skip
    builder = indexer.KpoolTailMetadataBuilder
    made = builder.build(engine.builder, 0, common)
    found = made.mla_fp8_requests
    assert (
        found.start_pos.tolist() == [5, 6] and found.state_slots.tolist() == engine.tail_table[:, 0].tolist()
    )
    address = found.start_pos.data_ptr()
    made.num_decode_tokens = 2
    positions += 1
    builder.update_draft_decode_metadata(engine.builder, made)
    assert (
        found.start_pos.tolist() == [6, 7] and found.state_slots.tolist() == engine.tail_table[:, 0].tolist()
    )
    assert builder.build(engine.builder, 0, common).mla_fp8_requests.start_pos.data_ptr() == address


@pytest.mark.parametrize(
    "change",
    [
        {"index_kpool": 8}, {"scale_fmt": None}, {"gate_score": None}, {"tail_kv_cache": None},
        {"use_fp4_cache": True}, {"weights": torch.ones(2, 2)}, {"positions": None}, {"topk_tokens": 30},
        {"dcp_world_size": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_ours_stays_vllms(change, monkeypatch):
    given, _ = Engine([40]).arguments(monkeypatch, [(0, 0, 5)])
    asked = []
    vllm_pools.sparse_attn_indexer_kpool(lambda **options: asked.append(options), **given | change)
    assert len(asked) == 1 and asked[0] == given | change and (given["topk_indices_buffer"] == -5).all()
