"""Defines import_generate and import_vllm: a Trace of what another program kept, in memory or on the disk."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from cacheprobe.analysis.reading import readable
from cacheprobe.core.live import LiveTokenizer, require_usable_process
from cacheprobe.core.records import Finished
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import require_loaded
from cacheprobe.trace.importers.checks import require_numbers, require_states_of
from cacheprobe.trace.importers.common import Imported
from cacheprobe.trace.importers.generate import read_generate
from cacheprobe.trace.importers.vllm import read_vllm
from cacheprobe.trace.recording.assemble import trace_of_part
from cacheprobe.trace.recording.disk_writer import DiskWriter
from cacheprobe.trace.recording.recorder import Source
from cacheprobe.trace.recording.to_disk import ImportOutput, to_disk
from cacheprobe.trace.tables.build import Part
from cacheprobe.trace.trace import Trace, load_trace

__all__ = ["import_generate", "import_vllm"]


def import_generate(
    outputs: object,
    *,
    attention_mask: object = None,
    stop_token_ids: "int | Iterable[int] | None" = None,
    model: CachedLM | None = None,
    tokenizer: LiveTokenizer = None,
    name: str | None = None,
    **to: Unpack[ImportOutput],
) -> Trace:
    """Returns a Trace of the output of Hugging Face's `generate` with hidden states: one request for each sequence.

    outputs: of generate(..., return_dict_in_generate=True, output_hidden_states=True), and output_logits=True for
        log-probabilities; or a safetensors file of `sequences`, `hidden_states.PASS.BLOCK`, `logits.PASS` and
        `attention_mask`.
    attention_mask: [b, prompt], as given to `generate`; needed for more than one sequence.
    stop_token_ids: token ids (or one) that end a sequence, () for none; by default the model's.
    model: the model that generated, loaded here. It reads every text once, to compare all states and logits with the
        given ones; lenses can then read the given states. Without it, nothing says whose states they are.
    tokenizer: for texts, if no model is given.  name: the model's, for the metadata.
    to: out, overwrite and memory_budget record the import to disk, part by part; see `ImportOutput`.
    The Trace has S of every block but the last; of that one too if config.tie_last_hidden_states was False and `model`
    is given. `trace.missing` lists what is missing; using that raises an error.
    Raises: ImportRefused for another layout, for example of beam search, assisted decoding, passes without a cache or
    prompts padded on the right, and for states or logits that are not the model's for their sequence, token and layer;
    TraceError if `out` may not be written.
    """
    _require_usable(model)
    imported = read_generate(outputs, attention_mask, stop_token_ids, model)
    return _recorded(replace(imported, tokenizer=tokenizer, given_name=name), to)


def import_vllm(
    outputs: object,
    layers: "int | Iterable[int] | None" = None,
    *,
    num_prompt_tokens: "int | Iterable[int] | None" = None,
    model: CachedLM | None = None,
    tokenizer: LiveTokenizer = None,
    name: str | None = None,
    **to: Unpack[ImportOutput],
) -> Trace:
    """Returns a Trace of hidden states written by vLLM's ExampleHiddenStatesConnector, one request for each file.

    outputs: the result of `LLM.generate`, whose `kv_transfer_params` name the files; or files, or folders of files.
    layers: the setting eagle_aux_hidden_state_layer_ids; id k becomes S of layer k - 1. Files of
        `cp.analysis.to_speculators` name their layers, and need none.
    num_prompt_tokens: if files are given: how many of their tokens are the prompt, one number or one for each file; all
        by default. The last generated token is in no file, so that it has no row.
    model, tokenizer, name, to: as for `import_generate`.
    `trace.missing` lists what is missing; using that raises an error.
    Raises: ImportRefused for another layout, other layers than the file has, NaN or infinite values, and states
    that are not the model's for their request, token and layer; TraceError if `out` may not be written.
    """
    _require_usable(model)
    imported = read_vllm(outputs, layers, num_prompt_tokens, model)
    return _recorded(replace(imported, tokenizer=tokenizer, given_name=name), to)


def _require_usable(model: CachedLM | None) -> None:
    require_usable_process()
    if model is not None:
        require_loaded(model, "an import")


def _recorded(imported: Imported, to: ImportOutput) -> Trace:
    """Checks the states, and returns their Trace: of the memory, or of the directory that they are recorded in. Raises:
    ImportRefused for numbers that are none, and for states that are not those of the model, if it is given."""
    require_numbers(imported.generations)
    if imported.model is not None:
        require_states_of(imported.model, imported.generations)
    source = ImportSource(imported)
    with to_disk(**to) as disk:
        if disk is None:
            ((part, _),) = imported.pieces()
            tokens = {number: list(one.generated) for number, one in enumerate(imported.generations)}
            return readable(trace_of_part(part, source, imported.requests, tokens, imported.meta))
        _record(imported, source, disk)
    return readable(load_trace(Path(disk.place.directory), imported.model))


def _record(imported: Imported, source: "ImportSource", disk: DiskWriter) -> None:
    """Records an import to disk, one part of at most `disk.part_bytes` after the other, and finishes it.

    Twin: `trace_of_part` of the import as one part, ==: the tables have the same lines, and the states the same bits.
    """
    sites = {"sites": ["S"], "heads": [], "layers": imported.layers}
    disk.begin_new([source], imported.requests, imported.meta, sites)
    for part, ended in imported.pieces(disk.part_bytes):
        source.part = part
        for record in part.steps:
            for number, token_ids in record.committed:
                start = len(imported.generations[number].prompt) + record.step
                disk.on_commit(number, record.step, start, token_ids, ["committed"] * len(token_ids))
            disk.step = record.step
        for number in ended:
            one = imported.generations[number]
            disk.on_finish(Finished(number, one.last_step, one.finish, one.generated))
        disk.end_round((), is_last=True)
    disk.wait()
    disk.finish(imported.meta)


class ImportSource(Source):
    """Gives a DiskWriter the parts of an import, one at a time."""

    def __init__(self, imported: Imported) -> None:
        self.part: Part | None = None
        """What `take` returns next."""
        self._num_rows, self.answer_mass = 0, {}
        self.model, self.texts = imported.model, imported.text

    def so_far(self) -> JsonDict:
        """Returns what a line of the journal says of the import so far, all of whose rows have states."""
        checked = {"preemptions": [], "self_checks": {"compared": 0, "differences": []}, "checks": []}
        return {"num_rows": self._num_rows, "num_states": self._num_rows, **checked}

    def take(self) -> Part:
        """Returns the next part, and forgets it."""
        part, self.part = self.part, None
        assert part is not None, "a part is given before it is taken"
        self._num_rows += len(part.rows)
        return part
