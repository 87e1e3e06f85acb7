"""Implements `cacheprobe sweep` and `cacheprobe query`. Heavy imports are made when a command runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def sweep(
    config: Path,
    *,
    out: str | None = None,
    backend: str = "serial",
    address: str | None = None,
    workers: int | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> int:
    """Run every combination (cell) of models, tasks, drafters and interventions that a file names; skip finished cells.

    Exits with 0 if every cell is committed, 3 if some are or the sweep was interrupted (and lists the others, with the
    reasons), 1 if none is.

    Parameters
    ----------
    config
        A YAML file: grid or cells, run, resources, disk_budget_gb.
    out
        Folder or fsspec address of the results, such as s3://bucket/sweep; overrides the file's.
    backend
        serial, or ray: on a cluster, or in several processes of this machine.
    address
        Address of a running Ray cluster; by default Ray is started on this machine.
    workers
        Number of workers; overrides the file's resources.workers.
    dry_run
        Check every cell, run one of each model, and print what the sweep would take; writes no results.
    progress
        Show progress.
    """
    _quiet()
    if dry_run:
        from cacheprobe.sweeps.engine import dry_run as tried

        print(tried(config, out=out, backend=backend, workers=workers))
        return 0
    from cacheprobe.sweeps.engine import sweep as run_sweep

    report = run_sweep(config, out=out, backend=backend, address=address, workers=workers, progress=progress)
    print(report)
    return report.exit_code


def query(sweep: str, sql: str, *, out: Path | None = None, all_versions: bool = False) -> None:
    """Query the results of a sweep in SQL.

    Tables of the whole sweep: cells, layers. Tables joined from all shards: hypotheses, rows, events, ledger, thoughts.

    Parameters
    ----------
    sweep
        Folder or fsspec address of a sweep.
    sql
        The query, such as "select model, drafter, avg(acceptance) from cells group by all".
    out
        Write the result to this .csv or .parquet file instead.
    all_versions
        Include shards outside the newest plan: of other settings, and of other versions of the code.
    """
    from cacheprobe.sweeps.results import load_sweep

    results = load_sweep(sweep, all_versions=all_versions)
    table = results.query(sql)
    if results.pending or results.num_others:
        print(results, file=sys.stderr)
    if out is not None:
        from cacheprobe.core.export import require_ending, write_table

        require_ending(out)
        print(f"{len(table)} rows: {write_table(table, out)}")
        return
    print(_as_text(table))


def _as_text(table: "pd.DataFrame") -> str:
    return table.to_string(index=False, na_rep="-") if len(table) else f"no rows; columns: {', '.join(table.columns)}"


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
