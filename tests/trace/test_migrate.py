"""A run that the first version of the storage wrote is read by today's, and says what it does not have.

tests/fixtures/trace-v1 was written by the code of that commit; write_trace_v1.py beside it says how.
"""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.files import sha256_of_file
from cacheprobe.ops.equality import close
from cacheprobe.trace.checked_files import damaged_files
from cacheprobe.trace.manifest import FORMAT_VERSION, TraceError, sha256_of_manifest
from cacheprobe.trace.migrate import OLDEST, migrated
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.build import EVENT_COLUMNS
from cacheprobe.views import write_report
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import compare
from cacheprobe.views.report.listings import request_listings, run_listings
from tests.tiny import loaded

FIRST = Path(__file__).parents[1] / "fixtures" / "trace-v1"
SIXTH = Path(__file__).parents[1] / "fixtures" / "trace-v6"
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
SETTINGS = dict(window=4, group=2, capacity=96, deterministic=[0], max_new_tokens=8, progress=False, path="bridge")


@pytest.fixture(scope="module")
def old() -> cp.Trace:
    return cp.load_trace(FIRST)


@pytest.fixture(scope="module")
def new() -> cp.Trace:
    """The same prompts on the same weights, by today's code."""
    return cp.run(loaded(), [[1, 2, 3, 4, 5], [7, 8, 9]], drafter=cp.drafters.EarlyExit(layer=1), **SETTINGS)


def test_the_fixture_is_of_the_first_version() -> None:
    assert json.loads((FIRST / "manifest.json").read_text())["format_version"] == OLDEST == 1
    assert sum(path.stat().st_size for path in FIRST.iterdir()) < 200_000


def test_it_holds_what_today_would_record(old: cp.Trace, new: cp.Trace) -> None:
    assert repr(old).startswith("Trace(2 requests")
    for request_id in (0, 1):
        assert old.committed(request_id) == new.committed(request_id)
        for site in "STC":
            for layer in range(3):
                ours, theirs = new.states(site, layer, request_id), old.states(site, layer, request_id)
                assert close(ours, theirs, 1e-5, because="prompts were fed in another shape: sums in another order")
    assert old.num_rolled_back == new.num_rolled_back > 0
    lost = old.rows(0, status="rolled_back")
    assert len(lost) and torch.isfinite(old.vectors("S", 0, lost)).all()


def test_its_tables_have_todays_columns(old: cp.Trace, new: cp.Trace) -> None:
    assert list(old.events().columns) == EVENT_COLUMNS == list(new.events().columns)
    assert list(old.hypotheses().columns) == list(new.hypotheses().columns)
    assert list(old.row_table.columns) == list(new.row_table.columns)
    assert set(old.ledger(0).columns) == set(new.ledger(0).columns)
    assert set(old.meta["capture"]) <= set(new.meta["capture"])
    # of a path there was no choice then, and dictionaries left no token out
    assert set(new.meta) <= set(old.meta) | {"path_reason", "special_token_ids", "d_vocab", "stopped_by"}


def test_what_was_not_recorded_is_said_to_be_missing(old: cp.Trace, new: cp.Trace) -> None:
    assert list(old.missing) == ["log-probabilities"] and new.missing == {}
    with pytest.raises(ValueError, match="no log-probabilities: trace format 1 did not record them"):
        old.logprobs(0)
    assert len(new.logprobs(0)) == 8


def test_everything_that_looks_at_a_run_looks_at_it(old: cp.Trace, tmp_path: Path) -> None:
    assert "EarlyExit" in str(run_listings(old)) and "rolled back" in str(request_listings(old, 1))
    assert write_report(old, tmp_path / "report.html").stat().st_size > 10_000
    run = StoredRun(FIRST)
    pd.testing.assert_frame_equal(run.events, old.event_table)
    pd.testing.assert_frame_equal(
        run.readings(0),
        cp.analysis.lens_readings(old, include_rolled_back=True).query("request_id == 0").reset_index(drop=True),
    )
    assert run.meta == old.meta


def test_a_comparison_claims_nothing_of_log_probabilities_that_were_not_recorded(
    old: cp.Trace, new: cp.Trace, tmp_path: Path
) -> None:
    """The dashboard called those of an old run different from those of a new one, and equal to its own."""
    run_list = RunList.of([FIRST, new.save(tmp_path / "new")])
    for run, against in ((0, 1), (1, 0), (0, 0)):
        told = compare.Comparison(run_list, {"run": run, "against": against, "request": 0}).draw()
        said = told if isinstance(told, str) else told["html"]
        assert "All 2 requests committed the same tokens; log-probabilities are not compared" in said
        assert "Request 0 committed the same tokens in both; log-probabilities are not compared" in said
    assert (
        "log-probabilities included"
        in compare.Comparison(run_list, {"run": 1, "against": 1, "request": 0}).draw()["html"]
    )


def test_saved_again_it_is_of_todays_version(old: cp.Trace, tmp_path: Path) -> None:
    old.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["format_version"] == FORMAT_VERSION
    again = cp.load_trace(tmp_path / "again")
    pd.testing.assert_frame_equal(again.event_table, old.event_table)
    assert again.missing == old.missing
    assert torch.equal(again.states("C", 2, 1), old.states("C", 2, 1))


def test_a_manifest_of_today_is_left_alone(new: cp.Trace, tmp_path: Path) -> None:
    manifest = json.loads((new.save(tmp_path / "run") / "manifest.json").read_text())
    assert migrated(manifest) == {**manifest, "stored_version": FORMAT_VERSION}


def test_a_run_of_format_6_has_todays_status_and_path(tmp_path: Path) -> None:
    """Format 6 named the status superseded candidate, and the fast forward twin."""
    old, run = cp.load_trace(SIXTH), StoredRun(SIXTH)
    new = cp.run(loaded(), PROMPTS, drafter=cp.drafters.EarlyExit(layer=1), **{**SETTINGS, "path": "fast"})
    for request_id in range(len(PROMPTS)):
        assert old.committed(request_id) == new.committed(request_id)
        theirs = run.readings(request_id)
        assert set(theirs.status) == {"committed", "superseded", "rolled_back"} & set(theirs.status)
    said = ["row", "request_id", "step", "position", "token_id", "role", "status"]
    for table in (old.row_table, run.rows):
        pd.testing.assert_frame_equal(table[said], new.row_table[said])
    assert (old.hypothesis_table.status == new.hypothesis_table.status).all()
    assert "superseded" in set(old.row_table.status) and old.fingerprint["path"] == new.fingerprint["path"] == "fast"
    assert old.meta["path_reason"].startswith("fast: no hook") and damaged_files(SIXTH) == (7, [])
    again = cp.load_trace(old.save(tmp_path / "again"))
    pd.testing.assert_frame_equal(again.row_table, old.row_table)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            FORMAT_VERSION + 1,
            f"trace format {FORMAT_VERSION + 1}, this cacheprobe reads 1 to {FORMAT_VERSION}; a newer",
        ),
        (0, "trace format 0, this cacheprobe reads 1 to"),
        (True, "trace format True"),
        ("3", "trace format 3.*run it again"),
        (None, "trace format None"),
    ],
)
def test_an_unknown_version_is_refused_by_name(tmp_path: Path, version: object, said: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FIRST, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": version}))
    for opened in (cp.load_trace, StoredRun):
        with pytest.raises(TraceError, match=said):
            opened(folder)


def test_a_setting_of_format_5_has_its_new_name(tmp_path: Path) -> None:
    """Format 5 named max_kv_tokens kv_rows; checksums are of the file as it was written, so they are taken anew."""
    trace = cp.run(loaded(), [[1, 2, 3]], max_new_tokens=2, window=4, capacity=16, max_kv_tokens=12, progress=False)
    path = trace.save(tmp_path / "run") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["meta"]["config"]["kv_rows"] = manifest["meta"]["config"].pop("max_kv_tokens")
    sha256 = {name: sha256_of_file(tmp_path / "run" / name) for name in manifest["files"]}
    manifest |= {"format_version": 5, "sha256": sha256}
    path.write_text(json.dumps({**manifest, "manifest_sha256": sha256_of_manifest(manifest)}))
    assert cp.load_trace(tmp_path / "run").meta["config"] == trace.meta["config"]
