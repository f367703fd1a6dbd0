"""A cache by an engine's name for it, which a call resolves. Where a rule comes from: see the docstrings."""

import pytest
import torch
from sparse_cases import make_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS, dispatch


@pytest.mark.parametrize("name, layout", [("fp8_ds_mla", "dsv4"), ("fp8", "dsv4"), ("auto", "dsv4")])
def test_an_engines_name_for_a_cache_is_resolved_at_the_call(name, layout):
    """vLLM #35891: one name, several formats; the bytes of the cache decide."""
    case = make_case(KV_LAYOUTS[layout], "cpu")
    for a, b in zip(case.decode(layout=name), case.decode(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(case.prefill(layout=name), case.prefill(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["dsv32", "dsv4", "fp8_e4m3", "bf16", "bf16_512", "fp8_e4m3_512"])
def test_auto_is_the_layout_whose_pages_have_that_size(layout):
    """vLLM #48248, #45091: "auto" has to mean something."""
    fmt = KV_LAYOUTS[layout]
    q = torch.zeros(1, 8, fmt.head_dim_qk)
    cache = fmt.empty(2, 64, "cpu")
    assert dispatch.layout_of("auto", q, cache, 64, "auto") is fmt
    if fmt.num_tiles:
        view = fmt.flash_mla_view(cache, 64)
        assert dispatch.layout_of("auto", q, view, 64, "auto") is fmt
        assert dispatch.layout_of("auto", q, view[:, :, 0], 64, "auto") is fmt


def test_an_engines_name_resolves_to_what_the_backend_reads():
    """vLLM #35891: "fp8" is packed for FlashMLA and plain for FlashInfer; the cache's size has its say."""
    q, packed, plain = (
        torch.zeros(1, 8, 576),
        KV_LAYOUTS["dsv32"].empty(2, 64, "cpu"),
        KV_LAYOUTS["fp8_e4m3"].empty(2, 64, "cpu"),
    )
    assert dispatch.layout_of("fp8", q, packed, 64, "flashmla_kv").name == "dsv32"
    assert dispatch.layout_of("fp8", q, plain, 64, "flashinfer_fp8").name == "fp8_e4m3"
    with pytest.raises(ValueError, match="row_bytes must be"):
        dispatch.layout_of("fp8", q, packed, 64, "flashinfer")
    with pytest.raises(ValueError, match=r"layout must be one of .*, got 'fp8_e5m2'"):
        dispatch.layout_of("fp8_e5m2", q, packed, 64, "auto")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("q", None, "q must be a tensor, got None"),
        ("q", torch.tensor(1.0), "q must have shape"),
        ("kv_cache", None, "kv_cache must be a tensor, got None"),
        ("kv_cache", torch.tensor(1.0), "kv_cache must have dtype"),
        ("page_size", "64", "page_size must be an int, got '64'"),
    ],
)
def test_beside_an_engines_name_too_a_wrong_argument_is_named(name, value, text):
    given = {"q": torch.zeros(1, 8, 512).bfloat16(), "kv_cache": KV_LAYOUTS["dsv4"].empty(2, 64, "cpu")}
    given |= {"indices": torch.zeros(1, 4, dtype=torch.int32), "page_size": 64} | {name: value}
    kind = RuntimeError if isinstance(value, torch.Tensor) else TypeError
    with pytest.raises(kind, match=text):
        mla_fp8.sparse_decode(**given, layout="fp8", sm_scale=1.0)


def test_fp8_e4m3_is_our_own_layouts_name_before_it_is_an_engines():
    q = torch.zeros(1, 8, 576)
    assert (
        dispatch.layout_of("fp8_e4m3", q, KV_LAYOUTS["dsv32"].empty(2, 64, "cpu"), 64, "auto").name
        == "fp8_e4m3"
    )


def test_an_engines_name_compiles_to_one_graph():
    case = make_case(KV_LAYOUTS["dsv4"], "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(lambda: case.decode(layout="fp8_ds_mla"), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(), case.decode(), strict=True):
        assert torch.equal(a, b)
