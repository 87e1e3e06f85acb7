"""The tests that must notice a bug of sweeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cacheprobe.sweeps.store import SweepStore
from tests.sweeps import test_sweeps as sweeps
from tests.sweeps import test_sweeps_guards as guards
from tests.sweeps import test_sweeps_store as stored


class Place(NamedTuple):
    """Where a guard works."""

    finished: Path
    """A sweep that no bug has touched."""
    empty: Path
    patch: pytest.MonkeyPatch


def _refused(change: dict[str, Any], said: str) -> Callable[[Place], None]:
    return lambda p: sweeps.test_impossible_cells_are_refused_before_anything_runs(change, said, p.empty)


def _far(p: Place) -> SweepStore:
    return SweepStore(f"memory://{p.empty}")


GUARDS: dict[str, Callable[[Place], None]] = {
    "skipping": lambda p: sweeps.test_what_is_committed_is_skipped_and_what_is_not_is_made_again(p.finished, p.empty),
    "order": lambda p: sweeps.test_a_shard_does_not_depend_on_what_its_process_ran_before(p.finished, p.empty),
    "prompts": lambda p: sweeps.test_cells_of_one_seed_read_the_same_prompts(p.empty),
    "versions": lambda p: sweeps.test_another_code_version_is_kept_apart(p.finished, p.empty, p.patch),
    "fewer axes": lambda p: sweeps.test_a_shard_that_knows_fewer_axes_is_still_read(p.finished, p.empty),
    "failures": lambda p: sweeps.test_a_failed_cell_is_named_and_the_others_go_on(p.empty, p.patch),
    "full disk": lambda p: sweeps.test_a_full_disk_ends_the_sweep(p.empty, p.patch),
    "Ctrl-C": lambda p: sweeps.test_ctrl_c_leaves_a_folder_that_goes_on(p.finished, p.empty, p.patch),
    "one folder": lambda p: sweeps.test_two_sweeps_do_not_write_one_folder(p.empty),
    "disk budget": lambda p: sweeps.test_a_disk_budget_stops_the_sweep(p.empty),
    "dry run": lambda p: sweeps.test_a_dry_run_writes_nothing(p.empty),
    "tables": lambda p: sweeps.test_tables_are_asked_in_sql(p.finished),
    "traces": lambda p: sweeps.test_a_shard_is_a_run(p.finished),
    "digests": lambda p: sweeps.test_layers_are_spread_and_cells_told_apart_by_all_that_changes_bits(),
    "options": _refused({"intervention": "zero:site=T,layer=1,haed=1"}, "unknown argument 'haed'"),
    "lenses": _refused({"lens": "tuned:nowhere"}, "there is no directory nowhere"),
    "positions": _refused({"intervention": "zero:site=T,layer=1,positions=9-0"}, "'9-0' must be"),
    "drafters": _refused({"drafter": "early_exits:layer=1"}, "unknown name 'early_exits'"),
    "unfit cells": lambda p: sweeps.test_a_cell_that_does_not_fit_its_model_fails_by_itself(p.empty),
    "adapters": _refused({"model": "smollm2-135m", "adapter": "nowhere"}, "unknown adapter 'nowhere'"),
    "adapters' bytes": lambda p: sweeps.test_cells_know_the_bytes_of_their_adapter(p.empty),
    "ranges of seeds": lambda p: sweeps.test_seeds_are_given_as_a_range_and_cells_named_by_what_differs(),
    "products": lambda p: sweeps.test_products_are_an_axis(),
    "loading": lambda p: guards.test_a_model_is_loaded_once(p.empty, p.patch),
    "cut in a folder": lambda p: stored.test_a_commit_that_is_cut_leaves_nothing_that_counts(
        SweepStore(p.empty / "s"), p.patch
    ),
    "cut far away": lambda p: stored.test_a_commit_that_is_cut_leaves_nothing_that_counts(_far(p), p.patch),
    "half a shard": lambda p: stored.test_a_shard_that_is_there_is_left_and_half_a_one_is_replaced(
        SweepStore(p.empty / "s")
    ),
}
