"""Reads Hugging Face's `generate(..., output_hidden_states=True, return_dict_in_generate=True)` for a Trace.

Such an output holds `sequences` [b, prompt + new]. `hidden_states` has, for each pass, tensors [b, t, m]: mostly the
input of block 0, 1, ..., and at last the output of the final norm. With output_logits=True, `logits` has [b, v] for
each pass. So S of every block but the last can be imported; T, C and attention heads cannot. `scores` are logits after
logits processors, and are not used.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from cacheprobe.core.values import listed, whole_number
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.ops.sampling import Choice, describe
from cacheprobe.trace.importers.checks import close_to, typical_share
from cacheprobe.trace.importers.common import (
    Generation,
    Imported,
    ImportRefused,
    prompt_mask,
    split_sequences,
    token_ids_in,
)

_ASK = "generate(..., return_dict_in_generate=True, output_hidden_states=True, output_logits=True)"
_PROGRAM = "Hugging Face's generate"
_FEW = 64
"""Number of tokens of the first prompt by which a model finds out what the states are of."""
_Pass = Mapping[int, Tensor]
"""States [b, t, m] of one pass by their index in `hidden_states`; without those that were not kept."""


@dataclass(frozen=True)
class _Outputs:
    """Holds the checked tensors of a `generate` output, which are copied in slices: those of a file are read then."""

    sequences: Tensor
    passes: Sequence[_Pass]
    last: int
    """The last index of `hidden_states`."""
    logits: Sequence[Tensor] | None
    mask: Tensor
    """[b, prompt]: True for a token that is not padding."""

    def first_of(self, sequence: int) -> int:
        """Returns the number of tokens of padding before a sequence."""
        return self.mask.shape[1] - int(self.mask[sequence].sum())

    def read(self, indices: Mapping[int, int], sequence: int, start: int, end: int) -> dict[int, Tensor]:
        """Returns by layer a copy of the states [end - start, m] of the tokens start..end-1 of a sequence, padding not
        counted. indices: layer -> index of its states."""
        padding, prompt = self.first_of(sequence), self.mask.shape[1]
        start, end = start + padding, end + padding
        found = {}
        for layer, index in indices.items():
            parts = [self.passes[0][index][sequence, start : min(end, prompt)]] if start < prompt else []
            numbers = range(max(start, prompt) - prompt + 1, end - prompt + 1)
            parts += [self.passes[number][index][sequence, 0:1] for number in numbers]
            found[layer] = torch.cat([part.detach().cpu() for part in parts])
        return found

    def read_logits(self, sequence: int, start: int, end: int) -> Tensor:
        """Returns the logits [end - start, v] of the passes start..end-1."""
        return torch.stack([logits[sequence].detach().cpu() for logits in (self.logits or ())[start:end]])


def read_generate(
    outputs: object, attention_mask: object, stop_token_ids: "int | Iterable[int] | None", model: CachedLM | None
) -> Imported:
    """Returns the output of Hugging Face's `generate`, or of a safetensors file with the same tensors, as an Imported,
    which reads the states of a file when they are needed. Checks all but the numbers.

    attention_mask: [b, prompt] of the call; needed for several sequences, unless the file has one.
    stop_token_ids: tokens that ended a sequence; by default the model's; needed for several sequences without `model`.
    model: tells what the states are of.
    Raises: ImportRefused for anything that is not such an output, and for a needed argument that is missing.
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
    stops = frozenset(whole_number("a stop token", token) for token in listed(stop_token_ids))
    indices = _indices(checked, model)
    if not indices:
        raise ImportRefused(
            "no states of a block's output were kept: the first ones enter block 0, and the last ones stand behind the "
            "final norm"
        )
    generations = _generations(checked, stops, indices)
    last = model.n_layers - 1 if model is not None else checked.last - 1
    missing = {"seconds": f"{_PROGRAM} does not time its passes"}
    if last not in indices:
        missing[f"S of layer {last}"] = (
            f"the last state that {_PROGRAM} keeps stands behind the final norm, which is not undone; if "
            "config.tie_last_hidden_states was False, import with model=, which finds that it does not"
        )
    if checked.logits is None:
        missing["log-probabilities"] = f"no logits were kept; use {_ASK}: scores are taken after processors"
    return Imported(generations, model, _PROGRAM, last + 1, missing, has_steps=True)


def _indices(outputs: _Outputs, model: CachedLM | None) -> dict[int, int]:
    """Returns layer -> index of its output among the states of a pass.

    Most models keep what enters each block, so that index k is the output of block k - 1, and the last index is the
    output of the final norm. Some recurrent models keep what leaves each block, and with
    config.tie_last_hidden_states=False the last index is the output of the last block. Only a model can tell: it reads
    the first prompt.
    """
    last, kept = outputs.last, outputs.passes[0]
    entering = {index - 1: index for index in kept if 0 < index < last}
    prompt = outputs.sequences[0, outputs.first_of(0) : outputs.mask.shape[1]][:_FEW]
    if (
        model is None
        or last != model.n_layers
        or {states.shape[-1] for states in kept.values()} != {model.d_model}
        or not bool(((prompt >= 0) & (prompt < model.d_vocab)).all())
    ):
        return entering  # the comparison of all states says what does not fit
    fed = feed(model, prompt[None], [("S", layer) for layer in range(last)], logit_slots=[0])
    ours = [fed.states["S", layer][0].cpu() for layer in range(last)]
    given = outputs.read({index: index for index in kept}, 0, 0, len(prompt))
    limit = close_to(model, [*given.values(), *([outputs.read_logits(0, 0, 1)] if outputs.logits else [])])

    def worst(indices: dict[int, int]) -> float:
        """Returns the largest typical distance of a layer from the model's."""
        return max((typical_share(given[index], ours[layer]) for layer, index in indices.items()), default=torch.inf)

    leaving = {index: index for index in kept if index < last}
    if worst(leaving) <= limit and worst(leaving) < worst(entering):
        return leaving
    if last in given and (share := typical_share(given[last], ours[-1])) <= limit:
        with torch.inference_mode():
            normed = model.output_parts().norm(fed.states["S", last - 1])[0].cpu()
        if share < typical_share(given[last], normed):
            return {**entering, last - 1: last}
    return entering


def _generations(outputs: _Outputs, stops: frozenset[int], indices: Mapping[int, int]) -> list[Generation]:
    """Returns the sequences of a `generate` output, each as a Generation without padding on the left, and cut after its
    first stop token. The logits of one pass are in memory at a time.

    indices: layer -> index of its states in a pass.
    """
    texts = split_sequences(outputs.sequences, outputs.mask, stops)
    choices, is_first = [list[Choice]() for _ in texts], [list[bool]() for _ in texts]
    for step, stored in enumerate(outputs.logits or ()):
        logits = stored.detach().float().cpu()
        for sequence, (_, generated) in enumerate(texts):
            if step < len(generated):
                where = f"sequence {sequence}, pass {step}"
                if generated[step] >= logits.shape[1]:
                    raise ImportRefused(
                        f"{where} chose token {generated[step]}, but its logits are of {logits.shape[1]} tokens; give "
                        "the sequences and logits of one generation"
                    )
                if bool(logits[sequence].isnan().any()):
                    raise ImportRefused(f"{where}: its logits are NaN; generate again, for example in float32")
                choices[sequence].append(describe(generated[step], logits[sequence]))
                is_first[sequence].append(bool(logits[sequence, generated[step]] == logits[sequence].max()))
    _refuse_padding([generated for _, generated in texts], is_first)
    return [
        Generation(
            f"sequence {sequence}",
            prompt,
            generated,
            tuple(indices),
            len(prompt) + len(generated) - 1,
            partial(outputs.read, indices, sequence),
            tuple(choice.logprob_nats for choice in choices[sequence]),
            tuple(choice.margin_nats for choice in choices[sequence]),
            "stop" if generated and generated[-1] in stops else "length",
            partial(outputs.read_logits, sequence) if outputs.logits is not None else None,
        )
        for sequence, (prompt, generated) in enumerate(texts)
    ]


def _refuse_padding(generated: Sequence[Sequence[int]], is_first: Sequence[Sequence[bool]]) -> None:
    """Raises: ImportRefused if sequences of a greedy generation end in padding: in two or more equal tokens that were
    not the first choice, while all others were. is_first: of each token, if logits were kept."""
    texts = ["".join("x" if first else "." for first in of_sequence) for of_sequence in is_first]
    padded = [len(text) - len(text.rstrip(".")) for text in texts]
    if 0 in padded and sum(padded) == "".join(texts).count("."):
        for number, (token_ids, count) in enumerate(zip(generated, padded, strict=True)):
            if count > 1 and len({*token_ids[-count:]}) == 1:
                raise ImportRefused(
                    f"sequence {number} ends in {count} tokens {token_ids[-1]}, which its logits did not choose, so "
                    "they are padding after a stop token; give stop_token_ids="
                )


def _read(outputs: object, attention_mask: object) -> _Outputs:
    """Returns the checked tensors of a `generate` output, or of a safetensors file, as _Outputs."""
    output = _from_file(Path(outputs)) if isinstance(outputs, str | Path) else outputs
    if getattr(output, "beam_indices", None) is not None:
        raise ImportRefused("beams change places from pass to pass, so rows are no single text; use num_beams=1")
    sequences, states = getattr(output, "sequences", None), getattr(output, "hidden_states", None)
    if sequences is None or not states:
        raise ImportRefused(f"a {type(output).__name__} holds no sequences with hidden states; use {_ASK}")
    sequences, logits = token_ids_in(torch.as_tensor(sequences).cpu(), "the sequences"), getattr(output, "logits", None)
    if sequences.ndim != 2:
        raise ImportRefused(f"sequences are {tuple(sequences.shape)}; expected [sequences, tokens]; use {_ASK}")
    passes = [
        {index: torch.as_tensor(one) for index, one in enumerate(of_pass) if one is not None} for of_pass in states
    ]
    logits = None if logits is None else [torch.as_tensor(one) for one in logits]
    _require_shapes(sequences, passes, logits)
    _refuse_assisted(sequences[0], passes)
    prompt_length = sequences.shape[1] - len(passes)
    if attention_mask is None:
        attention_mask = getattr(output, "attention_mask", None)
    if attention_mask is None:
        if len(sequences) > 1:
            raise ImportRefused(f"{len(sequences)} sequences: give the attention_mask= that generate was given")
        attention_mask = torch.ones(1, prompt_length, dtype=torch.long)
    mask = prompt_mask(attention_mask, sequences, prompt_length, ImportRefused)
    return _Outputs(sequences, passes, len(states[0]) - 1, logits, mask)


def _require_shapes(sequences: Tensor, passes: Sequence[_Pass], logits: Sequence[Tensor] | None) -> None:
    """Checks that the states are of the prompt and then of one token a pass, for each sequence, and that each pass has
    as many states, and its logits. Raises: ImportRefused."""
    shapes = [{index: tuple(one.shape) for index, one in of_pass.items()} for of_pass in passes]
    lengths = [next((shape[1] for shape in of_pass.values()), 0) for of_pass in shapes]
    new = sequences.shape[1] - lengths[0]
    if lengths[1:] != [1] * (new - 1) or new < 1:
        raise ImportRefused(
            f"{sequences.shape[1]} tokens, and passes over {_lengths_text(lengths)} of them: expected the prompt and "
            "then one token a pass; use generate with use_cache=True (MPT has it off by default), without an assistant "
            "and without prefill_chunk_size"
        )
    for number, (of_pass, length) in enumerate(zip(shapes, lengths, strict=True)):
        if of_pass != {index: (len(sequences), length, shape[-1]) for index, shape in shapes[0].items()}:
            raise ImportRefused(
                f"pass {number} holds states of {[*of_pass.values()]}; expected those of pass 0, of {length} tokens of "
                f"{len(sequences)} sequences, without beams"
            )
    if logits is not None and [tuple(one.shape[:-1]) for one in logits] != [(len(sequences),)] * len(passes):
        raise ImportRefused(
            f"logits of {len(logits)} passes were given for {len(passes)} passes over {len(sequences)} sequences; use "
            f"{_ASK}"
        )


def _refuse_assisted(token_ids: Tensor, passes: Sequence[_Pass]) -> None:
    """Raises: ImportRefused for the output of an assisted generation. transformers cuts its passes into slices of one
    token, and for the accepted tokens of the first pass takes slices of the prompt. token_ids: of the first sequence.
    """
    states = [of_pass[max(of_pass)] for of_pass in passes]
    memory = [one.untyped_storage().data_ptr() for one in states]
    is_cut, prompt_length = len(set(memory)) < len(memory), len(token_ids) - len(passes)
    for slot, of_pass in enumerate(states[1 : prompt_length + 1]):
        if not torch.equal(of_pass[0:1, 0:1], states[0][0:1, slot : slot + 1]):
            break
        is_cut |= len(token_ids[: prompt_length + slot + 1].unique()) > 1  # the states of equal tokens may be equal
    if is_cut:
        raise ImportRefused(
            "several passes are slices of one, as of assisted generation or prompt lookup, where some rows hold the "
            "prompt's states; generate without assistant_model= and prompt_lookup_num_tokens=, or replay the tokens "
            "with cp.replay"
        )


def _lengths_text(lengths: Sequence[int]) -> str:
    """Returns the first four lengths as text, separated by commas; ends in ", ..." if there are more."""
    return ", ".join(map(str, lengths[:4])) + (", ..." if len(lengths) > 4 else "")


def _from_file(path: Path) -> SimpleNamespace:
    """Opens a safetensors file, and returns its tensors as a SimpleNamespace with the attribute names of a `generate`
    output. The operating system reads the tensors when they are used, page by page."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{path} cannot be read as safetensors ({error!s:.120})") from error
    of_passes = [found for key in held if (found := re.fullmatch(r"hidden_states\.(\d{1,9})\.\d{1,9}", key))]
    passes = min(1 + max((int(found[1]) for found in of_passes), default=-1), 1 + len(of_passes))  # one is missing then
    blocks = sum(key.startswith("hidden_states.0.") for key in held)
    required = ["sequences", *(f"hidden_states.{p}.{b}" for p in range(passes) for b in range(blocks))]
    if missing := [key for key in required if key not in held] or ([] if passes and blocks else ["hidden_states.0.0"]):
        raise ImportRefused(
            f"{path} has no {missing[0]}; expected sequences, hidden_states.PASS.BLOCK and, where they were kept, "
            "logits.PASS and attention_mask"
        )
    logits = [held[key] for p in range(passes) if (key := f"logits.{p}") in held] or None
    states = [[held[f"hidden_states.{p}.{b}"] for b in range(blocks)] for p in range(passes)]
    mask = held.get("attention_mask")
    return SimpleNamespace(sequences=held["sequences"], attention_mask=mask, hidden_states=states, logits=logits)
