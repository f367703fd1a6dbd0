"""VLLM_BATCH_INVARIANT=1 in vLLM's own modules, without a GPU."""

import without_gpu

without_gpu.pretend_vllm()

from importlib import import_module
from types import SimpleNamespace

import engine_standins
import pytest
import test_integrations_vllm as cases
import torch
import v4_layer
import vllm
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.mla import flashmla_sparse
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import mla_fp8_plugins
from mla_fp8.integrations import attend, replay, same_bits, vllm_host_rows, vllm_indexer, vllm_same_bits
from mla_fp8.integrations import vllm as plugin
from mla_fp8.testing import assert_within_flash_mla_tolerance


@pytest.fixture(scope="module", autouse=True)
def plugged():
    """No plug-in of the indexer is named."""
    vllm.envs.VLLM_PLUGINS = ["mla_fp8", "mla_fp8_flash_mla"]
    vllm.envs.VLLM_BATCH_INVARIANT = True
    mla_fp8_plugins.vllm()
    plugin.register_flash_mla_calls()
    yield
    vllm.envs.VLLM_BATCH_INVARIANT = False
    same_bits.switch(None)


@pytest.fixture
def backend():
    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=64, use_mla=True,
        use_sparse=True, use_batch_invariant=True,
    )  # fmt: skip
    path = current_platform.get_attn_backend_cls(
        AttentionBackendEnum.CUSTOM, attn_selector_config=config, num_heads=16
    )
    return resolve_obj_by_qualname(path)


@pytest.fixture
def invariant(monkeypatch):
    """Whether each call of attention asked for it, of which op."""
    seen = []
    for name in ("sparse_decode", "sparse_prefill", "sparse_prefill_window"):
        original = getattr(attend, name)

        def spied(*args, name=name, original=original, **options):
            seen.append((name, options.get("batch_invariant", False)))
            return original(*args, **options)

        monkeypatch.setattr(attend, name, spied)
    return seen


def test_vllms_refusals_are_lifted(backend):
    assert backend.supports_batch_invariance()
    assert not flashmla_sparse.FlashMLASparseBackend.supports_batch_invariance()
    for path in {*vllm_same_bits.BACKENDS["DeepSeek V3.2"], *vllm_same_bits.BACKENDS["DeepSeek V4"]}:
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name)
        for kind in (found, *found.__subclasses__()):
            assert kind.supports_batch_invariance(), kind
    v41 = import_module("vllm.models.deepseek_v41.sparse_mla").DeepseekV4FlashMLABackend
    assert not v41.supports_batch_invariance()


def test_the_indexer_is_ours_though_no_plug_in_is_named(backend):
    assert vllm_indexer.NAME not in vllm.envs.VLLM_PLUGINS and vllm_indexer.serves()


def test_short_prompts_go_as_all_others(backend, monkeypatch):
    from vllm.model_executor.layers.attention import sparse_mla_attention

    attention = SimpleNamespace(hisparse_config=None, sparse_mla_force_mqa=False)
    config = SimpleNamespace(attention_config=attention)
    assert sparse_mla_attention._use_dense_mha_prefill(config, 100, 2048)
    monkeypatch.setattr(import_module("vllm.config"), "get_current_vllm_config", lambda: config)
    with pytest.raises((AttributeError, TypeError)):  # vLLM's own __init__ wants an engine
        backend.get_impl_cls()(16, 576, 0.1, 1, None, None, "fp8_ds_mla", None, "decoder", None)
    assert not sparse_mla_attention._use_dense_mha_prefill(config, 100, 2048)


@pytest.mark.parametrize("hisparse", [None, object()])
def test_rows_of_hisparse_are_those_without_it(hisparse, backend, monkeypatch):
    attention = SimpleNamespace(hisparse_config=hisparse, sparse_mla_force_mqa=True)
    config, calls = SimpleNamespace(attention_config=attention), []
    monkeypatch.setattr(import_module("vllm.config"), "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(vllm_host_rows, "take_over_stores", lambda: calls.append(1))
    with pytest.raises((AttributeError, TypeError)):  # vLLM's own __init__ wants an engine
        backend.get_impl_cls()(16, 576, 0.1, 1, None, None, "fp8_ds_mla", None, "decoder", None)
    assert bool(calls) == bool(hisparse)


@pytest.mark.parametrize("prompts", [0, 3, 9])
@pytest.mark.parametrize("method", ["_forward_fp8_kv_mixed_batch", "_forward_fp8_kv_separate_prefill_decode"])
def test_prompts_and_decode_of_fp8_caches_are_one_call(method, prompts, backend, invariant, monkeypatch):
    torch.manual_seed(0)
    kind = backend.get_impl_cls()
    impl = kind.__new__(kind)
    vars(impl).update(softmax_scale=0.1, dcp_world_size=1, index_group=None, num_heads=16)
    convert = engine_standins.triton_convert_req_index_to_global_index
    monkeypatch.setattr(flashmla_sparse, convert.__name__, convert)
    name = "_convert_logical_to_physical_topk"
    monkeypatch.setattr(kind, name, getattr(engine_standins.FlashMLASparseImpl, name))
    b = cases.paged_batch(9, "cpu")
    b.metadata.num_decode_tokens -= prompts
    b.metadata.fp8_extra_metadata = SimpleNamespace(num_decode_tokens=9 - prompts)
    out, _ = getattr(impl, method)(b.q, b.cache, b.positions, b.metadata)
    assert_within_flash_mla_tolerance(out, b.exact[2].float(), b.exact[0], b.exact[2])
    assert invariant == [("sparse_decode", True)]


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("ratio", v4_layer.V4.width)
def test_prompts_of_v4_have_the_bits_of_its_decode(ratio, heads, invariant, monkeypatch):
    convert = engine_standins.compute_global_topk_indices_and_lens
    monkeypatch.setattr(v4_layer.v4, convert.__name__, convert)
    scenario = v4_layer.Scenario(v4_layer.V4, ratio, heads, [300, 5], [(7, 600)], torch.device("cpu"))
    torch.testing.assert_close(scenario.attend().double(), scenario.exact(), rtol=2e-2, atol=2e-2)
    assert sorted(invariant) == [("sparse_decode", True), ("sparse_prefill_window", True)]


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("ratio", v4_layer.V4.width)
def test_tokens_of_v4_have_their_bits_as_drafts_and_in_prompts(ratio, heads, monkeypatch):
    convert = engine_standins.compute_global_topk_indices_and_lens
    monkeypatch.setattr(v4_layer.v4, convert.__name__, convert)
    cpu = torch.device("cpu")
    drafts = v4_layer.Scenario(v4_layer.V4, ratio, heads, [300, 90], [], cpu, drafts=4)
    prompts = v4_layer.Scenario(v4_layer.V4, ratio, heads, [], [(4, 300), (4, 90)], cpu)
    assert torch.equal(drafts.q, prompts.q) and torch.equal(drafts.chosen, prompts.chosen)
    assert torch.equal(drafts.attend(), prompts.attend())


@pytest.fixture
def hooks():
    yield replay
    replay.record(None)
    replay.play(None)


def test_choices_of_v32_are_recorded_and_played_back(backend, hooks, monkeypatch):
    kind = backend.get_impl_cls()
    impl, other = kind.__new__(kind), kind.__new__(kind)
    group, buffer = (
        SimpleNamespace(set_logical_topk_ready=lambda index: None),
        torch.arange(12).view(3, 4).int(),
    )
    for x in (impl, other):
        vars(x).update(index_group=group, index_group_index=0, _indexer=None, _topk_indices_buffer=buffer)
    layers = {
        "model.layers.3.attn": SimpleNamespace(impl=impl, indexer=object(), skip_topk=False),
        "model.layers.4.attn": SimpleNamespace(impl=other, indexer=None),
    }
    metadata = SimpleNamespace(num_actual_tokens=2, req_id_per_token=torch.tensor([0, 1, 7]).int())
    context = SimpleNamespace(
        attn_metadata=dict.fromkeys(layers, metadata), no_compile_layers=layers, cudagraph_runtime_mode=None
    )
    monkeypatch.setattr(import_module("vllm.forward_context"), "get_forward_context", lambda: context)
    seen = []
    hooks.record(lambda *choice: seen.append((choice[0], *(x.clone() for x in choice[1:]))))
    hooks.play(lambda layer, positions, requests: positions.copy_(positions.flip(1)))
    impl.record_logical_topk_ready()
    other.record_logical_topk_ready()  # has the choice of the layer before
    ((layer, positions, requests),) = seen
    assert layer == "model.layers.3.attn" and requests.tolist() == [0, 1]
    assert positions.tolist() == [[3, 2, 1, 0], [7, 6, 5, 4]]
    assert buffer.tolist() == [*positions.tolist(), [8, 9, 10, 11]]
    context.attn_metadata = None  # a profiling run
    impl.record_logical_topk_ready()
    assert len(seen) == 1


@pytest.mark.parametrize("drafts", [1, 4])
def test_what_is_played_back_in_v4_is_what_attention_gets(drafts, hooks, monkeypatch):
    convert = engine_standins.compute_global_topk_indices_and_lens
    monkeypatch.setattr(v4_layer.v4, convert.__name__, convert)
    cpu = torch.device("cpu")
    scenario = v4_layer.Scenario(v4_layer.V4, 4, 16, [3000, 500], [(7, 2600)], cpu, drafts=drafts)
    want, kept = scenario.attend().clone(), []
    hooks.record(lambda layer, positions, requests: kept.append((layer, positions.clone(), requests)))
    assert torch.equal(scenario.attend(), want)
    ((layer, positions, requests),) = kept
    assert layer == "layer" and torch.equal(positions, scenario.chosen)
    assert requests.tolist() == scenario.request
    scenario.chosen[:] = -1  # what another indexer chose
    assert not torch.equal(scenario.attend(), want)
    hooks.play(lambda layer, choice, requests: choice.copy_(positions))
    assert torch.equal(scenario.attend(), want)
