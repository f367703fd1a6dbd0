"""What other models ask of vLLM's backend: sinks of HY V4, rows of GLM-5.3-Flash without rope."""

import engine_standins
import pytest
import test_integrations_vllm as cases
import torch
from sparse_cases import make_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.testing import assert_within_flash_mla_tolerance

nothing_was_made_yet = cases.nothing_was_made_yet


@pytest.mark.parametrize("way", ["slots", "call of FlashMLA", "bf16"])
def test_sinks_of_hy_v4_are_in_the_softmax(way, monkeypatch, device):
    b = cases.paged_batch(9, device)
    backend, sinks = cases.resolved(monkeypatch), torch.randn(16, device=device)
    assert backend.supports_sink()
    impl = backend.get_impl_cls()(16, 0.1, sinks=sinks)
    slots = engine_standins.triton_convert_req_index_to_global_index(
        b.metadata.req_id_per_token[:9], b.metadata.block_table, b.positions, 64, 40
    )
    if way == "slots":
        out, _ = impl._forward_fp8_kv_mixed_batch(b.q, b.cache, b.positions, b.metadata)
    elif way == "bf16":
        rows = mla_fp8.dequantize_kv(
            b.cache, torch.arange(6 * 64, device=device), layout=KV_LAYOUTS["dsv32"], page_size=64
        )
        out, _ = impl._bf16_flash_mla_kernel(b.q, rows[:, None], slots)
    else:
        out = impl._fp8_flash_mla_kernel(b.q[:, None], b.cache, slots[:, None], None)[0][:, 0]
    exact, _, lse = b.exact
    share = torch.sigmoid(lse.double() - sinks.double()).nan_to_num()
    want = exact.double() * share[..., None]
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    impl.dcp_world_size = 2
    with pytest.raises(ValueError, match="sinks are not served with decode context"):
        impl._fp8_flash_mla_kernel(b.q[:, None], b.cache, slots[:, None], None)


@pytest.mark.parametrize("num_tokens", [6, 300])
def test_rows_of_glm_without_rope_are_bf16_of_512_dims(num_tokens, monkeypatch, device):
    impl = cases.resolved(monkeypatch).get_impl_cls()(16, None)
    case = make_case(KV_LAYOUTS["bf16_512"], device, num_tokens=num_tokens, topk=40, sink=False, page_size=1)
    s, impl.softmax_scale = case.scopes[0], case.sm_scale
    out, lse = impl._bf16_flash_mla_kernel(case.q, s.rows.view(-1, 1, 512), s.indices, s.length)
    exact, _, exact_lse = case.expected()
    assert_within_flash_mla_tolerance(out, lse, exact, exact_lse)
