"""The plug-ins in a vLLM's own modules, without a GPU: probe.py runs it once for each version."""

import without_gpu

without_gpu.pretend_vllm()

import copy
import pickle
from dataclasses import fields
from importlib import import_module
from types import SimpleNamespace

import engine_standins
import pins
import pytest
import signatures
import spies
import test_integrations_drafts as draft_cases
import test_integrations_vllm as cases
import torch
import v4_layer
import v4_model
import v32_indexer
import vllm
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.mla import flashmla_sparse
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import flashmla
from vllm.v1.attention.selector import AttentionSelectorConfig

import mla_fp8_plugins
from mla_fp8.compat import vllm as compat
from mla_fp8.integrations import attend, drafts, layer_ops, vllm_indexer, vllm_v4
from mla_fp8.integrations import vllm as plugin
from mla_fp8.layout import get_layout
from mla_fp8.testing import assert_within_flash_mla_tolerance


@pytest.fixture(scope="module", autouse=True)
def plugins():
    """Loaded twice, as a vLLM may do it."""
    vllm.envs.VLLM_PLUGINS = ["mla_fp8", "mla_fp8_flash_mla", drafts.NAME, vllm_indexer.NAME]
    for _ in range(2):
        mla_fp8_plugins.vllm()
        plugin.register_flash_mla_calls()
        plugin.register_query_groups()
        vllm_indexer.register()


@pytest.mark.parametrize("file, name", signatures.cases(signatures.VLLM))
def test_ops_around_attention_take_vllms_calls(file, name):
    signatures.assert_takes(getattr(compat, name), "vllm", file)


def test_the_ops_around_attention_can_be_taken_over():
    for module, functions in layer_ops.VLLM.items():
        found = [layer_ops.why_not(module, name, ours) for name, (ours, _) in functions.items()]
        assert found == [None] * len(functions)


def config(**changes) -> AttentionSelectorConfig:
    given = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 64,
        "use_mla": True, "use_sparse": True,
    }  # fmt: skip
    return AttentionSelectorConfig(**given | changes)


def selected(backend, **changes):
    path = current_platform.get_attn_backend_cls(
        backend, attn_selector_config=config(**changes), num_heads=16
    )
    return resolve_obj_by_qualname(path)


def test_nothing_that_we_build_on_is_missing():
    assert plugin.why_not() is plugin.why_not_calls() is vllm_indexer.why_not() is None
    for methods in (vllm_v4.METHODS, vllm_v4.DRAFTS):
        assert [vllm_v4.why_not(model, methods) for model in vllm_v4.MODULES] == [None, None]


NAMES = ["CUSTOM", *(["MLA_FP8"] if hasattr(AttentionBackendEnum, "register") else [])]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_ds_mla", "auto", "bfloat16"])
def test_the_engines_own_resolution_finds_the_backend(kv_cache_dtype, name):
    backend = selected(AttentionBackendEnum[name], kv_cache_dtype=kv_cache_dtype)
    assert backend is plugin.SparseBackend and issubclass(backend, flashmla_sparse.FlashMLASparseBackend)
    assert AttentionBackendEnum[name].get_class() is backend


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_takes_the_name_and_processes_get_it(name):
    from vllm.config.attention import AttentionConfig

    config = AttentionConfig(backend=name.lower())
    assert config.backend is AttentionBackendEnum[name]
    assert pickle.loads(pickle.dumps(config)).backend is copy.deepcopy(config).backend is config.backend
    assert b"mla_fp8_plugins" in pickle.dumps(config) or name == "CUSTOM"


def test_what_nobody_asked_us_for_stays_vllms():
    assert selected(AttentionBackendEnum.FLASHMLA_SPARSE) is flashmla_sparse.FlashMLASparseBackend
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        selected(AttentionBackendEnum.CUSTOM, kv_cache_dtype="nvfp4_ds_mla")


def test_fp8_means_the_packed_cache():
    from vllm.model_executor.layers.attention import mla_attention

    backend = selected(AttentionBackendEnum.CUSTOM)
    assert mla_attention._canonicalize_sparse_mla_kv_cache_dtype(backend, "fp8") == "fp8_ds_mla"


@pytest.fixture
def impl(monkeypatch):
    """An instance without what only an engine can give. PyTorch converts the indices in Triton's place."""
    kind = selected(AttentionBackendEnum.CUSTOM).get_impl_cls()
    made = kind.__new__(kind)
    vars(made).update(softmax_scale=0.1, dcp_world_size=1, index_group=None, num_heads=16)
    convert = engine_standins.triton_convert_req_index_to_global_index
    monkeypatch.setattr(flashmla_sparse, convert.__name__, convert)
    name = "_convert_logical_to_physical_topk"
    monkeypatch.setattr(kind, name, getattr(engine_standins.FlashMLASparseImpl, name))
    return made


@pytest.fixture
def grouped(monkeypatch):
    """(queries of a group, whether its lists are the layers') of each call of attention over pages."""
    seen, over_pages = [], attend.over_pages

    def spied(*args, group=drafts.ALONE, **options):
        seen.append((group.queries, group.layers is not None))
        return over_pages(*args, group=group, **options)

    monkeypatch.setattr(attend, "over_pages", spied)
    return seen


@pytest.mark.parametrize("counts", [None, [4, 4, 1, 3, 4]], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("method", ["_forward_fp8_kv_mixed_batch", "_forward_fp8_kv_separate_prefill_decode"])
def test_drafts_of_a_request_are_a_group(method, layers, counts, impl, grouped):
    torch.manual_seed(0)
    b = draft_cases.step("cpu", counts=counts)
    impl.index_group = SimpleNamespace(num_layers=layers)
    out, _ = getattr(impl, method)(b.q, b.cache, b.positions, b.metadata)
    assert_within_flash_mla_tolerance(out, b.exact[2].float(), b.exact[0], b.exact[2])
    assert grouped == [(draft_cases.DRAFTS, layers > 1)]


def test_an_index_group_is_of_layers_with_the_same_slots():
    """vLLM's class and metadata have what the plug-in asks them for."""
    from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonMetadata
    from vllm.v1.attention.backends.mla import index_group

    assert {"num_layers"} <= {x.name for x in fields(index_group.SparseMLAIndexGroup)}
    names = {x.name for x in fields(SparseMLACommonMetadata)}
    assert {"num_decode_tokens", "num_actual_tokens", "num_reqs", "max_query_len", "query_start_loc"} <= names


@pytest.mark.parametrize(
    ("model", "ratio"), [(model, ratio) for model in (v4_layer.V4, v4_layer.V41) for ratio in model.width]
)
def test_drafts_in_the_layers_of_v4_and_v41_are_a_group(model, ratio, monkeypatch, grouped):
    convert = engine_standins.compute_global_topk_indices_and_lens
    monkeypatch.setattr(model.module, convert.__name__, convert)
    scenario = v4_layer.Scenario(model, ratio, 16, [700, 300, 90], [], torch.device("cpu"), drafts=4)
    object.__setattr__(
        scenario.layer, "index_source_layer_id", 3 if model is v4_layer.V41 and ratio else None
    )
    torch.testing.assert_close(scenario.attend().double(), scenario.exact(), rtol=2e-2, atol=2e-2)
    assert grouped == [(4, scenario.entries is not None and ratio != 4)]


@pytest.mark.parametrize("prompts", [0, 3])
@pytest.mark.parametrize("method", ["_forward_fp8_kv_mixed_batch", "_forward_fp8_kv_separate_prefill_decode"])
def test_rows_of_fp8_caches_are_ours(method, prompts, impl):
    torch.manual_seed(0)
    b = cases.paged_batch(9, "cpu")
    b.metadata.num_decode_tokens -= prompts
    out, lse = getattr(impl, method)(b.q, b.cache, b.positions, b.metadata)
    assert lse is None
    assert_within_flash_mla_tolerance(out, b.exact[2].float(), b.exact[0], b.exact[2])


def test_the_kernels_are_ours_with_every_argument_that_vllm_passes(impl):
    torch.manual_seed(0)
    case = cases.without_lengths(16, "cpu")
    s, impl.softmax_scale = case.scopes[0], case.sm_scale
    cache = case.layout.flash_mla_view(s.kv_cache, 64).squeeze(2)
    exact, _, exact_lse = case.expected()
    out, lse = impl._fp8_flash_mla_kernel(
        q=case.q[None], kv_c_and_k_pe_cache=cache, topk_indices=s.indices[None], kernel_metadata=object()
    )
    assert_within_flash_mla_tolerance(out[0], lse[0].mT, exact, exact_lse)
    rows = s.rows.nan_to_num()
    buffer = torch.empty(6, 64, 512).bfloat16()
    out, lse = impl._bf16_flash_mla_kernel(case.q, rows, s.indices, None, 16, out=buffer)
    assert out.data_ptr() == buffer.data_ptr()
    assert_within_flash_mla_tolerance(out, lse, exact, exact_lse)


@pytest.mark.parametrize(
    ("model", "ratio"), [(model, ratio) for model in (v4_layer.V4, v4_layer.V41) for ratio in model.width]
)
@pytest.mark.parametrize("batch", ["decode", "prefill", "mixed"])
def test_the_layers_of_v4_and_v41_attend_through_us(batch, model, ratio, monkeypatch):
    convert = engine_standins.compute_global_topk_indices_and_lens
    monkeypatch.setattr(model.module, convert.__name__, convert)
    decodes, prefills = {
        "decode": ([700, 300, 90], []), "prefill": ([], [(9, 300), (5, 5)]), "mixed": ([300], [(7, 600)]),
    }[batch]  # fmt: skip
    scenario = v4_layer.Scenario(model, ratio, 16, decodes, prefills, torch.device("cpu"))
    assert scenario.padded == 16
    torch.testing.assert_close(scenario.attend().double(), scenario.exact(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("decodes", "prefills"),
    [([], [(9, 300), (5, 5), (3, 4000)]), ([300, 5], [(130, 600), (1, 129)])],
    ids=["prefill", "mixed"],
)
def test_every_entry_of_the_past_by_pages_is_what_vllms_index_rows_name(decodes, prefills, monkeypatch):
    scenario = v4_layer.Scenario(v4_layer.V4, 128, 16, decodes, prefills, torch.device("cpu"))
    prompts, seen = slice(len(decodes), None), []
    over_windows = attend.over_windows

    def spied(*geometry, **options):
        seen.append({name for name, x in options.items() if x is not None})
        over_windows(*geometry, **options)

    monkeypatch.setattr(attend, "over_windows", spied)
    by_pages = scenario.attend()[prompts].clone()
    monkeypatch.setattr(vllm_v4, "_entries_by_pages", lambda *_: None)
    by_index = scenario.attend()[prompts]
    assert ["extra_page_table" in names for names in seen] == [True, False]
    assert ["extra_indices" in names for names in seen] == [False, True]
    torch.testing.assert_close(by_pages, by_index, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(by_pages.double(), scenario.exact()[prompts], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ratio", v4_layer.V4.width)
def test_the_yardstick_of_v4s_engine_is_exact(ratio, monkeypatch):
    convert = engine_standins.compute_global_topk_indices_and_lens
    monkeypatch.setattr(v4_layer.v4, convert.__name__, convert)
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        monkeypatch.setattr(v4_layer.v4, name, getattr(v4_layer.v4, name))  # to be put back
    spies.exact_v4()
    scenario = v4_layer.Scenario(v4_layer.V4, ratio, 16, [700, 300, 90], [], torch.device("cpu"))
    torch.testing.assert_close(scenario.attend(), scenario.exact().bfloat16(), rtol=1e-2, atol=1e-5)
    q, rows = scenario.q[:, :, None].flatten(1, 2), torch.randn(40, 1, 512).bfloat16()
    chosen = torch.arange(40).expand(3, 1, 40).int()
    out = torch.empty(3, 16, 512).bfloat16()
    v4_layer.v4.flash_mla_sparse_fwd(
        q=q, kv=rows, indices=chosen, sm_scale=0.05, attn_sink=scenario.sink, out=out,
        topk_length=torch.tensor([40, 7, 0]),
    )  # fmt: skip
    for token, length in enumerate((40, 7, 0)):
        keys = rows[:length, 0].double()
        logits = torch.cat([q[token].double() @ keys.T * 0.05, scenario.sink[:, None].double()], 1)
        expected = logits.softmax(1)[:, :-1] @ keys
        torch.testing.assert_close(out[token], expected.bfloat16(), rtol=1e-2, atol=1e-5)


def test_what_the_v4_engine_replaces_is_there():
    if vllm.__version__ != pins.VLLM[-1]:
        pytest.skip("the engine is packed of the newest")
    from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as triton_kernels
    from vllm.models.deepseek_v4.nvidia import model

    replaced = [*v4_model.NAMES.values(), "DeepseekV4MoE", "collect_moe_layers", "DeepseekV4MLP"]
    assert [name for name in replaced if not hasattr(model, name)] == []
    assert callable(triton_kernels.compress_norm_rope_store_triton)
    v4_model.register()
    streams, fn, scale, base = (
        torch.randn(3, 4, 64).bfloat16(),
        torch.randn(24, 256),
        torch.ones(3),
        torch.zeros(24),
    )
    mix = (fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 3)
    norm = {"norm_weight": torch.ones(64), "norm_eps": 1e-6}
    first = model.mhc_pre_broadcast_tilelang(streams[:, 0], *mix, **norm, fn_broadcast=None)
    same = streams[:, :1].repeat(1, 4, 1)
    torch.testing.assert_close(first, (same, *model.mhc_pre_tilelang(same, *mix, **norm)))
    mixed = model.mhc_fused_post_pre_tilelang(first[3], *first[:3], *mix, n_splits=1, tile_n=1, **norm)
    # Each row of the residual's weights sums to one, as does each column: the mean of the streams stays.
    grown = first[1] * first[3][:, None].float()
    torch.testing.assert_close(mixed[0].float().mean(1), (same.float() + grown).mean(1), rtol=2e-2, atol=2e-2)


def test_calls_that_are_not_ours_reach_flash_mla():
    q, cache = torch.zeros(1, 1, 64, 576).bfloat16(), torch.zeros(1, 64, 1, 576).bfloat16()
    with pytest.raises(AttributeError, match="dense_decode_fwd"):
        flashmla.flash_mla_with_kvcache(
            q, cache, torch.zeros(1, 1).int(), torch.ones(1).int(), 512, flashmla.FlashMLASchedMeta()
        )


def test_calls_are_counted(monkeypatch):
    for name in spies.OURS:
        monkeypatch.setattr(torch.ops.mla_fp8, name, getattr(torch.ops.mla_fp8, name))
    interface = import_module("vllm.third_party.flashmla.flash_mla_interface")
    monkeypatch.setattr(interface, "flash_mla_cuda", object(), raising=False)
    for name in spies.LOGITS:  # as in an engine: plug-ins come after
        monkeypatch.setattr(v32_indexer.layer, name, getattr(v32_indexer.layer, name).__wrapped__)
    spies.CALLS.clear()
    spies.count_calls(ours=True)
    vllm_indexer.register()
    q, rows = torch.zeros(2, 16, 576).bfloat16(), torch.zeros(4, 576).bfloat16()
    attend.over_rows(q, rows, torch.zeros(2, 8).int(), sm_scale=1.0)
    layout, cache = get_layout("bf16"), torch.zeros(1, 64, 576).bfloat16()
    for tokens in (2, 300):
        q = torch.zeros(tokens, 16, 576).bfloat16()
        indices = torch.zeros(tokens, 8).int()
        attend.over_pages(q, cache, indices, layout=layout, page_size=64, sm_scale=1.0)
    counts = {"mla_fp8.sparse_prefill_out": 1, "mla_fp8.sparse_decode": 2}
    assert counts == spies.CALLS
    v32_indexer.Batch([(500, 1)], [(9, 300)]).run(monkeypatch)
    counts |= {"mla_fp8.index_topk_out": 1, "mla_fp8.index_topk_ragged_out": 1}
    assert counts == spies.CALLS
    monkeypatch.setattr(vllm_indexer, "_MAX_TOPK", 0)
    with pytest.raises(RuntimeError, match="DeepGEMM"):
        v32_indexer.Batch([(500, 1)]).run(monkeypatch)
    assert spies.CALLS["DeepGEMM.fp8_fp4_paged_mqa_logits"] == 1
