"""Train a small DeepSeek V3.2 on needles and copies: dense attention, then the indexer, then sparse.

python examples/trained/train.py --out trained              on one H100 or H200
python examples/trained/train.py --out trained --tiny       on a CPU, to see that it learns

It goes on where it stopped, and writes a checkpoint that engines load as DeepseekV32ForCausalLM.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import tasks
import torch
from model import Config, Model, save
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Phase:
    """At most ``steps``, or until so many answers are right (a mean of recent steps)."""

    name: str
    length: int
    texts: int
    needles: int
    steps: int
    rate: float
    enough: float = 2.0
    what: str = "dense"  # or "indexer", or "sparse"
    falls: bool = False  # the learning rate, to a tenth


FULL = (
    Phase("short", 256, 128, 8, 600, 1e-3, 0.90),
    Phase("512", 512, 64, 24, 2500, 1e-3, 0.98),
    Phase("2 K", 2048, 16, 64, 600, 1e-3, 0.995),
    Phase("8 K", 8192, 4, 128, 350, 7e-4, 0.998),
    Phase("16 K", 16384, 2, 128, 350, 5e-4, falls=True),
    Phase("indexer", 16384, 1, 128, 300, 1e-3, what="indexer", falls=True),
    Phase("sparse", 16384, 1, 128, 60, 1e-4, what="sparse", falls=True),
)
TINY_CONFIG = Config(
    vocabulary=1024, hidden=128, layers=2, heads=2, q_rank=128, mlp=128, index_heads=4, topk=128,
    max_length=1024,
)  # fmt: skip
TINY = (
    Phase("short", 96, 16, 4, 1500, 2e-3, 0.9),
    Phase("long", 256, 8, 12, 300, 1e-3, 0.98),
    Phase("indexer", 256, 4, 12, 100, 2e-3, what="indexer", falls=True),
    Phase("sparse", 256, 4, 12, 30, 2e-4, what="sparse", falls=True),
)
ROWS, SAVE_SECONDS, WARM_UP = 256, 45, 100


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.out, self.device, self.seed = options.out, options.device, options.seed
        self.config, self.phases = (TINY_CONFIG, TINY) if options.tiny else (Config(), FULL)
        torch.manual_seed(self.seed)
        self.model = Model(self.config).to(self.device)
        self.main = torch.optim.AdamW(self.groups(indexer=False), betas=(0.9, 0.95), lr=1e-3)
        self.index = torch.optim.AdamW(self.groups(indexer=True), betas=(0.9, 0.95), lr=1e-3)
        self.phase = self.step = 0
        self.seconds, self.right = 0.0, 0.0
        self.state = self.out / "state.pt"
        if self.state.exists():
            self.load()

    def groups(self, *, indexer: bool) -> list[dict]:
        """Matrices decay, all else does not."""
        mine = [p for name, p in self.model.named_parameters() if (".indexer." in name) == indexer]
        return [
            {"params": [p for p in mine if p.dim() > 1], "weight_decay": 0.02},
            {"params": [p for p in mine if p.dim() == 1], "weight_decay": 0.0},
        ]

    def load(self) -> None:
        found = torch.load(self.state, map_location=self.device, weights_only=True)
        self.model.load_state_dict(found["model"])
        self.main.load_state_dict(found["main"])
        self.index.load_state_dict(found["index"])
        self.phase, self.step, self.seconds, self.right = found["at"]

    def keep(self) -> None:
        parts = {"model": self.model, "main": self.main, "index": self.index}
        state = {name: part.state_dict() for name, part in parts.items()}
        state["at"] = (self.phase, self.step, self.seconds, self.right)
        torch.save(state, self.state.with_suffix(".new"))
        self.state.with_suffix(".new").replace(self.state)

    def generator(self, *numbers: int) -> torch.Generator:
        seed = self.seed
        for number in numbers:
            seed = (seed * 1_000_003 + number + 1) % 2**62
        return torch.Generator(self.device).manual_seed(seed)

    def texts(self, phase: Phase, generator: torch.Generator) -> tasks.Texts:
        values, needles = tasks.SHORT, phase.needles
        if self.step % 4 == 3:  # passages to copy; fewer, as they are longer
            values, needles = tasks.LONG, max(1, phase.needles // 6)
        return tasks.make(phase.texts, phase.length, needles, values, self.config.vocabulary, generator)

    def loss(self, phase: Phase) -> Tensor:
        generator = self.generator(self.phase, self.step)
        t = self.texts(phase, generator)
        # One place in eight is of the whole text: marks, bytes, and values that nobody can know.
        some = torch.rand(t.tokens.shape, generator=generator, device=self.device) < 0.125
        some[:, -1] = False
        at = torch.cat([t.answers - torch.tensor([0, 1], device=self.device), some.nonzero()])
        rows = None
        if phase.what != "dense":
            rows = torch.randperm(phase.length, generator=generator, device=self.device)[:ROWS].sort().values
        with self.precision():
            logits, distance = self.model(t.tokens, at, sparse=phase.what == "sparse", rows=rows)
        wanted = t.tokens[at[:, 0], at[:, 1] + 1]
        each = F.cross_entropy(logits.float(), wanted, reduction="none")
        known = len(t.answers)
        right = (logits[:known].argmax(-1) == wanted[:known]).float().mean()
        self.right += (float(right) - self.right) * (0.05 if self.step else 1.0)
        self.shown = (float(each[:known].mean().detach()), float(distance.detach()))
        if phase.what == "indexer":
            return distance
        return each[:known].mean() + 0.1 * each[known:].mean() + distance

    def one_step(self, phase: Phase) -> None:
        rate = phase.rate * min(1.0, (self.step + 1) / WARM_UP if phase.what != "sparse" else 1.0)
        if phase.falls:
            rate *= 1 - 0.9 * self.step / phase.steps
        optimizers = {"dense": [self.main], "indexer": [self.index], "sparse": [self.main, self.index]}
        for optimizer in optimizers[phase.what]:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.loss(phase).backward()
        for optimizer in optimizers[phase.what]:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def run(self) -> None:
        begin, kept = time.time() - self.seconds, time.time()
        while self.phase < len(self.phases):
            phase = self.phases[self.phase]
            while self.step < phase.steps and not (self.step > 20 and self.right >= phase.enough):
                self.one_step(phase)
                if self.step % 50 == 0 or self.step == phase.steps - 1:
                    self.show(phase, time.time() - begin)
                self.step += 1
                if time.time() - kept > SAVE_SECONDS:
                    self.seconds, kept = time.time() - begin, time.time()
                    self.keep()
            self.show(phase, time.time() - begin)
            if self.phase and phase.enough <= 1 and self.right < phase.enough / 2:
                raise SystemExit(f"not learnt in phase {phase.name}: {self.right:.3f} right")
            self.phase, self.step = self.phase + 1, 0
            self.seconds = time.time() - begin
            self.keep()
            if self.phase == len(self.phases) - 1 or phase.what == "indexer":
                save(self.model, self.out)  # it can be used before the last phase has ended
        save(self.model, self.out)

    def show(self, phase: Phase, seconds: float) -> None:
        answers, distance = self.shown
        print(
            f"{seconds:5.0f} s  {phase.name:>8} {self.step:5}: right {self.right:.3f}, loss {answers:.3f}, "
            f"indexer {distance:.3f}",
            flush=True,
        )

    @torch.no_grad()
    def check(self, lengths: list[int]) -> None:
        """Share of right tokens on new texts, by dense and by sparse attention."""
        for length in lengths:
            texts = [
                tasks.make(
                    1, length, 16, tasks.SHORT, self.config.vocabulary, self.generator(99, n), at_end=16
                )
                for n in range(max(2, 65536 // length))
            ]
            dense, sparse = (sum(self.share(t, sparse=s) for t in texts) / len(texts) for s in (False, True))
            print(f"{length} tokens: {dense:.4f} right, with sparse attention {sparse:.4f}", flush=True)

    def share(self, t: tasks.Texts, *, sparse: bool) -> float:
        at = t.answers - torch.tensor([0, 1], device=self.device)
        with self.precision():
            logits, _ = self.model(t.tokens, at, sparse=sparse)
        return float((logits.argmax(-1) == t.tokens[t.answers[:, 0], t.answers[:, 1]]).float().mean())

    def precision(self) -> torch.autocast:
        on_gpu = self.device != "cpu"
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=on_gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        torch.set_num_threads(1)
    training = Training(options)
    training.run()
    training.check([256] if options.tiny else [2048, 4096, 16384])


if __name__ == "__main__":
    main()
