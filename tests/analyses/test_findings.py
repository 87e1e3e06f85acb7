"""Published results that are measured again: the verdict's rule, the exact beliefs, and a contract of every finding."""

import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import cacheprobe as cp
from cacheprobe.cli.app import app
from cacheprobe.core.registry import available, find
from cacheprobe.ops.equality import close
from cacheprobe_analyses.findings import run as running
from cacheprobe_analyses.findings.finding import (
    DIFFERS,
    NO_FIGURE,
    NOT_JUDGED,
    NOT_REPRODUCED,
    REPRODUCED,
    Published,
    interval,
    overall,
)
from cacheprobe_analyses.findings.processes import HiddenMarkov, from_emissions, mess3, rrxor
from cacheprobe_analyses.findings.run import Result, judged_again, line_of, run_finding, shown, stored, undefined
from cacheprobe_analyses.small_models import Architecture, random_model, train
from tests.project.test_structure import ROOT

NAMES = tuple(available("findings"))
MOST_OF_PAGE = 250
"""Words of a page, without its table."""


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_keeps_the_contract(name: str, tmp_path) -> None:
    """It measures a number for each published figure, most of them defined, counts its steps, and draws."""
    finding = find("findings", name)()
    assert (
        finding.question.endswith("?") and "arXiv" in finding.paper and {"tiny", "small", "full"} == {*finding.presets}
    )
    assert len({one.key for one in finding.published}) == len(finding.published)
    done = []
    one = finding.measure(finding.presets["tiny"], 0, done.append)
    assert sum(done) == finding.steps(finding.presets["tiny"])
    missing = {one.key for one in finding.published} - {*one.values}
    assert not missing and all(isinstance(value, float) for value in one.values.values())
    assert np.isfinite([*one.values.values()]).mean() > 0.5 and not np.isinf([*one.values.values()]).any()
    assert finding.figure(one.points).data


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_result_is_judged_by_the_rule(name: str) -> None:
    """The verdicts in analyses/results are those of today's rule and figures, and no preset of tests is stored."""
    result = stored(name)
    if result is None:
        return
    assert result.preset != "tiny" and len(result.seeds) >= 3 and result.machine["torch"]
    assert judged_again(result) == result


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_has_a_short_page_that_asks_its_question(name: str) -> None:
    sections = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8").split("\n## ")
    (page,) = (part for part in sections if part.startswith(f"{find('findings', name).question}\n"))
    assert f"cacheprobe findings run {name} " in page
    if (result := stored(name)) is not None:
        assert f"findings run {name} --preset {result.preset} --seeds {len(result.seeds)}\n" in page
    prose = [line for line in page.splitlines() if not line.startswith(("|", "<!--"))]
    assert len(" ".join(prose).split()) <= MOST_OF_PAGE and "What differs" in page
    assert stored(name) is None or (
        f"(finding-{name}.png)" in page and f"{{include}} tables/finding-{name}.txt" in page
    )


VALUE, CLAIM = Published("a", "b", "0.385"), Published("a", "b", above=0)
T_3 = 4.303  # Student's t at 97.5 % for three values


def three(low: float, high: float) -> list[float]:
    """Returns three values whose 95 % interval this is."""
    middle, step = (low + high) / 2, (high - low) / 2 / T_3 * 3**0.5
    return [middle - step, middle, middle + step]


@pytest.mark.parametrize(
    ("published", "low", "high", "verdict"),
    [
        (VALUE, 0.3, 0.4, REPRODUCED),
        (VALUE, 0.3, 0.3846, REPRODUCED),  # printed as 0.385
        (VALUE, 0.3, 0.3844, NOT_REPRODUCED),
        (VALUE, 0.3856, 0.4, NOT_REPRODUCED),
        (replace(VALUE, because="they ..."), 0.3, 0.38, f"{DIFFERS} they ..."),
        (replace(VALUE, because="they ..."), 0.3, 0.39, REPRODUCED),
        (replace(VALUE, unjudged="it moves"), 0.3, 0.31, f"{NOT_JUDGED} it moves"),
        (replace(VALUE, seeds=3), 0.3, 0.371, REPRODUCED),  # 0.0355 by 2 ** 0.5, since theirs are as spread as ours
        (replace(VALUE, seeds=3), 0.3, 0.36, NOT_REPRODUCED),
        (CLAIM, 0.01, 0.2, REPRODUCED),
        (CLAIM, -0.01, 0.2, NOT_REPRODUCED),
        (Published("a", "b"), 0.0, 1.0, NO_FIGURE),
        (Published("a", "b", "-0.0001"), -0.002, 0.001, REPRODUCED),
    ],
)
def test_the_verdict_is_a_rule(published: Published, low: float, high: float, verdict: str) -> None:
    assert published.verdict(three(low, high)) == verdict


def test_a_known_spread_gives_welchs_verdict() -> None:
    """Twin: scipy's test from the two means and deviations. With the degrees of freedom rounded down, we find no
    difference that it does not find, and miss few."""
    draw, ours, theirs = np.random.default_rng(0), [], []
    for number in (3, 5, 10):
        for _ in range(200):
            values, sd, middle = draw.normal(0.01, 0.01, number), draw.uniform(0.005, 0.02), draw.normal(0, 0.01)
            one = Published("a", "b", f"{middle:.9f}", sd=sd, seeds=5)
            ours.append(one.verdict(values.tolist()) == NOT_REPRODUCED)
            exact = stats.ttest_ind_from_stats(values.mean(), values.std(ddof=1), number, middle, sd, 5, False)
            theirs.append(bool(exact.pvalue < 0.05))
    missed = sum(slow and not fast for slow, fast in zip(theirs, ours, strict=True))
    assert not any(fast and not slow for slow, fast in zip(theirs, ours, strict=True))
    assert 50 < sum(theirs) < 550 and missed < 0.1 * sum(theirs)


def test_what_is_not_defined_is_left_out_and_said() -> None:
    one = line_of(Published("a", "b"), [0.5, math.nan, 0.7])
    assert one["values"] == [0.5, None, 0.7] and one["ours"] == pytest.approx(0.6)
    assert undefined(one) == "; not defined in 1 of 3 seeds"
    never = line_of(CLAIM, [math.nan] * 3)
    assert (never["ours"], never["low"]) == (None, None)
    assert shown(never["ours"]) + undefined(never) == "not defined in 3 of 3 seeds"
    assert never["verdict"] == f"{NOT_JUDGED} defined in 0 seeds"
    assert CLAIM.verdict([1.0, 1.1, math.nan]) == f"{NOT_JUDGED} defined in 2 seeds"


def test_a_figure_is_a_value_or_a_claim_and_a_claim_has_no_excuse() -> None:
    with pytest.raises(ValueError, match="a: a published figure is a value or a claim"):
        Published("a", "b", "0.1", above=0)
    with pytest.raises(ValueError, match="a: only a value can differ for a reason"):
        Published("a", "b", above=0, because="they trained longer")
    with pytest.raises(ValueError, match="a: a standard deviation is of two or more seeds, got seeds=0"):
        Published("a", "b", "0.1", sd=0.1)


def test_the_whole_is_as_good_as_its_worst_figure() -> None:
    assert overall([REPRODUCED, NO_FIGURE, f"{NOT_JUDGED} x"]) == REPRODUCED
    assert overall([NO_FIGURE]) == "no figure is judged"
    assert overall([REPRODUCED, f"{DIFFERS} x", NO_FIGURE]) == "differs in 1 of 2 figures"
    assert overall([REPRODUCED, f"{DIFFERS} x", NOT_REPRODUCED]) == f"{NOT_REPRODUCED}: 1 of 3 figures"


@pytest.mark.parametrize("number", [3, 4, 7, 10])
def test_the_interval_is_students(number: int) -> None:
    values = np.random.default_rng(number).normal(size=number)
    ours = interval(values.tolist())
    low, high = stats.t.interval(0.95, number - 1, values.mean(), stats.sem(values))
    assert close(torch.tensor(ours), torch.tensor([values.mean(), low, high]), rtol=1e-3, because="t has three digits")


def beliefs_slowly(process: HiddenMarkov, tokens: np.ndarray) -> np.ndarray:
    """The distribution of the last state of [t] tokens: the probability of every path of states, summed."""
    found = np.zeros(len(process.initial))
    for path in itertools.product(range(len(process.initial)), repeat=len(tokens) + 1):
        steps = [process.joint[token, a, b] for token, a, b in zip(tokens, path[:-1], path[1:], strict=True)]
        found[path[-1]] += process.initial[path[0]] * math.prod(steps)
    return found / found.sum()


@pytest.mark.parametrize("process", [mess3(), rrxor()], ids=["mess3", "rrxor"])
def test_beliefs_are_those_of_all_paths(process: HiddenMarkov) -> None:
    tokens = process.sample(3, 4, np.random.default_rng(0))
    beliefs = process.beliefs(tokens)
    for row, own in zip(tokens, beliefs, strict=True):
        for length in range(5):
            slow = beliefs_slowly(process, row[:length])
            assert close(torch.tensor(own[length]), torch.tensor(slow), rtol=1e-12, because="sums in another order")


def test_samples_have_the_probabilities_of_the_process() -> None:
    """Of all texts of three tokens, within five standard errors; the exclusive or of two bits follows them."""
    process, number = mess3(), 50_000
    tokens = process.sample(number, 3, np.random.default_rng(0))
    shares = np.bincount(tokens @ [9, 3, 1], minlength=27) / number
    for text in range(27):
        one = np.array([[text // 9, text // 3 % 3, text % 3]])
        before = process.next_token(process.beliefs(one))[0, :3]
        exact = before[np.arange(3), one[0]].prod()
        assert abs(shares[text] - exact) < 5 * (exact * (1 - exact) / number) ** 0.5
    bits = rrxor().sample(500, 12, np.random.default_rng(1))
    fits = [
        [(row[at:-2:3][:3] ^ row[at + 1 : -1 : 3][:3] == row[at + 2 :: 3][:3]).all() for at in range(3)] for row in bits
    ]
    assert all(map(any, fits)) and not all(map(all, fits))
    assert len(np.unique(rrxor().beliefs(bits).reshape(-1, 5).round(6), axis=0)) == 36  # as Shai et al. count them


def test_emissions_and_transitions_make_a_process() -> None:
    """A state emits by itself, then moves: the belief is the usual filter's."""
    move, emit = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([[0.8, 0.2], [0.25, 0.75]])
    process = from_emissions(move, emit, np.array([0.5, 0.5]))
    after = np.array([0.5, 0.5]) * emit[:, 1]
    assert np.allclose(process.beliefs(np.array([[1]]))[0, 1], after / after.sum() @ move, rtol=1e-12)
    with pytest.raises(ValueError, match="must sum to 1"):
        from_emissions(move, 2 * emit, np.array([0.5, 0.5]))


OF = Architecture(5, 16, 2, 16, 2, 32)


def test_a_small_model_is_its_seeds_and_learns() -> None:
    drawn = [random_model(OF, seed).transformer.wte.weight for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    spread = random_model(replace(OF, torch_weights=True), 0).transformer.wte.weight.std()
    assert 0.8 < spread < 1.2 and drawn[0].std() < 0.3
    counting = torch.arange(9).expand(16, -1) % 5
    done: list[int] = []
    losses = train(random_model(OF, 0), lambda step: (counting[:, :-1], counting[:, 1:]), 40, 1e-2, done.append)
    assert sum(done) == len(losses) == 40 and losses[0] > 1.2 and losses[-1] < 0.1


@pytest.mark.parametrize(
    ("name", "preset", "seeds", "message"),
    [
        ("belief-geometri", "tiny", 3, "unknown name 'belief-geometri' among findings; there are attention-drift"),
        ("belief-geometry", "huge", 3, "has no preset 'huge'; it has tiny, small, full"),
        ("belief-geometry", "tiny", 2, "--seeds must be 3 to 10, got 2; an interval needs three"),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, preset: str, seeds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_finding(name, preset, seeds)


def test_the_commands_list_and_measure(tmp_path, capsys, monkeypatch) -> None:
    """A run writes three files, and what it stores is what the list then shows."""
    app(
        ["findings", "run", "belief_geometry", "--preset", "tiny", "--out", str(tmp_path)], result_action="return_value"
    )
    said = capsys.readouterr().out
    assert "| Mess3, last layer: R2 trained less untrained | above 0 |" in said
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".html"}
    result = Result(**json.loads((tmp_path / "belief-geometry.json").read_text()))
    assert result.table() + "\n" == (tmp_path / "belief-geometry.md").read_text() and result.seeds == [0, 1, 2]
    assert asdict(result)["settings"]["layers"] == 2 and result.machine["threads"]
    monkeypatch.setattr(running, "RESULTS", tmp_path)
    monkeypatch.setattr(running.stored, "__defaults__", (tmp_path,))
    app(["findings"], result_action="return_value")
    said = capsys.readouterr().out
    assert f"{result.verdict} (tiny)" in said


def test_a_belief_is_drawn_where_it_was_read() -> None:
    """Corners of the triangle; the colour is the exact belief."""
    exact = dict(panel="exact", a=1, b=0, c=0, x=1, y=0, z=0)
    read = dict(panel="trained", a=0, b=0, c=1, x=0, y=0.5, z=0.5)
    first, second = cp.plots.simplex_figure(pd.DataFrame([exact, read])).data
    assert (first.x[0], first.y[0], first.marker.color[0]) == (0, 0, "rgb(255,0,0)")
    assert (second.x[0], second.marker.color[0]) == (0.75, "rgb(0,0,255)") and abs(second.y[0] - 0.433) < 1e-3
    with pytest.raises(ValueError, match="nothing to draw"):
        cp.plots.simplex_figure(pd.DataFrame())
