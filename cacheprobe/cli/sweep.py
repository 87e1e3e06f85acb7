"""`cacheprobe sweep` and `cacheprobe query`. Heavy imports wait until a command runs."""

import sys
from pathlib import Path
from typing import Any


def sweep(
    config: Path,
    *,
    out: str | None = None,
    backend: str = "serial",
    address: str | None = None,
    workers: int | None = None,
    alone: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> int:
    """Run every combination of models, tasks, drafters and interventions that a file names; what is there is skipped.

    Exits with 0 where every cell is committed, 3 where some are (it says which are not, and why), 1 where none is.

    Parameters
    ----------
    config
        A YAML file: grid or cells, run, resources, disk_budget_gb.
    out
        Folder or fsspec address of the results, such as s3://bucket/sweep, where the file says none.
    backend
        serial, processes or ray.
    address
        Of a running Ray cluster; without one, Ray is started on this machine.
    workers
        Instead of the file's resources.workers.
    alone
        Nothing else writes to this object store: ask for no lease. For stores without conditional puts.
    dry_run
        Check every cell, try one of each model, and say what the sweep would take; nothing is written.
    progress
        Show progress.
    """
    _quiet()
    if dry_run:
        from cacheprobe.sweeps.dry_run import dry_run as tried

        print(tried(config, out=out, backend=backend, workers=workers))
        return 0
    from cacheprobe.sweeps.engine import sweep as run_sweep

    report = run_sweep(
        config, out=out, backend=backend, address=address, workers=workers, alone=alone, progress=progress
    )
    print(report)
    return report.exit_code


def query(sweep: str, sql: str, *, out: Path | None = None, all_versions: bool = False) -> None:
    """Ask the results of a sweep in SQL: tables cells, layers, and hypotheses, rows, events, ledger of every shard.

    Parameters
    ----------
    sweep
        Folder or fsspec address of a sweep.
    sql
        Such as "select model, drafter, avg(acceptance) from cells group by all".
    out
        Write the answer to this .csv or .parquet file instead.
    all_versions
        Include shards that are not of the newest plan: those of other settings, and of other versions of the code.
    """
    from cacheprobe.sweeps.results import load_sweep

    held = load_sweep(sweep, all_versions=all_versions)
    table = held.query(sql)
    if held.pending or held.num_others:
        print(held, file=sys.stderr)
    if out is not None:
        from cacheprobe.core.export import require_ending, write_table

        require_ending(out)
        print(f"{len(table)} rows: {write_table(table, out)}")
        return
    print(_as_text(table))


def _as_text(table: Any) -> str:
    return table.to_string(index=False, na_rep="-") if len(table) else f"no rows; columns: {', '.join(table.columns)}"


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
