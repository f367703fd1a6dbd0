"""The queries of a layer behind their projections, against a copy of as many bytes; and the same by ops of
PyTorch. Operands rotate, so that memory gives them. q_pe is the end of heads of 192, and goes into the end of
heads of 576, as engines have them."""

import torch

import mla_fp8
from harness import Work, copies, gpu_rotation, run
from mla_fp8 import INDEX_LAYOUTS, layer_reference

MAX_POS = 8192
MODELS = {  # heads of the indexer, how they are rotated and quantised
    "V3.2": (64, {"index_neox": True, "index_rope_first": True, "hadamard": True}),
    "V3.2 in vLLM": (64, {"index_neox": True, "index_rope_first": True}),
    "GLM-5": (32, {"index_neox": False, "index_rope_first": True, "scale_format": "f32", "reciprocal": True}),
    "V4.1": (32, {"index_neox": False, "index_rope_first": False, "layout": "index_fp4"}),
    "no indexer": (0, {}),
}
CASES = [("V3.2 in vLLM", heads, n) for heads in (16, 128) for n in (1, 8, 32, 128, 1024, 4096)]
CASES += [(model, 16, n) for model in ("V3.2", "GLM-5", "V4.1", "no indexer") for n in (8, 128, 4096)]


def work(model: str, heads: int, num_tokens: int, device: str) -> Work:
    index_heads, options = MODELS[model]
    layout = INDEX_LAYOUTS[options.get("layout", "index_fp8")]
    per_token = heads * 256 + index_heads * (256 + layout.value_bytes + 8)
    num_bytes = num_tokens * per_token
    rounds = min(gpu_rotation(num_bytes), 16)
    cos, sin = torch.rand(MAX_POS, 64, device=device).split(32, 1)
    at = torch.randint(MAX_POS, (num_tokens,), device=device)

    def operands() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        q = torch.randn(num_tokens, heads, 192, device=device).bfloat16()
        index = (None, None)
        out = {
            "out_q_pe": torch.zeros(num_tokens, heads, 576, device=device, dtype=torch.bfloat16)[..., 512:]
        }
        if index_heads:
            index_q = torch.randn(num_tokens, index_heads, 128, device=device).bfloat16()
            index = (index_q, torch.randn(num_tokens, index_heads, device=device))
            made = mla_fp8.prepare_queries(None, *index, cos, sin, at, **options)
            out |= {
                f"out_{name}": x for name, x in made._asdict().items() if name != "q_pe" and x is not None
            }
        return (q[..., 128:], *index, cos, sin, at), out

    sets = [operands() for _ in range(rounds)]

    def plain() -> None:
        (q_pe, *index, _, _, _), out = sets[0]
        out["out_q_pe"].copy_(layer_reference.rotated_dims(q_pe, cos, sin, at, neox=False))
        if index_heads:
            names = {"index_neox": "neox", "index_rope_first": "rope_first"}
            given = {names.get(name, name): x for name, x in options.items()} | {"layout": layout}
            layer_reference.prepare_index_q(*index, cos, sin, at, **given)

    return Work(
        label=f"{model} heads={heads} tokens={num_tokens}",
        run=[lambda x=x, out=out: mla_fp8.prepare_queries(*x, **options, **out) for x, out in sets],
        num_bytes=num_bytes,
        baselines={"copy": copies(num_bytes, device)} | ({"torch": plain} if num_tokens <= 128 else {}),
    )


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run("prepare_queries", (work(*case, device) for case in CASES))
