"""What ci/engines does around engines: fatbins trimmed, kernels attributed, verdicts."""

import collections
import contextlib
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import peer_standins
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "ci" / "engines"


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, len(header), len(code))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_other_gpus_becomes_zeros_and_nothing_moves(tmp_path):
    keep, other, ptx = b"hopper!!" * 5, b"blackwell" * 7, b".version 9" * 3
    chance = b"\x50\xed\x55\xba not a container"  # the magic number by chance
    before = b"ELF" + container(entry(2, 90, keep), entry(2, 100, other)) + chance
    before += container(entry(1, 90, ptx), entry(2, 90, keep)) + b"end"
    library = tmp_path / "x.so"
    library.write_bytes(before)
    script = [sys.executable, FOLDER / "trim_fatbin.py", library, "90"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    after = library.read_bytes()
    assert done.stdout == f"{2 * len(keep)} bytes kept, {len(other) + len(ptx)} zeroed\n"
    assert after == before.replace(other, bytes(len(other))).replace(ptx, bytes(len(ptx)))


def test_an_entry_that_is_not_understood_changes_nothing(tmp_path):
    library = tmp_path / "x.so"
    library.write_bytes(container(entry(7, 90, b"what?")))
    script = [sys.executable, FOLDER / "trim_fatbin.py", library, "90"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode and "of kind 7" in done.stderr
    assert library.read_bytes() == container(entry(7, 90, b"what?"))


@pytest.mark.parametrize(
    "kernel, part",
    [
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<...>", "attention"),
        ("void mla_fp8::sparse_decode_kernel<...>", "attention"),
        ("_convert_req_index_to_global_index_kernel", "indices"),
        ("void vllm::cp_gather_and_upconvert_fp8_kv_cache_kernel(...)", "rows of pages"),
        ("void vllm::concat_and_cache_ds_mla_kernel<...>", "keys and caches"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<...>>", "copies, fills"),
        ("void deep_gemm::sm90_fp8_paged_mqa_logits<...>", "indexer"),
        ("void vllm::topKPerRowPrefill<...>", "indexer"),
        ("void vllm::persistent::persistent_topk_kernel<...>", "indexer"),
        ("_combine_topk_swa_indices_kernel", "indices"),
        ("void mla_fp8::(anonymous namespace)::index_scan_sm90_kernel<64>", "indexer"),
        ("void mla_fp8::index_merge_kernel(...)", "indexer"),
        ("nvjet_tst_128x64", "GEMMs"),
        ("_fused_q_kernel", "queries"),
        ("void vllm::ConcatMLAQKernel<...>", "queries"),
        ("_fused_norm_rope_kernel", "keys and caches"),
        ("_fused_kv_compress_norm_rope_insert_sparse_attn", "keys and caches"),
        ("sparse_mla_index_remap_kernel", "indices"),
        ("void vllm::fused_add_rms_norm_kernel<...>", "norms, activation"),
        ("mhc_pre_big_fuse_tilelang_kernel", "hyper-connections"),
        ("void sglang::topk_main_kernel<true, 2>", "indexer"),
        ("_finish_paged_indexer_topk_kernel", "indexer"),
        ("mla_fp8::gpu::index_list_kernel(mla_fp8::gpu::(anonymous namespace)::ListArgs)", "indexer"),
        ("_rope_tail_fake_quant_fp4_kernel", "queries"),
        ("Memcpy DtoD (Device -> Device)", "copies, fills"),
        ("_get_k_and_s_triton_kernel", "rows of pages"),
        ("_kpool_softmax_rotate_write_cache_kernel", "keys and caches"),
        ("_fwht_quant_kernel", "queries"),
        ("_expand_pools_and_append_tail_kernel", "indices"),
        ("mla_fp8::gpu::(anonymous namespace)::exchange_states_kernel(...)", "exchange of ranks"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)", "exchange of ranks"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)", "communication"),
        ("ComputeSWAIndicesAndLensKernel", "inputs of a step"),
        ("PrepareUniformDecodeKernel", "inputs of a step"),
        ("a_kernel_of_nobody", "rest"),
    ],
)
def test_a_kernel_belongs_to_one_part(kernel, part, tools):
    import parts  # noqa: PLC0415

    assert parts.part_of(kernel) == part


def test_launches_of_a_step_are_not_those_of_a_layer(tools):
    import parts  # noqa: PLC0415

    eager = {"attention_decode": (60, 6), "memcpy": (5, 5), "fill_functor": (1, 1), "nvjet_tst": (90, 12)}
    assert parts.Step({name: (*each, 0) for name, each in eager.items()}, layers=6).launches == 11 / 6
    graph = {"attention_decode": (60, 6, 6), "memcpy": (9, 9, 0), "copy": (8, 8, 6), "nvjet_tst": (9, 9, 9)}
    assert parts.Step(graph, layers=6).launches == 12 / 6


def test_kernels_of_a_graph_are_told_by_the_number_that_they_share(tools, monkeypatch):
    import engine  # noqa: PLC0415

    def event(name, number, begin):
        of_gpu = torch.autograd.DeviceType.CUDA
        return SimpleNamespace(
            name=name, id=number, device_type=of_gpu, time_range=SimpleNamespace(start=begin, end=begin + 2)
        )

    events = [event("copy", 1, 0), event("copy", 2, 5), event("attention", 2, 9), event("copy", 3, 20)]
    profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert engine.per(engine.kernels(lambda: None), 2) == {"copy": (3, 1.5, 0.5), "attention": (1, 0.5, 0.5)}


def test_kernels_that_overlap_are_counted_once(tools):
    """Whatever the order of a profile: one that waits inside another, one that ends behind it, a gap."""
    import report  # noqa: PLC0415

    spans = [("next", 40, 50), ("rope", 5, 22), ("attention", 0, 20), ("copy", 6, 12), ("attention", 22, 30)]
    assert report.each_once(spans) == {"attention": 28, "rope": 2, "copy": 0, "next": 10}


def result(**changes) -> dict:
    given = {
        "ok": True,
        "calls": {},
        "init_s": 1.0,
        "wall_s": 2.0,
        "layers": 2,
        "prompt_logprobs": [[-1.0, -2.0]],
    }
    return given | changes


FOUND = {
    "exact-16-fp8_ds_mla-eager": result(),
    "stock-16-fp8_ds_mla": result(prompt_logprobs=[[-1.1, -2.1]], calls={"FlashMLA.sparse_decode_fwd": 3}),
    "ours-16-fp8_ds_mla": result(prompt_logprobs=[[-1.1, -2.1]], calls={"mla_fp8.sparse_decode_out": 3}),
}


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({}, None),
        ({"calls": {"FlashMLA.sparse_decode_fwd": 2}}, "FlashMLA was called 2 times, expected 0"),
        ({"prompt_logprobs": [[-1.2, -2.2]]}, "0.2000 to exact attention, stock is at 0.1000"),
        ({"ok": False, "error": "no result"}, "no result"),
    ],
)
def test_what_is_wrong_with_a_run_is_said(changed, problem, tools):
    import report  # noqa: PLC0415

    found = FOUND | {"ours-16-fp8_ds_mla": FOUND["ours-16-fp8_ds_mla"] | changed}
    problems = report.problems(found)
    assert problems == ([] if problem is None else [f"ours-16-fp8_ds_mla: {problem}"])
    assert report.table(found, set(found))


@pytest.mark.parametrize("distance, wrong", [(0.4, False), (0.6, True)])
@pytest.mark.parametrize(
    "cache, exact", [("fp8_ds_mla", "bfloat16"), ("glm52", "glm52_bf16"), ("sglang", "sglang_bf16")]
)
def test_who_writes_rows_is_compared_with_attention_over_bf16_rows_where_all_keys_are_chosen(
    cache, exact, distance, wrong, tools
):
    import report  # noqa: PLC0415

    behind = [-9.0] * 5  # where another choice of keys is no error
    found = {
        f"exact-16-{cache}-eager": result(prompt_logprobs=[[-1.5] * (report.TOPK + 5)]),
        f"exact-16-{exact}-eager": result(prompt_logprobs=[[-1.0] * report.TOPK + behind]),
        f"stock-16-{cache}": result(prompt_logprobs=[[-1.5] * (report.TOPK + 5)]),
        f"layer-16-{cache}": result(prompt_logprobs=[[-1.0 - distance] * (report.TOPK + 5)]),
    }
    said = f"layer-16-{cache}: 0.6000 to exact attention, stock is at 0.5000"
    assert report.problems(found) == ([said] if wrong else [])


def step(**kernels) -> dict:
    """A step of two layers; the kernels' microseconds by name, two launches each, in a graph."""
    return {"layers": 2, "timed": {"8": {"decode": {name: [us, 2, 2] for name, us in kernels.items()}}}}


STOCK = step(flash_fwd_splitkv_mla=40.0, FillFunctor=8.0, nvjet=52.0)
OURS = step(mla_fp8_sparse_decode=20.0, nvjet=52.0)


def test_kernel_times_are_compared_per_layer(tools):
    import report  # noqa: PLC0415

    found = {
        f"{who}-16-fp8_ds_mla-speed": result(**one, vllm="0")
        for who, one in (("stock", STOCK), ("ours", OURS))
    }
    table = report.table(found, set(found)).splitlines()
    assert "| 16-fp8_ds_mla-speed, decode, 8 x 4096: us of a layer | stock | ours |" in table
    for line in (
        "| attention | 20.0 | 10.0 |",
        "| copies, fills | 4.0 | 0.0 |",
        "| GEMMs | 26.0 | 26.0 |",
        "| whole GPU | 50.0 | 36.0 |",
        "| launches of these, without norms | 2.0 | 1.0 |",
    ):
        assert line in table
    assert any(line.startswith("| without GEMMs") and line.endswith(" | 24.0 | 10.0 |") for line in table)
    names = table[table.index("stock-16-fp8_ds_mla-speed, decode, 8 x 4096:") + 1 :]
    assert names[0] == "attention: flash_fwd_splitkv_mla, 1.00 x (1.00), 20.00 us"
    assert names[1] == "copies, fills: FillFunctor, 1.00 x (1.00), 4.00 us"
    csv = report.csv_of_steps(found, "a GPU")
    assert "a GPU,vLLM 0,V3.2,16,decode,8,4096,ours,attention,10.00,1.00\n" in csv


@pytest.mark.parametrize("us, wrong", [(5.0, False), (6.0, True)])
def test_a_step_whose_rest_is_above_a_twentieth_is_wrong(us, wrong, tools):
    import report  # noqa: PLC0415

    one = step(nvjet=100.0 - us, a_kernel_of_nobody=us)
    found = {"stock-16-speed": result(**one)}
    said = f"stock-16-speed, decode, 8 x 4096: 6% of the step belong to no part: {us} us a_kernel_of_nobody"
    assert report.problems(found) == ([said] if wrong else [])


INDEX = {"mla_fp8.index_topk_out": 5, "mla_fp8.sparse_decode_out": 5}


@pytest.mark.parametrize(
    "calls, problem",
    [
        (INDEX, None),
        (INDEX | {"DeepGEMM.fp8_fp4_mqa_logits": 2}, "DeepGEMM's logits were made 2 times, expected 0"),
        ({"mla_fp8.sparse_decode_out": 5}, "index_topk was not called"),
        ({}, None),  # of an engine with a process of its own
    ],
)
def test_an_indexer_that_is_not_ours_is_said(calls, problem, tools):
    import report  # noqa: PLC0415

    found = FOUND | {"index-16-fp8_ds_mla": FOUND["ours-16-fp8_ds_mla"] | {"calls": calls}}
    assert report.problems(found) == ([] if problem is None else [f"index-16-fp8_ds_mla: {problem}"])


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({}, None),
        (
            {"tokens": [[5, 6], [7, 9]]},
            "from token 1 on, prompt 1 has others than in ours-128-fp8_ds_mla-same",
        ),
        ({"tokens": [[5, 6]]}, "from token 0 on, prompt 1 has others than in ours-128-fp8_ds_mla-same"),
        ({"found_and_loaded": [400, 0]}, "no row was loaded"),
    ],
)
def test_tokens_that_a_hot_buffer_changes_are_said(changed, problem, tools):
    import report  # noqa: PLC0415

    run = FOUND["ours-16-fp8_ds_mla"] | {"tokens": [[5, 6], [7, 8]]}
    name = "hisparse-128-fp8_ds_mla-same-hot"
    hot = run | {"found_and_loaded": [300, 20], "calls": {"mla_fp8.resolve_hot_rows": 8}} | changed
    found = {"ours-128-fp8_ds_mla-same": run, name: hot}
    assert report.problems(found) == ([] if problem is None else [f"{name}: {problem}"])


def test_drafts_that_went_alone_are_said(tools):
    import report  # noqa: PLC0415
    import spies  # noqa: PLC0415

    spies.CALLS.clear()
    decode = spies._counted("mla_fp8.sparse_decode_out", lambda **options: None)
    alone = dict(spies.CALLS)
    for group in (1, 4):
        decode(query_groups=group)
    name, said = "groups-16-fp8_ds_mla-mtp-3", "no drafts went as a group"
    for calls, problem in ((alone, [f"{name}: {said}"]), (dict(spies.CALLS), [])):
        assert report.problems({name: FOUND["ours-16-fp8_ds_mla"] | {"calls": calls}}) == problem
    assert report.calls({"calls": spies.CALLS}, "mla_fp8") == 2


def test_v41s_rows_are_counted_and_compared_with_flash_mla_over_v4s(tools, monkeypatch, tmp_path):
    import report  # noqa: PLC0415
    import spies  # noqa: PLC0415

    class DeepSeekV4SingleKVPool:
        page_size = 64

        def create_buffer(self, *, num_pages):
            return torch.zeros(num_pages, 64 * 288, dtype=torch.uint8)

    peer_standins.install(monkeypatch, "sglang.srt.mem_cache.deepseek_v4_memory_pool", DeepSeekV4SingleKVPool)
    spies.CALLS.clear()
    monkeypatch.setattr(spies, "_SAVED", [tmp_path / "calls"])
    spies.count_sglang_rows()
    DeepSeekV4SingleKVPool().create_buffer(num_pages=3)
    calls = spies.saved_calls(tmp_path)
    assert calls == {"rows of 288 bytes": 192}

    stock, exact, own = ([[-1.0 - x]] for x in (0.1, 0.0, 0.5))
    found = {
        "stock-16-sglang_v41": result(prompt_logprobs=stock),
        "exact-16-sglang_v41-eager": result(prompt_logprobs=exact),
        "exact-16-sglang_v41_rows-eager": result(prompt_logprobs=own, calls=calls),
    }
    for distance, counted, problem in (
        (0.1, calls, []),
        (0.2, calls, ["0.2000 to exact attention, stock is at 0.1000"]),
        (0.1, {}, ["no rows of 288 bytes"]),
    ):
        name = "ours-16-sglang_v41_rows"
        ours = {name: result(prompt_logprobs=[[own[0][0] + distance]], calls=counted)}
        assert report.problems(found | ours) == [f"{name}: {each}" for each in problem]


def test_pins_that_an_engine_does_not_allow_are_found(tools):
    import pins  # noqa: PLC0415

    metadata = (
        "Metadata-Version: 2.4\nRequires-Dist: Some_Package>=2\nRequires-Dist: other==1.0\n"
        'Requires-Dist: extra==1; extra == "all"\nRequires-Dist: old==1; python_version < "3"\n'
        "\nRequires-Dist: text==1\n"
    )
    pinned = ["some-package==1.9", "other==1.0", "extra==2", "old==2", "text==2", "unheard-of==1"]
    assert pins.contradictions(metadata, pinned) == ["Some_Package==1.9, it names >=2"]


@pytest.mark.parametrize("engine_of", ["vLLM", "SGLang"])
def test_a_batch_is_timed_as_parts_takes_it(engine_of, tools, monkeypatch):
    """Everything around the profiler, up to the table."""
    import engine  # noqa: PLC0415
    import parts  # noqa: PLC0415
    import sglang_engine  # noqa: PLC0415

    ran: list[int] = []
    steps = collections.Counter({("nvjet", "us"): 8.0, ("nvjet", "n"): 4, ("nvjet", "graph"): 4})
    for module in (engine, sglang_engine):
        monkeypatch.setattr(module, "kernels", lambda run: (run(), steps.copy())[1])
    if engine_of == "vLLM":
        monkeypatch.setattr(engine, "generate", lambda llm, ids, new: ran.append(len(ids)))
        args = engine.parse(["--who", "ours", "--out", "x", "--batches", "2", "3", "--context", "8"])
        found = engine.timed(None, args)
    else:
        batch = SimpleNamespace(merge_batch=lambda other: None)
        runner = SimpleNamespace(
            runner=SimpleNamespace(clear=lambda: None), extend=lambda ids: ran.append(len(ids)) or batch,
            decode=lambda batch, steps, g: None,
        )  # fmt: skip
        args = sglang_engine.parse(["--who", "ours", "--out", "x", "--batches", "2", "3", "--context", "8"])
        found = {str(n): sglang_engine.times_of(runner, args, i, n) for i, n in enumerate(args.batches)}
    assert ran and [set(one) for one in found.values()] == [{"prefill", "decode"}, {"decode"}]
    step = parts.Step(found["2"]["prefill"], layers=2)
    assert step.parts["GEMMs"][1] == 1 and parts.table("a step", {"ours": step})


def test_every_step_of_the_matrix_names_engines_that_there_are(tools):
    pytest.importorskip("tomllib")
    import engine  # noqa: PLC0415
    import matrix  # noqa: PLC0415

    for step in matrix.STEPS.values():
        if any(map(matrix.takes_turns, step.cases)):  # all of them say when they leave the GPU alone
            assert {case.script for case in step.cases} <= {"engine.py", "sglang_engine.py"}
        names = [case.name for case in step.cases]
        assert len(names) == len(set(names))
        for case in step.cases:
            if case.script == "engine.py":
                assert engine.parse(["--out", "x", *case.arguments()]).who == case.who
