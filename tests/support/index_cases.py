"""Problems of the indexer: queries, paged keys, lengths; and what the specification says of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS, IndexLayout
from mla_fp8 import index_reference as reference

POISON = 0xA5


def ints(values: object, device: str) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


def quantized_queries(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [rows, heads, 128] as e4m3fn and the scale of each head, float."""
    scale = x.float().abs().amax(-1).clamp_min(1e-4) / 448.0
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def fp4_queries(x: Tensor) -> tuple[Tensor, Tensor]:
    """As e2m1, two a byte, and ue8m0 of 32 elements each: by the writer of keys, whose bytes are tested."""
    rows, heads = x.shape[:2]
    layout = INDEX_LAYOUTS["index_fp4"]
    cache = layout.empty(1, rows * heads, "cpu")
    slots = torch.arange(rows * heads)
    reference.quantize_index_k(x.cpu().flatten(0, 1), slots, cache, layout=layout, page_size=rows * heads)
    values, scales = (
        t[0].unflatten(0, (rows, heads)).contiguous() for t in layout.views(cache, rows * heads)
    )
    return values.to(x.device), scales.to(x.device)


@dataclass
class Problem:
    """Arguments of ``index_logits``, and what they select, by the specification."""

    q: Tensor
    weights: Tensor
    index_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor | None
    layout: IndexLayout
    page_size: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.q, self.weights, self.index_cache, self.page_table, self.seq_lens

    @property
    def keywords(self) -> dict[str, Any]:
        return {"layout": self.layout, "page_size": self.page_size} | self.options

    @property
    def width(self) -> int:
        return self.page_table.shape[1] * self.page_size

    def logits(self, width: int | None = None) -> Tensor:
        width = self.width if width is None else width
        return mla_fp8.index_logits(*self.tensors, **self.keywords, width=width)

    def topk(self, topk: int, **more: Any) -> Any:
        return mla_fp8.index_topk(*self.tensors, **self.keywords, topk=topk, **more)

    def rows(self) -> list[tuple[int, int]]:
        options = {key: x for key, x in self.options.items() if key != "q_scale"}
        return reference.index_rows(
            len(self.q), self.page_table, self.seq_lens, page_size=self.page_size, **options
        )

    def slots(self) -> list[Tensor]:
        return reference.row_slots(self.page_table, self.rows(), self.page_size, len(self.index_cache))

    def want_logits(self) -> Tensor:
        keys = reference.index_keys(self.index_cache, self.layout, self.page_size)
        slots, scale = self.slots(), self.options.get("q_scale")
        return reference.index_logits(self.q, self.weights, keys, slots, width=self.width, q_scale=scale)

    def want_topk(self, topk: int, **pins: int) -> tuple[Tensor, Tensor, Tensor]:
        """The exact choice from the op's own logits."""
        present = [x >= 0 for x in self.slots()]
        positions, lens = reference.index_topk(self.logits(), present, topk=topk, **pins)
        requests = [request for request, _ in self.rows()]
        return positions, reference.slots_of(positions, self.page_table, requests, self.page_size), lens

    def assert_exact(self, topk: int, **pins: int) -> None:
        for name, got, want in zip(
            ("positions", "slots", "lens"), self.topk(topk, **pins), self.want_topk(topk, **pins), strict=True
        ):
            assert torch.equal(got, want), name


def random_problem(
    device: str, lens: list[int], *, heads: int = 32, next_n: int = 1, page_size: int = 64,
    layout: str = "index_fp8", extra_pages: int = 2, gap: int = 0, keys: Tensor | None = None, **options: Any,
) -> Problem:  # fmt: skip
    """Requests of ``lens`` entries with pages of their own in random places; all other bytes are poison."""
    kind = INDEX_LAYOUTS[layout]
    pages = [-(-max(n, 0) // page_size) for n in lens]
    num_pages, max_pages = sum(pages) + extra_pages, max([*pages, 0]) + 1
    whole = torch.full((num_pages, kind.page_bytes(page_size) + gap), POISON, dtype=torch.uint8)
    cache = whole.to(device)[:, : kind.page_bytes(page_size)]
    order = iter(torch.randperm(num_pages).tolist())
    table = torch.randint(-(1 << 31), 1 << 31, (len(lens), max_pages)).int()
    for r, n in enumerate(pages):
        table[r, :n] = torch.tensor([next(order) for _ in range(n)], dtype=torch.int32)
    slots = [
        table[r, torch.arange(n) // page_size].long() * page_size + torch.arange(n) % page_size
        for r, n in enumerate(lens)
        if n > 0
    ]
    total = sum(max(n, 0) for n in lens)
    keys = torch.randn(total, 128) if keys is None else keys
    if total:
        mla_fp8.quantize_index_k(
            keys.to(device), torch.cat(slots).to(device), cache, layout=kind, page_size=page_size
        )
    rows = options.pop("num_rows", len(lens) * next_n)
    x = torch.randn(rows, heads, 128)
    q, scale = quantized_queries(x.to(device))
    weights = torch.randn(rows, heads, device=device) * scale * (heads * 128) ** -0.5
    if "row_lens" not in options and "seq_lens" not in options:
        options["seq_lens"] = ints(lens, device)
    seq_lens = options.pop("seq_lens", None)
    if next_n > 1:
        options["next_n"] = next_n
    return Problem(q, weights, cache, table.to(device), seq_lens, kind, page_size, options)


def constant_keys_problem(device: str, values: Tensor, **options: Any) -> Problem:
    """One request, one head: the logit of entry i is ``values[i]`` rounded as index_logits does.

    The query is 1 in element 0 with weight 1, the key is a 1 there; the scale of the key is the value, so any
    float >= 0 can be had; a negative one by a second head with weight -1 and keys in element 1.
    """
    problem = random_problem(device, [len(values)], heads=2, keys=torch.zeros(len(values), 128), **options)
    problem.q.view(torch.uint8).zero_()
    problem.q[:, 0, 0] = 1.0
    problem.q[:, 1, 1] = 1.0
    problem.weights[:] = torch.tensor([1.0, -1.0])
    e4m3, scale = problem.layout.views(problem.index_cache, problem.page_size)
    position = torch.arange(len(values))
    page, row = (
        problem.page_table[0].cpu().long()[position // problem.page_size],
        position % problem.page_size,
    )
    sign = values.signbit()
    stored = torch.zeros(len(values), 128)
    stored[:, 0], stored[:, 1] = (~sign).float(), sign.float()
    e4m3[page, row] = stored.to(torch.float8_e4m3fn).to(device)
    scale[page, row, 0] = values.abs().to(device)
    return problem


def between_steps(beyond: float, four: int = 1) -> Callable[[int], Tensor]:
    """Random logits, but at columns 4 p + j with a prime p and j < `four`, to which no even steps of fours
    lead: those are from `beyond` on. Who looks at every so many keys for their range sees none of them."""

    def logits(n: int) -> Tensor:
        fours = torch.arange(n) // 4
        is_prime = fours > 1
        for i in range(2, int((n / 4) ** 0.5) + 1):
            is_prime &= (fours % i > 0) | (fours == i)
        return torch.randn(n).where(~is_prime | (torch.arange(n) % 4 >= four), beyond + torch.rand(n))

    return logits
