"""States in the formats of other libraries, each read back by the library that it is for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray
from datasets import Dataset, load_dataset
from safetensors.torch import load_file

import cacheprobe as cp
from cacheprobe.analysis.exports import ChosenStates, to_speculators
from cacheprobe.cli.app import app
from cacheprobe.trace.state_store import MemoryStore
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.tiny import PROMPTS, SMALL, loaded

EARLY = cp.drafters.EarlyExit(layer=1)


@pytest.fixture(scope="module", params=["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def trace(request: pytest.FixtureRequest) -> cp.Trace:
    """Two requests with rejected drafts; a drafted row has no state of the last layer."""
    model = loaded(dtype=getattr(torch, request.param))
    return cp.run(model, PROMPTS[:2], **SMALL, capture="STC", drafter=EARLY)


def lines_slowly(trace: cp.Trace) -> dict[tuple[int, str, int], tuple[Any, ...]]:
    """By (row, site, layer): request, status, position, token and vector, each asked for by itself."""
    found = {}
    for line in trace.rows().itertuples():
        for layer in range(line.num_layers):
            for site in "STC":
                (vector,) = trace.vectors(site, layer, [line.row]).float().tolist()
                found[line.row, site, layer] = line.request_id, line.status, line.position, line.token, vector
    return found


def lines_of(frame: pd.DataFrame) -> dict[tuple[int, str, int], tuple[Any, ...]]:
    keys = zip(frame.row, frame.site, frame.layer, strict=True)
    vectors = [np.asarray(vector, dtype="float32").tolist() for vector in frame.vector]
    values = zip(frame.request_id, frame.status, frame.position, frame.token, vectors, strict=True)
    return dict(zip(keys, values, strict=True))


def test_a_dataframe_has_every_captured_state_once(trace: cp.Trace) -> None:
    frame = cp.analysis.to_dataframe(trace)
    assert len(frame) == len(lines_of(frame)) and lines_of(frame) == lines_slowly(trace)
    assert set(frame.status) >= {"committed", "rolled_back"}
    assert frame.vector[0].dtype == (np.float16 if trace.states("S", 0, 0).dtype == torch.float16 else np.float32)


def test_states_of_float16_are_written_as_such(tmp_path: Path) -> None:
    whole = cp.run(loaded(), PROMPTS[:1], **SMALL, capture="S")
    states = {("S", layer): whole.store.stored("S", layer).half() for layer in range(3)}
    half = replace(whole, store=MemoryStore(states))
    frame = cp.analysis.to_dataframe(half)
    assert frame.vector[0].dtype == np.float16
    assert [vector.tolist() for vector in frame.vector] == [
        half.vectors("S", line.layer, [line.row])[0].tolist() for line in frame.itertuples()
    ]
    (path,) = ChosenStates(half, "S").write_parquet(tmp_path / "states", progress=False)
    read = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert read.features["vector"].feature.dtype == "float16"


def test_datasets_reads_them_in_memory_and_from_parquet(trace: cp.Trace, tmp_path: Path) -> None:
    ours = cp.analysis.to_datasets(trace, "S", [0, -1], statuses="committed")
    assert isinstance(ours, Dataset) and set(ours["site"]) == {"S"} and set(ours["layer"]) == {0, 2}
    paths = ChosenStates(trace, "S", [0, -1], statuses="committed").write_parquet(tmp_path / "states", progress=False)
    assert [path.name for path in paths] == ["states-00000.parquet", "states-00001.parquet"]
    files = [str(path) for path in paths]
    theirs = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert theirs.features == ours.features and theirs.to_list() == ours.to_list()
    last = [line["vector"] for line in ours.to_list() if (line["layer"], line["request_id"]) == (2, 1)]
    assert last == trace.states("S", 2, 1).float().tolist()


def test_numpy_and_xarray_have_named_axes(trace: cp.Trace, tmp_path: Path) -> None:
    arrays, named = cp.analysis.to_numpy(trace, 1), cp.analysis.to_xarray(trace, 1)
    assert sorted(arrays) == ["C", "S", "T"] and isinstance(named, xarray.Dataset)
    for site, array in arrays.items():
        for layer in range(3):
            expected = trace.states(site, layer, 1).float().numpy()
            assert np.array_equal(array[layer], expected)
            assert np.array_equal(named[site].sel(layer=layer).transpose("position", "component"), expected)
    committed = [*PROMPTS[1], *trace.committed(1)[:-1]]
    assert named.token_id.values.tolist() == committed and named.sizes["component"] == 32


@pytest.mark.parametrize("layers", [None, [0, 3]])
def test_speculators_gets_tokens_and_states_before_the_final_norm(tmp_path: Path, layers: list[int] | None) -> None:
    """Its trainer computes targets from the last slot by the verifier's own norm and unembedding."""
    module = tiny_model(size=replace(TINY, layers=8))
    trace = cp.run(cp.load_model(module), PROMPTS[:2], **SMALL, capture="S")
    for request, path in enumerate(to_speculators(trace, tmp_path, layers, progress=False)):
        assert path.name == f"hs_{request}.safetensors"
        data = load_file(path)
        tokens, hidden = data["token_ids"], data["hidden_states"]
        assert tokens.tolist() == [*PROMPTS[request], *trace.committed(request)[:-1]]
        assert torch.isfinite(hidden).all() and hidden.shape == (len(tokens), len(layers or [1, 3, 4]) + 1, 32)
        with torch.no_grad():
            targets = module.lm_head(module.model.norm(hidden[:, -1])).argmax(-1)
        assert targets[len(PROMPTS[request]) - 1 :].tolist() == trace.committed(request)
        with torch.no_grad():
            theirs = module(tokens[None], output_hidden_states=True).hidden_states
        for slot, layer in enumerate(layers or [1, 3, 4]):
            assert torch.allclose(hidden[:, slot], theirs[layer + 1][0], atol=1e-4)  # sums of another shape


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cp.run(loaded(), PROMPTS[:2], **SMALL, capture="S").save(tmp_path / "run")
    out = tmp_path / "states"
    arguments = ["export", str(tmp_path / "run"), "--out", str(out)]
    app([*arguments, "--request", "1", "--layer", "2", "--status", "committed"], result_action="return_value")
    assert [path.name for path in out.iterdir()] == ["states-00001.parquet"]
    assert len(pd.read_parquet(out)) == len(PROMPTS[1]) + SMALL["max_new_tokens"] - 1
    app([*arguments, "--format", "speculators", "--layer", "0"], result_action="return_value")
    assert (out / "hs_1.safetensors").is_file() and "2 files" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--request, --site and --status choose lines of parquet"):
        app([*arguments, "--format", "speculators", "--request", "1"], result_action="return_value")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(sites="Q"), "site 'Q' was not captured; this run kept S, T, C"),
        (dict(layers=3), r"layer 3 was not captured; this run kept layers \[0, 1, 2\]"),
        (dict(statuses="comitted"), "unknown status 'comitted'.*did you mean"),
        (dict(requests=7), "no request 7"),
    ],
)
def test_what_the_run_lacks_is_refused_by_name(trace: cp.Trace, asked: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message):
        cp.analysis.to_dataframe(trace, **asked)


def test_runs_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    bare = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=None)
    for export in (
        lambda: cp.analysis.to_dataframe(bare),
        lambda: cp.analysis.to_numpy(bare, 0),
        lambda: cp.analysis.to_xarray(bare, 0),
    ):
        with pytest.raises(ValueError, match="this run kept no states"):
            export()
    with pytest.raises(ValueError, match="the model has 3 layers, too few for EAGLE-3"):
        to_speculators(cp.run(loaded(), PROMPTS[:1], **SMALL, capture="S"), tmp_path)
    rows = cp.kv_snapshot(loaded(), PROMPTS[0])
    begun = cp.run(loaded(), [cp.Request(PROMPTS[0], cached=rows)], **SMALL, capture="S")
    with pytest.raises(ValueError, match="request 0 began from cached keys and values"):
        to_speculators(begun, tmp_path, [0])


def test_a_status_without_rows_gives_no_lines(trace: cp.Trace) -> None:
    assert cp.analysis.to_dataframe(trace, statuses="abandoned").empty
    assert len(cp.analysis.to_datasets(trace, statuses="abandoned")) == 0


def test_a_choice_that_is_repeated_is_taken_once(trace: cp.Trace) -> None:
    once = cp.analysis.to_dataframe(trace, "S", 2, 0, "committed")
    asked = ("SS", [2, -1], np.array([0, 0]), ["committed", "committed"])
    assert lines_of(cp.analysis.to_dataframe(trace, *asked)) == lines_of(once)
    assert len(cp.analysis.to_dataframe(trace, *asked)) == len(once) > 20
    for empty in (dict(layers=[]), dict(sites=()), dict(statuses=[]), dict(requests=np.array([], dtype=int))):
        with pytest.raises(ValueError, match="is empty, so there is nothing to export"):
            cp.analysis.to_dataframe(trace, **empty)


def test_exports_of_two_runs_are_not_mixed(trace: cp.Trace, tmp_path: Path) -> None:
    ChosenStates(trace, "S").write_parquet(tmp_path, progress=False)
    to_speculators(trace, str(tmp_path), [0], progress=False)
    with pytest.raises(ValueError, match="holds an earlier export, such as states-00000.parquet"):
        ChosenStates(trace, "S").write_parquet(tmp_path, progress=False)
    with pytest.raises(ValueError, match="holds an earlier export, such as hs_0.safetensors"):
        to_speculators(trace, tmp_path, [0], progress=False)
