"""Defines PatchingGrid, the result of a patching experiment: a tidy table and its metadata."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from cacheprobe.core.files import write_json
from cacheprobe.core.values import JsonDict
from cacheprobe.edits.patching.cells import AnswerLogits, AnswerPair, Run
from cacheprobe.models.base import CachedLM

_FORMAT = "cacheprobe patching grid 1"


@dataclass(frozen=True, eq=False)
class PatchingGrid:
    """Holds the result of a patching experiment: a table with one line for each patched run (cell), and metadata.
    `cp.plots.patching_grid` draws a PatchingGrid."""

    table: pd.DataFrame = field(repr=False)
    """One line for each cell; the docstrings of `activation`, `attribution`, `prefix` and `causal_tracing` list the
    columns."""
    meta: JsonDict = field(repr=False)
    """The request, the model, and the results of the unpatched runs. Of every grid: kind, site, value (the column that
    is drawn), model, weights, answer_ids, answer_tokens, clean_tokens, fingerprint. Of two prompts: clean_token_ids,
    corrupt_token_ids, corrupt_tokens, clean_logit_difference, corrupt_logit_difference. Of attribution patching: steps,
    pearson, spearman. Of causal tracing: prompt, subject, layers, answer, window, noise, noise_standard_deviation,
    samples, seed, clean_probability, noisy_probabilities."""

    def __repr__(self) -> str:
        axes = [name for name in ("layer", "position", "head", "sample") if name in self.table.columns]
        shape = " x ".join(f"{self.table[name].nunique()} {name}s" for name in axes)
        text = f"PatchingGrid({self.meta['kind']}, site {self.meta['site']}, {shape}, {self.meta['model']}"
        found = [(name.capitalize(), self.meta.get(name)) for name in ("pearson", "spearman")]
        numbers = [f"{name} {number:.3f}" for name, number in found if isinstance(number, float)]
        return f"{text}; correlation with the real grid: {', '.join(numbers)})" if numbers else f"{text})"

    def matrix(self, value: str | None = None) -> pd.DataFrame:
        """Returns one column of the grid's table as a DataFrame, layers x positions; the mean over heads or samples.

        value: a column; by default nld or effect, as the kind of grid requires.  Raises: ValueError for an unknown
        column.
        """
        value = self.meta["value"] if value is None else value
        if value not in self.table.columns:
            raise ValueError(f"unknown column {value!r}; the table has {', '.join(self.table.columns)}")
        return self.table.assign(value=self.table[value].astype(float)).pivot_table(
            index="layer", columns="position", values="value", aggfunc="mean"
        )

    def save(self, path: "str | Path") -> None:
        """Writes the grid to one JSON file, completely or not at all."""
        columns = {name: self.table[name].tolist() for name in self.table.columns}
        write_json(Path(path), {"format": _FORMAT, "meta": self.meta, "table": columns}, indent=None)

    @classmethod
    def load(cls, path: "str | Path") -> "PatchingGrid":
        """Reads a PatchingGrid from the JSON file that `PatchingGrid.save` wrote. Raises: ValueError for a missing
        file, or one without the format, metadata or columns of a grid."""
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if stored["format"] != _FORMAT:
                raise ValueError(f"format {stored['format']!r:.60}")
            grid = cls(pd.DataFrame(stored["table"]), stored["meta"])
            for name in ("layer", "position", "token", grid.meta["value"]):
                grid.table[name]
            return grid
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} is no patching grid ({error!r:.80}); give a file that PatchingGrid.save wrote"
            ) from error


def pair_table(
    results: Mapping[tuple[int, ...], AnswerLogits],
    axes: Sequence[str],
    tokens: Sequence[str],
    clean: AnswerLogits,
    corrupt: AnswerLogits,
) -> pd.DataFrame:
    """Returns the table of a grid of two prompts: a DataFrame with one line for each cell (patched run).

    Columns: layer, position (and head), token (of the position), logit_difference (first answer minus second), nld (0
    as in the corrupted run, 1 as in the clean run), flip (whether the cell prefers another answer than the corrupted
    run), logprob_nats (of the first answer).
    results: by index of the cell, whose numbers are named by `axes`.  clean, corrupt: the unpatched runs.
    Source: normalised logit difference as in Li, Guo and Andreas 2025 (arXiv 2503.02854).
    """
    low, high = difference(corrupt), difference(clean)
    table = pd.DataFrame(list(results), columns=list(axes))
    table["token"] = [tokens[position] for position in table.position]
    table["logit_difference"] = [difference(one) for one in results.values()]
    table["nld"] = (table.logit_difference - low) / (high - low)
    table["flip"] = (table.logit_difference > 0) != (low > 0)
    table["logprob_nats"] = [one.first - one.logsumexp for one in results.values()]
    return table


def difference(logits: AnswerLogits) -> float:
    """Returns the logit of the first answer minus that of the second; of longer answers, their log-probabilities."""
    return logits.first - logits.second


def as_stored(answers: Sequence[tuple[int, ...]]) -> list[int | list[int]]:
    """Returns the token id of each answer, or the list of its ids if it has several."""
    return [ids[0] if len(ids) == 1 else list(ids) for ids in answers]


def answer_texts(model: CachedLM, answers: Sequence[tuple[int, ...]], prompt: Sequence[int]) -> list[str]:
    """Returns the text of each answer after a prompt."""
    return [model.token_texts(ids)[0] if len(ids) == 1 else model.decode(ids, prompt) for ids in answers]


def pair_meta(
    model: CachedLM, kind: str, site: str, runs: tuple[Run, Run], answer: AnswerPair, ends: Sequence[AnswerLogits]
) -> JsonDict:
    """Returns the metadata of a grid of two prompts as a dict. runs: the unpatched clean and corrupted run.  ends: the
    results of the two."""
    clean, corrupt = ends
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
        "answer_ids": as_stored(answer),
        "answer_tokens": answer_texts(model, answer, runs[0].token_ids),
        "clean_logit_difference": difference(clean),
        "corrupt_logit_difference": difference(corrupt),
        "fingerprint": model.fingerprint(),
    }
