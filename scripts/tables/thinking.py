"""Tables of the stored results of the Thinking States analyses."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from cacheprobe_analyses.records import markdown_table
from cacheprobe_analyses.thinking.accuracy_tables import LENGTHS, Cells
from cacheprobe_analyses.thinking.accuracy_tables import Result as Table
from cacheprobe_analyses.thinking.crowding_or_distance import Result as Crowd
from cacheprobe_analyses.thinking.every_length import stored as every_length
from cacheprobe_analyses.thinking.minute_of_training import Result as Minute
from cacheprobe_analyses.thinking.pretrained_learns import Result as Learns
from cacheprobe_analyses.thinking.state_or_attention import Result as Routes
from cacheprobe_analyses.thinking.thinking_states_table import Config as TableConfig
from cacheprobe_analyses.thinking.thinking_states_table import main_rows
from cacheprobe_analyses.thinking.thinking_states_table import stored as table
from cacheprobe_analyses.thinking.thinking_variations import Result as Variations
from cacheprobe_analyses.thinking.thought_gap import Result as Gap
from cacheprobe_analyses.thinking.thoughts_are_causal import Result as Causal
from cacheprobe_analyses.thinking.training_cost import Result as Cost

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "analyses" / "results"
CHOICES = ("attention-crowding", "tiny", "no-position-jumps", "paper")
SYMMETRIC = (("s3", "attention-crowding"), ("s3", "tiny"), ("s5", "tiny"))
SWAPS = ("4", "16", "128")
CROWDED = ("tiny seed 2", "tiny seed 0", "attention-crowding seed 2")
"""The model that fails, and two that do not."""
VARIED = (
    "base",
    "learned first state",
)
VARIED_TESTS = ("10 operations, p 0.9", "[10, 100] operations, p 0.9")
LOOPS = {"4 swaps": "4 operations", "16 swaps": "16 operations"}
COINS = {"asked coin": "two coins, thoughts of asked", "both coins": "two coins, thoughts of both"}
ORDERS = [f"{count} operations, question {place}" for count in (10, 40) for place in ("first", "last")]


def tables() -> dict[str, str]:
    """Returns by name: a stored result as a table, under the command that prints it."""
    held = table(TableConfig(rows=main_rows()))
    varied = Variations(**_held("thinking-variations"))
    return {
        "thinking-main": f"`python -m cacheprobe_analyses.thinking_states_table`\n\n{held.main_table()}",
        "thinking-choices": f"{_by_preset(held)}\n\n{_symmetric(held)}",
        "thinking-every-length": _lengths(),
        "thinking-crowd": _crowd(),
        "thinking-cause": _cause(),
        "thinking-cost": _cost(),
        "thinking-variations": f"{_command('thinking_variations')}\n\n{_variations(varied)}",
        "thinking-gap": _gap(),
        "thinking-trainings": _trainings(),
    }


def _by_preset(held: Table) -> str:
    rows = [
        (
            f"`{preset}`",
            *(_share(_half_flips(held, f"coin-flip {preset} thinking: {n} operations")) for n in LENGTHS[:4]),
        )
        for preset in CHOICES
    ]
    return markdown_table(("coin-flip preset", *LENGTHS[:4]), rows)


def _half_flips(held: Table, start: str) -> Cells:
    """Cells at a flip probability of 0.5, named or not."""
    return held.cells.get(start) or held.cells.get(f"{start}, flip_probability 0.5", [])


def _symmetric(held: Table) -> str:
    rows = [
        (
            task.upper(),
            f"`{preset}`",
            *(_share(held.cells.get(f"{task} {preset} thinking: {n} operations")) for n in SWAPS),
        )
        for task, preset in SYMMETRIC
    ]
    return markdown_table(("task", "preset", *(f"{n} swaps" for n in SWAPS)), rows)


def _share(cells: Cells | None) -> str:
    """Per cent right over all seeds, and the worst seed's."""
    if not cells:
        return ""
    shares = [100 * cell["right"] / cell["texts"] for cell in cells]
    return f"{sum(shares) / len(shares):.1f} ({min(shares):.1f})"


def _lengths() -> str:
    texts_by, wrong = Counter[float](), Counter[float]()
    for cell in every_length().cells:
        low, high = cell.operations
        texts_by[cell.flip_probability] += cell.texts * (high - low + 1)
        wrong[cell.flip_probability] += sum(cell.wrong.values())
    rows = [(p, f"{texts:,}", wrong[p]) for p, texts in texts_by.items()]
    told = markdown_table(("flip probability", "texts", "wrong answers"), rows)
    return f"`python -m cacheprobe_analyses.every_length`\n\n{told}"


def _crowd() -> str:
    crowd = Crowd(**_held("crowding-or-distance"))
    ways = markdown_table(
        ("what the model sees of the text before", "wrong thoughts", "median margin, logits"),
        [
            (way, f"{w['wrong']:.0f} of {w['places']:.0f}", f"{w['median']:.1f}")
            for way, w in crowd.ways["tiny seed 2"].items()
        ],
    )
    margins = markdown_table(
        ("model", "wrong thoughts", "smallest margin, chunks 0 to 99", "chunks 1000 on"),
        [
            (name, found["wrong"], f"{found['least']['0 to 99']:.1f}", f"{found['least']['1000 on']:.1f}")
            for name, found in crowd.models.items()
            if name in CROWDED
        ],
    )
    return f"{_command('crowding_or_distance')}\n\n{margins}\n\nSeed 2 of `tiny`, where it was wrong:\n\n{ways}"


def _cause() -> str:
    causal, routes = Causal(**_held("thoughts-are-causal")), Routes(**_held("state-or-attention"))
    replaced = markdown_table(
        ("one state in the middle of the text is replaced by", f"other answer, of {causal.texts}"),
        causal.flipped.items(),
    )
    cut = markdown_table(
        ("the model keeps", f"right answers, of {routes.texts}", "texts with all thoughts right"),
        [(way, right, routes.thoughts_right[way]) for way, right in routes.right.items() if ", " not in way],
    )
    return f"{_command('thoughts_are_causal')}\n\n{replaced}\n\n{_command('state_or_attention')}\n\n{cut}"


def _cost() -> str:
    cost = Cost.of(_held("training-cost"))
    rows = [
        (line.batch, line.chunks, f"{line.ratios['parallel']:.2f}", f"{line.ratios['through time']:.2f}")
        for line in cost.lines
        if line.chunks in (1, 16)
    ]
    head = ("texts a batch", "chunks", "parallel", "back-propagation through time")
    return f"{_command('training_cost')}\n\n{markdown_table(head, rows)}"


def _variations(varied: Variations) -> str:
    coin = markdown_table(
        ("one coin, 300 steps", "seeds", "10 operations", "[10, 100] operations"),
        [
            (
                name,
                len(varied.cells[name][VARIED_TESTS[0]]),
                *(_share(varied.cells[name][test]) for test in VARIED_TESTS),
            )
            for name in VARIED
        ],
    )
    loops = markdown_table(
        ("S5, 600 steps: blocks in the loop", *LOOPS),
        [(n, *(_share(varied.cells[f"S5, loop of {n}"][test]) for test in LOOPS.values())) for n in (1, 4)],
    )
    coins = markdown_table(
        ("two coins: a thought names", *ORDERS),
        [(name, *(_share(varied.cells[held][test]) for test in ORDERS)) for name, held in COINS.items()],
    )
    return f"{coin}\n\n{loops}\n\n{coins}"


def _gap() -> str:
    gap = Gap(**_held("thought-gap"))
    rows = []
    for form, right in gap.right.items():
        for times in ("1", "4") if form == "delta" else ("4",):  # one gap is the same in every form
            tried = {n: right[n] >= gap.least * gap.texts for n in gap.chunks if n.split(" of ")[0] == times}
            lost = next((n for n, is_kept in tried.items() if not is_kept), None)
            kept = [n for n in tried if lost is None or list(tried).index(n) < list(tried).index(lost)][-1]
            rows.append((form, times, gap.chunks[kept][1], "none lost" if lost is None else gap.chunks[lost][1]))
    head = ("thoughts", "gaps", "kept up to, chunks", "first lost at, chunks")
    return f"{_command('thought_gap')}\n\n{markdown_table(head, rows)}"


def _trainings() -> str:
    minute, learns = Minute.of(_held("minute-of-training")), Learns.of(_held("pretrained-learns"))
    minutes = markdown_table(
        ("preset", "parameters", "seconds on one core", "seconds to 99 %", "right"),
        [
            (f"`{line.preset}`", f"{line.parameters:,}", line.cpu_seconds, line.to_99, f"{line.right} of {line.texts}")
            for line in minute.lines
        ],
    )
    losses = markdown_table(
        ("states", "language-model loss, nats a text"),
        [
            ("none", f"{learns.backbone:.2f}"),
            ("gold thoughts", f"{learns.gold:.2f}"),
            ("thoughts of the opposite coin", f"{learns.opposite:.2f}"),
        ],
    )
    return f"{_command('minute_of_training')}\n\n{minutes}\n\n{_command('pretrained_learns')}\n\n{losses}"


def _held(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _command(module: str) -> str:
    return f"`python -m cacheprobe_analyses.{module}`"
