"""Tables have one schema, whatever a run holds: in memory, in every Parquet file, and exported."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import cacheprobe as cp
from cacheprobe.cli import look, sweep
from cacheprobe.lenses.base import LensError
from cacheprobe.models.base import ModelError
from cacheprobe.trace.stored import StoredRun, growing_run
from tests.dashboard.growing_run import part_each_round
from tests.dictionaries.planted import random_dictionary
from tests.experts.families import loaded as loaded_experts
from tests.thinking.test_thinking_engine import FREE, RUN, lm
from tests.thinking.test_thinking_engine import PROMPTS as CHUNKS
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

FEW: dict[str, Any] = {**SMALL, "max_new_tokens": 8}
EARLY = cp.drafters.EarlyExit(layer=1)
LENS = cp.lenses.LogitLens()


def imported(**to: Any) -> cp.Trace:
    """What Hugging Face's generate returned."""
    outputs = hf_model().generate(
        torch.tensor([PROMPTS[0]]), return_dict_in_generate=True, output_hidden_states=True, output_logits=True,
        do_sample=False, pad_token_id=0, max_new_tokens=6,
    )  # fmt: skip
    return cp.import_generate(outputs, **to)


MADE: dict[str, Callable[[], cp.Trace]] = {
    "undrafted": lambda: cp.run(loaded(), PROMPTS[:2], **FEW),
    "drafted": lambda: cp.run(
        loaded(), PROMPTS[:3], **FEW, drafter=EARLY, deterministic=[0], dictionary=random_dictionary()
    ),
    "float64": lambda: cp.run(loaded(dtype=torch.float64), PROMPTS[:2], **FEW, drafter=cp.drafters.NGram()),
    "no readings": lambda: cp.run(loaded(), PROMPTS[:2], **FEW, capture="STC"),
    "no states": lambda: cp.run(loaded(), PROMPTS[:2], **FEW, capture=None, dictionary=random_dictionary()),
    "one token": lambda: cp.run(loaded(), PROMPTS[:2], **{**FEW, "max_new_tokens": 1}),
    "drafted thoughts": lambda: cp.run(lm(True), CHUNKS[:3], drafter=EARLY, sampling=FREE, deterministic=True, **RUN),
    "thoughts alone": lambda: cp.run(lm(True), CHUNKS[:2], sampling=FREE, capture="S", **RUN),
    "import": lambda: imported(model=loaded()),
    "import without a model": lambda: imported(stop_token_ids=()),
    "replay": lambda: cp.replay(
        loaded(), [{"prompt_token_ids": PROMPTS[0], "token_ids": [5, 6, 7]}], window=4, capacity=96, progress=False
    ),
    "experts": lambda: cp.run(
        loaded_experts("mixtral"), PROMPTS[:1], **FEW, capture=cp.CaptureConfig("S", heads=("router",))
    ),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, cp.Trace]:
    return {name: make() for name, make in MADE.items()}


@pytest.fixture(scope="module")
def saved(runs: dict[str, cp.Trace], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    return {name: trace.save(folder / name) for name, trace in runs.items()}


@pytest.fixture(scope="module")
def everywhere(runs: dict[str, cp.Trace], saved: dict[str, Path]) -> dict[str, cp.Trace]:
    """The runs in memory, and loaded from the disk; and runs that earlier versions saved."""
    loaded_again = {f"{name}, loaded": cp.load_trace(saved[name], trace.model) for name, trace in runs.items()}
    return runs | loaded_again


def with_costs(trace: cp.Trace) -> pd.DataFrame:
    counts = cp.analysis.acceptance(trace, progress=False)
    costs = counts[["drafter", "settings", "layer", "lens", "window"]].drop_duplicates()
    names = ("verify_seconds", "undrafted_seconds", "draft_seconds", "plain_seconds")
    return cp.analysis.expected_speedup(counts, costs.assign(**dict.fromkeys(names, 1.0)))


A = cp.analysis
TABLES: dict[str, Callable[[cp.Trace], pd.DataFrame]] = {
    **{name: lambda trace, name=name: getattr(trace, name)() for name in ("rows", "events", "thoughts", "rejected")},
    "hypotheses": lambda trace: trace.hypotheses(include_rolled_back=True),
    "features": lambda trace: trace.features(),
    "features of a dictionary": lambda trace: trace.features(random_dictionary()),
    "ledger": lambda trace: trace.ledger(0),
    "ledger before the run": lambda trace: trace.ledger(0)[:0],
    **{f"cp.analysis.{name}": getattr(A, name) for name in (
        "commitment", "engine_differences", "lens_readings", "prediction_depth", "read_thoughts", "reasoning_spans",
        "routing", "saturation", "token_table",
    )},
    "cp.analysis.group_rejections": lambda trace: A.group_rejections(A.token_table(trace)),
    "cp.analysis.tokens_with_text": lambda trace: A.tokens_with_text(trace, A.token_table(trace), "1"),
    "cp.analysis.to_dataframe": lambda trace: A.to_dataframe(trace).drop(columns="vector"),  # of the states' own dtype
    "cp.analysis.expected_speedup": with_costs,
    "edits": lambda trace: trace.edits(),
    "cp.analysis.answer_logprobs": lambda trace: A.answer_logprobs(loaded(), [[1, 2]], [[3]]),
    "cp.analysis.acceptance": lambda trace: A.acceptance(trace, progress=False),
    "cp.analysis.acceptance of n-grams": lambda trace: A.acceptance(trace, cp.drafters.NGram(), progress=False),
    "cp.analysis.attribution": lambda trace: A.attribution(trace, 0, len(trace.requests[0].prompt_token_ids) - 1),
    "cp.analysis.divergences": lambda trace: A.divergences(trace, LENS),
    "cp.analysis.draft_agreement": lambda trace: A.draft_agreement(trace, 4),
    "cp.analysis.generated_tokens": lambda trace: A.generated_tokens(trace, 0),
    "cp.analysis.patchscope": lambda trace: A.patchscope(
        trace.model, trace, trace.rows()[:2], prompt=[1, 2, 3], progress=False
    ),
    "cp.analysis.read_states": lambda trace: A.read_states(trace, LENS),
    "cp.analysis.reconstruction": lambda trace: A.reconstruction(trace, random_dictionary()),
    "cp.analysis.rejected_tokens": lambda trace: A.rejected_tokens(trace, LENS),
    "cp.analysis.tokens_at": lambda trace: A.tokens_at(trace, 0),
}  # fmt: skip
"""By the function's name, and what it is given: what returns a table."""
FOR_SOME = {
    "cp.analysis.agreement": "a column for each verdict of the run",
    "cp.analysis.with_reasoning": "a column more than the table that it is given",
}
ALIKE = [("cp.analysis.acceptance", "cp.analysis.acceptance of n-grams"), ("features", "features of a dictionary"),
         ("hypotheses", "cp.analysis.lens_readings", "cp.analysis.read_states")]  # fmt: skip
"""Tables with the same columns."""


def types_of(table: pd.DataFrame) -> dict[str, str]:
    """The pandas dtype and the Arrow type of each column. The Arrow type of lists is in the lists alone, which a table
    without a list does not have."""
    arrow = pa.Schema.from_pandas(table, preserve_index=False)
    known = {name: arrow.field(name).type for name in table if table[name].dtype != object or table[name].notna().any()}
    return {name: f"{table[name].dtype}, {known.get(name, 'lists')}" for name in table}


def differences(found: dict[str, dict[str, str]]) -> list[str]:
    """What differs between the schemas of some tables, by where each table is from."""
    names, complaints = list(found), []
    for other in names[1:]:
        ours, theirs = found[names[0]], found[other]
        if list(ours) != list(theirs):
            complaints.append(f"{names[0]} has {list(ours)}, {other} has {list(theirs)}")
        for column in ours.keys() & theirs.keys():
            a, b = sorted((ours[column], theirs[column]), key=lambda kind: kind == "object, lists")
            if a != b and not (b == "object, lists" and a.startswith("object, list<")):
                complaints.append(f"{column}: {names[0]} has {ours[column]}, {other} has {theirs[column]}")
    return complaints


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_one_schema_whatever_the_run_holds(name: str, everywhere: dict[str, cp.Trace]) -> None:
    found = {}
    for where, trace in everywhere.items():
        try:
            found[where] = types_of(TABLES[name](trace))
        except (ValueError, LensError, ModelError):  # the run has no such table
            continue
    assert len(found) > 1
    assert differences(found) == []


@pytest.mark.parametrize("names", ALIKE)
def test_tables_of_one_kind_have_one_schema(names: tuple[str, ...], runs: dict[str, cp.Trace]) -> None:
    assert differences({name: types_of(TABLES[name](runs["drafted"])) for name in names}) == []


def test_a_query_finds_one_schema(everywhere: dict[str, cp.Trace]) -> None:
    """`Trace.table`, whose types are DuckDB's."""
    for name in ("rows", "events", "hypotheses", "ledger", "tokens"):
        found = [everywhere[of].table(name) for of in ("undrafted", "drafted", "undrafted, loaded", "drafted, loaded")]
        types = [dict(zip(one.columns, map(str, one.types), strict=True)) for one in found]
        assert types == [types[0]] * 4, name


def test_every_public_table_is_looked_at() -> None:
    trace = {name: getattr(cp.Trace, name) for name in dir(cp.Trace) if not name.startswith("_")}
    analysis = {f"cp.analysis.{name}": getattr(A, name) for name in A.__all__}
    tables = {
        name
        for name, function in {**trace, **analysis}.items()
        if inspect.isfunction(function) and inspect.signature(function).return_annotation is pd.DataFrame
    }
    assert len(tables) > 20
    assert tables - {*TABLES, *FOR_SOME} == set()


def stored_types(files: Iterator[Path]) -> dict[str, dict[str, dict[str, str]]]:
    """By kind of table: by file, the types that pyarrow and pandas find in each column."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for file in files:
        arrow, dtypes = pq.read_schema(file), pd.read_parquet(file).dtypes
        kind, *_, number = file.stem.split("-")
        kind += " part" * (kind == "thoughts" and number.isdigit() and len(number) == 5)
        found[kind][f"{file.parent.name}/{file.name}"] = {
            name: f"{dtypes[name]}, {arrow.field(name).type}" for name in arrow.names
        }
    return found


def test_every_parquet_file_has_one_schema(
    runs: dict[str, cp.Trace], saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of saved runs, of runs that are recorded in parts, while they grow and at their end, and of recorded
    imports."""
    part_each_round(monkeypatch)
    made = dict(
        undrafted=lambda to: cp.run(loaded(), PROMPTS[:2], **FEW, out=to),
        one=lambda to: cp.run(loaded(), PROMPTS[:2], **{**FEW, "max_new_tokens": 1}, out=to),
        thoughts=lambda to: cp.run(lm(True), CHUNKS[:2], sampling=FREE, **RUN, out=to),
        imported=lambda to: imported(model=loaded(), out=to),
    )
    files = [file for folder in saved.values() for file in folder.glob("*.parquet")]
    for name, make in made.items():
        files += make(tmp_path / name).save(tmp_path / f"{name} again").glob("*.parquet")
        files += (tmp_path / name).glob("*.parquet")
    settings = {name: value for name, value in FEW.items() if name != "progress"}
    settings |= dict(capture="STCZ", dictionary=random_dictionary())
    thinking = {name: value for name, value in RUN.items() if name != "progress"} | dict(sampling=FREE)
    for name, model, given in (
        ("growing", loaded(), settings),
        ("growing drafts", loaded(), settings | dict(drafter=EARLY)),
        ("growing thoughts", lm(True), thinking),
    ):
        stream = cp.stream(model, CHUNKS[:3] if model is lm(True) else PROMPTS[:3], **given, out=tmp_path / name)
        for _ in zip(stream, range(9), strict=False):
            pass
        stream.close()
        files += (tmp_path / name).glob("*.parquet")
        growing, followed = cp.load_trace(tmp_path / name), growing_run(tmp_path / name)
        assert growing.rejected().dtypes.equals(runs["drafted"].rejected().dtypes)
        assert followed.features is None or growing.features().dtypes.equals(followed.features.dtypes)
        assert followed.events.dtypes.equals(runs["drafted"].events().dtypes)
    found = stored_types(iter(files))
    assert {*found} == {
        *("rows", "events", "ledger", "tokens", "hypotheses", "readings", "features", "thoughts", "thoughts part"),
    }
    assert {kind: said for kind, of in found.items() if (said := differences(of))} == {}


def test_a_stored_run_and_a_growing_one_have_the_tables_of_memory(
    runs: dict[str, cp.Trace], saved: dict[str, Path]
) -> None:
    for name in ("undrafted", "drafted", "drafted thoughts"):
        trace, stored = runs[name], StoredRun(saved[name])
        for ours, theirs in (
            (trace.rows(), stored.rows),
            (trace.events(), stored.events),
            (trace.ledger_table, stored.ledger),
            (cp.analysis.lens_readings(trace, True).query("request_id == 0"), stored.readings(0)),
        ):
            assert differences({"in memory": types_of(ours), "stored": types_of(theirs)}) == []


def test_exports_have_one_schema(runs: dict[str, cp.Trace], saved: dict[str, Path], tmp_path: Path) -> None:
    """`cacheprobe hypotheses`, `cacheprobe export` and `cp.analysis.to_datasets`."""
    readings, states, columns = {}, {}, {}
    for name in ("undrafted", "drafted", "drafted thoughts", "thoughts alone"):
        look.hypotheses(saved[name], out=tmp_path / f"{name}.parquet")
        look.hypotheses(saved[name], out=tmp_path / f"{name}.csv")
        look.export(saved[name], out=tmp_path / name, progress=False)
        readings[name] = pq.read_schema(tmp_path / f"{name}.parquet").remove_metadata()
        columns[name] = list(pd.read_csv(tmp_path / f"{name}.csv").columns)
        for file in (tmp_path / name).glob("*.parquet"):
            schema = pq.read_schema(file).remove_metadata()
            states[file] = [(field.name, field.type) for field in schema if field.name != "vector"]
        states[name] = states[file]
        features = cp.analysis.to_datasets(runs[name], layers=0).features
        assert [one.dtype for column, one in features.items() if column in ("layer", "token", "position")] == [
            "int64", "large_string", "int64",
        ]  # fmt: skip
    for found in (readings, states, columns):
        first, *others = found.values()
        assert all(other == first for other in others)
    assert readings["thoughts alone"].field("top_token_ids").type == pa.list_(pa.int64())


CELLS = {"model": "coinflip-plain", "task": "coin_flip:people=2"}
SHORT = {"n": 2, "max_new_tokens": 2, "capacity": 128, "capture": "SZ"}


def test_the_tables_of_sweeps_have_one_schema(tmp_path: Path) -> None:
    plain = {"grid": {**CELLS, "seed": [0]}, "run": {**SHORT, "max_new_tokens": 1}}
    drafted = {"grid": {**CELLS, "drafter": ["none", "early_exit:layer=1"], "window": 4, "seed": [0]}, "run": SHORT}
    queries = ("cells", "layers", "hypotheses", "rows", "events", "ledger")
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    files = []
    for name, config in (("plain", plain), ("drafted", drafted)):
        assert cp.sweep(config, out=tmp_path / name, progress=False).is_complete
        results = cp.load_sweep(tmp_path / name)
        for kind, table in (("cells", results.cells), ("layers", results.layers)):
            found[kind][name] = types_of(table)
        for kind in queries:
            found[f"query {kind}"][name] = types_of(results.query(f"select * from {kind}"))
            out = tmp_path / f"{name}-{kind}.parquet"
            sweep.query(str(tmp_path / name), f"select * from {kind}", out=out)
            schema = pq.read_schema(out)
            found[f"export {kind}"][name] = {field.name: str(field.type) for field in schema}
        files += (tmp_path / name / "shards").rglob("*.parquet")
    found |= stored_types(iter(files))
    assert {kind: said for kind, of in found.items() if (said := differences(of))} == {}
