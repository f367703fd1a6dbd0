"""A prefill chunk attends to the right rows in all three ways, and a stale chunk cache says so."""

import functools

import pytest
import torch
from prefill_cases import LAYERS, all_strategies, assert_right, make_chunk

import mla_fp8
from mla_fp8 import LayerCaches, PrefillWorkspace, workspace_rows
from mla_fp8.prefill import STRATEGIES


@all_strategies
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "layout",
    ["dsv4", "dsv41", "bf16_512", "fp8_e4m3_512", "dsv41+dsv41_fp4", "dsv4+dsv41_fp4", "dsv4_fnuz+dsv4"],
)
@pytest.mark.sampled(5)
def test_attention_is_that_over_the_rows_listed_by_plain_loops(strategy, kind, layout, device):
    entries, window, indexed = LAYERS[kind]
    chunk = make_chunk(layout, device)
    layer = chunk.layer(entries=entries, window=window)
    topk_indices = chunk.topk_indices if indexed else None
    if layer.layout_name == "dsv41_fp4" and strategy == "direct":
        with pytest.raises(ValueError, match="not dsv41_fp4"):
            chunk.attend(chunk.build(), layer, topk_indices, strategy)
        return
    got = chunk.attend(chunk.build(), layer, topk_indices, strategy)
    assert_right(got, chunk.expected(layer, topk_indices))


@all_strategies
def test_v32_has_no_window_and_an_entry_for_each_token(strategy, device):
    chunk = make_chunk("dsv32", device, ratio=1, window=0)
    layer = chunk.layer(window=False)
    got = chunk.attend(chunk.build(), layer, chunk.topk_indices, strategy)
    assert_right(got, chunk.expected(layer, chunk.topk_indices))


@pytest.mark.parametrize("indexed", [True, False])
def test_selected_rows_give_the_bits_of_whole_ones(indexed, device):
    chunk = make_chunk("dsv4", device)
    layer, cache = chunk.layer(), chunk.build()
    topk_indices = chunk.topk_indices if indexed else None
    whole, selected = (chunk.attend(cache, layer, topk_indices, s) for s in ("whole", "selected"))
    for a, b in zip(whole, selected, strict=True):
        assert torch.equal(a, b)


def test_selected_dequantises_each_entry_once(device, monkeypatch):
    chunk = make_chunk("dsv4", device, topk=3)
    layer = chunk.layer()
    seen = []
    original = mla_fp8.prefill.ways.dequantize_kv
    monkeypatch.setattr(
        mla_fp8.prefill.ways,
        "dequantize_kv",
        lambda cache, slots, **options: seen.append((cache, slots)) or original(cache, slots, **options),
    )
    chunk.attend(chunk.build(), layer, chunk.topk_indices, "selected")
    (slots,) = [slots for cache, slots in seen if cache is layer.entries.data]
    used = slots[slots >= 0]
    assert used.unique().numel() == used.numel() > 0
    alone = LayerCaches(**vars(layer) | {"window": None})
    distinct = torch.cat(chunk.attended(alone, chunk.topk_indices))
    assert used.numel() == distinct.unique(dim=0).shape[0]
    assert len(slots) == min(sum(n // 4 for n in chunk.seq_lens), 37 * 3)


@all_strategies
def test_layers_of_one_chunk_do_not_share_their_rows(strategy, device):
    """Two layers with different caches, one after the other in one workspace."""
    chunk = make_chunk("dsv4", device)
    cache = chunk.build()
    first = chunk.layer()
    chunk.attend(cache, first, chunk.topk_indices, strategy)
    chunk.entries, chunk.latents = chunk.entries.flip(0), chunk.latents.flip(0)
    second = chunk.layer()
    got = chunk.attend(cache, second, chunk.topk_indices, strategy)
    assert_right(got, chunk.expected(second, chunk.topk_indices))


@all_strategies
def test_hostile_indices_and_pages_are_masked(strategy, device):
    chunk = make_chunk("dsv4", device)
    layer, cache = chunk.layer(), chunk.build()
    want = chunk.attend(cache, layer, torch.full_like(chunk.topk_indices, -1), strategy)
    hostile = torch.tensor([-(2**31), 2**31 - 1, 1 << 30, -2], dtype=torch.int32, device=device)
    indices = hostile[torch.randint(4, chunk.topk_indices.shape, device=device)]
    for a, b in zip(chunk.attend(cache, layer, indices, strategy), want, strict=True):
        assert torch.equal(a, b)
    results = []
    for page in (-1, 1 << 30):  # 2**30 pages of 4 entries are 2**32 slots: 0 as an int32
        chunk.page_table.fill_(page)
        results.append(chunk.attend(chunk.build(), layer, chunk.topk_indices, strategy))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@all_strategies
def test_layers_of_every_kind_take_turns(strategy, device):
    """V4's layers, in their order: what one kind keeps for the next of its kind is not another kind's."""
    chunk = make_chunk("dsv4", device)
    cache = chunk.build()
    kinds = [(LAYERS[name], chunk.layer(entries=LAYERS[name][0], window=LAYERS[name][1])) for name in LAYERS]
    for (_, _, indexed), layer in kinds * 2:
        topk_indices = chunk.topk_indices if indexed else None
        want = chunk.attend(chunk.build(), layer, topk_indices, strategy)
        cache.workspace.chunk = cache
        for a, b in zip(chunk.attend(cache, layer, topk_indices, strategy), want, strict=True):
            assert torch.equal(a, b)


@all_strategies
@pytest.mark.parametrize("entries", [True, False])
def test_some_rows_of_the_chunk_at_given_positions(entries, strategy, device):
    """A context-parallel rank runs every second query of each request."""
    chunk = make_chunk("dsv4", device, seq_lens=[90, 33], query_lens=[20, 9])
    layer = chunk.layer(entries=entries)
    if not entries:
        chunk.topk_indices = None
    want = chunk.expected(layer, chunk.topk_indices)
    mine = torch.cat([torch.arange(0, 20, 2), torch.arange(20, 29, 2)]).to(device)
    pos = torch.cat([torch.arange(70, 90, 2), torch.arange(24, 33, 2)]).to(device, torch.int32)
    starts = torch.tensor([0, 10, 15], dtype=torch.int32, device=device)
    cache = chunk.build(query_start_loc=starts, query_pos=pos, num_tokens=15)
    chunk.q = chunk.q[mine]
    if entries:
        chunk.topk_indices = chunk.topk_indices[mine].contiguous()
    got = chunk.attend(cache, layer, chunk.topk_indices, strategy)
    assert_right(got, [x[mine] for x in want])


def test_nothing_but_the_workspace_grows_and_rows_are_known_before(device):
    chunk = make_chunk("dsv4", device)
    workspace = PrefillWorkspace(512, device)
    cache, layer = chunk.build(workspace), chunk.layer()
    for strategy, topk in (("direct", None), ("selected", 2), ("whole", None)):
        rows = workspace_rows(
            chunk.seq_lens, chunk.query_lens, window_size=12, compress_ratio=4, topk=topk, strategy=strategy
        )
        before = workspace.capacity
        chunk.attend(cache, layer, chunk.topk_indices[:, :topk].contiguous(), strategy)
        assert workspace.capacity == max(rows, before)
    windows = 31 + 7 + 11 + 1 + 0 + 20
    assert rows == windows + 22 + 1 + 7 + 0 + 0 + 8


def test_workspace_grows_at_least_by_half():
    workspace = PrefillWorkspace(512, "cpu")
    first = workspace.reserve(100)
    assert workspace.reserve(99).data_ptr() == first.data_ptr() and workspace.capacity == 100
    workspace.reserve(101)
    assert workspace.capacity == 150
    workspace.reserve(1000)
    assert workspace.capacity == 1000


def stale(cache, chunk, layer, message):
    with pytest.raises(RuntimeError, match=f"is stale: {message}"):
        chunk.attend(cache, layer, chunk.topk_indices)


def test_a_newer_chunk_makes_the_one_before_stale(device):
    chunk, workspace = make_chunk("dsv4", device), PrefillWorkspace(512, device)
    layer, old = chunk.layer(), chunk.build(workspace)
    new = chunk.build(workspace)
    stale(old, chunk, layer, ".*a newer chunk uses its workspace")
    old.invalidate()  # of a stale one changes nothing
    chunk.attend(new, layer, chunk.topk_indices)
    new.invalidate()
    stale(new, chunk, layer, "it was invalidated")


SOURCES = (
    "seq_lens", "query_lens", "page_table", "req_pool_indices", "req_to_token", "full_to_swa",
    "query_start_loc", "query_pos",
)  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_copying_new_metadata_into_its_tensors_makes_it_stale(name, device):
    """SGLang keeps metadata in place and copies the next batch's over it."""
    chunk = make_chunk("dsv4", device)
    starts = torch.tensor([0, *chunk.query_lens], dtype=torch.int32, device=device).cumsum(0).int()
    positions = [range(n - m, n) for n, m in zip(chunk.seq_lens, chunk.query_lens, strict=True)]
    pos = torch.tensor([p for r in positions for p in r], dtype=torch.int32, device=device)
    optional = {"query_start_loc": starts, "query_pos": pos}
    layer, cache = chunk.layer(), chunk.build(**optional)
    chunk.attend(cache, layer, chunk.topk_indices)
    found = {"seq_lens": chunk.seq_lens_device, "query_lens": chunk.query_lens_device} | optional
    x = found[name] if name in found else getattr(chunk, name)
    x.copy_(x.clone())
    stale(cache, chunk, layer, f"{name} was written after it was built")


def test_built_inside_a_capture_it_is_stale_outside_and_vice_versa(device, monkeypatch):
    chunk = make_chunk("dsv4", device)
    layer, eager = chunk.layer(), chunk.build()
    monkeypatch.setattr(mla_fp8.prefill.chunk, "capturing", lambda: True)
    stale(eager, chunk, layer, "build and use must be inside the same CUDA graph capture")
    captured = chunk.build()
    chunk.attend(captured, layer, chunk.topk_indices)
    monkeypatch.undo()
    stale(captured, chunk, layer, "build and use must be inside")


def test_workspace_that_would_grow_inside_a_capture_raises(monkeypatch):
    workspace = PrefillWorkspace(512, "cpu")
    workspace.reserve(10)
    monkeypatch.setattr(mla_fp8.prefill.workspace, "capturing", lambda: True)
    workspace.reserve(10)
    with pytest.raises(RuntimeError, match="expected 11 rows to be reserved before the capture"):
        workspace.reserve(11)


def test_inference_tensors_have_no_version_and_are_not_watched(device):
    with torch.inference_mode():
        chunk = make_chunk("dsv4", device)
        layer, cache = chunk.layer(), chunk.build()
        chunk.attend(cache, layer, chunk.topk_indices)


@all_strategies
@pytest.mark.parametrize("kind", LAYERS)
def test_attention_is_told_how_far_each_row_reaches(strategy, kind, device, monkeypatch):
    """Of both caches: what is behind a row's entries and window is never looked at."""
    entries, window, indexed = LAYERS[kind]
    chunk = make_chunk("dsv4", device)
    layer, lengths = chunk.layer(entries=entries, window=window), []

    def listening(right, names):
        def told(*args, **options):
            lengths.append([options[name] for name in names if options.get(name) is not None])
            return right(*args, **options)

        return told

    for op, names in {
        "sparse_prefill": ["topk_length"],
        "sparse_prefill_paged": ["topk_length", "extra_topk_length"],
        "sparse_prefill_window": ["extra_topk_length"],
    }.items():
        right = getattr(mla_fp8.prefill.ways, op)
        monkeypatch.setattr(mla_fp8.prefill.ways, op, listening(right, names))
    chunk.attend(chunk.build(), layer, chunk.topk_indices if indexed else None, strategy)
    ends = [(n - queries, n) for n, queries in zip(chunk.seq_lens, chunk.query_lens, strict=True)]
    reach = torch.tensor([pos + 1 for first, end in ends for pos in range(first, end)])
    topk = chunk.topk if indexed else max(chunk.seq_lens) // chunk.ratio
    want = [reach.clamp_max(chunk.window)] if window else []
    want += [(reach // chunk.ratio).clamp_max(topk)] if entries else []
    if strategy != "direct":  # one row of both; a window and all entries have their geometry
        want = [sum(want)] if indexed else want[1:]
    assert [[x.tolist() for x in call] for call in lengths] == [[x.tolist() for x in want]]


def test_prices_count_the_keys_that_the_host_knows_to_be_there(device, monkeypatch):
    chunk = make_chunk("dsv4", device)
    layer, shapes = chunk.layer(), []
    monkeypatch.setattr(
        mla_fp8.prefill.chunk, "predict", lambda shape, arch: shapes.append(shape) or {"whole": 1.0}
    )
    every = chunk.topk_indices.clamp(0, 0)  # no holes
    chunk.attend(chunk.build(), layer, every)
    assert shapes[0].num_keys == sum(len(rows) for rows in chunk.attended(layer, every))
    starts, pos = torch.tensor([0, 9], dtype=torch.int32), torch.arange(81, 90, dtype=torch.int32)
    part = make_chunk("dsv4", device, seq_lens=[90], query_lens=[18])
    cache = part.build(query_start_loc=starts.to(device), query_pos=pos.to(device), num_tokens=9)
    cache.predict(part.q[:9], part.layer(), part.topk_indices[:9])
    assert shapes[1].num_keys == 9 * (part.topk + part.window)


def test_auto_takes_what_is_predicted_to_be_fastest(device, monkeypatch):
    chunk = make_chunk("dsv4", device)
    layer, cache = chunk.layer(), chunk.build()
    for fastest in STRATEGIES:
        prices = {s: 1.0 if s == fastest else 2.0 for s in STRATEGIES}
        monkeypatch.setattr(mla_fp8.prefill.chunk, "predict", lambda shape, arch, p=prices: dict(p))
        want = chunk.attend(cache, layer, chunk.topk_indices, fastest)
        for a, b in zip(chunk.attend(cache, layer, chunk.topk_indices), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("entries", [False, True], ids=["window alone", "all entries"])
@pytest.mark.parametrize("strategy", ["whole", "selected"])
def test_keys_without_an_indexer_are_found_by_geometry_unless_queries_are_out_of_order(
    strategy, entries, device, monkeypatch
):
    chunk = make_chunk("dsv4", device)
    layer = chunk.layer(entries=entries)
    calls = []
    original = mla_fp8.prefill.ways.sparse_prefill_window
    monkeypatch.setattr(
        mla_fp8.prefill.ways,
        "sparse_prefill_window",
        lambda *args, **options: calls.append(args) or original(*args, **options),
    )
    assert_right(chunk.attend(chunk.build(), layer, None, strategy), chunk.expected(layer, None))
    assert len(calls) == 1
    positions = [range(n - m, n) for n, m in zip(chunk.seq_lens, chunk.query_lens, strict=True)]
    pos = torch.tensor([p for r in positions for p in r], dtype=torch.int32, device=device)
    cache = chunk.build(query_pos=pos)
    assert_right(chunk.attend(cache, layer, None, strategy), chunk.expected(layer, None))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(3)}, r"q must have shape \[37, \*, 512\], got \[3\]"),
        ({"q": None}, "q must be a tensor, got None"),
        ({"q": torch.zeros(37, 4, 576).bfloat16()}, r"q must have shape .* got \[37, 4, 576\]"),
        ({"q": torch.zeros(37, 4, 512)}, "q must be torch.bfloat16, got torch.float32"),
        ({"topk_indices": torch.zeros(37, 4).long()}, "topk_indices must be torch.int32, got torch.int64"),
        ({"topk_indices": torch.zeros(36, 4).int()}, r"topk_indices must have shape \[37, \*\]"),
        ({"layer": None}, "layer must be a LayerCaches, got None"),
        ({"query_groups": 0}, "query_groups must be in"),
    ],
    ids=str,
)
def test_predict_refuses_what_attend_refuses(change, message):
    chunk = make_chunk("dsv4", "cpu")
    cache = chunk.build()
    arguments = {"q": chunk.q, "layer": chunk.layer(), "topk_indices": chunk.topk_indices, "query_groups": 1}
    cache.predict(**arguments)
    refusal = TypeError if None in change.values() else ValueError
    for call in (cache.predict, functools.partial(cache.attend, sm_scale=1.0)):
        with pytest.raises(refusal, match=f"^mla_fp8.SparsePrefillChunkCache: {message}"):
            call(**(arguments | change))
    cache.invalidate()
    with pytest.raises(RuntimeError, match="is stale: it was invalidated"):
        cache.predict(**arguments)
