"""A grid as it is handed over: a tidy table, and what it was made of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from cacheprobe.models.base import CachedLM
from cacheprobe.patching.parts import write_json
from cacheprobe.patching.runs import Run, Said, read

_FORMAT = "cacheprobe patching grid 1"
_META = ("kind", "site", "value", "model")
"""What a picture of a grid speaks of."""


@dataclass(frozen=True, eq=False)
class Grid:
    """What every cell says. `cp.plots.patching_grid(grid)` draws it."""

    table: pd.DataFrame = field(repr=False)
    """One row for each cell; `activation`, `prefix` and `causal_tracing` name its columns."""
    meta: dict[str, Any] = field(repr=False)
    """What was asked, of which model, and what the unpatched runs say."""

    def __repr__(self) -> str:
        axes = [name for name in ("layer", "position", "head", "sample") if name in self.table.columns]
        shape = " x ".join(f"{self.table[name].nunique()} {name}s" for name in axes)
        return f"Grid({self.meta['kind']}, site {self.meta['site']}, {shape}, {self.meta['model']})"

    def matrix(self, value: str | None = None) -> pd.DataFrame:
        """One number for each layer and position, layers down; the mean over heads or samples.

        value: a column, by default the one that the grid is about, nld or effect.
        Raises: ValueError for a column that there is not.
        """
        value = self.meta["value"] if value is None else value
        if value not in self.table.columns:
            raise ValueError(f"unknown column {value!r}; the table has {', '.join(self.table.columns)}")
        return self.table.assign(value=self.table[value].astype(float)).pivot_table(
            index="layer", columns="position", values="value", aggfunc="mean"
        )

    def save(self, path: "str | Path") -> None:
        """One JSON file, written whole."""
        columns = {name: self.table[name].tolist() for name in self.table.columns}
        write_json(Path(path), {"format": _FORMAT, "meta": self.meta, "table": columns})

    @classmethod
    def load(cls, path: "str | Path") -> "Grid":
        """What `save` wrote. Raises: ValueError for another file."""
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if stored["format"] != _FORMAT:
                raise KeyError(f"format {stored['format']!r:.60}")
            meta, table = stored["meta"], pd.DataFrame(stored["table"])
            if lacking := [name for name in _META if not isinstance(meta.get(name), str)]:
                raise KeyError(f"its meta lacks {', '.join(lacking)}")
            if lacking := [name for name in ("layer", "position", "token", meta["value"]) if name not in table.columns]:
                raise KeyError(f"its table lacks {', '.join(lacking)}")
            return cls(table, meta)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no patching grid ({error!s:.80}); give a file that Grid.save wrote") from error


def pair_table(
    said: Mapping[tuple[int, ...], Said], axes: Sequence[str], tokens: Sequence[str], clean: Said, corrupt: Said
) -> pd.DataFrame:
    """Layer, position (and head), the position's token, and what each cell says.

    Columns: logit_difference (first answer minus second), nld (0 as corrupted, 1 as clean), flip (the answer that it
    prefers is not the corrupted run's), logprob_nats (of the first answer).
    Source: normalised logit difference as in Li, Guo and Andreas 2025 (arXiv 2503.02854).
    """
    low, high = difference(corrupt), difference(clean)
    table = pd.DataFrame(list(said), columns=list(axes))
    table["token"] = [tokens[position] for position in table.position]
    table["logit_difference"] = [difference(one) for one in said.values()]
    table["nld"] = (table.logit_difference - low) / (high - low)
    table["flip"] = (table.logit_difference > 0) != (low > 0)
    table["logprob_nats"] = [one.first - one.logsumexp for one in said.values()]
    return table


def difference(said: Said) -> float:
    """Logit of the first answer minus that of the second."""
    return said.first - said.second


def pair_meta(
    model: CachedLM, kind: str, site: str, runs: tuple[Run, Run], answer: tuple[int, int], **more: Any
) -> dict[str, Any]:
    """What a grid of two runs, clean and corrupted, was made of."""
    clean, corrupt = (read(run.logits[None], answer)[0] for run in runs)
    return {
        "kind": kind,
        "site": site,
        "value": "nld",
        "model": model.name,
        "weights": model.weights_note,
        "clean_token_ids": list(runs[0].token_ids),
        "corrupt_token_ids": list(runs[1].token_ids),
        "clean_tokens": model.token_texts(runs[0].token_ids),
        "corrupt_tokens": model.token_texts(runs[1].token_ids),
        "answer_ids": list(answer),
        "answer_tokens": model.token_texts(answer),
        "clean_logit_difference": difference(clean),
        "corrupt_logit_difference": difference(corrupt),
        "fingerprint": model.fingerprint(),
        **more,
    }
