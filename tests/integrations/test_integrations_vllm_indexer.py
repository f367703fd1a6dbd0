"""vLLM's indexer served by index_topk, over stand-ins with its signatures. ci/engines/test_in_vllm.py
runs the same in vLLM's own function."""

import logging
from types import SimpleNamespace

import engine_standins
import peer_standins
import pytest
import torch
from vllm_indexer_cases import Keys, Row

import mla_fp8_plugins
from mla_fp8.integrations import vllm_indexer

TOPK = 32


def fp8_fp4_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=None
):
    return torch.full((q[0].shape[0] * q[0].shape[1], max_model_len + 4), 0.5)[:, :max_model_len]


def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
    return torch.full((len(q[0]), max_seqlen_k), 0.25)


def top_k_per_row_prefill(
    logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens
):
    assert (stride0, stride1) == logits.stride() and num_rows == len(logits)
    raw_topk_indices.fill_(-25 if logits[0, 0] == 0.25 else -99)


def _select_candidate_blocks(logits, row_ks, row_ke, topk_blocks, block_size, out, row_repeat=1):
    out.fill_(-77)
    logits[:] = 0.5 + logits[0, 0] - logits[0, 0]  # whatever they are, they are looked at


def _apply_candidate_mask(logits, row_ks, row_ke, candidate_blocks, block_size, row_repeat=1):
    logits.mul_(1)


class SparseIndexerTopk:
    def forward(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len):
        topk_indices.fill_(-50 if logits[0, 0] == 0.5 else -99)


def get_indexer_topk(backend):
    return SparseIndexerTopk().forward


class WorkspaceManager:
    def get_simultaneous(self, *shapes_and_dtypes):
        raise AssertionError("Workspace is locked")


class Engine:
    """The module with vLLM's names, and what its function does with them."""

    def __init__(self, monkeypatch, plugins, dcp=None):
        engine_standins.vllm(monkeypatch, plugins)
        calls = peer_standins.install(monkeypatch, vllm_indexer._CALLS, top_k_per_row_prefill)
        choice = peer_standins.install(monkeypatch, vllm_indexer._CHOICE, SparseIndexerTopk)
        workspace = peer_standins.install(monkeypatch, vllm_indexer._WORKSPACE, WorkspaceManager)
        workspace.current_workspace_manager = WorkspaceManager
        names = (
            fp8_fp4_paged_mqa_logits, fp8_fp4_mqa_logits, get_indexer_topk,
            _select_candidate_blocks, _apply_candidate_mask,
        )  # fmt: skip
        self.module = peer_standins.install(monkeypatch, vllm_indexer.MODULE, *names)
        self.module.ops = calls
        self.parallel, self.modules = dcp, (calls, choice, workspace)
        self.module.get_dcp_group = self.get_dcp_group

    def get_dcp_group(self):
        assert self.parallel, "nothing is distributed"
        return SimpleNamespace(world_size=self.parallel)

    def decode(self, keys, q, weights, lens, table=None, topk=TOPK, between=lambda logits: None, **options):
        """q [requests, next_n, heads, 128]; the first columns of a buffer that is wider."""
        buffer = torch.full((q.shape[0] * q.shape[1] + 2, topk + 3), -5, dtype=torch.int32, device=q.device)
        logits = self.module.fp8_fp4_paged_mqa_logits(
            (q, options.get("q_scale")), keys.cache[:, :, None], weights, lens,
            keys.table if table is None else table, object(), max_model_len=900,
            indices=options.get("indices"),
        )  # fmt: skip
        between(logits)
        out = buffer[: logits.shape[0], :topk]
        self.module.get_indexer_topk("auto")(logits, lens, q.shape[1], out, topk, 900)
        assert (buffer[len(out) :] == -5).all() and (buffer[:, topk:] == -5).all()
        return out

    def prefill(self, q, weights, values, scales, starts, ends, topk=TOPK, between=lambda logits: None):
        out = torch.full((len(q), topk), -5, dtype=torch.int32, device=q.device)
        logits = self.module.fp8_fp4_mqa_logits((q, None), (values, scales), weights, starts, ends, 900)
        between(logits)
        self.module.ops.top_k_per_row_prefill(
            logits, torch.zeros_like(ends), ends - starts, out, logits.shape[0], logits.stride(0),
            logits.stride(1), topk,
        )  # fmt: skip
        return out


@pytest.fixture
def engine(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    found = Engine(monkeypatch, ["mla_fp8", vllm_indexer.NAME])
    for _ in range(2):  # vLLM may load plug-ins twice
        vllm_indexer.register()
    return found


@pytest.mark.parametrize("plugins", [None, [], ["mla_fp8", "mla_fp8_flash_mla"]])
def test_nothing_is_taken_over_unless_the_list_names_us(plugins, monkeypatch):
    module = Engine(monkeypatch, plugins).module
    mla_fp8_plugins.vllm_index_topk()
    assert module.fp8_fp4_paged_mqa_logits is fp8_fp4_paged_mqa_logits
    assert module.get_indexer_topk is get_indexer_topk
    assert module.ops.top_k_per_row_prefill is top_k_per_row_prefill


def test_what_another_version_lacks_is_said_and_nothing_is_taken_over(monkeypatch, caplog):
    def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, in_another_order):
        raise AssertionError

    module = Engine(monkeypatch, [vllm_indexer.NAME]).module
    module.fp8_fp4_mqa_logits = fp8_fp4_mqa_logits
    vllm_indexer.register()
    assert module.fp8_fp4_paged_mqa_logits is fp8_fp4_paged_mqa_logits
    assert "fp8_fp4_mqa_logits takes in_another_order, which ours does not" in caplog.text


def test_it_says_once_that_it_serves(engine, caplog):
    serves, pools = [record.getMessage() for record in caplog.get_records("setup")]
    assert serves == "mla_fp8 serves the indexer's logits and top-k, by index_topk: decode and prompts"
    assert "over pools of keys (GLM-5.3-Flash) stays vLLM's" in pools  # this stand-in has none


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("next_n", [1, 3])
def test_decode_is_exact_with_drafts_and_rows_that_pad_a_graph(next_n, per_row, engine, device):
    """Lengths on the device, of requests with all drafts or of rows; the last request is no request."""
    keys = Keys([500, 70, 20, 1], device=device)
    table = torch.cat([keys.table, torch.full_like(keys.table[:1], 1 << 30)])
    q, weights = keys.queries(5 * next_n)
    full = torch.tensor([500, 70, 20, 1, 0])
    each = (full[:, None] - next_n + 1 + torch.arange(next_n)).clamp_min(0)
    lens = (each if per_row else full[:, None]).int().to(device)
    out = engine.decode(keys, q.unflatten(0, (5, next_n)), weights, lens, table)
    assert (out[-next_n:] == -1).all()
    rows = [Row(r, int(n)) for r, request in enumerate(each[:4]) for n in request]
    keys.assert_chosen(out[: 4 * next_n], q, weights, rows, TOPK)


def test_a_chunk_of_prompts_is_exact_and_counts_within_its_requests(engine, device):
    keys = Keys([300, 90], device=device)
    values = torch.cat([x.view(torch.uint8) for x in keys.keys]).view(torch.float8_e4m3fn)
    scales, spans = torch.cat(keys.scales), [(0, n) for n in (1, 20, 33, 200, 299)] + [(1, 89), (1, 90)]
    q, weights = keys.queries(len(spans))
    starts = torch.tensor([300 * r for r, _ in spans], dtype=torch.int32, device=device)
    ends = starts + torch.tensor([n for _, n in spans], dtype=torch.int32, device=device)
    out = engine.prefill(q, weights, values, scales, starts, ends)
    keys.assert_chosen(out, q, weights, [Row(*span) for span in spans], TOPK)


def test_v41_publishes_blocks_and_chooses_among_them_without_logits(engine, device, caplog):
    """A layer publishes, others consume: decode with drafts, and a chunk of prompts."""
    keys = Keys([500, 70, 20], device=device)
    q, weights = keys.queries(6)
    full = torch.tensor([500, 70, 20])
    each = (full[:, None] - 1 + torch.arange(2)).int().to(device)
    rows = [Row(r, int(n)) for r, request in enumerate(each.tolist()) for n in request]
    blocks = torch.full((8, 5), -9, dtype=torch.int32, device=device)

    def publish(logits):
        bounds = each.flatten()
        engine.module._select_candidate_blocks(logits, None, bounds, 5, 8, blocks[: logits.shape[0]])

    def consume(logits):
        engine.module._apply_candidate_mask(logits, None, each.flatten(), blocks[: logits.shape[0]], 8)

    out = engine.decode(keys, q.unflatten(0, (3, 2)), weights, each, between=publish)
    keys.assert_chosen(out, q, weights, rows, TOPK)
    for i, row in enumerate(rows):
        assert torch.equal(blocks[i], keys.best_blocks(q[i], weights[i], row, 5))
    assert (blocks[6:] == -9).all()
    out = engine.decode(keys, q.unflatten(0, (3, 2)), weights, each, between=consume)
    for i, row in enumerate(rows):
        assert torch.equal(out[i], keys.best_in(blocks[i], q[i], weights[i], row, TOPK))
    starts = torch.zeros(6, dtype=torch.int32, device=device)
    ends = torch.tensor([1, 20, 200, 300, 499, 500], dtype=torch.int32, device=device)
    arguments = (q, weights, keys.keys[0], keys.scales[0], starts, ends)

    def publish_chunk(logits):
        engine.module._select_candidate_blocks(logits, None, ends, 5, 8, blocks[: len(ends)])

    chosen = engine.prefill(*arguments, between=publish_chunk)
    keys.assert_chosen(chosen, q, weights, [Row(0, int(n)) for n in ends], TOPK)
    assert blocks[0].tolist() == [0, -1, -1, -1, -1] and (blocks[5] == 62).any()
    assert "looks at them" not in caplog.text


def test_where_every_block_is_a_candidate_nobody_publishes_and_all_entries_are_chosen_among(engine, device):
    keys = Keys([500, 70], device=device)
    q, weights = keys.queries(2)
    lens = torch.tensor([[500], [70]], dtype=torch.int32, device=device)
    blocks = torch.full((2, 900), -9, dtype=torch.int32, device=device)  # of more than pages hold
    module, rows = engine.module, [Row(0, 500), Row(1, 70)]
    for between in (
        lambda logits: module._select_candidate_blocks(logits, None, lens.flatten(), 900, 8, blocks),
        lambda logits: module._apply_candidate_mask(logits, None, lens.flatten(), blocks, 8),
    ):
        chosen = engine.decode(keys, q[:, None], weights, lens, between=between)
        keys.assert_chosen(chosen, q, weights, rows, TOPK)
    assert (blocks == -9).all()


def test_blocks_of_another_size_are_vllms(engine, device, caplog):
    keys = Keys([40], device=device)
    q, weights = keys.queries(1)
    lens = torch.tensor([[40]], dtype=torch.int32, device=device)
    blocks = torch.zeros(1, 5, dtype=torch.int32, device=device)

    def between(logits):
        engine.module._select_candidate_blocks(logits, None, lens.flatten(), 5, 16, blocks)

    assert (engine.decode(keys, q[None], weights, lens, between=between) == -50).all()
    assert (blocks == -77).all() and "looks at them" in caplog.text


def test_what_was_put_off_is_done_to_logits_that_are_made(engine, device):
    keys = Keys([40], device=device)
    q, weights = keys.queries(1)
    lens = torch.tensor([[40]], dtype=torch.int32, device=device)
    blocks = torch.zeros(1, 5, dtype=torch.int32, device=device)

    def between(logits):
        engine.module._select_candidate_blocks(logits, None, lens.flatten(), 5, 8, blocks)
        assert (blocks == 0).all()
        masked(logits)

    assert (engine.decode(keys, q[None], weights, lens, between=between) == -50).all()
    assert (blocks == -77).all()


def masked(logits):
    logits.mul_(1)  # whatever writes to logits, as candidate blocks do


def test_whoever_looks_at_the_logits_gets_vllms_and_so_does_its_top_k(engine, device, caplog):
    keys = Keys([40], device=device)
    q, weights = keys.queries(1)
    lens = torch.tensor([[40]], dtype=torch.int32, device=device)
    assert (engine.decode(keys, q[None], weights, lens, between=masked) == -50).all()
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = (q, weights, keys.keys[0], keys.scales[0], starts, starts + 40)
    assert (engine.prefill(*arguments, between=masked) == -25).all()
    assert "logits are DeepGEMM's where mul_ looks at them" in caplog.text
    keys.assert_chosen(engine.prefill(*arguments), q, weights, [Row(0, 40)], TOPK)


@pytest.mark.parametrize(
    "topk, scales, indices, dcp, reason",
    [
        (5000, False, False, None, "where vLLM's top-k looks at them"),
        (TOPK, True, False, None, "stay vLLM's for queries of torch.float8_e4m3fn, 128 wide, with scales"),
        (TOPK, False, True, None, "stay vLLM's for rows that name their requests"),
        (TOPK, False, False, 4, "stay vLLM's for decode context parallel on 4 ranks"),
    ],
)
def test_what_does_not_fit_stays_vllms_and_is_said_once(topk, scales, indices, dcp, reason, engine, caplog):
    engine.parallel = dcp
    keys = Keys([40])
    q, weights = keys.queries(1)
    options = {"q_scale": weights if scales else None, "indices": object() if indices else None}
    lens = torch.tensor([[40]], dtype=torch.int32)
    for _ in range(2):
        assert (engine.decode(keys, q[None], weights, lens, topk=topk, **options) == -50).all()
    assert caplog.text.count(reason) == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda w, lens: (w.double(), lens), "weights of torch.float64"),
        (lambda w, lens: (w[:1], lens), "weights of other rows than the queries"),
        (lambda w, lens: (w, lens.long()), "lengths of torch.int64 that are not of rows or requests"),
        (lambda w, lens: (w, lens[:0]), "lengths of torch.int32 that are not of rows or requests"),
    ],
)
def test_tensors_of_another_kind_are_vllms(change, reason, engine, caplog):
    keys = Keys([40])
    q, weights = keys.queries(2)
    weights, lens = change(weights, torch.tensor([[40, 40]], dtype=torch.int32))
    assert (engine.decode(keys, q[None], weights, lens) == -50).all()
    assert reason in caplog.text


def test_logits_that_nobody_computed_have_their_shape(engine):
    keys = Keys([40])
    q, weights = keys.queries(2)
    lens = torch.tensor([[40, 40]], dtype=torch.int32)

    def look(logits):
        assert logits.shape == (2, 900) and logits.stride() == (900, 1) and logits.dtype is torch.float32
        assert len(logits) == logits.size(0) == 2 and logits.dim() == logits.ndim == 2
        assert logits.made is None
        assert logits.device.type == "cpu" and logits.made is not None
        assert logits.stride() == (904, 1) and logits.data_ptr() == logits.made.data_ptr()

    assert (engine.decode(keys, q[None], weights, lens, between=look) == -50).all()


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
@pytest.mark.parametrize("locked", [False, True])
def test_decode_takes_its_memory_from_vllms_workspace(locked, engine, monkeypatch):
    """A graph holds vLLM's address; locked and too small, a tensor of our own."""
    keys, buffer, asked = Keys([500], device="cuda"), torch.empty(64 << 20, dtype=torch.uint8).cuda(), []

    class Manager:
        def get_simultaneous(self, *wanted):
            asked.append(wanted)
            assert not locked
            ((size,), byte), ((rows,), integer) = wanted
            assert byte is torch.uint8 and integer is torch.int32
            at = -(-size // 256) * 256
            return [buffer[:size], buffer[at : at + 4 * rows].view(integer)]

    monkeypatch.setattr(engine.modules[2], "current_workspace_manager", Manager)
    q, weights = keys.queries(1)
    lens = torch.tensor([[500]], dtype=torch.int32, device="cuda")
    out = engine.decode(keys, q[None], weights, lens)
    keys.assert_chosen(out, q, weights, [Row(0, 500)], TOPK)
    assert len(asked) == 1


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
def test_a_graph_of_decode_is_replayed_with_other_lengths(engine):
    keys = Keys([500, 300], device="cuda")
    q, weights = keys.queries(2)
    lens = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    out = torch.full((2, TOPK), -5, dtype=torch.int32, device="cuda")

    def step():
        logits = engine.module.fp8_fp4_paged_mqa_logits(
            (q[:, None], None), keys.cache[:, :, None], weights, lens, keys.table, None, 900
        )
        engine.module.get_indexer_topk("auto")(logits, lens, 1, out, TOPK, 900)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for each in ((500, 300), (20, 0), (1, 299)):
        lens.copy_(torch.tensor(each)[:, None])
        graph.replay()
        keys.assert_chosen(out, q, weights, [Row(r, n) for r, n in enumerate(each)], TOPK)
