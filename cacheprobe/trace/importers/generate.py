"""Reads Hugging Face's `generate(..., output_hidden_states=True, return_dict_in_generate=True)` for a Trace.

Such an output holds `sequences` [b, prompt + new]. `hidden_states` has, for each pass, tensors [b, t, m]: the input of
block 0, 1, ..., and at last the output of the final norm. With output_logits=True, `logits` has [b, v] for each pass.
So S of every block but the last can be imported; T, C and attention heads cannot. `scores` are logits after logits
processors, and are not used.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.engine.choosing import Choice, describe
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.importers.checks import require_states_of
from cacheprobe.trace.importers.common import Generation, Imported, ImportRefused, Origin, Stored

_ASK = "generate(..., return_dict_in_generate=True, output_hidden_states=True, output_logits=True)"
_CHECKED_ROWS = 4096
"""Rows whose states are looked at together."""
_PROGRAM = "Hugging Face's generate"


@dataclass(frozen=True)
class _Outputs:
    """Holds the checked tensors of a `generate` output, which are copied in slices: of a file, they are read then."""

    sequences: Tensor
    states: Sequence[Sequence[Tensor | Stored]]
    """By pass and block, [b, t, m]: the input of the block; the last tensor of a pass is the output of the final norm.
    """
    logits: Sequence[Tensor | Stored] | None
    mask: Tensor
    """[b, prompt]: 1 for a token that is not padding."""

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens in each sequence of the batch, padding included."""
        return _shape(self.states[0][0])[1]

    def states_of(self, block: int, row: int, start: int, end: int) -> Tensor:
        """Returns a copy of the input of a block, [end - start, m], for the tokens start..end-1 of sequence number
        `row`, padding counted."""
        first = self.prompt_length
        parts = [self.states[0][block][row, start : min(end, first)]] if start < first else []
        for number in range(max(start, first), end):
            parts.append(self.states[number - first + 1][block][row, 0:1])
        return torch.cat([part.detach().cpu() for part in parts])


def _shape(stored: Tensor | Stored) -> tuple[int, ...]:
    """Returns the shape of a tensor, or of one in a file."""
    return tuple(stored.shape if isinstance(stored, Tensor) else stored.get_shape())


def read_generate(
    outputs: object,
    *,
    attention_mask: object = None,
    stop_token_ids: "Iterable[int] | None" = None,
    model: CachedLM | None = None,
    tokenizer: LiveTokenizer = None,
    name: str | None = None,
) -> Imported:
    """Returns the checked output of Hugging Face's `generate`, or of a safetensors file with the same tensors, as an
    Imported, which reads the states of a file when they are needed.

    attention_mask: [b, prompt] of the call; needed for several sequences, unless the file has one.
    stop_token_ids: tokens that ended a sequence; by default the model's; needed for several sequences without `model`.
    model: also checks that the states are this model's.
    Raises: ImportRefused for anything that is not such an output, for a needed argument that is missing, and for states
    of another model.
    """
    checked = _read(outputs, attention_mask)
    count = len(checked.sequences)
    if stop_token_ids is None:
        if model is None and count > 1:
            raise ImportRefused(
                f"{count} sequences that may have ended at different tokens; give stop_token_ids=, () if none did, or "
                "model="
            )
        stop_token_ids = model.stop_token_ids if model is not None else ()
    stops = frozenset(int(token) for token in stop_token_ids)
    generations = _generations(checked, stops)
    _require_numbers(generations)
    last = len(checked.states[0]) - 2
    missing = {
        "T": f"{_PROGRAM} keeps the stream between blocks, not what attention added to it",
        "C": f"{_PROGRAM} keeps the stream between blocks, not what the MLP added to it",
        f"S of layer {last}": f"the last state that {_PROGRAM} keeps stands behind the final norm, which is not undone",
        "seconds": f"{_PROGRAM} does not time its passes",
    }
    if checked.logits is None:
        missing["log-probabilities"] = f"no logits were kept; use {_ASK}: scores are taken after processors"
    known = model.name if model is not None else "unknown model"
    origin = Origin(_PROGRAM, name or known, last + 1, missing, has_steps=True)
    if model is not None:
        require_states_of(model, generations[0])
    return Imported(generations, origin, model, tokenizer)


def _generations(outputs: _Outputs, stops: frozenset[int]) -> list[Generation]:
    """Returns the sequences of a `generate` output, each as a Generation without padding on the left, and cut after its
    first stop token. The logits of one pass are in memory at a time."""
    texts = []
    for row, token_ids in enumerate(outputs.sequences.tolist()):
        start, end = outputs.prompt_length - int(outputs.mask[row].sum()), outputs.prompt_length
        generated = token_ids[end:]
        stop_index = next((index for index, token in enumerate(generated) if token in stops), None)
        texts.append((start, token_ids[start:end], generated[: None if stop_index is None else stop_index + 1]))
    choices = [list[Choice]() for _ in texts]
    for step, stored in enumerate(outputs.logits or ()):
        logits = stored[:].detach().float().cpu()
        for row, (_, _, generated) in enumerate(texts):
            if step < len(generated):
                choices[row].append(describe(generated[step], logits[row]))
    layers = tuple(range(len(outputs.states[0]) - 2))
    return [
        Generation(
            tuple(prompt),
            tuple(generated),
            layers,
            len(prompt) + len(generated) - 1,
            _SequenceStates(outputs, row, start, layers),
            tuple(choice.logprob_nats for choice in choices[row]),
            tuple(choice.margin_nats for choice in choices[row]),
            "stop" if generated and generated[-1] in stops else "length",
        )
        for row, (start, prompt, generated) in enumerate(texts)
    ]


def _require_numbers(generations: Sequence[Generation]) -> None:
    """Raises: ImportRefused if a state of a token is NaN or infinite; those of padding are not looked at."""
    for number, one in enumerate(generations):
        for start in range(0, one.num_rows, _CHECKED_ROWS):
            for layer, states in one.read(start, min(start + _CHECKED_ROWS, one.num_rows)).items():
                if not bool(torch.isfinite(states).all()):
                    raise ImportRefused(
                        f"sequence {number}: states of layer {layer} at positions from {start} are NaN or infinite; "
                        "generate again, for example in float32"
                    )


@dataclass(frozen=True)
class _SequenceStates:
    """Reads states of one sequence; see `Generation.read`. S of a layer is the input of the next block."""

    outputs: _Outputs
    row: int
    first: int
    """Number of tokens of padding before the sequence."""
    layers: Sequence[int]

    def __call__(self, start: int, end: int) -> dict[int, Tensor]:
        first = self.first
        return {layer: self.outputs.states_of(layer + 1, self.row, first + start, first + end) for layer in self.layers}


def _read(outputs: object, attention_mask: object) -> _Outputs:
    """Returns the checked tensors of a `generate` output, or of a safetensors file, as _Outputs."""
    output = _from_file(Path(outputs)) if isinstance(outputs, str | Path) else outputs
    if getattr(output, "beam_indices", None) is not None:
        raise ImportRefused("beams change places from pass to pass, so rows are no single text; use num_beams=1")
    sequences, passes = getattr(output, "sequences", None), getattr(output, "hidden_states", None)
    if sequences is None or not passes:
        raise ImportRefused(f"a {type(output).__name__} holds no sequences with hidden states; use {_ASK}")
    lengths = [_shape(of_pass[0])[1] for of_pass in passes]
    new = sequences.shape[1] - lengths[0]
    if lengths[1:] != [1] * (new - 1) or new < 1:
        raise ImportRefused(
            f"{sequences.shape[1]} tokens, and passes over {_lengths_text(lengths)} of them: expected the prompt and "
            "then one token a pass; use generate with use_cache=True, without an assistant and without "
            "prefill_chunk_size"
        )
    if len(passes[0]) < 3:
        raise ImportRefused(f"{len(passes[0])} states a pass: a model of one block keeps none before its final norm")
    if attention_mask is None:
        attention_mask = getattr(output, "attention_mask", None)
    if attention_mask is None:
        if len(sequences) > 1:
            raise ImportRefused(f"{len(sequences)} sequences: give the attention_mask= that generate was given")
        attention_mask = torch.ones(1, lengths[0], dtype=torch.long)
    mask = torch.as_tensor(attention_mask).cpu()[:, : lengths[0]]
    if mask.shape != (len(sequences), lengths[0]):
        raise ImportRefused(f"an attention_mask of {tuple(mask.shape)} for prompts of {(len(sequences), lengths[0])}")
    if not bool((mask.diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
        raise ImportRefused("prompts are padded on the right or in between; generate needs padding_side='left'")
    return _Outputs(sequences.cpu(), passes, getattr(output, "logits", None), mask)


def _lengths_text(lengths: Sequence[int]) -> str:
    """Returns the first four lengths as text, separated by commas; ends in ", ..." if there are more."""
    return ", ".join(map(str, lengths[:4])) + (", ..." if len(lengths) > 4 else "")


def _from_file(path: Path) -> SimpleNamespace:
    """Opens a safetensors file, and returns its tensors as a SimpleNamespace with the attribute names of a `generate`
    output. Hidden states and logits are read in slices, when they are asked for."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")
        names = {*file.keys()}
        small = {name: file.get_tensor(name) for name in ("sequences", "attention_mask") if name in names}
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{path} cannot be read as safetensors ({error!s:.120})") from error
    of_passes = [found for key in names if (found := re.fullmatch(r"hidden_states\.(\d{1,9})\.\d{1,9}", key))]
    passes = min(1 + max((int(found[1]) for found in of_passes), default=-1), 1 + len(of_passes))  # one is missing then
    blocks = sum(key.startswith("hidden_states.0.") for key in names)
    required = ["sequences", *(f"hidden_states.{p}.{b}" for p in range(passes) for b in range(blocks))]
    if missing := [key for key in required if key not in names] or ([] if passes and blocks else ["hidden_states.0.0"]):
        raise ImportRefused(
            f"{path} has no {missing[0]}; expected sequences, hidden_states.PASS.BLOCK and, where they were kept, "
            "logits.PASS and attention_mask"
        )
    logits = [file.get_slice(f"logits.{p}") for p in range(passes)] if "logits.0" in names else None
    states = [[file.get_slice(f"hidden_states.{p}.{b}") for b in range(blocks)] for p in range(passes)]
    optional = {name: small.get(name) for name in ("sequences", "attention_mask")}
    return SimpleNamespace(**optional, hidden_states=states, logits=logits)
