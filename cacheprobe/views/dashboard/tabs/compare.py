"""Compares two runs in the dashboard."""

from functools import cached_property

import pandas as pd

from cacheprobe.analysis.comparison import compare_requests, first_reading_difference, lens_of, setting_differences
from cacheprobe.trace.tables.draft_verdicts import draft_counts, drafts_table, rejected_by_place
from cacheprobe.views.dashboard.questions import PageAnswer
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.dashboard.view import View, directory_of, opened
from cacheprobe.views.report.run_comparison import (
    NothingToCompare,
    comparison_title,
    counts_block,
    fingerprint_block,
    lens_difference,
    request_block,
    settings_block,
)
from cacheprobe.views.style import Figure
from cacheprobe.views.text import markup, text_of


class Comparison(View):
    """Two runs, `run` and `against` of the page's question, and one request of both."""

    @cached_property
    def other(self) -> RunTables:
        """Tables of the run to compare with."""
        return self.run_list.tables(self.question["against"])

    @property
    def names(self) -> tuple[str, str]:
        """Names of both runs."""
        return self.tables.name, self.other.name

    def draw(self) -> str | PageAnswer:
        """Returns the settings that differ, what each run drafted, which requests differ, the tokens and rejected
        drafts of one request, and its lens readings with their difference; a note if fewer than two runs are open."""
        if sum(entry.tables is not None for entry in self.run_list.entries) < 2:
            remedy = "Name two or more to compare them: <code>cacheprobe dash RUN OTHER</code>."
            return f"<h2>One run is open</h2><p class='note'>{remedy}</p>"
        both, names = (self.tables, self.other), self.names
        ours, theirs = (tables.run for tables in both)
        differences = compare_requests(ours.requests, theirs.requests, ours.events, theirs.events)
        settings = setting_differences(ours.meta, theirs.meta, ours.requests, theirs.requests)
        counts = draft_counts(ours.events), draft_counts(theirs.events)
        rejected = [rejected_by_place(drafts_table(tables.events_of(self.request))) for tables in both]
        texts = [tables.run.token_texts for tables in both]
        requests = request_block(differences, self.request, (ours.requests, theirs.requests), names, texts, rejected)
        html = (
            f"<h2>{markup(comparison_title(differences))}</h2>"
            f"<h3>Settings that differ</h3>{settings_block(settings, names)}"
            f"<h3>What was drafted</h3>{counts_block(counts, names)}<h3>Requests</h3>{requests}"
        )
        after = f"<h3>Schedule fingerprints</h3>{fingerprint_block((ours.fingerprint, theirs.fingerprint), names)}"
        if differences[self.request].what in ("prompt", "missing"):
            return html + after
        sentence, figure = self._readings()
        html += f"<p class='note'>{sentence}</p>"
        if figure is None:
            return html + after
        html += f"<h3>{markup(str(figure.layout.title.text))}</h3>"
        return {"html": html, "graphs": self.graphs("compare", [figure]), "more": after}

    def _readings(self) -> tuple[str, Figure | None]:
        """Returns (HTML of a sentence on the lens readings of the request in both runs, figure of their difference;
        None without any to compare)."""
        ours, theirs = self.tables.run, self.other.run
        if not (ours.has_readings and theirs.has_readings):
            return "Lens readings are not compared: one of the runs recorded none, or none were read yet.", None
        if lens_of(ours.meta) != lens_of(theirs.meta):
            return "Lens readings are not compared: the runs were read through different lenses.", None
        pair = [run.readings(self.request) for run in (ours, theirs)]  # too large to cache
        our_lines, their_lines = (table[table.status == "committed"] for table in pair)
        shared = our_lines.merge(their_lines[["position", "layer"]], on=["position", "layer"])
        if shared.empty:
            return "Lens readings are not compared: the runs recorded none of the same places.", None
        is_all = len(shared) == len(our_lines) == len(their_lines)
        of_shared = "" if is_all else f" of the {len(shared)} that both runs recorded"
        sentence = f"Every lens reading{of_shared} is the same, bit for bit."
        if (first := first_reading_difference(shared, their_lines)) is not None:
            sentence = (
                f"The first lens reading{of_shared} that differs is that of layer {first[1]} at position {first[0]}."
            )
        sentence += " States are compared by <code>cacheprobe verify</code>."
        try:
            return sentence, lens_difference(pair[0], pair[1], self.names)
        except NothingToCompare:  # no place in common, as the sentence says
            return sentence, None

    def table(self) -> pd.DataFrame:
        """Returns a line for each place of the generated tokens: token ids and texts of both runs."""
        columns = {}
        for tables, end in ((self.tables, ""), (self.other, "_theirs")):
            is_there = self.request < len(tables.run.requests)
            ids = tables.run.request(self.request)["committed_token_ids"] if is_there else []
            columns[f"token_id{end}"] = pd.Series(ids, dtype="Int64")
            columns[f"token{end}"] = pd.Series([text_of(tables.run.token_texts, token) for token in ids], dtype=object)
        return pd.DataFrame(columns).rename_axis("place").reset_index()

    def code(self) -> list[str]:
        """Returns the code of the table, and of the comparison of the tokens."""
        return [
            "import pandas as pd",
            *opened(self.tables, "ours"),
            f"theirs = cp.load_trace({directory_of(self.other)!r})",
            f"pair = [pd.Series(trace.tokens.get({self.request}, []), dtype='Int64') for trace in (ours, theirs)]",
            "columns = {'token_id': pair[0], 'token': pair[0].map(ours.token_texts)}",
            "columns |= {'token_id_theirs': pair[1], 'token_theirs': pair[1].map(theirs.token_texts)}",
            "table = pd.DataFrame(columns).rename_axis('place').reset_index()",
            f"cp.plots.comparison((ours.rows(), theirs.rows()), (ours.events(), theirs.events()), {self.request}, "
            f"names={self.names!r}, fingerprints=(ours.fingerprint, theirs.fingerprint), "
            "token_texts=(ours.token_texts, theirs.token_texts))",
        ]
