"""Dequantises a GGUF file into a transformers model of float32 weights, piece by piece, and saves it as a Hugging Face
folder. The files are, byte for byte, those of transformers' own from_pretrained and save_pretrained. Weights that are
floats stay in the GGUF file, from which every load reads them.

transformers parses every token of the header in Python, three times, and keeps the weights twice.
"""

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import gguf as gguf_package
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as reading
from transformers.utils import logging

from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.core.terminal import without_progress_bars

_WEIGHTS_AT_ONCE = 1 << 20
_LENGTH = struct.Struct("<Q")


class QuickReader(GGUFReader):
    """Reads a GGUF file as its base class does, but a list of the header at once instead of value by value."""

    @property
    def data(self) -> np.ndarray:
        """The file's bytes."""
        return self._bytes

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._bytes = np.asarray(mapped)  # a view of a plain array is made in a fifth of a memmap's time

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        inner, start = GGUFValueType(kind[0]), orig_offs + 12
        if inner == GGUFValueType.STRING:
            end, values, view = start, [], self._bytes.data
            for _ in range(int(count[0])):
                begin = end + 8
                end = begin + _LENGTH.unpack_from(view, end)[0]
                values.append(self._bytes[begin:end])
        elif inner in self.gguf_scalar_to_np:
            numbers = self._get(start, self.gguf_scalar_to_np[inner], int(count[0]))
            end, values = start + numbers.nbytes, list(numbers.reshape(-1, 1))
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [GGUFValueType.ARRAY, inner] if values else [GGUFValueType.ARRAY]
        return end - orig_offs, [kind, count, *values], list(range(2, 2 + len(values))), types


@contextmanager
def _reading_once() -> Iterator[None]:
    """Lets transformers parse the header of a GGUF file once inside the `with`, by QuickReader, for config and
    tokenizer alike."""
    parse = cache(reading.load_gguf_checkpoint)
    with (
        # weights that stay in the file can be written to in memory, and the file stays as it is
        patch.object(gguf_package, "GGUFReader", cache(partial(QuickReader, mode="c"))),
        # a copy, because the reader of a config changes it
        patch.object(reading, "load_gguf_checkpoint", lambda path, **_: {"config": deepcopy(parse(path)["config"])}),
    ):
        yield


def convert_gguf(
    gguf: Path,
    directory: Path,
    *,
    has_tokenizer: bool,
    splits_digits: bool,
    stores_weights: bool,
    check: Callable[[Collection[str]], None],
    report: Callable[[int, str], None],
) -> list[str]:
    """Converts a GGUF file to float32, saves model and tokenizer into `directory`, and returns the sorted names of
    weights that the file lacks.

    stores_weights: False leaves the weights out: `float_weights` reads them from the file.
    splits_digits: the tokenizer takes every digit by itself, then applies GPT-2's rule. The file says so ("smollm"),
    and transformers reads GPT-2's rule alone: "\\n\\n1" would become three tokens instead of two.
    check: called with the names of the tensors that transformers gives to parameters, before any is read.
    report: called with (megabytes of float32 weights done, what is done now).
    Raises: whatever `check` raises, and whatever transformers raises for a file that it cannot read.
    """
    gguf = gguf.resolve()
    own = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    with ExitStack() as quiet, without_progress_bars(), _reading_once():
        quiet.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        config = AutoConfig.from_pretrained(**own)
        if has_tokenizer:
            report(0, "reading the tokenizer")
            _save_tokenizer(own, config.max_position_embeddings, splits_digits, directory)
        model = _without_weights(config)
        model.load_state_dict(_weights(gguf, model, check, report), strict=False, assign=True)
        model.tie_weights()
        if missing := sorted(name for name, weight in model.state_dict().items() if weight.is_meta):
            return missing
        if not stores_weights:
            model.config.save_pretrained(directory)
            return []
        report(sum(weight.nbytes for weight in model.parameters()) // 10**6, "writing them")
        model.save_pretrained(directory, save_original_format=False)  # mixtures in one piece, as they are read
        return []


def float_weights(gguf: Path) -> dict[str, Tensor]:
    """Returns the float32 weights of a GGUF file of floats by their names in transformers. Those that the file has in
    float32 and in transformers' order are mapped: they take no memory beside the file's pages."""
    with _reading_once():
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        return _weights(gguf, _without_weights(config), lambda _: None, lambda *_: None)


def _without_weights(config: LiveConfig) -> LiveModule:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _save_tokenizer(own: Mapping[str, object], max_length: int, splits_digits: bool, directory: Path) -> None:
    tokenizer: LiveTokenizer = AutoTokenizer.from_pretrained(**own)
    if splits_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(directory)


def _weights(
    gguf: Path, model: LiveModule, check: Callable[[Collection[str]], None], report: Callable[[int, str], None]
) -> dict[str, Tensor]:
    """Returns the weights of a GGUF file by their names in `model`, which is on torch's "meta" device."""
    reader = gguf_package.GGUFReader(str(gguf))
    architecture = reading.read_field(reader, "general.architecture")[0]
    kind = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
    processor = kind(config=reading.load_gguf_checkpoint(str(gguf))["config"])
    names = reading.get_gguf_hf_weights_map(model, processor)
    check(names)
    parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
    done = 0
    for tensor in reader.tensors:
        blocks = tensor.data.reshape(-1, tensor.data.shape[-1])
        is_mapped = tensor.tensor_type == GGMLQuantizationType.F32
        weights = tensor.data if is_mapped else np.empty(tensor.shape[::-1].tolist(), np.float32)
        rows = weights.reshape(len(blocks), -1)
        height = max(1, _WEIGHTS_AT_ONCE // rows.shape[1])
        for start in range(0, 0 if is_mapped else len(rows), height):
            piece = slice(start, start + height)
            rows[piece] = dequantize(blocks[piece], tensor.tensor_type)
            report((done + start * rows.shape[1]) * 4 // 10**6, "")
        done += weights.size
        # mixtures' weights are put into `parsed` by the processor, which then returns no name
        read = processor.process(weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed)
        if read.name in names:
            parsed["tensors"][names[read.name]] = torch.from_numpy(read.weights).contiguous()
    return parsed["tensors"]
