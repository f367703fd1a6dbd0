"""vLLM's plug-ins over stand-ins with its signatures. ci/engines/probe.py runs them in vLLM's own modules."""

import logging
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import engine_standins
import peer_standins
import pytest
import torch
from sparse_cases import V4_SCOPES, exact_latents, make_case, packed_layouts

import mla_fp8
import mla_fp8_plugins
from mla_fp8 import KV_LAYOUTS, reference
from mla_fp8.integrations import attend, vllm, vllm_v4
from mla_fp8.testing import assert_within_flash_mla_tolerance

NAN = float("nan")
DSV32, DSV4 = KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"]


@pytest.fixture(autouse=True)
def nothing_was_made_yet(caplog):
    vars(vllm).pop("SparseBackend", None)
    with caplog.at_level(logging.INFO, logger="mla_fp8"):
        yield
    vars(vllm).pop("SparseBackend", None)


def resolved(monkeypatch):
    """The backend as vLLM finds it: by the path that was registered."""
    engine = engine_standins.vllm(monkeypatch)
    mla_fp8_plugins.vllm()
    mla_fp8_plugins.vllm()  # vLLM calls it in every process, perhaps twice
    ((member, path),) = engine.registered.items()
    assert member.name == "CUSTOM"
    return by_path(path)


def by_path(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_vllm_finds_the_backend_again_by_its_module_and_name(monkeypatch):
    backend = resolved(monkeypatch)
    assert by_path(f"{backend.__module__}.{backend.__qualname__}") is backend is vllm.SparseBackend


def test_the_backend_keeps_the_name_and_the_caches_that_vllm_goes_by(monkeypatch, caplog):
    """vLLM makes fp8_ds_mla of fp8, and warms kernels up, for FLASHMLA_SPARSE only."""
    backend = resolved(monkeypatch)
    assert issubclass(backend, engine_standins.FlashMLASparseBackend) and backend.is_sparse()
    assert backend.get_name() == "FLASHMLA_SPARSE"
    assert backend.supported_kv_cache_dtypes == ["auto", "bfloat16", "fp8_ds_mla", "fp8"]
    assert backend.supports_compute_capability(SimpleNamespace(major=8))
    assert not caplog.records


def test_one_line_says_what_was_taken_over_and_what_not(monkeypatch, caplog):
    impl = resolved(monkeypatch).get_impl_cls()
    for _ in range(3):
        impl(16, None)
    (record,) = caplog.records
    assert "16 query heads as they are" in record.getMessage() and "vLLM's own: " in record.getMessage()


@pytest.mark.parametrize("num_q_heads", [8, 16, 64])
def test_vllms_fp8_kernel_is_ours_without_padding(num_q_heads, monkeypatch, device):
    """vLLM #48047."""
    case, impl = without_lengths(num_q_heads, device), resolved(monkeypatch).get_impl_cls()(num_q_heads, None)
    assert impl.fp8_decode_padded_heads == num_q_heads
    s, impl.softmax_scale = case.scopes[0], case.sm_scale
    cache = DSV32.flash_mla_view(s.kv_cache, 64).squeeze(2)  # [num_blocks, block_size, row bytes]
    out, lse = impl._fp8_flash_mla_kernel(case.q[:, None], cache, s.indices[:, None], object())
    exact, _, exact_lse = case.expected()
    assert out.shape == (6, 1, num_q_heads, 512) and lse.shape == (6, num_q_heads, 1)
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)


def without_lengths(num_q_heads, device):
    """A case whose unusable slots are -1, as vLLM marks them."""
    case = make_case(DSV32, device, num_q_heads=num_q_heads, sink=False)
    s = replace(case.scopes[0], length=None)
    inside = (s.indices >= 0) & (s.indices < len(s.rows))
    finite = s.rows.isfinite().all(1)[s.indices.where(inside, 0).long()]
    s.indices[~(inside & finite)] = -1
    return replace(case, scopes=[s])


@pytest.mark.parametrize("num_tokens", [6, 1000])
@pytest.mark.parametrize("given", [False, True])
def test_vllms_bf16_kernel_is_ours_on_the_heads_that_are_real(num_tokens, given, monkeypatch, device):
    impl = resolved(monkeypatch).get_impl_cls()(16, None)
    case = make_case(KV_LAYOUTS["bf16"], device, num_tokens=num_tokens, topk=40, sink=False, page_size=1)
    s, impl.softmax_scale = case.scopes[0], case.sm_scale
    q = torch.full((num_tokens, 64, 576), NAN, device=device).bfloat16()  # vLLM's buffer: the rest is garbage
    q[:, :16] = case.q
    out = torch.full((num_tokens, 64, 512), NAN, device=device).bfloat16() if given else None
    result, lse = impl._bf16_flash_mla_kernel(q, s.rows.view(-1, 1, 576), s.indices, s.length, 16, out)
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(result, lse, exact, exact_lse)
    if given:
        assert result.data_ptr() == out.data_ptr() and out[:, 16:].isnan().all()


def paged_batch(num_tokens, device, block_size=64):
    """A batch of two requests with 3 pages each, and positions that the indexer chose, -1 among them."""
    rows = exact_latents(DSV32, 6 * block_size, device)
    cache = DSV32.empty(6, block_size, device)
    mla_fp8.quantize_kv(
        rows, torch.arange(len(rows), device=device), cache, layout=DSV32, page_size=block_size
    )
    table = torch.tensor([[4, 0, 5], [2, 1, 3]], dtype=torch.int32, device=device)
    request = (torch.arange(num_tokens + 5, device=device) % 2).int()
    positions = torch.randint(0, 3 * block_size, (num_tokens, 40), device=device, dtype=torch.int32)
    positions[torch.rand(positions.shape, device=device) < 0.3] = -1
    positions[0] = -1
    metadata = SimpleNamespace(
        req_id_per_token=request, block_table=table, block_size=block_size, num_actual_tokens=num_tokens,
        num_decode_tokens=num_tokens, num_reqs=num_tokens, max_query_len=1, query_start_loc=None,
        fp8_extra_metadata=SimpleNamespace(num_decode_tokens=num_tokens),
    )  # fmt: skip
    page = table[request[:num_tokens, None].long(), positions.clamp_min(0).long() // block_size]
    slots = (page * block_size + positions % block_size).where(positions >= 0, -1)
    q = torch.randn(num_tokens, 16, 576, device=device).bfloat16()
    exact = reference.sparse_attention(q.double(), [(rows, slots, None)], sm_scale=0.1)
    return SimpleNamespace(
        q=q, cache=cache.view(6, block_size, -1), positions=positions, metadata=metadata, exact=exact
    )


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("prompts", [0, 3])
@pytest.mark.parametrize("method", ["_forward_fp8_kv_mixed_batch", "_forward_fp8_kv_separate_prefill_decode"])
def test_rows_of_fp8_caches_keep_keys_behind_a_hole(method, prompts, block_size, monkeypatch, device):
    b = paged_batch(9, device, block_size)
    b.metadata.num_decode_tokens -= prompts
    impl = resolved(monkeypatch).get_impl_cls()(16, 0.1)
    seen = []
    over_pages = attend.over_pages
    monkeypatch.setattr(
        attend, "over_pages", lambda *args, **options: seen.append(options) or over_pages(*args, **options)
    )
    out, lse = getattr(impl, method)(b.q, b.cache, b.positions, b.metadata)
    (options,) = seen
    assert lse is None and options.get("topk_length") is None
    assert (b.positions[:, -1] >= 0).any()  # behind a hole, past the number of valid ones
    assert_within_flash_mla_tolerance(out, b.exact[2].float(), b.exact[0], b.exact[2])


def test_what_needs_vllms_own_way_goes_it(monkeypatch):
    """Context parallelism merges results by lse; steps for prompts of many heads may be another version's."""
    b = paged_batch(9, "cpu")
    impl = resolved(monkeypatch).get_impl_cls()(64, 0.1)
    both = impl._forward_fp8_kv_mixed_batch, impl._forward_fp8_kv_separate_prefill_decode
    arguments = (b.q, b.cache, b.positions, b.metadata)
    own = "vLLM's own mixed batch", "vLLM's own prefill and decode"
    b.metadata.fp8_extra_metadata.num_decode_tokens, b.metadata.max_query_len = 5, 9
    assert both[1](*arguments) == own[1]
    b.metadata.fp8_extra_metadata.num_decode_tokens = 9
    impl.index_group = engine_standins.HiSparseMLAIndexGroup()
    assert both[1](*arguments) == own[1]
    impl.index_group, impl.dcp_world_size = None, 2
    assert tuple(method(*arguments) for method in both) == own


def replaced(kernel):
    return lambda impl: setattr(impl, "_fp8_flash_mla_kernel", kernel)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda impl: delattr(impl, "_bf16_flash_mla_kernel"), "FlashMLASparseImpl has no _bf16_flash"),
        (
            replaced(lambda self, q, kv_c_and_k_pe_cache, topk_indices: None),
            "_fp8_flash_mla_kernel does not take kernel_metadata, which ours needs",
        ),
        (
            replaced(lambda self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata, out: None),
            "_fp8_flash_mla_kernel takes out, which ours does not",
        ),
        (
            lambda impl: setattr(impl, "_convert_logical_to_physical_topk", lambda self, topk, metadata: 0),
            "without logical_topk_indices, attn_metadata, block_stride_rows, return_valid_counts",
        ),
    ],
)
def test_a_vllm_whose_interface_changed_is_refused_with_a_sentence(spoil, message, monkeypatch, caplog):
    """vLLM added out= in 0.31, and the first prefill raised."""
    engine = engine_standins.vllm(monkeypatch)
    module = engine.modules["vllm.v1.attention.backends.mla.flashmla_sparse"]
    module.FlashMLASparseImpl = type("FlashMLASparseImpl", (), dict(vars(engine_standins.FlashMLASparseImpl)))
    spoil(module.FlashMLASparseImpl)
    mla_fp8_plugins.vllm()
    (path,) = engine.registered.values()
    with pytest.raises(ImportError, match=f"cannot be an attention backend of vLLM 0.99: .*{message}"):
        by_path(path)


def test_calls_with_a_parameter_that_we_do_not_know_are_not_taken_over(monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch, ["mla_fp8_flash_mla"])
    calls = engine.modules["vllm.v1.attention.ops.flashmla"]
    calls.flash_mla_sparse_fwd = original = (
        lambda q, kv, indices, sm_scale, attn_sink, topk_length, out, new: 0
    )
    vllm.register_flash_mla_calls()
    (record,) = caplog.records
    assert "flash_mla_sparse_fwd takes new, which ours does not" in record.getMessage()
    assert calls.flash_mla_sparse_fwd is original


@pytest.mark.parametrize("plugins", [None, [], ["mla_fp8"]], ids=str)
def test_flash_mlas_calls_stay_where_they_are_unless_we_are_named(plugins, monkeypatch):
    engine = engine_standins.vllm(monkeypatch, plugins)
    mla_fp8_plugins.vllm_flash_mla()
    calls = engine.modules["vllm.v1.attention.ops.flashmla"]
    assert calls.flash_mla_with_kvcache.__code__ is peer_standins.flash_mla_with_kvcache.__code__


@packed_layouts
def test_named_by_vllm_we_serve_its_sparse_calls_where_they_are_imported(layout, monkeypatch, caplog, device):
    """DeepSeek V4's layers know vLLM's own backends only: their calls are what can be replaced."""
    engine = engine_standins.vllm(monkeypatch, ["mla_fp8_flash_mla"])
    calls = engine.modules["vllm.v1.attention.ops.flashmla"]
    importer = peer_standins.install(monkeypatch, "vllm.models.importer", calls.flash_mla_with_kvcache)
    for _ in range(2):
        vllm.register_flash_mla_calls()
    assert importer.flash_mla_with_kvcache is calls.flash_mla_with_kvcache
    assert "serves FlashMLA's sparse calls" in caplog.records[0].getMessage()
    case = make_case(layout, device, extra=V4_SCOPES if layout.name == "dsv4" else None)
    out, lse = importer.flash_mla_with_kvcache(
        **engine_standins.decode_call(case)
    )  # 16 heads: not FlashMLA's
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(out[:, 0], lse[:, :, 0], exact, exact_lse)


@pytest.fixture(params=vllm_v4.MODULES)
def v4_layer(monkeypatch, request):
    """The layer of DeepSeek V4 or V4.1, taken over twice as vLLM may load plug-ins twice."""
    engine = engine_standins.vllm(monkeypatch, ["mla_fp8_flash_mla"])
    for _ in range(2):
        vllm.register_flash_mla_calls()
    return engine.modules[vllm_v4.MODULES[request.param]].DeepseekV4FlashMLAAttention


def test_v4s_query_heads_are_those_that_vllms_own_kernel_can_write(v4_layer):
    given = {n: v4_layer.get_padded_num_q_heads(n) for n in (1, 8, 12, 16, 32, 64, 100, 128)}
    assert given == {1: 8, 8: 8, 12: 16, 16: 16, 32: 32, 64: 64, 100: 128, 128: 128}
    with pytest.raises(ValueError, match="vLLM's own limit: 129"):
        v4_layer.get_padded_num_q_heads(129)
    derived = type("MegaAttention", (v4_layer,), {"__module__": "another"})
    assert derived.get_padded_num_q_heads(16) == 64


@pytest.mark.parametrize("ratio", [0, 1, 2, 4, 128])
@pytest.mark.parametrize("has_entries", [False, True])
def test_v4s_prompts_of_few_heads_are_read_straight_from_the_pages(has_entries, ratio, v4_layer, device):
    if has_entries and not ratio:
        pytest.skip("V4.1's ratio 0 is the window alone")
    b = v4_batch(ratio, 16, device, has_entries=has_entries)
    b.layer.__class__ = v4_layer
    if ratio == vllm_v4.EVERY_ENTRY and has_entries:
        b.arguments[5].c128a_prefill_topk_indices = None  # index rows that nobody needs
    v4_layer._forward_prefill(b.layer, *b.arguments)
    (used, exact), output = b.exact, b.arguments[4]
    torch.testing.assert_close(output[:used].double(), exact, rtol=2e-2, atol=2e-2)
    assert output[used:].isnan().all()


def no_positions(b):
    b.arguments = (b.arguments[0], None, *b.arguments[2:])


def positions_in_three_dimensions(b):
    b.arguments = (b.arguments[0], b.arguments[1].expand(3, -1), *b.arguments[2:])


def too_few_positions(b):
    b.arguments = (b.arguments[0], b.arguments[1][:5], *b.arguments[2:])


def two_blocks_in_a_page(b):
    """vLLM's kernels find a slot by its block; for us a block is a page of the cache."""
    metadata = b.arguments[5]
    metadata.block_size //= 2
    metadata.block_table = (
        2 * metadata.block_table[..., None] + torch.tensor([0, 1]).to(metadata.block_table)
    ).flatten(1)


@pytest.mark.parametrize(
    "change", [no_positions, positions_in_three_dimensions, too_few_positions, two_blocks_in_a_page]
)
def test_where_pages_do_not_name_every_entry_vllms_index_rows_do(change, v4_layer, device, monkeypatch):
    b = v4_batch(128, 16, device, block=256)
    b.layer.__class__ = v4_layer
    change(b)
    seen, over_windows = [], attend.over_windows
    monkeypatch.setattr(
        attend, "over_windows", lambda *a, **options: seen.append(options) or over_windows(*a, **options)
    )
    v4_layer._forward_prefill(b.layer, *b.arguments)
    (options,), (used, exact) = seen, b.exact
    assert "extra_page_table" not in options and options["extra_indices"].shape[0] == used
    torch.testing.assert_close(b.arguments[4][:used].double(), exact, rtol=2e-2, atol=2e-2)


def test_v4s_other_prompts_go_vllms_own_way(v4_layer, device):
    many, images = v4_batch(4, 64, device), v4_batch(4, 16, device)
    images.arguments[-1].prefill_left_visible = torch.zeros(1)
    other = v4_batch(4, 16, device)
    other.arguments = (*other.arguments[:3], other.arguments[3][..., :528], *other.arguments[4:])
    for b in (many, images, other):
        b.layer.__class__ = v4_layer
        v4_layer._forward_prefill(b.layer, *b.arguments)
        assert (b.arguments[4] == -7).all()


def v4_batch(ratio, heads, device, window=32, size=16, block=128, has_entries=True):
    """One token of decode, then prompts of 5 and 9 tokens at the ends of 300 and 70; padding behind."""
    lens, queries = [90, 300, 70], [1, 5, 9]
    tokens, first = sum(queries), queries[0]
    int32 = {"dtype": torch.int32, "device": device}

    def cache(num_pages, page_size):
        rows = exact_latents(DSV4, num_pages * page_size, device)
        pages = DSV4.empty(num_pages, page_size, device)
        mla_fp8.quantize_kv(
            rows, torch.arange(len(rows), device=device), pages, layout=DSV4, page_size=page_size
        )
        return rows, DSV4.flash_mla_view(pages, page_size).squeeze(2)

    swa_table = torch.randperm(3 * 20, device=device).view(3, 20).int()
    table = torch.randperm(3 * 3, device=device).view(3, 3).int()
    swa_rows, swa_cache = cache(60, size)
    rows, entries = cache(9, block // ratio) if has_entries else (None, None)
    request = torch.tensor([r for r, n in enumerate(queries) for _ in range(n)], **int32)
    positions = [n - m + i for n, m in zip(lens, queries, strict=True) for i in range(m)]
    where = torch.tensor([*positions[first:], 0, 0], device=device)  # int64, those of padding behind
    chosen = torch.full((tokens, 24), -1, **int32)
    for t, p in enumerate(positions):
        past = (p + 1) // max(ratio, 1)
        have = min(past, 24)
        chosen[t, :have] = torch.randperm(max(past, 1), device=device)[:have].int()
    q = torch.randn(tokens - first + 2, heads, 512, device=device).bfloat16()
    sink = torch.randn(heads, device=device)
    starts = torch.tensor([0, *queries, 0], **int32).cumsum(0).int()  # one longer than the requests
    swa = SimpleNamespace(
        num_decodes=1, num_prefills=2, num_decode_tokens=first, num_prefill_tokens=tokens - first,
        prefill_left_visible=None, block_table=swa_table, block_size=size, query_start_loc=starts,
        token_to_req_indices=request,
        prefill_seq_lens=torch.tensor(lens[1:], **int32), is_valid_token=torch.ones(tokens, **int32).bool(),
    )  # fmt: skip
    layer = SimpleNamespace(
        compress_ratio=ratio, window_size=window, scale=0.5, attn_sink=sink, topk_indices_buffer=chosen
    )
    mla = SimpleNamespace(block_table=table, block_size=block, c128a_prefill_topk_indices=chosen[first:])

    def slots(table, r, position, page_size):
        return int(table[r, position // page_size]) * page_size + position % page_size

    exact = []
    for t in range(first, tokens):
        r, p = int(request[t]), positions[t]
        keys = [swa_rows[[slots(swa_table, r, i, size) for i in range(max(p - window + 1, 0), p + 1)]]]
        if has_entries:
            keys.append(rows[[slots(table, r, int(i), block // ratio) for i in chosen[t] if i >= 0]])
        k = torch.cat(keys).double()
        logits = torch.cat([q[t - first].double() @ k.T * 0.5, sink[:, None].double()], 1)
        exact.append(logits.softmax(1)[:, :-1] @ k)
    output = torch.full_like(q, NAN)
    arguments = (q, where, entries, swa_cache, output, mla if has_entries else None, swa)
    return SimpleNamespace(
        layer=Layer(layer), arguments=arguments, exact=(tokens - first, torch.stack(exact))
    )


class Layer:
    """An object that can take the class of vLLM's layer."""

    def __init__(self, attributes):
        vars(self).update(vars(attributes))


@pytest.mark.parametrize("model", vllm_v4.MODULES)
def test_the_padding_stays_where_a_layer_cannot_be_taken_over(model, monkeypatch, caplog):
    engine = engine_standins.vllm(monkeypatch, ["mla_fp8_flash_mla"])
    layers = {n: getattr(engine.modules[m], vllm_v4.LAYER) for n, m in vllm_v4.MODULES.items()}
    layer = layers.pop(model)
    layer._forward_prefill = lambda self, q, output: None
    vllm.register_flash_mla_calls()
    (record,) = caplog.records
    assert "_forward_prefill without positions, compressed_k_cache" in record.getMessage()
    assert layer.get_padded_num_q_heads(16) == 64
    assert [other.get_padded_num_q_heads(16) for other in layers.values()] == [16]
