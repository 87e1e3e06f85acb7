"""Bugs of sweeps: what is refused, run, committed, retried, read and kept apart."""

import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cacheprobe.sweeps.cells import AXES
from cacheprobe.sweeps.store import SHARDS
from cacheprobe.trace.manifest import MANIFEST
from tests.mutations.mutate import bug, inside, instead

SWEEPS = "cacheprobe.sweeps"
STORE, PLAN, FACTORY = f"{SWEEPS}.store:SweepStore", f"{SWEEPS}.plan", f"{SWEEPS}.factory"


def _drawing(seed_of: Callable[[Any], int]) -> Any:
    """A cell's task draws its examples with the seed `seed_of(axes)`."""

    def make(real: Any, cell: Any, model: Any) -> Any:
        def made(kind: str, text: str) -> Any:
            task = real(kind, text)
            drawn = SimpleNamespace(examples=lambda n, seed: task.examples(n, seed_of(cell.axes)))
            return drawn if kind == "tasks" else task

        return made

    return inside(f"{SWEEPS}.run_cell:make", make)


def _with_times(real: Any) -> Any:
    def save_trace(trace: Any, *given: Any, **more: Any) -> Any:
        trace.event_table = trace.event_table.assign(seconds=1.0 * id(trace))
        return real(trace, *given, **more)

    return save_trace


def _raises_failures(real: Any) -> Any:
    def run(url: str, held: Any) -> Any:
        outcome = real(url, held)
        if outcome.cause:
            raise RuntimeError(outcome.message)
        return outcome

    return run


def _silent_about_ctrl_c(real: Any) -> Any:
    def run(*given: Any) -> Any:
        report = real(*given)
        return replace(report, stopped_by="") if report.stopped_by == "interrupted" else report

    return run


def _writes_its_plan(real: Any) -> Any:
    def missing(plan: Any, store: Any) -> Any:
        store.write("sweep.json", b"{}")
        return real(plan, store)

    return missing


class _Forgetful(dict):
    """Says that it does not have what it has."""

    def __contains__(self, key: object) -> bool:
        return False


def _mixes_versions(real: Any) -> Any:
    def init(self: Any, store: Any, index: Any, *more: Any) -> None:
        real(self, store, index, *more)
        self._index = index

    return init


def _built_in_its_place(self: Any, digest: str, build: Any) -> int:
    made = Path(self.path(SHARDS)) / digest
    made.parent.mkdir(parents=True, exist_ok=True)
    build(made)
    return sum(path.stat().st_size for path in made.iterdir())


def _manifest_first(self: Any, made: Path, digest: str) -> None:
    for path in sorted(made.iterdir(), key=lambda path: path.name != MANIFEST):
        self.fs.pipe_file(self.path(f"{SHARDS}/{digest}/{path.name}"), path.read_bytes())


def _half_stays(real: Any) -> Any:
    def rename(self: Any, made: Path, digest: str) -> None:
        if not (Path(self.path(SHARDS)) / digest).exists():
            real(self, made, digest)

    return rename


def _leaves_leftovers(real: Any) -> Any:
    def commit(*given: Any) -> int:
        with patch.object(shutil, "rmtree", lambda path, ignore_errors=False: None):
            return real(*given)

    return commit


MUTATIONS = [
    # -- what is run
    bug(
        "a folder alone is a shard",
        ("skipping",),
        f"{STORE}.committed",
        instead(lambda self: frozenset(path.name for path in Path(self.path(SHARDS)).glob("*"))),
    ),
    bug("shards hold their times", ("order",), f"{SWEEPS}.run_cell:save_trace", _with_times),
    bug(
        "drafters change the prompts",
        ("prompts",),
        f"{SWEEPS}.run_cell:_run",
        _drawing(lambda axes: axes["seed"] + 10 * bool(axes["drafter"])),
    ),
    bug("a failure ends the sweep", ("failures",), f"{SWEEPS}.backends:run_and_commit", _raises_failures),
    bug("Ctrl-C is not told", ("Ctrl-C",), f"{SWEEPS}.engine:_run", _silent_about_ctrl_c),
    bug("a dry run writes its plan", ("dry run",), f"{SWEEPS}.engine:_missing", _writes_its_plan),
    bug("a full disk stops nothing", ("full disk",), f"{SWEEPS}.run_cell:FULL", instead("out of space")),
    bug("every cell loads its model", ("loading",), f"{SWEEPS}.run_cell:_MODEL", instead(_Forgetful())),
    # -- who is told apart
    bug(
        "threads are no part of a digest",
        ("digests",),
        f"{SWEEPS}.plan:origin",
        lambda real: lambda threads, sources: real(1, sources),
    ),
    bug("adapters are told apart by name", ("adapters' bytes",), f"{SWEEPS}.plan:folder_digest", instead(str)),
    bug(
        "ranges end early",
        ("digests",),
        f"{SWEEPS}.cells:_spread",
        lambda real: lambda values: [one for v in values for one in (real([v])[:-1] or real([v]))],
    ),
    bug(
        "one model serves all products",
        ("products",),
        f"{SWEEPS}.cells:Cell.model_key",
        lambda real: lambda self: (*real(self)[:3], "torch", real(self)[4]),
    ),
    bug("versions are mixed", ("versions",), f"{SWEEPS}.results:Sweep.__init__", _mixes_versions),
    bug(
        "axes are taken to be there",
        ("fewer axes",),
        f"{SWEEPS}.results:_row",
        lambda real: lambda about: [about["meta"]["sweep"]["cell"]["axes"][name] for name in AXES] and real(about),
    ),
    # -- what is refused
    bug("parts are made later", ("drafters", "options"), f"{PLAN}:_make_parts", instead(lambda axes, config: None)),
    bug("a lens is believed", ("lenses",), f"{PLAN}:folder_digest", instead(lambda folder: "")),
    bug("positions are all", ("positions",), f"{FACTORY}:span", instead(lambda text: range(1))),
    bug(
        "adapters are looked for later",
        ("adapters",),
        f"{PLAN}:_sources",
        lambda real: lambda axes: real({**axes, "adapter": None}),
    ),
    bug(
        "interventions are not made",
        ("unfit cells",),
        f"{SWEEPS}.run_cell:_changes",
        instead(lambda *given: []),
    ),
    bug(
        "seeds end early",
        ("ranges of seeds",),
        f"{SWEEPS}.settings:span",
        lambda real: lambda text: real(text)[:-1] or real(text),
    ),
    bug(
        "names say all",
        ("ranges of seeds",),
        f"{SWEEPS}.cells:distinguishing_labels",
        instead(lambda cells: {digest: str(cell) for digest, cell in cells.items()}),
    ),
    bug("a budget is no limit", ("disk budget",), f"{SWEEPS}.engine:bytes_left", instead(lambda *given: math.inf)),
    bug("a folder is open to all", ("one folder",), f"{SWEEPS}.store:only_writer", instead(lambda path: nullcontext())),
    # -- what is committed
    bug("a manifest is put first", ("cut far away",), f"{STORE}._put", instead(_manifest_first)),
    bug("a shard is built in its place", ("cut in a folder",), f"{STORE}.commit", instead(_built_in_its_place)),
    bug("half a shard stays", ("half a shard",), f"{STORE}._rename", _half_stays),
    bug("a leftover stays", ("half a shard",), f"{STORE}.commit", _leaves_leftovers),
    # -- what is read
    bug(
        "lines do not say whose they are",
        ("tables",),
        f"{SWEEPS}.results:Sweep._shard_table",
        lambda real: lambda self, name: f"select * replace ('' as digest) from ({real(self, name)})",
    ),
    bug(
        "conditions on cells are dropped",
        ("traces",),
        f"{SWEEPS}.results:Sweep.traces",
        lambda real: lambda self, where: real(self),
    ),
]
