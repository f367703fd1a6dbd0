"""Train a small DeepSeek V3.2 on needles and copies: dense attention, then the indexer, then sparse.

python examples/trained/train.py --out trained --seconds 440    on one H100 or H200
python examples/trained/train.py --out trained --tiny           on a CPU, to see that it learns

It goes on where it stopped, and writes a checkpoint that engines load as DeepseekV32ForCausalLM. A phase ends
when enough is right, or after its steps or its share of the seconds. Texts depend on the seed and the step
alone.
"""

import argparse
import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import evaluate
import tasks
import torch
from deepseek import Config, Model, save
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Phase:
    name: str
    length: int
    texts: int
    needles: int
    steps: int
    rate: float
    enough: float = 2.0  # right answers, a mean of recent steps; above 1: never
    share: float = 1.0  # of the seconds that are left when it begins
    what: str = "dense"  # or "indexer", or "sparse"
    falls: bool = False  # the learning rate, to a tenth


FULL = (
    Phase("256", 256, 128, 12, 6000, 1e-3, 0.95, 0.5),
    Phase("512", 512, 64, 24, 2500, 1e-3, 0.98, 0.25),
    Phase("2 K", 2048, 16, 64, 1500, 1e-3, 0.995, 0.25),
    Phase("8 K", 8192, 4, 192, 600, 7e-4, 0.998, 0.3),
    Phase("16 K", 16384, 2, 384, 600, 5e-4, share=0.5, falls=True),
    Phase("indexer", 16384, 1, 384, 1000, 1e-3, share=0.5, what="indexer", falls=True),
    Phase("sparse", 16384, 1, 384, 60, 1e-4, share=0.8, what="sparse", falls=True),
)
TINY_CONFIG = Config(
    vocabulary=1024, hidden=128, layers=2, heads=2, q_rank=128, mlp=128, index_heads=4, topk=128,
    max_length=1024,
)  # fmt: skip
TINY = (
    Phase("short", 96, 16, 4, 1500, 1e-3, 0.9),
    Phase("long", 256, 8, 12, 300, 1e-3, 0.98),
    Phase("indexer", 256, 4, 12, 100, 1e-3, what="indexer", falls=True),
    Phase("sparse", 256, 4, 12, 30, 2e-4, what="sparse", falls=True),
)
ROWS, WARM_UP = 256, 100
MUON = 20.0  # times AdamW's learning rate
LOOK, SHOW_SECONDS, SAVE_SECONDS = 10, 4, 45  # steps between looks at what is right
EXAMPLES = 8  # of each length, whose first answer is kept: engines have to agree


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.out, self.device, self.seed, self.limit = (
            options.out, options.device, options.seed, options.seconds,
        )  # fmt: skip
        self.config, self.phases = (TINY_CONFIG, TINY) if options.tiny else (Config(), FULL)
        torch.manual_seed(self.seed)
        self.model = Model(self.config).to(self.device)
        self.main, self.index = self.optimizers(indexer=False), self.optimizers(indexer=True)
        self.phase = self.step = 0
        self.seconds = self.began = 0.0  # of training, all in all; and when the phase began
        self.right = torch.zeros((), device=self.device)
        self.shown = self.right, self.right
        self.ended: list[dict] = []
        self.state = self.out / "state.pt"
        if self.state.exists():
            self.load()

    def optimizers(self, *, indexer: bool) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of layers, AdamW for the rest. AdamW alone takes many times as many steps."""
        mine = [(name, p) for name, p in self.model.named_parameters() if (".indexer." in name) == indexer]
        matrices = [p for name, p in mine if p.dim() == 2 and ".layers." in name]
        rest = [p for name, p in mine if not (p.dim() == 2 and ".layers." in name)]
        more = {"betas": (0.9, 0.95), "fused": self.device != "cpu"}
        return [
            torch.optim.Muon([{"params": matrices, "times": MUON}], weight_decay=0.0),
            torch.optim.AdamW([{"params": rest, "times": 1.0}], weight_decay=0.01, **more),
        ]

    def parts(self) -> dict:
        parts = {"model": self.model}
        for name, optimizers in (("main", self.main), ("index", self.index)):
            parts |= {f"{name} {type(x).__name__}": x for x in optimizers}
        return parts

    def load(self) -> None:
        found = torch.load(self.state, map_location=self.device, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(found[name])
        self.phase, self.step, self.seconds, self.began, self.right, self.ended = found["at"]

    def keep(self) -> None:
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state["at"] = (self.phase, self.step, self.seconds, self.began, self.right, self.ended)
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
            values, needles = tasks.LONG, max(1, phase.needles // 5)
        return tasks.make(phase.texts, phase.length, needles, values, self.config.vocabulary, generator)

    def loss(self, phase: Phase) -> Tensor:
        generator = self.generator(self.phase, self.step)
        t = self.texts(phase, generator)
        before = t.answers - torch.tensor([0, 1], device=self.device)
        # And one place in eight of the whole text: marks, bytes, and values that nobody can know.
        size = (phase.texts, phase.length // 8)
        some = torch.randint(phase.length - 1, size, generator=generator, device=self.device)
        text = torch.arange(phase.texts, device=self.device)[:, None].expand_as(some)
        at = torch.cat([before, torch.stack([text, some], -1).flatten(0, 1)])
        rows = None
        if phase.what != "dense":  # half of them are those of answers
            known = before[torch.randperm(len(before), generator=generator, device=self.device), 1]
            any_rows = torch.randperm(phase.length, generator=generator, device=self.device)
            rows = torch.cat([known[: ROWS // 2], any_rows[: ROWS // 2]])
        trained = torch.no_grad() if phase.what == "indexer" else contextlib.nullcontext()
        with trained, self.precision():
            logits, distance = self.model(t.tokens, at, sparse=phase.what == "sparse", rows=rows)
        wanted = t.tokens[at[:, 0], at[:, 1] + 1]
        each = F.cross_entropy(logits.float(), wanted, reduction="none")
        known = len(before)
        right = (logits[:known].argmax(-1) == wanted[:known]).float().mean()
        self.right += (right - self.right) * (0.05 if self.step else 1.0)
        self.shown = each[:known].detach().mean(), distance.detach()
        if phase.what == "indexer":
            return distance
        return each[:known].mean() + 0.1 * each[known:].mean() + distance

    def one_step(self, phase: Phase) -> None:
        rate = phase.rate * min(1.0, (self.step + 1) / WARM_UP if phase.what != "sparse" else 1.0)
        if phase.falls:
            rate *= 1 - 0.9 * self.progress(phase)
        self.loss(phase).backward()
        trained = {"dense": [self.main], "indexer": [self.index], "sparse": [self.main, self.index]}
        for optimizers in trained[phase.what]:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
            for group in groups:
                group["lr"] = rate * group["times"]
            for optimizer in optimizers:
                optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def progress(self, phase: Phase) -> float:
        """0 to 1: of the phase's steps, or of its share of the seconds."""
        steps = self.step / phase.steps
        if not self.limit:
            return min(1.0, steps)
        mine = max(1.0, phase.share * (self.limit - self.began))
        return min(1.0, max(steps, (self.seconds - self.began) / mine))

    def run(self) -> None:
        begin = time.time() - self.seconds
        kept = shown = time.time()
        while self.phase < len(self.phases):
            phase = self.phases[self.phase]
            while self.progress(phase) < 1:
                self.one_step(phase)
                self.step += 1
                if self.step % LOOK:
                    continue
                right = float(self.right)  # waits for the GPU
                now = time.time()
                self.seconds = now - begin
                if now - shown > SHOW_SECONDS:
                    self.show(phase)
                    shown = now
                if self.step > 20 and right >= phase.enough:
                    break
                if now - kept > SAVE_SECONDS:
                    self.keep()
                    kept = now
            right, self.seconds = float(self.right), time.time() - begin
            self.show(phase)
            if phase.enough <= 1 and right < phase.enough / 2:
                raise SystemExit(f"not learnt in phase {phase.name}: {right:.3f} right")
            self.ended.append(
                {
                    "phase": phase.name, "steps": self.step, "right": right,
                    "seconds": self.seconds - self.began, "tokens": self.step * phase.texts * phase.length,
                }
            )  # fmt: skip
            self.phase, self.step = self.phase + 1, 0
            self.seconds = self.began = time.time() - begin
            self.keep()
            if self.phase == len(self.phases) - 1 or phase.what == "indexer":
                save(self.model, self.out)  # it can be used before the last phase has ended
        save(self.model, self.out)
        (self.out / "training.json").write_text(json.dumps(self.ended, indent=1))

    def show(self, phase: Phase) -> None:
        answers, distance = map(float, self.shown)
        print(
            f"{self.seconds:5.0f} s  {phase.name:>8} {self.step:5}: right {float(self.right):.3f}, "
            f"loss {answers:.3f}, indexer {distance:.3f}",
            flush=True,
        )

    @torch.no_grad()
    def check(self, lengths: list[int]) -> None:
        """Share of right tokens on new texts, by dense and by sparse attention."""
        for length in lengths:
            texts = [
                evaluate.text(length, self.config.vocabulary, self.generator(99, n))
                for n in range(max(2, 32768 // length))
            ]
            dense, sparse = (sum(self.share(t, sparse=s) for t in texts) / len(texts) for s in (False, True))
            print(f"{length} tokens: {dense:.4f} right, with sparse attention {sparse:.4f}", flush=True)

    def share(self, t: tasks.Texts, *, sparse: bool) -> float:
        at = t.answers - torch.tensor([0, 1], device=self.device)
        with self.precision():
            logits, _ = self.model(t.tokens, at, sparse=sparse)
        return float((logits.argmax(-1) == t.tokens[t.answers[:, 0], t.answers[:, 1]]).float().mean())

    @torch.no_grad()
    def examples(self, lengths: list[int]) -> dict[str, list]:
        """First answers by sparse attention with the saved weights: [token, logprob], by length."""
        for p in self.model.parameters():
            p.copy_(p.bfloat16())
        found: dict[str, list] = {}
        for length in lengths:
            asked, _ = evaluate.prompts(length, EXAMPLES, self.config.vocabulary)
            for prompt in asked:
                tokens = torch.tensor([prompt], device=self.device)
                last = torch.tensor([[0, len(prompt) - 1]], device=self.device)
                with self.precision():
                    logits, _ = self.model(tokens, last, sparse=True)
                best = logits[0].float().log_softmax(-1).max(-1)
                found.setdefault(str(length), []).append([int(best.indices), float(best.values)])
        return found

    def precision(self) -> torch.autocast:
        """Casts are not cached: the first use of a weight may be without gradients, the second with them."""
        on_gpu = self.device != "cpu"
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=on_gpu, cache_enabled=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--seconds", type=float, help="of all phases; without it their steps count alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        torch.set_num_threads(1)
    training = Training(options)
    training.run()
    lengths = [256, 512] if options.tiny else list(evaluate.QUESTIONS)
    training.check(lengths)
    (options.out / "examples.json").write_text(json.dumps(training.examples(lengths)))


if __name__ == "__main__":
    main()
