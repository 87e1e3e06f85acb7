"""Write the stored results of the Thinking States analyses into docs/thinking-states.md.

python scripts/write_thinking_figures.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheprobe_analyses.crowd_or_distance import Result as Crowd
from cacheprobe_analyses.every_length import stored as every_length
from cacheprobe_analyses.minute_of_training import Result as Minute
from cacheprobe_analyses.pretrained_learns import Result as Learns
from cacheprobe_analyses.state_or_attention import Result as Routes
from cacheprobe_analyses.thinking_states_table import AGAIN, main_rows
from cacheprobe_analyses.thinking_states_table import Config as TableConfig
from cacheprobe_analyses.thinking_states_table import stored as table
from cacheprobe_analyses.thinking_variations import GAP_TEST
from cacheprobe_analyses.thinking_variations import Result as Variations
from cacheprobe_analyses.thought_gap import Result as Gap
from cacheprobe_analyses.thoughts_are_causal import Result as Causal
from cacheprobe_analyses.training_cost import Result as Cost

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "analyses" / "results", ROOT / "docs" / "thinking-states.md"
BEGIN, END = "<!-- figures: written by scripts/write_thinking_figures.py -->", "<!-- end of figures -->"
MAIN, END_MAIN = "<!-- main table: written by scripts/write_thinking_figures.py -->", "<!-- end of main table -->"


def figures() -> str:
    """The analyses' results, with the commands that print them."""
    held, causal = table(TableConfig(rows=main_rows())), _held("thoughts-are-causal")
    cost, varied = Cost.of(_held("training-cost")), Variations(**_held("thinking-variations"))
    minute = Minute.of(_held("minute-of-training"))
    gap, crowd = Gap(**_held("thought-gap")), Crowd(**_held("crowd-or-distance"))
    parts = [
        "`python -m cacheprobe_analyses.thinking_states_table`: per cent of texts answered rightly, 200 a seed; where\n"
        "no flip probability is named it is 0.5. The 95 % are over texts, which all seeds share: of seeds they say\n"
        "nothing. In chains of thought all thoughts are right where the whole chain is.",
        held.table(),
        *_again(),
        "The models, each trained by its command on one core: seconds of processor time, in all and until 99 % of\n"
        "fresh texts were wholly right, twice running. Not all were trained on one machine.",
        held.models_table(),
        "`python -m cacheprobe_analyses.every_length`: the coin-flip models on 200 texts of every single number of\n"
        "operations from 10 to 100, flip probability and seed; other texts than the tables'.",
        every_length().table(),
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
        f"{_command('pretrained_learns')}: SmolLM2 with T and C around\n"
        "it, T and C alone trained, on texts of which none comes twice.",
        Learns.of(_held("pretrained-learns")).table(),
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
    if not AGAIN.exists():
        return []
    said = (
        "`python -m cacheprobe_analyses.thinking_states_table --again`: the same models, on texts that no setting was\n"
    )
    return [f"{said}was chosen by.", table(TableConfig(rows=main_rows(), results=AGAIN)).table()]


def _held(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _command(module: str) -> str:
    return f"`python -m cacheprobe_analyses.{module} --json analyses/results/{module.replace('_', '-')}.json`"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def page(text: str) -> str:
    """The page with the tables of today between their marks."""
    main = table(TableConfig(rows=main_rows())).main_table()
    for begin, end, told in ((MAIN, END_MAIN, main), (BEGIN, END, figures())):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{told}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
