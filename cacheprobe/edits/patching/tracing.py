"""Runs causal tracing: adds noise to the subject's embeddings, then restores one clean state at a time."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Unpack

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.noise import derive_seed
from cacheprobe.core.values import JsonDict, listed, require_one_of
from cacheprobe.edits.patching.arguments import (
    PATCHED_SITES,
    Answer,
    GridConfig,
    GridOptions,
    as_answer,
    as_layers,
    as_positions,
    as_token_ids,
    require_room,
)
from cacheprobe.edits.patching.cells import AnswerLogits, Edit, PatchingCell, Run, cell, extend, run_once
from cacheprobe.edits.patching.grid import PatchingGrid, answer_texts, as_stored
from cacheprobe.edits.patching.sweep import CellStore, Group, Index, sweep, unpatched
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import usable
from cacheprobe.models.prompts import Prompt


class TracingOptions(GridOptions, total=False):
    """Declares the keyword arguments of `causal_tracing` beside what is traced."""

    noise: float
    samples: int
    seed: int


@dataclass(frozen=True)
class TracingConfig(GridConfig):
    """Holds the options of `causal_tracing`, with defaults."""

    noise: float = 3.0
    samples: int = 10
    seed: int = 0


@torch.inference_mode()
def causal_tracing(
    model: CachedLM,
    prompt: Prompt,
    subject: "str | int | Iterable[int]",
    *,
    site: str = "S",
    window: int = 1,
    answer: "Answer | None" = None,
    **options: Unpack[TracingOptions],
) -> PatchingGrid:
    """Runs the prompt with noise on the subject's embeddings, and restores the clean state at one layer and position at
    a time. Returns a PatchingGrid.

    The table has layer, position, sample, token, probability (of the answer), effect (gain in probability over the
    noisy run, the indirect effect) and is_top (whether each token of the answer is the first choice).
    prompt: text, token ids or a task example.  subject: positions of its subject, or its text: then the tokens of every
    place in the prompt where these words stand. meta["subject"] has the positions.
    site: S, T, C or "pre".  window: restore this many layers around the cell's own; the paper uses 10 for T and C.
    answer: the answer whose probability is measured: text that follows the prompt, a token id, or the ids of several
    tokens, whose probabilities are multiplied; by default the first choice of the clean run.
    options: layers, positions, store, path and progress, as in `activation`; and:
    - noise (3.0): standard deviation of the noise, as a multiple of the standard deviation of this prompt's input to
      block 0. The paper uses 3 times that of embeddings over many subjects, without positions.
    - samples (10): number of noise draws, each with its own grid.  seed (0): draw i depends on (seed, i) only.
    Raises: ValueError for a site, layer, position or subject that the prompt lacks, for an answer as `as_answer`, and
    for invalid window, samples or noise.
    Source: Meng et al. 2022 (arXiv 2202.05262), section 2.1; 3 standard deviations, ten draws and a window of ten
    layers are those of its code.
    Twin: tests.twins.patching_slowly.naive_grid with the same noise, close(1e-5) in float32.
    """
    config = TracingConfig(**options)
    require_one_of("site", site, PATCHED_SITES)
    if min(window, config.samples) < 1 or not config.noise > 0:
        raise ValueError(
            f"window={window}, samples={config.samples}, noise={config.noise}: give at least one layer and one sample, "
            "and noise above zero"
        )
    model = usable(model, config.path)
    ids = as_token_ids(model, prompt, "traced")
    given = subject_positions(model, ids, subject) if isinstance(subject, str) else listed(subject)
    noisy_at, at_positions = (as_positions(one, len(ids)) for one in (given, config.positions))
    in_layers = as_layers(config.layers, model)
    clean = run_once(model, ids, (site,))
    measured = (int(clean.logits.argmax()),) if answer is None else as_answer(model, answer, ids)
    require_room(model, ids, [measured])
    scale = config.noise * float(clean.at("pre", 0).float().std())

    @cache
    def noisy(sample: int) -> Run:
        """Returns the Run of the prompt with noise draw number `sample` on the embeddings of its subject."""
        added = _noise_adder(sorted(noisy_at), scale, derive_seed(config.seed, sample))
        return run_once(model, ids, (site,), after=(clean, min(noisy_at)), noise=added)

    @cache
    def noisy_before(sample: int, begins: tuple[int, ...]) -> Run:
        """Returns the noisy run, followed by the tokens with which the answer begins."""
        return extend(model, noisy(sample), begins)

    def group(sample: int, position: int) -> Group:
        """Returns the patched runs of one noise draw at one position, by (layer, position, sample)."""
        indices: list[Index] = [(layer, position, sample) for layer in in_layers]
        cells = {one: _restoring(clean, site, window_of(one[0], window, model.n_layers), position) for one in indices}
        return Group(f"{sample}-{position}", partial(noisy_before, sample), lambda begins: cells, indices)

    (first,), pair = as_stored([measured]), (measured, measured)
    settings: JsonDict = dict(
        kind="causal tracing", site=site, window=window, answer=first, prompt=list(ids), subject=list(noisy_at),
        noise=config.noise, seed=config.seed, layers=list(in_layers), fingerprint=model.fingerprint(),
    )  # fmt: skip
    groups = [group(sample, position) for sample in range(config.samples) for position in at_positions]
    results = sweep(model, groups, pair, CellStore(config.store, settings), config.progress)
    noisy_probabilities = [_probability(unpatched(model, noisy(i), pair)) for i in range(config.samples)]
    texts = model.token_texts(ids)
    meta = settings | dict(
        value="effect", samples=config.samples, model=model.name, weights=model.weights_note, clean_tokens=texts,
        answer_ids=[first], answer_tokens=answer_texts(model, [measured], ids), noise_standard_deviation=scale,
        clean_probability=_probability(unpatched(model, clean, pair)), noisy_probabilities=noisy_probabilities,
    )  # fmt: skip
    return PatchingGrid(_table(dict(sorted(results.items())), texts, noisy_probabilities, measured[0]), meta)


def subject_positions(model: CachedLM, token_ids: Sequence[int], subject: str) -> list[int]:
    """Returns the positions of the tokens that hold the words `subject`, wherever they stand in a prompt. Raises:
    ValueError if they stand nowhere as whole words."""
    ends = accumulate((len(model.decode(token_ids[: i + 1])) for i in range(len(token_ids))), max)
    text, words = model.decode(token_ids), re.escape(subject.strip())
    spans = [match.span() for match in re.finditer(rf"(?<!\w){words}(?!\w)", text) if words]
    found = [i for i, (start, end) in enumerate(pairwise([0, *ends])) if any(start < b and a < end for a, b in spans)]
    if not found:
        raise ValueError(
            f"the subject {subject!r} does not stand in the prompt as words of its own: {text[-200:]!r}; give its "
            "positions, such as subject=[3, 4]"
        )
    return found


def window_of(layer: int, window: int, n_layers: int) -> range:
    """Returns the range of `window` layers around one layer, cut at the model's first and last layer. If `window` is
    even, one more layer lies above than below."""
    low = layer - (window - 1) // 2
    return range(max(0, low), min(n_layers, low + window))


def _noise_adder(positions: Sequence[int], scale: float, seed: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that adds noise to the input of block 0 at `positions`, which must be sorted."""

    def add(states: Tensor) -> Tensor:
        """Returns a copy of states [n, m] with noise at `positions` alone. Row i is position positions[0] + i."""
        noise = torch.randn(len(positions), states.shape[1], generator=torch.Generator().manual_seed(seed % 2**63))
        out = states.clone()
        out[[p - positions[0] for p in positions]] += (scale * noise).to(states.device, states.dtype)
        return out

    return add


def _restoring(clean: Run, site: str, layers: range, position: int) -> PatchingCell:
    """Returns the PatchingCell that restores the clean state of one position in a window of layers."""
    states = ((layer, clean.at(site, layer)[position : position + 1]) for layer in layers)
    return cell([Edit((site, layer), (position,), vectors) for layer, vectors in states])


def _probability(logits: AnswerLogits) -> float:
    """Returns the probability of the first answer token, from its logit and the log-sum-exp."""
    return float(torch.tensor(logits.first - logits.logsumexp, dtype=torch.float64).exp())


def _table(
    results: Mapping[Index, AnswerLogits], tokens: Sequence[str], noisy_probabilities: Sequence[float], answer: int
) -> pd.DataFrame:
    """Returns the table of a causal-tracing grid, a DataFrame: one line for each layer, position and noise draw."""
    table = pd.DataFrame(list(results), columns=["layer", "position", "sample"])
    table["token"] = [tokens[position] for position in table.position]
    table["probability"] = [_probability(one) for one in results.values()]
    table["effect"] = table.probability - [noisy_probabilities[i] for i in table["sample"]]
    table["is_top"] = [one.top == answer for one in results.values()]
    return table
