"""What Hugging Face's generate returned, beside our own trace of the same prompts; and what of it is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cacheprobe as cp
from cacheprobe.ops.equality import close
from cacheprobe.trace.importers.common import ImportRefused
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views import write_report
from cacheprobe.views.report.listings import request_listings, run_listings
from tests.reported.imports.imported import Generated, written
from tests.tiny import hf_model, loaded

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
NEW = 8
BECAUSE = "another attention and another batch: sums of float32 in another order"


def generated(prompts: list[list[int]], **settings: Any) -> tuple[Any, torch.Tensor]:
    """Real outputs of a tiny random model, and the mask of the padded prompts."""
    made = Generated(hf_model(), prompts, max_new_tokens=NEW, **settings)
    return made.output, made.mask


@pytest.fixture(scope="module")
def ours() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, max_new_tokens=NEW, window=4, capacity=96, progress=False, capture="STCZ")


@pytest.fixture(scope="module")
def imported() -> cp.Trace:
    outputs, mask = generated(PROMPTS)
    return cp.import_generate(outputs, attention_mask=mask, model=loaded())


def test_it_agrees_with_our_own_trace(ours: cp.Trace, imported: cp.Trace) -> None:
    for request_id in (0, 1):
        assert imported.committed(request_id) == ours.committed(request_id)
        assert imported.text(request_id) == ours.text(request_id)
        nats = [torch.tensor(trace.logprobs(request_id)) for trace in (imported, ours)]
        assert close(*nats, 1e-5, because=BECAUSE)
        rows, own = (trace.rows(request_id).sort_values("position") for trace in (imported, ours))
        for column in ("position", "token_id", "token", "role", "status", "phase"):
            assert rows[column].tolist() == own[column].tolist(), column
        for layer in (0, 1):
            theirs = imported.states("S", layer, request_id)
            assert len(theirs) == len(PROMPTS[request_id]) + NEW - 1
            assert close(theirs, ours.states("S", layer, request_id), 1e-5, because=BECAUSE)


def test_a_lens_reads_what_it_reads_of_our_states(ours: cp.Trace, imported: cp.Trace) -> None:
    lens = cp.lenses.LogitLens()
    theirs, own = cp.analysis.read_states(imported, lens), cp.analysis.read_states(ours, lens, layers=[0, 1])
    keys = ["request_id", "position", "layer"]
    theirs, own = (table.sort_values(keys, ignore_index=True) for table in (theirs, own))
    assert theirs[[*keys, "token_id", "rank"]].equals(own[[*keys, "token_id", "rank"]])
    nats = [torch.tensor(table.logprob_nats.to_numpy()) for table in (theirs, own)]
    assert close(*nats, 1e-5, because=BECAUSE)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda trace: trace.states("T", 0, 0), "no T: Hugging Face's generate keeps the stream between blocks"),
        (lambda trace: trace.states("C", 0, 0), "no C: Hugging Face's generate keeps"),
        (lambda trace: trace.states("S", 2, 0), "no S of layer 2: .* stands behind the final norm"),
        (lambda trace: trace.states("S", 5, 0), "layer 5 was not captured"),
        (lambda trace: trace.heads("z", 0, 0), "no z: Hugging Face's generate keeps no attention heads"),
        (lambda trace: trace.pattern(0, 0), "no pattern: "),
        (lambda trace: trace.thoughts(), "wrote no thoughts"),
        (
            lambda trace: cp.analysis.attribution(trace, 0, 4),
            "a logit falls into S, T and C of all layers; this run kept S",
        ),
        (lambda trace: cp.verify(trace, loaded()), "imported from Hugging Face's generate: it followed no schedule"),
    ],
)
def test_what_is_missing_is_said_to_be_missing(imported: cp.Trace, ask: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ask(imported)


def test_without_logits_there_are_no_logprobs() -> None:
    """Scores are taken after processors, so they are not the model's own."""
    outputs, mask = generated(PROMPTS, output_logits=False, output_scores=True)
    trace = cp.import_generate(outputs, attention_mask=mask, stop_token_ids=())
    with pytest.raises(ValueError, match="no log-probabilities: no logits were kept; use generate.*output_logits=True"):
        trace.logprobs(0)


def test_it_is_stored_and_looked_at_like_a_run(imported: cp.Trace, tmp_path: Path) -> None:
    imported.save(tmp_path / "run")
    again = cp.load_trace(tmp_path / "run")
    assert torch.equal(again.states("S", 1, 0), imported.states("S", 1, 0)) and again.missing == imported.missing
    assert again.ledger(0).provenance.tolist() == ["prefill"] * 5 + ["decoded"] * (NEW - 1)
    assert "imported from Hugging Face" in str(run_listings(again)) and "length" in str(request_listings(again, 0))
    assert write_report(again, tmp_path / "report.html").stat().st_size > 5_000
    assert StoredRun(tmp_path / "run").meta["missing"] == imported.missing


def test_a_file_holds_the_same(imported: cp.Trace, tmp_path: Path) -> None:
    """As the docs say how to write one where cacheprobe is not installed."""
    file = written(*generated(PROMPTS), tmp_path / "g.safetensors")
    trace = cp.import_generate(file, stop_token_ids=())
    assert trace.logprobs(1) == imported.logprobs(1)
    assert torch.equal(trace.states("S", 1, 1), imported.states("S", 1, 1))
    with pytest.raises(ValueError, match="imported without a model, so nothing says whose states"):
        cp.analysis.read_states(trace, cp.lenses.LogitLens(), model=loaded())
    save_file({name: held for name, held in load_file(file).items() if name != "hidden_states.3.1"}, file)
    with pytest.raises(ImportRefused, match=r"has no hidden_states\.3\.1"):
        cp.import_generate(file, stop_token_ids=())
    (tmp_path / "broken").write_bytes(b"no safetensors")
    with pytest.raises(ImportRefused, match="cannot be read as safetensors"):
        cp.import_generate(tmp_path / "broken")


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        (dict(num_beams=2), {}, "beams change places"),
        (dict(use_cache=False), {}, "passes over 5, 6, 7, 8, ... of them.*use_cache=True"),
        (dict(output_hidden_states=False), {}, "holds no sequences with hidden states; use generate"),
        ({}, dict(attention_mask=None), "give the attention_mask="),
        ({}, dict(stop_token_ids=None), "may have ended at different tokens; give stop_token_ids="),
    ],
)
def test_what_is_no_single_text_is_refused(settings: dict[str, Any], given: dict[str, Any], said: str) -> None:
    outputs, mask = generated(PROMPTS, **settings)
    with pytest.raises(ImportRefused, match=said):
        cp.import_generate(outputs, **{"attention_mask": mask, "stop_token_ids": (), **given})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_are_refused(value: float) -> None:
    outputs, mask = generated(PROMPTS)
    outputs.hidden_states[2][2][1, 0, 5] = value
    with pytest.raises(ImportRefused, match="sequence 1: states of layer 1 .* are NaN or infinite"):
        cp.import_generate(outputs, attention_mask=mask, stop_token_ids=())


def test_a_name_that_promises_many_passes_takes_little(tmp_path: Path) -> None:
    save_file({"sequences": torch.ones(1, 3, dtype=torch.long), "hidden_states.400000000.0": torch.ones(1)},
              tmp_path / "g.safetensors")  # fmt: skip
    with pytest.raises(ImportRefused, match=r"has no hidden_states\.0"):
        cp.import_generate(tmp_path / "g.safetensors", stop_token_ids=())


def test_states_of_another_layer_or_vocabulary_are_refused() -> None:
    outputs, mask = generated(PROMPTS)
    shifted = SimpleNamespace(sequences=outputs.sequences, hidden_states=[s[1:] for s in outputs.hidden_states])
    with pytest.raises(ImportRefused, match="given as layer 0 .* 0.00 from its layer 1"):
        cp.import_generate(shifted, attention_mask=mask, model=loaded())
    with pytest.raises(ImportRefused, match="outside the vocabulary"):
        cp.import_generate(
            SimpleNamespace(sequences=outputs.sequences + 500, hidden_states=outputs.hidden_states),
            attention_mask=mask,
            model=loaded(),
        )
