"""The patchscope lens: a state read in a prompt, during a run and after it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.core.registry import make
from cacheprobe.lenses.base import LensError, require_readable
from cacheprobe.lenses.tuned import TunedLens
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.views.dashboard.questions import CannotShow
from cacheprobe.views.dashboard.run_list import RunList
from tests.thinking.test_thinking import tiny as tiny_thinker
from tests.tiny import PROMPTS, SMALL, hf_model, loaded
from tests.twins.lenses_slowly import inserted_slowly

PROMPT = (5, 17, 3, 44, 9, 60, 21)


@pytest.mark.parametrize(
    ("family", "target_layer"), [("llama", None), ("llama", 0), ("llama", 2), ("gpt2", 0), ("gemma2", None)]
)
def test_a_reading_is_one_plain_forward(family: str, target_layer: int | None) -> None:
    """At the state's own layer or at one layer; the last layer's states are the model's output. Zero states too."""
    model, lens = loaded(family), cp.lenses.Patchscope(PROMPT, target_layer)
    states = torch.randn(30, model.d_model, generator=torch.Generator().manual_seed(0))
    states[[3, 4, 7, 20]] = 0
    layers = torch.arange(30) % 3
    logits = lens.logits(model, states, layers)
    for state, layer, found in zip(states, layers.tolist(), logits, strict=True):
        at = layer if target_layer is None or layer == 2 else target_layer
        wanted = inserted_slowly(hf_model(family), list(PROMPT), 6, at, state)
        assert close(found.double(), wanted, 1e-5, because="products with other numbers of rows")
    assert bitwise(logits[layers == 2], model.read_out(states)[layers == 2])


def maps(width: int) -> dict[str, Any]:
    """A linear map of each kind."""
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(width, width)
    linear.weight.data, linear.bias.data = (torch.randn(s, generator=generator) for s in ((width, width), (width,)))
    return {"matrix": torch.randn(width, width, generator=generator), "linear": linear, "function": lambda s: 1 - s}


def test_a_mapped_reading_is_that_of_the_function_patchscope() -> None:
    """Of rejected drafts."""
    model = loaded()
    matrix = maps(model.d_model)["matrix"]
    trace = cp.run(model, PROMPTS[:2], **SMALL, capture="S", drafter=cp.drafters.EarlyExit(layer=0))
    rows = trace.rows(status="rolled_back").query("num_layers == 3").head(4)
    by_lens = cp.analysis.read_states(trace, cp.lenses.Patchscope(PROMPT, None, matrix), rows=rows)
    table = cp.analysis.patchscope(model, trace, rows, prompt=PROMPT, layers=[0, 1], linear_map=matrix, progress=False)
    ours = by_lens[by_lens.layer < 2].sort_values(["row", "layer"])
    theirs = table.sort_values(["row", "layer"])
    assert len(ours) and ours.token_id.tolist() == theirs.token_id.tolist()
    assert np.allclose(ours.logprob_nats, theirs.logprob_nats, atol=1e-5)


def test_the_fingerprint_names_prompt_layer_and_map(tmp_path: Path) -> None:
    """So that a run cannot go on with another lens of the same name; tokens and states stay comparable."""
    model, settings = loaded(), {k: v for k, v in SMALL.items() if k != "progress"}
    by = maps(model.d_model)
    lenses = [
        cp.lenses.Patchscope(PROMPT), cp.lenses.Patchscope(PROMPT[:3]), cp.lenses.Patchscope(PROMPT, 1),
        *(cp.lenses.Patchscope(PROMPT, None, one) for one in by.values()),
        cp.lenses.Patchscope(PROMPT, None, 2 * by["matrix"]), cp.lenses.Patchscope(PROMPT, None, lambda s: 2 - s),
        TunedLens.fresh(model), replace(TunedLens.fresh(model), biases=torch.ones(2, model.d_model)),
    ]  # fmt: skip
    named = [cp.run(model, PROMPTS[:1], **SMALL, lens=lens).fingerprint for lens in lenses]
    assert len({one["lens"] for one in named}) == len(lenses), "two lenses with one name"
    plain = cp.run(model, PROMPTS[:1], **SMALL).fingerprint
    assert str(PROMPT) in named[0]["lens"] and "lens" not in plain and not fingerprint_differences(named[0], plain)
    stream = cp.stream(model, PROMPTS[:2], **settings, lens=lenses[0], capture="Z", out=tmp_path / "run")
    next(stream)
    stream.close()
    for other in lenses[1:3]:
        with pytest.raises(ValueError, match=r"read the lens Patchscope\(.*, given is Patchscope"):
            cp.resume(tmp_path / "run", model, lens=other)
    assert cp.resume(tmp_path / "run", model, lens=lenses[0], progress=False).meta["finish"]


@pytest.mark.parametrize("path", ["plain", "bridge"])
def test_a_lens_does_not_disturb_the_run(path: str) -> None:
    """With drafts, rollback, deterministic requests, a preempted cache and interventions: states and tokens keep their
    bits."""
    change = cp.interventions.zero(request_id=1, site="C", layer=1, own_fingerprint=True)
    settings = dict(SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=0.5, interventions=change, path=path)
    plain, read = (cp.run(loaded(), PROMPTS, lens=lens, **settings) for lens in (None, cp.lenses.Patchscope(PROMPT)))
    assert "rolled_back" in set(read.rows().status) and set(read.hypotheses().lens) == {"patchscope"}
    for request_id in range(len(PROMPTS)):
        assert plain.digest(request_id) == read.digest(request_id)
    pd.testing.assert_frame_equal(plain.rows(), read.rows())
    readings = [trace.hypotheses().entropy_nats for trace in (plain, read)]
    assert (readings[0] - readings[1]).abs().max() > 0.1, "the control: the lens reads something else"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_states_read_as_they_were_read_in_the_run(dtype: torch.dtype) -> None:
    lens = cp.lenses.Patchscope(PROMPT)
    trace = cp.run(loaded(dtype=dtype), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), lens=lens)
    again = cp.analysis.read_states(trace, lens)
    pd.testing.assert_frame_equal(again, trace.hypotheses(), check_exact=True)


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        (cp.lenses.Patchscope(), "the patchscope lens cannot read .* has no tokenizer"),
        (cp.lenses.Patchscope(()), "the target prompt is empty"),
        (cp.lenses.Patchscope((97,)), "token id 97 is outside the vocabulary of 97"),
        (cp.lenses.Patchscope(PROMPT, 3), "target_layer=3 of the patchscope lens: .* has layers 0 to 2"),
        (cp.lenses.Patchscope(PROMPT, -1), "target_layer=-1"),
        (
            cp.lenses.Patchscope(PROMPT, None, torch.ones(32, 8)),
            "lens: linear_map does not take the states",
        ),
        (cp.lenses.Patchscope(PROMPT, None, lambda states: states[:, :5]), r"the linear_map gave \[1, 5\]"),
    ],
)
def test_what_a_model_cannot_read_is_refused(lens: cp.lenses.Patchscope, message: str) -> None:
    with pytest.raises(LensError, match=message):
        cp.run(loaded(), PROMPTS[:1], **SMALL, lens=lens)


def test_thinking_models_and_other_sites_are_refused() -> None:
    with pytest.raises(LensError, match="cannot read thinker: thinker keeps a ThinkingCache"):
        cp.lenses.Patchscope(PROMPT).check(ThinkingLM(tiny_thinker(), name="thinker"))
    with pytest.raises(LensError, match="the patchscope lens reads S, not T"):
        require_readable(cp.lenses.Patchscope(PROMPT), loaded(), "T", [0])


def test_the_registry_makes_it() -> None:
    assert repr(make("lenses", "patchscope:target_layer=1")) == repr(cp.lenses.Patchscope(target_layer=1))
    assert repr(cp.lenses.Patchscope(PROMPT, 1)) == f"Patchscope(prompt={PROMPT}, target_layer=1)"


def test_the_dashboard_reads_with_it(tmp_path: Path) -> None:
    """The menu has it, and its readings are those of the library; at T it says why not."""
    hf_model().save_pretrained(tmp_path / "model")
    model = cp.load_model(str(tmp_path / "model"))
    trace = cp.run(model, PROMPTS[:1], **SMALL)
    trace.save(tmp_path / "run")
    run_list = RunList.of([tmp_path / "run"], str(tmp_path / "model"))
    reader, tables, rows = run_list.reader, run_list.tables(0), trace.rows(0).tail(2)
    (item,) = [item for item in reader.menu(tables) if item["value"] == "patchscope"]
    assert not item["disabled"]
    wanted = cp.analysis.read_states(trace, cp.lenses.Patchscope.fresh(model), rows=rows)
    pd.testing.assert_frame_equal(reader.read(tables, "patchscope", "S", rows), wanted)
    with pytest.raises(CannotShow, match="the patchscope lens reads S, not T"):
        reader.read(tables, "patchscope", "T", rows)


def test_a_zero_state_is_not_taken_for_another() -> None:
    """Of fewer states than layers, where a layer's number is as large as a state's."""
    lens, model = cp.lenses.Patchscope((5, 17, 3)), loaded()
    states, layers = torch.stack([torch.ones(model.d_model), torch.zeros(model.d_model)]), torch.tensor([0, 2])
    together = lens.logits(model, states, layers)
    for number in range(2):
        alone = lens.logits(model, states[number : number + 1], layers[number : number + 1])
        assert close(together[number], alone[0], 1e-5, because="a batch of another size")
