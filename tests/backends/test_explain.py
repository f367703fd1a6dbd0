"""mla_fp8.explain: which backend would serve a call, and why not the others."""

import pytest

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.backends.table import TABLE

ASKED = {"op": "sparse_decode", "layout": "dsv32", "num_heads": 16, "device": "cpu"}


def explain(**changes) -> str:
    return mla_fp8.explain(**(ASKED | changes))


def test_explain_has_the_problem_and_a_line_for_each_backend():
    first, *lines = explain().splitlines()
    assert first == "sparse_decode on cpu, dsv32, 16 heads; backend='auto'"
    assert lines[0].split()[:2] == ["native", "taken:"]
    assert len(lines) == len([b for b in TABLE if "sparse_decode" in b.ops])
    asked = explain(backend="reference", extra_layout="dsv32", batch_invariant=True)
    assert asked.startswith("sparse_decode on cpu, dsv32, 16 heads, batch_invariant, two caches; ")
    assert asked.endswith("  reference        taken: asked for")
    pair = explain(op="sparse_prefill_paged", layout=KV_LAYOUTS["dsv4"], extra_layout="dsv41_fp4")
    assert pair.startswith("sparse_prefill_paged on cpu, dsv4 + dsv41_fp4, 16 heads, two caches; ")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"op": "sparse_decod"}, r"mla_fp8.explain: op must be one of sparse_decode, .*, got 'sparse_decod'"),
        ({"layout": "dsv33"}, r"mla_fp8: layout must be one of dsv32, .*, got 'dsv33'"),
        ({"extra_layout": "dsv41_fp4"}, r"extra_layout must be dsv32 with layout dsv32, got dsv41_fp4"),
        ({"op": "sparse_prefill"}, r"layout must be bf16 or bf16_512 alone for sparse_prefill, got dsv32"),
        ({"num_heads": 129}, r"num_heads must be in \[1, 128\], got 129"),
        ({"device": "gpu"}, r"device must be one of this process, got 'gpu' \(.*\)"),
        ({"device": "cuda:77"}, r"device must be one of this process, got 'cuda:77' \(.*\)"),
        (
            {"backend": "flashmla"},
            r"mla_fp8.explain: backend must be auto or one of native, .*, got 'flashmla'",
        ),
    ],
)
def test_explain_says_what_is_wrong_with_the_question(changes, message):
    """It was an empty text."""
    with pytest.raises(ValueError, match=message):
        explain(**changes)
