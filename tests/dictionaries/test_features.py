"""`trace.features`: the largest features of every row, of rejected drafts too, against a twin and a plain formula."""

from pathlib import Path

import numpy as np
import pytest

import cacheprobe as cp
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from cacheprobe.trace.tables.build import FEATURE_COLUMNS
from tests.dictionaries.planted import random_dictionary
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    """Drafts of the first layer are mostly wrong, and their rows have no states above it."""
    drafter = cp.drafters.EarlyExit(layer=1)
    return cp.run(loaded(), PROMPTS[:3], **SMALL, drafter=drafter, capture=cp.CaptureConfig("STC", heads=("z",)))


@pytest.mark.parametrize(
    ("architecture", "site", "layer"),
    [("jumprelu", "S", 1), ("topk", "S", 0), ("gated", "C", 1), ("standard", "T", 2), ("standard", "z", 1)],
)
def test_the_table_has_the_largest_features_of_every_row(
    trace: cp.Trace, architecture: str, site: str, layer: int
) -> None:
    """Row by row from what `encode` says of its state; test_saelens.py compares `encode` with SAELens."""
    mine = random_dictionary(architecture, site, layer)
    table = trace.features(mine, top=4, include_special=True)
    rows = trace.rows()
    rows = rows[rows.num_layers > layer]
    assert layer > 1 or (rows.status == "rolled_back").sum() > 5
    found, names = [], ["row", "request_id", "step", "phase", "position", "status", "token_id", "token"]
    sizes = mine.encode(trace.vectors(site, layer, rows).flatten(1).float()).numpy()
    for row, own in zip(rows[names].itertuples(index=False), sizes, strict=True):
        largest = np.argsort(-own, kind="stable")[:4]
        found += [(*row, rank, f, own[f]) for rank, f in enumerate(largest) if own[f] > 0]
    assert list(table.columns) == list(FEATURE_COLUMNS) and len(table) == len(found) > 100
    assert set(table.site) == {site} and set(table.layer) == {layer}
    names += ["rank", "feature", "activation"]
    for name, theirs in zip(names, zip(*found, strict=True), strict=True):
        assert table[name].tolist() == (pytest.approx(theirs) if name == "activation" else list(theirs)), name


def test_rejected_drafts_have_features(trace: cp.Trace) -> None:
    table = trace.features(random_dictionary(layer=0), top=2)
    rejected = table[table.status == "rolled_back"]
    assert trace.num_rolled_back > 5 and rejected.row.nunique() >= trace.num_rolled_back
    lost = trace.rows(0, status="rolled_back")
    part = trace.features(random_dictionary(layer=0), top=2, rows=lost)
    assert part.equals(rejected[rejected.request_id == 0].reset_index(drop=True)) and len(part)


def test_bits_do_not_depend_on_the_other_rows(trace: cp.Trace) -> None:
    mine = random_dictionary("topk", layer=0)
    whole, rows = trace.features(mine, include_special=True), trace.rows()
    for row in (0, 7, len(rows) - 1):
        alone = trace.features(mine, rows=rows[rows.row == row], include_special=True)
        assert alone.equals(whole[whole.row == row].reset_index(drop=True)) and len(alone)


def test_saved_runs_have_the_same_features(trace: cp.Trace, tmp_path: Path) -> None:
    mine = random_dictionary("gated")
    assert cp.load_trace(trace.save(tmp_path / "run")).features(mine).equals(trace.features(mine))


def test_a_place_may_be_given(trace: cp.Trace) -> None:
    mine = random_dictionary(layer=1)
    other = trace.features(mine, site="C", layer=-1)
    assert set(other.site) == {"C"} and set(other.layer) == {loaded().n_layers - 1}
    assert not other.activation.equals(trace.features(mine).activation)


def test_what_does_not_fit_is_refused(trace: cp.Trace) -> None:
    with pytest.raises(DictionaryError, match=r"encodes states of width 16, site S of .* has 32; it was made for"):
        trace.features(random_dictionary(width=16))
    with pytest.raises(DictionaryError, match="reads blocks.1.hook_mlp_in, which no trace keeps"):
        trace.features(Dictionary.load(Path(__file__).parents[1] / "fixtures/saelens/transcoder"))
    with pytest.raises(ValueError, match="layer 9 was not captured"):
        trace.features(random_dictionary(layer=9))
    with pytest.raises(ValueError, match="no row has states"):
        trace.features(random_dictionary(), rows=trace.rows().iloc[:0])
    with pytest.raises(ValueError, match="top must be a whole number of at least 1"):
        trace.features(random_dictionary(), top=0)
    with pytest.raises(ValueError, match="site S was not captured"):
        cp.run(loaded(), PROMPTS[:1], **SMALL, capture="C").features(random_dictionary())


def test_the_drafters_rows_are_left_out_above_its_layer(trace: cp.Trace) -> None:
    """Their states were never computed; given by name, they are refused."""
    mine, shallow = random_dictionary(layer=2), trace.rows()
    shallow = shallow[shallow.num_layers < 3]
    assert len(shallow) and not set(shallow.row) & set(trace.features(mine).row)
    with pytest.raises(ValueError, match="the drafter stopped after layer 1"):
        trace.features(mine, rows=shallow)
