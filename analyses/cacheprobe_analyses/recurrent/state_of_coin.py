"""Reads and exchanges the recurrent state of a model of `parity_models`, with `cp.run`."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import cacheprobe as cp
from cacheprobe.edits.interventions import swap
from cacheprobe.models.base import CachedLM
from cacheprobe_analyses.recurrent.parity_models import HEADS, TEST_SEED, texts

LAYER = 0
SEEN_BY_CONVOLUTION = 4
"""Tokens that a short convolution reads."""


def captured(live: PreTrainedModel, prompts: list[list[int]], **settings: Any) -> cp.Trace:
    """Runs prompts, keeps the recurrent states, and lets the model say one token after each prompt."""
    model: CachedLM = cp.load_model(live, products="torch")
    return cp.run(
        model, prompts, capture=cp.CaptureConfig(sites="S", heads=("recurrent",)), max_new_tokens=1, window=4,
        capacity=128, progress=False, **settings,
    )  # fmt: skip


def probed(
    live: PreTrainedModel, bare: PreTrainedModel, each: int, lengths: list[int], seed: int
) -> list[dict[str, float]]:
    """Returns how well linear probes read from the last state how the coin lay `ago` tokens ago, for 0 to 3. Each probe
    is tested on texts of lengths that it was not fitted on.

    Each line has ago, accuracy, low and high (95 %), and the controls untrained, last_tokens and shuffled (labels).
    bare: the model with random weights.  each: texts of each length.
    """
    prompts, lay, groups = [], [], []
    for length in lengths:
        tokens, lies = texts(each, length, TEST_SEED + seed)
        prompts += tokens.tolist()
        lay += lies.tolist()
        groups += [length] * each
    trained, untrained = ({("recurrent", LAYER): _last_states(one, prompts)} for one in (live, bare))
    words = torch.tensor([[2.0 * token - 1 for token in prompt[-SEEN_BY_CONVOLUTION:]] for prompt in prompts])
    draw = torch.Generator().manual_seed(seed)
    names = dict(accuracy="accuracy", low="low", high="high", untrained="untrained", last_tokens="embedding")
    lines = []
    for ago in range(SEEN_BY_CONVOLUTION):
        labels = [one[-1 - ago] for one in lay]
        fit = cp.probes.fit(trained, labels, groups, untrained=untrained, embedding=words, controls=0, seed=seed)
        shuffled = [labels[i] for i in torch.randperm(len(labels), generator=draw).tolist()]
        control = cp.probes.fit(trained, shuffled, groups, controls=0, seed=seed).table.iloc[0]
        found = {name: float(fit.table.iloc[0][column]) for name, column in names.items()}
        lines.append({"ago": float(ago), **found, "shuffled": float(control.accuracy)})
    return lines


def _last_states(live: PreTrainedModel, prompts: list[list[int]]) -> Tensor:
    """Returns [n, h * d]: the recurrent state after each prompt's last token."""
    trace = captured(live, prompts)
    return torch.stack([trace.heads("recurrent", LAYER, i)[len(p) - 1].flatten() for i, p in enumerate(prompts)])


def exchanged(live: PreTrainedModel, pairs: int, before: int, behind: int, seed: int) -> dict[str, float]:
    """Exchanges the state after `before` tokens between two texts that end alike, and returns shares of texts: right
    (answers without a change), and of answers that change (moved) if the coin lay differently in the two texts, and if
    it lay alike (moved_alike).

    behind: tokens after the exchange, the same in both texts, as are those that a convolution still reads.
    """
    start = before - SEEN_BY_CONVOLUTION
    own, lies = texts(4 * pairs, start, TEST_SEED + seed)
    shared, _ = texts(pairs, SEEN_BY_CONVOLUTION + behind, TEST_SEED + seed + 1)
    out: dict[str, float] = {}
    for name, is_other in (("moved", True), ("moved_alike", False)):
        chosen = _pairs(lies[:, -1], pairs, is_other)
        prompts = [[*own[i].tolist(), *shared[n].tolist()] for n, pair in enumerate(chosen) for i in pair]
        plain = captured(live, prompts)
        changes = [
            swap(plain, 2 * n, 2 * n + 1, site="recurrent", layer=LAYER, positions=[before - 1])
            for n in range(len(chosen))
        ]
        changed = captured(live, prompts, interventions=changes)
        said, says = ([trace.committed(i)[0] for i in range(len(prompts))] for trace in (plain, changed))
        out[name] = sum(a != b for a, b in zip(said, says, strict=True)) / len(prompts)
        if is_other:
            out["right"] = sum(a == HEADS + sum(p) % 2 for a, p in zip(said, prompts, strict=True)) / len(prompts)
    return out


def _pairs(lies: Tensor, count: int, is_other: bool) -> list[tuple[int, int]]:
    """Returns `count` pairs of texts in which the coin lies differently, or alike."""
    heads, tails = ((lies == HEADS + side).nonzero().flatten().tolist() for side in (0, 1))
    alike = list(zip(heads[::2], heads[1::2], strict=False)) + list(zip(tails[::2], tails[1::2], strict=False))
    return (list(zip(heads, tails, strict=False)) if is_other else alike)[:count]
