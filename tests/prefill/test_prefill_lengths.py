"""Lengths of a chunk's requests: at boundaries, of nothing, shorter than the host knows, and garbage."""

import itertools

import pytest
import torch
from prefill_cases import BEYOND, LAYERS, NEGATIVE, all_strategies, assert_right, make_chunk


@all_strategies
@pytest.mark.parametrize("seq_lens", [[3], [4], [15], [16], [17], [63], [64], [65], [95]], ids=str)
def test_lengths_at_the_boundaries_of_groups_and_pages(strategy, seq_lens, device):
    """SGLang #36390, #25418: wrong beyond the window, or past the first compressed groups."""
    chunk = make_chunk("dsv4", device, seq_lens=seq_lens, query_lens=[min(seq_lens[0], 3)])
    layer = chunk.layer()
    got = chunk.attend(chunk.build(), layer, None, strategy)
    assert_right(got, chunk.expected(layer, None))


@all_strategies
def test_lengths_shorter_than_the_host_promised(strategy, device):
    """As in a CUDA graph that is replayed: the host's numbers are those of the capture."""
    chunk = make_chunk("dsv4", device)
    chunk.set_lengths([61, 5, 2, 0, 0, 17], [13, 5, 0, 0, 0, 4])
    layer = chunk.layer()
    got = chunk.attend(chunk.build(), layer, chunk.topk_indices, strategy)
    live = sum(chunk.live_query_lens)
    assert_right([x[:live] for x in got], chunk.expected(layer, chunk.topk_indices))
    assert (got[0][live:] == 0).all() and got[2][live:].isneginf().all()


@all_strategies
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("spoilt", [0, 1])
@pytest.mark.parametrize("host", [(0, 0), (21, 0), (21, 6)], ids=["no request", "no query", "queries"])
def test_garbage_lengths_of_a_request_change_no_other(strategy, kind, spoilt, host, device):
    """Each garbage number counts as 0 or as what the host promised: the bits are those of that number."""
    entries, window, indexed = LAYERS[kind]
    lengths = [[40, 30, 20], [8, 5, 4]]
    for length, promised in zip(lengths, host, strict=True):
        length[spoilt] = promised
    chunk = make_chunk("dsv4", device, seq_lens=lengths[0], query_lens=lengths[1])
    layer, topk_indices = chunk.layer(entries=entries, window=window), chunk.topk_indices if indexed else None
    device_lengths = [torch.tensor(x, dtype=torch.int32, device=device) for x in lengths]

    def attend(*numbers):
        chunk.seq_lens_device, chunk.query_lens_device = (x.clone() for x in device_lengths)
        chunk.seq_lens_device[spoilt], chunk.query_lens_device[spoilt] = numbers
        return chunk.attend(chunk.build(), layer, topk_indices, strategy)

    wants = {}
    for numbers in itertools.product(*((*NEGATIVE, n, *BEYOND) for n in host)):
        counted = tuple(min(max(n, 0), most) for n, most in zip(numbers, host, strict=True))
        if counted not in wants:
            wants[counted] = attend(*counted)
        for a, b in zip(attend(*numbers), wants[counted], strict=True):
            assert torch.equal(a, b), numbers
    assert_right(wants[host], chunk.expected(layer, topk_indices))


@all_strategies
@pytest.mark.parametrize("name", ["query_start_loc", "query_pos"])
def test_garbage_in_the_rows_of_q_reaches_nothing(strategy, name, device):
    """No illegal access; tokens whose request and position are right are right."""
    chunk = make_chunk("dsv4", device, seq_lens=[40, 30], query_lens=[8, 5])
    layer = chunk.layer()
    want = chunk.expected(layer, chunk.topk_indices)
    starts = torch.tensor([0, 8, 13], dtype=torch.int32, device=device)
    pos = torch.tensor([*range(32, 40), *range(25, 30)], dtype=torch.int32, device=device)
    for number in (*NEGATIVE, *BEYOND):
        given = {"query_start_loc": starts.clone(), "query_pos": pos.clone()}
        given[name][-1] = number
        got = chunk.attend(chunk.build(**given), layer, chunk.topk_indices, strategy)
        assert_right([x[:8] for x in got], [x[:8] for x in want])
        assert got[0].isfinite().all()


@all_strategies
@pytest.mark.parametrize("seq_lens, query_lens", [([], []), ([0, 0], [0, 0]), ([50, 9], [0, 0])], ids=str)
def test_chunks_without_queries(strategy, seq_lens, query_lens, device):
    chunk = make_chunk("dsv4", device, seq_lens=seq_lens, query_lens=query_lens)
    out, max_logits, lse = chunk.attend(chunk.build(), chunk.layer(), None, strategy)
    assert out.shape == (0, 4, 512) and max_logits.shape == lse.shape == (0, 4)
