"""Builds a Trace from generations that another program stored, and lists the data that the trace lacks.

No token was drafted, so every row is canonical. A row's position is that of its input token, as in all traces.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import HEAD_SITES
from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.records import Request, SamplingParams, StepRecord
from cacheprobe.core.tokens import special_token_ids
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.text import TokenText
from cacheprobe.trace.tables.build import LedgerChange, Part, RowRecord

KIND = "import"
"""Entry "kind" of the metadata of an imported trace."""
_RECORD_BYTES = 600
"""Bytes of a row's records (row, events, ledger)."""


class ImportRefused(ValueError):
    """Raised for data that cannot be read as a trace."""


def token_ids_in(tokens: Tensor, what: str) -> Tensor:
    """Returns token ids as int64. Raises: ImportRefused for numbers that are none."""
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ImportRefused(f"{what} are {tokens.dtype}; expected token ids, which are whole numbers")
    if bool((tokens < 0).any()):
        raise ImportRefused(
            f"{what} hold {int(tokens.min())}; token ids are 0 or more (-100 marks labels; give what the model read)"
        )
    return tokens.long()


def prompt_mask(attention_mask: object, sequences: Tensor, length: int | None, refused: type[ValueError]) -> Tensor:
    """Returns the attention mask [b, prompt] of the prompts, as bools: False for padding.

    sequences: [b, t] token ids.  length: tokens of the longest prompt; None if the mask says it, as `generate` was
    given it.  Raises: `refused` for a mask that does not fit, or of prompts that are not padded on the left.
    """
    mask = torch.atleast_2d(torch.as_tensor(attention_mask).cpu())[:, :length].bool()
    width = mask.shape[1] if length is None else length
    if mask.shape != (len(sequences), width) or not 0 < width < sequences.shape[1]:
        raise refused(
            f"attention_mask {tuple(mask.shape)} does not fit sequences {tuple(sequences.shape)}; it needs one row for "
            "each sequence (repeat_interleave(num_return_sequences)) and the prompts' length"
        )
    if not bool(mask[:, -1].all()) or bool((mask.long().diff(dim=1) < 0).any()):
        raise refused("prompts are padded on the right or in between; generate needs padding_side='left'")
    return mask


def split_sequences(
    sequences: Tensor, mask: Tensor, stops: Collection[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns (prompt without padding, generated tokens up to the first stop token) of each sequence. mask: from
    `prompt_mask`."""
    found = []
    for ids, is_there in zip(sequences.tolist(), mask.tolist(), strict=True):
        generated = ids[len(is_there) :]
        end = next((index + 1 for index, token in enumerate(generated) if token in stops), len(generated))
        prompt = (token for token, wanted in zip(ids, is_there, strict=False) if wanted)
        found.append((tuple(prompt), tuple(generated[:end])))
    return found


@dataclass(frozen=True)
class Generation:
    """Holds one request of another program: its prompt, its generated tokens, and how the captured states are read."""

    name: str
    """Names the request in errors."""
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    layers: tuple[int, ...]
    """Layers with states, ascending."""
    num_rows: int
    """Number of positions with states: the first ones of the prompt and the generated tokens."""
    read: Callable[[int, int], Mapping[int, Tensor]]
    """Function (start, end) -> by layer, [end - start, m]: the residual stream after the block, at the positions
    start..end-1. Its tensors share no memory with those of the other program."""
    logprobs: tuple[float, ...] = ()
    """Log-probabilities of the generated tokens, in nats; empty if unknown."""
    margins: tuple[float, ...] = ()
    """Log-probability gap, in nats, between the two best tokens of each choice; empty if unknown."""
    finish: str = "unknown"
    read_logits: Callable[[int, int], Tensor] | None = None
    """Function (start, end) -> logits [end - start, v] from which the generated tokens start..end-1 were chosen; None
    if they were not kept."""

    @property
    def last_step(self) -> int:
        """Number of the last pass that this request has a row or a chosen token of."""
        return max(len(self.generated) - 1, self.num_rows - len(self.prompt), 0)


@dataclass(frozen=True)
class Imported:
    """Holds checked generations of another program, to be made a Trace in memory or recorded to disk in pieces."""

    generations: Sequence[Generation]
    model: CachedLM | None
    program: str
    """Name of the other program."""
    n_layers: int
    """Number of blocks of the model; if the model is unknown, of those below the highest imported layer."""
    missing: Mapping[str, str]
    """Data that the program does not store, each with the reason."""
    has_steps: bool
    """Whether the program stores which passes it ran."""
    tokenizer: LiveTokenizer = None
    given_name: str | None = None
    """Name of the model, if one was given."""

    @cached_property
    def text(self) -> TokenText:
        """Gives texts of token ids, by the import's tokenizer, or else the model's."""
        return TokenText.of(self.tokenizer if self.tokenizer is not None else getattr(self.model, "tokenizer", None))

    @property
    def requests(self) -> tuple[Request, ...]:
        """One Request for each generation, numbered in order. Its prompt is its token ids, so that a run of it reads
        the same ones: its text may be split into others."""
        return tuple(
            Request(
                prompt=one.prompt,
                sampling=SamplingParams(max_new_tokens=max(len(one.generated), 1)),
                request_id=number,
                prompt_token_ids=one.prompt,
            )
            for number, one in enumerate(self.generations)
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with states, ascending."""
        return self.generations[0].layers

    def pieces(self, max_bytes: int | None = None) -> Iterator[tuple[Part, list[int]]]:
        """Yields (rows that follow each other in the order of a run: by pass, request and position, with the passes
        that end with them; ids of the requests that end with them). Reads the states of one piece at a time.

        max_bytes: most bytes of a piece, or one row; None for one piece of everything.
        """
        first = self.generations[0].read(0, 1)
        row_bytes = sum(state.nbytes for state in first.values()) + _RECORD_BYTES
        count = None if max_bytes is None else max(max_bytes // row_bytes, 1)
        places, num_rows, step = _places(self.generations), 0, 0
        last = max(one.last_step for one in self.generations)
        following = list(islice(places, count))
        while following:
            chosen, following = following, list(islice(places, count))
            end = following[0][0] if following else last + 1  # passes before this one have all their rows
            rows, states = self._read(chosen, num_rows)
            steps = [record for number in range(step, end) for record in self._records_of(number)]
            ledger = [change for number in range(step, end) for change in self._changes_of(number)]
            ended = [i for i, one in enumerate(self.generations) if step <= one.last_step < end]
            yield Part(rows, [], states, {}, steps, ledger, []), ended
            num_rows, step = num_rows + len(rows), end

    def _read(
        self, places: Sequence[tuple[int, int, int]], first: int
    ) -> tuple[list[RowRecord], dict[tuple[str, int], Tensor]]:
        """Returns (the rows at these places, their states by site and layer). first: number of the first row."""
        rows, of_request = [], {number: list[int]() for _, number, _ in places}
        for index, (step, number, position) in enumerate(places):
            one = self.generations[number]
            is_prompt = position < len(one.prompt)
            token_id = one.prompt[position] if is_prompt else one.generated[position - len(one.prompt)]
            phase, role = ("prefill", "prompt") if is_prompt else ("decode", "committed")
            depth = self.n_layers
            row = first + index
            rows.append(RowRecord(number, step, phase, position, token_id, depth, row, role, "committed", row))
            of_request[number].append(index)
        parts = [
            self.generations[number].read(places[own[0]][2], places[own[-1]][2] + 1)
            for number, own in of_request.items()
        ]
        order = torch.tensor([index for own in of_request.values() for index in own]).argsort()
        return rows, {("S", layer): torch.cat([part[layer] for part in parts])[order] for layer in self.layers}

    def _records_of(self, step: int) -> Iterator[StepRecord]:
        """Yields the StepRecord of a pass: a prefill of all prompts, or a decode pass. Yields none if the pass chose no
        token."""
        generations = self.generations
        active = [n for n, one in enumerate(generations) if step < len(one.generated) or step == 0]
        if not active:
            return
        slots = max(len(one.prompt) for one in generations) if step == 0 else 1
        committed = {n: generations[n].generated[step : step + 1] for n in active}
        yield StepRecord(
            step=step,
            phase="decode" if step else "prefill",
            batch_shape=(len(generations), slots) if self.has_steps else None,
            request_ids=tuple(active),
            seconds=float("nan"),
            committed=tuple(committed.items()),
            logprobs=tuple((n, generations[n].logprobs[step : step + 1]) for n in active),
            margins=tuple((n, nats) for n in active for nats in generations[n].margins[step : step + 1]),
        )

    def _changes_of(self, step: int) -> Iterator[LedgerChange]:
        """Yields the cache changes of a pass that the generations imply; none if the program does not store which
        passes it ran."""
        for number, one in enumerate(self.generations) if self.has_steps else ():
            prompt, position = len(one.prompt), len(one.prompt) + step - 1
            if step == 0:
                yield LedgerChange(number, 0, 0, prompt, "prefill")
            elif position < one.num_rows:
                yield LedgerChange(number, step, position, position + 1, "decoded")

    @property
    def meta(self) -> JsonDict:
        """Metadata of the imported trace, with the reason for each kind of missing data."""
        model = self.model
        first = next(iter(self.generations[0].read(0, 1).values()))
        capture = CaptureConfig("S", layers=self.layers)
        heads = dict.fromkeys(HEAD_SITES, f"{self.program} keeps no attention heads")
        stream = f"{self.program} keeps the stream between blocks, not what"
        parts = {"T": f"{stream} attention added to it", "C": f"{stream} the MLP added to it"}
        unread = "no lens was read at the import; cp.analysis.read_states(trace, lens, model=model) reads one from S"
        unchecked = {"comparison": "layers not checked: no model was given"} if model is None else {}
        return {
            "kind": KIND,
            "missing": {**heads, "Z": unread, **parts, **self.missing, **unchecked},
            "drafter": None,
            "lens": "none",
            "fingerprint": {
                "model": self.given_name or (model.name if model is not None else "unknown model"),
                "weights_sha256": model.fingerprint()["weights_sha256"] if model is not None else "",
                "path": f"imported from {self.program}",
                "dtype": str(first.dtype).removeprefix("torch."),
                "device": "unknown",
                "threads": "unknown number of",
            },
            "config": {"capacity": max(one.num_rows for one in self.generations)},
            "capture": {
                **{
                    name: getattr(capture, name) for name in ("sites", "heads", "positions", "phases", "dtype", "top_k")
                },
                "layers": list(self.layers),
                "prompt_hypotheses": False,
            },
            "weights_note": "",
            **({} if self.text.tokenizer is None else {"special_token_ids": list(special_token_ids(self.text))}),
            "cache_row_bytes": None,
            "thought_layer": None,
            "thinking": None,
            "checks": [],
            "finish": {str(number): one.finish for number, one in enumerate(self.generations)},
            "errors": {},
            "preemptions": [],
            "behaviour": None,
            "path_reason": f"imported from {self.program}",
        }


def _places(generations: Sequence[Generation]) -> Iterator[tuple[int, int, int]]:
    """Yields (pass, request id, position) of every row: those of the prompts, then one of each request for a pass."""
    for number, one in enumerate(generations):
        yield from ((0, number, position) for position in range(min(len(one.prompt), one.num_rows)))
    for step in range(1, max(one.num_rows - len(one.prompt) for one in generations) + 1):
        for number, one in enumerate(generations):
            if (position := len(one.prompt) + step - 1) < one.num_rows:
                yield step, number, position
