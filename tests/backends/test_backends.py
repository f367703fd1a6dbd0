"""Every backend gives the same attention: on a GPU by the real package, on the CPU by a stand-in for it."""

import contextlib
import sys

import flashinfer_standins
import peer_standins
import pytest
import sdpa
import torch
from assertions import assert_attention
from sparse_cases import GRID, V4_SCOPES, Case, make_case

import mla_fp8.compat.flash_mla
from mla_fp8 import KV_LAYOUTS, dispatch, sparse_decode, sparse_prefill
from mla_fp8.arch import arch_of
from mla_fp8.backends import flash_mla, flashinfer_sm90, opaque, packages
from mla_fp8.backends.table import TABLE, Backend, Problem

HEADS = [1, 8, 16, 40, 64, 128]
STANDINS = {
    "flash_mla": peer_standins.flash_mla,
    "flashinfer": flashinfer_standins.flashinfer,
    "flashinfer_sm90": flashinfer_standins.flashinfer,
    "flashinfer_sm120": flashinfer_standins.flashinfer,
    "aiter": peer_standins.aiter,
}
# Windows by geometry need cases of their own: test_sparse_prefill_window.py.
ROWS = [
    (b, op, layout) for b in TABLE for op in b.ops if op != "sparse_prefill_window" for layout in b.layouts
]
PEERS = [(b, op, layout) for b, op, layout in ROWS if b.adapter in STANDINS]
DECODES = list({b.adapter: (b, op, layout) for b, op, layout in PEERS if op == "sparse_decode"}.values())
SM90 = [(b, op, layout) for b, op, layout in PEERS if b.name == "flashinfer_sm90"]


def row_id(row) -> str:
    return f"{row[0].name}-{row[1]}-{row[2]}"


@pytest.fixture(autouse=True)
def nothing_is_located_yet():
    def forget():
        for cached in (packages.locate, dispatch.select, dispatch.selected_on):
            cached.cache_clear()

    forget()
    yield
    forget()


def find_peer(row, device: str, monkeypatch) -> None:
    """On a GPU that the package runs on, the package; on the CPU, its stand-in."""
    backend, op, layout = row
    if device == "cpu":
        STANDINS[backend.adapter](monkeypatch)
    elif reason := backend.why_not(Problem(op, arch_of(device, 0), layout, 16)):
        pytest.skip(reason)


def run(op: str, case: Case, function, **options) -> tuple[torch.Tensor, ...]:
    """The op over the case; its prefill form reads the case's rows."""
    if op == "sparse_prefill":
        s = case.scopes[0]
        options |= {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": s.length}
        return function(case.q, s.rows, s.indices, **options)
    return function(*case.arguments(), **(case.options() | options))


def check(backend: Backend, case: Case, results: tuple[torch.Tensor, ...]) -> None:
    assert all(x.is_contiguous() for x in results)
    if backend.lossy:
        (out, lse), (exact, _, exact_lse) = results, case.expected()
        assert out.shape == exact.shape and out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        error = (out.double() - exact).norm() / exact.norm()
        assert error < 0.1 and lse.isneginf().equal(exact_lse.isneginf())
    elif backend.name == "reference":  # not held against itself
        assert_attention(case, results, expected=sdpa.of_case(case))
    else:
        assert_attention(case, results)


def runs_here(row, num_q_heads: int, device: str) -> bool:
    backend, op, layout = row
    return backend.why_not(Problem(op, arch_of(device, 0), layout, num_q_heads)) is None


@pytest.mark.parametrize("row", ROWS, ids=row_id)
@pytest.mark.parametrize("num_q_heads", HEADS)
@pytest.mark.only.with_args(runs_here)
@pytest.mark.sampled(7)
def test_backends_that_run_here_agree_with_float64(row, num_q_heads, device):
    backend, op, layout = row
    case = make_case(
        KV_LAYOUTS[layout], device, num_q_heads=num_q_heads, page_size=1 if "prefill" in op else 64
    )
    function = {
        "sparse_decode": sparse_decode,
        "sparse_prefill": sparse_prefill,
        "sparse_prefill_paged": lambda *tensors, **options: case.prefill(backend=options["backend"]),
    }[op]
    check(backend, case, run(op, case, function, backend=backend.name))


@pytest.mark.parametrize("backend", ["native", "flashmla_kv", "reference"])
@pytest.mark.parametrize("layout", ["dsv32", "dsv4"])
def test_two_caches_on_backends_that_run_here(backend, layout, device):
    problem = Problem("sparse_decode", arch_of(device, 0), layout, 16, frozenset({"two caches"}))
    (row,) = [b for b in TABLE if b.name == backend]
    if reason := row.why_not(problem):
        pytest.skip(reason)
    case = make_case(KV_LAYOUTS[layout], device, extra=V4_SCOPES)
    check(row, case, case.decode(backend=backend))


def call(adapter: str):
    """The opaque op, so that what the compiler sees is tested too."""

    def function(*tensors, **options):
        if "layout" in options:
            options["layout"] = options["layout"].id
        op = opaque.ops.sparse_decode if "layout" in options else opaque.ops.sparse_prefill
        return op(*tensors, adapter=adapter, **options)

    return function


@pytest.mark.parametrize("row", PEERS, ids=row_id)
@pytest.mark.parametrize("num_q_heads", [1, 16, 40, 64, 128])
@pytest.mark.sampled(3)
def test_adapters_convert_to_the_conventions_of_the_package_and_back(row, num_q_heads, monkeypatch):
    """Holes, hostile and few keys, empty rows, lengths of INT_MIN and INT_MAX: see make_scope."""
    backend, op, layout = row
    STANDINS[backend.adapter](monkeypatch)
    torch.manual_seed(0)
    case = make_case(
        KV_LAYOUTS[layout], "cpu", num_q_heads=num_q_heads, page_size=1 if "prefill" in op else 64
    )
    check(backend, case, run(op, case, call(backend.adapter)))


@pytest.mark.parametrize("sink", [float("-inf"), float("inf")], ids=str)
@pytest.mark.parametrize("row", PEERS, ids=row_id)
def test_infinite_sinks(row, sink, device, monkeypatch):
    backend, op, layout = row
    find_peer(row, device, monkeypatch)
    case = make_case(KV_LAYOUTS[layout], device, page_size=1 if "prefill" in op else 64)
    case.attn_sink.fill_(sink)
    out, *_ = run(op, case, call(backend.adapter))
    if sink > 0:
        assert (out == 0).all()
    else:
        case.attn_sink = None
        torch.testing.assert_close(out, run(op, case, call(backend.adapter))[0])


@pytest.mark.parametrize("row", PEERS, ids=row_id)
def test_zero_tokens_and_no_lengths(row, device, monkeypatch):
    backend, op, layout = row
    find_peer(row, device, monkeypatch)
    case = make_case(KV_LAYOUTS[layout], device, page_size=1 if "prefill" in op else 64, topk=128, sink=False)
    case.scopes[0].indices[2:] = case.scopes[0].indices[:1]  # nothing beyond a length
    case.scopes[0].length = None
    check(backend, case, run(op, case, call(backend.adapter)))
    empty = case.tokens(slice(0, 0))
    assert run(op, empty, call(backend.adapter))[0].shape == (0, 16, 512)


@pytest.mark.parametrize("name", ["flashmla_kv", "flashinfer_sm120"])
def test_packages_that_take_two_caches(name, monkeypatch):
    (row,) = [b for b in TABLE if b.name == name]
    STANDINS[row.adapter](monkeypatch)
    case = make_case(KV_LAYOUTS["dsv4"], "cpu", extra=V4_SCOPES)
    check(row, case, run("sparse_decode", case, call(row.adapter)))


def test_flashinfers_sm120_kernels_for_more_than_64_tokens(monkeypatch):
    """They take 8, 16, 32, 64 or 128 heads and widths in blocks of 64."""
    flashinfer_standins.flashinfer(monkeypatch)
    case = make_case(KV_LAYOUTS["dsv4"], "cpu", num_tokens=65, num_q_heads=9, topk=20, extra=V4_SCOPES)
    (row,) = [b for b in TABLE if b.name == "flashinfer_sm120"]
    check(row, case, run("sparse_decode", case, call("flashinfer_sm120")))


def test_a_batch_beyond_flash_mlas_scheduler_is_split(monkeypatch):
    """SGLang #25484: its shared memory grows with the batch and ends near 11.6 K."""
    peer_standins.flash_mla(monkeypatch)
    monkeypatch.setattr(flash_mla, "_MAX_BATCH", 4)
    case = make_case(KV_LAYOUTS["dsv4"], "cpu", num_tokens=10, extra=V4_SCOPES)
    (row,) = [b for b in TABLE if b.name == "flashmla_kv"]
    check(row, case, run("sparse_decode", case, call("flash_mla")))


@pytest.mark.parametrize("row", SM90, ids=row_id)
def test_a_batch_beyond_flashinfers_plan_is_split(row, device, monkeypatch):
    """FlashInfer 0.7.2: "native capacity is 16384" pieces of work, one per token at least."""
    backend, op, layout = row
    find_peer(row, device, monkeypatch)
    monkeypatch.setattr(flashinfer_sm90, "_MAX_BATCH", 4)
    case = make_case(KV_LAYOUTS[layout], device, num_tokens=10)
    check(backend, case, run(op, case, call(backend.adapter)))


@pytest.mark.parametrize("row", SM90, ids=row_id)
@pytest.mark.parametrize("page_size", [1, 61, 256])
def test_flashinfers_lists_over_pages_of_any_size(row, page_size, device, monkeypatch):
    """Lists long enough to be computed in pieces and merged."""
    backend, op, layout = row
    find_peer(row, device, monkeypatch)
    case = make_case(
        KV_LAYOUTS[layout],
        device,
        page_size=page_size,
        num_tokens=3,
        topk=1111,
        num_slots=3000,
        num_q_heads=72,
    )
    check(backend, case, run(op, case, call(backend.adapter)))


@pytest.mark.parametrize("row", SM90, ids=row_id)
def test_a_cache_without_pages_and_lists_without_columns(row, device, monkeypatch):
    """No row may point at slot 0 of a cache that has none."""
    backend, op, layout = row
    find_peer(row, device, monkeypatch)
    case = make_case(KV_LAYOUTS[layout], device)
    main = case.scopes[0]
    kv_cache, no_columns = main.kv_cache[:0], main.indices[:, :0].contiguous()
    for cache, indices in ((kv_cache, main.indices), (main.kv_cache, no_columns), (kv_cache, no_columns)):
        main.kv_cache, main.indices = cache, indices
        out, lse = run(op, case, call(backend.adapter))
        assert out.shape == (6, 16, 512) and (out == 0).all() and lse.isneginf().all()


@pytest.mark.parametrize("row", [r for r in SM90 if KV_LAYOUTS[r[2]].needs_scale], ids=row_id)
def test_a_scale_that_is_no_power_of_two_does_not_pass_through_flashinfers_bf16(row, device, monkeypatch):
    """FlashInfer 0.7.2 rounds ckv_scale to bf16 and multiplies in bf16."""
    backend, op, layout = row
    find_peer(row, device, monkeypatch)
    wrapper = packages.function(flashinfer_sm90.DECODE, "BatchMLAPagedAttentionWrapper")
    seen, real = [], wrapper.run

    def recording(self, **options):
        seen.append((options["ckv_scale"], options["kpe_scale"]))
        return real(self, **options)

    monkeypatch.setattr(wrapper, "run", recording)
    case = make_case(KV_LAYOUTS[layout], device)
    case.scale *= 1 + 2**-8  # bf16 would make it 1
    case.scopes[0].rows = case.scopes[0].rows.double() * (case.scale.double() / GRID)
    out, lse = run(op, case, call(backend.adapter))
    exact, _, exact_lse = case.expected()
    assert ((out.double() * exact).sum() / exact.square().sum() - 1).abs() < 1e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    assert seen == [(1.0, 1.0)]


@pytest.mark.parametrize("name", ["flashinfer_sm90", "flashinfer_sm120"])
def test_a_capture_is_refused_by_a_backend_that_plans_on_the_host(name, device, monkeypatch):
    """FlashInfer 0.7.2: plan() copies kv_len_arr to the host; a capture would fail half-way."""
    row = next(row for row in PEERS if row[0].name == name)
    find_peer(row, device, monkeypatch)
    case = make_case(KV_LAYOUTS[row[2]], device)
    capture = contextlib.nullcontext()
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    else:
        capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match=f"{name} plans .* which a CUDA graph cannot capture"), capture:
        run("sparse_decode", case, call(name))


def test_statistics_of_sgl_kernels_copy_are_base_2(monkeypatch):
    """sgl-kernel's flash_mla_sparse_fwd, unlike the package's."""
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    peer_standins.sgl_kernel(monkeypatch)
    case = make_case(KV_LAYOUTS["bf16_512"], "cpu", page_size=1)
    (row,) = [b for b in TABLE if b.name == "flashmla_sparse"]
    check(row, case, run("sparse_prefill", case, call("flash_mla")))


@pytest.mark.parametrize("adapter", ["flash_mla", "flashinfer_sm90"])
def test_a_cache_whose_pages_are_apart_is_refused_where_rows_are_addressed(adapter, monkeypatch):
    STANDINS[adapter](monkeypatch)
    case = make_case(KV_LAYOUTS["bf16"], "cpu")
    wide = torch.nn.functional.pad(case.scopes[0].kv_cache, (0, 64))[:, :-64]
    case.scopes[0].kv_cache = wide
    with pytest.raises(ValueError, match="pages 73728 bytes apart for this backend, got 73792"):
        run("sparse_decode", case, call(adapter))


@pytest.mark.parametrize("row", DECODES, ids=row_id)
def test_opaque_ops_compile_to_one_graph(row, device, monkeypatch):
    backend, op, layout = row
    find_peer(row, device, monkeypatch)
    case = make_case(KV_LAYOUTS[layout], device)

    def decode():
        return run(op, case, call(backend.adapter))

    torch._dynamo.reset()
    got = torch.compile(decode, fullgraph=True, backend="aot_eager")()
    for a, b in zip(got, decode(), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


FLASH_MLA_SOURCES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface", "sgl_kernel.flash_mla")


@pytest.mark.parametrize("source", FLASH_MLA_SOURCES)
def test_flash_mla_is_found_where_it_is_installed(source, monkeypatch):
    for name in FLASH_MLA_SOURCES:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)
    assert flash_mla.DECODE.modules == FLASH_MLA_SOURCES
    module, reason = packages.locate(flash_mla.DECODE)
    assert module is None and reason.count("is not installed") == 3
    packages.locate.cache_clear()
    installed = peer_standins.flash_mla(monkeypatch, source)
    assert packages.locate(flash_mla.DECODE) == (installed, "")


@pytest.mark.parametrize("name, op, layout", [
    ("flashmla_kv", "sparse_decode", "dsv4"), ("flashmla_kv", "sparse_decode", "dsv32"),
    ("flashmla_sparse", "sparse_decode", "bf16"), ("flashmla_sparse", "sparse_prefill", "bf16_512"),
])  # fmt: skip
def test_sglangs_build_of_flash_mla_is_called_on_its_legacy_side(name, op, layout, monkeypatch):
    peer_standins.sgl_flash_mla(monkeypatch)
    case = make_case(KV_LAYOUTS[layout], "cpu", **({"page_size": 1} if op == "sparse_prefill" else {}))
    (row,) = [b for b in TABLE if b.name == name]
    check(row, case, run(op, case, call("flash_mla")))


def test_a_flash_mla_without_kernels_for_our_layouts_is_refused(monkeypatch):
    for name in FLASH_MLA_SOURCES[1:]:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)
    peer_standins.sgl_flash_mla(monkeypatch, has_legacy=False)
    assert "flash_mla was built without its legacy kernels" in packages.locate(flash_mla.DECODE)[1]

    def flash_mla_with_kvcache(indices, attn_sink, extra_k_cache, extra_topk_length, enable_batch_invariant):
        """As of 2026-09-30."""

    module = peer_standins.flash_mla(monkeypatch)
    module.flash_mla_with_kvcache = flash_mla_with_kvcache
    packages.locate.cache_clear()
    for api in (flash_mla.DECODE, flash_mla.PREFILL):
        assert "flash_mla has the kernels of 2026-09-30 alone" in packages.locate(api)[1]


def test_a_package_of_another_version_says_what_it_lacks(monkeypatch):
    """vLLM #47527: probe the installed library, not its version string."""
    for name in FLASH_MLA_SOURCES[1:]:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        """As of September 2025."""

    peer_standins.install(monkeypatch, "flash_mla", flash_mla_sparse_fwd)
    _, reason = packages.locate(flash_mla.PREFILL)
    assert reason.startswith(
        "flash_mla has flash_mla_sparse_fwd without attn_sink, topk_length (another version)"
    )
    _, reason = packages.locate(flash_mla.DECODE)
    assert "flash_mla has no get_mla_metadata" in reason


def test_a_package_that_cannot_be_imported_is_a_reason_and_no_error(monkeypatch, tmp_path):
    """SGLang #25870, vLLM #49804: a peer that is broken must not break us."""
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcudart.so.12 not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    module, reason = packages.locate(flash_mla.DECODE)
    assert module is None
    assert reason.startswith("flash_mla cannot be imported (OSError: libcudart.so.12 not found)")


def test_our_own_stand_in_for_a_package_is_not_the_package(monkeypatch):
    """Code that puts mla_fp8.compat.flash_mla in the place of flash_mla must not send us in circles."""
    monkeypatch.setitem(sys.modules, "flash_mla", mla_fp8.compat.flash_mla)
    assert "flash_mla is our own stand-in for it" in packages.locate(flash_mla.DECODE)[1]
