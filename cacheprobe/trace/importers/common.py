"""Builds a Trace from a generation that another program stored, and lists the data that the trace lacks.

No token was drafted, so every row is canonical. A row's position is that of its input token, as in all traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import HEAD_SITES
from cacheprobe.core.records import Request, SamplingParams, StepRecord
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.rows import LedgerChange, RowRecord
from cacheprobe.trace.state_store import MemoryStore
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.trace import Trace


@runtime_checkable
class Decoder(Protocol):
    """Defines the tokenizer method that an import needs: `decode`."""

    def decode(self, token_ids: Sequence[int], *, clean_up_tokenization_spaces: bool) -> str:
        """Returns the text of the given token ids."""
        ...


class ImportRefused(ValueError):
    """Raised for data that cannot be read as a trace."""


@dataclass(frozen=True)
class Generation:
    """Holds one request of another program: its prompt, its generated tokens and the captured states of each layer."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    states: Mapping[int, Tensor]
    """By layer, [n, m]: the residual stream after the block, at the first n positions of the prompt and the generated
    tokens."""
    logprobs: tuple[float, ...] = ()
    """Log-probabilities of the generated tokens, in nats; empty if unknown."""
    margins: tuple[float, ...] = ()
    """Log-probability gap, in nats, between the two best tokens of each choice; empty if unknown."""
    finish: str = "unknown"

    @property
    def num_rows(self) -> int:
        """Number of positions of this request that have states."""
        return len(next(iter(self.states.values())))


@dataclass(frozen=True)
class Origin:
    """Describes the program that made the imported generations, its model, and the data that the program does not
    store.
    """

    program: str
    name: str
    """Name of the model."""
    n_layers: int
    """Number of blocks of the model; if the model is unknown, of those below the highest imported layer."""
    missing: Mapping[str, str]
    has_steps: bool
    """Whether the program stores which passes it ran."""


def text_maker(
    model: CachedLM | None, tokenizer: Decoder | None
) -> tuple[Callable[[Sequence[int]], list[str]], Callable[[Sequence[int]], str]]:
    """Returns two functions of token ids: one gives a list with the text of each token, the other the joint text.

    If model and tokenizer are both None, a token's text is "<17>" for id 17.
    """
    if tokenizer is not None:
        return (
            lambda ids: [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids],
            lambda ids: tokenizer.decode(list(ids), clean_up_tokenization_spaces=False),
        )
    if model is not None:
        return model.token_texts, model.decode
    return lambda ids: [f"<{i}>" for i in ids], lambda ids: " ".join(f"<{i}>" for i in ids)


def imported_trace(
    generations: Sequence[Generation], origin: Origin, model: CachedLM | None, tokenizer: Decoder | None
) -> Trace:
    """Builds the Trace of generations that another program made; each generation becomes one request, numbered in
    order.

    A request's prompt is its text, special tokens included, if a tokenizer is known; else its token ids.
    """
    token_texts, decode = text_maker(model, tokenizer)
    has_text = tokenizer is not None or getattr(model, "tokenizer", None) is not None
    records = [record for number, one in enumerate(generations) for record in _rows(number, one, origin.n_layers)]
    order = sorted(range(len(records)), key=lambda i: (records[i].step, records[i].request_id, records[i].position))
    for index, i in enumerate(order):
        records[i].state_index = index
    layers = sorted(generations[0].states)
    stacked = {
        ("S", layer): torch.cat([one.states[layer] for one in generations])[torch.tensor(order)] for layer in layers
    }
    tokens = {number: list(one.generated) for number, one in enumerate(generations)}
    dtype = str(next(iter(stacked.values())).dtype).removeprefix("torch.")
    events = tables.events_table(_steps(generations))
    if not origin.has_steps:
        events[["batch_rows", "batch_slots"]] = pd.NA
    capture = CaptureConfig("S", layers=tuple(layers))
    return Trace(
        requests=tuple(
            Request(
                prompt=decode(one.prompt) if has_text else one.prompt,
                sampling=SamplingParams(max_new_tokens=max(len(one.generated), 1)),
                request_id=number,
                prompt_token_ids=one.prompt,
            )
            for number, one in enumerate(generations)
        ),
        tokens=tokens,
        texts={number: decode(ids) for number, ids in tokens.items()},
        row_table=tables.rows_table([records[i] for i in order], token_texts),
        stored_readings=None,
        event_table=events,
        ledger_table=tables.ledger_table(_ledger(generations) if origin.has_steps else ()),
        store=MemoryStore(stacked),
        meta=_meta(generations, origin, capture, dtype, model),
        model=model,
    )


def _rows(number: int, generation: Generation, n_layers: int) -> list[RowRecord]:
    """Returns a list of RowRecord, one for each token with states of one imported generation."""
    prompt, token_ids = len(generation.prompt), (*generation.prompt, *generation.generated)
    rows = []
    for position in range(generation.num_rows):
        step = max(position - prompt + 1, 0)
        phase, role = ("prefill", "prompt") if position < prompt else ("decode", "committed")
        rows.append(RowRecord(number, step, phase, position, token_ids[position], n_layers, -1, role, "committed"))
    return rows


def _steps(generations: Sequence[Generation]) -> list[StepRecord]:
    """Returns the passes that imported generations imply, as a list of StepRecord: a prefill of all prompts, then
    decode passes."""
    steps = []
    for step in range(max(max(len(one.generated), 1) for one in generations)):
        active = [n for n, one in enumerate(generations) if step < len(one.generated) or step == 0]
        slots = max(len(one.prompt) for one in generations) if step == 0 else 1
        committed = {n: generations[n].generated[step : step + 1] for n in active}
        steps.append(
            StepRecord(
                step=step,
                phase="decode" if step else "prefill",
                batch_shape=(len(generations), slots),
                request_ids=tuple(active),
                seconds=float("nan"),
                committed=tuple(committed.items()),
                logprobs=tuple((n, generations[n].logprobs[step : step + 1]) for n in active),
                margins=tuple((n, nats) for n in active for nats in generations[n].margins[step : step + 1]),
            )
        )
    return steps


def _ledger(generations: Sequence[Generation]) -> list[LedgerChange]:
    """Returns the cache changes that imported generations imply, as a list of LedgerChange."""
    changes = []
    for number, one in enumerate(generations):
        prompt = len(one.prompt)
        changes.append(LedgerChange(number, 0, 0, prompt, "prefill"))
        changes += [LedgerChange(number, p - prompt + 1, p, p + 1, "decoded") for p in range(prompt, one.num_rows)]
    return sorted(changes, key=lambda change: (change.request_id, change.step))


def _meta(
    generations: Sequence[Generation], origin: Origin, capture: CaptureConfig, dtype: str, model: CachedLM | None
) -> JsonDict:
    """Returns the metadata of an imported trace as a dict, with the reason for each kind of missing data."""
    heads = dict.fromkeys(HEAD_SITES, f"{origin.program} keeps no attention heads")
    unread = "no lens was read at the import; cp.analysis.read_states(trace, lens, model=model) reads one from S"
    return {
        "kind": "import",
        "missing": {**heads, "Z": unread, **origin.missing},
        "drafter": None,
        "lens": "none",
        "fingerprint": {
            "model": origin.name,
            "weights_sha256": model.fingerprint()["weights_sha256"] if model is not None else "",
            "path": f"imported from {origin.program}",
            "dtype": dtype,
            "device": "unknown",
            "threads": "unknown number of",
        },
        "config": {"capacity": max(one.num_rows for one in generations)},
        "capture": {
            **{name: getattr(capture, name) for name in ("sites", "heads", "positions", "phases", "dtype", "top_k")},
            "layers": list(capture.layers or ()),
            "prompt_hypotheses": False,
        },
        "weights_note": "",
        "cache_row_bytes": None,
        "thought_layer": None,
        "thinking": None,
        "checks": [],
        "finish": {str(number): one.finish for number, one in enumerate(generations)},
        "errors": {},
        "preemptions": [],
        "behaviour": None,
        "path_reason": f"imported from {origin.program}",
    }
