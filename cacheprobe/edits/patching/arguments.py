"""Reads and checks the arguments of a patching grid before the model runs: sites, layers, positions, prompts and
answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypedDict

from cacheprobe.core.hook_names import HEADS, RECURRENT
from cacheprobe.core.tokens import tokens_after
from cacheprobe.core.values import KnownKeywords, listed, require_one_of, whole_number
from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts import state_shapes
from cacheprobe.models.prompts import Prompt, as_token_ids

RESIDUAL_SITES = ("pre", "S")
PATCHED_SITES = (*RESIDUAL_SITES, "T", "C")


class GridOptions(TypedDict, total=False):
    """Declares the keyword arguments that the three functions of `cp.patching` share."""

    layers: "Iterable[int] | None"
    """Layers of the grid; None for all."""
    positions: "Iterable[int] | None"
    """Positions of the grid; None for all."""
    store: "str | Path | None"
    """A folder for finished cells, from which the same call resumes."""
    path: str
    """"plain", "bridge" or "auto", as in `cp.run`."""
    progress: bool
    """Whether to draw a progress bar on a terminal."""


@dataclass(frozen=True)
class GridConfig(KnownKeywords):
    """Holds the options of one patching grid (layers, positions, store, path, progress), with defaults."""

    layers: "Iterable[int] | None" = None
    positions: "Iterable[int] | None" = None
    store: "str | Path | None" = None
    path: str = "auto"
    progress: bool = True


def as_pair(model: CachedLM, clean: Prompt, corrupt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (token ids of the clean prompt, token ids of the corrupted prompt).

    Raises: ValueError for prompts of different length, equal prompts, and a prompt that `as_token_ids` refuses.
    """
    pair = as_token_ids(model, clean, "clean"), as_token_ids(model, corrupt, "corrupted")
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"the clean and the corrupted prompt have {len(pair[0])} and {len(pair[1])} tokens, so their positions do "
            "not mean the same; use prompts of one length"
        )
    if pair[0] == pair[1]:
        raise ValueError("the clean and the corrupted prompt are the same, so nothing would be patched; change a token")
    return pair


def patched_place(site: str, heads: bool) -> str:
    """Returns the site whose states are patched: "z" for single heads at T, else `site`. Raises: ValueError for a site
    that `activation` does not support, and for heads at a site other than T and recurrent."""
    require_one_of("site", site, (*PATCHED_SITES, RECURRENT))
    if heads and site not in ("T", RECURRENT):
        raise ValueError(f"site {site} has no heads, only T and {RECURRENT} do; leave out heads=, or use site='T'")
    return HEADS if heads and site == "T" else site


def as_layers(layers: "Iterable[int] | None", model: CachedLM, sites: Iterable[str] = ()) -> tuple[int, ...]:
    """Returns the layers of the grid as a tuple; None means all, or those with a recurrent state if `sites` has it.
    Raises: ValueError for no layer, an unknown one, or one without the recurrent state of `sites`."""
    if RECURRENT not in sites:
        return _numbers(layers, model.n_layers, "layer", "the model")
    there = tuple(state_shapes(model))
    if not there:
        raise ValueError(f"{model.name} has no recurrent states to patch; choose another site")
    chosen = there if layers is None else _numbers(layers, model.n_layers, "layer", "the model")
    if bad := [layer for layer in chosen if layer not in there]:
        raise ValueError(f"layer {bad[0]} has no recurrent state; layers with one: {', '.join(map(str, there))}")
    return chosen


def as_positions(positions: "Iterable[int] | None", length: int) -> tuple[int, ...]:
    """Returns the positions of the grid as a tuple; None means all. Raises: ValueError for an empty list, or a
    position not in 0 to length - 1."""
    return _numbers(positions, length, "position", "the prompt")


def _numbers(given: "Iterable[int] | None", count: int, noun: str, whole: str) -> tuple[int, ...]:
    """Returns the distinct given numbers as a tuple; 0 to count - 1 for None. Raises: ValueError for an empty list, or
    a number out of range."""
    chosen = range(count) if given is None else [whole_number(f"{noun}s: a {noun}", x) for x in listed(given)]
    if not chosen:
        raise ValueError(f"there is no {noun}, so the grid is empty; leave out {noun}s= for all")
    if bad := [x for x in chosen if not 0 <= x < count]:
        raise ValueError(f"{noun} {bad[0]} lies outside {whole}, which has {noun}s 0 to {count - 1}")
    return tuple(dict.fromkeys(chosen))


Answer: TypeAlias = str | int | Sequence[int]
"""An answer as the user gives it: text, a token id, or the ids of several tokens."""


def as_answer(model: CachedLM, answer: Answer, prompt: Sequence[int]) -> tuple[int, ...]:
    """Returns the token ids of an answer, one or several. Text is taken as it follows the prompt directly, with its
    leading space if it has one.

    prompt: the token ids before the answer.
    Raises: ValueError for text as the function of `tokens_after`, for anything else that is no token id, and for an id
    outside the vocabulary.
    """
    if isinstance(answer, str):
        return tokens_after(model.decode(prompt), partial(model.encode, add_special_tokens=False), model.decode)(answer)
    ids = tuple(whole_number("answer: a token id", one, at_least=0) for one in listed(answer))
    if not ids or max(ids) >= model.d_vocab:
        raise ValueError(f"answer: give text, or token ids below {model.d_vocab}, got {list(ids)}")
    return ids


def one_token(model: CachedLM, answer: Answer, prompt: Sequence[int]) -> int:
    """Returns the id of an answer that must be a single token, because one number is computed of it. Arguments and
    errors: as in `as_answer`; ValueError for several tokens, too."""
    ids = as_answer(model, answer, prompt)
    if len(ids) != 1:
        raise ValueError(
            f"{answer!r} is {len(ids)} tokens, {model.token_texts(ids)}, and one is needed here; give one of the ids "
            f"{list(ids)}. cp.analysis.answer_logprobs and cp.patching score whole answers"
        )
    return ids[0]


def require_room(model: CachedLM, prompt: Sequence[int], answers: Iterable[Sequence[int]]) -> None:
    """Raises: ValueError if the prompt and an answer are longer than the model's context."""
    if (length := len(prompt) + max(map(len, answers)) - 1) > model.n_ctx:
        raise ValueError(f"prompt and answer have {length} tokens, the model's context is {model.n_ctx}; shorten them")
