"""The kernel of every GPU without one of its own, by force: heads of a block, and queries in parts."""

from dataclasses import replace

import pytest
import torch
from assertions import assert_attention, assert_same
from code_cases import assert_reads_the_largest_scales, e4m3_layouts, largest_scales
from emulation import is_cpu_kernel
from row_cases import changed, compacted, row_case
from sparse_cases import V4_SCOPES, all_layouts, make_case, mixed_pairs

from mla_fp8 import KV_LAYOUTS

OPS = torch.ops.mla_fp8


# The CPU library has one kernel, which splits nothing.
pytestmark = pytest.mark.only(lambda device, **_: not is_cpu_kernel(device))


def check(case, *, heads, splits):
    out, _, lse = case.run_by("portable", heads=heads, splits=splits)
    assert_attention(case, (out, lse))
    return out, lse


@all_layouts
@pytest.mark.parametrize("heads, num_q_heads, splits", [(32, 40, 3), (64, 64, 1), (64, 65, 5), (32, 17, 12)])
def test_any_heads_in_any_number_of_parts(layout, heads, num_q_heads, splits, device):
    check(make_case(layout, device, num_q_heads=num_q_heads, extra=V4_SCOPES), heads=heads, splits=splits)


@mixed_pairs
@pytest.mark.parametrize("heads", [32, 64])
def test_two_layouts(layout, extra_layout, heads, device):
    extra = V4_SCOPES | {"layout": extra_layout}
    check(make_case(layout, device, num_q_heads=33, extra=extra), heads=heads, splits=2)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 11])
@pytest.mark.parametrize("splits", [1, 3])
def test_every_query_part_and_head_has_its_block(num_tokens, splits, device):
    """Those that read the same keys are eight blocks apart; the last of them may be fewer than eight."""
    case = make_case(KV_LAYOUTS["dsv4"], device, num_tokens=num_tokens, num_q_heads=128, topk=140)
    check(case, heads=32, splits=splits)


@pytest.mark.parametrize("name", ["dsv32", "bf16"])
def test_holes_change_nothing_in_any_part(name, device):
    case = row_case(KV_LAYOUTS[name], device, num_tokens=22, num_q_heads=16)
    got = check(case, heads=32, splits=3)
    assert_same(check(changed(case, compacted), heads=32, splits=3), got)


@pytest.mark.parametrize("name", ["dsv32", "dsv4", "bf16"])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_one_slot_in_all_places(name, heads, device):
    """Its row is copied another way."""
    case = make_case(KV_LAYOUTS[name], device, num_tokens=3, num_q_heads=heads, topk=580, num_slots=700)
    (scope,) = case.scopes
    slots = scope.indices.clone()
    slots[1] = next(slot for slot in slots[0].tolist() if 0 <= slot < 700)
    slots[2, 300:] = slots[2, 44:324].clone()  # those of 256 places before
    repeated = replace(case, scopes=[replace(scope, indices=slots, length=None)])
    for splits in (1, 4):
        out, lse = check(repeated, heads=heads, splits=splits)
        again = check(repeated, heads=heads, splits=splits)
        assert_same(again, (out, lse))


@e4m3_layouts
@largest_scales
def test_scales_may_be_as_large_as_a_float(layout, scale, device):
    def attend(q, cache, options):
        slots = torch.arange(4 * len(q), dtype=torch.int32, device=device).view(-1, 4)
        options = options | {"layout": layout.id, "kernel": "portable", "heads": 32, "splits": 1}
        out, _, lse = OPS._sparse_attention(q, cache, slots, **options)
        return out, lse

    assert_reads_the_largest_scales(layout, device, scale, attend)


@pytest.mark.parametrize("room", [0, 1, 3.5, 100])  # parts of the keys
def test_queries_are_split_as_far_as_the_workspace_has_room(room, device):
    case = make_case(KV_LAYOUTS["dsv4_fnuz"], device, num_tokens=2, topk=300, num_slots=600)
    workspace = torch.full((int(room * 2 * 16 * 514),), float("nan"), device=device)
    out = torch.full((2, 16, 512), float("nan"), device=device).bfloat16()
    lse = torch.full((2, 16), float("nan"), device=device)
    OPS.sparse_decode_out(
        *case.arguments(), **case.op_options(), out=out, lse=lse, workspace=workspace if room else None
    )
    assert_attention(case, (out, lse))
    assert workspace.isnan().all() == (room < 2)
