"""Write the stored results of the analyses of states and drafts into docs/analyses.md.

python scripts/write_state_figures.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from cacheprobe_analyses.coin_state_patch import Result as Patched
from cacheprobe_analyses.coin_state_probe import Result as Coin
from cacheprobe_analyses.rollback_foresight import Result as RollbackPrediction
from cacheprobe_analyses.s3_algorithm import Result as Algorithm
from cacheprobe_analyses.when_settles import Result as Settles

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "analyses.md"


def figures() -> dict[str, str]:
    """By analysis: its stored result, with the command that prints it; or that there is none yet."""
    shown = {}
    for name, text_of in ANALYSES.items():
        path = ROOT / _file(name)
        told = text_of(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else "No result is stored yet."
        shown[name] = f"`python -m cacheprobe_analyses.{name} --json {_file(name)}`\n\n{told}"
    return shown


def _coin(held: dict[str, Any]) -> str:
    coin = {name: Coin.of(one) for name, one in held.items()}
    models = [f"`{name}`: {c.behaviour['accuracy']:.3f} of {c.behaviour['num_examples']} answers right, "
              f"{c.config.people} people.\n\n{c.summary()}" for name, c in coin.items()]  # fmt: skip
    return "\n\n".join(models)


def _patched(held: dict[str, Any]) -> str:
    """Beside the probes of the same models, layers and places."""
    probes = json.loads((ROOT / _file("coin_state_probe")).read_text(encoding="utf-8"))
    return "\n\n".join(
        f"`{name}`: {Patched.of(one).table(pd.DataFrame(probes[name]['lines']))}" for name, one in held.items()
    )


ANALYSES: dict[str, Callable[[dict[str, Any]], str]] = {
    "coin_state_probe": _coin,
    "coin_state_patch": _patched,
    "when_settles": lambda held: Settles(**held).table(),
    "rollback_foresight": lambda held: RollbackPrediction(**held).table(),
    "s3_algorithm": lambda held: Algorithm(**held).table(),
}


def _file(name: str) -> str:
    return f"analyses/results/{name.replace('_', '-')}.json"


def page(text: str) -> str:
    """The page with the figures of today between each analysis's two marks."""
    for name, shown in figures().items():
        begin, end = f"<!-- {name}: written by scripts/write_state_figures.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{shown}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
