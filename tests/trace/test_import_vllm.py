"""Hidden-state files as vLLM's connector writes them, and what of them is refused.

The files are written here in the connector's layout, with states of a real tiny model: vLLM itself is not run.
Source: vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py, `_submit_async_write`.
"""

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cacheprobe as cp
from cacheprobe.cli import imports as cli_import
from cacheprobe.ops.equality import bitwise
from cacheprobe.trace.importers.common import ImportRefused
from tests.tiny import hf_model, loaded

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
NEW = 6
IDS = [1, 3]
"""eagle_aux_hidden_state_layer_ids: what enters block 1, and what leaves the last of three blocks."""


@pytest.fixture(scope="module")
def ours() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, max_new_tokens=NEW, window=4, capacity=96, progress=False, capture="STC")


def written(folder: Path, ours: cp.Trace, number: int, includes_output: bool, **changed: Any) -> Path:
    """One request's file: the prompt, and the generated tokens but the last where the request asked for them."""
    tokens = [*PROMPTS[number], *(ours.committed(number)[:-1] if includes_output else ())]
    states = torch.stack([ours.states("S", layer - 1, number)[: len(tokens)] for layer in IDS], dim=1)
    path = folder / f"{number}-cmpl.safetensors"
    save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens), **changed}, path)
    return path


def outputs_of(ours: cp.Trace, number: int, path: Path) -> SimpleNamespace:
    """The fields of vLLM's RequestOutput that are read."""
    return SimpleNamespace(
        prompt_token_ids=PROMPTS[number],
        outputs=[SimpleNamespace(token_ids=ours.committed(number))],
        kv_transfer_params={"hidden_states_path": str(path)},
    )


def test_files_of_prompts_become_requests(ours: cp.Trace, tmp_path: Path) -> None:
    paths = [written(tmp_path, ours, number, False) for number in (0, 1)]
    trace = cp.import_vllm(paths, IDS, model=loaded())
    assert trace.store.layers == (0, 2)  # the number of blocks is the last one's, before the final norm
    for number, prompt in enumerate(PROMPTS):
        assert trace.requests[number].prompt_token_ids == tuple(prompt) and trace.committed(number) == []
        assert trace.rows(number).position.tolist() == list(range(len(prompt)))
        for layer in (0, 2):
            assert bitwise(trace.states("S", layer, number), ours.states("S", layer, number)[: len(prompt)])
    assert cp.import_vllm(tmp_path, IDS).store.all_of("S", 2).equal(trace.store.all_of("S", 2))  # a folder of them


def test_with_the_outputs_that_name_them_all_tokens_are_known(ours: cp.Trace, tmp_path: Path) -> None:
    outputs = [outputs_of(ours, number, written(tmp_path, ours, number, True)) for number in (0, 1)]
    trace = cp.import_vllm(outputs, IDS, model=loaded())
    for number in (0, 1):
        assert trace.committed(number) == ours.committed(number) and trace.text(number) == ours.text(number)
        assert bitwise(trace.states("S", 2, number), ours.states("S", 2, number))
    table, own = (cp.analysis.read_states(t, cp.lenses.LogitLens(), layers=[2]) for t in (trace, ours))
    assert sorted(table["rank"]) == sorted(own["rank"]) and table.agrees.all()


def test_of_an_output_without_its_rows_the_first_token_is_taken(ours: cp.Trace, tmp_path: Path) -> None:
    trace = cp.import_vllm(outputs_of(ours, 0, written(tmp_path, ours, 0, False)), IDS)
    assert trace.committed(0) == ours.committed(0)[:1]


def test_a_file_alone_can_be_split(ours: cp.Trace, tmp_path: Path) -> None:
    trace = cp.import_vllm(written(tmp_path, ours, 0, True), IDS, num_prompt_tokens=5)
    assert trace.committed(0) == ours.committed(0)[:-1]
    assert trace.rows(0).role.tolist() == ["prompt"] * 5 + ["committed"] * (NEW - 1)
    assert trace.rows(0).step.tolist() == [0] * 5 + list(range(1, NEW))


def test_a_file_that_vllm_is_still_at_is_waited_for(
    ours: cp.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives its outputs before their files are whole: half of one was read, and refused."""
    path = written(tmp_path, ours, 0, False)
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    with path.with_name(path.name + ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr("cacheprobe.trace.importers.vllm.SECONDS_TO_WAIT", 0.1)
        with pytest.raises(ImportRefused, match="is still being written after 0 s"):
            cp.import_vllm(path, IDS)
        monkeypatch.setattr("cacheprobe.trace.importers.vllm.SECONDS_TO_WAIT", 60.0)

        def finish() -> None:
            path.write_bytes(data)
            lock.close()

        writer = threading.Timer(0.3, finish)
        writer.start()
        assert cp.import_vllm(tmp_path, IDS).requests[0].prompt_token_ids == tuple(PROMPTS[0])
        writer.join()


MISSING: list[tuple[Callable[[cp.Trace], Any], str]] = [
    (lambda trace: trace.states("T", 0, 0), "no T: vLLM keeps the stream between blocks"),
    (lambda trace: trace.states("S", 1, 0), r"layer 1 was not captured; this run kept layers \[0, 2\]"),
    (lambda trace: trace.heads("q", 0, 0), "no q: vLLM keeps no attention heads"),
    (lambda trace: trace.ledger(0), "no ledger: vLLM's files do not say"),
    (lambda trace: trace.logprobs(0), "no log-probabilities: vLLM's files hold none"),
    (lambda trace: trace.hypotheses(), "no Z: "),
]


def test_what_is_missing_is_said_to_be_missing(ours: cp.Trace, tmp_path: Path) -> None:
    trace = cp.import_vllm(written(tmp_path, ours, 0, False), IDS)
    for it in (trace, cp.load_trace(trace.save(tmp_path / "run"))):
        for ask, said in MISSING:
            with pytest.raises(ValueError, match=said):
                ask(it)
    assert trace.events().batch_rows.isna().all() and trace.events().seconds.isna().all()


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([3, 1], r"layers=\[3, 1\]: give eagle_aux_hidden_state_layer_ids .* ascending"),
        ([1, 1], "ascending"),
        ([], "ascending"),
        ([1, 2, 3], "holds states of 2 layers, and layers= names 3"),
        ([1], "holds states of 2 layers, and layers= names 1"),
        ([0], "layer id 0 is the embedding"),
        ([1, 2], "given as layer 1 lie .* 0.00 from its layer 2"),
        ([1, 4], "states of layer 3 were given; .* has layers 0 to 2"),
    ],
)
def test_other_layers_are_refused(ours: cp.Trace, tmp_path: Path, layers: list[int], said: str) -> None:
    with pytest.raises(ImportRefused, match=said):
        cp.import_vllm(written(tmp_path, ours, 0, False), layers, model=loaded())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(token_ids=torch.tensor([1, 2])), r"token_ids \(2,\); expected \[tokens, layers, m\] and \[tokens\]"),
        (dict(hidden_states=torch.zeros(5, 32)), r"hidden_states \(5, 32\)"),
        (dict(hidden_states=torch.full((5, 2, 32), torch.nan)), "NaN or infinite"),
        (dict(hidden_states=torch.zeros(0, 2, 32), token_ids=torch.zeros(0, dtype=torch.long)), "holds no tokens"),
        (dict(hidden_states=torch.zeros(5, 2, 16)), "states are 16 wide, those of .* 32"),
    ],
)
def test_another_layout_is_refused(ours: cp.Trace, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ImportRefused, match=said):
        cp.import_vllm(written(tmp_path, ours, 0, False, **changed), IDS, model=loaded())


def test_files_that_are_none_are_refused(ours: cp.Trace, tmp_path: Path) -> None:
    path = written(tmp_path, ours, 0, False)
    held = load_file(path)
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Any, str]] = [
        (tmp_path / "nowhere.safetensors", "cannot be read as safetensors"),
        (tmp_path / "empty", r"holds no .safetensors file"),
        ([], "nothing to import"),
        (hf_model(), "names no hidden_states_path"),
        (outputs_of(ours, 1, path), "other tokens than the output"),
        (tmp_path / "x.safetensors.zst", "compressed; unpack it first"),
    ]
    for given, said in cases:
        with pytest.raises(ImportRefused, match=said):
            cp.import_vllm(given, IDS)
    with pytest.raises(ImportRefused, match="not a prompt of 6"):
        cp.import_vllm(path, IDS, num_prompt_tokens=6)
    with pytest.raises(ImportRefused, match="lists 2 lengths for 1 files"):
        cp.import_vllm(path, IDS, num_prompt_tokens=[5, 5])
    save_file({"hidden_states": held["hidden_states"]}, path)
    with pytest.raises(ImportRefused, match="has no token_ids; expected hidden_states and token_ids"):
        cp.import_vllm(path, IDS)


def test_the_command_says_what_is_missing(ours: cp.Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, ours, 0, False)
    cli_import.vllm((tmp_path,), layers=("1,3",), out=tmp_path / "run", name="tiny")
    said = capsys.readouterr().out
    assert "states: S of layers 0, 2" in said and "missing: T: vLLM keeps the stream" in said
    assert cp.load_trace(tmp_path / "run").fingerprint["model"] == "tiny"
    with pytest.raises(ValueError, match="no list of numbers, as in 1,2,3,4"):
        cli_import.vllm((tmp_path,), layers=("one",), out=tmp_path / "run")
