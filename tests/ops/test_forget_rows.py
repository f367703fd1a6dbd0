"""forget_rows against loops."""

import pytest
import torch
from error_cases import check_refused, named
from index_cases import ints

import mla_fp8
from mla_fp8.hot_rows_reference import forget_rows

pytestmark = pytest.mark.op("forget_rows")
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("of", ["every state", "requests", "states elsewhere"])
def test_slots_that_hold_an_entry_hold_none(of, dtype, device):
    wide = torch.randint(-1, 40, (5, 300)).int()
    held = wide[:, :290]
    entries = [3, 3, -1, INT_MIN, 17, INT_MAX, 39, 40] + (
        [1 << 32, (1 << 32) + 5] if dtype is torch.int64 else []
    )
    requests = (torch.arange(len(entries)) % 7 - 1).tolist()
    states = [4, -1, 5, 0, 4]
    found = {"every state": None, "requests": [r if 0 <= r < 5 else -1 for r in requests]}
    found["states elsewhere"] = [
        s if 0 <= s < 5 else -1 for r in requests for s in [states[r] if 0 <= r < 5 else -1]
    ]
    got, want = wide.to(device).clone(), wide.clone()
    forget_rows(entries, want[:, :290], found[of])
    options = {} if of == "every state" else {"row_to_request": ints(requests, device)}
    if of == "states elsewhere":
        options["state_rows"] = ints(states, device)
    mla_fp8.forget_rows(torch.tensor(entries, dtype=dtype, device=device), got[:, :290], **options)
    assert torch.equal(got.cpu(), want) and not torch.equal(want, wide)
    assert torch.equal(held, wide[:, :290])


def test_nothing_to_forget(device):
    for entries, shape in (([], (2, 3)), ([1], (0, 3)), ([1], (2, 0))):
        mla_fp8.forget_rows(ints(entries, device), torch.zeros(shape, dtype=torch.int32, device=device))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"entries": torch.zeros(3)},
            "entries must have dtype torch.int32 or torch.int64, got torch.float32",
        ),
        ({"entries": ints([[1]], "cpu")}, "entries must have shape [*], got [1, 1]"),
        ({"hot_entries": torch.zeros(2, 3)}, "hot_entries must have dtype torch.int32, got torch.float32"),
        ({"row_to_request": ints([0, 0], "cpu")}, "row_to_request must have shape [3], got [2]"),
        ({"state_rows": ints([0, 0], "cpu")}, "state_rows must be None without row_to_request, got a tensor"),
        ({"hot_entries": None}, "hot_entries must be a tensor, got None"),
    ],
)
def test_what_is_wrong_is_refused(changes, message):
    given = {"entries": ints([1, 2, 3], "cpu"), "hot_entries": ints([[1, 2]] * 2, "cpu")}
    check_refused(mla_fp8.forget_rows, given | changes, f"mla_fp8.forget_rows: {message}", named(message))
