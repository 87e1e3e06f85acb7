"""Features recorded during a run, without the states: the same numbers as from stored states, rejected drafts too."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.committer import Committer
from cacheprobe.engine.passes import EngineError
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from tests.dictionaries.planted import random_dictionary
from tests.tiny import PROMPTS, SMALL, loaded

DRAFTED = {**SMALL, "drafter": cp.drafters.EarlyExit(layer=1), "deterministic": [0]}


def recorded(dictionary: Dictionary, prompts: list = PROMPTS[:3], model: object = None, **settings: object) -> cp.Trace:
    capture = cp.CaptureConfig(**{"sites": None, "dictionary": dictionary, "top_features": 4, **settings})
    return cp.run(model or loaded(), prompts, **DRAFTED, capture=capture)


@pytest.mark.parametrize(
    ("architecture", "site", "layer", "dtype"),
    [("topk", "S", 1, torch.bfloat16), ("jumprelu", "C", 2, torch.float32)],
    ids=str,
)
def test_they_are_those_of_the_stored_states(architecture: str, site: str, layer: int, dtype: torch.dtype) -> None:
    """Bit for bit, with prompts that are shared."""
    mine, model = random_dictionary(architecture, site, layer), loaded("llama", dtype)
    prompts = [*PROMPTS[:3], PROMPTS[2]]
    sparse = recorded(mine, prompts, model)
    stored = cp.run(model, prompts, **DRAFTED, capture="SC")
    assert sparse.features().equals(stored.features(mine, top=4)) and len(sparse.features()) > 200
    assert not sparse.store.sites
    if layer == 1:
        lost = sparse.features()[sparse.features().status == "rolled_back"]
        assert lost.row.nunique() == (sparse.rows().status == "rolled_back").sum() > 5
    assert sparse.features(top=2).equals(stored.features(mine, top=2))
    rows = sparse.rows(1, status="committed")
    assert sparse.features(top=4, rows=rows).equals(stored.features(mine, top=4, rows=rows))


@pytest.mark.parametrize("capture", ["STCZ", cp.CaptureConfig("Z", top_features=4)])
def test_the_keyword_is_the_field(capture: "str | cp.CaptureConfig | None") -> None:
    mine = random_dictionary()
    given = cp.run(loaded(), PROMPTS[:2], **DRAFTED, capture=capture, dictionary=mine)
    assert given.features(top=4).equals(recorded(mine, PROMPTS[:2]).features(top=4))
    assert bool(given.store.sites) == (capture == "STCZ")
    assert list(cp.stream(loaded(), PROMPTS[:1], capture=None, max_new_tokens=2, dictionary=mine))
    with pytest.raises(ValueError, match="leave out one"):
        cp.run(loaded(), PROMPTS[:1], **DRAFTED, capture=cp.CaptureConfig("S", dictionary=mine), dictionary=mine)


def test_filters_choose_the_rows() -> None:
    mine = random_dictionary()
    whole = recorded(mine).features()
    lost = recorded(mine, statuses=("rolled_back",)).features()
    assert lost.equals(whole[whole.status == "rolled_back"].reset_index(drop=True)) and len(lost)
    some = recorded(mine, positions=[3, 5]).features()
    assert some.equals(whole[whole.position.isin([3, 5])].reset_index(drop=True)) and len(some)


def test_another_place_or_number_is_refused() -> None:
    trace = recorded(random_dictionary())
    assert trace.features(site="S", layer=1).equals(trace.features())
    with pytest.raises(ValueError, match="recorded at site S of layer 1, not at T of 0"):
        trace.features(site="T", layer=0)
    with pytest.raises(ValueError, match="top must be a whole number of at least 1, got 0"):
        trace.features(top=0)


def test_a_failed_pass_leaves_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass whose rows were recorded before its step failed: the requests are tried again, one by one."""
    read, calls = Committer.read, iter(range(10**6))

    def fails_once(committer: Committer, *given: Any) -> Any:
        if next(calls) == 2:
            raise EngineError("planted")
        return read(committer, *given)

    mine, whole = random_dictionary(), recorded(random_dictionary(), sites="S")
    monkeypatch.setattr(Committer, "read", fails_once)
    trace = recorded(mine, sites="S")
    assert trace.events().step.max() > whole.events().step.max() and set(trace.meta["finish"].values()) == {"length"}
    assert trace.features().equals(trace.features(mine, top=4)), "features of another row"


def test_what_cannot_be_recorded_is_refused() -> None:
    fixtures = Path(__file__).parents[1] / "fixtures/saelens"
    with pytest.raises(DictionaryError, match="states of width 16"):
        recorded(random_dictionary(width=16))
    with pytest.raises(DictionaryError, match="is for layer 9"):
        recorded(random_dictionary(layer=9))
    with pytest.raises(DictionaryError, match="cannot be recorded"):
        recorded(Dictionary.load(fixtures / "transcoder"))
    with pytest.raises(ValueError, match=r"must be from cp.lenses.Dictionary.load, got 'runs/x'"):
        recorded("runs/x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top_features must be a whole number of at least 1"):
        recorded(random_dictionary(), top_features=0)
    with pytest.raises(ValueError, match="recorded no features"):
        cp.run(loaded(), PROMPTS[:1], **DRAFTED).features()
