"""Write the stored results of the Thinking States analyses into docs/thinking-states.md.

python scripts/write_thinking_figures.py
"""

import json
from pathlib import Path

from cacheprobe_analyses.thinking_states_table import Result as Table
from cacheprobe_analyses.thoughts_are_causal import Result as Causal

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "analyses" / "results", ROOT / "docs" / "thinking-states.md"
BEGIN, END = "<!-- figures: written by scripts/write_thinking_figures.py -->", "<!-- end of figures -->"


def figures() -> str:
    """Both analyses' results, with the commands that print them."""
    held = json.loads((RESULTS / "thinking-states.json").read_text(encoding="utf-8"))
    causal = json.loads((RESULTS / "thoughts-are-causal.json").read_text(encoding="utf-8"))
    models = ["| model | parameters | steps | seconds | to 99 % | command |", "|---|---|---|---|---|---|"]
    for name, m in sorted(held["models"].items()):
        told = f"{m['parameters']:,} | {m['steps']} | {m['cpu_seconds']} | {m['cpu_seconds_to_99']}"
        models.append(f"| {name} | {told} | `{m['command']}` |")
    parts = [
        "`python -m cacheprobe_analyses.thinking_states_table`: per cent of texts answered rightly, 200 a seed.",
        Table(**held).table(),
        "The models, each trained by its command on one core: seconds of processor time, in all and until 99 % of\n"
        "fresh texts were wholly right, twice running.",
        "\n".join(models),
        "`python -m cacheprobe_analyses.thoughts_are_causal --json analyses/results/thoughts-are-causal.json`:",
        "\n".join(f"- {line}" for line in Causal(**causal).table().splitlines()),
    ]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The page with the figures of today between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
