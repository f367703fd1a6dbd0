"""benchmarks/fit_prices.py: prices come back from times that they made; a row without times keeps its own."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if __name__ == "__main__":
    import conftest  # noqa: F401

import _mla_fp8_core as core

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import fit_prices

PRICES = {
    "split": [6.5, 12.0, 0.1, 1.5, 0.0, 0.0],
    "segments": [6.0, 10.0, 0.09, 1.4, 1.1, 0.0],
    "parts": [7.0, 23.0, 0.05, 0.0, 0.0, 2.7],
    "runs": [6.5, 20.0, 0.1, 0.0, 1.2, 2.5],
}


def timed(x: fit_prices.Forced, prices: list[float]) -> fit_prices.Forced:
    work = core.work(x.kernel, x.schedule, x.cta_heads, x.splits, **fit_prices.problem(core, x))
    return replace(x, us=float(np.dot(work, prices)))


PLANS = list(fit_prices.plans(core))


@pytest.mark.parametrize(
    "row",
    [
        ("few_heads", "split", 8, "dsv32"), ("few_heads", "split", 8, "dsv41+dsv41_fp4"),
        ("few_heads", "segments", 8, "dsv32"), ("many_heads", "parts", 32, "dsv32"),
        ("many_heads", "runs", 32, "dsv32"),
    ],
)  # fmt: skip
def test_a_fit_finds_the_prices_that_made_the_times(row):
    of_row = [x for x in PLANS if (x.kernel, x.schedule, x.cta_heads, x.layout) == row]
    assert len(of_row) > 50
    prices = PRICES[row[1]]
    measured = [timed(x, prices) for x in of_row]
    np.testing.assert_allclose(fit_prices.fitted(core, measured), prices, rtol=1e-6, atol=1e-9)


def test_the_header_has_new_prices_of_what_was_timed_alone(tmp_path):
    old = fit_prices.HEADER.read_text()
    measured = [timed(x, PRICES["runs"]) for x in PLANS if (x.schedule, x.cta_heads) == ("runs", 32)]
    fit_prices.write(tmp_path / "times.csv", measured)
    new = list(fit_prices.rewritten(core, old, fit_prices.read(tmp_path / "times.csv")))
    (changed,) = set(new) - set(old.splitlines())
    assert changed.strip() == (
        "{Kernel::kManyHeads, Schedule::kRuns, 32, Reads::kFp8, {6.5, 20, 0.1, 0, 1.2, 2.5}},"
    )
    assert list(fit_prices.rewritten(core, old, [])) == old.splitlines()


def test_every_row_of_prices_is_read():
    rows = [line for line in fit_prices.HEADER.read_text().splitlines() if line.startswith("    {Kernel")]
    assert len(rows) > 30 and all(fit_prices.ROW.fullmatch(line) for line in rows)
