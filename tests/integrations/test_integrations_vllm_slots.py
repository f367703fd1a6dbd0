"""Where attention in vLLM writes prompts of many heads, and whose slots decode attends to, over stand-ins."""

from types import SimpleNamespace

import engine_standins
import pytest
import torch
from vllm_prompt_cases import prompts_of_many_heads

from mla_fp8.integrations import vllm_slots, vllm_sparse
from mla_fp8.testing import assert_within_flash_mla_tolerance

PAGE = 64


def test_prompts_of_many_heads_are_written_where_vllm_reads_them(monkeypatch, device):
    engine_standins.vllm(monkeypatch)
    kind = vllm_sparse.make_backend(__name__).get_impl_cls()
    assert not kind.knows_prompts  # the stand-in's source is no vLLM's
    monkeypatch.setattr(kind, "knows_prompts", True)
    impl = kind(64, 0.1)
    b = prompts_of_many_heads(impl, device)
    for name, x in b.replaced.items():
        monkeypatch.setattr(impl.theirs, name, x, raising=False)
    out, lse = impl._forward_fp8_kv_separate_prefill_decode(*b.arguments)
    assert lse is None and out.data_ptr() == b.out.data_ptr() and b.out[len(out) :].isnan().all()
    assert_within_flash_mla_tolerance(out, b.exact[2].float(), b.exact[0], b.exact[2])


@pytest.fixture
def offered():
    """(positions of 3 rows, their table) after a choice that offered slots."""
    vllm_slots.switch(True)
    yield torch.zeros(3, 8, dtype=torch.int32), torch.zeros(5, 4, dtype=torch.int32)
    vllm_slots.switch(False)


def test_slots_are_those_of_the_group_that_took_them(offered):
    positions, table = offered
    alone, both = (
        SimpleNamespace(num_layers=1, has_indexer=True),
        SimpleNamespace(num_layers=2, has_indexer=True),
    )
    slots = vllm_slots.room(positions, table[:3], PAGE)
    assert slots.shape == positions.shape and slots.dtype is torch.int32
    vllm_slots.take(both, 0)
    assert vllm_slots.of(both, 3, table, PAGE) is vllm_slots.of(both, 3, table, PAGE) is slots
    assert vllm_slots.of(alone, 3, table, PAGE) is None
    vllm_slots.take(both, 1)  # a layer without an indexer
    assert vllm_slots.of(both, 3, table, PAGE) is slots
    vllm_slots.take(alone, 0)  # nothing was offered since
    assert vllm_slots.of(alone, 3, table, PAGE) is None
    vllm_slots.take(both, 0)
    assert vllm_slots.of(both, 3, table, PAGE) is None
    slots = vllm_slots.room(positions, table, PAGE)
    vllm_slots.take(alone, 0)
    assert vllm_slots.of(alone, 3, table, PAGE) is slots
    assert vllm_slots.of(alone, 3, table, PAGE) is None  # its memory is free


def test_slots_of_other_rows_pages_or_tables_are_not_used(offered):
    positions, table = offered
    group = SimpleNamespace(num_layers=2, has_indexer=True)
    vllm_slots.room(positions, table, PAGE)
    vllm_slots.take(group, 0)
    for other in (
        (2, table, PAGE),
        (3, table.clone(), PAGE),
        (3, table[:, :2].contiguous(), PAGE),
        (3, table, 32),
    ):
        assert vllm_slots.of(group, *other) is None


def test_what_moves_positions_voids_the_offer(offered):
    positions, table = offered
    group = SimpleNamespace(num_layers=2, has_indexer=True)
    vllm_slots.room(positions, table, PAGE)
    assert vllm_slots.void(lambda *args, **options: (args, options), 1, b=2) == ((1,), {"b": 2})
    vllm_slots.take(group, 0)
    assert vllm_slots.of(group, 3, table, PAGE) is None


def test_nothing_is_offered_unless_a_layer_takes_it():
    assert vllm_slots.room(torch.zeros(3, 8, dtype=torch.int32), torch.zeros(5, 4), PAGE) is None


def test_slots_of_a_rank_come_with_their_lengths(offered):
    """Attention to all keys does not take them, nor a rank those of all keys."""
    positions, table = offered
    group = SimpleNamespace(num_layers=2, has_indexer=True)
    slots, lens = torch.ones_like(positions), torch.ones(3, dtype=torch.int32)
    vllm_slots.offer_of_rank(slots, lens, table[:3], PAGE)
    vllm_slots.take(group, 0)
    assert vllm_slots.of(group, 3, table, PAGE) is None
    found = vllm_slots.of_rank(group, 3, table, PAGE)
    assert found is not None and found[0] is slots and found[1] is lens
    assert vllm_slots.of_rank(group, 2, table, PAGE) is None
    vllm_slots.room(positions, table, PAGE)
    vllm_slots.take(group, 0)
    assert vllm_slots.of_rank(group, 3, table, PAGE) is None
    vllm_slots.switch(False)
    vllm_slots.offer_of_rank(slots, lens, table, PAGE)
    assert not vllm_slots.wanted() and vllm_slots._state.offered is None
