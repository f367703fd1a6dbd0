"""Where a rule comes from is the docstring of its test."""

import logging
from collections.abc import Iterator

import pytest
import torch

import mla_fp8
from mla_fp8 import KV_LAYOUTS, hisparse_backend, kv_cache_dtype, resolve_kv_cache_dtype

PACKED = {576: "dsv32", 512: "dsv4"}
PLAIN = {576: "fp8_e4m3", 512: "fp8_e4m3_512"}
BF16 = {576: "bf16", 512: "bf16_512"}
TILED = ["dsv41", "dsv32_nope"]
NATURAL = {
    "native": PACKED,
    "reference": PACKED,
    "flash_mla": PACKED,
    "flashmla_kv": PACKED,
    "flashmla_sparse": BF16,
    "flashinfer": PLAIN,
    "flashinfer_sm90": PLAIN,
    "flashinfer_sm120": PACKED,
    "aiter": PLAIN,
}
both_head_dims = pytest.mark.parametrize("head_dim_qk", [576, 512])


@pytest.fixture(autouse=True)
def nothing_was_logged_yet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    kv_cache_dtype._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="mla_fp8"):
        yield
    kv_cache_dtype._log_once.cache_clear()


def size(name: str) -> int:
    return KV_LAYOUTS[name].bytes_per_token


@pytest.mark.parametrize("name", ["fp8_e5m2", "nvfp4_ds_mla", "e4m3", "bf16", "FP8", "dsv32", "", None])
def test_any_other_name_is_an_error_that_lists_the_accepted_ones(name):
    """SGLang #23013; e5m2 has no scales and no kernel reads it. vLLM's nvfp4_ds_mla has other rows than ours,
    as long as they are."""
    accepted = "auto, bfloat16, fp8, fp8_e4m3, fp8_ds_mla, got"
    with pytest.raises(ValueError, match=rf"name must be one of {accepted} {name!r}$"):
        resolve_kv_cache_dtype(name, "native", 576)


def test_unknown_backends_and_head_dims_are_errors_that_list_the_known_ones():
    """SGLang #23013: a wrong explicit choice is refused with a clear error."""
    with pytest.raises(
        ValueError, match=rf"backend must be one of {', '.join(kv_cache_dtype.BACKENDS)}, got 'fa3'"
    ):
        resolve_kv_cache_dtype("fp8", "fa3", 576)
    with pytest.raises(ValueError, match="head_dim_qk must be one of 576, 512, got 640"):
        resolve_kv_cache_dtype("fp8", "native", 640)


@both_head_dims
def test_fp8_is_packed_for_flash_mla_and_plain_for_flashinfer(head_dim_qk):
    """vLLM #35891: two formats behind one name."""
    for backend in ("native", "reference", "flash_mla", "flashmla_kv"):
        assert resolve_kv_cache_dtype("fp8", backend, head_dim_qk) is KV_LAYOUTS[PACKED[head_dim_qk]]
    for backend in ("flashinfer", "aiter"):
        assert resolve_kv_cache_dtype("fp8", backend, head_dim_qk) is KV_LAYOUTS[PLAIN[head_dim_qk]]


@both_head_dims
def test_fp8_e4m3_is_plain_but_packed_for_flash_mla_which_reads_no_other_fp8(head_dim_qk):
    """SGLang #23013: there fp8_e4m3 goes to flashmla_kv; vLLM #35891 converts every fp8 name for FlashMLA."""
    for backend in ("native", "reference", "flashinfer", "aiter"):
        assert resolve_kv_cache_dtype("fp8_e4m3", backend, head_dim_qk) is KV_LAYOUTS[PLAIN[head_dim_qk]]
    for backend in ("flash_mla", "flashmla_kv"):
        assert resolve_kv_cache_dtype("fp8_e4m3", backend, head_dim_qk) is KV_LAYOUTS[PACKED[head_dim_qk]]


def test_a_conversion_is_logged_once_per_name_and_layout_with_the_accuracy_note(caplog):
    """vLLM #35891: one log line for the format that was taken, and its gap in accuracy."""
    for _ in range(2):
        resolve_kv_cache_dtype("fp8", "flash_mla", 576)
        resolve_kv_cache_dtype("fp8", "native", 576)
        resolve_kv_cache_dtype("fp8", "flashinfer", 576)
        resolve_kv_cache_dtype("auto", "flashinfer", 576)
        resolve_kv_cache_dtype("bfloat16", "flashinfer", 576)
    packed, *plain = [record.getMessage() for record in caplog.records]
    assert "'fp8' is layout dsv32: FP8 with a scale per tile" in packed and "#35891" not in packed
    assert len(plain) == 2
    for message, name in zip(plain, ("fp8", "auto"), strict=True):
        assert f"{name!r} is layout fp8_e4m3: FP8 with one scale per layer" in message
        assert "may be less accurate" in message and "vLLM #35891" in message


def test_a_refused_name_logs_nothing(caplog):
    """vLLM #35891: the log says what was taken, not what was asked for."""
    with pytest.raises(ValueError):
        resolve_kv_cache_dtype("fp8", "native", 576, 1)
    assert not caplog.records


@both_head_dims
def test_fp8_ds_mla_is_the_packed_layout_of_that_head_dim(head_dim_qk):
    """vLLM #35891: fp8_ds_mla names dsv32 and dsv4, which have neither size nor scales in common."""
    layout = KV_LAYOUTS[PACKED[head_dim_qk]]
    assert resolve_kv_cache_dtype("fp8_ds_mla", "native", head_dim_qk) is layout
    assert resolve_kv_cache_dtype("fp8_ds_mla", "native", head_dim_qk, layout.bytes_per_token) is layout
    other = size(PACKED[576 + 512 - head_dim_qk])
    names = [layout.name, *(TILED if head_dim_qk == 512 else [])]
    sizes = " or ".join(rf"{size(name)} \({name}\)" for name in names)
    expected = rf"row_bytes must be {sizes} for .*got {other}$"
    with pytest.raises(ValueError, match=expected):
        resolve_kv_cache_dtype("fp8_ds_mla", "native", head_dim_qk, other)


@pytest.mark.parametrize("backend", ["flashinfer", "aiter", "flashmla_sparse"])
def test_fp8_ds_mla_is_refused_where_packed_rows_are_not_read(backend):
    """vLLM #35891: FlashInfer and FlashMLA do not read each other's cache."""
    with pytest.raises(ValueError, match=rf"'{backend}' reads .*got 'fp8_ds_mla' \(dsv32\)"):
        resolve_kv_cache_dtype("fp8_ds_mla", backend, 576)


@both_head_dims
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "auto"])
def test_row_bytes_choose_among_the_layouts_of_a_name_that_the_backend_reads(name, head_dim_qk):
    """vLLM #35891: the bytes of a cache that exists say what the name leaves open."""
    for by_head_dim in (PACKED, PLAIN, *([BF16] if name == "auto" else [])):
        layout = KV_LAYOUTS[by_head_dim[head_dim_qk]]
        assert resolve_kv_cache_dtype(name, "native", head_dim_qk, layout.bytes_per_token) is layout


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_528_bytes_are_two_formats_which_no_engines_name_tells_apart(name):
    """FlashMLA in SGLang takes 528 bytes for V4.1 unless a NoPE cache is named; we guess neither."""
    row_bytes, *others = {size(layout) for layout in TILED}
    assert not others
    for backend in ("native", "reference"):
        with pytest.raises(
            ValueError, match=rf"{row_bytes} are those of dsv41 and of dsv32_nope, .* in place of '{name}'$"
        ):
            resolve_kv_cache_dtype(name, backend, 512, row_bytes)
    with pytest.raises(ValueError, match=rf"row_bytes must be .*, got {row_bytes}$"):
        resolve_kv_cache_dtype(name, "flash_mla", 512, row_bytes)
    assert resolve_kv_cache_dtype(name, "native", 512, size("dsv4")) is KV_LAYOUTS["dsv4"]


@pytest.mark.parametrize(
    "name, backend, sizes",
    [
        ("fp8", "native", ["dsv32", "fp8_e4m3"]),
        ("fp8_e4m3", "native", ["fp8_e4m3", "dsv32"]),
        ("fp8", "flash_mla", ["dsv32"]),
        ("fp8", "flashinfer", ["fp8_e4m3"]),
        ("bfloat16", "native", ["bf16"]),
        ("auto", "native", ["dsv32", "fp8_e4m3", "bf16"]),
    ],
)
def test_row_bytes_that_fit_no_layout_are_an_error_that_says_which_sizes_exist(name, backend, sizes):
    """vLLM #35891: a cache of the other format, read under the same name, is garbage without an error."""
    expected = " or ".join(rf"{size(layout)} \({layout}\)" for layout in sizes)
    elsewhere = {size(layout) for layout in KV_LAYOUTS} - {size(layout) for layout in sizes}
    for row_bytes in (0, -1, *elsewhere):
        with pytest.raises(ValueError, match=rf"row_bytes must be {expected} for .*got {row_bytes}$"):
            resolve_kv_cache_dtype(name, backend, 576, row_bytes)


@both_head_dims
@pytest.mark.parametrize("backend", NATURAL)
def test_auto_is_the_natural_layout_of_the_backend(backend, head_dim_qk):
    """SGLang #23013 accepts auto; that it is packed, else plain, else bf16 is our rule."""
    layout = KV_LAYOUTS[NATURAL[backend][head_dim_qk]]
    assert resolve_kv_cache_dtype("auto", backend, head_dim_qk) is layout
    assert set(NATURAL) == set(kv_cache_dtype.BACKENDS)


@both_head_dims
def test_a_bf16_cache_is_refused_by_an_fp8_only_backend_never_quantised(head_dim_qk):
    """SGLang #23013: flashmla_kv takes FP8 only, and quantising for it would happen on every call."""
    bf16 = BF16[head_dim_qk]
    with pytest.raises(
        ValueError, match=rf"'flashmla_kv' reads \(packed\), got 'bfloat16' \({bf16}\).*never"
    ):
        resolve_kv_cache_dtype("bfloat16", "flashmla_kv", head_dim_qk)
    with pytest.raises(ValueError, match="row_bytes must be"):
        resolve_kv_cache_dtype("auto", "flashmla_kv", head_dim_qk, size(bf16))
    for backend in set(NATURAL) - {"flashmla_kv", "flashinfer_sm120"}:
        assert resolve_kv_cache_dtype("bfloat16", backend, head_dim_qk) is KV_LAYOUTS[bf16]


@both_head_dims
def test_fnuz_takes_the_twin_which_row_bytes_cannot_tell(head_dim_qk):
    """SGLang #24129: the encoding is a property of the cache, said by the caller and never guessed."""
    for by_head_dim, name in ((PACKED, "fp8_ds_mla"), (PLAIN, "fp8_e4m3")):
        layout, twin = (KV_LAYOUTS[by_head_dim[head_dim_qk] + end] for end in ("", "_fnuz"))
        assert layout.bytes_per_token == twin.bytes_per_token
        row_bytes = twin.bytes_per_token
        assert resolve_kv_cache_dtype(name, "native", head_dim_qk, row_bytes) is layout
        assert resolve_kv_cache_dtype(name, "native", head_dim_qk, row_bytes, fnuz=True) is twin
    plain = KV_LAYOUTS[PLAIN[head_dim_qk] + "_fnuz"]
    assert resolve_kv_cache_dtype("fp8", "aiter", head_dim_qk, fnuz=True) is plain
    bf16 = KV_LAYOUTS[BF16[head_dim_qk]]
    assert resolve_kv_cache_dtype("bfloat16", "native", head_dim_qk, fnuz=True) is bf16


@pytest.mark.parametrize("backend", ["flash_mla", "flashmla_kv", "flashmla_sparse", "flashinfer"])
def test_fnuz_is_refused_by_backends_whose_kernels_read_e4m3fn(backend):
    """SGLang #24129: the same byte is another number in the other encoding."""
    with pytest.raises(ValueError, match=rf"fnuz must be False: backend '{backend}' reads e4m3fn only"):
        resolve_kv_cache_dtype("auto", backend, 576, fnuz=True)


@pytest.mark.parametrize(
    "layout, backend, other",
    [
        ("bf16", "flashmla_sparse", "flashmla_kv"),
        ("bf16_512", "flashmla_sparse", "flashmla_kv"),
        ("dsv32", "flashmla_kv", "flashmla_sparse"),
        ("dsv4", "flashmla_kv", "flashmla_sparse"),
    ],
)
def test_the_cache_decides_the_hisparse_backend_and_each_refuses_the_other_cache(layout, backend, other):
    """SGLang #23013."""
    assert hisparse_backend(layout) == hisparse_backend(KV_LAYOUTS[layout], backend) == backend
    with pytest.raises(
        ValueError, match=rf"backend '{other}' cannot read layout {layout}: .*sparse reads bf16"
    ):
        hisparse_backend(layout, other)


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_e4m3_512", "dsv32_fnuz", "dsv4_fnuz"])
def test_hisparse_has_no_backend_for_plain_or_fnuz_caches(layout):
    """SGLang #23013: its pairs are bf16 and FlashMLA's packed e4m3fn."""
    for backend in ("auto", "flashmla_kv", "flashmla_sparse"):
        with pytest.raises(ValueError, match=rf"cannot read layout {layout}: .*flashmla_kv reads packed"):
            hisparse_backend(layout, backend)


def test_flashinfer_serves_hisparse_caches_of_fp8_where_it_is_named():
    assert hisparse_backend("dsv32", "flashinfer_sparse_mla") == "flashinfer_sparse_mla"
    with pytest.raises(ValueError, match=r"cannot read layout bf16: .*flashinfer_sparse_mla reads packed"):
        hisparse_backend("bf16", "flashinfer_sparse_mla")


def test_other_hisparse_backends_are_refused():
    """SGLang #23013: an explicit choice is never replaced."""
    with pytest.raises(
        ValueError,
        match="backend must be one of auto, flashmla_sparse, flashmla_kv, flashinfer_sparse_mla, got 'fa3'",
    ):
        hisparse_backend("dsv32", "fa3")


def test_row_bytes_tell_fp4_rows():
    for backend in ("native", "reference"):
        assert resolve_kv_cache_dtype("auto", backend, 512, size("dsv41_fp4")).name == "dsv41_fp4"


def test_pages_that_two_layouts_have_alike_are_refused():
    """A page of one row of dsv41 is as long as a row of bf16; a dtype tells, a layout's name too."""
    dsv41, rows = KV_LAYOUTS["dsv41"], KV_LAYOUTS["bf16_512"]
    assert dsv41.page_bytes(1) == rows.page_bytes(1)
    q, indices = torch.zeros(1, 8, 512).bfloat16(), torch.zeros(1, 4, dtype=torch.int32)
    kv_cache = torch.zeros(3, dsv41.page_bytes(1), dtype=torch.uint8)
    options = {"page_size": 1, "sm_scale": 1.0}
    with pytest.raises(ValueError, match="are those of bf16_512 and of dsv41: give one of these"):
        mla_fp8.sparse_decode(q, kv_cache, indices, layout="auto", **options)
    for name in (dsv41.name, rows.name):
        mla_fp8.sparse_decode(q, kv_cache, indices, layout=name, **options)
    mla_fp8.sparse_decode(q, kv_cache.view(torch.bfloat16), indices, layout="auto", **options)
    mla_fp8.sparse_decode(q, kv_cache, indices, layout="bfloat16", **options)
