"""Reads states of a trace by inserting them into another prompt, at another layer or in another model."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, TypedDict, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import require_known_options, whole_number
from cacheprobe.edits.patching.arguments import as_layers
from cacheprobe.lenses.insertion import HEIGHT, IDENTITY_PROMPT, LinearMap, TargetPrompt, continued, inserted, mapped
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import usable
from cacheprobe.models.prompts import Prompt, as_token_ids
from cacheprobe.ops.readout import Readout, read_logits
from cacheprobe.trace.recording.stored_states import require_model
from cacheprobe.trace.tables.build import texts_of

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

_ABOUT = ("row", "request_id", "step", "phase", "role", "status", "position")


class TargetOptions(TypedDict, total=False):
    """Declares the keyword arguments of `patchscope` that say where a state is inserted, and what is then read."""

    prompt: Prompt
    position: int | str
    target_layers: "int | Iterable[int] | None"
    linear_map: "LinearMap | None"
    target_model: CachedLM | None
    max_new_tokens: int


@torch.inference_mode()
def patchscope(
    model: CachedLM,
    trace: "Trace",
    rows: "pd.DataFrame | Sequence[int]",
    *,
    layers: "Iterable[int] | None" = None,
    site: str = "S",
    progress: bool = True,
    **target: Unpack[TargetOptions],
) -> pd.DataFrame:
    """Inserts recorded states into a prompt, and returns what the model then says: a DataFrame with one line for each
    row, layer and target layer.

    model: the model of the trace.  rows: from `trace.rows(...)`, or row numbers; of any status, rejected drafts
    included.
    prompt: text, token ids or a task example; by default words that are repeated.  position: where in it the state is
    inserted, by default the last token; negative numbers count from the end. Or text that is one token of the prompt,
    such as "x".
    layers: those whose states are read; by default all captured ones. Layers that did not run for a row have no line.
    target_layers: the layer or layers after which each state is inserted; by default the state's own layer.
    linear_map: applied to a state before it is inserted: a function of states [n, m], a matrix [k, m], or nn.Linear.
    target_model: reads the prompt instead of `model`; its states may have another width k.
    max_new_tokens: number of tokens to generate greedily, by default 1.
    Columns: row, request_id, step, phase, role, status, position (of the source row); read_token_id and read_token, the
    row's input token; layer, target_layer; token_id, token, logprob_nats, entropy_nats, top_token_ids,
    top_tokens and top_logprob_nats, the prediction after the prompt; text, the generated tokens up to a stop token.
    Raises: ValueError for a site other than S, states that were not kept or are no numbers, a layer, position or
    placeholder that is not there, states of another width than the target model's, and a trace of another model;
    ModelError for a target model with more memory than keys and values, such as a Thinking States model.
    Source: Ghandeharioun et al. 2024 (arXiv 2401.06102), section 3; the default prompt is that of section 4.1.
    Twin: tests.twins.lenses_slowly.continued_slowly, a plain forward for each state and token, close(1e-5) in float32.
    """
    if site != "S":
        raise ValueError(
            f"patchscope inserts residual streams, got site {site!r}; T and C are only parts of one, so use site='S'"
        )
    require_known_options(target, TargetOptions.__annotations__)
    target_layers, max_new_tokens = target.get("target_layers"), target.get("max_new_tokens", 1)
    model = require_model(trace, model)
    reader = usable(target.get("target_model") or model, "auto")
    ids = _token_ids(reader, target.get("prompt", IDENTITY_PROMPT), max_new_tokens)
    place = _position(reader, ids, target.get("position", -1))
    source_layers = trace.store.layers if layers is None else as_layers(layers, model)
    given = target_layers if target_layers is None or isinstance(target_layers, Iterable) else [target_layers]
    at_layers = None if given is None else as_layers(given, reader)
    if at_layers is None and (missing := [layer for layer in source_layers if layer >= reader.n_layers]):
        raise ValueError(
            f"layer {missing[0]} is not in {reader.name}, which has layers 0 to {reader.n_layers - 1}; "
            "give target_layers="
        )
    table, states = _sources(trace, rows, source_layers)
    states = mapped(states, target.get("linear_map"), reader, "those of the trace")
    lines = [(i, layer if at is None else at) for i, layer in enumerate(table.layer) for at in at_layers or (None,)]
    index = torch.tensor([i for i, _ in lines])
    at = torch.tensor([layer for _, layer in lines])
    table = table.iloc[index.numpy()].assign(target_layer=at.numpy()).reset_index(drop=True)
    filled = TargetPrompt.of(reader, ids, place, min(HEIGHT, len(lines)), max_new_tokens)
    top_k = trace.meta["capture"]["top_k"]
    with Progress(len(lines), "reading", "states", enabled=progress) as bar:
        readout, texts = _readings(filled, states[index], at, top_k, max_new_tokens, bar)
    return _with_readings(table, readout, texts, reader)


def _token_ids(model: CachedLM, prompt: Prompt, max_new_tokens: int) -> tuple[int, ...]:
    """Returns the token ids of the target prompt. Raises: ValueError for a prompt that `as_token_ids` refuses, for no
    new tokens, and for more than the model's context."""
    ids = as_token_ids(model, prompt, "target")
    whole_number("max_new_tokens", max_new_tokens, at_least=1)
    if len(ids) + max_new_tokens - 1 > model.n_ctx:
        raise ValueError(
            f"the target prompt's {len(ids)} tokens and {max_new_tokens} new ones exceed {model.name}'s context of "
            f"{model.n_ctx}; shorten it, or generate less"
        )
    return ids


def _position(model: CachedLM, ids: Sequence[int], position: "int | str") -> int:
    """Returns a position of the prompt, counted from 0. position: a number, or the text of a token, whose white space
    at the ends is ignored. Raises: ValueError if it is not there, or there several times."""
    texts = model.token_texts(ids)
    if isinstance(position, str):
        found = [p for p, text in enumerate(texts) if text.strip() == position.strip()]
        if len(found) != 1:
            where = f"{len(found)} times, at {', '.join(map(str, found))}" if found else "nowhere"
            raise ValueError(
                f"position={position!r} stands {where} among the prompt's tokens {texts}; give a token that stands "
                "there once, or a number"
            )
        return found[0]
    if not -len(ids) <= (number := whole_number("position", position)) < len(ids):
        raise ValueError(f"position {number} lies outside the target prompt, which has positions 0 to {len(ids) - 1}")
    return number % len(ids)


def _sources(
    trace: "Trace", rows: "pd.DataFrame | Sequence[int]", layers: Sequence[int]
) -> tuple[pd.DataFrame, Tensor]:
    """Returns (a table with one line for each row and layer that ran, their states [n, m]). Raises: ValueError for
    states that were not kept, and for none."""
    numbers = rows["row"].tolist() if isinstance(rows, pd.DataFrame) else [int(row) for row in rows]
    known = trace.row_table.set_index("row", drop=False)
    if unknown := [row for row in numbers if row not in known.index]:
        raise ValueError(f"the trace has no row {unknown[0]}; take rows from trace.rows()")
    chosen = known.loc[numbers].reset_index(drop=True)
    lines = [(i, layer) for i, layer in product(range(len(chosen)), layers) if layer < chosen.num_layers[i]]
    if not lines:
        raise ValueError("there is nothing to read: no row, or no layer that ran for the rows, was asked for")
    table = chosen.iloc[[i for i, _ in lines]].assign(layer=[layer for _, layer in lines]).reset_index(drop=True)
    states: list[Tensor] = [torch.empty(0)] * len(lines)
    for layer, group in table.groupby("layer"):
        for i, state in zip(group.index, trace.vectors("S", int(layer), group.row.tolist()), strict=True):
            states[i] = state
    return table, torch.stack(states)


def _readings(
    target: TargetPrompt, states: Tensor, layers: Tensor, top_k: int, max_new_tokens: int, bar: Progress
) -> tuple[Readout, list[list[int]]]:
    """Returns (the Readout of the prediction for each state, the generated token ids of each)."""
    parts: list[Readout] = []
    texts: list[list[int]] = []
    for places, last in inserted(target, states, layers):
        no_target = torch.full((len(last),), -1, device=last.device)
        readout = read_logits(target.model.read_out(last), no_target, top_k)
        parts.append(Readout(*(column.cpu() for column in readout)))
        texts += continued(target, parts[-1].top_token_ids[:, 0].tolist(), max_new_tokens)
        bar.advance(len(places))
    return Readout(*(torch.cat(column) for column in zip(*parts, strict=True))), texts


def _with_readings(
    table: pd.DataFrame, readout: Readout, texts: Sequence[Sequence[int]], model: CachedLM
) -> pd.DataFrame:
    """Returns the table of `patchscope`. Raises: ValueError if a prediction is not finite."""
    is_number = torch.stack([readout.entropy_nats, readout.top_logprob_nats[:, 0]]).isfinite().all(0)
    if not bool(is_number.all()):
        line = table.iloc[int((~is_number).nonzero()[0, 0])]
        raise ValueError(
            f"request {line.request_id} step {line.step} layer {line.layer} position {line.position}: the prediction "
            "is NaN or infinite; leave out this row or layer"
        )
    top = readout.top_token_ids.numpy()
    stops = set(model.stop_token_ids)
    ends = [next((i for i, token_id in enumerate(text) if token_id in stops), len(text)) for text in texts]
    return pd.DataFrame(
        {
            **{name: table[name] for name in _ABOUT},
            "read_token_id": table.token_id,
            "read_token": table.token,
            "layer": table.layer,
            "target_layer": table.target_layer,
            "token_id": top[:, 0],
            "token": texts_of(np.asarray(top[:, 0]), model.token_texts),
            "logprob_nats": readout.top_logprob_nats[:, 0].numpy(),
            "entropy_nats": readout.entropy_nats.numpy(),
            "top_token_ids": list(top),
            "top_tokens": [model.token_texts(ids) for ids in top.tolist()],
            "top_logprob_nats": list(readout.top_logprob_nats.numpy()),
            "text": [model.decode(text[:end]) for text, end in zip(texts, ends, strict=True)],
        }
    )
