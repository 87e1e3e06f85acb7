"""Where does the running state of the coin live, by site, layer and place?

    python -m cacheprobe_analyses.coin_state_probe --json analyses/results/coin-state-probe.json

Two models that do the task: one that thinks while it reads, and SmolLM2 with the adapter that was trained on the coin.
A linear probe of the true state, at the token that completes each person's words and at the last one of the prompt,
beside majority, the words alone, the untrained model, and control tasks. Refused for a model at chance.
That a state can be read does not say that it is used.
Source: probes with control tasks, Hewitt and Liang 2019 (arXiv 1909.03368).
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

import cacheprobe as cp
from cacheprobe.core.terminal import Progress
from cacheprobe.tasks import CoinFlip
from cacheprobe.views import probe_figure
from cacheprobe_analyses.command import command_of_subjects
from cacheprobe_analyses.records import records_of

END = -1
"""The place of the answer: the last token of the prompt."""


@dataclass(frozen=True)
class Config:
    """What is asked of which model."""

    model: str = "coinflip-thinking"
    adapter: str | None = None
    dtype: str = "float32"
    people: int = 3
    prompts: int = 240
    seed: int = 4_000_000
    least: int = 20
    """Groups of prompts for each state at each place."""


SUBJECTS = {
    "coinflip-thinking": Config(),
    "smollm2-135m + coin-flip": Config("smollm2-135m", "coin-flip", "bfloat16"),
}


@dataclass(frozen=True)
class Result:
    """How the model does, and a line for each site, layer and place; see `cacheprobe.lenses.probes.ProbeResult`."""

    config: Config
    behaviour: dict[str, Any]
    lines: list[dict[str, Any]]

    @classmethod
    def of(cls, held: dict[str, Any]) -> "Result":
        """From what the JSON holds."""
        return cls(Config(**held["config"]), held["behaviour"], held["lines"])

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.lines)

    def table(self) -> str:
        """Held-out accuracy of S, T and C by layer and place, and what is found without them."""
        done, lines = self.behaviour, []
        lines.append(
            f"{done['accuracy']:.3f} of {done['num_examples']} answers right; {self.config.people} people; accuracy of "
            "the probe, and of the untrained model's in brackets"
        )
        for place, at_place in self.frame.groupby("place", sort=False):
            one = at_place.iloc[0]
            where = "the prompt's last token" if place == END else f"the words of person {place}"
            lines += [
                "",
                f"at {where}: {one.examples} prompts in {one.groups} groups; majority {one.majority:.3f}, words alone "
                f"{one.embedding:.3f}, control tasks {at_place.control.mean():.3f} on average",
                "",
                "| layer | S | 95 % | T | C |",
                "|---|---|---|---|---|",
            ]
            for layer, here in at_place.groupby("layer"):
                by = here.set_index("site")
                s, t, c = (f"{by.accuracy[site]:.3f} ({by.untrained[site]:.3f})" for site in "STC")
                lines.append(f"| {layer} | {s} | {by.low['S']:.3f} to {by.high['S']:.3f} | {t} | {c} |")
        return "\n".join(lines)

    def figure(self) -> Any:
        return probe_figure(self.frame)


def run(config: Config, progress: bool = False) -> Result:
    """Probe the model, and the same architecture untrained, on the same prompts."""
    model = cp.load_model(config.model, adapter=config.adapter, dtype=config.dtype)
    examples = CoinFlip(people=config.people).examples(config.prompts, config.seed)
    settings = dict(capture="STC", capacity=128, max_new_tokens=4, progress=progress)
    trace = cp.run(model, examples, **settings)
    behaviour = cp.probes.require_above_chance(trace)
    bare = cp.run(cp.probes.untrained(model), examples, **{**settings, "max_new_tokens": 1})
    parts, places = [], ("event", [END])
    with Progress(len(places), "probing", "kinds of place", enabled=progress) as bar:
        for at in places:
            parts.append(cp.probes.fit(trace, at=at, untrained=bare, least=config.least).table)
            bar.advance()
    table = pd.concat(parts, ignore_index=True)
    return Result(config, behaviour, records_of(table))


def main() -> None:
    command_of_subjects(__doc__, SUBJECTS, run)


if __name__ == "__main__":
    main()
