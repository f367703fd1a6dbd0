"""Texts whose answers are known: needles between lines of an essay, and passages to copy.

A needle is a mark, a key and values; a question is another mark and the key, and the values must follow. Keys
and values are drawn from one pool of tokens and occur in one needle of a text. A passage to copy is a needle
with 28 values in place of 4.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

BEGIN, NEEDLE, QUESTION, POOL = 256, 258, 259, 512  # tokens below are bytes of text
SHORT, LONG = 4, 28  # values of a needle


@dataclass(frozen=True)
class Texts:
    tokens: Tensor  # [texts, length]
    answers: Tensor  # [n, 2]: (text, position) of tokens that are to be known
    questions: Tensor  # [texts, asked]: position of a question's mark


@cache
def essay(device: str) -> Tensor:
    """The package's, which is not imported: training needs no kernel."""
    text = (Path(find_spec("mla_fp8").origin).parent / "data/essay.txt").read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)


def make(
    number: int, length: int, needles: int, values: int, vocabulary: int, generator: torch.Generator,
    *, at_end: int = 0,
) -> Texts:  # fmt: skip
    """``needles`` in each text, each asked for once behind it. ``at_end``: so many, the last cells alone."""
    device = generator.device
    span = values + 2
    cell = span + 2
    cells = (length - 1) // cell

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    source = essay(str(device))
    start = (rand(number, 1) * len(source)).long()
    tokens = source[(start + torch.arange(length, device=device)) % len(source)]
    tokens[:, 0] = BEGIN
    pool = POOL + rand(number, vocabulary - POOL).argsort(-1)[:, : needles * (values + 1)]
    pool = pool.view(number, needles, values + 1)
    if at_end:
        told = rand(number, cells - at_end).argsort(-1)[:, :needles]
        asked = cells - at_end + torch.arange(at_end, device=device).expand(number, -1)
    else:
        places = rand(number, cells).argsort(-1)[:, : 2 * needles].view(number, needles, 2)
        told, asked = places.amin(-1), places.amax(-1)
    asked_for = pool[:, : asked.shape[1]]
    line = torch.arange(number, device=device)[:, None, None]
    within = torch.arange(span, device=device)
    first = []
    for mark, place, content in ((NEEDLE, told, pool), (QUESTION, asked, asked_for)):
        shift = 0 if at_end and mark == QUESTION else (rand(*place.shape) * 3).long()
        begin = 1 + place * cell + shift
        marked = torch.cat([torch.full_like(content[..., :1], mark), content], -1)
        tokens[line, begin[..., None] + within] = marked
        first.append(begin)
    at = first[1][..., None] + 2 + torch.arange(values, device=device)
    answers = torch.stack([line.expand_as(at), at], -1).flatten(0, 2)
    return Texts(tokens, answers, first[1])
