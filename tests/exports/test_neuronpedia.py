"""Features as JSON in Neuronpedia's manner: every number against one state encoded by itself."""

import json
from pathlib import Path

import pytest

import cacheprobe as cp
from tests.dictionaries.planted import random_dictionary
from tests.tiny import PROMPTS, SMALL, loaded

EARLY = cp.drafters.EarlyExit(layer=1)


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:3], **SMALL, capture="S", drafter=EARLY)


def test_the_texts_are_those_of_the_trace(trace: cp.Trace, tmp_path: Path) -> None:
    mine = random_dictionary("topk", "S", 0)
    table = trace.features(mine, top=48)
    numbers = table[table.status == "rolled_back"].feature.value_counts().index[:2].tolist()
    told = cp.analysis.to_neuronpedia(trace, mine, numbers, tmp_path / "f.json", most_texts=1000, include_special=True)
    assert json.loads((tmp_path / "f.json").read_text(encoding="utf-8")) == told
    rows = trace.rows()
    lost = rows[rows.status == "rolled_back"].groupby(["request_id", "step"]).ngroups
    for number, one in zip(numbers, told, strict=True):
        assert (one["index"], one["source"]) == (str(number), "0-S")
        statuses = [text["status"] for text in one["activations"]]
        assert statuses.count("committed") == 3 and statuses.count("rolled_back") == lost > 3
        assert [text["maxValue"] for text in one["activations"]] == sorted(
            (text["maxValue"] for text in one["activations"]), reverse=True
        )
        true = {}
        for line in rows[rows.status.isin(["committed", "rolled_back"])].itertuples():
            state = trace.vectors("S", 0, [line.row])
            true[line.row] = line.token, float(mine.encode(state)[0, number])
        for text in one["activations"]:
            own = rows[(rows.request_id == text["request"]) & (rows.status == "committed")].sort_values("position")
            if text["status"] == "committed":
                found = [true[row] for row in own.row]
                assert text["tokens"] == [token for token, _ in found]
                assert text["values"] == pytest.approx([value for _, value in found], rel=1e-6, abs=1e-6)
            assert text["values"][text["maxValueTokenIndex"]] == text["maxValue"] == max(text["values"])
        of_committed = [true[row][1] for row in rows[rows.status == "committed"].row]
        assert one["maxActApprox"] == pytest.approx(max(of_committed), rel=1e-6)
        assert one["frac_nonzero"] == sum(value > 0 for value in of_committed) / len(of_committed)


def test_a_rejected_draft_follows_the_text_before_it(trace: cp.Trace) -> None:
    mine = random_dictionary("topk", "S", 0)
    (one,) = cp.analysis.to_neuronpedia(trace, mine, [3], most_texts=1000)
    rows = trace.rows(0)
    committed = rows[rows.status == "committed"].sort_values("position").token.tolist()
    wanted = []
    for _, lost in rows[rows.status == "rolled_back"].groupby("step"):
        first = int(lost.position.min())
        wanted.append([*committed[:first], *lost.sort_values("position").token])
    found = [text["tokens"] for text in one["activations"] if text["request"] == 0 and text["status"] == "rolled_back"]
    assert sorted(found) == sorted(wanted) and wanted


@pytest.mark.parametrize(
    ("features", "most", "says"), [([], 1, "at least one"), ([48], 1, "0 to 47"), ([1], 0, "at least 1, got 0")]
)
def test_what_cannot_be_given_is_refused(trace: cp.Trace, features: list[int], most: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cp.analysis.to_neuronpedia(trace, random_dictionary("topk", "S", 0), features, most_texts=most)
