"""Files of safetensors that hold no recorded calls: a sentence and status 2, whatever is in them."""

import json
import re

import pytest
import torch

from mla_fp8.__main__ import main

save_file = pytest.importorskip("safetensors.torch").save_file
Q, ROWS = torch.zeros(1, 2, 512).bfloat16(), torch.zeros(4, 512).bfloat16()
PREFILL = {"q": Q, "kv": ROWS, "indices": torch.zeros(1, 2, dtype=torch.int32)}
DECODE = PREFILL | {"kv_cache": torch.zeros(4, 1024, dtype=torch.uint8)}
del DECODE["kv"]
OPTIONS = {"layout": "bf16_512", "page_size": 1, "sm_scale": 0.1}


def call(op="sparse_prefill", **options):
    return [{"op": op, "options": {"sm_scale": 0.1} | options}]


def decode(**changes):
    return call("sparse_decode", **(OPTIONS | changes))


def replayed(tmp_path, header, tensors):
    path = tmp_path / "calls"
    save_file({f"0.{name}": x.clone() for name, x in tensors.items()}, path, {"mla_fp8.calls": header})
    return main(["replay", str(path), "--seconds", "0", "--device", "cpu"])


@pytest.mark.parametrize("header, tensors", [(call(), PREFILL), (decode(), DECODE)])
def test_what_the_others_differ_from_is_replayed(header, tensors, tmp_path):
    assert replayed(tmp_path, json.dumps(header), tensors) == 0


@pytest.mark.parametrize(
    "header, tensors, says",
    [
        (call(), {"kv": ROWS}, "call 0: sparse_prefill needs q, got kv, sm_scale"),
        (call(sm_scale=None), PREFILL, "call 0: sparse_prefill needs sm_scale"),
        (call(nope=1), PREFILL, "call 0: sparse_prefill has no nope"),
        (call(backend="native"), PREFILL, "call 0: sparse_prefill has no backend"),
        (call(), PREFILL | {"other": Q}, "call 0: sparse_prefill has no other"),
        (call("warmup"), PREFILL, "call 0: op must be one of sparse_decode, .*, got 'warmup'"),
        (call(["q"]), PREFILL, "call 0: op must be one of"),
        ([{"op": "sparse_prefill"}], PREFILL, "call 0: options must be given by name, got None"),
        ([{"op": "sparse_prefill", "options": [1]}], PREFILL, r"call 0: options .*, got \[1\]"),
        ([7], PREFILL, "call 0: op must be one of .*, got None"),
        ({"op": "sparse_prefill"}, PREFILL, "its header must be a list of calls, got {'op'"),
        (call() * 2, PREFILL, "call 1: sparse_prefill needs q, got sm_scale"),
        (decode(layout="nope"), DECODE, "layout must be one of .*, got 'nope'"),
        (decode(page_size=-1), DECODE, "call 0 is no call of sparse_decode: .*"),
        (decode(page_size="1"), DECODE, "call 0 is no call of sparse_decode: .*"),
        (decode(q=1), DECODE, "call 0 is no call of sparse_decode: .*"),
        (decode(extra_page_size=4), DECODE, "call 0 is no call of sparse_decode: .*extra_kv_cache"),
        (call(sm_scale="1"), PREFILL, "call 0 is no call of sparse_prefill: .*"),
        (call(topk_length=3), PREFILL, "call 0 is no call of sparse_prefill: .*"),
        (call(), PREFILL | {"q": Q[0]}, "call 0 is no call of sparse_prefill: .*"),
        (call(), PREFILL | {"indices": Q}, "call 0 is no call of sparse_prefill: .*"),
        (decode(), DECODE | {"kv_cache": Q}, "call 0 is no call of sparse_decode: .*"),
    ],
)
def test_a_header_that_fits_no_tensors_is_a_sentence(header, tensors, says, tmp_path, capsys):
    assert replayed(tmp_path, json.dumps(header), tensors) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mla_fp8 replay: {tmp_path / 'calls'}: ") or "layout" in line
    assert re.search(says, line)


def test_a_header_that_is_no_json_is_a_sentence(tmp_path, capsys):
    assert replayed(tmp_path, "[", PREFILL) == 2
    assert capsys.readouterr().err.startswith(f"mla_fp8 replay: {tmp_path / 'calls'}: ")
