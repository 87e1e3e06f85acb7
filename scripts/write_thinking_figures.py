"""Write the stored results of the Thinking States analyses into docs/thinking-states.md.

python scripts/write_thinking_figures.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheprobe_analyses.crowd_or_distance import Result as Crowd
from cacheprobe_analyses.minute_of_training import Result as Minute
from cacheprobe_analyses.state_or_attention import Result as Routes
from cacheprobe_analyses.thinking_states_table import Result as Table
from cacheprobe_analyses.thinking_variations import GAP_TEST
from cacheprobe_analyses.thinking_variations import Result as Variations
from cacheprobe_analyses.thought_gap import Result as Gap
from cacheprobe_analyses.thoughts_are_causal import Result as Causal
from cacheprobe_analyses.training_cost import Result as Cost

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "analyses" / "results", ROOT / "docs" / "thinking-states.md"
BEGIN, END = "<!-- figures: written by scripts/write_thinking_figures.py -->", "<!-- end of figures -->"


def figures() -> str:
    """The analyses' results, with the commands that print them."""
    held, causal = _held("thinking-states"), _held("thoughts-are-causal")
    cost, varied = Cost.of(_held("training-cost")), Variations(**_held("thinking-variations"))
    minute = Minute.of(_held("minute-of-training"))
    gap, crowd = Gap(**_held("thought-gap")), Crowd(**_held("crowd-or-distance"))
    models = ["| model | parameters | steps | seconds | to 99 % | command |", "|---|---|---|---|---|---|"]
    for name, m in sorted(held["models"].items()):
        told = f"{m['parameters']:,} | {m['steps']} | {m['cpu_seconds']} | {m['cpu_seconds_to_99']}"
        models.append(f"| {name} | {told} | `{m['command']}` |")
    parts = [
        "`python -m cacheprobe_analyses.thinking_states_table`: per cent of texts answered rightly, 200 a seed.",
        Table(**held).table(),
        *_again(),
        "The models, each trained by its command on one core: seconds of processor time, in all and until 99 % of\n"
        "fresh texts were wholly right, twice running. Not all were trained on one machine.",
        "\n".join(models),
        f"{_command('minute_of_training')}: the coin models after a\n"
        "minute of one core, on fresh texts of the trained lengths and flip probabilities; seconds until 99 and 100 %\n"
        f"of the 128 texts of a check were wholly right, twice running. {minute.machine}.",
        minute.table(),
        f"{_command('crowd_or_distance')}: texts of {crowd.operations}\n"
        "operations under gold states, and the least margin of a right thought's first token, in logits, by chunk.",
        crowd.table(),
        "What the wrong thoughts of the first of these models stand after:",
        _listed(crowd.kinds_listed()),
        "Where they stand, wrong thoughts (and the median margin) of every model that sees of the text before:",
        crowd.ways_table(),
        "`python -m cacheprobe_analyses.thoughts_are_causal --json analyses/results/thoughts-are-causal.json`:",
        _listed(Causal(**causal).table().splitlines()),
        f"{_command('state_or_attention')}:",
        _listed(Routes(**_held("state-or-attention")).table().splitlines()),
        f"{_command('training_cost')}: forward and backward of {cost.text_tokens} text\n"
        f"tokens with {cost.thought_tokens} thought tokens a text, seconds of one core, medians of {cost.repeats}; "
        "ratios to the parallel step in one chunk.",
        cost.table(),
        f"{_command('thinking_variations')}: per cent of 200 texts\n"
        "and seed answered rightly by models with one thing changed; in brackets the worst of several seeds.\n"
        "p: flip probability.",
        varied.table(),
        f"Of {GAP_TEST}, by the longest run of chunks in which the state stays as it is:",
        varied.gaps(),
        f"{_command('thought_gap')}: per cent of {gap.texts} texts of which\n"
        "answer and thoughts were all right, with one gap in which nobody flips, or four, each after one who does.",
        gap.table(),
        _listed(gap.limits()),
        "Tests of some of the variations alone:",
        _listed(varied.others()),
    ]
    return "\n\n".join(parts)


def _again() -> list[str]:
    if not (RESULTS / "thinking-states-again.json").exists():
        return []
    said = (
        "`python -m cacheprobe_analyses.thinking_states_table --again`: the same models, on texts that no setting was\n"
    )
    return [f"{said}was chosen by.", Table(**_held("thinking-states-again")).table()]


def _held(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _command(module: str) -> str:
    return f"`python -m cacheprobe_analyses.{module} --json analyses/results/{module.replace('_', '-')}.json`"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def page(text: str) -> str:
    """The page with the figures of today between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
