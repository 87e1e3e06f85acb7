"""What every public figure keeps: a table in, a figure out that says its finding and whence its numbers are."""

import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest

import cacheprobe as cp
from cacheprobe import views as plots
from cacheprobe.views.style import FIGURE_CONFIG
from tests.plots.test_probe_figures import predictions, probes
from tests.tiny import PROMPTS, SMALL, loaded

ROOT = Path(__file__).parents[2]


def figures_of(module: Any) -> dict[str, Callable[..., go.Figure]]:
    """Every public function that is said to return a figure."""
    public = {name: getattr(module, name) for name in module.__all__}
    return {n: f for n, f in public.items() if inspect.isfunction(f) and f.__annotations__.get("return") is go.Figure}


FIGURES = figures_of(plots)


@cache
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:3], **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


def by_layer(**columns: Any) -> pd.DataFrame:
    """Two layers, the second one surer."""
    lines = [dict(layer=layer, share=share, low=share - 0.1, high=share + 0.1, **columns)
             for layer, share in ((0, 0.3), (1, 0.8))]  # fmt: skip
    return pd.DataFrame(lines)


def coin_rows() -> pd.DataFrame:
    stored = json.loads((ROOT / "analyses/results/coin-rows.json").read_text(encoding="utf-8"))
    return pd.DataFrame(stored["effects"])


def carried() -> pd.DataFrame:
    """Of states that were patched, at two places."""
    return pd.DataFrame(
        [
            dict(place=place, layer=layer, treatment=treatment, n=8, nld=nld + layer / 4, flips=2)
            for place, nld in (("person 1", 0.1), ("last token", 0.6))
            for layer in (0, 1)
            for treatment in ("other coin", "own again")
        ]
    )


def cells() -> pd.DataFrame:
    """Of a patching grid, as it may come from a file."""
    return pd.DataFrame(
        [
            dict(layer=layer, position=p, token=" a", nld=layer / 4 + p / 8, flip=p == 1)
            for layer in (0, 1)
            for p in (0, 1)
        ]
    )


def edited() -> pd.DataFrame:
    """Of a rejection: two of its edits flip the verdict."""
    about = dict(request_id=0, step=7, position=5, drafted_token=" a", committed_token=" b", token_id=3, token=" c")
    return pd.DataFrame(
        [
            dict(**about, edit=edit, site="S", layer=layer, from_layer=layer, flips=flips, difference_nats=nats - 1,
                 change_nats=nats)
            for edit, layer, flips, nats in (("zero", 0, False, 0.2), ("zero", 1, True, 1.5), ("mean", 1, True, 1.2))
        ]
    )  # fmt: skip


def accepted() -> pd.DataFrame:
    """Of two layers, the later one of which drafts better."""
    about = dict(request_id=0, drafter="early_exit", settings=None, lens="logit", window=4, temperature=0.0)
    counts = [dict(layer=0, passes=20.0, accepted=0.0), dict(layer=1, passes=10.0, accepted=10.0)]
    return pd.DataFrame([dict(**about, kind="exact", drafted=30.0, committed=20, **one) for one in counts])


def shares() -> pd.DataFrame:
    return pd.DataFrame(dict(layer=[0, 1, 2], share=[0.1, 0.4, 0.2]))


def swept() -> pd.DataFrame:
    """Of a sweep, by layer."""
    return pd.DataFrame(
        [
            dict(drafter=drafter, seed=seed, layer=layer, status="committed", agrees_mean=0.1 + layer / 4 + seed / 8)
            for drafter in (None, "ngram")
            for seed in (0, 1)
            for layer in (0, 1)
        ]
    )


def algorithm() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Probes and patched prefixes of one of the stored models."""
    stored = json.loads((ROOT / "analyses/results/s3-algorithm.json").read_text(encoding="utf-8"))
    tables = (pd.DataFrame(stored[name]) for name in ("probes", "patches"))
    return tuple(table[table.model == next(iter(stored["models"]))].drop(columns="model") for table in tables)


def routed() -> pd.DataFrame:
    """Of two tokens and the draft of the second, with one expert each."""
    lines = ((0, 4, "committed", 0), (1, 5, "committed", 0), (1, 6, "rolled_back", 1))
    return pd.DataFrame(
        [
            dict(row=step, request_id=0, step=step, phase="verify", position=p, status=status, token_id=3, token=" a",
                 layer=1, rank=0, expert=expert, weight=0.25 + p / 2)
            for p, step, status, expert in lines
        ]
    )  # fmt: skip


def forced() -> pd.DataFrame:
    """The prediction's distance from a forced state's emissions."""
    kl = dict(unpatched=0.4, recovered=0.2, wrong=0.5)
    return pd.DataFrame([dict(state=0, patch=patch, kl=one) for patch, one in kl.items()])


def read_twice() -> pd.DataFrame:
    """Perplexity by layer: one lens has a rise."""
    known = dict(logit=(50.0, 60.0, 20.0), tuned=(40.0, 30.0, 20.0))
    return pd.DataFrame([dict(lens=k, layer=i, perplexity=p) for k, of in known.items() for i, p in enumerate(of)])


def drifting() -> pd.DataFrame:
    """Two steps of a chain, of both kinds of head."""
    lines = [(1, 0.6, 0.0, 100.0), (2, 0.2, 0.5, 150.0)]
    return pd.DataFrame([dict(head=head, chain_step=k, sink=sink, own=own, norm=norm, known=0.8, both=0.81)
                         for head in ("as EAGLE-3", "norm_output") for k, sink, own, norm in lines])  # fmt: skip


def beliefs() -> pd.DataFrame:
    """A certain belief, drawn where it is and at another corner."""
    exact = dict(a=1.0, b=0.0, c=0.0)
    return pd.DataFrame(
        [dict(panel="exact", **exact, x=1.0, y=0.0, z=0.0), dict(panel="trained", **exact, x=0.0, y=1.0, z=0.0)]
    )


def swapped(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The same with the numbers of a column in reverse, so that another line is the largest."""
    return table.assign(**{column: table[column].to_numpy()[::-1]})


SAMPLES: dict[str, Callable[[], tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]]] = {
    # a table, another with another finding, and what is given beside it
    "acceptance_curves": lambda: ((t := accepted()), t.assign(passes=t.passes.to_numpy()[::-1]), {}),
    "attribution": lambda: ((t := cp.analysis.attribution(trace(), 0, 7)), swapped(t, "logit"), {}),
    "attribution_patching_grid": lambda: (
        (t := cells().assign(estimated_nld=[0.1, 0.2, 0.2, 0.5])), swapped(t, "estimated_nld"), {},
    ),
    "carried_figure": lambda: ((t := carried()), swapped(t, "nld"), {}),
    "coin_rows_figure": lambda: ((t := coin_rows()), t.assign(total=-t.total), {}),
    "column_figure": lambda: ((t := shares()), t.assign(share=0.3), dict(column="share")),
    "disagreement_figure": lambda: (
        (t := by_layer(drafter="ngram", control=0.2, rejected=7, nats=0.1)), t.assign(share=0.1), {},
    ),
    "draft_verdicts": lambda: ((t := trace().hypotheses()), t.assign(layer=2 - t.layer), {}),
    "drift_figure": lambda: ((t := drifting()), t.assign(norm=100.0, sink=0.5), {}),
    "final_choice_figure": lambda: ((t := by_layer(kind="answer", chance=0.1, rows=9)), t.assign(share=0.1), {}),
    "flip_grid": lambda: ((t := edited()), t.assign(flips=False), {}),
    "forcing_figure": lambda: ((t := forced()), t.assign(kl=0.4), {}),
    "perplexity_figure": lambda: ((t := read_twice()), t.assign(perplexity=t.layer + 1.0), {}),
    "simplex_figure": lambda: ((t := beliefs()), t.assign(x=t.a, y=t.b, z=t.c), {}),
    "rollback_prediction_figure": lambda: (predictions(0.1), predictions(-0.1), {}),
    "patching_grid": lambda: ((t := cells()), swapped(t, "nld"), {}),
    "probe_figure": lambda: (probes().assign(examples=40, groups=20), probes(False), {}),
    "state_algorithm_figure": lambda: (
        (t := algorithm()[0].assign(examples=40)), t.assign(accuracy=0.5), dict(patches=algorithm()[1]),
    ),
    "prediction_depth_figure": lambda: ((t := cp.analysis.prediction_depth(trace())), t.assign(prediction_depth=0), {}),
    "routing_figure": lambda: ((t := routed()), t.assign(expert=1 - t.expert), {}),
    "sweep_grid": lambda: (
        (t := swept()), swapped(t, "agrees_mean"), dict(rows="drafter", columns="seed"),
    ),
    "ways_figure": lambda: (
        (t := by_layer(right=3, examples=40, chance=0.5).assign(way=["cut", "whole"])), t.assign(low=0.6), {},
    ),
}  # fmt: skip


def made(name: str) -> tuple[go.Figure, pd.DataFrame]:
    table, _, beside = SAMPLES[name]()
    return FIGURES[name](table, **beside), table


def test_every_public_figure_has_a_sample() -> None:
    assert set(SAMPLES) == set(FIGURES), "a figure that is public needs a table in SAMPLES, and the other way round"


@pytest.mark.parametrize("name", SAMPLES)
def test_its_title_is_a_finding(name: str) -> None:
    """Another table, another title: a title that does not change says nothing of the table."""
    table, other, beside = SAMPLES[name]()
    titles = [FIGURES[name](t, **beside).layout.title.text for t in (table, other)]
    assert all(len(title.split()) >= 4 for title in titles) and titles[0] != titles[1], titles
    for title, wanted in zip(titles, NAMED[name](table, other), strict=True):
        assert wanted in title, (title, wanted)


def test_little_is_not_called_most() -> None:
    """A patch that moves the answer by 0.01 was titled "One state carries most of the answer"."""
    table = carried().assign(nld=0.01)
    assert "No state carries half of the answer; the most is" in FIGURES["carried_figure"](table).layout.title.text
    assert FIGURES["carried_figure"](carried()).layout.title.text.startswith("One state carries most of the answer")


def largest_part(parts: pd.DataFrame) -> str:
    """The part that adds most to the logit, as a title names it."""
    amount, site, layer = max((row.logit, row.site, row.layer) for row in parts.itertuples() if row.site in "TC")
    return f"the largest part, {amount:+.2f}, is from {site}, {dict(T='attention', C='MLP')[site]} of layer {layer}"


def largest_swap(effects: pd.DataFrame) -> str:
    """The span whose swap brings over most, as a title names it: means over texts, layers and edits as drawn."""
    said = FIGURES["coin_rows_figure"](effects).data
    best = max(max((y, x) for x, y in zip(bar.x, bar.y, strict=True) if x != "all rows")
               for bar in said if "swapped" in bar.name)  # fmt: skip
    return f"{best[1]}, {best[0]:.2f}"


NAMED: dict[str, Callable[[pd.DataFrame, pd.DataFrame], tuple[str, str]]] = {
    # what the tables say, found otherwise than by the figure, or known from how SAMPLES makes them
    "acceptance_curves": lambda t, o: ("2.00, by early_exit at layer 1", "2.00, by early_exit at layer 0"),
    "attribution": lambda t, o: (largest_part(t), largest_part(o)),
    "attribution_patching_grid": lambda t, o: ("Pearson 0.89, Spearman 0.95", "Pearson -0.89, Spearman -0.95"),
    "carried_figure": lambda t, o: ("at last token, layer 1: 0.85", "at person 1, layer 0: 0.85"),
    "coin_rows_figure": lambda t, o: (largest_swap(t), largest_swap(o)),
    "column_figure": lambda t, o: ("share by layer: from 0.1 to 0.4", "share by layer: from 0.3 to 0.3"),
    "disagreement_figure": lambda t, o: ("the rejected token likelier: ngram until layer 1", "committed token leads"),
    "draft_verdicts": lambda t, o: ("committed token leads from layer 2", "draft leads up to the last layer"),
    "drift_figure": lambda t, o: ("sink 0.60 to 0.20, own rows 0.00 to 0.50, norm times 1.50", "norm times 1.00"),
    "final_choice_figure": lambda t, o: ("answer from layer 1", "No layer has half"),
    "flip_grid": lambda t, o: (
        "2 of 3 edits make the verifier choose", "closest: zero at S (residual stream) of layer 1 (+0.50 nats)",
    ),
    "forcing_figure": lambda t, o: ("0.400 nats become 0.200, with another", "0.400 nats become 0.400"),
    "perplexity_figure": lambda t, o: ("rises: 1 (logit lens), 0 (tuned", "rises: 2 (logit lens), 2 (tuned"),
    "simplex_figure": lambda t, o: ("0.000 (exact), 1.414 (trained)", "0.000 (exact), 0.000 (trained)"),
    "rollback_prediction_figure": lambda t, o: ("margin for ngram", "for no drafter here"),
    "patching_grid": lambda t, o: ("0.38, at layer 1, position 1", "0.38, at layer 0, position 0"),
    "probe_figure": lambda t, o: ("At 1 of 3 places", "At 0 of 3 places"),
    "state_algorithm_figure": lambda t, o: (
        "parity at layer 3, state never (at most 0.55)", "parity never (at most 0.50)",
    ),
    "prediction_depth_figure": lambda t, o: (
        "accepted drafts at layer 1, rejected drafts at layer 2",
        "accepted drafts at layer 0, rejected drafts at layer 0",
    ),
    "routing_figure": lambda t, o: ("sends 2 of 2 tokens to expert 0", "sends 2 of 2 tokens to expert 1"),
    "sweep_grid": lambda t, o: ("0.47 at drafter=ngram, seed=1", "0.23 at drafter=ngram, seed=0"),
    "ways_figure": lambda t, o: ("No more than chance is left with: cut", "no way here"),
}  # fmt: skip


PROVENANCE = {
    "request_id": r"request \d", "step": r"step \d", "position": r"position (\d|%)",
    "status": "committed|superseded|rolled.back",
}  # fmt: skip
"""What a pointer is told of each part, where the table has the column."""
OTHERWISE = {("rollback_prediction_figure", "position")}
"""There a column of that name is a control: what the position alone foretells."""
SUMMED = {"acceptance_curves", "draft_verdicts"}
"""Each point is a share over many rows, so it names none."""


@pytest.mark.parametrize("name", SAMPLES)
def test_the_pointer_is_told_where_a_number_is_from(name: str) -> None:
    """Every line, bar and cell names its layer or place, in words and not by a number alone; and the request, step,
    position and status of the rows that its numbers are from, where the figure's table has them."""
    figure, table = made(name)
    beside = [held for held in SAMPLES[name]()[2].values() if isinstance(held, pd.DataFrame)]
    told = [drawn for drawn in figure.data if drawn.hoverinfo != "skip"]
    assert told
    for drawn in told:
        # a second table is what maps are drawn from
        columns = set(table.columns).union(*(t.columns for t in beside if drawn.type == "heatmap"))
        for said in hovers(drawn):
            assert any(place in said for place in ("layer", "position", "%{x}", "%{text}")), (drawn.name, said)
            for column, wanted in PROVENANCE.items():
                is_known = column in columns and (name, column) not in OTHERWISE and name not in SUMMED
                assert not is_known or re.search(wanted, said), (drawn.name, column, said)
        assert drawn.hovertemplate is None or drawn.hovertemplate.endswith("<extra></extra>")


def hovers(drawn: Any) -> list[str]:
    """What a pointer is told: the template, with the texts that it names in their place."""
    texts = drawn.hovertext if drawn.hovertext is not None else drawn.text
    own = (
        [] if texts is None else [str(t) for row in texts for t in ([row] if isinstance(row, str) else row) if t != ""]
    )
    template = drawn.hovertemplate
    if template is None:
        return own
    place = "%{hovertext}" if "%{hovertext}" in template else "%{text}"
    return [template.replace(place, text) for text in own] if place in template and own else [template]


@pytest.mark.parametrize("name", SAMPLES)
def test_an_interval_and_a_count_are_told_where_the_table_has_them(name: str) -> None:
    figure, table = made(name)
    if "low" not in table.columns:
        return
    lines = [drawn for drawn in figure.data if drawn.type != "heatmap"]
    bars = [drawn for drawn in lines if drawn.error_y and drawn.error_y.array is not None]
    assert bars
    for drawn in bars:
        assert "%{customdata}" in drawn.hovertemplate and all("95 %" in said for said in drawn.customdata)
        for column, what in (("rows", "9 rows"), ("rejected", "7 rejected"), ("examples", "40 examples")):
            assert column not in table.columns or all(what in said for said in drawn.customdata)


@pytest.mark.parametrize("name", SAMPLES)
def test_an_empty_table_is_refused(name: str) -> None:
    table, _, beside = SAMPLES[name]()
    with pytest.raises(ValueError, match=r"empty|there is no |nothing to draw|^no "):
        FIGURES[name](table.iloc[:0], **beside)


FREE = {"token", "committed_token", "drafted_token", "path", "drafter", "place", "at", "where", "way", "kind"}
"""Columns of texts that anybody may have written; what the others say is one of a few words of ours."""


@pytest.mark.parametrize("name", SAMPLES)
def test_a_text_of_the_table_is_no_markup(name: str) -> None:
    """Plotly acts on <i>, <a> and the like in whatever text it draws, and drops what looks like another tag: <pad>."""
    table, _, beside = SAMPLES[name]()
    texts = [c for c in table.columns if c in FREE and not (c == "at" and (table[c] == "event").any())]
    attacked = table.assign(**{c: table[c].map(lambda said: f"<i>{said}</i>" if isinstance(said, str) else said)
                               for c in texts})  # fmt: skip
    drawn = FIGURES[name](attacked, **beside).to_json().replace("\\u003c", "<").replace("\\u003e", ">")
    assert "<i>" not in drawn


@pytest.mark.parametrize("name", SAMPLES)
def test_it_only_reads(name: str) -> None:
    table, _, beside = SAMPLES[name]()
    before = table.copy(deep=True)
    first, second = (FIGURES[name](table, **beside).to_json() for _ in range(2))
    pd.testing.assert_frame_equal(table, before)
    assert first == second


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_offers_to_send_the_data_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plotly shows a button that uploads the figure, unless every way of showing it says otherwise."""
    import plotly.io as pio

    figure, _ = made(name)
    assert FIGURE_CONFIG["showSendToCloud"] is False
    off = '"showSendToCloud": false'
    assert off in figure.to_html(include_plotlyjs=False)
    assert off in figure.to_html(include_plotlyjs=False, config={"scrollZoom": True})
    monkeypatch.setattr(pio.renderers, "default", "notebook_connected+plotly_mimetype")
    bundle = figure._repr_mimebundle_()
    assert off in bundle["text/html"]
    assert bundle["application/vnd.plotly.v1+json"]["config"]["showSendToCloud"] is False
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(pio, "show", lambda fig, *args, **settings: shown.append(settings))
    figure.show()
    figure._ipython_display_()
    assert [settings["config"]["showSendToCloud"] for settings in shown] == [False, False]


def test_figures_are_had_without_torch_or_a_model() -> None:
    """As in a notebook that has a table from a file, and nothing else of ours."""
    import subprocess
    import sys

    program = """
import sys
import pandas as pd
from cacheprobe import views as plots
columns = dict(row=0, site="S", status="committed", verdict="accepted", drafted_token_id=5, agrees=True)
table = pd.DataFrame([dict(columns, layer=layer, token_id=5) for layer in (0, 1)])
title = plots.draft_verdicts(table).layout.title.text
assert not {"torch", "transformers"} & set(sys.modules)
print(title)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.endswith("from layer 0 on\n"), done.stderr
