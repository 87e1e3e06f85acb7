"""Clicks on each kind of row in the dashboard's lens grid: sentence and card speak of the row that was clicked."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from tests.dash_page import answered, opened, served
from tests.tiny import PROMPTS, SMALL, loaded

OUTCOMES = {"accepted": "accepted", "rejected": "rolled back", "never_judged": "given up"}
"""What the page says of the draft of a superseded row, by its verdict.

Such a row was fed a committed token, so a draft that was never judged was given up."""


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    """A run in which requests lose their cache rows while drafts are open: it has rows of all four kinds."""
    settings = dict(max_kv_tokens=110, window=8, prefill_chunk=16, pad_prefill=True)
    return cp.run(loaded(), PROMPTS, **{**SMALL, **settings}, drafter=cp.drafters.EarlyExit(layer=0))


@pytest.fixture(scope="module")
def address(trace: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(RunList.of([trace.save(tmp_path_factory.mktemp("rows") / "run")])) as url:
        yield url


def last_readings(trace: cp.Trace) -> pd.DataFrame:
    """Of each row the reading of its last layer, beside the first choice of the committed row at its position."""
    table = (
        cp.analysis.lens_readings(trace, include_rolled_back=True)
        .sort_values("layer")
        .drop_duplicates("row", keep="last")
    )
    keys = ["request_id", "position"]
    canonical = table[table.status == "committed"][[*keys, "token", "row"]]
    return table.merge(canonical, on=keys, how="left", suffixes=("", "_canonical"))


def clicked(page: Page, row: Any) -> tuple[str, str]:
    """The sentence and the card after a click on the lowest layer of a row's column."""
    answered(page, "grid", request=row.request_id)
    cell = page.locator(f"#grid-view .column[data-row='{row.row}'] .pick[data-layer='0']")
    cell.click()
    asked = dict(request=row.request_id, position=row.position, row=row.row)
    return answered(page, "insight", **asked), answered(page, "card", **asked)


def link(address: str, row: Any) -> str:
    """Opens the page of the grid that holds a row's position, where the committed row is chosen."""
    return f"{address}?run=0&request={row.request_id}&position={row.position}&rows=all"


@pytest.mark.parametrize("verdict", [*OUTCOMES])
def test_a_clicked_superseded_row_is_spoken_of_with_its_own_draft(
    browser: Browser, address: str, trace: cp.Trace, verdict: str
) -> None:
    """A draft that was given up, too: the page told of the one that was drafted there later."""
    table = last_readings(trace)
    row = next(table[(table.status == "superseded") & (table.verdict == verdict)].itertuples())
    with opened(browser, link(address, row)) as page:
        said, card = clicked(page, row)
    where = f"Superseded row, step {row.step}, reads position {row.position}, predicts {row.position + 1}: "
    draft = f"“{row.drafted_token}”, drafted in step {row.step} from layer 0, was {OUTCOMES[verdict]} in step"
    assert said.startswith(f"{where}{draft}")
    assert f"superseded, decode in step {row.step}" in card and f"position {row.position + 1}" in card
    drafts = [line for line in card.splitlines() if "drafted in step" in line]
    assert len(drafts) == 1 and drafts[0].startswith(f"{row.drafted_token} drafted in step {row.step}")
    assert OUTCOMES[verdict] in drafts[0]


def test_a_clicked_committed_row_is_spoken_of_after_another_was(
    browser: Browser, address: str, trace: cp.Trace
) -> None:
    table = last_readings(trace)
    other = next(table[(table.status == "given_up") & table.row_canonical.notna()].itertuples())
    row = next(table[table.row == other.row_canonical].itertuples())
    with opened(browser, link(address, row)) as page:
        clicked(page, other)
        said, card = clicked(page, row)
    assert said.startswith(
        f"Reads position {row.position}, predicts {row.position + 1}: “{row.drafted_token}”, drafted in"
    )
    assert f"{OUTCOMES[row.verdict]} in step {row.step}" in said and f"“{row.committed_token}”" in said
    assert f"committed, verify in step {row.step}" in card
    assert f"“{row.committed_token}” was committed" in card
