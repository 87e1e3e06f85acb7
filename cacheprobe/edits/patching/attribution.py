"""Runs attribution patching: estimates every cell of a patching grid from gradients, and compares it with real runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack, cast

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.terminal import Progress
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import whole_number
from cacheprobe.edits.patching.arguments import Answer, GridOptions, patched_place
from cacheprobe.edits.patching.cells import MOST_ROWS, AnswerPair, Run
from cacheprobe.edits.patching.grid import PatchingGrid, difference, pair_meta
from cacheprobe.edits.patching.pairs import PatchedPair, activation
from cacheprobe.edits.patching.sweep import as_tokens, unpatched
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.differentiable import derivatives, require_gradients
from cacheprobe.models.prompts import Prompt
from cacheprobe.ops.statistics import cell_correlations

ESTIMATE = "estimated_nld"
"""Column with the estimate of nld, the normalised logit difference."""


def attribution(
    model: CachedLM,
    clean: Prompt,
    corrupt: Prompt,
    *,
    site: str = "S",
    heads: bool = False,
    answer: "Sequence[Answer] | None" = None,
    steps: int = 0,
    real: bool = True,
    **options: Unpack[GridOptions],
) -> PatchingGrid:
    """Computes attribution patching: estimates every cell of `activation` from the gradient of the logit difference.
    Returns a PatchingGrid with both grids, whose repr has their correlation.

    A cell's estimate is the inner product of the difference of states, clean minus corrupted, with the gradient.
    steps: 0 takes the gradient at the corrupted run, which costs one backward pass for all cells. A number k from 1 on
    takes the mean of k gradients, the integrated gradient: the states of all positions of the cell's layer move
    together from the corrupted to the clean ones, by the midpoint rule. The estimates of a layer then sum to the effect
    of patching all its positions, up to the rule's error.
    real: whether to compute the real grid too; without it there is no correlation.
    model, clean, corrupt, site, heads, answer and options: as in `activation`; store keeps cells of the real grid.
    The PatchingGrid's table has layer, position, head (if requested), token, estimated_difference (of the logit
    difference), estimated_nld (0 as in the corrupted run, 1 as in the clean one), then the columns of `activation`.
    Its meta has steps, and pearson and spearman over the cells; None if either grid is constant. Positions at which
    all cells of both grids are 0 do not count, such as those before the first token that differs.
    Raises: as `activation`; ModelError for a Thinking States model; ValueError for steps below 0.
    Source: Nanda 2023, "Attribution patching"; Kramar et al. 2024 (arXiv 2403.00745), section 2; integrated gradients,
    Sundararajan et al. 2017 (arXiv 1703.01365), of activations as in Hanna et al. 2024 (arXiv 2403.17806).
    Twin: tests.twins.gradients_slowly.attribution_slowly: central differences, close(1e-6) in float64.
    """
    place = patched_place(site, heads)
    count = whole_number("steps", steps, at_least=0)
    require_gradients(model)
    pair = PatchedPair(model, clean, corrupt, answer, (place,), options)
    runs, metrics = pair.runs, _metrics(pair.answer, len(pair.runs[0].token_ids))
    total = len(metrics) * (len(pair.layers) if count else 1)
    slopes: dict[int, Tensor] = {}
    with Progress(total, "differentiating", "passes", enabled=pair.config.progress) as bar:
        for begins, metric in metrics:
            longer = (pair.clean_before(begins), pair.corrupt_before(begins))
            found = _mean_gradients(
                model, place, pair.layers, longer, len(runs[0].token_ids), metric, count, bar.advance
            )
            slopes = {layer: found[layer] + slopes.get(layer, 0) for layer in pair.layers}
    ends = [unpatched(pair.model, run, pair.answer) for run in runs]
    meta = pair_meta(pair.model, "attribution patching", place, runs, pair.answer, ends)
    table = _estimates(slopes, place, runs, pair.positions)
    tokens = [visible(token) for token in pair.model.token_texts(runs[1].token_ids)]
    table.insert(table.shape[1] - 1, "token", [tokens[position] for position in table.position])
    high, low = map(difference, ends)
    table[ESTIMATE] = table.estimated_difference / (high - low)
    meta.update({"value": ESTIMATE, "steps": count, "pearson": None, "spearman": None})
    if real:
        grid = activation(
            model, *(run.token_ids for run in runs), site=site, heads=heads, answer=pair.answer, **options
        )
        axes = [name for name in ("layer", "position", "head") if name in table.columns]
        table = table.merge(grid.table.drop(columns="token"), on=axes, validate="one_to_one")
        numbers = (table[name].tolist() for name in ("position", ESTIMATE, "nld"))
        meta["pearson"], meta["spearman"] = cell_correlations(*numbers)
    return PatchingGrid(table, meta)


def _metrics(answers: AnswerPair, length: int) -> list[tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]:
    """Returns (tokens to feed after the prompt, metric of the logits [b, n, v]) of each pass, whose sum is the
    difference between the answers: one for two single tokens, else one for each answer. length: of the prompt."""
    if (tokens := as_tokens(answers)) is not None:
        return [((), lambda logits: (logits[:, -1, tokens[0]] - logits[:, -1, tokens[1]]).sum())]

    def logprob(ids: tuple[int, ...], sign: int) -> Callable[[Tensor], Tensor]:
        """Returns the metric that is the log-probability of an answer, times `sign`."""

        def metric(logits: Tensor) -> Tensor:
            """Returns it, summed over the batch of independent runs."""
            tokens = torch.tensor(ids, device=logits.device)[:, None].expand(len(logits), -1, -1)
            return sign * logits[:, length - 1 :].log_softmax(-1).gather(-1, tokens).sum()

        return metric

    return [(ids[:-1], logprob(ids, sign)) for ids, sign in zip(answers, (1, -1), strict=True)]


def _mean_gradients(
    model: CachedLM,
    site: str,
    layers: Sequence[int],
    runs: tuple[Run, Run],
    length: int,
    metric: Callable[[Tensor], Tensor],
    steps: int,
    advance: Callable[[], None],
) -> Mapping[int, Tensor]:
    """Returns by layer the gradient [length, w] of a metric with respect to the prompt's states at a site, in float64:
    of the corrupted run if `steps` is 0, else the mean on the way to the clean run. advance: called after each pass.

    runs: the clean and the corrupted run, each with the same tokens after the prompt's `length` tokens. The states of
    these tokens stay those of the corrupted run.
    """
    ids = torch.tensor([runs[1].token_ids])
    about = f"attribution patching at site {site}"
    if not steps:
        found = derivatives(model, ids, [(site, layer) for layer in layers], metric, about)
        advance()
        return {layer: found.gradients[site, layer][0, :length].double() for layer in layers}
    shares = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    at_once = max(1, MOST_ROWS // ids.shape[1])
    out: dict[int, Tensor] = {}
    for layer in layers:
        low = runs[1].at(site, layer).double()
        high = torch.cat([runs[0].at(site, layer)[:length].double(), low[length:]])
        total = torch.zeros_like(low[:length])
        for part in shares.split(at_once):
            share = part.to(low.device).reshape(-1, *(1,) * low.dim())
            moved = low + share * (high - low)

            def replace(site: str, layer: int, value: Tensor, moved: Tensor = moved) -> Tensor:
                """Returns the states on the way instead of those of the corrupted run."""
                return moved.to(value.device, value.dtype)

            whole = ids.expand(len(part), -1)
            found = derivatives(model, whole, [(site, layer)], metric, about, edit=replace)
            total = total + found.gradients[site, layer][:, :length].double().sum(0)
        out[layer] = total / steps
        advance()
    return out


def _estimates(
    slopes: Mapping[int, Tensor], site: str, runs: tuple[Run, Run], positions: Sequence[int]
) -> pd.DataFrame:
    """Returns the table of estimates: layer, position, head (for single heads) and estimated_difference."""
    lines = []
    for layer, slope in slopes.items():
        change = runs[0].at(site, layer).double() - runs[1].at(site, layer).double()
        products = (slope.to(change.device) * change).sum(-1)  # [n], or [n, h]
        for position in sorted(positions):
            numbers = cast(list[float], products[position].reshape(-1).tolist())
            names = [{"head": head} for head in range(len(numbers))] if products.dim() > 1 else [{}]
            lines += [
                {"layer": layer, "position": position, **name, "estimated_difference": number}
                for name, number in zip(names, numbers, strict=True)
            ]
    return pd.DataFrame(sorted(lines, key=lambda line: (line["layer"], line["position"], line.get("head", 0))))
