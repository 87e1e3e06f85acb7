"""Imports Hugging Face's `generate(..., output_hidden_states=True, return_dict_in_generate=True)` as a Trace.

Such an output holds `sequences` [b, prompt + new]. `hidden_states` has, for each pass, tensors [b, t, m]: the input of
block 0, 1, ..., and at last the output of the final norm. With output_logits=True, `logits` has [b, v] for each pass.
So S of every block but the last can be imported; T, C and attention heads cannot. `scores` are logits after logits
processors, and are not used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from cacheprobe.engine.choosing import describe
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.importers.checks import require_states_of
from cacheprobe.trace.importers.common import Decoder, Generation, ImportRefused, Origin, imported_trace
from cacheprobe.trace.trace import Trace

_ASK = "generate(..., return_dict_in_generate=True, output_hidden_states=True, output_logits=True)"
_PROGRAM = "Hugging Face's generate"


@dataclass(frozen=True)
class _Outputs:
    """Holds the checked tensors of a `generate` output, on the CPU."""

    sequences: Tensor
    states: list[list[Tensor]]
    """By pass and block, [b, t, m]: the input of the block; the last tensor of a pass is the output of the final norm.
    """
    logits: list[Tensor] | None
    mask: Tensor
    """[b, prompt]: 1 for a token that is not padding."""

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens in each sequence of the batch, padding included."""
        return self.states[0][0].shape[1]


def trace_of_generate(
    outputs: object,
    *,
    attention_mask: object = None,
    stop_token_ids: "Iterable[int] | None" = None,
    model: CachedLM | None = None,
    tokenizer: Decoder | None = None,
    name: str | None = None,
) -> Trace:
    """Returns the Trace of an output of Hugging Face's `generate`, or of a safetensors file with the same tensors.

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
    generations = [_generation(checked, row, stops) for row in range(count)]
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
    trace = imported_trace(generations, origin, model, tokenizer)
    if model is not None:
        require_states_of(model, generations[0])
    return trace


def _generation(outputs: _Outputs, row: int, stops: frozenset[int]) -> Generation:
    """Returns sequence number `row` of a `generate` output as a Generation, without padding on the left, and cut after
    its first stop token."""
    start = outputs.prompt_length - int(outputs.mask[row].sum())
    token_ids = outputs.sequences[row].tolist()
    prompt, generated = token_ids[start : outputs.prompt_length], token_ids[outputs.prompt_length :]
    stop_index = next((index for index, token in enumerate(generated) if token in stops), None)
    if stop_index is not None:
        generated = generated[: stop_index + 1]
    num_rows = len(prompt) + len(generated) - 1
    states = {
        layer: torch.cat([layers[layer + 1][row] for layers in outputs.states])[start : start + num_rows].clone()
        for layer in range(len(outputs.states[0]) - 2)
    }
    kept = outputs.logits or []
    choices = [describe(token, logits[row]) for token, logits in zip(generated, kept, strict=False)]
    return Generation(
        tuple(prompt),
        tuple(generated),
        states,
        tuple(choice.logprob_nats for choice in choices),
        tuple(choice.margin_nats for choice in choices),
        "length" if stop_index is None else "stop",
    )


def _read(outputs: object, attention_mask: object) -> _Outputs:
    """Returns the checked tensors of a `generate` output, or of a safetensors file, as _Outputs."""
    output = _from_file(Path(outputs)) if isinstance(outputs, str | Path) else outputs
    if getattr(output, "beam_indices", None) is not None:
        raise ImportRefused("beams change places from pass to pass, so rows are no single text; use num_beams=1")
    sequences, passes = getattr(output, "sequences", None), getattr(output, "hidden_states", None)
    if sequences is None or not passes:
        raise ImportRefused(f"a {type(output).__name__} holds no sequences with hidden states; use {_ASK}")
    lengths = [of_pass[0].shape[1] for of_pass in passes]
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
    states = [[state.detach().cpu() for state in of_pass] for of_pass in passes]
    logits = getattr(output, "logits", None)
    kept = None if logits is None else [one.detach().float().cpu() for one in logits]
    return _Outputs(sequences.cpu(), states, kept, mask)


def _lengths_text(lengths: Sequence[int]) -> str:
    """Returns the first four lengths as text, separated by commas; ends in ", ..." if there are more."""
    return ", ".join(map(str, lengths[:4])) + (", ..." if len(lengths) > 4 else "")


def _from_file(path: Path) -> SimpleNamespace:
    """Reads a safetensors file, and returns its tensors as a SimpleNamespace with the attribute names of a `generate`
    output."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: Mapping[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{path} cannot be read as safetensors ({error!s:.120})") from error
    passes = 1 + max((int(key.split(".")[1]) for key in tensors if key.startswith("hidden_states.")), default=-1)
    blocks = sum(key.startswith("hidden_states.0.") for key in tensors)
    required = ["sequences", *(f"hidden_states.{p}.{b}" for p in range(passes) for b in range(blocks))]
    if missing := [key for key in required if key not in tensors] or ([] if passes else ["hidden_states.0.0"]):
        raise ImportRefused(
            f"{path} has no {missing[0]}; expected sequences, hidden_states.PASS.BLOCK and, where they were kept, "
            "logits.PASS and attention_mask"
        )
    logits = [tensors[f"logits.{p}"] for p in range(passes)] if "logits.0" in tensors else None
    states = [[tensors[f"hidden_states.{p}.{b}"] for b in range(blocks)] for p in range(passes)]
    optional = {name: tensors.get(name) for name in ("sequences", "attention_mask")}
    return SimpleNamespace(**optional, hidden_states=states, logits=logits)
