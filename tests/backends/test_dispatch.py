"""Where a rule comes from is the docstring of its test."""

import functools
import logging
import re
import subprocess
import sys
from pathlib import Path

import peer_standins
import pytest
import torch
from op_samples import SAMPLES
from sparse_cases import make_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS, _libraries, dispatch
from mla_fp8.backends import packages, table
from mla_fp8.backends.table import NATIVE, TABLE, Backend, Problem
from mla_fp8.call import FEATURES, OPS
from mla_fp8.dispatch import PREFERENCES, candidates, preference, reasons

ARCHS = ["cpu", "sm80", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950"]
TWO_CACHES = frozenset({"two caches"})


sys.path.insert(0, str(Path(__file__).parents[2] / "docs/gen"))
from support import registered


def not_built(backend: Backend, problem: Problem) -> str | None:
    """As on a machine that has every package and our library for its device: the ops that are not in it."""
    device = "cpu" if problem.arch == "cpu" else "hip" if problem.arch.startswith("gfx") else "cuda"
    if backend.needs_kernel and problem.op not in registered(f"MLA_FP8_{device.upper()}_OPS"):
        return f"libmla_fp8_{device}.so has no {problem.op}"
    return None


def taken(problem: Problem, missing=not_built) -> str:
    """What auto takes, by name."""
    fits = [
        b.name for b in candidates(problem) if b.why_not(problem, missing) is None and not b.only_asked_for
    ]
    return fits[0]


@pytest.fixture(autouse=True)
def nothing_is_selected_yet():
    for cached in (packages.locate, dispatch.select, dispatch.selected_on):
        cached.cache_clear()
    yield
    for cached in (packages.locate, dispatch.select, dispatch.selected_on):
        cached.cache_clear()


@pytest.mark.parametrize(
    "layout, taken_by, refused",
    [("bf16", "flashmla_sparse", "flashmla_kv"), ("dsv32", "flashmla_kv", "flashmla_sparse")],
)
def test_the_cache_decides_between_flash_mlas_families_and_each_refuses_the_other(layout, taken_by, refused):
    """SGLang #23013."""
    problem = Problem("sparse_decode", "sm100", layout, 128)
    assert taken(problem) == taken_by
    (wrong,) = [b for b in TABLE if b.name == refused]
    assert f"not {layout}" in wrong.why_not(problem, not_built)


def test_an_explicit_choice_that_does_not_fit_lists_every_backend_and_its_reason(monkeypatch):
    """SGLang #23013: refused, never silently replaced; vLLM #55526: say which predicate failed."""
    monkeypatch.setattr(dispatch, "arch_of", lambda *device: "sm90")
    for package in ("flash_mla", "vllm", "sgl_kernel"):
        monkeypatch.setitem(sys.modules, package, None)  # as where they are not installed
    case = make_case(KV_LAYOUTS["dsv32"], "cpu")
    with pytest.raises(ValueError) as error:
        case.decode(backend="flashmla_sparse")
    message = str(error.value)
    assert "mla_fp8.sparse_decode: backend='flashmla_sparse' cannot run" in message
    for line in (
        "native           ",
        "flashmla_kv      flash_mla is not installed; vllm.third_party.flashmla.flash_mla_interface is not",
        "flashmla_sparse  reads bf16, bf16_512, not dsv32",
        "flashinfer       runs on sm100, sm103, not on sm90",
        "aiter            runs on gfx942, gfx950, not on sm90",
        "reference        could, if asked for: the specification",
    ):
        assert f"\n  {line}" in message, line


@pytest.mark.parametrize("name", ["flashmla", "fa3", "AUTO", ""])
def test_unknown_names_are_refused_with_those_that_exist(name):
    """SGLang #23013."""
    case = make_case(KV_LAYOUTS["dsv32"], "cpu")
    with pytest.raises(ValueError, match=f"backend must be auto or one of native, flashmla_kv.*got '{name}'"):
        case.decode(backend=name)


@pytest.mark.parametrize(
    "backend", [b for b in TABLE if b.max_q_heads], ids=lambda b: f"{b.name}-{b.layouts[0]}"
)
def test_any_head_count_up_to_the_largest_kernel_is_padded_and_more_is_refused(backend):
    """SGLang #22372."""
    for op in backend.ops:
        for heads in (1, 8, 63, backend.max_q_heads):
            problem = Problem(op, backend.archs[0], backend.layouts[0], heads)
            assert backend.why_not(problem, not_built) is None
        problem = Problem(op, backend.archs[0], backend.layouts[0], backend.max_q_heads + 1)
        assert f"at most {backend.max_q_heads} query heads" in backend.why_not(problem, not_built)


def test_heads_are_padded_to_the_next_size_not_to_the_largest(monkeypatch):
    """SGLang #27954: the kernel of 64 heads is twice as cheap as that of 128."""
    seen = []
    module = peer_standins.flash_mla(monkeypatch)
    original = module.flash_mla_with_kvcache

    @functools.wraps(original)
    def recording(q, *args, **options):
        seen.append(q.shape[2])
        return original(q, *args, **options)

    module.flash_mla_with_kvcache = recording
    monkeypatch.setattr(dispatch, "arch_of", lambda *device: "sm90")
    for heads in (8, 64, 65):
        make_case(KV_LAYOUTS["dsv4"], "cpu", num_q_heads=heads).decode(backend="flashmla_kv")
    assert seen == [64, 64, 128]


@pytest.mark.parametrize("num_q_heads", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("layout", ["dsv32", "dsv4", "bf16"])
def test_native_goes_first_where_it_was_measured_faster(layout, num_q_heads):
    """SGLang #36655, vLLM #48047: kernels for few heads beat padding; measured on an H200."""
    assert taken(Problem("sparse_decode", "sm90", layout, num_q_heads)) == "native"


@pytest.mark.parametrize(
    "layout, name", [("dsv32", "flashmla_kv"), ("dsv4", "flashmla_kv"), ("bf16", "flashmla_sparse")]
)
def test_where_native_is_not_tuned_others_go_first_and_native_serves_what_they_cannot(layout, name):
    """SGLang #29982: no default on a platform that nobody ran it on; but no request is turned away either."""
    assert taken(Problem("sparse_decode", "sm100", layout, 64)) == name
    assert (
        taken(Problem("sparse_decode", "sm100", layout, 64), lambda b, p: None if b is NATIVE else "no")
        == "native"
    )
    assert taken(Problem("sparse_decode", "sm100", "fp8_e4m3", 64)) == "native"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("layout", ["bf16", "fp8_e4m3", "fp8_e4m3_fnuz", "dsv4_fnuz"])
def test_rocm_takes_our_kernels_and_aiter_has_to_be_asked_for(arch, layout, monkeypatch):
    """AITER (SGLang #24129, AITER #5642) is no default. Ours ran emulated only, and says so."""
    monkeypatch.setattr(table, "probe", not_built)
    problem = Problem("sparse_decode", arch, layout, 16)
    assert dispatch.select(problem).name == "native"
    if layout == "bf16":
        assert dispatch.select(problem, "aiter").name == "aiter"


@pytest.mark.parametrize(
    "arch, layout, name",
    [("gfx942", "fp8_e4m3_fnuz", "aiter_fp8_fnuz"), ("gfx950", "fp8_e4m3", "aiter_fp8")],
)
def test_aiters_loss_has_to_be_asked_for_by_name(arch, layout, name, monkeypatch):
    """SGLang #24129, AITER #5642: "aiter" alone never means FP8 with rounded queries."""
    monkeypatch.setattr(table, "probe", not_built)
    problem = Problem("sparse_decode", arch, layout, 16)
    with pytest.raises(ValueError, match=rf"{name} +could, if asked for: rounds the queries to FP8 as well"):
        dispatch.select(problem, "aiter")
    assert dispatch.select(problem, name).adapter == "aiter" and dispatch.select(problem, name).lossy
    assert dispatch.select(Problem("sparse_decode", arch, "bf16", 16), "aiter").name == "aiter"


@pytest.mark.parametrize(
    "arch, name, reads, other",
    [
        ("gfx942", "aiter_fp8_fnuz", "fp8_e4m3_fnuz", "fp8_e4m3"),
        ("gfx950", "aiter_fp8", "fp8_e4m3", "fp8_e4m3_fnuz"),
    ],
)
def test_a_cache_in_the_other_gpus_encoding_is_refused_by_aiter(arch, name, reads, other, monkeypatch):
    """SGLang #24129: the cache goes in as it is; the other encoding's bytes are other numbers."""
    monkeypatch.setattr(table, "probe", not_built)
    assert dispatch.select(Problem("sparse_decode", arch, reads, 16), name).name == name
    for backend in (name, "aiter"):
        with pytest.raises(ValueError, match=rf"{name} +reads {reads}, not {other}\n"):
            dispatch.select(Problem("sparse_decode", arch, other, 16), backend)


def test_flashinfers_loss_has_to_be_asked_for_by_name(monkeypatch):
    """vLLM #35891: TRTLLM-GEN wants the queries in the cache's dtype."""
    monkeypatch.setattr(table, "probe", not_built)
    problem = Problem("sparse_decode", "sm100", "fp8_e4m3", 64)
    with pytest.raises(ValueError, match=r"flashinfer_fp8 +could, if asked for"):
        dispatch.select(problem, "flashinfer")
    assert dispatch.select(problem, "flashinfer_fp8").name == "flashinfer_fp8"
    assert dispatch.select(problem).name == "native"


def test_a_bf16_cache_with_an_fp8_backend_is_refused_not_quantised(monkeypatch):
    """SGLang quantises such a cache on every call."""
    monkeypatch.setattr(table, "probe", not_built)
    for name in ("flashmla_kv", "flashinfer_fp8"):
        with pytest.raises(ValueError, match=f"{name} +reads .*, not bf16"):
            dispatch.select(Problem("sparse_decode", "sm100", "bf16", 64), name)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", [b for b in TABLE if b.api], ids=lambda b: f"{b.name}-{b.layouts[0]}")
def test_what_a_backend_does_not_do_is_refused_by_name(feature, backend):
    """vLLM #55526: say which predicate failed."""
    problem = Problem("sparse_decode", backend.archs[0], backend.layouts[0], 8, frozenset({feature}))
    reason = backend.why_not(problem, not_built)
    possible = feature in backend.features and (feature, problem.layout) not in backend.not_with
    assert (reason is None) == possible
    assert reason is None or f"has no {feature}" in reason


def test_flash_mlas_decode_of_v32_has_no_second_cache():
    """An H200 says so: its kernel asserts extra_kv == nullptr."""
    (b,) = [b for b in TABLE if b.name == "flashmla_kv"]
    problems = {layout: Problem("sparse_decode", "sm90", layout, 64, TWO_CACHES) for layout in b.layouts}
    reasons = {layout: b.why_not(p, not_built) for layout, p in problems.items()}
    assert reasons["dsv4"] is None and reasons["dsv32"].endswith("for dsv32")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", NATIVE.layouts + NATIVE.pairs)
@pytest.mark.parametrize("op", OPS)
def test_native_serves_everything_that_its_libraries_have(arch, layout, op):
    """One package for what others serve in part: auto always finds something."""
    for heads in (1, 128):
        reason = NATIVE.why_not(Problem(op, arch, layout, heads, frozenset(FEATURES)), not_built)
        assert reason is None


def test_what_the_loaded_libraries_have_is_what_the_sources_list():
    """The tables above read csrc/registration.h; a process asks torch."""
    archs = {"cpu": "cpu", "sm90": "libmla_fp8_cuda.so", "gfx942": "libmla_fp8_hip.so"}
    loaded = [a for a, library in archs.items() if a == "cpu" or _libraries.status[library] == "loaded"]
    for arch in loaded:
        for op in OPS:
            problem = Problem(op, arch, "dsv4", 8)
            assert table.probe(NATIVE, problem) == not_built(NATIVE, problem)


def test_sparse_prefill_is_there_at_any_length():
    """SGLang #25418: its kernel was limited to 8192 query tokens."""
    q = torch.randn(8193, 1, 512).bfloat16()
    rows, indices = torch.randn(3, 512).bfloat16(), torch.arange(8193, dtype=torch.int32)[:, None] % 3
    out, _, lse = mla_fp8.sparse_prefill(q, rows, indices, sm_scale=1.0)
    assert torch.equal(out[:, 0], rows[indices[:, 0].long()])
    want = (q[:, 0].double() * rows[indices[:, 0].long()].double()).sum(-1)
    torch.testing.assert_close(lse[:, 0].double(), want, rtol=1e-4, atol=1e-4)


def test_reference_is_never_taken_by_auto(monkeypatch):
    """It is the specification and slow."""
    monkeypatch.setattr(table, "probe", lambda b, p: None if b.name == "reference" else "not here")
    problem = Problem("sparse_decode", "cpu", "dsv4", 8)
    with pytest.raises(ValueError, match=r"native +not here"):
        dispatch.select(problem)
    assert dispatch.select(problem, "reference").name == "reference"


def test_preferences_are_rows_that_name_backends_and_say_why():
    names = {b.name for b in TABLE}
    for row in PREFERENCES:
        assert set(row.order) <= names and row.why and row.ops and row.archs


def test_the_first_preference_that_fits_counts(monkeypatch):
    """A table by arch, op, layout and heads: one row is one decision."""
    few = dispatch.Preference(
        ("flashmla_kv",), "as measured", ("sparse_decode",), ("sm90",), ("dsv4",), range(64, 129)
    )
    monkeypatch.setattr(dispatch, "PREFERENCES", (few, *PREFERENCES))
    for layout, heads, name in (("dsv4", 64, "flashmla_kv"), ("dsv4", 32, "native"), ("dsv32", 64, "native")):
        problem = Problem("sparse_decode", "sm90", layout, heads)
        assert candidates(problem)[0].name == name == taken(problem)
    assert preference(Problem("sparse_prefill_paged", "sm90", "dsv4", 64)).order == ()


def test_a_choice_of_auto_that_is_not_native_is_logged_once(monkeypatch, caplog):
    """vLLM #56564: an upgrade of a dependency changed the backend, and nobody was told."""
    monkeypatch.setattr(table, "probe", not_built)
    problem = Problem("sparse_decode", "sm100", "dsv4", 64)
    with caplog.at_level(logging.INFO, logger="mla_fp8"):
        for _ in range(2):
            dispatch.select(problem)
            dispatch.select(problem, "flashmla_kv")
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "sparse_decode on sm100, dsv4: flashmla_kv (our kernels are not tuned"
    )


def test_reasons_say_what_is_taken_what_could_be_and_why_not():
    problem = Problem("sparse_decode", "sm100", "dsv4", 16, TWO_CACHES)
    lines = reasons(problem, missing=not_built).splitlines()
    assert lines[0].startswith("  flashmla_kv      taken: our kernels are not tuned")
    assert "  native           could" in lines and len(lines) == len(
        [b for b in TABLE if "sparse_decode" in b.ops]
    )
    asked = reasons(problem, "native", missing=not_built)
    assert "  native           taken: asked for" in asked and "  flashmla_kv      could\n" in asked


@pytest.mark.parametrize(
    "name, features",
    [
        ("sparse_decode", {"batch_invariant", "two caches"}),
        ("sparse_prefill_paged", {"two caches"}),
        ("sparse_prefill_window", {"two caches"}),
    ],
)
def test_selection_hears_of_what_a_call_wants(name, features, monkeypatch):
    """A backend without batch_invariant would give other bits in another batch."""
    tensors, options = SAMPLES[name]("cpu")
    wanted = []
    select_name = dispatch.select_name
    monkeypatch.setattr(
        dispatch, "select_name", lambda *args: wanted.append(set(args[5])) or select_name(*args)
    )
    plain = {key: x for key, x in options.items() if not key.startswith("extra_")}
    getattr(mla_fp8, name)(*tensors, **plain)
    getattr(mla_fp8, name)(*tensors, **options | dict.fromkeys(features & {"batch_invariant"}, True))
    assert wanted == [set(), features]


@pytest.mark.parametrize(
    "arch, key, library",
    [
        ("cpu", "CPU", "libmla_fp8_cpu.so"),
        ("sm90", "CUDA", "libmla_fp8_cuda.so"),
        ("gfx942", "CUDA", "libmla_fp8_hip.so"),
        ("meta", "Meta", None),
    ],
)
def test_an_op_without_a_kernel_for_the_device_is_not_taken(arch, key, library, monkeypatch):
    asked = []
    has = "_dispatch_has_kernel_for_dispatch_key"
    monkeypatch.setattr(torch._C, has, lambda op, key: asked.append((op, key)))
    problem = Problem("sparse_prefill_window", arch, "dsv4", 8)
    reasons = {"": f"no {key} kernel of sparse_prefill_window is loaded; see mla_fp8.doctor()"}
    if library:
        reasons["loaded"] = f"{library} has no sparse_prefill_window"
    for status, reason in reasons.items():
        monkeypatch.setattr(_libraries, "status", {library: status})
        with pytest.raises(ValueError, match=f"native +{re.escape(reason)}"):
            dispatch.select.__wrapped__(problem)
    assert ("mla_fp8::sparse_prefill_window", key) in asked


def test_importing_us_imports_no_peer():
    """A peer that is installed but not asked for is never imported (its import may compile for minutes)."""
    peers = ("flash_mla", "flashinfer", "aiter", "vllm", "sglang")
    code = f"import sys, mla_fp8; print([m for m in {peers} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_public_ops_take_a_backend():
    case = make_case(KV_LAYOUTS["bf16_512"], "cpu", page_size=1)
    s = case.scopes[0]
    native, spec = (
        mla_fp8.sparse_prefill(case.q, s.rows, s.indices, sm_scale=1.0, topk_length=s.length, backend=b)[2]
        for b in ("native", "reference")
    )
    torch.testing.assert_close(native, spec, rtol=1e-5, atol=1e-5)
