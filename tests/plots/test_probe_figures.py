"""Figures of probes, rollback_prediction and disagreement: what they draw is what the tables say."""

import pandas as pd
import pytest

from cacheprobe.views import (
    disagreement_figure,
    final_choice_figure,
    probe_figure,
    rollback_prediction_figure,
    state_algorithm_figure,
)


def probes(is_above: bool = True) -> pd.DataFrame:
    lines = [
        dict(site=site, layer=layer, at=at, place=place, accuracy=0.6 + layer / 10, low=0.5, high=0.9, majority=0.55,
             untrained=0.52 if place != -1 else None, embedding=0.5, is_above=is_above and place == 2)
        for at, place in (("event", 1), ("event", 2), ("position", -1)) for site in "SC" for layer in (1, 0)
    ]  # fmt: skip
    return pd.DataFrame(lines)


def test_a_panel_for_each_place_and_a_line_for_each_site() -> None:
    figure = probe_figure(probes())
    assert [a.text for a in figure.layout.annotations] == ["operation 1", "operation 2", "prompt's last token"]
    first = figure.data[0]
    assert (list(first.x), list(first.y)) == ([0, 1], [0.6, 0.7]) and first.name.startswith("S")
    assert list(first.error_y.array) == pytest.approx([0.3, 0.2])
    assert list(first.error_y.arrayminus) == pytest.approx([0.1, 0.2])
    names = [d.name for d in figure.data]
    assert names.count("untrained") == 2 and names.count("majority") == names.count("embedding") == 3
    assert figure.layout.title.text.startswith("At 1 of 3 places")
    assert probe_figure(probes(False)).layout.title.text.startswith("At 0 of 3")


def predictions(gain_low: float) -> pd.DataFrame:
    line = dict(drafter="ngram", unit="draft", auroc=0.7, low=0.6, high=0.8, shuffled=0.5, position=0.55, margin=0.65)
    return pd.DataFrame([dict(**line, layer=layer, gain_low=gain_low) for layer in (29, 2)])


def test_rollback_prediction_draws_its_controls() -> None:
    figure = rollback_prediction_figure(predictions(0.01))
    assert [d.name for d in figure.data] == ["states", "position alone", "margin alone", "labels shuffled"]
    assert list(figure.data[0].x) == [2, 29] and list(figure.data[2].y) == [0.65, 0.65]
    assert figure.layout.title.text.endswith("for ngram")
    assert rollback_prediction_figure(predictions(-0.01)).layout.title.text.endswith("for no drafter here")
    for table, unit in ((predictions(0.1), "candidate"), (pd.DataFrame(), "draft")):
        with pytest.raises(ValueError, match="no line of unit"):
            rollback_prediction_figure(table, unit)


def test_final_choices_and_disagreement() -> None:
    kinds = [dict(kind="answer", layer=layer, share=layer / 2, low=0.0, high=1.0, chance=0.1) for layer in (0, 1, 2)]
    figure = final_choice_figure(pd.DataFrame(kinds))
    assert list(figure.data[0].y) == [0, 0.5, 1] and list(figure.data[1].y) == [0.1] * 3
    assert figure.layout.title.text == "Half hold their final choice: answer from layer 1"
    rejected = [
        dict(drafter="ngram", layer=layer, share=s, low=s, high=s, control=0.2) for layer, s in enumerate((0.7, 0.4))
    ]
    figure = disagreement_figure(pd.DataFrame(rejected))
    assert list(figure.data[0].y) == [0.7, 0.4] and list(figure.data[1].y) == [0.2, 0.2]
    assert figure.layout.title.text.endswith("ngram until layer 0")
    assert disagreement_figure(pd.DataFrame(rejected[1:])).layout.title.text.startswith("The committed token leads")


def test_probes_and_prefixes_of_one_model() -> None:
    """The largest number of operations is drawn, and each kind of pair has its own panel."""
    lines = [
        dict(label=label, layer=layer, place=place, accuracy=share, low=share - 0.1, high=1.0, majority=0.5)
        for place in (4, 8) for label, shares in (("parity", (0.6, 0.97)), ("state", (0.3, 0.8)))
        for layer, share in enumerate(shares)
    ]  # fmt: skip
    probes = pd.DataFrame(lines)
    probes.loc[probes.place == 4, "accuracy"] = 0.0
    patches = pd.DataFrame(
        [
            dict(kind=k, layer=n, position=p, nld=n + p / 10)
            for k in ("same", "other")
            for n in (0, 1)
            for p in (0, 1, 2)
        ]
    )
    figure = state_algorithm_figure(probes, patches)
    drawn = {trace.name: trace for trace in figure.data if trace.name}
    assert list(drawn["parity"].y) == [0.6, 0.97] and list(drawn["state"].error_y.arrayminus) == pytest.approx(
        [0.1] * 2
    )
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(maps) == 2 and maps[0].z.tolist() == [[0, 0.1, 0.2], [1, 1.1, 1.2]] and list(maps[0].x) == [0, 1, 2]
    assert figure.layout.title.text == "Read with 95 % accuracy: parity at layer 1, state never (at most 0.80)"
    assert len(state_algorithm_figure(probes, patches.iloc[:0]).data) == 4
