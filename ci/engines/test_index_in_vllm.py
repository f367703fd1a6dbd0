"""index_topk in a vLLM's own function of the indexer, without a GPU: probe.py runs it for each version."""

import without_gpu

without_gpu.pretend_vllm()

import inspect
from importlib import import_module

import pytest
import torch
import v32_indexer
import vllm

from mla_fp8.integrations import vllm_indexer


@pytest.fixture(scope="module", autouse=True)
def plugins():
    """Loaded twice, as a vLLM may do it."""
    vllm.envs.VLLM_PLUGINS = [vllm_indexer.NAME]
    for _ in range(2):
        vllm_indexer.register()


@pytest.mark.parametrize(
    "batch",
    [
        {"decodes": [(500, 1), (70, 1), (9, 1)]},
        {"decodes": [(500, 1), (70, 1)], "padded": 2},
        {"decodes": [(500, 2), (70, 2), (2, 2)], "padded": 1},
        {"decodes": [(500, 3), (70, 1), (300, 4)], "native": False},
        {"decodes": [(500, 3), (70, 1), (300, 4)], "native": False, "padded": 1},
        {"decodes": [], "prompts": [(9, 300), (5, 5), (40, 100)]},
        {"decodes": [], "prompts": [(9, 300), (5, 5), (40, 100)], "chunks": 3},
        {"decodes": [(500, 2), (70, 2)], "prompts": [(40, 100), (1, 129)], "chunks": 2},
    ],
    ids=["decode", "padded", "drafts", "flat", "flat padded", "prompts", "chunks", "mixed"],
)
def test_the_indexer_chooses_exactly_through_us(batch, monkeypatch):
    """vLLM's function and metadata; DeepGEMM and vLLM's top-k are not here."""
    torch.manual_seed(0)
    made = v32_indexer.Batch(**{"prompts": [], **batch})
    made.assert_chosen(made.run(monkeypatch))


def test_the_layers_call_the_function_that_is_ours():
    from vllm.models.deepseek_v4 import attention as v4
    from vllm.models.deepseek_v32 import attention as v32

    layer = v32_indexer.layer
    assert v32.sparse_attn_indexer is layer.sparse_attn_indexer
    assert v32.SparseAttnIndexer is v4.SparseAttnIndexer is layer.SparseAttnIndexer
    names = [*vllm_indexer._LOGITS, "get_indexer_topk"]
    names += [name for name in vllm_indexer._BLOCKS if hasattr(layer, name)]
    assert all(getattr(layer, name).taken_over_by_mla_fp8 for name in names)
    assert set(names) <= set(inspect.unwrap(layer.sparse_attn_indexer).__code__.co_names)


def test_decode_takes_its_memory_from_vllms_workspace_while_that_is_large_enough(monkeypatch):
    """A tensor without memory stands for a GPU's; vLLM's workspace is on the CPU."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    def of_132_sms(rows, *, topk, device, **sizes):
        return torch.ops.mla_fp8.index_topk_workspace(rows, topk, 132, **sizes)

    monkeypatch.setattr(vllm_indexer, "index_topk_workspace", of_132_sms)
    workspace, gpu = v32_indexer.workspace, torch.device("meta")
    workspace.init_workspace_manager(torch.device("cpu"))
    for rows, locked in ((5, False), (3, False), (3, True), (4096, True)):
        if locked:
            workspace.lock_workspace()
        lens, memory = vllm_indexer._scratch(rows, 2048, gpu, captured=True)
        (whole,) = workspace.current_workspace_manager()._current_workspaces
        assert lens.shape == (rows,) and lens.dtype is torch.int32 and memory.dtype is torch.uint8
        assert len(memory) == torch.ops.mla_fp8.index_topk_workspace(rows, 2048, 132)
        if rows == 4096:
            assert memory.device == lens.device == gpu
            continue
        assert memory.data_ptr() == whole.data_ptr() and memory.data_ptr() % 16 == 0
        assert lens.data_ptr() >= memory.data_ptr() + len(memory)
    assert all(x.device == gpu for x in vllm_indexer._scratch(3, 2048, gpu, captured=False))


@pytest.mark.skipif(not hasattr(v32_indexer.layer, "_select_candidate_blocks"), reason="a vLLM without V4.1")
@pytest.mark.parametrize(
    "batch",
    [
        {"decodes": [(500, 1), (170, 1), (9, 1)]},
        {"decodes": [(500, 2), (170, 2), (9, 2)], "padded": 1},
        {"decodes": [(500, 3), (170, 1), (300, 4)], "native": False},
        {"decodes": [], "prompts": [(9, 300), (5, 5), (40, 200)], "chunks": 3},
        {"decodes": [(500, 2), (170, 2)], "prompts": [(40, 200), (1, 129)], "chunks": 2},
    ],
    ids=["decode", "drafts", "flat", "prompts", "mixed"],
)
def test_each_kind_of_v41s_index_layers_chooses_through_us(batch, monkeypatch):
    """One that publishes blocks, two that consume them and a plain one, by the arguments of vLLM's layers."""
    torch.manual_seed(0)
    made, number = v32_indexer.Batch(**{"prompts": [], **batch}), 10
    real = [(i, row) for i, row in enumerate(made.rows) if row is not None]
    blocks = torch.full((len(made.rows), number), -7, dtype=torch.int32)
    level = {"candidate_blocks": blocks, "candidate_block_size": 8}
    made.assert_chosen(made.run(monkeypatch, **level, candidate_write=True))
    for i, row in real:
        assert torch.equal(blocks[i], made.keys.best_blocks(made.q[i], made.weights[i], row, number))
    published = blocks.clone()
    for _ in range(2):
        made.q, made.weights = made.keys.queries(len(made.rows))
        got = made.run(monkeypatch, **level, candidate_write=False)
        for i, row in real:
            want = made.keys.best_in(blocks[i], made.q[i], made.weights[i], row, v32_indexer.TOPK)
            assert torch.equal(got[i], want)
    assert torch.equal(blocks, published)
    made.assert_chosen(made.run(monkeypatch))


@pytest.mark.parametrize("batch", ["decode", "prompts"])
def test_logits_that_candidate_blocks_mask_are_vllms_and_so_is_the_choice(batch, monkeypatch):
    """V4.1: entries outside of a row's blocks of 8 are masked before the top-k."""
    torch.manual_seed(0)
    decodes, prompts = ([(500, 1), (70, 1)], []) if batch == "decode" else ([], [(9, 300)])
    made, layer = v32_indexer.Batch(decodes, prompts), v32_indexer.layer
    masked = []

    def mask(logits, row_starts, row_ends, candidates, block_size, row_repeat=1):
        masked.append(logits)
        logits[:, :block_size] = float("-inf")  # in place, as vLLM's kernel

    original = import_module("vllm.utils.deep_gemm")
    monkeypatch.setattr(original, "_lazy_init", lambda: None)
    monkeypatch.setattr(original, "_fp8_fp4_paged_mqa_logits_impl", made.paged_logits)
    monkeypatch.setattr(original, "_fp8_fp4_mqa_logits_impl", made.ragged_logits)
    monkeypatch.setattr(layer, "_apply_candidate_mask", mask)
    monkeypatch.setattr(torch.ops._C, "top_k_per_row_prefill", made.top_k_per_row_prefill, raising=False)
    candidates = torch.zeros(len(made.rows), 4, dtype=torch.int32)
    options = {"candidate_blocks": candidates, "candidate_block_size": 8, "topk_backend": "torch"}
    got = made.run(monkeypatch, **options)
    assert len(masked) == 1 and (got[:, :4] >= 0).all()
    assert (got != 0).all() and not ((got >= 0) & (got < 8)).any()
    assert sorted(got[0].tolist()) == made.best(0, beyond=8)
