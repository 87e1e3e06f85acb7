"""Replays of drafts from one stored trace: the counts are those of real runs with the drafter."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.analysis.draft_passes import CommittedText, RecordedExit, prob_rejection, prob_same_noise, replay_passes
from cacheprobe.engine.drafters import DraftModel, EarlyExit, FastPath, NGram, Scripted
from tests.tiny import PROMPTS, SMALL, VOCAB, loaded, perturbed
from tests.twins.measures_slowly import draft_agreement_slowly, expected_passes_slowly, prob_same_noise_slowly

SETTINGS: dict[str, Any] = {**SMALL, "max_new_tokens": 24}
ALL = cp.CaptureConfig(sites="SZ", top_k=VOCAB)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> cp.Trace:
    """A run without drafts, loaded without its model."""
    trace = cp.run(loaded(), PROMPTS, **SETTINGS, deterministic=True, capture="Z")
    return cp.load_trace(trace.save(tmp_path_factory.mktemp("run") / "run"))


def counted(trace: cp.Trace) -> list[tuple[int, ...]]:
    """(request, passes, drafted, accepted) of the verify passes of a real run."""
    events = trace.events()
    events = events[events.phase == "verify"].assign(drafted=lambda t: t.draft_token_ids.map(len))
    return [(int(r), len(t), int(t.drafted.sum()), int(t.num_accepted.sum())) for r, t in events.groupby("request_id")]


def replayed(trace: cp.Trace, drafter: Any, **settings: Any) -> list[tuple[int, ...]]:
    table = cp.analysis.acceptance(trace, drafter, progress=False, **settings)
    return [(r.request_id, r.passes, r.drafted, r.accepted) for r in table.itertuples()]


def the_counts_are_those_of_a_run(stored: cp.Trace, drafter: Any, window: int, draft_length: Any) -> None:
    settings: dict[str, Any] = {**SETTINGS, "window": window, "draft_length": draft_length}
    real = cp.run(loaded(), PROMPTS, **settings, drafter=drafter, capture=None)
    table = cp.analysis.acceptance(stored, drafter, windows=window, draft_length=draft_length, progress=False)
    assert replayed(stored, drafter, windows=window, draft_length=draft_length) == counted(real)
    assert set(table.kind) == {"exact"} and table.committed.tolist() == [23] * len(PROMPTS)
    assert (table.tokens_per_pass == table.committed / table.passes).all()
    assert table.accepted.sum() > 0


CASES = [
    (lambda: EarlyExit(layer=1), 4, None),
    (lambda: EarlyExit(layer=0), 8, 3),
    (lambda: EarlyExit(layer=1), 8, 2),
    (lambda: NGram(), 4, None),
    (lambda: NGram(length=2), 8, 1),
    (lambda: Scripted(lambda state: [state.token_ids[-2], 3]), 4, None),
    (lambda: DraftModel(perturbed(loaded(), 0.01), length=3), 8, None),
]


@pytest.mark.parametrize(("make", "window", "draft_length"), CASES)
def test_the_counts_are_those_of_a_run(stored: cp.Trace, make: Any, window: int, draft_length: Any) -> None:
    the_counts_are_those_of_a_run(stored, make(), window, draft_length)


def test_a_neighbouring_row_is_noticed(stored: cp.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: drafts of the row before."""
    right = RecordedExit.draft
    monkeypatch.setattr(RecordedExit, "draft", lambda self, p, limit: right(self, max(p - 1, self._text.first), limit))
    with pytest.raises(AssertionError):
        the_counts_are_those_of_a_run(stored, EarlyExit(layer=1), 4, None)


def test_a_stop_token_ends_a_draft_and_a_request(stored: cp.Trace) -> None:
    """Every token of the texts in turn may be a stop token; a wrong draft token may be one too."""
    said = [token for i in range(len(PROMPTS)) for token in stored.committed(i)[5:20]]
    stops = [max(set(said), key=said.count), said[0]]
    sampling = cp.SamplingParams(stop_token_ids=stops)
    base = cp.run(loaded(), PROMPTS, **SETTINGS, sampling=sampling, capture="Z")
    assert "stop" in base.meta["finish"].values()
    for drafter in (EarlyExit(layer=1), NGram()):
        real = cp.run(loaded(), PROMPTS, **SETTINGS, sampling=sampling, drafter=drafter, capture=None)
        mine, theirs = replayed(base, drafter, windows=4), counted(real)
        for (*counts, drafted, accepted), (*real_counts, real_drafted, real_accepted) in zip(mine, theirs, strict=True):
            assert (counts, accepted) == (real_counts, real_accepted)
            # a stop token among the draft tokens after a wrong one is not known
            assert drafted >= real_drafted if isinstance(drafter, EarlyExit) else drafted == real_drafted


def test_counts_equal_the_slow_walk_and_the_tables_agree(stored: cp.Trace) -> None:
    by = {by: cp.analysis.acceptance(stored, windows=4, by=by, progress=False) for by in ("request", "pass", "place")}
    table = by["request"].groupby("layer")[["passes", "drafted", "accepted"]].sum()
    slowly = draft_agreement_slowly(stored.hypotheses(), 4)
    assert {layer: tuple(line) for layer, line in zip(table.index, table.to_numpy().tolist(), strict=True)} == {
        layer: slowly[layer] for layer in (0, 1)
    }
    for other in ("pass", "place"):
        sums = by[other].groupby("layer")[["drafted", "accepted"]].sum()
        pd.testing.assert_frame_equal(sums, table[["drafted", "accepted"]], check_dtype=False)
    places = by["place"][by["place"].layer == 1]
    assert places.place.tolist() == [1, 2, 3] and places.acceptance_rate.is_monotonic_decreasing
    assert len(by["pass"]) == table.passes.sum() and (by["pass"].probability == 1).all()


def test_a_request_of_one_token_has_no_pass(stored: cp.Trace) -> None:
    """No row of it reads a generated token, so it has no reading to replay."""
    requests = [cp.Request(PROMPTS[0], cp.SamplingParams(max_new_tokens=1)), cp.Request(PROMPTS[1])]
    trace = cp.run(loaded(), requests, **SETTINGS, capture="Z")
    table = cp.analysis.acceptance(trace, EarlyExit(layer=1), windows=4, progress=False)
    assert table.request_id.tolist() == [0, 1] and table.passes.tolist()[0] == 0
    of_stored = cp.analysis.acceptance(stored, EarlyExit(layer=1), windows=4, progress=False)
    assert table.passes.tolist()[1] == of_stored.passes.tolist()[1]


def test_sampled_requests_are_drawn_with_their_own_noise() -> None:
    """With every token recorded, the drafts at the run's temperature are those of a real run."""
    sampling = cp.SamplingParams(temperature=0.8)
    base = cp.run(loaded(), PROMPTS, **SETTINGS, sampling=sampling, deterministic=True, capture=ALL)
    for drafter in (EarlyExit(layer=1), NGram()):
        real = cp.run(loaded(), PROMPTS, **SETTINGS, sampling=sampling, drafter=drafter, capture=None)
        assert replayed(base, drafter, windows=4) == counted(real)
    kinds = cp.analysis.acceptance(base, [EarlyExit(layer=1), NGram()], windows=4, progress=False)
    assert kinds.groupby("drafter").kind.unique().map(list).to_dict() == {
        "early_exit": ["estimated"],
        "ngram": ["exact"],
    }


def test_speculative_sampling_is_expected_as_it_happens() -> None:
    """The expected rate over sampled texts, and that of a run with acceptance="rejection", within 4 standard errors."""
    sampling = cp.SamplingParams(temperature=1.0, n=12)
    common: Any = {**SETTINGS, "sampling": sampling}
    base = cp.run(loaded(), PROMPTS[:2], **common, capture=ALL)
    drafter = EarlyExit(layer=1)
    real = cp.run(loaded(), PROMPTS[:2], **common, seed=1, drafter=drafter, capture=None, acceptance="rejection")
    places = cp.analysis.acceptance(base, EarlyExit(layer=1), windows=4, rule="rejection", by="place", progress=False)
    first, events = places.iloc[0], real.events()
    events = events[(events.phase == "verify") & events.draft_token_ids.map(len).gt(0)]
    rate = float(events.num_accepted.gt(0).mean())
    assert 0.1 < rate < 0.9 and first.kind == "estimated"
    assert abs(first.acceptance_rate - rate) < 4 * (rate * (1 - rate) / len(events)) ** 0.5


def test_expected_counts_equal_those_over_every_outcome() -> None:
    agrees = [0.3, 0.9, 0.0, 1.0, 0.5, 0.7, 0.2, 0.8]
    tokens = (1, *range(10, 19))
    text = CommittedText(cp.Request((1,), request_id=0, prompt_token_ids=(1,)), tokens, False)
    source = RecordedExit(text, np.full(8, -1), np.array(agrees))
    for window in (1, 2, 4, 16):
        passes = replay_passes(text, source, window)
        mine = (sum(p.weight for p in passes), sum(p.weight * sum(p.drafted) for p in passes),
                sum(p.weight * sum(p.accepted) for p in passes))  # fmt: skip
        assert mine == pytest.approx(expected_passes_slowly(agrees, window), abs=1e-9)


def test_the_chance_of_one_token_for_both() -> None:
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {3: 0.6, 1: 0.3, 7: 0.1}
    arrays = [np.array([list(side)]) for side in (q, p)]
    probs = [np.array([list(side.values())]) for side in (q, p)]
    same = prob_same_noise(arrays[0], probs[0], arrays[1], probs[1])[0]
    slowly, draws = prob_same_noise_slowly(p, q, 20_000), 20_000
    assert abs(same - slowly) < 4 * (slowly * (1 - slowly) / draws) ** 0.5
    assert prob_rejection(arrays[0], probs[0], arrays[1], probs[1])[0] == pytest.approx(0.2 + 0.3)
    assert same < 0.5  # speculative sampling accepts at least as often
    assert prob_same_noise(arrays[0], probs[0], arrays[0], probs[0])[0] == pytest.approx(1)


def test_another_temperature_is_an_estimate_between_the_extremes(stored: cp.Trace) -> None:
    rates = [
        cp.analysis.acceptance(stored, EarlyExit(layer=1), windows=4, temperature=t, progress=False)
        for t in (1e-3, 0.7, None)
    ]
    assert [set(table.kind) for table in rates] == [{"estimated"}, {"estimated"}, {"exact"}]
    accepted = [table.accepted.sum() for table in rates]
    assert accepted[0] == pytest.approx(accepted[2], rel=0.02) and accepted[1] != pytest.approx(accepted[2], rel=0.02)


def test_readings_of_another_lens_are_used() -> None:
    model = loaded()
    trace = cp.run(model, PROMPTS[:2], **SETTINGS, capture="SZ")
    lens = cp.lenses.TunedLens.fresh(model)
    readings = cp.analysis.read_states(trace, lens)
    table = cp.analysis.acceptance(trace, EarlyExit(1, lens), windows=4, readings=readings, progress=False)
    assert set(table.lens) == {"tuned"}
    logit = cp.analysis.acceptance(trace, EarlyExit(1), windows=4, progress=False)
    pd.testing.assert_frame_equal(table.drop(columns="lens"), logit.drop(columns="lens"))
    with pytest.raises(ValueError, match="readings are of lens logit"):
        cp.analysis.acceptance(trace, EarlyExit(1, lens), progress=False)


def test_readings_of_another_run_are_refused(stored: cp.Trace) -> None:
    other = cp.run(loaded(), [[9] * 11, *PROMPTS[1:]], **SETTINGS, capture="SZ")
    readings = cp.analysis.read_states(other, cp.lenses.LogitLens())
    with pytest.raises(ValueError, match="readings are of another run"):
        cp.analysis.acceptance(stored, EarlyExit(1), readings=readings, progress=False)
    own = cp.analysis.lens_readings(other)
    with pytest.raises(ValueError, match="hold a position twice"):
        cp.analysis.acceptance(other, EarlyExit(1), readings=pd.concat([own, own]), progress=False)


def test_a_run_by_rejection_sampling_is_refused() -> None:
    """Its text was not drawn with the noise that a replay draws with again."""
    drafted: Any = {**SETTINGS, "drafter": EarlyExit(1), "acceptance": "rejection", "capture": "Z"}
    hot = cp.run(loaded(), PROMPTS[:2], **drafted, sampling=cp.SamplingParams(temperature=1.0))
    with pytest.raises(ValueError, match="accepted drafts by rejection sampling"):
        cp.analysis.acceptance(hot, EarlyExit(1), progress=False)
    greedy = cp.run(loaded(), PROMPTS[:2], **drafted)
    assert len(cp.analysis.acceptance(greedy, (one for one in [EarlyExit(1)]), windows=4, progress=False)) == 2


def test_what_cannot_be_replayed_is_refused(stored: cp.Trace) -> None:
    for settings, match in [
        (dict(drafters=NGram(), temperature=0.5), "drafter ngram drafts tokens for the run's own text"),
        (dict(drafters=EarlyExit(9)), "unknown layer 9 for EarlyExit"),
        (dict(drafters=FastPath()), "drafter fast_path runs the verified model"),
        (dict(drafters=[]), "there is no drafter to replay"),
        (dict(windows=0), "windows must hold"),
        (dict(by="layer"), "unknown by='layer'"),
        (dict(rule="luck"), "unknown rule 'luck'"),
        (dict(temperature=float("nan")), "temperature must be"),
        (dict(draft_length="long"), "draft_length, .*must be a whole number"),
        (dict(draft_length="adaptive"), "draft_length, which a replay takes as a number"),
    ]:
        with pytest.raises(ValueError, match=match):
            cp.analysis.acceptance(stored, **settings, progress=False)
    few = cp.run(loaded(), PROMPTS[:1], **SETTINGS, capture=cp.CaptureConfig(sites="Z", every=2))
    with pytest.raises(ValueError, match="without filters"):
        cp.analysis.acceptance(few, progress=False)
    bare = cp.run(loaded(), PROMPTS[:1], **SETTINGS, capture=None)
    with pytest.raises(ValueError, match="readings|Z"):
        cp.analysis.acceptance(bare, progress=False)
    assert len(cp.analysis.acceptance(bare, NGram(), windows=4, progress=False)) == 1
    top_p = cp.SamplingParams(temperature=1.0, top_p=0.5)
    with pytest.raises(ValueError, match="request 0 has sampling settings beside temperature"):
        cp.analysis.acceptance(cp.run(loaded(), PROMPTS[:1], **SETTINGS, sampling=top_p, capture="Z"), progress=False)
    bare.meta["interventions"] = [{"kind": "zero"}]
    with pytest.raises(ValueError, match="had interventions"):
        cp.analysis.acceptance(bare, NGram(), progress=False)
