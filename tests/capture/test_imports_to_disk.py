"""Imports that are recorded to disk in parts: equal to imports in memory, and readable after a kill."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.cli.run import resume
from cacheprobe.ops.equality import bitwise
from cacheprobe.trace.importers import entry as imports
from cacheprobe.trace.importers.common import Imported
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.manifest import JOURNAL, TraceError
from tests.capture.recorded_run import failing_after
from tests.capture.test_to_disk import require_equal
from tests.tiny import SMALL, loaded

PROMPTS, NEW, WIDTH, LAYERS = ([1, 2, 3, 4, 5], [7, 8, 9], [4]), (6, 3, 9), 8, 3
BUDGET = 9000
"""Bytes: a part is at most a third, four rows with their records."""


@pytest.fixture
def of_vllm(tmp_path: Path) -> tuple[Path, list[int]]:
    """A folder of files as vLLM writes them, with numbers for states; and the lengths of the prompts."""
    draw = torch.Generator().manual_seed(0)
    folder = tmp_path / "dumps"
    folder.mkdir()
    for number, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True)):
        tokens = [*prompt, *range(10, 10 + new)]
        states = torch.randn(len(tokens), LAYERS, WIDTH, generator=draw, dtype=torch.bfloat16)
        save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, folder / f"{number}.safetensors")
    return folder, [len(prompt) for prompt in PROMPTS]


def of_generate(path: Path, has_logits: bool) -> Path:
    """A file of what generate returns for two sequences, the first of which ends early."""
    draw, longest, new = torch.Generator().manual_seed(1), 5, 6
    tensors = {
        "sequences": torch.tensor([[0, 0, 7, 8, 9, 20, 21, 1, 0, 0, 0], [1, 2, 3, 4, 5, 20, 21, 22, 23, 24, 25]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    }
    for number in range(new):
        shape = (2, 1 if number else longest, WIDTH)
        for block in range(4):
            tensors[f"hidden_states.{number}.{block}"] = torch.randn(shape, generator=draw)
        if has_logits:
            tensors[f"logits.{number}"] = torch.randn(2, 97, generator=draw)
    save_file(tensors, path)
    return path


def require_recorded(make: Callable[..., cp.Trace], tmp_path: Path) -> None:
    """Compares an import in memory with the same import on disk, as it is returned and as it is loaded."""
    in_memory = make()
    require_equal(make(out=tmp_path / "run", memory_budget=BUDGET), in_memory)
    require_equal(cp.load_trace(tmp_path / "run"), in_memory)
    require_equal(cp.load_trace(in_memory.save(tmp_path / "saved")), in_memory)
    named = json.loads((tmp_path / "run" / "manifest.json").read_text())["files"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"manifest.json", *named}
    assert sum(name.startswith("states-") for name in named) > 3  # the budget is kept


def test_files_of_vllm(of_vllm: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder, lengths = of_vllm
    require_recorded(lambda **to: cp.import_vllm(folder, [1, 2, 3], num_prompt_tokens=lengths, **to), tmp_path)


@pytest.mark.parametrize("has_logits", [True, False])
def test_a_file_of_generate(has_logits: bool, tmp_path: Path) -> None:
    file = of_generate(tmp_path / "out.safetensors", has_logits)
    require_recorded(lambda **to: cp.import_generate(file, stop_token_ids=[1], **to), tmp_path)
    trace = cp.load_trace(tmp_path / "run")
    assert trace.meta["finish"] == {"0": "stop", "1": "length"} and trace.committed(0) == [20, 21, 1]
    assert trace.ledger(1).provenance.tolist() == ["prefill"] * 5 + ["decoded"] * 5


def test_a_character_that_two_parts_share_is_whole(tmp_path: Path) -> None:
    """Each token is a byte, and a part ends after one to four bytes of a text whose characters have one to four."""
    inner = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    text = "naïve € 🦊🦊 日本, aé€🦊" * 2
    tokens = tokenizer.encode(text)
    states = torch.randn(len(tokens), LAYERS, WIDTH, dtype=torch.bfloat16)
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, tmp_path / "dump.safetensors")

    def made(**to: Any) -> cp.Trace:
        return cp.import_vllm(tmp_path / "dump.safetensors", [1, 2, 3], num_prompt_tokens=2, tokenizer=tokenizer, **to)

    assert made().text(0) == text[2:]
    for rows in (1, 3):
        size = 3 * rows * (LAYERS * WIDTH * 2 + 600)
        with failing_after(4 * 11):  # four files a part
            made(out=tmp_path / f"stopped {rows}", memory_budget=size)
        stopped = cp.load_trace(tmp_path / f"stopped {rows}")
        assert 1 < len(stopped.committed(0)) < len(tokens) - 2
        said = bytes(inner.decode(stopped.committed(0)), "utf-8")
        assert bytes(stopped.text(0), "utf-8") == said
        assert made(out=tmp_path / str(rows), memory_budget=size).text(0) == text[2:]


def test_outputs_in_memory(tmp_path: Path) -> None:
    """Tensors of generate's outputs are copied: a later change of them does not change the trace."""
    draw = torch.Generator().manual_seed(2)
    states = [[torch.randn(1, t, WIDTH, generator=draw) for _ in range(4)] for t in (3, 1, 1)]
    outputs = SimpleNamespace(sequences=torch.tensor([[1, 2, 3, 4, 5, 6]]), hidden_states=states)
    trace = cp.import_generate(outputs)
    before = trace.store.all_of("S", 1).clone()
    on_disk = cp.import_generate(outputs, out=tmp_path)
    states[0][2].zero_()
    assert bitwise(trace.store.all_of("S", 1), before) and bitwise(on_disk.store.all_of("S", 1), before)


def test_a_piece_is_no_larger_than_asked_for(of_vllm: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    record = imports._record
    row_bytes = LAYERS * WIDTH * 2 + 600

    def spy(imported: Imported, source: Any, disk: Any) -> None:
        held.extend(len(part.rows) for part, _ in imported.pieces(disk.part_bytes))
        record(imported, source, disk)

    monkeypatch.setattr(imports, "_record", spy)
    folder, lengths = of_vllm
    trace = cp.import_vllm(folder, [1, 2, 3], num_prompt_tokens=lengths, out=folder.parent / "run", memory_budget="9kB")
    assert sum(held) == len(trace.row_table) and max(held) == 9000 // 3 // row_bytes
    whole = cp.import_vllm(folder, [1, 2, 3], num_prompt_tokens=lengths, out=folder.parent / "whole")
    assert held[-1] == len(whole.row_table)  # by default one part takes it all


def test_what_is_written_of_a_killed_import_is_read(of_vllm: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder, lengths = of_vllm

    def make(**to: Any) -> cp.Trace:
        return cp.import_vllm(folder, [1, 2, 3], num_prompt_tokens=lengths, memory_budget=BUDGET, **to)

    run = tmp_path / "run"
    with failing_after(14):
        make(out=run)
    whole, part = cp.import_vllm(folder, [1, 2, 3], num_prompt_tokens=lengths), cp.load_trace(run)
    num_rows = len(part.row_table)
    assert 0 < num_rows < len(whole.row_table) and "not finished" in repr(part)
    assert part.row_table.equals(whole.row_table[:num_rows])
    assert bitwise(part.store.all_of("S", 2), whole.store.all_of("S", 2)[:num_rows])
    for number, tokens in part.tokens.items():
        assert tokens == whole.committed(number)[: len(tokens)]
    for again in (lambda: cp.resume(run, loaded()), lambda: resume(run)):
        with pytest.raises(TraceError, match="the import in .* cannot be continued; import again with --overwrite"):
            again()
    with pytest.raises(TraceError, match="was not finished"):
        make(out=run)
    require_equal(make(out=run, overwrite=True), whole)
    assert read_journal(run) is None and not (run / JOURNAL).exists()


def test_an_import_that_is_refused_writes_nothing(of_vllm: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder, _ = of_vllm
    save_file(
        {"hidden_states": torch.full((3, LAYERS, WIDTH), torch.nan), "token_ids": torch.arange(3)},
        folder / "9.safetensors",
    )
    with pytest.raises(ValueError, match="9.safetensors: states of layer 0 at positions from 0 are NaN or infinite"):
        cp.import_vllm(folder, [1, 2, 3], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_of_the_reference(tmp_path: Path) -> None:
    """It is recorded in parts too, for `verify` of a run that is longer than memory."""
    settings: dict[str, Any] = {**SMALL, "deterministic": True}
    in_memory = cp.reference(loaded(), PROMPTS, **settings)
    require_equal(cp.reference(loaded(), PROMPTS, **settings, out=tmp_path / "run", memory_budget="60kB"), in_memory)
    assert len([*(tmp_path / "run").glob("states-*")]) > 1
    trace = cp.run(loaded(), PROMPTS, **settings)
    assert cp.verify(trace, progress=False, out=tmp_path / "replay").is_equal
    again = cp.load_trace(tmp_path / "replay", loaded())  # on the path of the run
    assert [again.digest(i) for i in range(3)] == [in_memory.digest(i) for i in range(3)]
    with failing_after(8):
        cp.reference(loaded(), PROMPTS, **settings, out=tmp_path / "killed", memory_budget="60kB")
    with pytest.raises(TraceError, match="the reference run in .* cannot be continued; run it again with --overwrite"):
        cp.resume(tmp_path / "killed", loaded())
