"""prepare_keys gives the bits of the ops that it joins and of the specification, and writes nothing else."""

import pytest
import torch
from error_cases import check_refused
from index_cases import POISON
from kv_cache_cases import all_layouts, distinct_slots, poisoned_cache, whole_buffer
from norm_rope_cases import MAX_POS, assert_same_bf16, insert_case, positions_of, rope_tables, values

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS, layer_reference
from mla_fp8.reference import to_bf16

pytestmark = pytest.mark.op("prepare_keys")

V32 = KV_LAYOUTS["dsv32"]
PAGES, PAGE = 7, 64
MODELS = {
    "V3.2": {"index_neox": True, "index_rope_first": True, "hadamard": True},
    "V3.2 in vLLM": {"index_neox": True, "index_rope_first": True},
    "GLM-5 in SGLang": {
        "index_neox": False, "index_rope_first": True, "scale_format": "f32", "reciprocal": True,
    },
    "FP4": {"index_neox": False, "index_rope_first": False, "index_layout": "index_fp4"},
}  # fmt: skip
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def index_case(tokens, device, weight=torch.float32, bias=True, wide=64):
    def of(n):
        return torch.randn(n, device=device).to(weight)

    return {
        "index_k": values(tokens, 128, device=device, wide=wide),
        "index_k_weight": of(128),
        "index_k_bias": of(128) if bias else None,
    }


def poisoned_index(layout, device, pages=PAGES, page_size=PAGE, gap=0):
    size = layout.page_bytes(page_size)
    return torch.full((pages, size + gap), POISON, dtype=torch.uint8, device=device)[:, :size]


def on_cpu(arguments):
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def expected_index(case, index, cos, sin, options, slots=None, page_size=PAGE):
    """The cache as the specification writes it."""
    layout = INDEX_LAYOUTS[options.get("index_layout", "index_fp8")]
    want = poisoned_index(layout, "cpu", page_size=page_size)
    given = {k: v for k, v in options.items() if k in ("hadamard", "scale_format", "reciprocal")}
    names = ("index_k", "index_k_weight", "index_k_bias")
    slots = case["slot_mapping"] if slots is None else slots
    layer_reference.prepare_index_k(
        *(None if index[x] is None else index[x].cpu() for x in names), cos.cpu(), sin.cpu(),
        case["positions"].cpu(), slots.cpu(), want, eps=1e-6, neox=options["index_neox"],
        rope_first=options["index_rope_first"], layout=layout, page_size=page_size, **given,
    )  # fmt: skip
    return want


def latents_alone(case, layout, device):
    cache = poisoned_cache(layout, PAGES, PAGE, device)
    mla_fp8.k_norm_rope_insert(**case, kv_cache=cache, layout=layout, page_size=PAGE)
    return cache


def run(case, device, layout=V32, gap=0, **more):
    cache = poisoned_cache(layout, PAGES, PAGE, device, gap=gap)
    result = mla_fp8.prepare_keys(**case, kv_cache=cache, layout=layout, page_size=PAGE, **more)
    return cache, result


@all_layouts
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_latents_are_those_of_k_norm_rope_insert(layout, tokens, device):
    case = insert_case(layout, device, tokens, PAGES * PAGE)
    cache, result = run(case, device, layout, gap=64)
    assert result is None and torch.equal(cache, latents_alone(case, layout, device))
    gaps = whole_buffer(cache).view(len(cache), cache.stride(0))[:, cache.shape[1] :]
    assert (gaps == POISON).all()


@pytest.mark.parametrize("dim", [8, 24, 256, 264, 1000, 1536, 2048])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], ids=str)
def test_q_a_is_normed(dim, weight, device):
    case = insert_case(V32, device, 23, PAGES * PAGE)
    q_a, w = values(23, dim, device=device), torch.randn(dim, device=device).to(weight)
    cache, got = run(case, device, q_a=q_a, q_a_weight=w)
    want = to_bf16(layer_reference.rms_norm_of_any(q_a.cpu(), w.cpu(), case["eps"]))
    assert got.is_contiguous()
    assert_same_bf16(got.cpu(), want)
    exact = q_a.double() * (q_a.double().square().mean(-1, keepdim=True) + case["eps"]).rsqrt() * w.double()
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=0)
    assert torch.equal(cache, latents_alone(case, V32, device))


def test_q_a_in_place_and_beside_other_columns(device):
    case = insert_case(V32, device, 30, PAGES * PAGE)
    whole, w = values(30, 1536 + 576, device=device, wide=0), torch.randn(1536, device=device)
    before = whole.clone()
    want = to_bf16(layer_reference.rms_norm_of_any(before[:, :1536].cpu(), w.cpu(), case["eps"]))
    q_a = whole[:, :1536]
    _, got = run(case, device, q_a=q_a, q_a_weight=w, out_q_a=q_a)
    assert got is q_a
    assert_same_bf16(q_a.cpu(), want)
    assert torch.equal(whole[:, 1536:], before[:, 1536:])


@every_model
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 37])
def test_index_keys_are_those_of_the_specification(options, weight, bias, tokens, device):
    case = insert_case(V32, device, tokens, PAGES * PAGE)
    index = index_case(tokens, device, weight, bias)
    layout = INDEX_LAYOUTS[options.get("index_layout", "index_fp8")]
    got = poisoned_index(layout, device, gap=36)
    cache, _ = run(case, device, **index, index_cache=got, **options)
    assert torch.equal(got.cpu(), expected_index(case, index, case["cos"], case["sin"], options))
    assert (whole_buffer(got).view(PAGES, -1)[:, got.shape[1] :] == POISON).all()
    assert torch.equal(cache, latents_alone(case, V32, device))


@pytest.mark.parametrize("half", [0, 4, 32, 60, 64])
@pytest.mark.parametrize("first", [True, False])
def test_tables_slots_and_pages_of_the_index_cache_alone(half, first, device):
    tokens, page_size = 50, 100
    case = insert_case(V32, device, tokens, PAGES * PAGE)
    index, (cos, sin) = index_case(tokens, device), rope_tables(device, half)
    slots = distinct_slots(tokens, PAGES * page_size, device, torch.int32)[:41].contiguous()
    options = {"index_neox": False, "index_rope_first": first}
    got = poisoned_index(INDEX_LAYOUTS["index_fp8"], device, page_size=page_size)
    more = {"index_cos": cos, "index_sin": sin, "index_slot_mapping": slots, "index_page_size": page_size}
    run(case, device, **index, index_cache=got, **more, **options)
    assert torch.equal(got.cpu(), expected_index(case, index, cos, sin, options, slots, page_size))


def test_layer_norm_is_torchs_to_the_last_bits(device):
    x, w, b = torch.randn(50, 128).bfloat16(), torch.randn(128), torch.randn(128)
    exact = torch.nn.functional.layer_norm(x.double(), (128,), w.double(), b.double(), 1e-6)
    got = layer_reference.layer_norm(x, w, b, 1e-6)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@every_model
def test_all_of_a_layer_in_one_launch(options, device):
    """As engines have them: q_a, kv and k_rope in one projection, index keys beside the heads' weights."""
    n = 300
    case = insert_case(V32, device, n, PAGES * PAGE)
    projection = values(n, 1536 + 576, device=device, wide=0)
    case |= {"kv": projection[:, 1536:2048], "k_rope": projection[:, 2048:]}
    index = index_case(n, device)
    layout = INDEX_LAYOUTS[options.get("index_layout", "index_fp8")]
    got, w = poisoned_index(layout, device), torch.randn(1536, device=device).bfloat16()
    cache, q_a = run(
        case, device, q_a=projection[:, :1536], q_a_weight=w, **index, index_cache=got, **options
    )
    assert torch.equal(cache, latents_alone(case, V32, device))
    assert torch.equal(got.cpu(), expected_index(case, index, case["cos"], case["sin"], options))
    want = to_bf16(layer_reference.rms_norm_of_any(projection[:, :1536].cpu(), w.cpu(), case["eps"]))
    assert_same_bf16(q_a.cpu(), want)


@pytest.mark.parametrize("inserted", [0, 11, 40])
def test_what_is_quantised_can_be_kept(inserted, device):
    """Of tokens without a slot, too; zeros where the table has no such position."""
    n = 40
    case = insert_case(V32, device, n, PAGES * PAGE)
    case["slot_mapping"] = case["slot_mapping"][:inserted].contiguous()
    whole = torch.full((n, 640), 7.0, dtype=torch.bfloat16, device=device)
    kept = {"out_kv": whole[:, :512], "out_k_rope": whole[:, 512:576]}
    cache, _ = run(case, device, **kept)
    assert torch.equal(cache, latents_alone(case, V32, device))
    assert (whole[:, 576:] == 7).all()
    given = on_cpu(case)
    normed = to_bf16(layer_reference.rms_norm(given["kv"], given["kv_weight"], case["eps"]))
    row = layer_reference.rotated(
        torch.cat([normed, given["k_rope"]], -1), given["cos"], given["sin"], given["positions"]
    )
    assert_same_bf16(whole[:, :576].cpu(), row)
    unknown = (given["positions"] < 0) | (given["positions"] >= MAX_POS)
    assert unknown.any() and (whole.cpu()[unknown][:, :576] == 0).all()


def test_a_model_without_rope(device):
    layout = KV_LAYOUTS["dsv32_nope"]
    case = insert_case(layout, device, 20, PAGES * PAGE)
    kept = torch.zeros(20, 512, dtype=torch.bfloat16, device=device)
    cache, _ = run(case, device, layout, out_kv=kept)
    assert torch.equal(cache, latents_alone(case, layout, device))
    want = to_bf16(layer_reference.rms_norm(case["kv"].cpu(), case["kv_weight"].cpu(), case["eps"]))
    assert_same_bf16(kept.cpu(), want)


def test_no_cache_yet(device):
    """A profiling run: no page, no slot; q_a and what is kept are made."""
    case = insert_case(V32, device, 9, PAGES * PAGE)
    case["slot_mapping"] = case["slot_mapping"][:0]
    q_a, kept = values(9, 1536, device=device), torch.zeros(9, 576, dtype=torch.bfloat16, device=device)
    got = mla_fp8.prepare_keys(
        **case, kv_cache=V32.empty(0, PAGE, device), layout=V32, page_size=PAGE, q_a=q_a,
        q_a_weight=torch.ones(1536, device=device), out_kv=kept[:, :512], out_k_rope=kept[:, 512:],
        **index_case(9, device), index_cache=INDEX_LAYOUTS["index_fp8"].empty(0, PAGE, device),
        index_neox=True, index_rope_first=True,
    )  # fmt: skip
    assert got.shape == (9, 1536) and kept.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_hostile_positions_and_slots(dtype, device):
    n = 260
    case = insert_case(V32, device, n, 8 * PAGE, dtype=dtype)
    case["positions"] = positions_of(n, device, dtype)
    index, got = index_case(n, device), poisoned_index(INDEX_LAYOUTS["index_fp8"], device)
    options = MODELS["V3.2"]
    cache, _ = run(case, device, **index, index_cache=got, **options)
    assert torch.equal(cache, latents_alone(case, V32, device))
    assert torch.equal(got.cpu(), expected_index(case, index, case["cos"], case["sin"], options))


def test_nan_stays_with_its_key(device):
    n = 12
    case = insert_case(V32, device, n, PAGES * PAGE)
    case["positions"].clamp_(0, MAX_POS - 1)
    case["slot_mapping"] = torch.arange(n, device=device)
    index, options = index_case(n, device, wide=0), MODELS["V3.2 in vLLM"]
    index["index_k"][3, 5], index["index_k"][7] = float("nan"), float("inf")
    got = poisoned_index(INDEX_LAYOUTS["index_fp8"], device)
    run(case, device, **index, index_cache=got, **options)
    values_, _ = INDEX_LAYOUTS["index_fp8"].views(got, PAGE)
    nan = values_[0, :n].float().isnan()
    assert nan[[3, 7]].all() and not nan[[x for x in range(n) if x not in (3, 7)]].any()


def with_arguments(**changes):
    bf16 = torch.bfloat16
    given = {
        "kv": torch.zeros(3, 512, dtype=bf16), "kv_weight": torch.ones(512), "cos": torch.zeros(9, 32),
        "sin": torch.zeros(9, 32), "positions": torch.zeros(3, dtype=torch.int64),
        "slot_mapping": torch.arange(3), "kv_cache": V32.empty(1, PAGE, "cpu").zero_(),
        "k_rope": torch.zeros(3, 64, dtype=bf16), "q_a": torch.zeros(3, 32, dtype=bf16),
        "q_a_weight": torch.ones(32), "index_k": torch.zeros(3, 128, dtype=bf16),
        "index_k_weight": torch.ones(128), "index_k_bias": torch.ones(128),
        "index_cache": INDEX_LAYOUTS["index_fp8"].empty(1, PAGE, "cpu").zero_(), "layout": V32,
        "page_size": PAGE, "eps": 1e-6, "index_neox": True, "index_rope_first": True,
    }  # fmt: skip
    return {k: v for k, v in (given | changes).items() if v is not None}


ROW = torch.zeros(3, 2112, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv": ROW[:, :64]}, "kv must have shape [*, 512], got [3, 64]"),
        ({"q_a": ROW[:, :12]}, "q_a must have a multiple of 8 columns, at most 2048, got 12"),
        ({"q_a": ROW[:, :2056]}, "q_a must have a multiple of 8 columns, at most 2048, got 2056"),
        ({"q_a": ROW[:2, :32]}, "q_a must have shape [3, *], got [2, 32]"),
        ({"q_a_weight": torch.ones(33)}, "q_a_weight must have shape [32], got [33]"),
        ({"q_a_weight": None}, "q_a_weight must be given with q_a, and not without it"),
        ({"q_a": None}, "q_a_weight must be given with q_a, and not without it"),
        ({"out_q_a": ROW[:, :40]}, "out_q_a must have shape [3, 32], got [3, 40]"),
        ({"index_k": ROW[:, :64]}, "index_k must have shape [3, 128], got [3, 64]"),
        ({"index_k": ROW[:, 1:129]}, "index_k must be 16-byte aligned"),
        ({"index_k_weight": None}, "index_k_weight must be given with index_k, and not without it"),
        ({"index_cache": None}, "index_cache must be given with index_k, and not without it"),
        ({"index_k_bias": torch.ones(128).bfloat16()},
         "index_k_bias must have dtype torch.float32, got torch.bfloat16"),
        ({"index_k": None, "index_k_weight": None, "index_cache": None},
         "index_k_bias, index_cos and index_slot_mapping must be None without index_k"),
        ({"index_cos": torch.zeros(9, 32)}, "index_sin must be given with index_cos"),
        ({"index_cos": torch.zeros(9, 16), "index_sin": torch.zeros(9, 16)},
         "index_cos must have 32 columns or none for index_k by halves, got 16"),
        ({"index_slot_mapping": torch.arange(4)},
         "index_slot_mapping must have at most 3 entries (the rows of index_k), got 4"),
        ({"index_page_size": 32}, "index_cache must have shape [*, 4224], got [1, 8448]"),
        ({"index_eps": -1.0}, "index_eps must not be negative, got -1"),
        ({"index_eps": float("nan")}, "index_eps must be finite"),
        ({"scale_format": "f16"}, "scale_format must be ue8m0 or f32, got f16"),
        ({"out_kv": ROW[:, :512]}, "out_k_rope must be given with out_kv and k_rope"),
        ({"out_k_rope": ROW[:, :64]}, "out_k_rope must be None without out_kv and k_rope"),
        ({"out_kv": ROW[:, :504], "out_k_rope": ROW[:, 512:576]},
         "out_kv must have shape [3, 512], got [3, 504]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_is_written(changes, message):
    check_refused(mla_fp8.prepare_keys, with_arguments(**changes), f"mla_fp8.prepare_keys: {message}")


@pytest.mark.parametrize("missing", ["index_neox", "index_rope_first"])
def test_how_the_indexer_rotates_has_no_default(missing):
    with pytest.raises(ValueError, match="expected index_neox and index_rope_first with index_k"):
        mla_fp8.prepare_keys(**with_arguments(**{missing: None}))
