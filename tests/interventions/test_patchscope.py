"""Patchscopes of recorded states against plain forwards, the run's own continuation, and the logit lens."""

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.insertion import TargetPrompt, inserted
from cacheprobe.models.paths import usable
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.ops.equality import bitwise, close
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.thinking.test_thinking import tiny as tiny_thinker
from tests.tiny import PROMPTS, SMALL, hf_model, loaded, perturbed
from tests.twins.lenses_slowly import continued_slowly, inserted_slowly

TARGET = [5, 17, 3, 44, 9, 60, 21]
QUIET = dict(progress=False)
TOLERANCE = 1e-5
"""Of log-probabilities of a few nats: our states are rows of a batch, whose sums are taken in another order."""


@cache
def recorded(family: str = "llama", window: int | None = None) -> cp.Trace:
    """A run with rejected drafts."""
    return cp.run(loaded(family, window=window), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=0))


def some_of_every_status(trace: cp.Trace) -> pd.DataFrame:
    rows = trace.rows()
    chosen = rows[rows.num_layers == 3].groupby("status").head(2)
    assert {"committed", "rolled_back"} <= set(chosen.status)
    return chosen


@pytest.mark.parametrize(("family", "window", "position"), [("llama", None, 6), ("gpt2", None, 2), ("mistral", 3, 6)])
def test_every_line_is_one_plain_forward(family: str, window: int | None, position: int) -> None:
    """States of every status and layer, inserted at every layer, at the last token and before it; four tokens each."""
    trace, hf = recorded(family, window), hf_model(family, window=window)
    rows = some_of_every_status(trace)
    settings = dict(prompt=TARGET, position=position - 7, target_layers=range(3), max_new_tokens=4)
    table = cp.analysis.patchscope(loaded(family, window=window), trace, rows, **settings, **QUIET)
    assert len(table) == 9 * len(rows) and set(table.status) == set(rows.status)
    nats = []
    for line in table.itertuples():
        state = trace.vectors("S", line.layer, [int(line.row)])[0]
        logprobs = inserted_slowly(hf, TARGET, position, line.target_layer, state).log_softmax(-1)
        assert line.top_token_ids.tolist() == logprobs.topk(5).indices.tolist()
        assert close(torch.tensor(line.top_logprob_nats).double(), logprobs.topk(5).values, TOLERANCE, because="sums")
        said = continued_slowly(hf, TARGET, position, line.target_layer, state, 4)
        assert line.text == trace.model.decode(said) and line.token_id == said[0]
        assert line.top_tokens == trace.model.token_texts(line.top_token_ids.tolist())
        nats.append(line.logprob_nats)
    assert max(nats) - min(nats) > 0.1, "the control: states matter"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_rows_own_text_gives_what_the_run_said(family: str) -> None:
    """Put back where it was, a state leads to the run's own continuation; that of a rejected draft, to its reading."""
    trace, model = recorded(family), loaded(family)
    rows, readings = trace.rows(), trace.hypotheses(include_rolled_back=True)
    for request_id in (0, 1):
        text = PROMPTS[request_id] + trace.committed(request_id)
        own = rows[(rows.request_id == request_id) & (rows.num_layers == 3)]
        rejected = own[own.status == "rolled_back"].sort_values(["step", "position"]).head(1)
        committed = own[(own.status == "committed") & (own.position >= len(PROMPTS[request_id]) - 1)]
        for row in (*committed.head(1).itertuples(), *rejected.itertuples()):
            prompt, left = [*text[: row.position], row.token_id], text[row.position + 1 :]
            table = cp.analysis.patchscope(
                model, trace, [row.row], prompt=prompt, max_new_tokens=max(1, len(left)), **QUIET
            )
            last = readings[(readings.row == row.row) & (readings.layer == 2)].iloc[0]
            assert table.layer.tolist() == table.target_layer.tolist() == [0, 1, 2]
            assert set(table.token_id) == {last.token_id} and set(table.read_token_id) == {row.token_id}
            assert (table.logprob_nats - last.logprob_nats).abs().max() < TOLERANCE * 10
            if row.status == "committed":
                assert set(table.text) == {model.decode(left)}


def test_the_last_layer_is_the_logit_lens() -> None:
    trace = recorded()
    rows = trace.rows()[lambda table: table.num_layers == 3]
    table = cp.analysis.patchscope(loaded(), trace, rows, target_layers=2, prompt=TARGET, **QUIET)
    lens = cp.analysis.read_states(trace, cp.lenses.LogitLens(), rows=rows)
    both = table.merge(lens, on=["row", "layer"], suffixes=("", "_lens"))
    assert len(both) == len(table) == 3 * len(rows)
    assert (both.token_id == both.token_id_lens).all()
    assert (both.logprob_nats - both.logprob_nats_lens).abs().max() < TOLERANCE


def test_a_states_bits_do_not_depend_on_the_others() -> None:
    """More states than a batch holds, some of them by themselves, and one state at every index of a batch."""
    dtype = torch.bfloat16
    model = usable(loaded(dtype=dtype), "auto")
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(130, model.d_model, generator=generator).to(dtype)
    layers = torch.randint(0, 3, (len(states),), generator=generator)
    target = TargetPrompt.of(model, TARGET, 4)

    def residuals(states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        return torch.cat([last for _, last in inserted(target, states, layers)])

    together = residuals(states, layers)
    for i in (0, 57, 95, 96, 129):
        assert bitwise(residuals(states[i : i + 1], layers[i : i + 1])[0], together[i])
    same = residuals(states[:1].expand(96, -1), torch.zeros(96, dtype=torch.long))
    assert bitwise(same, same[:1].expand(96, -1)) and not bitwise(together[0], together[1])


def test_maps_and_other_models() -> None:
    """A wider model with a vocabulary of its own; the map as a function, a matrix and a module."""
    trace = recorded()
    wide = cp.load_model(tiny_model("llama", size=replace(TINY, hidden=48, layers=5)))
    matrix = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    module = torch.nn.Linear(32, 48, bias=False)
    module.weight.data = matrix.clone()
    rows = some_of_every_status(trace)
    tables = [
        cp.analysis.patchscope(
            loaded(), trace, rows, prompt=TARGET, target_model=wide, target_layers=[3], linear_map=one, **QUIET
        )
        for one in (matrix, module, lambda states: states @ matrix.T)
    ]
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0], check_exact=False, rtol=1e-6)
    line = tables[0].iloc[4]
    state = matrix @ trace.vectors("S", line.layer, [int(line.row)])[0]
    wanted = inserted_slowly(wide.bridge.original_model, TARGET, 6, 3, state).log_softmax(-1)
    assert line.token_id == int(wanted.argmax()) and abs(line.logprob_nats - float(wanted.max())) < TOLERANCE * 10


def test_a_placeholder_is_found_in_the_prompt() -> None:
    trace = recorded()
    table, by_number = (
        cp.analysis.patchscope(loaded(), trace, [4], prompt=TARGET, position=position, **QUIET)
        for position in ("<44>", 3)
    )
    pd.testing.assert_frame_equal(table, by_number)


REFUSED = {
    "unknown site": (dict(site="T"), "inserts residual streams, got site 'T'"),
    "no such layer": (dict(layers=[3]), "layer 3 lies outside the model, which has layers 0 to 2"),
    "no such target layer": (dict(target_layers=[1, 3]), "layer 3 lies outside the model, which has layers 0 to 2"),
    "negative target layer": (dict(target_layers=-1), "layer -1 lies outside"),
    "no such position": (dict(position=7), "position 7 lies outside the target prompt, which has positions 0 to 6"),
    "no placeholder": (dict(position="x"), "position='x' stands nowhere among the prompt's tokens"),
    "two placeholders": (dict(prompt=[5, 6, 5], position="<5>"), "position='<5>' stands 2 times, at 0, 2 among"),
    "empty prompt": (dict(prompt=[]), "the target prompt is empty"),
    "unknown token": (dict(prompt=[97]), "target prompt: token id 97 is outside the vocabulary of 97"),
    "no tokenizer": (dict(prompt="cat"), "has no tokenizer"),
    "no tokens": (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1, got 0"),
    "too many tokens": (dict(max_new_tokens=9999), "exceed .* context of"),
    "map of another width": (
        dict(linear_map=torch.eye(31)),
        "linear_map does not take those of the trace",
    ),
    "map to another width": (dict(linear_map=torch.zeros(31, 32)), r"must be \[3, 32\], the linear_map gave \[3, 31\]"),
    "map to no tensor": (dict(linear_map=lambda states: None), r"the linear_map gave NoneType"),
    "map to NaN": (dict(linear_map=lambda s: s * torch.nan), r"request \d step 0 layer 0 position 4: the prediction"),
    "no rows": (dict(rows=[]), "there is nothing to read"),
    "unknown row": (dict(rows=[99999]), "the trace has no row 99999"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_inserted_is_named(name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        cp.analysis.patchscope(
            loaded(), recorded(), **{"rows": [4], "prompt": TARGET, **settings}, **QUIET
        )  # fmt: skip


def test_other_models_are_refused() -> None:
    trace, rows = recorded(), [4]
    wide = cp.load_model(tiny_model("llama", size=replace(TINY, hidden=48)))
    with pytest.raises(ValueError, match=r"must be \[3, 48\], those of the trace are \[3, 32\]; give a linear_map"):
        cp.analysis.patchscope(loaded(), trace, rows, prompt=TARGET, target_model=wide, **QUIET)
    with pytest.raises(ValueError, match="the trace is of weights"):
        cp.analysis.patchscope(perturbed(loaded(), 1e-3), trace, rows, prompt=TARGET, **QUIET)
    shallow = cp.load_model(tiny_model("llama", size=replace(TINY, layers=2)))
    with pytest.raises(ValueError, match="layer 2 is not in .* which has layers 0 to 1; give target_layers="):
        cp.analysis.patchscope(loaded(), trace, rows, prompt=TARGET, target_model=shallow, **QUIET)
    thinker = ThinkingLM(tiny_thinker(), name="thinker")
    with pytest.raises(ValueError, match="thinker keeps a ThinkingCache, more than keys and values"):
        cp.analysis.patchscope(loaded(), trace, rows, prompt=TARGET, target_model=thinker, **QUIET)
