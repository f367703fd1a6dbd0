"""Drafts of a request as query groups in SGLang's plug-in, over stand-ins; probe.py has its own modules."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import engine_standins
import pytest
import torch
from assertions import assert_attention, assert_same
from draft_cases import calls_of_groups, draft_case, groups, many, without_lengths

import mla_fp8_plugins
from mla_fp8 import KV_LAYOUTS
from mla_fp8.integrations import drafts, flash_mla_calls, sglang
from mla_fp8.testing import assert_within_flash_mla_tolerance

DSV32, DSV4 = KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"]
HEADS, DRAFTS = 8, 4
SGLANG_NAMES = f"mla_fp8,{drafts.NAME}"


@pytest.fixture(autouse=True)
def off_again(caplog):
    with caplog.at_level("INFO"):
        yield
    drafts.switch(False)


@pytest.fixture
def seen(monkeypatch):
    return calls_of_groups(monkeypatch)


def test_sglangs_verification_of_drafts_has_groups(monkeypatch, seen, device, caplog):
    registered = engine_standins.sglang(monkeypatch, SGLANG_NAMES)
    sglang.register_query_groups()
    assert set(registered) == {sglang.DRAFTS} and "of V3.2; of V4" in caplog.text
    hook, _ = registered[sglang.DRAFTS]
    case = draft_case(DSV4, device, many(device), DRAFTS, num_q_heads=HEADS, extra_topk=30)
    attention = engine_standins.DeepseekV4AttnBackend()
    attention.speculative_num_draft_tokens = DRAFTS
    call = engine_standins.sgl_flash_mla_with_kvcache
    arguments = engine_standins.decode_call(case)
    attention.attention = lambda q: flash_mla_calls.around_decode(call, **arguments)
    original = engine_standins.DeepseekV4AttnBackend.forward
    for requests in (many(device), many(device) + 1):  # drafts; other rows
        batch = SimpleNamespace(batch_size=requests)
        out, lse = hook(original, attention, case.q, None, None, None, batch)
        assert_attention(case, (out[:, 0], lse[:, :, 0]))
    attention.speculative_num_draft_tokens = None
    hook(original, attention, case.q, None, None, None, SimpleNamespace(batch_size=len(case.q)))
    assert [group for _, group in groups(seen)] == [DRAFTS, 1, 1]


def test_v32s_verification_in_sglang_has_groups(monkeypatch, seen, device):
    engine_standins.sglang(monkeypatch, SGLANG_NAMES)
    sglang.register_query_groups()
    case = draft_case(DSV32, device, many(device), DRAFTS, num_q_heads=HEADS)
    s, width = case.scopes[0], DSV32.bytes_per_token
    attention = SimpleNamespace(
        dsa_kv_cache_store_fp8=True, kv_cache_dim=width, flashmla_kv_format="V32",
        physical_page_size=s.page_size, speculative_num_draft_tokens=DRAFTS,
        token_to_kv_pool=SimpleNamespace(),
    )  # fmt: skip
    layer = SimpleNamespace(tp_q_head_num=HEADS, head_dim=576, layer_id=0)
    metadata = SimpleNamespace(
        dsa_cache_seqlens_int32=s.length, cache_seqlens_int32=torch.zeros(many(device))
    )
    given = (case.q.flatten(1), s.kv_cache, 512, case.sm_scale, layer, metadata, s.indices)
    original = engine_standins.DeepseekSparseAttnBackend._forward_flashmla_kv
    out = sglang._forward_flashmla_kv(original, attention, *given)
    metadata.cache_seqlens_int32 = torch.zeros(len(case.q))  # a step without drafts
    alone = sglang._forward_flashmla_kv(original, attention, *given)
    assert [group for _, group in groups(seen)] == [DRAFTS, 1]
    torch.testing.assert_close(out, alone, rtol=2e-2, atol=1e-3)
    if device == "cpu":
        assert_same((out,), (alone,))


def v32_layers(device, padding=0):
    """A function that attends with one of SGLang's layers, in a step that verifies drafts."""
    case = draft_case(DSV32, device, many(device), DRAFTS, num_q_heads=HEADS)
    case = replace(without_lengths(case), attn_sink=None)
    s = case.scopes[0]
    rows = len(case.q) - padding
    s.indices[rows:] = -1
    attention = SimpleNamespace(
        dsa_kv_cache_store_fp8=True, kv_cache_dim=DSV32.bytes_per_token, flashmla_kv_format="V32",
        physical_page_size=s.page_size, speculative_num_draft_tokens=DRAFTS,
        token_to_kv_pool=SimpleNamespace(
            start_layer=2, skip_topk_layers=[True, True, False, True, True, False, False]
        ),
    )  # fmt: skip
    lengths = torch.full((rows,), s.indices.shape[1], dtype=torch.int32, device=device)
    metadata = SimpleNamespace(
        dsa_cache_seqlens_int32=lengths, cache_seqlens_int32=torch.zeros(rows // DRAFTS)
    )
    original = engine_standins.DeepseekSparseAttnBackend._forward_flashmla_kv

    def attend(layer):
        out = sglang._forward_flashmla_kv(
            original, attention, case.q.flatten(1), s.kv_cache, 512, case.sm_scale, layer, metadata, s.indices
        )[:, 0]
        exact, _, exact_lse = case.expected()
        assert_within_flash_mla_tolerance(out, exact_lse.float(), exact, exact_lse)

    return attend


def test_rows_that_pad_a_step_of_sglang_leave_its_drafts_their_groups(monkeypatch, seen, device):
    engine_standins.sglang(monkeypatch, SGLANG_NAMES)
    sglang.register_query_groups()
    attend = v32_layers(device, padding=DRAFTS)
    attend(SimpleNamespace(tp_q_head_num=HEADS, head_dim=576, layer_id=7))
    assert groups(seen) == [("sparse_decode", DRAFTS)]


def test_layers_of_sglang_that_skip_the_choice_of_keys_share_lists(monkeypatch, seen, device):
    """A layer alone with its choice makes lists in its call; a rank may begin with layers that skip it."""
    engine_standins.sglang(monkeypatch, SGLANG_NAMES)
    sglang.register_query_groups()
    attend = v32_layers(device)
    layers = [SimpleNamespace(tp_q_head_num=HEADS, head_dim=576, layer_id=2 + i) for i in range(7)]
    for _ in range(2):  # a graph's metadata are written in place from step to step
        for layer in layers:
            attend(layer)
    names = [name for name, _ in groups(seen)]
    assert [i for i, name in enumerate(names) if name == "plan_shared_keys"] == [0, 3, 9, 12]
    lists = [options.get("shared_keys") for name, _, options in seen if name == "sparse_decode"][:7]
    assert lists[0] is lists[1] is not lists[2] and lists[2] is lists[3] is lists[4]
    assert lists[5] is None and lists[6] is None
    assert all(group == DRAFTS for _, group in groups(seen))


@pytest.mark.parametrize("named", ["", "mla_fp8"])
def test_sglang_has_no_groups_unless_it_names_them(named, monkeypatch):
    registered = engine_standins.sglang(monkeypatch, named)
    mla_fp8_plugins.sglang_query_groups()
    assert not registered and not drafts.switched_on()


def test_v4s_backend_that_changed_is_named(monkeypatch, caplog):
    registered = engine_standins.sglang(monkeypatch, SGLANG_NAMES)
    module = sys.modules["sglang.srt.layers.attention.deepseek_v4_backend"]
    module.DeepseekV4AttnBackend = type("DeepseekV4AttnBackend", (), {})
    sglang.register_query_groups()
    assert not registered and drafts.switched_on()
    assert "of V4 not: sglang.srt.layers.attention.deepseek_v4_backend has no Deep" in caplog.text
