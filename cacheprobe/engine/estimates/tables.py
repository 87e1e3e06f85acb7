"""Measures the tables of a trace on a sample: bytes of a line in memory and on disk, and the time to build it.

The sample runs some of the requests through the engine's loop and a Recorder without states, and computes no pass.
"""

import io
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from cacheprobe.core.config import CaptureConfig
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.estimates.counting import plain_states, replay_passes
from cacheprobe.engine.estimates.tally import RunTally
from cacheprobe.engine.plan import RunPlan
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.ops.readout import Readout
from cacheprobe.trace.manifest import MANIFEST
from cacheprobe.trace.recording.assemble import assemble
from cacheprobe.trace.recording.features import FeatureRecorder
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.storage import write_parquet
from cacheprobe.trace.tables.build import hypotheses_table
from cacheprobe.trace.tables.schema import typed
from cacheprobe.trace.trace import Trace

SAMPLE_ROWS = 600
"""Rows of the sample, about; a run with fewer is sampled whole."""
SAMPLE_PROMPT, SAMPLE_NEW = 128, 32
"""Tokens of a sampled request, at most."""
READ_ROWS = 1_920
"""Lines of the sampled table of lens readings."""


@dataclass(frozen=True)
class PerLine:
    """Holds bytes or seconds of a table as a fixed part and a part for each line."""

    fixed: float
    line: float

    def of(self, lines: float) -> float:
        """Returns the value for a table of so many lines."""
        return self.fixed + self.line * lines


@dataclass(frozen=True)
class TableCosts:
    """Holds what a run's tables take: functions of the number of their lines, by table."""

    memory: dict[str, PerLine]
    disk: dict[str, PerLine]
    build_seconds: PerLine
    """By rows: of rows, events, tokens and ledger."""
    reading_seconds: float
    """Of one line of lens readings."""

    def memory_bytes(self, lines: Mapping[str, float]) -> float:
        """Returns the bytes of all tables in memory. lines: number of lines by table."""
        return sum(self.memory[name].of(count) for name, count in lines.items())

    def disk_bytes(self, lines: Mapping[str, float]) -> float:
        """Returns the bytes of the manifest and of all tables on disk. lines: number of lines by table."""
        return sum(self.disk[name].of(count) for name, count in lines.items())


def sample_tables(plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState]) -> TableCosts:
    """Builds and saves the tables of some of the requests, and returns the costs of their lines.

    states: from `plan.states`; they are not changed. The tables are saved to a temporary directory, and deleted.
    """
    sampled, rows = [], 0
    for state in states:
        sampled.append(state)
        new = state.sampling.max_new_tokens or 1
        rows += min(state.request.num_prompt_tokens, SAMPLE_PROMPT) + min(new, SAMPLE_NEW)
        if rows >= SAMPLE_ROWS:
            break
    is_cut = rows >= SAMPLE_ROWS
    made = plain_states(sampled, *((SAMPLE_PROMPT, SAMPLE_NEW) if is_cut else ()))
    requests = [state.request for state in made]
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    recorder = Recorder(plan.model, CaptureConfig(sites=None), plan.layers, plan.lens, prompts)
    tally = replay_passes(plan, drafter, made, recorder)
    began = time.perf_counter()
    meta = {"kind": "run", "drafter": repr(drafter), "path_reason": plan.path_reason, "errors": {}}
    trace = assemble(recorder, requests, plan.fingerprint(), plan.config, plan.capture, meta)
    seconds = time.perf_counter() - began
    tables = {
        "rows": trace.row_table, "events": trace.event_table, "ledger": trace.ledger_table,
        "tokens": trace.token_table,
    }  # fmt: skip
    reading_seconds = 0.0
    if plan.capture.reads_lens:
        tables["hypotheses"], reading_seconds = _readings(plan, trace)
    if (features := FeatureRecorder.of(plan.capture, plan.model)) is not None:
        tables["features"] = _features(features)
    memory = {name: PerLine(0.0, table.memory_usage(deep=True).sum() / len(table)) for name, table in tables.items()}
    disk = {name: _on_disk(name, table) for name, table in tables.items()}
    disk["manifest"] = _manifest(trace, tally)
    memory["manifest"] = PerLine(0.0, 0.0)
    return TableCosts(memory, disk, PerLine(0.0, seconds / len(trace.row_table)), reading_seconds)


def _on_disk(name: str, table: pd.DataFrame) -> PerLine:
    """Returns the bytes of a Parquet file by lines, from the whole table and its first half."""
    lines, half = len(table), len(table) // 2
    whole = _parquet_bytes(name, table)
    if half < 2:
        return PerLine(whole, 0.0)
    line = max(whole - _parquet_bytes(name, table.iloc[:half]), 0) / (lines - half)
    return PerLine(whole - line * lines, line)


def _parquet_bytes(name: str, table: pd.DataFrame) -> int:
    """Returns the size of a table as a Parquet file in bytes, as a saved run holds it."""
    file = io.BytesIO()
    write_parquet(table, file, name)
    return file.getbuffer().nbytes


def _manifest(trace: Trace, tally: RunTally) -> PerLine:
    """Returns the bytes of a manifest by rows: one part for the run, and one for the tokens and texts of requests."""
    with tempfile.TemporaryDirectory(prefix="cacheprobe-estimate-") as folder:
        text = (trace.save(Path(folder) / "run") / MANIFEST).read_text(encoding="utf-8")
    requests = len(json.dumps(json.loads(text)["requests"], indent=1, ensure_ascii=False).encode())
    return PerLine(len(text.encode()) - requests, requests / tally.rows)


def _features(features: FeatureRecorder) -> pd.DataFrame:
    """Returns a table of READ_ROWS random features."""
    draw, num = torch.Generator().manual_seed(0), torch.arange(READ_ROWS)
    numbers = torch.rand(2, READ_ROWS, generator=draw)
    columns = {
        "row": num // features.most_active,
        "rank": num % features.most_active,
        "feature": (numbers[0] * features.dictionary.config.d_sae).long(),
        "activation": numbers[1],
    }
    return typed(pd.DataFrame({name: column.numpy() for name, column in columns.items()}), "features")


def _readings(plan: RunPlan, trace: Trace) -> tuple[pd.DataFrame, float]:
    """Returns (a table of READ_ROWS random lens readings, the seconds to build one of its lines)."""
    draw = torch.Generator().manual_seed(0)
    top_k, d_vocab = plan.capture.top_k, plan.model.d_vocab
    layers = torch.tensor(plan.layers)
    num = torch.arange(READ_ROWS)
    numbers = torch.randn(READ_ROWS, top_k + 2, generator=draw)
    # few tokens are read often, as in a text
    ids = (torch.rand(READ_ROWS, top_k, generator=draw) ** 4 * d_vocab).long()
    columns = {
        "row": num // len(layers) % len(trace.row_table),
        "layer": layers[num % len(layers)],
        "target": ids[:, 0],
        **Readout(
            top_token_ids=ids,
            top_logprob_nats=numbers[:, :top_k],
            entropy_nats=numbers[:, top_k],
            target_rank=(numbers[:, top_k].abs() * 100).long(),
            target_logprob_nats=numbers[:, top_k + 1],
        )._asdict(),
    }
    began = time.perf_counter()
    table = hypotheses_table(columns, trace.row_table, plan.lens.name, plan.model.token_texts)
    return table, (time.perf_counter() - began) / READ_ROWS
