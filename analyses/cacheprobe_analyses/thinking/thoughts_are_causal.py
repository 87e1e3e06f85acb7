"""Is a thought what the answer hangs on, or only a report?

    python -m cacheprobe_analyses.thoughts_are_causal

In the middle of a prompt one thought's state is replaced, and the model reads on by its own thoughts. The other state's
thought should flip the answer. Controls: the same state again; noise of the same norm; no state at all.
Refused for a model that does not do the task.
Source: the question is left open by Thinking States (arXiv 2602.08332).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.terminal import Progress
from cacheprobe.tasks import CoinFlip, annotate_all, mixed
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.thinking.recurrent import own_thoughts, write
from cacheprobe_analyses.command import command

LEAST_ACCURACY = 0.95


@dataclass(frozen=True)
class Config:
    """What is asked of which model."""

    model: str = "coinflip-thinking"
    operations: tuple[int, ...] = tuple(range(4, 41))
    texts: int = 200
    seed: int = 2_000_000


@dataclass(frozen=True)
class Result:
    """How many answers are the other one after each replacement."""

    texts: int
    accuracy: float
    """Untouched."""
    flipped: dict[str, int]
    unparsed: dict[str, int]

    def table(self) -> str:
        lines = [f"untouched: {self.accuracy:.3f} right of {self.texts}"]
        for name, count in self.flipped.items():
            low, high = Accuracy(self.texts, count, 0, 0.5).interval
            lines.append(
                f"{name}: the answer is the other one in {count} of {self.texts} (95 % {low:.3f} to {high:.3f}), "
                f"none in {self.unparsed[name]}"
            )
        return "\n".join(lines)


def run(config: Config, progress: bool = False) -> Result:
    """Replace one state of each text, in the middle of it, in four ways."""
    lm = cp.load_model(config.model)
    model, chunk = lm.model, lm.config.chunk
    task = CoinFlip(people=config.operations[-1], distinct=False)
    items = annotate_all(
        mixed(task, config.operations, n=config.texts, seed=config.seed), lm.tokenizer, chunk, lm.record["form"]
    )
    prompts = [item.token_ids for item in items]
    own = own_thoughts(model, prompts)
    said = write(model, prompts, own, 3)
    right = [text == item.answer_ids for text, item in zip(said, items, strict=True)]
    if sum(right) < LEAST_ACCURACY * len(items):
        raise ValueError(f"{config.model} answers {sum(right)} of {len(items)}: what its thoughts do cannot be asked")
    heads, tails = (lm.encode(word, add_special_tokens=False)[0] for word in ("heads", "tails"))
    other = {heads: tails, tails: heads}
    # the middle one of the thoughts that name a state
    places = [[k for k, t in enumerate(thoughts) if t[0] in other] for thoughts in own]
    middle = [naming[len(naming) // 2] for naming in places]
    noise = torch.Generator().manual_seed(config.seed)

    def of_same_norm(state: Tensor, i: int) -> Tensor:
        drawn = torch.randn(state.shape, generator=noise.manual_seed(config.seed + i))
        return drawn * state.norm() / drawn.norm()

    ways: dict[str, Callable[[Tensor, int], Tensor]] = {
        "other state": lambda state, i: lm.state_of((other[own[i][middle[i]][0]], lm.config.eos_id)),
        "own state again": lambda state, i: lm.state_of(own[i][middle[i]]),
        "noise of its norm": of_same_norm,
        "no state": lambda state, i: torch.zeros_like(state),
    }
    flipped, unparsed = {}, {}
    with Progress(len(ways), "replacing states", "ways", enabled=progress) as bar:
        for name, replacement in ways.items():

            def edit(at: int, states: Tensor, texts: Sequence[int], replacement=replacement) -> Tensor:
                states = states.clone()
                for row, i in enumerate(texts):
                    if at == middle[i] + 1:
                        states[row] = replacement(states[row], i)
                return states

            answers = write(model, prompts, own_thoughts(model, prompts, edit), 3, edit)
            wanted = [(other[item.answer_ids[0]], lm.config.eos_id) for item in items]
            flipped[name] = sum(a == w for a, w in zip(answers, wanted, strict=True))
            valid = {(heads, lm.config.eos_id), (tails, lm.config.eos_id)}
            unparsed[name] = sum(a not in valid for a in answers)
            bar.advance(note=name)
    return Result(len(items), sum(right) / len(items), flipped, unparsed)


def main() -> None:
    command(__doc__, Config, run, model="a name or a directory", texts="")


if __name__ == "__main__":
    main()
