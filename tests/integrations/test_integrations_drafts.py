"""Drafts of a request as query groups in vLLM's plug-in, over stand-ins; probe.py has vLLM's own modules."""

import sys
from types import SimpleNamespace

import engine_standins
import pytest
import torch
from assertions import assert_attention
from draft_cases import calls_of_groups, draft_case, groups, many, without_lengths
from sparse_cases import exact_latents

import mla_fp8
import mla_fp8_plugins
from mla_fp8 import KV_LAYOUTS, reference
from mla_fp8.integrations import drafts, flash_mla_calls, vllm, vllm_v4
from mla_fp8.testing import assert_within_flash_mla_tolerance

DSV32, DSV4 = KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"]
HEADS, DRAFTS, TOPK, PAGES = 8, 4, 40, 3
VLLM_NAMES = ["mla_fp8", "mla_fp8_flash_mla", drafts.NAME]


@pytest.fixture(autouse=True)
def off_again(caplog):
    vars(vllm).pop("SparseBackend", None)
    with caplog.at_level("INFO"):
        yield
    vars(vllm).pop("SparseBackend", None)
    drafts.switch(False)


@pytest.fixture
def seen(monkeypatch):
    return calls_of_groups(monkeypatch)


# vLLM, V3.2


def step(device, requests=None, queries=DRAFTS, counts=None):
    """A step with drafts, whose positions overlap, as vLLM's backend gets it. ``counts``: of each request."""
    requests = requests or many(device)
    counts = torch.tensor([queries] * requests if counts is None else counts, device=device)
    rows = exact_latents(DSV32, requests * PAGES * 64, device)
    cache = DSV32.empty(requests * PAGES, 64, device)
    every = torch.arange(len(rows), device=device)
    mla_fp8.quantize_kv(rows, every, cache, layout=DSV32, page_size=64)
    table = torch.randperm(requests * PAGES, device=device).int().view(requests, PAGES)
    chosen = torch.rand(requests, PAGES * 64, device=device).argsort(1)[:, : TOPK + queries]
    positions = torch.stack([chosen[:, i : i + TOPK] for i in range(queries)], 1).flatten(0, 1).int()
    positions = positions[(torch.arange(queries, device=device) < counts[:, None]).flatten()]
    positions[torch.rand(positions.shape, device=device) < 0.1] = -1
    request = torch.arange(requests, device=device).repeat_interleave(counts).int()
    tokens = len(positions)
    uniform = int(counts.ne(counts[0]).int().argmax()) or requests  # vLLM's decodes; the rest are prompts
    decodes = int(counts[:uniform].sum())
    metadata = SimpleNamespace(
        req_id_per_token=request, block_table=table, block_size=64, num_actual_tokens=tokens,
        num_decode_tokens=decodes, num_decodes=uniform, num_reqs=requests, max_query_len=int(counts.max()),
        query_start_loc=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        fp8_extra_metadata=SimpleNamespace(num_decode_tokens=decodes),
    )  # fmt: skip
    page = table[request[:, None].long(), positions.clamp_min(0).long() // 64]
    slots = (page * 64 + positions % 64).where(positions >= 0, -1)
    q = torch.randn(tokens, HEADS, 576, device=device).bfloat16()
    exact = reference.sparse_attention(q.double(), [(rows, slots, None)], sm_scale=0.1)
    return SimpleNamespace(
        q=q, cache=cache.view(len(cache), 64, -1), positions=positions, metadata=metadata, exact=exact
    )


def backend(monkeypatch, names=VLLM_NAMES):
    engine_standins.vllm(monkeypatch, names)
    mla_fp8_plugins.vllm()
    mla_fp8_plugins.vllm_flash_mla()
    for _ in range(2):
        mla_fp8_plugins.vllm_query_groups()
    return vllm.SparseBackend.get_impl_cls()


def attended(impl, b, method="_forward_fp8_kv_mixed_batch"):
    out, _ = getattr(impl, method)(b.q, b.cache, b.positions, b.metadata)
    assert_within_flash_mla_tolerance(out, b.exact[2].float(), b.exact[0], b.exact[2])
    return out


@pytest.mark.parametrize("method", ["_forward_fp8_kv_mixed_batch", "_forward_fp8_kv_separate_prefill_decode"])
def test_a_step_of_drafts_is_a_call_with_groups_that_makes_their_lists(method, monkeypatch, seen, device):
    b = step(device)
    alone = attended(backend(monkeypatch, VLLM_NAMES[:2])(HEADS, 0.1), b, method)
    vars(vllm).pop("SparseBackend")
    got = attended(backend(monkeypatch)(HEADS, 0.1), b, method)
    assert [group for _, group in groups(seen)] == [1, DRAFTS]
    options = seen[1][2]
    assert "workspace" not in options and "shared_keys" not in options  # the op allocates room
    if device == "cpu":
        assert torch.equal(got, alone)


@pytest.mark.parametrize("counts", [[4, 4, 1, 3, 4], [1, 4, 2, 2, 4], [3, 4, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("method", ["_forward_fp8_kv_mixed_batch", "_forward_fp8_kv_separate_prefill_decode"])
def test_requests_with_other_numbers_of_drafts_are_groups_too(method, counts, monkeypatch, seen, device):
    """vLLM takes those behind the first ones with as many for prompts. Requests of no token pad a graph."""
    b, impl = step(device, requests=5, counts=counts), backend(monkeypatch)(HEADS, 0.1)
    attended(impl, b, method)
    assert groups(seen) == [("sparse_decode", DRAFTS)]
    assert torch.equal(seen[0][2]["query_start_loc"], b.metadata.query_start_loc)


def with_a_prompt(b):
    b.metadata.max_query_len = drafts.MOST + 1


def no_drafts(b):
    b.metadata.num_reqs, b.metadata.max_query_len = len(b.q), 1


@pytest.mark.parametrize("change", [with_a_prompt, no_drafts])
def test_a_step_with_a_prompt_or_without_drafts_has_no_groups(change, monkeypatch, seen):
    b, impl = step("cpu"), backend(monkeypatch)(HEADS, 0.1)
    change(b)
    attended(impl, b)
    assert groups(seen) == [("sparse_decode", 1)]


def test_requests_of_few_tokens_are_read_from_the_pages(monkeypatch, seen, device):
    """vLLM takes requests behind the first one with another number of drafts for prompts, and gathers all."""
    b, impl = step(device), backend(monkeypatch, VLLM_NAMES[:2])(HEADS, 0.1)
    b.metadata.num_decode_tokens = b.metadata.fp8_extra_metadata.num_decode_tokens = DRAFTS
    attended(impl, b, "_forward_fp8_kv_separate_prefill_decode")
    assert groups(seen) == [("sparse_decode", 1)]


def test_the_first_layer_of_an_index_group_makes_the_lists_of_all(monkeypatch, seen, device):
    """GLM-5.2: vLLM converts the positions of one indexer once for the layers that use them."""
    made = backend(monkeypatch)
    shared, other = SimpleNamespace(num_layers=3), SimpleNamespace(num_layers=2)
    layers = [made(HEADS, 0.1) for _ in range(5)]
    for i, layer in enumerate(layers):
        layer.index_group = shared if i < 3 else other
    b = step(device)
    for _ in range(2):  # the second pass has the metadata of the first, perhaps written in place
        for layer in layers:
            attended(layer, b)
    names = [name for name, _ in groups(seen)]
    assert [i for i, name in enumerate(names) if name == "plan_shared_keys"] == [0, 4, 7, 11]
    lists = [options["shared_keys"] for name, _, options in seen if name != "plan_shared_keys"]
    assert lists[0] is lists[1] is lists[2] is not lists[3] and lists[3] is lists[4]
    assert all(group == DRAFTS for _, group in groups(seen))
    seen.clear()
    attended(layers[2], step(device))  # another step
    assert groups(seen)[0] == ("plan_shared_keys", DRAFTS)


def test_a_layer_alone_with_its_indexer_makes_lists_in_the_call(monkeypatch, seen):
    impl = backend(monkeypatch)(HEADS, 0.1)
    impl.index_group = SimpleNamespace(num_layers=1)
    attended(impl, step("cpu"))
    assert groups(seen) == [("sparse_decode", DRAFTS)]


@pytest.mark.parametrize("ranks, shape", [(2, (1, -1)), (2, (-1, DRAFTS)), (1, (1, -1)), (1, (-1, DRAFTS))])
def test_rows_of_different_requests_go_alone(ranks, shape, monkeypatch, seen, device):
    """With context in parallel vLLM passes all tokens of a step as the queries of one request."""
    b, impl = step(device, requests=2), backend(monkeypatch)(HEADS, 0.1)
    impl.dcp_world_size = ranks
    slots = impl._convert_logical_to_physical_topk(
        b.positions, b.metadata, block_stride_rows=None, return_valid_counts=False
    )
    q, slots = (x.view(*shape, *x.shape[1:]) for x in (b.q, slots))
    out, lse = impl._fp8_flash_mla_kernel(q, b.cache, slots, object())
    exact, _, exact_lse = b.exact
    assert_within_flash_mla_tolerance(out.flatten(0, 1), lse.mT.flatten(0, 1), exact, exact_lse)
    together = ranks == 1 and shape[0] != 1
    assert groups(seen) == [("sparse_decode", DRAFTS if together else 1)]


# FlashMLA's calls


@pytest.mark.parametrize("s_q, expected", [(DRAFTS, DRAFTS), (1, 1), (20, 1)])
def test_the_queries_of_a_request_in_flash_mlas_call_are_a_group(s_q, expected, monkeypatch, seen, device):
    backend(monkeypatch)
    case = draft_case(DSV4, device, 20 // DRAFTS, DRAFTS, num_q_heads=HEADS, extra_topk=30).tokens(slice(20))
    first, extra = ({"indices": s.indices, "length": s.length} for s in case.scopes)
    arguments = engine_standins.decode_call(case)
    lengths = {"topk_length": first["length"], "extra_topk_length": extra["length"]}
    if s_q > 1:  # lengths are of a request there
        case = without_lengths(case)
        arguments, lengths = engine_standins.decode_call(case), {}
    arguments |= {
        name: arguments[name].view(20 // s_q, s_q, *arguments[name].shape[2:])
        for name in ("q", "indices", "extra_indices_in_kvcache")
    } | lengths  # fmt: skip
    out, lse = flash_mla_calls.around_decode(calls().__wrapped__, **arguments)
    assert_attention(case, (out.flatten(0, 1), lse.mT.flatten(0, 1)))
    assert groups(seen) == [("sparse_decode", expected)]


def calls():
    return sys.modules["vllm.v1.attention.ops.flashmla"].flash_mla_with_kvcache


# vLLM, V4 and V4.1


def v4_layer(model, **attributes):
    cls = sys.modules[vllm_v4.MODULES[model]].DeepseekV4FlashMLAAttention
    layer = cls()
    vars(layer).update(attributes)
    return layer


def v4_step(device):
    case = draft_case(DSV4, device, many(device), DRAFTS, num_q_heads=HEADS, extra_topk=60)
    starts = torch.arange(many(device) + 1, device=device).int() * DRAFTS
    swa = SimpleNamespace(num_decodes=many(device), max_decode_query_len=DRAFTS, query_start_loc=starts)
    return case, swa, SimpleNamespace()


def decoded(layer, case, swa, attn):
    output = torch.empty(*case.q.shape[:2], 512, device=case.q.device).bfloat16()
    layer.case = case
    layer._forward_decode(case.q, None, swa, attn, False, output)
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(output, exact_lse.float(), exact, exact_lse)


def test_v4s_layers_say_which_rows_are_drafts_of_a_request(monkeypatch, seen, device, caplog):
    backend(monkeypatch)
    assert "of V3.2; of DeepSeek V4; of DeepSeek V4.1" in caplog.text
    layer = v4_layer("DeepSeek V4", compress_ratio=4)
    case, swa, attn = v4_step(device)
    decoded(layer, case, swa, attn)
    swa.query_start_loc[2:-1] -= 1  # requests of other lengths
    swa.max_decode_query_len = DRAFTS + 1
    decoded(layer, case, swa, attn)
    assert [group for _, group in groups(seen)] == [DRAFTS, DRAFTS + 1]
    assert len(seen[1][2]["query_start_loc"]) == many(device) + 1
    assert all("shared_keys" not in options for _, _, options in seen)


@pytest.mark.parametrize(
    "model, attributes, made",
    [
        ("DeepSeek V4", [{"compress_ratio": 128}] * 3, 1),
        ("DeepSeek V4.1", [{"compress_ratio": 2, "index_source_layer_id": i} for i in (0, 0, 0, 3, 3)], 2),
        ("DeepSeek V4.1", [{"compress_ratio": r, "index_source_layer_id": 0} for r in (1, 2, 1, 2)], 2),
    ],
    ids=["every entry", "index sources", "ratios"],
)
def test_layers_with_the_same_slots_share_lists(model, attributes, made, monkeypatch, seen, device):
    backend(monkeypatch)
    layers = [v4_layer(model, **given) for given in attributes]
    case, swa, attn = v4_step(device)
    for _ in range(2):
        for layer in layers:
            decoded(layer, case, swa, attn)
        assert [name for name, _ in groups(seen)].count("plan_shared_keys") == made
        assert len(seen) == made + len(layers)
        seen.clear()


def test_other_block_tables_and_the_window_alone_share_no_lists(monkeypatch, seen):
    """Drafting layers have the window alone, and may come in turns over metadata written in place."""
    backend(monkeypatch)
    case, swa, _ = v4_step("cpu")
    for table in (SimpleNamespace(), SimpleNamespace()):
        decoded(v4_layer("DeepSeek V4", compress_ratio=128), case, swa, table)
    assert [name for name, _ in groups(seen)].count("plan_shared_keys") == 2
    seen.clear()
    output = torch.empty(*case.q.shape[:2], 512).bfloat16()
    for _ in range(2):
        layer = v4_layer("DeepSeek V4", compress_ratio=1, case=case)
        layer._forward_decode(case.q, None, swa, None, True, output)
    assert [group for _, group in groups(seen)] == [DRAFTS, DRAFTS]
    assert all("shared_keys" not in options for _, _, options in seen)


def test_a_layer_whose_interface_changed_is_named_and_keeps_its_own(monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch, VLLM_NAMES)
    layer = engine.modules[vllm_v4.MODULES["DeepSeek V4"]].DeepseekV4FlashMLAAttention
    layer._forward_decode = changed = lambda self, q, kv_cache, output: None
    vllm.register_query_groups()
    (record,) = caplog.records
    assert "of DeepSeek V4 not: vllm.models" in record.getMessage()
    assert layer._forward_decode is changed


@pytest.mark.parametrize("names", [None, ["mla_fp8"], ["mla_fp8", "mla_fp8_flash_mla"]], ids=str)
def test_vllm_has_no_groups_unless_it_names_them(names, monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch, names)
    mla_fp8_plugins.vllm_query_groups()
    layer = engine.modules[vllm_v4.MODULES["DeepSeek V4"]].DeepseekV4FlashMLAAttention
    assert not drafts.switched_on() and not caplog.records
    assert layer._forward_decode is engine_standins.DeepseekV4FlashMLAAttention._forward_decode
