"""resolve_hot_rows against the specification: step after step on one state, and what others may pass."""

import pytest
import torch
from error_cases import check_refused, named
from hot_row_cases import INT_MAX, INT_MIN, Case, check, new_state
from index_cases import ints

import mla_fp8
from mla_fp8.hot_rows_reference import Tables

pytestmark = pytest.mark.op("resolve_hot_rows")


def chosen(rows, k, limit, holes=0.1):
    """Distinct entries in each row, with holes."""
    entries = torch.stack([torch.randperm(limit)[:k] for _ in range(rows)]) if rows else torch.zeros(0, k)
    return entries.where(torch.rand(rows, k) >= holes, -1).int()


def tables_of(requests, num_hot, limit, page=4, **more):
    """Pages of host memory at random places, with some that do not exist."""
    pages = -(-limit // page)
    host = torch.randint(-1, 3 * pages * requests, (requests, pages)).tolist()
    hot = torch.randperm(2 * requests * num_hot)[: requests * -(-num_hot // 2)].view(requests, -1).tolist()
    return Tables(
        num_hot, 3 * pages * requests * page - 5, host, hot, host_page_size=page, hot_page_size=2, **more
    )


@pytest.mark.parametrize("by_entry", [False, True], ids=["host rows", "entries"])
@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("k, num_hot, limit", [(1, 3, 9), (7, 23, 60), (40, 130, 300), (64, 192, 200)])
def test_step_after_step(k, num_hot, limit, next_n, by_entry, device):
    case = Case(torch.empty(0), *new_state(5, num_hot), tables_of(5, num_hot, limit, by_entry=by_entry))
    case.next_n = next_n
    for step in range(5):
        case.entries = chosen(3 * next_n - (step == 2), k, limit)
        if next_n > 1:  # drafts share most of what they choose
            case.entries[1::next_n] = case.entries[::next_n][: len(case.entries[1::next_n])]
        check(case, device)


def test_without_tables_an_entry_is_its_host_row(device):
    case = Case(torch.empty(0), *new_state(3, 40), Tables(40, 100))
    for _ in range(4):
        case.entries = chosen(3, 20, 110)
        check(case, device)


def test_requests_in_any_order_with_states_elsewhere(device):
    case = Case(
        torch.empty(0), *new_state(6, 60), tables_of(5, 60, 90), next_n=3, state_rows=[5, 2, -1, 6, 0]
    )
    for requests in ([1, 1, 1, 0, 0, 4], [2, 0, 0, 0, 3, 1], [4, -1, -1, 1, 5, 0]):
        case.row_to_request, case.entries = requests, chosen(6, 20, 90)
        check(case, device)


def test_more_rows_than_next_n_are_padding(device):
    case = Case(chosen(9, 5, 30), *new_state(3, 20), Tables(20, 30), next_n=2)
    case.row_to_request = [0, 0, 0, 0, 0, 2, 2, 2, 1]
    check(case, device)


def test_of_runs_with_one_state_the_first_counts(device):
    case = Case(chosen(7, 5, 30), *new_state(3, 20), Tables(20, 30), next_n=2, state_rows=[1, 0, 1])
    case.row_to_request = [0, 0, 1, 2, 2, 0, 1]
    check(case, device)


@pytest.mark.parametrize("valid", [INT_MIN, 0, 3, 4, INT_MAX])
def test_rows_behind_the_valid_ones_are_padding(valid, device):
    case = Case(chosen(7, 5, 30), *new_state(4, 20), Tables(20, 30), next_n=2, num_valid_rows=valid)
    check(case, device)


@pytest.mark.parametrize("k, num_hot", [(20, 40), (90, 200)])
def test_resident_pages_are_taken_as_they_are(k, num_hot, device):
    tables = tables_of(3, num_hot, 3 * k, first_page=1)
    case = Case(torch.empty(0), *new_state(3, num_hot), tables, int64=True)
    case.tables.resident = [[0, 7, -1, 9], [], [INT_MIN] * 4]
    case.tables.resident[1] = [0, 0, INT_MAX, 3]
    for _ in range(3):
        case.entries = chosen(3, k, 3 * k)
        case.entries[:, :3] = torch.tensor([2, 3, 4])
        check(case, device)


def test_resident_pages_are_of_states_not_of_requests(device):
    case = Case(torch.empty(0), *new_state(4, 40), tables_of(3, 40, 60, first_page=1), state_rows=[2, -1, 0])
    case.tables.resident = [[0, 7, 0, 9], [5] * 4, [3, 0, 0, 0], [6] * 4]
    for _ in range(3):
        case.entries = chosen(3, 20, 60)
        check(case, device)


def test_short_requests_hold_entry_e_in_slot_e_and_the_last_of_long_ones_lies_behind(device):
    case = Case(torch.empty(0), *new_state(4, 10), tables_of(4, 12, 40, by_entry=True), int64=True)
    case.tables.num_hot = 10
    for lens in ([3, 10, 11, 40], [INT_MAX, 0, 12, -5], [10, 11, 13, 1 << 40]):
        case.entry_lens, case.entries = lens, chosen(4, 10, 42, holes=0)
        case.entries[2, :2] = torch.tensor([lens[2] - 1, 0])
        check(case, device)


def test_values_that_are_none(device):
    case = Case(chosen(3, 8, 30), *new_state(3, 20), tables_of(3, 20, 30), int64=True)
    case.entries[0, :4] = torch.tensor([INT_MIN, INT_MAX, -1, -2])
    case.tables.host[0][:4] = [INT_MIN, INT_MAX, 1 << 62, -(1 << 62)]
    case.tables.hot[1][:4] = [-1, INT_MIN, INT_MAX, 1 << 30]
    check(case, device)
    case.entries[:] = -1
    check(case, device)


def test_an_entry_chosen_twice_is_loaded_once(device):
    case = Case(torch.tensor([[5, 6, 5, 5, 6]], dtype=torch.int32), *new_state(1, 5), Tables(5, 9))
    check(case, device)
    check(case, device)


@pytest.mark.parametrize("spoilt", ["order", "twice", "held"])
def test_a_state_that_others_spoilt_gives_none_and_harms_nobody(spoilt, device):
    case = Case(chosen(2, 6, 40, 0), *new_state(2, 12), Tables(12, 40))
    check(case, device)
    if spoilt == "order":
        case.order[0, :5] = torch.tensor([-1, 12, -(1 << 15), 32767, 0])
    if spoilt == "twice":
        case.held[0] = int(case.entries[0, 0])
    if spoilt == "held":
        case.held[0, :5] = torch.tensor([INT_MIN, INT_MAX, 40, 41, -7])
    for _ in range(2):
        case.entries = chosen(2, 6, 40, 0)
        check(case, device)


def test_no_rows_no_columns_no_states(device):
    for rows, k, states in ((0, 4, 2), (2, 0, 2), (3, 4, 0)):
        check(Case(chosen(rows, k, 20), *new_state(states, 8), Tables(8, 20)), device)


def test_the_largest_buffer(device):
    case = Case(torch.empty(0), *new_state(1, 1 << 15), Tables(1 << 15, 1 << 17))
    for _ in range(3):
        case.entries = chosen(1, 4096, 1 << 17, 0)
        check(case, device)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"entries": torch.zeros(3, 4)}, "entries must have dtype torch.int32, got torch.float32"),
        ({"hot_order": ints([[0] * 9] * 3, "cpu")}, "hot_order must have dtype torch.int16, got torch.int32"),
        ({"hot_entries": ints([[0] * 3] * 3, "cpu"), "hot_order": torch.zeros(3, 3, dtype=torch.int16)},
         "hot_entries must have a column for each of the 1 * 4 entries that a request may choose, got 3"),
        ({"next_n": 3}, "hot_entries must have a column for each of the 3 * 4 entries"),
        ({"next_n": 65}, "next_n must be in [1, 64], got 65"),
        ({"num_host_rows": -1}, "num_host_rows must be in [0, 2147483647], got -1"),
        ({"host_page_size": 0}, "host_page_size must be in [1, 16777216], got 0"),
        ({"first_page": -1}, "first_page must be in [0, 2147483647], got -1"),
        ({"host_page_table": ints([[0]] * 2, "cpu")},
         "host_page_table must have a row for each of 3 requests, got 2"),
        ({"resident_page_table": ints([[0]] * 2, "cpu")},
         "resident_page_table must have a row for each of 3 states, got 2"),
        ({"entry_lens": ints([1] * 3, "cpu")}, "entry_lens must be None without hot_page_table, got a"),
        ({"row_to_request": ints([1] * 2, "cpu")}, "row_to_request must have shape [3], got [2]"),
        ({"counters": ints([0, 0], "cpu")}, "counters must have dtype torch.int64 or torch.uint64"),
        ({"out_lens": ints([0] * 3, "cpu")}, "expected out_lens with out_hot_rows, got none"),
        ({"out_hot_rows": ints([[0] * 4] * 3, "cpu")}, "expected all of out_hot_rows, out_miss_host_rows"),
        ({"resident_page_table": [1]}, "resident_page_table must be a tensor, got [1]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(changes, message):
    held, order = new_state(3, 9)
    given = {
        "entries": ints([[0] * 4] * 3, "cpu"),
        "hot_entries": held,
        "hot_order": order,
        "num_host_rows": 9,
    }
    check_refused(
        mla_fp8.resolve_hot_rows, given | changes, f"mla_fp8.resolve_hot_rows: {message}", named(message)
    )
