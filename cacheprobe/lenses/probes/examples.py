"""Collects the examples that probes are fitted on, from a trace of task prompts or from vectors with labels, and checks
them."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.records import Request
from cacheprobe.lenses.probes.ridge import joined_groups
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.trace.trace import Trace

LEAST = 20
"""Default minimum number of groups of each class at a place."""


class ProbeError(ValueError):
    """Raised if a probe cannot be fitted as requested, or if the model does not perform the task."""


def chosen_pairs(
    held_sites: Sequence[str], held_layers: Sequence[int], sites: "Iterable[str] | None", layers: "Iterable[int] | None"
) -> list[tuple[str, int]]:
    """Returns a list of (site, layer): every requested site with every requested layer; None requests all captured
    ones.

    Raises: ProbeError for a site or layer that was not captured, or if the list would be empty.
    """
    sites, layers = list(held_sites if sites is None else sites), list(held_layers if layers is None else layers)
    if unknown := [site for site in sites if site not in held_sites]:
        raise ProbeError(f"there is no site {unknown[0]!r} to probe; there are {', '.join(held_sites) or 'none'}")
    if unknown := [layer for layer in layers if layer not in held_layers]:
        raise ProbeError(f"there is no layer {unknown[0]} to probe; there are {list(held_layers)}")
    if not sites or not layers:
        raise ProbeError("there is nothing to probe: no site or no layer was kept, or asked for")
    return [(site, layer) for site in sites for layer in layers]


def require_enough(lines: pd.DataFrame, place: Hashable, folds: int, least: int) -> None:
    """Checks that the examples of one place suffice for a probe: two classes or more, `least` groups of each class, and
    `folds` groups in all.

    lines: the examples of this place, with label and group.
    Raises: ProbeError if not.
    """
    labels = lines.label.astype(str)
    classes = labels.nunique()
    if classes < 2:
        raise ProbeError(f"place {place}: all {len(lines)} examples are of class {labels.iloc[0]!r}; nothing to tell")
    groups = lines.assign(label=labels).groupby("label").group.nunique()
    if (groups < least).any():
        raise ProbeError(
            f"place {place}: {len(lines)} examples of {classes} classes; class {groups.idxmin()!r} has {groups.min()} "
            f"groups of prompts, {least} are needed; give more prompts (those that begin alike are one group), or "
            "least= fewer"
        )
    if lines.group.nunique() < folds:
        raise ProbeError(f"place {place}: {lines.group.nunique()} groups cannot be split into {folds} folds")


def require_above_chance(trace: Trace) -> dict[str, float]:
    """Checks that the 95 % interval of a run's accuracy on its task lies above chance. Returns
    `trace.meta["behaviour"]`, a dict with accuracy, accuracy_low, accuracy_high, chance and the numbers of examples.

    Raises: ProbeError otherwise, and for a run without a task, or with tasks whose answers differ.
    """
    behaviour = trace.meta["behaviour"]
    if behaviour is None:
        raise ProbeError("the run has no accuracy: its prompts are of no task, or of tasks with different answers")
    low, chance = behaviour["accuracy_low"], behaviour["chance"]
    if low <= chance:
        raise ProbeError(
            f"{trace.fingerprint['model']} answers {behaviour['accuracy']:.0%} of {behaviour['num_examples']} prompts "
            f"right (95 % from {low:.0%}), chance is {chance:.0%}: what its states hold of the "
            "task cannot be asked; use a model that does it"
        )
    return behaviour


def labelled(trace: Trace, at: "str | Iterable[int]" = "event", *, model: CachedLM | None = None) -> pd.DataFrame:
    """Returns a DataFrame of prompt rows with the task's true state: one line for each request and place (operation or
    position).

    at: "event", the token that completes the words of the k-th operation, k = 1, 2, ...; or positions, counted from 0
    at the first token of the text, or from -1 at the last token of the prompt. The statement of the initial state is no
    place, because all prompts with the same statement have the same model state at that token.
    Columns: request_id, place (k, or the requested position), position (absolute), row, label, word (the words of the
    newest operation), group: prompts that share their text up to one of the places are in one group.
    Raises: ValueError for requests without a task, positions that do not exist, and places without a true state.
    """
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use labelled(trace, model=...)")
    if isinstance(at, str) and at != "event":
        raise ValueError(f"unknown places at={at!r}; give 'event' or a list of positions such as [-1]")
    at = at if isinstance(at, str) else list(at)
    canonical = trace.row_table[trace.row_table.status == "committed"]
    rows = canonical.set_index(["request_id", "position"]).row
    records, prompts, texts = [], [], []
    for request in trace.requests:
        if request.example is None:
            raise ValueError(
                f"request {request.request_id} comes from no task, so its true state is not known; give fit() labels"
            )
        ids = tuple(request.prompt_token_ids or ())
        states = request.example.states_after_tokens(model.tokenizer)
        first = len(ids) - len(states)  # pads and special tokens stand in front
        for place, token, label, word in _places(request, model.tokenizer, states, at):
            row = int(rows.loc[(request.request_id, first + token)])
            records.append((request.request_id, place, first + token, row, label, word))
            prompts.append(ids[first:])
            texts.append(ids[first : first + token + 1])
    table = pd.DataFrame(records, columns=["request_id", "place", "position", "row", "label", "word"])
    return table.assign(group=joined_groups(prompts, texts))


def _places(
    request: Request, tokenizer: LiveTokenizer, states: Sequence[str | None], at: "str | Sequence[int]"
) -> Iterator[tuple[int, int, str, str]]:
    """Yields (place, token index in the text, true state, words of the newest operation) for each place of one request.
    Raises: ValueError for a position that does not exist or has no true state."""
    example = request.example
    text, spans = example.prompt_text(tokenizer), example.rendering(tokenizer).operations
    completed = example.completing_tokens(tokenizer)[1]
    words = [text[start:end] for start, end in spans]
    if isinstance(at, str):
        yield from zip(range(1, len(spans) + 1), completed, example.states[1:], words, strict=True)
        return
    for position in at:
        token = position if position >= 0 else len(states) + position
        if not 0 <= token < len(states):
            raise ValueError(
                f"request {request.request_id} has no position {position}: its text has {len(states)} tokens"
            )
        state = states[token]
        if state is None:
            raise ValueError(f"request {request.request_id}: no state holds yet at position {position}")
        newest = sum(index <= token for index in completed)
        yield position, token, state, words[newest - 1] if newest else ""


@torch.inference_mode()
def embeddings(trace: Trace, table: pd.DataFrame, model: CachedLM | None = None) -> Tensor | None:
    """Returns baseline features [n, 2m] for the n lines of the `labelled` table: the input of block 0 at the token,
    joined with its running mean up to that token. None for a model that adds thoughts before block 0."""
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use embeddings(trace, table, model)")
    if 0 in model.injected_layers:
        return None
    by_request = {request.request_id: request for request in trace.requests}
    out: dict[int, Tensor] = {}
    for request_id in table.request_id.unique():
        ids = torch.tensor([by_request[request_id].prompt_token_ids])
        inputs = feed(model, ids, [("pre", 0)], num_layers=1).states["pre", 0][0].float().cpu()
        running_mean = inputs.cumsum(0) / torch.arange(1, len(inputs) + 1)[:, None]
        out[request_id] = torch.cat([inputs, running_mean], dim=1)
    return torch.stack([out[line.request_id][line.position] for line in table.itertuples()])


LabelledStates = Mapping[tuple[str, int], Tensor]
"""Vectors [n, m], keyed by (site, layer)."""


@dataclass(frozen=True)
class Examples:
    """Holds the n examples that probes are fitted on: labels and groups, states by (site, layer), and baseline
    features."""

    about: pd.DataFrame
    """One line for each example: label, group, place and, if known, word."""
    states: LabelledStates
    kind: str
    """"event", "position" or "given": how the examples were chosen."""
    untrained: LabelledStates | None
    """States of the same examples in an untrained model; None if not given."""
    embedding: Tensor | None
    """Features [n, k] of the words alone; None if there are none."""

    @property
    def places(self) -> list[Hashable]:
        """The distinct places (such as operation numbers or positions), in the order of their first example."""
        return list(self.about.place.drop_duplicates())


def of_trace(
    trace: Trace,
    at: "str | Iterable[int]",
    sites: "Iterable[str] | None",
    layers: "Iterable[int] | None",
    untrained: "Trace | LabelledStates | None",
    embedding: Tensor | None,
) -> Examples:
    """Returns the probe examples of a trace of task prompts: labels from the task, and the captured states of their
    rows.

    at: "event", the end of each operation, or positions of tokens, as in `labelled`.  untrained, embedding: baselines,
    as in `fit`.
    Raises: ProbeError for a site or layer that was not captured, and for an untrained run of other prompts; ValueError
    as in `labelled`.
    """
    at = at if isinstance(at, str) else list(at)
    lines = labelled(trace, at)
    pairs = chosen_pairs(trace.store.sites, trace.store.layers, sites, layers)
    states = {pair: trace.vectors(*pair, lines) for pair in pairs}
    bare = None if untrained is None else _aligned(untrained, lines, at, pairs)
    embedding = embeddings(trace, lines) if embedding is None else embedding
    return Examples(lines, states, "event" if isinstance(at, str) else "position", bare, embedding)


def of_vectors(
    vectors: LabelledStates,
    given: "Mapping[str, Iterable[object] | None]",
    at: "str | Iterable[int]",
    sites: "Iterable[str] | None",
    layers: "Iterable[int] | None",
    untrained: "Trace | LabelledStates | None",
    embedding: Tensor | None,
) -> Examples:
    """Returns the probe examples for vectors [n, m] by (site, layer). given: each example's label, group, place and
    word, by these names; None if they are not given.

    Raises: ProbeError if labels or groups are missing, if labels, groups, places and words differ in number, if that
    number is not n, and for a site or layer that no key of `vectors` has.
    """
    if given["label"] is None or given["group"] is None:
        raise ProbeError("vectors need labels, and groups: what stands in one group is never split, such as a prompt")
    lists = {name: list(values) for name, values in given.items() if values is not None}
    if len({len(values) for values in lists.values()}) > 1:
        numbers = ", ".join(f"{len(values)} {name}s" for name, values in lists.items())
        raise ProbeError(f"there are {numbers}; give one of each for every vector")
    about = pd.DataFrame(lists)
    if given["place"] is None:
        about.insert(2, "place", "all")
    held = tuple(sorted({site for site, _ in vectors}))
    wanted = chosen_pairs(held, tuple(sorted({layer for _, layer in vectors})), sites, layers)
    states = {pair: vectors[pair] for pair in wanted if pair in vectors}
    for (site, layer), kept in states.items():
        if kept.ndim != 2 or len(kept) != len(about):
            raise ProbeError(
                f"states of {site} at layer {layer} are {list(kept.shape)}; {len(about)} labels need [n, m] with "
                f"n = {len(about)}"
            )
    bare = None if untrained is None else _aligned(untrained, about, at, list(states))
    return Examples(about, states, "given", bare, embedding)


def _aligned(
    untrained: "Trace | LabelledStates",
    lines: pd.DataFrame,
    at: "str | Iterable[int]",
    pairs: Sequence[tuple[str, int]],
) -> LabelledStates:
    """Returns the untrained model's states of the same examples, as a dict by (site, layer). Raises: ProbeError if the
    run is of other prompts, or states are missing."""
    if isinstance(untrained, Trace):
        same = labelled(untrained, at)
        columns = ["request_id", "place", "position", "label", "word"]
        if len(same) != len(lines) or not same[columns].equals(lines[columns]):
            raise ProbeError("the untrained model's run is of other prompts; run it on the same examples")
        untrained = {(site, layer): untrained.vectors(site, layer, same) for site, layer in pairs}
    for pair in pairs:
        if pair not in untrained or len(untrained[pair]) != len(lines):
            raise ProbeError(f"the untrained model's states have no {pair[0]} of layer {pair[1]} for every example")
    return untrained
