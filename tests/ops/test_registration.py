"""Every op of torch.ops.mla_fp8: its schema is frozen, its kernels are registered, opcheck passes.

After a deliberate change of a schema:
PYTHONPATH=tests/support python tests/ops/test_registration.py > tests/ops/schemas.txt
"""

from pathlib import Path

import pytest
import torch
from op_samples import NO_KERNEL, SAMPLES, op_call, schemas

import mla_fp8
from mla_fp8 import _libraries

QUERIES = (  # no tensors
    "kv_layout_table",
    "attention_table",
    "index_layout_table",
    "index_topk_counters",
    "index_topk_workspace",
    "sparse_attention_workspace",
    "cpu_isa",
)


OPS = [name for name in schemas() if name not in QUERIES and not name.startswith("_")]
every_op = pytest.mark.parametrize("name", OPS)


def test_schemas_are_frozen():
    frozen = (Path(__file__).parent / "schemas.txt").read_text().splitlines()
    assert [str(schema) for schema in schemas().values()] == frozen


def test_every_op_has_a_sample_and_a_public_function():
    functional = {name.removesuffix("_out") for name in OPS}
    assert functional == set(SAMPLES)
    assert functional <= set(mla_fp8.__all__)


@every_op
def test_every_op_has_its_kernels(name):
    keys = {"CPU", "Meta"}
    if "loaded" in (_libraries.status.get(f"libmla_fp8_{gpu}.so") for gpu in ("cuda", "hip")):
        keys.add("CUDA")
    without = {device.upper() for device in NO_KERNEL.get(name.removesuffix("_out"), ())}
    has = {k for k in keys if torch._C._dispatch_has_kernel_for_dispatch_key(f"mla_fp8::{name}", k)}
    assert has == keys - without


@every_op
@pytest.mark.only(lambda name, device: device not in NO_KERNEL.get(name.removesuffix("_out"), ()))
def test_opcheck(name, device):
    tensors, options = op_call(name, device)
    if name.startswith("index_"):  # torch checks a schema by products, which float8 has none of: e2m1
        q, weights, *others = tensors
        bytes_of = torch.zeros(*q.shape[:2], 64, dtype=torch.uint8, device=device)
        tensors = (bytes_of, weights, *others)
        options = options | {"q_scale": bytes_of[..., :4].contiguous()}
    if name.startswith("index_") and "_ragged" in name:
        k = tensors[2].view(torch.uint8)[:, :64].contiguous()
        tensors = (*tensors[:2], k, k[:, :4].contiguous(), *tensors[4:])
    elif name.startswith("index_"):
        layout = mla_fp8.INDEX_LAYOUTS["index_fp4"]
        cache = layout.empty(len(tensors[2]), options["page_size"], device).zero_()
        tensors = (*tensors[:2], cache, *tensors[3:])
        options = options | {"layout": layout.id}
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not name.startswith("inverse_rope_quantize"):  # torch cannot compare e4m3
        utils.append("test_schema")
    torch.library.opcheck(getattr(torch.ops.mla_fp8, name).default, tensors, options, test_utils=utils)


def test_warmup_without_a_gpu_has_nothing_to_load():
    mla_fp8.warmup()
    mla_fp8.warmup("cpu")


if __name__ == "__main__":
    print("\n".join(str(schema) for schema in schemas().values()))
