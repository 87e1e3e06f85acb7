"""Can a rollback be seen coming, from the states before the verification?

    python -m cacheprobe_analyses.rollback_prediction --json analyses/results/rollback-prediction.json

SmolLM2 goes on from coin-flip questions, greedily; an early layer, the text itself and the fast path draft. A linear
classifier of each draft, and of each candidate, is tested on prompts it never saw, beside labels in random order,
position alone and margin alone. A drafter with too few rollbacks is not told about.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

import cacheprobe as cp
from cacheprobe.core.terminal import Progress
from cacheprobe.engine.drafters import EarlyExit, FastPath, NGram
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.tasks import CoinFlip
from cacheprobe.views import rollback_prediction_figure
from cacheprobe_analyses.command import command
from cacheprobe_analyses.records import records_of

UNITS = ("draft", "candidate")


@dataclass(frozen=True)
class Config:
    """What drafts for which model, and how long."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    drafters: tuple[Drafter, ...] = (EarlyExit(26), NGram(length=4), FastPath())
    most_prompts: tuple[int, ...] = (96, 192, 16)
    """For each drafter; a run ends before that where there are rollbacks enough."""
    people: int = 4
    new_tokens: int = 48
    draft_length: int = 4
    layers: tuple[int, ...] = (2, 8, 14, 20, 26, 29)
    least: int = 500
    batch: int = 16
    seed: int = 5_000_000


@dataclass(frozen=True)
class Result:
    """What is told of each drafter and unit; see `cacheprobe.lenses.probes.RollbackPrediction`."""

    model: str
    found: list[dict[str, Any]] = field(default_factory=list)

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame([line for one in self.found for line in one["lines"]])

    def table(self) -> str:
        lines = []
        for one in self.found:
            lines.append(
                f"- {one['drafter']}, by {one['unit']}: {one['rollbacks']} rollbacks among {one['drafts']} in "
                f"{one['requests']} prompts: {one['answer']}; {one['reason']}"
            )
        lines += [
            "",
            "| drafter | unit | layer | AUROC | 95 % | shuffled | position | margin | gain over these | 95 % |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for t in self.frame.itertuples():
            lines.append(
                f"| {t.drafter} | {t.unit} | {t.layer} | {t.auroc:.3f} | {t.low:.3f} to {t.high:.3f} | "
                f"{t.shuffled:.3f} | {t.position:.3f} | {t.margin:.3f} | {t.gain:+.3f} | "
                f"{t.gain_low:+.3f} to {t.gain_high:+.3f} |"
            )
        return "\n".join(lines)

    def figure(self, unit: str = "draft") -> Any:
        return rollback_prediction_figure(self.frame, unit)


def run(config: Config, say: Callable[[str], None] = print, progress: bool = False) -> Result:
    """Run every drafter until it has enough rollbacks, or no prompts are left."""
    model = cp.load_model(config.model, dtype=config.dtype)
    examples = CoinFlip(people=config.people).examples(max(config.most_prompts), config.seed)
    found = []
    for drafter, most in zip(config.drafters, config.most_prompts, strict=True):
        traces: list[cp.Trace] = []
        with Progress(most, drafter.name, "prompts", enabled=progress) as bar:
            for start in range(0, most, config.batch):
                some = examples[start : min(start + config.batch, most)]
                traces.append(_drafted(config, model, some, drafter))
                rollbacks = sum(int(trace.events().num_rolled_back.gt(0).sum()) for trace in traces)
                say(f"{drafter.name}: {start + len(some)} prompts, {rollbacks} rollbacks")
                bar.advance(len(some), f"{rollbacks} of {config.least} rollbacks")
                if rollbacks >= config.least:
                    break
        for unit in UNITS:
            one = cp.probes.rollback_prediction(traces, unit=unit, least=config.least, seed=config.seed)
            known = {key: value for key, value in vars(one).items() if key != "table"}
            found.append({**known, "drafter": drafter.name, "lines": _lines(one.table, drafter.name)})
    return Result(model.name, found)


def _drafted(config: Config, model: Any, examples: list, drafter: Drafter) -> cp.Trace:
    return cp.run(
        model,
        examples,
        drafter=drafter,
        window=config.draft_length + 1,
        draft_length=config.draft_length,
        group=8,
        capacity=128,
        prefill_chunk=64,
        capture=cp.CaptureConfig("S", layers=config.layers),
        sampling=cp.SamplingParams(max_new_tokens=config.new_tokens, stop_token_ids=()),
        progress=False,
    )


def _lines(table: pd.DataFrame, name: str) -> list[dict[str, Any]]:
    return [] if table.empty else records_of(table.assign(drafter=name))


def main() -> None:
    command(__doc__, Config, run, dtype="of the model")


if __name__ == "__main__":
    main()
