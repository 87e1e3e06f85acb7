"""Reads vLLM's hidden-state dumps (ExampleHiddenStatesConnector: one safetensors file for each request) for a Trace.

A file holds `hidden_states` [tokens, layers, m] and `token_ids` [tokens]. The layers are those of the setting
`eagle_aux_hidden_state_layer_ids`, in ascending order; vLLM's file does not name them. Id k is the residual stream that
enters block k, so S of layer k - 1 here. The id equal to the number of blocks is the last block's output, before the
final norm. Tokens are the prompt's; with include_output_tokens in the request, all generated ones but the last follow.
Our own export for speculators has the same layout, and names its layers in the file's metadata.

vLLM writes a file after it has returned the output, and holds an exclusive lock on NAME.lock until the file is
complete.
Source: vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py, `load_hidden_states`.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from cacheprobe.core.files import writer_of
from cacheprobe.core.hook_names import CONVENTION
from cacheprobe.core.values import listed, whole_number
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.importers.common import (
    Generation,
    Imported,
    ImportRefused,
    token_ids_in,
)

_PROGRAM = "vLLM"
_SETTING = "eagle_aux_hidden_state_layer_ids"
_KEYS = ("hidden_states", "token_ids")
SECONDS_TO_WAIT = 60.0
"""Longest wait for a file that vLLM is still writing; vLLM's own loader waits without limit."""


def read_vllm(
    outputs: object,
    layers: "int | Iterable[int] | None",
    num_prompt_tokens: "int | Iterable[int] | None",
    model: CachedLM | None,
) -> Imported:
    """Returns the hidden states that vLLM stored, as an Imported, which reads the states of a file when they are
    needed. Checks all but the numbers.

    outputs: file paths, a folder, or vLLM's outputs that name files.

    layers: the setting eagle_aux_hidden_state_layer_ids; None for files that name their layers.  num_prompt_tokens: of
    each file, or one number for all; by default all tokens are the prompt's.  model: that ran, if known.
    Raises: ImportRefused for files of another layout, and for layers or lengths that do not fit the files.
    """
    ids = _layer_ids(layers) if layers is not None else None
    items = _as_list(outputs)
    lengths: list[int | None] = [
        None if length is None else whole_number(f"num_prompt_tokens of file {index}", length)
        for index, length in enumerate(listed(num_prompt_tokens))
    ]
    if num_prompt_tokens is None or not getattr(num_prompt_tokens, "ndim", isinstance(num_prompt_tokens, Iterable)):
        lengths *= len(items)
    if len(lengths) != len(items):
        raise ImportRefused(f"num_prompt_tokens lists {len(lengths)} lengths for {len(items)} files")
    generations = [_generation(item, ids, length) for item, length in zip(items, lengths, strict=True)]
    if len(found := {one.layers for one in generations}) > 1:
        raise ImportRefused(f"files of layers {' and '.join(map(str, sorted(found)))}; import them one by one")
    widths = {next(iter(one.read(0, 1).values())).shape[1] for one in generations}
    if len(widths) > 1:
        raise ImportRefused(f"files of states {' and '.join(map(str, sorted(widths)))} wide are not of one model")
    missing = {
        "log-probabilities": f"{_PROGRAM}'s files hold none",
        "ledger": f"{_PROGRAM}'s files do not say which cache slots were written when",
        "seconds": f"{_PROGRAM}'s files hold no times; passes are numbered by token, batches are not known",
    }
    n_layers = model.n_layers if model is not None else max(generations[0].layers) + 1
    return Imported(generations, model, _PROGRAM, n_layers, missing, has_steps=False)


def _layer_ids(layers: int | Iterable[int]) -> list[int]:
    """Checks the layer ids of vLLM's setting, and returns them as a list of int."""
    ids = [whole_number(f"a layer id of {_SETTING}, as in layers=[1, 2],", layer) for layer in listed(layers)]
    if not ids or ids != sorted(set(ids)) or ids[0] < 0:
        raise ImportRefused(
            f"layers={ids}: give {_SETTING} as vLLM was given it, ascending: vLLM stores states in the order in which "
            "layers run, whatever the order of the setting"
        )
    if ids == [0]:
        raise ImportRefused("layer id 0 is the embedding, which is no site here; dump ids from 1 on")
    return ids


def _as_list(outputs: object) -> list[object]:
    """Returns file paths or vLLM outputs as a list; a folder is replaced by its .safetensors files, sorted by name."""
    items = list(outputs) if isinstance(outputs, Iterable) and not isinstance(outputs, str | Path) else [outputs]
    found: list[object] = []
    for item in items:
        if isinstance(item, str | Path) and Path(item).is_dir():
            files = sorted(Path(item).glob("*.safetensors"))
            if not files:
                raise ImportRefused(f"{item} holds no .safetensors file; vLLM writes them to its shared_storage_path")
            found += files
        else:
            found.append(item)
    if not found:
        raise ImportRefused("there is nothing to import: give the files that vLLM wrote, or its outputs")
    return found


def _generation(item: object, ids: Sequence[int] | None, num_prompt_tokens: int | None) -> Generation:
    """Checks one stored file of vLLM, and returns prompt, generated tokens and a reader of the states as a Generation.
    item: a file path, or a vLLM output that names its file."""
    output = None if isinstance(item, str | Path) else cast("Any", item)
    path = Path(cast("str | Path", item)) if output is None else _path_of(output)
    tokens, columns = _checked(path, ids)
    if output is None:
        length = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        if not 1 <= length <= len(tokens):
            raise ImportRefused(f"{item} holds {len(tokens)} tokens, not a prompt of {length}")
        prompt, generated = tokens[:length], tokens[length:]
    else:
        prompt, generated = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        if tokens == prompt:
            generated = generated[:1]  # the file has no states for the others
        elif tokens != prompt + generated[:-1]:
            raise ImportRefused(f"{path} is of other tokens than the output that names it: {tokens[:8]}, {prompt[:8]}")

    def read(start: int, end: int) -> dict[int, Tensor]:
        """Returns the states at the positions start..end-1 by layer, [end - start, m]."""
        with _opened(path) as file:
            states = file.get_slice("hidden_states")[start:end]
            return {layer: states[:, index].clone() for layer, index in columns.items()}

    return Generation(str(path), tuple(prompt), tuple(generated), tuple(columns), len(tokens), read)


def _path_of(output: object) -> Path:
    """Returns the path of the file that a vLLM output names. Raises: ImportRefused if it names none, or one for several
    samples."""
    params = getattr(output, "kv_transfer_params", None)
    if not isinstance(params, Mapping) or "hidden_states_path" not in params:
        raise ImportRefused(f"a {type(output).__name__} names no hidden_states_path; give vLLM's outputs, or its files")
    if (count := len(getattr(output, "outputs", ()))) != 1:
        raise ImportRefused(f"an output with {count} samples has one file for all; ask for n=1")
    return Path(params["hidden_states_path"])


def _wait_for(path: Path) -> None:
    """Waits until vLLM releases the lock of a file. Raises: ImportRefused after SECONDS_TO_WAIT."""
    until = time.monotonic() + SECONDS_TO_WAIT
    while writer_of(path.with_name(path.name + ".lock")):
        if time.monotonic() > until:
            raise ImportRefused(
                f"{path} is still being written after {SECONDS_TO_WAIT:.0f} s (its .lock is held); import it once "
                "vLLM is done with it"
            )
        time.sleep(0.05)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file for a `with` block. Raises: ImportRefused for a file that cannot be read, or has other
    tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            found = sorted(file.keys())
            if missing := [key for key in _KEYS if key not in found]:
                raise ImportRefused(f"{path} has no {missing[0]}; expected {' and '.join(_KEYS)}, it holds {found}")
            yield file
    except (OSError, SafetensorError) as error:
        raise ImportRefused(f"{path} cannot be read as safetensors ({error!s:.120}); is vLLM still at it?") from error


def _checked(path: Path, ids: Sequence[int] | None) -> tuple[list[int], dict[int, int]]:
    """Returns the token ids of one file, as soon as the file is complete, and layer -> index of its states. Checks the
    shapes of the file. Raises: ImportRefused for another file.

    ids: vLLM's layer ids; None if the file's metadata names the layers.
    """
    if path.suffix == ".zst" or (not path.exists() and path.with_name(path.name + ".zst").exists()):
        raise ImportRefused(f"{path} is compressed; unpack it first, with zstd -d")
    _wait_for(path)
    with _opened(path) as file:
        states, tokens = (file.get_slice(name) for name in _KEYS)
        shape, count = list(states.get_shape()), list(tokens.get_shape())
        if len(shape) != 3 or len(count) != 1 or shape[0] != count[0]:
            raise ImportRefused(
                f"{path}: hidden_states {tuple(shape)} and token_ids {tuple(count)}; expected "
                "[tokens, layers, m] and [tokens]"
            )
        named = _named_layers(path, file.metadata() or {})
        if ids is None and named is None:
            raise ImportRefused(f"{path} does not name its layers; give {_SETTING} as layers=")
        layers = [layer - 1 for layer in ids] if ids is not None else named or []
        if named is not None and layers != named:
            raise ImportRefused(
                f"{path} names the layers {named}, and layers={list(ids or ())} are vLLM's ids of {layers}; leave out "
                "layers="
            )
        if shape[1] != len(layers):
            raise ImportRefused(
                f"{path} holds states of {shape[1]} layers, and layers= names {len(layers)}; give {_SETTING} as vLLM "
                "was given it"
            )
        if not shape[0]:
            raise ImportRefused(f"{path} holds no tokens: vLLM was given embeddings instead of a prompt")
        columns = {layer: index for index, layer in enumerate(layers) if layer >= 0}  # vLLM's id 0 is the embedding
        return token_ids_in(tokens[:], f"{path}: token_ids").tolist(), dict(sorted(columns.items()))


def _named_layers(path: Path, metadata: Mapping[str, str]) -> list[int] | None:
    """Returns the layers that the metadata of a file of ours names, such as "1,5,9"; None for another file. Raises:
    ImportRefused for metadata that names no layers."""
    if metadata.get("convention") != CONVENTION:
        return None
    layers = re.findall(r"\d+", metadata.get("layers", ""))
    if not layers or ",".join(layers) != metadata["layers"] or len(set(layers)) < len(layers):
        raise ImportRefused(
            f"{path} names its layers as {metadata.get('layers')!r:.60}; expected layers such as '1,5,9', each once; "
            "export it again with cp.analysis.to_speculators"
        )
    return [int(layer) for layer in layers]
