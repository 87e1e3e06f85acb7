"""Shows the page of the lens grid with the chosen position, the logit attribution of a row, and a row as a card (each
layer's most likely tokens, and the verdict on the draft token at the next position) and as a sentence."""

import json
from contextlib import suppress
from functools import cached_property
from typing import get_args

import pandas as pd

from cacheprobe.core.hook_names import site_label
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.trace.tables.token_history import outcomes_at
from cacheprobe.views.attribution import attribution
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, number, one_of
from cacheprobe.views.dashboard.reader import RECORDED, tokenizer_texts
from cacheprobe.views.dashboard.tabs.flip import BUTTON
from cacheprobe.views.dashboard.view import View, button, opened_with_model, readings_code
from cacheprobe.views.diagrams.cards import token_card
from cacheprobe.views.diagrams.lens_grid import (
    LABEL_WIDTH,
    PITCH,
    Include,
    Measure,
    finding,
    grid_of,
    reads_and_predicts,
    select,
)
from cacheprobe.views.report.insight import insight, insight_in_vain
from cacheprobe.views.text import markup

MOST_COLUMNS = 40


class AtRow(View):
    """A view that reads rows through the lens that the question names."""

    @cached_property
    def site(self) -> str:
        """Site that is read: "S", "T" or "C"."""
        return one_of(self.question["site"], "site", ("S", "T", "C"))

    @cached_property
    def row(self) -> pd.Series:
        """Line of the rows table: the row whose number the question names, else the committed row at its position.
        Raises: CannotShow if there is no such row among the rows that predict generated tokens."""
        rows = self.tables.predicting_rows(self.request)
        if self.question.get("row") is not None:
            matching = rows[rows.row == number(self.question["row"], "row")]
        else:
            matching = rows[(rows.position == self.position) & (rows.status == "committed")]
        if matching.empty:
            raise CannotShow(
                f"request {self.request} has no reading at position {self.position}: readings begin at the prompt's "
                f"last token, position {self.tables.prompt_length(self.request) - 1}, and end before the newest token"
            )
        return matching.iloc[0]

    def readings(self, page: range, row: int | None = None) -> pd.DataFrame:
        """Returns lens readings of the request as a DataFrame: the recorded readings, or readings computed now from
        kept states. page: range of positions. row: number of one row to read, instead of all rows of the page.

        Raises: CannotShow if the run recorded no readings of the site, if states cannot be read, or for an unknown
        lens.
        """
        tables, lens = self.tables, self.question["lens"]
        if lens == RECORDED:
            if not tables.run.has_readings:
                remedy = "choose a lens that reads its kept states"
                remedy += "" if tables.run.is_unread else ", or run it with Z in capture="
                raise CannotShow(f"this run recorded no lens readings; {remedy}")
            if self.site != "S":
                raise CannotShow(f"recorded readings are of S; choose a lens that is read now for {self.site}")
            table = tables.readings(self.request, page)
            return table if row is None else table[table.row == row]
        rows = tables.predicting_rows(self.request)
        rows = rows[rows.position.isin(page)] if row is None else rows[rows.row == row]
        return self.run_list.reader.read(tables, str(lens), self.site, rows)


class LensGridPage(AtRow):
    """The page of the lens grid that has the chosen position."""

    @cached_property
    def include(self) -> Include:
        """Which rows have a column."""
        return one_of(self.question["rows"], "rows", get_args(Include))

    @cached_property
    def colour(self) -> Measure:
        """What colours the cells."""
        return one_of(self.question["colour"], "colour", get_args(Measure))

    @cached_property
    def page(self) -> range:
        """Positions of the page. Raises: CannotShow if the request has no row that predicts a generated token."""
        columns = min(max((number(self.question["width"], "width") - LABEL_WIDTH - 4) // PITCH, 1), MOST_COLUMNS)
        page = self.tables.page(self.request, self.position, self.include, columns)
        if not page:
            raise CannotShow(f"request {self.request} has no row that predicts a generated token")
        return page

    def draw(self) -> str:
        """Returns HTML: a heading, a note, and the grid for one page of positions. The attributes data-first and
        data-last of the grid's div are the first and last position of that page."""
        tables, request, page = self.tables, self.request, self.page
        is_recorded = self.question["lens"] == RECORDED and tables.run.has_readings
        # the finding of the whole request, as in the report; the page's readings are then lines of the whole ones
        title = tables.lens_finding(request) if is_recorded else ""
        table = self.readings(page)
        title = title or f"{finding(table, request)}, over the positions of this page"
        picture = grid_of(
            table, request, colour=self.colour, include=self.include, positions=page,
            width=number(self.question["width"], "width"), has_tips=False, title=title,
        )  # fmt: skip
        last_position = tables.prompt_length(request) - 2 + len(tables.run.request(request)["committed_token_ids"])
        note = f"{picture.note} Click a cell. Underlined columns were computed in the chosen step. "
        note += f"The last position with a reading is {last_position}."
        about = f"data-first='{page.start}' data-last='{page.stop - 1}'"
        body = f"<div class='page' {about}>{picture.body}{picture.legend}</div>"
        return f"<h2>{markup(title)}</h2><p class='note'>{note}</p>{body}"

    def table(self) -> pd.DataFrame:
        """Returns the readings on the page."""
        return select(self.readings(self.page), self.request, self.include, self.page)

    def code(self) -> list[str]:
        """Returns the code of the grid."""
        chosen = f"{self.page.start} <= position < {self.page.stop}"
        code = readings_code(self.run_list, self.tables, self.question["lens"], self.site, self.request, chosen)
        code += ['table = table[table.status == "committed"]'] if self.include == "committed" else []
        return [
            *code,
            f"cp.plots.lens_grid(readings, {self.request}, colour={self.colour!r}, include={self.include!r}, "
            f"positions={self.page})",
        ]


class Contributions(AtRow):
    """The logit attribution of one row. Its methods raise CannotShow if the run did not keep S, T and C, or if the row
    or its model is missing."""

    def draw(self) -> PageAnswer:
        """Returns a heading, a note, and a figure of bars by layer for T (attention) and C (MLP)."""
        missing = [site for site in "STC" if site not in self.tables.run.sites]
        if missing:
            remedy = "record them with --capture STCZ: each logit can then be split into the parts of attention and MLP"
            raise CannotShow(f"this run kept no {' and '.join(map(site_label, missing))}; {remedy}")
        figure = attribution(self.table())
        figure.update_layout(margin=dict(l=52, r=8))
        note = "The final norm's scale is held at the row's own; bars sum to the logit."
        html = f"<h3>{figure.layout.title.text}</h3><p class='note'>{note}</p>"
        # "gave" is the id of the figure's place, below the button "What gave this logit?"
        return {"html": html, "graphs": self.graphs("gave", [figure])}

    def table(self) -> pd.DataFrame:
        """Returns the table of `cp.analysis.attribution`."""
        return self.run_list.reader.attribution(self.tables, int(self.row.row))

    def code(self) -> list[str]:
        """Returns the code of the bars."""
        return [
            *opened_with_model(self.run_list, self.tables),
            f"table = cp.analysis.attribution(trace, {self.request}, row={int(self.row.row)})",
            "cp.plots.attribution(table)",
        ]


class RowCard(AtRow):
    """One row of the trace."""

    def draw(self) -> str:
        """Returns HTML of the card: each layer's most likely tokens, the prediction depth, and the tokens drafted and
        committed at the next position. Raises: CannotShow if the row does not exist, or if no reading of the row was
        kept or can be computed."""
        run, row, table = self.tables.run, self.row, self.table()
        if table.empty:
            raise CannotShow(
                f"no reading of request {self.request} at position {row.position} was kept; widen the capture filters"
            )
        of_head = self.tables.head_readings(self.request, int(row.position))
        if self.question["lens"] == RECORDED and len(of_head):
            table = pd.concat([table, of_head])
        missing = {int(i) for top in table.top_token_ids for i in top} - set(run.token_texts)
        texts = {**tokenizer_texts(self.run_list.model, missing), **tokenizer_texts(run.fingerprint["model"], missing)}
        rows, events = self.tables.rows_of(self.request), self.tables.events_of(self.request)
        number = None if self.question.get("row") is None else int(row.row)
        card = token_card(
            table, rows, events, self.request, int(row.position), row=number, token_texts={**texts, **run.token_texts},
            history=self.tables.history_of(self.request),
        )  # fmt: skip
        is_edited = row.status not in DISCARDED_DRAFT and run.fingerprint.get("path") != "thinking"
        flips = self._flip_buttons() if is_edited else ""
        return f"<h3>{markup(card.finding)}</h3>{card.body}{self._features()}{flips}"

    def _flip_buttons(self) -> str:
        """Returns HTML with a button for each rejected draft of the predicted token; "" for none. A token that followed
        a rejected one in its draft has no button: it was not judged."""
        history, place = self.tables.history_of(self.request), int(self.row.position)
        place += 1 - self.tables.prompt_length(self.request)
        before, here = (
            {one.decided_step: one.born for one in outcomes_at(history, at) if one.outcome == "rolled_back"}
            for at in (place - 1, place)
        )
        steps = sorted(step for step in here.keys() - before.keys() if step is not None)
        if self.question.get("row") is not None:
            steps = [step for step in steps if self.row.step in (step, here[step])]
        drawn = []
        for step in steps:
            draft = json.dumps({"run": self.question["run"], "request": self.request, "step": step})
            drawn.append(button(f"{BUTTON} (step {step})" if len(steps) > 1 else BUTTON, flip=draft))
        return f'<p class="flips">{" ".join(drawn)}</p>' if drawn else ""

    def _features(self) -> str:
        """Returns HTML of the features that were recorded of the row, the largest first; a click colours the text by
        one. "" for a run without recorded features."""
        if self.tables.run.features is None:
            return ""
        lines = self.tables.features_of(self.request)
        lines = lines[lines.row == self.row.row].sort_values("rank")
        about = self.tables.run.meta["capture"]["dictionary"]
        head = f"<h4>Features of {site_label(about['site'])}, layer {about['layer']}</h4>"
        if lines.empty:
            return f"{head}<p class='note'>No feature is active in this row.</p>"
        buttons = "".join(
            f"<li>{button(str(line.feature), intent='feature', feature=line.feature)} {line.activation:.2f}</li>"
            for line in lines.itertuples()
        )
        return f'{head}<ul class="features">{buttons}</ul><p class="note">Click one: it colours the text.</p>'

    def sentence(self) -> str:
        """Returns HTML, one sentence on the position that the row predicts: the draft tokens, their verdicts, the
        committed token, and the layers that predicted each token through the question's lens. For a row that was fed a
        rejected or abandoned draft token: that token, and the last layer's first choice."""
        tables, request = self.tables, self.request
        row = None if self.question.get("row") is None else self.row
        position = self.position if row is None else int(row.position)
        table, rows = tables.run.events.iloc[:0], tables.rows_of(request)
        with suppress(CannotShow):  # the card says why nothing is read; the verdicts are known without
            table = self.readings(range(position, position + 1))
            is_shown = (table.status == "committed") if row is None else (table.row == row.row)
            table = table[is_shown & (table.site != "thought")]
        if row is not None and row.status in DISCARDED_DRAFT:
            text = insight_in_vain(table, row)
        else:
            outcomes = outcomes_at(tables.history_of(request), position + 1 - tables.prompt_length(request))
            step = None if row is None else int(row.step)
            text = insight(table, rows[rows.position == position], outcomes, tables.run.token_texts, step=step)
        about_row = reads_and_predicts(position)
        if row is not None and row.status != "committed":
            about_row = f"{row.status.replace('_', ' ')} row, step {row.step}, {about_row}"
        return f"<b>{about_row[0].upper()}{about_row[1:]}:</b> {markup(text)}."

    def table(self) -> pd.DataFrame:
        """Returns the row's lines of `cp.analysis.lens_readings` or `cp.analysis.read_states`."""
        position = int(self.row.position)
        return self.readings(range(position, position + 1), int(self.row.row))

    def code(self) -> list[str]:
        """Returns the code of the card."""
        row, number, lens = self.row, int(self.row.row), self.question["lens"]
        which = "" if row.status == "committed" else f"row={number}, "
        return [
            *readings_code(self.run_list, self.tables, lens, self.site, self.request, f"row == {number}"),
            f"cp.plots.token_card(table, trace.rows(), trace.events(), {self.request}, {row.position}, {which}"
            "token_texts=trace.token_texts)",
        ]
