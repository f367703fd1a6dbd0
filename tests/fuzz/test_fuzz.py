"""A few calls of `make fuzz` per op, and that it finds a result which is off."""

import fuzz
import pytest
import torch

SEEDS = range(12)
CACHES = ("kv_cache", "index_cache")  # what ops without results write
WRITTEN = {
    "copy_host_rows": ("hot_caches",),
    "store_host_rows": ("host_caches",),
    "forget_rows": ("hot_entries",),
}
every_op = pytest.mark.parametrize("op", fuzz.OPS)


@every_op
def test_random_calls_agree_with_the_oracle(op):
    for seed in SEEDS:
        assert fuzz.check(seed, op) == op


@every_op
def test_one_wrong_element_is_found(op, monkeypatch):
    original = fuzz.FUNCTIONS[op]

    def off(**arguments):
        results = original(**arguments)
        written = next((arguments[name] for name in WRITTEN.get(op, CACHES) if name in arguments), None)
        spoilt = written if results is None else results[0] if isinstance(results, tuple) else results
        spoilt = spoilt.view(torch.uint8) if spoilt.element_size() == 1 else spoilt
        if spoilt.numel():
            last = (*(n - 1 for n in spoilt.shape),)
            is_float = spoilt.is_floating_point()
            spoilt[last] = spoilt[last].clamp_min(-1e3) + 2000 if is_float else spoilt[last] ^ 1
        return results

    monkeypatch.setitem(fuzz.FUNCTIONS, op, off)
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            call, _ = fuzz.make_call(seed, op)
            call.check(fuzz.run(call))


@pytest.mark.parametrize("spoil", ["written", "silent"])
def test_a_refusal_that_writes_or_says_nothing_is_found(spoil, monkeypatch):
    def refuse(**arguments):
        if spoil == "written":
            arguments["kv_cache"].zero_()
        raise RuntimeError("" if spoil == "silent" else "kv_cache must be something else")

    monkeypatch.setitem(fuzz.FUNCTIONS, "quantize_kv", refuse)
    message = "without a word" if spoil == "silent" else "was written by a refused call"
    seeds = [seed for seed in range(200) if is_refused_with_pages(seed)]
    with pytest.raises(AssertionError, match=message):
        for seed in seeds:
            fuzz.check(seed, "quantize_kv")


def is_refused_with_pages(seed: int) -> bool:
    """Whether this call is one of those with an argument spoilt, and has a cache to write."""
    call, r = fuzz.make_call(seed, "quantize_kv")
    return not r.often(0.8) and call.arguments["kv_cache"].numel() > 0
