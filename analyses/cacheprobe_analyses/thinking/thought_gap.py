"""How long does a state last that is thought of only when it changes?

    python -m cacheprobe_analyses.thought_gap --json analyses/results/thought-gap.json

After some people one flips, then so many in a row do not; that is said once or several times over, and the state is
asked for. In the format "delta" no thought names the state in a gap, so it must be looked up behind it: once, or before
every further change, among the earlier ones. Controls: the same texts by models that name the state after every
operation ("state"), and in every chunk ("restate").
Models are those of `thinking_variations`; what is not in `folder` yet is trained there (one core).
Source: Thinking States (arXiv 2602.08332); its figure leaves chunks without a change empty.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from cacheprobe.core.progress import Progress
from cacheprobe.tasks import CoinFlip, Example, annotate_all, coin_question
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.loop import one_thread
from cacheprobe.training.thinking.evaluate import evaluate
from cacheprobe_analyses.command import command
from cacheprobe_analyses.thinking.thinking_variations import BASE, trained_variation, variations
from cacheprobe_analyses.thinking.thinking_variations import Config as Variations

MODELS = {"delta": "thought: delta", "state": "thought: state", "restate": BASE}
"""By format: the variation that was trained on it."""


@dataclass(frozen=True)
class Config:
    """What is asked, and where the trained models are."""

    gaps: tuple[tuple[int, int], ...] = (*((1, n) for n in (9, 32, 128)), *((4, n) for n in (1, 2, 4, 9, 16, 32)))
    """How often, and how many people do not flip. Texts of training have at most ten people."""
    texts: int = 200
    """For each gap, the same for all models."""
    folder: Path = Variations.folder
    seed: int = 3_000_000
    least: float = 0.99
    """Share of texts by which a state counts as kept."""


@dataclass(frozen=True)
class Result:
    """Counts by format and by how long nothing changed."""

    texts: int
    least: float
    chunks: dict[str, tuple[int, int]]
    """By gap: fewest and most chunks behind the one that holds the last change."""
    right: dict[str, dict[str, int]]
    """Texts of which the answer and every thought were right."""
    models: dict[str, dict[str, Any]]

    def table(self) -> str:
        """In Markdown: per cent of texts of which the answer and every thought were right."""
        head = ["gaps", "people in each", "chunks without a change", *self.right]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for gap, (fewest, most) in self.chunks.items():
            told = [f"{100 * right[gap] / self.texts:.1f}" for right in self.right.values()]
            many, people = gap.split(" of ")
            lines.append(
                f"| {many} | {people} | {fewest if fewest == most else f'{fewest} to {most}'} | {' | '.join(told)} |"
            )
        return "\n".join(lines)

    def limits(self) -> list[str]:
        """By format and number of gaps, a sentence: up to how many chunks without a change the state is kept."""
        many = dict.fromkeys(gap.split(" of ")[0] for gap in self.chunks)
        return [self._limit(form, times) for form in self.right for times in many]

    def _limit(self, form: str, times: str) -> str:
        kept, lost = None, None
        for gap, right in self.right[form].items():
            if gap.split(" of ")[0] != times:
                continue
            if right < self.least * self.texts:
                lost = gap
                break
            kept = gap
        where = "at none" if kept is None else f"up to {self.chunks[kept][1]} chunks without a change"
        said = f"{form}, {times} gap{'s' * (times != '1')}: at least {100 * self.least:.0f} % right {where}"
        if lost is None:
            return f"{said}, the most that were tried"
        low, high = Accuracy(self.texts, self.right[form][lost], 0, 0.5).interval
        share = 100 * self.right[form][lost] / self.texts
        return f"{said}; {share:.1f} % (95 % {100 * low:.1f} to {100 * high:.1f}) at {self.chunks[lost][1]}"


def texts_of(times: int, still: int, n: int, seed: int) -> list[Example]:
    """Texts of up to three people who flip or do not, then, `times` over, one who flips and `still` who do not. Each
    depends on its number alone."""
    names = CoinFlip().names
    made = []
    for i in range(n):
        draw = Random(f"{seed}/{times}/{still}/{i}")
        flips = [draw.random() < 0.5 for _ in range(int(draw.random() * 4))] + times * [True, *[False] * still]
        chosen = [names[int(draw.random() * len(names))] for _ in flips]
        initial = "heads" if draw.random() < 0.5 else "tails"
        made.append(Example(coin_question(initial, list(zip(chosen, flips, strict=True)))))
    return made


def chunks_behind(thoughts: tuple[tuple[int, ...], ...]) -> int:
    """Chunks behind the last one in which the state changed, of thoughts in the format delta."""
    return len(thoughts) - 1 - max(i for i, thought in enumerate(thoughts) if len(thought) > 1)


@one_thread()
def run(config: Config, progress: bool = False) -> Result:
    """Ask every model about every gap."""
    known = {variation.name: variation for variation in variations()}
    chunks: dict[str, tuple[int, int]] = {}
    right: dict[str, dict[str, int]] = {}
    models = {}
    bar = Progress(len(MODELS) * len(config.gaps), "asking", "gaps", enabled=progress)
    for form, name in MODELS.items():
        trained, record = trained_variation(config.folder, known[name], 0, progress)
        models[form] = {key: record[key] for key in ("steps", "cpu_seconds", "cpu_seconds_to_99")}
        c, longest = trained.model.config.chunk, trained.model.config.max_thought
        right[form] = {}
        with bar:  # not around the training, which has a bar of its own
            for times, still in config.gaps:
                gap, texts = f"{times} of {still}", texts_of(times, still, config.texts, config.seed)
                items = annotate_all(texts, trained.tokenizer, c, form, max_thought=longest)
                found = evaluate(trained.model, items, "thinking")
                # two wrong changes give a right answer, so thoughts count too
                right[form][gap] = sum(map(all, zip(found.is_right, found.is_thought_right, strict=True)))
                if form == "delta":
                    behind = [chunks_behind(item.thoughts) for item in items]
                    chunks[gap] = min(behind), max(behind)
                bar.advance(note=f"{form}, {gap} people")
    return Result(config.texts, config.least, chunks, right, models)


def main() -> None:
    def shown(result: Result) -> str:
        return "\n".join([result.table(), "", *result.limits()])

    command(__doc__, Config, run, shown, folder="where trained models are, or go", texts="for each gap")


if __name__ == "__main__":
    main()
