"""What an algorithm for S3 shows of itself: what probes read at which layer, how far a patched prefix must reach, and
what is left beyond the trained length.

Source: Li, Guo and Andreas 2025 (arXiv 2503.02854): probes of state and parity, prefix patching with texts that differ
in their first action alone, and accuracy by length.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch

import cacheprobe as cp
from cacheprobe.edits.patching.cells import Edit, cell, read, run_cells
from cacheprobe.edits.patching.grid import difference
from cacheprobe.edits.patching.pairs import run_pair
from cacheprobe.lenses.probes.examples import embeddings
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.tasks import annotate_all
from cacheprobe.tasks.base import Example
from cacheprobe.tasks.permutations import group_question, parity
from cacheprobe.training.thinking.recurrent import best, own_thoughts

ACTIONS = tuple("".join(order) for order in permutations("123"))
KINDS = ("same", "other")
"""Parity of the corrupted text's first action, compared with the clean one's."""
SHUFFLES = 3
EVEN = frozenset(action for action in ACTIONS if parity(action) == parity(ACTIONS[0]))
OTHER_HALVES = tuple(
    frozenset((ACTIONS[0], *more)) for more in combinations(ACTIONS[1:], 2) if frozenset((ACTIONS[0], *more)) != EVEN
)
"""The nine ways to halve the six states that are not the parity: as few classes, and no shorter way to them than the
state. Whoever knows the parity alone is right about two of three."""


def probe_lines(trace: cp.Trace, bare: cp.Trace, places: Sequence[int], least: int, seed: int) -> list[dict[str, Any]]:
    """Held-out accuracy of the state, and of its parity, in S by layer after so many operations, beside controls.

    bare: the run of the untrained model on the same prompts.  places: numbers of operations.
    Each line has the columns of `cp.probes.ProbeResult`, label ("state" or "parity") and shuffled: the mean
    accuracy of the same probe on the same labels in random order. Lines of the label "halves" are of OTHER_HALVES:
    the mean accuracy of nine probes, and as low and high the worst and the best of them.
    """
    parts = []
    for place in places:
        about = cp.probes.labelled(trace, at=[place])
        layers = trace.store.layers
        states, without = (
            {("S", layer): t.vectors("S", layer, a) for layer in layers}
            for t, a in ((trace, about), (bare, cp.probes.labelled(bare, at=[place])))
        )
        given = dict(groups=about.group, places=about.place, least=least, seed=seed)
        alone = dict(untrained=without, embedding=embeddings(trace, about))
        for label, values in (("state", list(about.label)), ("parity", [parity(s) for s in about.label])):
            found = cp.probes.fit(states, values, words=about.word, **alone, **given).table
            draws = np.random.default_rng(seed)
            blind = [
                cp.probes.fit(states, draws.permutation(np.array(values)), **given).table.accuracy
                for _ in range(SHUFFLES)
            ]
            parts.append(found.assign(label=label, shuffled=np.mean(blind, axis=0)))
        parts.append(_halves(states, about.label, given))
    return [line for part in parts for line in part.to_dict("records")]


def _halves(states: dict[Any, torch.Tensor], said: Sequence[str], given: dict[str, Any]) -> pd.DataFrame:
    each = [cp.probes.fit(states, [s in half for s in said], **given).table for half in OTHER_HALVES]
    accuracy = np.array([table.accuracy for table in each])
    shared = each[0][["site", "layer", "at", "place", "examples", "groups", "classes", "majority"]]
    low, mean, high = accuracy.min(0), accuracy.mean(0), accuracy.max(0)
    return shared.assign(label="halves", accuracy=mean.round(4), low=low, high=high)


def pairs_of(examples: Sequence[Example], kind: str) -> Iterator[tuple[Example, Example]]:
    """Each text with one that differs in its first action alone, whose parity is the "same" or the "other"."""
    for i, example in enumerate(examples):
        actions = (example.states[0], *example.events)
        others = [a for a in ACTIONS if a != actions[0] and (parity(a) == parity(actions[0])) == (kind == "same")]
        yield example, Example(group_question([Random(f"{kind}/{i}").choice(others), *actions[1:]]))


def patch_lines(lm: ThinkingLM, examples: Sequence[Example]) -> tuple[list[dict[str, Any]], float]:
    """Mean NLD of prefixes by layer and position, over the pairs whose texts are both answered rightly.

    Of a plain model, whose texts end with their last action. Also the largest change of the answers' logit difference,
    as a share of the pair's, that a run's own states make where they are put in again: the patch that is none.
    """
    tables, own = [], 0.0
    for kind in KINDS:
        for clean, corrupt in pairs_of(examples, kind):
            ids = [lm.encode(" ".join((e.states[0], *e.events)), add_special_tokens=False) for e in (clean, corrupt)]
            answer = tuple(_token(lm, e.states[-1]) for e in (clean, corrupt))
            runs = run_pair(lm, *ids, ())
            if any(int(run.logits.argmax()) != right for run, right in zip(runs, answer, strict=True)):
                continue
            grid = cp.patching.prefix(lm, *ids, answer=answer, progress=False)
            tables.append(grid.table.assign(kind=kind))
            edits = [cell([Edit(("S", n), (0,), runs[1].at("S", n)[:1])]) for n in range(lm.n_layers)]
            low, high = (difference(read(run.logits[None], answer)[0]) for run in (runs[1], runs[0]))
            again = read(run_cells(lm, runs[1], edits), answer)
            own = max(own, *(abs(difference(said) - low) / abs(high - low) for said in again))
    return _mean_lines(tables), own


def thought_patch_lines(
    lm: ThinkingLM, examples: Sequence[Example], capacity: int
) -> tuple[list[dict[str, Any]], float]:
    """The same of a model that thinks, at the end of each chunk."""
    tables, own = [], 0.0
    for kind in KINDS:
        for pair in pairs_of(examples, kind):
            answer = tuple(_token(lm, e.states[-1]) for e in pair)
            said = cp.run(lm, pair, capacity=capacity, max_new_tokens=1, progress=False)
            if any(said.committed(i)[0] != right for i, right in enumerate(answer)):
                continue
            grid, changed = thought_prefixes(lm, *pair, answer, capacity)
            tables.append(grid.assign(kind=kind))
            own = max(own, changed)
    return _mean_lines(tables), own


def thought_prefixes(
    lm: ThinkingLM, clean: Any, corrupt: Any, answer: tuple[int, int], capacity: int
) -> tuple[pd.DataFrame, float]:
    """NLD of the corrupted run with the clean run's S of all positions up to the end of a chunk, by layer and position.

    Each cell is a run under interventions, in which whatever is thought after a patched chunk follows from it. Also
    the largest NLD of the run's own states put in again.
    """
    settings = dict(capture="S", capacity=capacity, max_new_tokens=1, progress=False)
    base = cp.run(lm, [clean, corrupt], **settings)
    n, layers = base.requests[0].num_prompt_tokens, range(lm.n_layers)
    cells = [(layer, p) for layer in layers for p in range(lm.chunk - 1, n, lm.chunk)]
    patches = [(*at, 0) for at in cells] + [(layer, n - 1, 1) for layer in layers]
    edits = [
        cp.interventions.replace(
            base.states("S", layer, source)[: p + 1], request_id=i, site="S", layer=layer, positions=range(p + 1)
        )
        for i, (layer, p, source) in enumerate(patches)
    ]
    trace = cp.run(lm, [corrupt] * len(patches), interventions=edits, **settings)
    high, low = (_apart(lm, base, i, n, answer) for i in (0, 1))
    apart = [_apart(lm, trace, i, n, answer) for i in range(len(patches))]
    table = pd.DataFrame(cells, columns=["layer", "position"])
    table["nld"] = [(one - low) / (high - low) for one in apart[: len(cells)]]
    table["flip"] = [(one > 0) != (low > 0) for one in apart[: len(cells)]]
    return table, max(abs((one - low) / (high - low)) for one in apart[len(cells) :])


def _apart(lm: ThinkingLM, trace: cp.Trace, request_id: int, n: int, answer: tuple[int, int]) -> float:
    """How much likelier, in nats, the first answer is than the second behind a prompt of n tokens."""
    logits = lm.read_out(trace.states("S", lm.n_layers - 1, request_id)[n - 1]).double()
    return float(logits[answer[0]] - logits[answer[1]])


def _mean_lines(tables: Sequence[pd.DataFrame]) -> list[dict[str, Any]]:
    if not tables:
        return []
    by = pd.concat(tables).groupby(["kind", "layer", "position"])
    return by.agg(nld=("nld", "mean"), flips=("flip", "sum"), pairs=("nld", "size")).reset_index().to_dict("records")


def _token(lm: ThinkingLM, state: str) -> int:
    (token_id,) = lm.encode(state, add_special_tokens=False)
    return token_id


@torch.inference_mode()
def length_lines(lm: ThinkingLM, examples: Sequence[Example], places: Sequence[int]) -> list[dict[str, Any]]:
    """What is said of the state after so many operations: by the plain model at the action, or by the newest thought.

    Columns: operations, texts, right, parity_right, and parity_right_of_wrong: of the answers that name a wrong state.
    A guess among the wrong states has the right parity in two of five.
    """
    texts = [" ".join((e.states[0], *e.events)) for e in examples]
    if lm.config.thinks:
        items = annotate_all(examples, lm.tokenizer, lm.chunk, lm.record["form"])
        thoughts = own_thoughts(lm.model, [item.token_ids for item in items])
        front = [len(item.token_ids) - len(e.events) - 3 for item, e in zip(items, examples, strict=True)]
        said = [
            {k: own[(pads + k) // lm.chunk][0] for k in places if _ends_a_chunk(lm, pads + k)}
            for own, pads in zip(thoughts, front, strict=True)
        ]
    else:
        chosen = best(lm.model(torch.tensor([lm.encode(t, add_special_tokens=False) for t in texts]))[0])
        said = [{k: int(row[k]) for k in places} for row in chosen]
    lines = []
    for k in places:
        heard = [(lm.decode([own[k]]).strip(), e.states[k]) for own, e in zip(said, examples, strict=True) if k in own]
        known = [(word, state) for word, state in heard if word in ACTIONS]
        wrong = [(word, state) for word, state in known if word != state]
        lines.append(
            {
                "operations": k,
                "texts": len(heard),
                "right": sum(word == state for word, state in heard),
                "parity_right": sum(parity(word) == parity(state) for word, state in known),
                "wrong": len(wrong),
                "parity_right_of_wrong": sum(parity(word) == parity(state) for word, state in wrong),
            }
        )
    return [line for line in lines if line["texts"]]


def _ends_a_chunk(lm: ThinkingLM, position: int) -> bool:
    return (position + 1) % lm.chunk == 0
