"""Tables of the stored results of the analyses of states and drafts."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from cacheprobe_analyses.coin.coin_state_patch import SWAPPED
from cacheprobe_analyses.coin.coin_state_patch import Result as Patched
from cacheprobe_analyses.coin.coin_state_probe import Result as Coin
from cacheprobe_analyses.drafts.prediction_depths import Result as Settles
from cacheprobe_analyses.records import markdown_table
from cacheprobe_analyses.s3.s3_algorithm import Result as Algorithm

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (0, 2)
"""Layers of the model that thinks, which has four."""
PROBED, CARRIED, READ = (17, 22, 29), (22, 23, 29), (20, 24, 28)
"""Some of SmolLM2's 30 layers: of the probes, the patches, and the readings."""
FAR = (4, 8, 24)
"""Some of the numbers of operations after which the state was asked."""


def tables() -> dict[str, str]:
    """Returns by name: some of its stored result, with the command that prints all of it; or that there is none yet."""
    shown = {}
    for name, text_of in ANALYSES.items():
        path = ROOT / _file(name)
        told = text_of(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else "No result is stored yet."
        shown[name.replace("_", "-")] = f"`python -m cacheprobe_analyses.{name} --json {_file(name)}`\n\n{told}"
    return shown


def _coin(held: dict[str, Any]) -> str:
    """By model: the probe's accuracy by layer and place, the untrained model's, and what the words alone give."""
    shown = []
    for name, one in held.items():
        frame, behaviour = Coin.of(one).frame, one["behaviour"]
        frame = frame[frame.site == "S"]
        places = list(dict.fromkeys(frame.place))
        rows = [[layer, *(_read(frame, layer, place) for place in places)] for layer in _layers(frame, PROBED)]
        rows.append(["words alone", *(f"{frame[frame.place == place].embedding.iloc[0]:.3f}" for place in places)])
        right = f"`{name}`: {behaviour['accuracy']:.3f} of {behaviour['num_examples']} answers right."
        shown += [right, markdown_table(("layer", *map(_place, places)), rows)]
    return "\n\n".join(shown)


def _read(frame: pd.DataFrame, layer: int, place: int) -> str:
    line = frame[(frame.layer == layer) & (frame.place == place)].iloc[0]
    return f"{line.accuracy:.3f} ({line.untrained:.3f})"


def _place(number: int) -> str:
    return "last token" if number < 0 else f"person {number}"


def _layers(frame: pd.DataFrame, chosen: Iterable[int]) -> list[int]:
    """The chosen layers of SmolLM2, or those of the model that thinks."""
    return list(LAYERS) if frame.layer.max() < 4 else list(chosen)


def _patched(held: dict[str, Any]) -> str:
    """By model: the mean NLD of each patch and the answers that flip, by layer and place."""
    shown = []
    for name, one in held.items():
        frame = Patched.of(one).frame
        frame = frame[(frame.treatment == SWAPPED) & ~frame.place.str.startswith("chunk")]
        places = list(dict.fromkeys(frame.place))
        cells = {
            (line.place, line.layer): f"{round(line.nld, 3) + 0.0:.3f} ({line.flips} of {line.n})"
            for line in frame.itertuples()
        }
        rows = [[layer, *(cells[place, layer] for place in places)] for layer in _layers(frame, CARRIED)]
        shown += [f"`{name}`:", markdown_table(("layer", *places), rows)]
    return "\n\n".join(shown)


def _settles(held: dict[str, Any]) -> str:
    result = Settles(**held)
    final, drafts = pd.DataFrame(result.final), pd.DataFrame(result.disagreement)
    kinds = list(dict.fromkeys(final.kind))
    rows = [[layer, *(_share(final[(final.kind == kind) & (final.layer == layer)], "chance") for kind in kinds)]
            for layer in READ]  # fmt: skip
    drafters = list(dict.fromkeys(drafts.drafter))
    rejected = [
        [layer, *(_share(drafts[(drafts.drafter == name) & (drafts.layer == layer)], "control") for name in drafters)]
        for layer in READ
    ]
    counts = {name: drafts[drafts.drafter == name].rejected.iloc[0] for name in drafters}
    heads = (
        ["layer", *kinds],
        ["layer", *(f"`{name}`, {count} rejected" for name, count in counts.items())],
    )
    return f"{markdown_table(heads[0], rows)}\n\n{markdown_table(heads[1], rejected)}"


def _share(lines: pd.DataFrame, beside: str) -> str:
    line = lines.iloc[0]
    return f"{line['share']:.3f} ({line[beside]:.3f})"


def _rollbacks(held: dict[str, Any]) -> str:
    rows = []
    for one in held["found"]:
        if not one["lines"]:
            continue
        line = one["lines"][-1]
        rows.append((f"`{one['drafter']}`", one["unit"], f"{one['rollbacks']} of {one['drafts']}", line["layer"],
                     f"{line['auroc']:.3f} ({line['low']:.3f} to {line['high']:.3f})", f"{line['position']:.3f}",
                     f"{line['margin']:.3f}", one["answer"]))  # fmt: skip
    head = ("drafter", "unit", "rollbacks", "layer", "AUROC (95 %)", "position alone", "margin alone", "predicted")
    return markdown_table(head, rows)


def _algorithm(held: dict[str, Any]) -> str:
    result = Algorithm(**held)
    rows = []
    for name, made in result.models.items():
        parity, state = (list(result.read_from(name, label).values())[-1] for label in ("parity", "state"))
        rows.append((name, f"{made['accuracy']:.3f}", *("none" if at is None else at for at in (parity, state)),
                     *(", ".join(map(str, result.reach(name, kind))) for kind in ("same", "other"))))  # fmt: skip
    head = (
        "model",
        "answers right",
        "parity from layer",
        "state from layer",
        "reach by layer, same parity",
        "other parity",
    )
    lengths = pd.DataFrame(result.lengths)
    counts = [count for count in sorted(set(lengths.operations)) if count in FAR]
    far = []
    for name in result.models:
        here = lengths[lengths.model == name].set_index("operations")
        far.append([name, *(f"{here.right[n] / here.texts[n]:.3f}" if n in here.index else "" for n in counts)])
    return f"{markdown_table(head, rows)}\n\n{markdown_table(('state right after', *counts), far)}"


ANALYSES: dict[str, Callable[[dict[str, Any]], str]] = {
    "coin_state_probe": _coin,
    "coin_state_patch": _patched,
    "prediction_depths": _settles,
    "rollback_prediction": _rollbacks,
    "s3_algorithm": _algorithm,
}


def _file(name: str) -> str:
    return f"analyses/results/{name.replace('_', '-')}.json"
