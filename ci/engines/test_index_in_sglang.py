"""index_topk in SGLang's own indexers of V3.2, V4 and V4.1, without a GPU."""

import without_gpu

without_gpu.pretend_sglang()

import os
from types import SimpleNamespace

os.environ["SGLANG_PLUGINS"] = "mla_fp8,mla_fp8_index_topk"

import pytest
import torch
from sglang.srt.layers.attention.dsv4 import dsv41_sparse, v41_indexer
from sglang.srt.layers.attention.dsv4.metadata import expand_index_page_table
from sglang.srt.layers.attention.dsv4.v41_indexer import dense_blocks, full_topk, scoring
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4IndexerPool
from sglang.srt.plugins.hook_registry import HookRegistry

import mla_fp8
from mla_fp8.compat import sglang_indexer as ours
from mla_fp8.integrations import sglang as plugin
from mla_fp8.integrations import sglang_indexer

TOPK, NUM_BLOCKS, HEADS, DIM, KV_PAGE, INDEX_PAGE = 16, 5, 8, 128, 256, 64
FP4 = mla_fp8.INDEX_LAYOUTS["index_fp4"]
LENGTHS = [300, 9, 64, 517]  # tokens
RATIOS = pytest.mark.parametrize("ratio", [1, 2])


@pytest.fixture(scope="module", autouse=True)
def plugged():
    plugin.register()
    sglang_indexer.register()
    HookRegistry.apply_hooks()
    yield
    sglang_indexer.switch(False)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """SGLang's own way where there is no Hopper GPU, with its one kernel of decode in PyTorch."""

    def logits(q, weights, slots, lens, table, page_size):
        keys = SimpleNamespace(
            use_fp4_indexer=True, start_layer=0, index_k_with_scale_buffer=[table], page_size=page_size
        )
        found = [
            dsv41_sparse.DeepseekV41Indexer.scores(
                None,
                q[r : r + 1],
                DeepSeekV4IndexerPool.get_index_k_dequant(keys, 0, row),
                weights[r : r + 1],
            )[0]
            for r, row in enumerate(slots)
        ]
        beyond = torch.arange(slots.shape[1])[None] >= lens[:, None]
        return torch.stack(found).masked_fill(beyond, -torch.inf)

    monkeypatch.setattr(scoring, "fp4_index_logits_decode", logits)
    monkeypatch.setattr(scoring, "get_platform", lambda: SimpleNamespace(is_sm90=False))


class Indexer(dsv41_sparse.DeepseekV41Indexer):
    """SGLang's, with projections that give small integers, of which its bf16 sums are exact."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.n_heads = self.n_local_heads = HEADS
        self.index_head_dim, self.rope_head_dim, self.index_topk = DIM, 64, TOPK
        self.softmax_scale, self.weights_proj_small_max_m = HEADS**0.5, 0
        self.wq_b = self.weights_proj = lambda x: (x, None)


class Pool:
    page_size = KV_PAGE
    wait_layer_transfer = staticmethod(lambda layer_id: None)

    def __init__(self, pages: int, ratio: int) -> None:
        self.index = SimpleNamespace(
            use_fp4_indexer=True, start_layer=0, page_size=INDEX_PAGE,
            index_k_with_scale_buffer=[FP4.empty(pages * KV_PAGE // ratio // INDEX_PAGE, INDEX_PAGE, "cpu")],
        )  # fmt: skip
        self.index.index_k_with_scale_buffer[0].fill_(0xA5)

    def get_index_k_page_size(self, compress_ratio: int) -> int:
        return INDEX_PAGE

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.index.index_k_with_scale_buffer[0]

    def get_low_ratio_index_k_dequant(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        return DeepSeekV4IndexerPool.get_index_k_dequant(self.index, 0, slots)


def integers(*shape: int) -> torch.Tensor:
    """Few that are not zero, so that sums stay below 256."""
    return torch.randint(-2, 3, shape) * (torch.rand(shape) < 4 / 128)


class Model:
    """Requests of LENGTHS tokens in pages of their own, and layers of one ratio over their keys."""

    def __init__(self, ratio: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.ratio, requests = ratio, len(LENGTHS)
        pages = [-(-n // KV_PAGE) for n in LENGTHS]
        order = torch.randperm(sum(pages) + 1).split([*pages, 1])
        self.req_to_token = torch.zeros(requests + 1, 4 * KV_PAGE, dtype=torch.int32)
        self.page_table = torch.zeros(requests, 4, dtype=torch.int32)
        for r, own in enumerate(order[:requests]):
            self.page_table[r, : len(own)] = own
            tokens = own[:, None] * KV_PAGE + torch.arange(KV_PAGE)
            self.req_to_token[r + 1, : tokens.numel()] = tokens.flatten()
        self.requests = torch.arange(1, requests + 1)  # rows of req_to_token
        self.pool, self.indexer = Pool(sum(pages) + 1, ratio), Indexer()
        self.slots = scoring.prefill_k_slots(
            req_to_token=self.req_to_token, req_pool_indices=self.requests, seq_lens_cpu=LENGTHS, ratio=ratio
        )
        self.keys = integers(len(self.slots), DIM).bfloat16()
        mla_fp8.quantize_index_k(
            self.keys, self.slots, self.pool.get_index_k_with_scale_buffer(0), layout=FP4,
            page_size=INDEX_PAGE,
        )  # fmt: skip
        given = {"token_to_kv_pool": self.pool, "req_to_token": self.req_to_token}
        self.full = full_topk.FullTopKIndexer(
            **given, use_deep_gemm_prefill=False, use_deep_gemm_decode=False
        )
        self.levels = dense_blocks.DenseBlocksBackend(
            **given, candidate_topk_blocks=NUM_BLOCKS, candidate_block_size=8, use_deep_gemm_prefill=False
        )

    def layer(self, rows: int) -> dict:
        """What a layer projects for its rows, with rotations by no angle."""
        q = integers(rows, HEADS, DIM).bfloat16().flatten(1)
        x = torch.randint(1, 3, (rows, HEADS)).bfloat16()
        freqs = torch.ones(4 * KV_PAGE, 32, dtype=torch.complex64)
        return {"indexer": self.indexer, "layer_id": 20, "x": x, "q_lora": q, "freqs_cis": freqs}

    def decode(self, drafts: int = 1, **given) -> v41_indexer.DecodeInputs:
        last = torch.tensor(LENGTHS)[:, None] - drafts + torch.arange(drafts)
        positions = last.flatten()
        table = expand_index_page_table(
            self.page_table.repeat_interleave(drafts, 0), full_page_size=KV_PAGE, compress_ratio=self.ratio,
            index_page_size=INDEX_PAGE,
        )  # fmt: skip
        metadata = SimpleNamespace(
            rows_per_request=drafts, page_table=table, compressed_page_size=INDEX_PAGE,
            compressed_seq_lens=((positions + 1) // self.ratio).clamp_min(1).int(),
            max_compressed_seq_len=table.shape[1] * INDEX_PAGE,
        )  # fmt: skip
        return v41_indexer.DecodeInputs(
            **self.layer(len(positions)) | given, compress_ratio=self.ratio, positions=positions,
            req_rows=self.requests.repeat_interleave(drafts), paged_metadata=metadata, is_verify=drafts > 1,
            out_page_indices=torch.full((len(positions), TOPK + 8), -1, dtype=torch.int32)[:, :TOPK],
        )  # fmt: skip

    def prefill(self, rows=(5, 9, 0, 40), slots=True, plans=None, **given) -> v41_indexer.PrefillInputs:
        positions = torch.cat([torch.arange(n - m, n) for n, m in zip(LENGTHS, rows, strict=True)])
        repeats, total = torch.tensor(rows), sum(rows)
        out = {
            name: torch.full((total, TOPK), 7, dtype=torch.int32)
            for name in ("out_raw_indices", "out_page_indices")
        }
        if not slots:
            out["out_page_indices"] = None
        return v41_indexer.PrefillInputs(
            **self.layer(total) | given, compress_ratio=self.ratio, positions=positions,
            req_rows=self.requests.repeat_interleave(repeats), req_pool_indices=self.requests,
            k_slots=self.slots, index_plans=plans,
            kv_page_table=self.page_table.repeat_interleave(repeats, 0), seq_lens_cpu=LENGTHS,
            rows_per_request=list(rows), rows_per_request_device=repeats.int(), **out,
        )  # fmt: skip

    def scores(self, inputs) -> torch.Tensor:
        """float64 [rows, longest]: what each row sees, by the numbers that SGLang reads; else -inf."""
        q = self.indexer.queries(inputs.q_lora, inputs.freqs_cis[inputs.positions]).double()
        weights = self.indexer.head_weights(inputs.x).double()
        keys = self.pool.get_low_ratio_index_k_dequant(0, self.slots).double()
        counts = [n // self.ratio for n in LENGTHS]
        scores = torch.full((len(q), max(counts)), -torch.inf, dtype=torch.float64)
        for row, request in enumerate(inputs.req_rows.tolist()):
            own = keys.split(counts)[request - 1][: (int(inputs.positions[row]) + 1) // self.ratio]
            scores[row, : len(own)] = (weights[row, :, None] * (q[row] @ own.T).relu()).sum(0)
        return scores

    def chosen(self, inputs) -> torch.Tensor:
        """Positions, of the slots where there is no more: ascending, then -1."""
        if getattr(inputs, "out_raw_indices", None) is not None:
            return inputs.out_raw_indices
        positions = torch.full_like(inputs.out_page_indices, -1)
        starts = torch.tensor([0, *LENGTHS[:-1]]) // self.ratio
        starts = starts.cumsum(0)
        for row, request in enumerate(inputs.req_rows.tolist()):
            count = LENGTHS[request - 1] // self.ratio
            own = self.slots[starts[request - 1] :][:count].tolist()
            found = [own.index(slot) for slot in inputs.out_page_indices[row].tolist() if slot >= 0]
            positions[row, : len(found)] = torch.tensor(sorted(found), dtype=torch.int32)
        return positions


def best(scores: torch.Tensor) -> torch.Tensor:
    """By (score, lower position), ascending, then -1."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :TOPK]
    order = order.masked_fill(scores.gather(1, order) == -torch.inf, scores.shape[1]).sort(1).values
    return order.masked_fill(order == scores.shape[1], -1).int()


def inside(scores: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The scores of the blocks' positions; -inf of others."""
    block = torch.arange(scores.shape[1]) // 8
    return scores.masked_fill(~(blocks[:, :, None] == block).any(1), -torch.inf)


def of_blocks(scores: torch.Tensor) -> torch.Tensor:
    """[rows, blocks]: of each the largest score, of a row's newest inf."""
    blocks = torch.nn.functional.pad(scores, (0, -scores.shape[1] % 8), value=-torch.inf)
    blocks = blocks.unflatten(1, (-1, 8)).amax(2)
    seen = (scores > -torch.inf).sum(1)
    newest = torch.arange(blocks.shape[1]) == ((seen - 1) // 8)[:, None]
    return blocks.masked_fill(newest & (seen > 0)[:, None], torch.inf)


def assert_chosen(model: Model, inputs, scores: torch.Tensor, exactly: bool) -> None:
    """The best of ``scores``: these very positions, or for SGLang as good ones; and their slots."""
    got, want = model.chosen(inputs), best(scores)
    if exactly:
        assert torch.equal(got, want)
        slots = inputs.out_page_indices
        assert slots is None or torch.equal(slots >= 0, want >= 0)
    values = [scores.gather(1, x.clamp_min(0).long()).masked_fill(x < 0, -torch.inf) for x in (got, want)]
    assert torch.equal(*(x.sort(1).values for x in values))


@pytest.fixture
def by(request, monkeypatch):
    """Whether ours chooses; SGLang's own code is held to the same, which proves what is wanted."""
    is_ours = request.param == "ours"
    monkeypatch.setattr(sglang_indexer._switch, "on", is_ours)
    return is_ours


by_whom = pytest.mark.parametrize("by", ["ours", "SGLang's"], indirect=True)


def test_nothing_that_we_build_on_is_missing():
    assert {model: sglang_indexer.why_not(model) for model in sglang_indexer.HOOKS} == dict.fromkeys(
        ("V3.2", "GLM-5.3-Flash", "V4", "V4.1")
    )
    assert {target for hooks in sglang_indexer.HOOKS.values() for target in hooks} <= HookRegistry._patched


def test_our_keys_and_queries_are_sglangs_numbers():
    model = Model(1)
    assert torch.equal(model.pool.get_low_ratio_index_k_dequant(0, model.slots), model.keys)
    indexer = model.indexer
    q = torch.randn(40, HEADS * DIM).bfloat16() * torch.logspace(-6, 6, 40)[:, None].bfloat16()
    freqs = torch.polar(torch.ones(40, 32), torch.randn(40, 32))
    rounded = indexer.queries(q, freqs)
    values, scales = ours.pack_queries(rounded)
    codes = torch.stack([values & 15, values >> 4], -1).flatten(2).long()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = table[codes & 7] * torch.where(codes > 7, -1, 1)
    numbers *= torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    assert torch.equal(numbers, rounded.float())


@by_whom
@RATIOS
@pytest.mark.parametrize("drafts", [1, 3])
def test_decode_chooses_among_all(ratio, drafts, by):
    model = Model(ratio)
    inputs = model.decode(drafts)
    try:
        model.full.topk_decode(inputs)
    except RuntimeError as error:
        if by or "CUTLASS headers" not in str(error):
            raise
        pytest.skip("SGLang compiles its own top-k, and packages with its headers are not here")
    assert_chosen(model, inputs, model.scores(inputs), by)


@by_whom
@RATIOS
@pytest.mark.parametrize("slots", [True, False])
def test_prompts_choose_among_all(ratio, slots, by):
    model, plans = Model(ratio), {}
    for _ in range(2):  # two layers, which share a plan
        inputs = model.prefill(slots=slots, plans=plans)
        model.full.topk_prefill(inputs)
        assert_chosen(model, inputs, model.scores(inputs), by)
        if slots:
            positions = inputs.out_raw_indices
            tokens = positions.clamp_min(0).long() * ratio
            token = model.req_to_token[inputs.req_rows[:, None], tokens]
            want = (token // ratio).masked_fill(positions < 0, -1)
            assert torch.equal(inputs.out_page_indices, want)
    assert len(plans) == (1 if by else 0)


@by_whom
@RATIOS
@pytest.mark.parametrize("step", ["decode", "drafts", "prefill"])
def test_blocks_are_published_and_chosen_among(ratio, step, by):
    model = Model(ratio)
    kind = "prefill" if step == "prefill" else "decode"

    def layer():
        return model.prefill() if step == "prefill" else model.decode(3 if step == "drafts" else 1)

    source = layer()
    published = getattr(model.levels, f"publish_{kind}")(source)
    scores = model.scores(source)
    assert_chosen(model, source, scores, by)
    assert isinstance(published, dense_blocks.BlockIds)
    blocks = published.blocks
    by_block = of_blocks(scores)
    values = by_block.gather(1, blocks.clamp_min(0).long()).masked_fill(blocks < 0, -torch.inf)
    want = by_block.topk(min(NUM_BLOCKS, by_block.shape[1])).values
    assert torch.equal(values.sort(1).values, want.sort(1).values)
    for _ in range(2):  # consumers, with queries of their own
        consumer = layer()
        getattr(model.levels, f"consume_{kind}")(consumer, published)
        assert_chosen(model, consumer, inside(model.scores(consumer), blocks), by)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_short_contexts_publish_nothing_and_consumers_choose_among_all(kind, monkeypatch):
    model = Model(1)
    model.levels.topk_blocks = 2048
    source, consumer = getattr(model, kind)(), getattr(model, kind)()
    published = getattr(model.levels, f"publish_{kind}")(source)
    assert published.blocks.shape == (len(source.positions), 0)
    getattr(model.levels, f"consume_{kind}")(consumer, published)
    for inputs in (source, consumer):
        assert_chosen(model, inputs, model.scores(inputs), True)


def test_a_step_without_rows_chooses_nothing():
    model = Model(2)
    inputs = model.prefill(rows=(0, 0, 0, 0))
    published = model.levels.publish_prefill(inputs)
    model.levels.consume_prefill(inputs, published)
    assert len(published.blocks) == 0


def test_blackwell_and_other_shapes_stay_sglangs(monkeypatch):
    model, calls = Model(1), []
    monkeypatch.setattr(full_topk.FullTopKIndexer, "_deep_gemm_decode", lambda self, inputs: calls.append(1))
    model.full.use_deep_gemm_decode = True
    model.full.topk_decode(model.decode())
    assert calls == [1]
    model.full.use_deep_gemm_decode, model.indexer.n_local_heads = False, 6
    assert not sglang_indexer._serves_v41(model.full, model.decode())
    model.indexer.n_local_heads = HEADS
    assert sglang_indexer._serves_v41(model.full, model.decode())
