"""Whose states an import of vLLM's files holds. The files hold what hooks of transformers say about each block."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import cacheprobe as cp
from cacheprobe.cli import imports as cli_import
from cacheprobe.cli.look import export
from cacheprobe.trace.importers.common import ImportRefused
from tests.by_hand import first_of
from tests.reported.imports.imported import blocks_of, exchange
from tests.tiny import SMALL, hf_model, loaded

TEXTS = [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 26, 27]]
PROMPT_LENGTH = 4
SAID = "layers not checked: no model was given"


def streams(token_ids: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """[t, m] for each of vLLM's layer ids: what enters each block, and what leaves the last one."""
    hf = hf_model("llama", dtype)
    blocks, found = blocks_of(hf), dict[int, Tensor]()
    blocks[0].register_forward_pre_hook(lambda _, given: found.__setitem__(0, given[0][0]))
    for number, block in enumerate(blocks, 1):
        block.register_forward_hook(lambda _, __, out, n=number: found.__setitem__(n, first_of(out)[0]))
    with torch.no_grad():
        hf(torch.tensor([token_ids]))
    return [found[number].clone() for number in range(len(blocks) + 1)]


def dumped(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> list[Path]:
    """Files in vLLM's layout, one for each text."""
    paths = []
    for number, text in enumerate(TEXTS):
        states = torch.stack([streams(text, dtype)[layer] for layer in ids], 1)
        paths.append(folder / f"{number}.safetensors")
        save_file({"hidden_states": states, "token_ids": torch.tensor(text)}, paths[-1])
    return paths


def changed(paths: list[Path], change: Callable[[list[Tensor]], None]) -> None:
    """Changes the states [t, l, m] of some files."""
    files = [load_file(path) for path in paths]
    change([file["hidden_states"] for file in files])
    for path, file in zip(paths, files, strict=True):
        save_file(file, path)


def imported(paths: list[Path], ids: list[int], **settings: Any) -> cp.Trace:
    return cp.import_vllm(paths, ids, num_prompt_tokens=PROMPT_LENGTH, **settings)


EXCHANGES: dict[str, Callable[[list[Tensor]], None]] = {
    "second and third request": lambda states: exchange(states[1], states[2]),
    "one generated token of two requests": lambda states: exchange(states[0][5], states[2][5]),
    "two layers of the last token": lambda states: exchange(states[1][6, 0], states[1][6, 1]),
}


@pytest.mark.parametrize("change", EXCHANGES.values(), ids=EXCHANGES)
def test_states_in_the_place_of_others_are_refused(change: Callable[[list[Tensor]], None], tmp_path: Path) -> None:
    """Of every request, prompt and generated tokens; and by the command too."""
    paths = dumped(tmp_path, [1, 3], torch.bfloat16)
    model = loaded("llama", torch.bfloat16)
    changed(paths, change)
    with pytest.raises(ImportRefused, match=r"request \d, position \d: .* of their length away from those of Llama"):
        imported(paths, [1, 3], model=model)
    assert SAID in repr(imported(paths, [1, 3]))


def test_the_command_refuses_an_exchange(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path / "model")
    paths = dumped(tmp_path, [1, 2])
    settings = dict(layers=("1", "2"), model=str(tmp_path / "model"))
    cli_import.vllm(tuple(paths), out=tmp_path / "run", **settings)
    changed(paths, EXCHANGES["second and third request"])
    with pytest.raises(ImportRefused, match="request 1, position 0"):
        cli_import.vllm(tuple(paths), out=tmp_path / "other", **settings)
    assert not (tmp_path / "other").exists()


def test_a_shared_prompt_does_not_hide_an_exchange(tmp_path: Path) -> None:
    """Two long texts that differ in their last token alone: only that token's states are another's."""
    texts, paths = [[*range(90), *range(90), last] for last in (91, 92)], [tmp_path / "a", tmp_path / "b"]
    of_texts = [torch.stack(streams(text)[1:3], 1) for text in texts]
    for path, text, states in zip(paths, texts, of_texts[::-1], strict=True):
        save_file({"hidden_states": states, "token_ids": torch.tensor(text)}, path)
    with pytest.raises(ImportRefused, match="request 0, position 180"):
        cp.import_vllm(paths, [1, 2], model=loaded())


@pytest.mark.parametrize("ids", [[0, 1, 3], [1, 2, 3]])
def test_each_layer_has_the_states_that_enter_the_next_block(ids: list[int], tmp_path: Path) -> None:
    """Id 0 is the embedding, which is left out: the others keep their own states."""
    paths = dumped(tmp_path, ids)
    for model in (None, loaded()):
        trace = imported(paths, ids, model=model)
        assert trace.store.layers == tuple(layer - 1 for layer in ids if layer)
        for number, text in enumerate(TEXTS):
            for layer in trace.store.layers:
                assert torch.equal(trace.states("S", layer, number), streams(text)[layer + 1])


def test_entering_streams_read_as_outputs_are_refused_or_said_to_be_unchecked(tmp_path: Path) -> None:
    paths = dumped(tmp_path, [0, 1, 2])
    with pytest.raises(ImportRefused, match="given as layer 1 lie .* 0.00 from its layer 0|given as layer 0 lie"):
        imported(paths, [1, 2, 3], model=loaded())
    trace = imported(paths, [1, 2, 3])
    again = cp.load_trace(trace.save(tmp_path / "run"))
    for one in (trace, again):
        assert SAID in repr(one) and SAID in one.missing.values()


def test_our_export_names_its_layers_and_is_imported_by_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = cp.run(loaded(), TEXTS, **SMALL, capture="S")
    paths = cp.analysis.to_speculators(trace, tmp_path / "out", layers=[1, 0], progress=False)
    with safe_open(paths[0], "pt") as file:
        named = file.metadata()
    assert named["layers"] == "1,0,2" and "leaves this block" in named["convention"]
    lengths = [len(text) for text in TEXTS]
    again = cp.import_vllm(paths, num_prompt_tokens=lengths, model=loaded())
    assert again.store.layers == (0, 1, 2)
    for number in range(3):
        for layer in range(3):
            assert torch.equal(again.states("S", layer, number), trace.states("S", layer, number))
    cli_import.vllm(tuple(paths), out=tmp_path / "run")
    assert "states: S of layers 0, 1, 2" in capsys.readouterr().out
    with pytest.raises(ImportRefused, match=r"names the layers \[1, 0, 2\], and layers=\[0, 1, 2\] are vLLM's ids"):
        cp.import_vllm(paths, [0, 1, 2])


def test_files_of_vllm_need_layers(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="does not name its layers; give eagle_aux_hidden_state_layer_ids"):
        cp.import_vllm(dumped(tmp_path, [1, 2]))


def test_the_parquet_export_names_layers_and_convention(tmp_path: Path) -> None:
    cp.run(loaded(), TEXTS[:1], **SMALL, capture="S", out=tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "states", layer=(0, 2))
    named = pq.read_schema(next((tmp_path / "states").glob("*.parquet"))).metadata
    assert named[b"layers"] == b"0,2" and b"leaves this block" in named[b"convention"]


def test_outputs_of_vllm_are_compared_too(tmp_path: Path) -> None:
    paths = dumped(tmp_path, [1, 3])
    outputs = [
        SimpleNamespace(
            prompt_token_ids=text[:PROMPT_LENGTH],
            outputs=[SimpleNamespace(token_ids=[*text[PROMPT_LENGTH:], 9])],
            kv_transfer_params={"hidden_states_path": str(path)},
        )
        for text, path in zip(TEXTS, paths, strict=True)
    ]
    assert cp.import_vllm(outputs, [1, 3], model=loaded()).committed(1) == [15, 16, 17, 9]
    changed(paths, EXCHANGES["one generated token of two requests"])
    with pytest.raises(ImportRefused, match="request 0, position 5"):
        cp.import_vllm(outputs, [1, 3], model=loaded())
