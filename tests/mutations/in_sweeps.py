"""Bugs of sweeps: what is refused, run, committed, retried, read and kept apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cacheprobe.sweeps import facts
from cacheprobe.sweeps.storage.store import SweepStore
from cacheprobe_benchmarks.s3_server import BUCKET, s3_server
from tests import test_sweeps as sweeps
from tests import test_sweeps_elsewhere as elsewhere
from tests import test_sweeps_store as stored
from tests import test_sweeps_workers as workers
from tests.mutations.mutate import Mutation, one


class Place(NamedTuple):
    """Where a guard works."""

    finished: Path
    """A sweep that no bug has touched."""
    empty: Path
    patch: pytest.MonkeyPatch


def _refused(change: dict[str, Any], said: str) -> Callable[[Place], None]:
    return lambda p: sweeps.test_impossible_cells_are_refused_before_anything_runs(change, said, p.empty)


def _in_s3(test: Callable[..., None], *more: object) -> Callable[[Place], None]:
    """A test that takes the bucket's folder, behind a server that refuses every fifth request."""

    def guard(p: Place) -> None:
        with s3_server(p.empty, fail_each=5) as (env, _):
            for name, value in env.items():
                p.patch.setenv(name, value)
            test(p.empty / BUCKET, *more)

    return guard


def _far(p: Place) -> SweepStore:
    return SweepStore(f"memory://{p.empty.name}")


def _log(p: Place) -> None:
    sweeps.sweep(sweeps.SMALL, out=p.empty / "s", progress=False)
    sweeps.test_the_log_says_what_happened(p.empty / "s")


def _counted_anew(p: Place) -> None:
    facts.model_facts.cache_clear()
    try:
        sweeps.test_prompts_are_counted_as_the_model_counts_them("smollm2-135m")
    finally:
        facts.model_facts.cache_clear()


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
    "log": _log,
    "disk budget": lambda p: sweeps.test_a_disk_budget_is_kept(p.finished, p.empty),
    "dry run": lambda p: sweeps.test_a_dry_run_writes_nothing(p.empty),
    "dry times": lambda p: sweeps.test_a_dry_run_takes_times_from_the_log_and_counts_the_loading(p.empty),
    "tables": lambda p: sweeps.test_tables_are_asked_in_sql(p.finished),
    "traces": lambda p: sweeps.test_a_shard_is_a_run(p.finished),
    "digests": lambda p: sweeps.test_layers_are_spread_and_cells_told_apart_by_all_that_changes_bits(),
    "compiled": lambda p: sweeps.test_compiled_products_are_an_axis(p.patch),
    "drafters": _refused({"drafter": "early_exit:layer=3"}, "can stop after 0 to 2"),
    "layers": _refused({"intervention": "zero:site=T,layer=4"}, "has layers 0 to 3"),
    "heads": _refused({"intervention": "zero:site=T,layer=1,head=9"}, "has heads 0 to 3"),
    "options": _refused({"intervention": "zero:site=T,layer=1,haed=1"}, "unknown option 'haed'"),
    "lenses": _refused({"lens": "tuned:nowhere"}, "there is no directory nowhere"),
    "other lenses": _refused({"lens": "tuned:tests/tuned_lens_package"}, r"is for \(layers, width\)"),
    "numbers": _refused({"intervention": "add:site=T,layer=1,value=x"}, "value must be a number, got 'x'"),
    "positions": _refused({"intervention": "zero:site=T,layer=1,positions=0-21"}, "position 21 lies outside"),
    "objects": _refused({"drafter": "draft_model:length=3"}, "made of a loaded model"),
    "adapters": _refused({"model": "smollm2-135m", "adapter": "nowhere"}, "unknown adapter 'nowhere'"),
    "adapters' bytes": lambda p: sweeps.test_cells_know_the_bytes_of_their_adapter(p.empty),
    "pads": lambda p: sweeps.test_prompts_are_counted_as_the_model_counts_them("coinflip-thinking"),
    "first tokens": _counted_anew,
    "ranges of seeds": lambda p: sweeps.test_seeds_are_given_as_a_range_and_cells_named_by_what_differs(),
    "capacity": _refused({"task": "coin_flip:people=40"}, "set run.capacity: 2[0-9]+ or more"),
    "products": _refused({"products": "compiled"}, "whose products are torch's"),
    "grouping": lambda p: workers.test_a_worker_goes_on_with_the_model_that_it_holds("abc", 1, 3),
    "shared models": lambda p: workers.test_a_worker_goes_on_with_the_model_that_it_holds("aab", 2, 3),
    "put back": lambda p: workers.test_what_is_put_back_comes_first_and_nothing_after_a_stop(),
    "loading": lambda p: workers.test_a_model_is_loaded_once(p.empty),
    "retries": lambda p: workers.test_a_cell_is_tried_again_as_often_as_asked(p.empty, 1, 2, False),
    "cut in a folder": lambda p: stored.test_a_commit_that_is_cut_leaves_nothing_that_counts(
        SweepStore(p.empty / "s"), p.patch
    ),
    "cut far away": lambda p: stored.test_a_commit_that_is_cut_leaves_nothing_that_counts(_far(p), p.patch),
    "half a shard": lambda p: stored.test_a_shard_that_is_there_is_left_and_half_a_one_is_replaced(
        SweepStore(p.empty / "s")
    ),
    "index": lambda p: stored.test_the_index_is_read_in_its_own_thread(p.empty, p.patch),
    "one lease": _in_s3(elsewhere.test_of_many_that_want_a_lease_at_once_one_gets_it, False),
    "a lease that ran out": _in_s3(elsewhere.test_of_many_that_want_a_lease_at_once_one_gets_it, True),
    "a lease taken over": _in_s3(elsewhere.test_a_lease_that_another_took_over_is_not_renewed),
    "a lease is kept": _in_s3(elsewhere.test_a_shard_whose_manifest_was_not_put_does_not_count_and_a_lease_is_kept),
    "conditions": lambda p: elsewhere.test_a_store_that_ignores_conditions_is_refused_by_name(p.empty, p.patch),
}
"""What must notice."""

SWEEPS = "cacheprobe.sweeps"
STORE, CHECKS, LEASE = f"{SWEEPS}.storage.store:SweepStore", f"{SWEEPS}.checks", f"{SWEEPS}.storage.lease"

MUTATIONS: list[Mutation] = [
    # -- what is run
    one(
        "a folder alone is a shard",
        ("skipping",),
        f"{STORE}.committed",
        'if os.path.exists(f"{folder}/{name}/{MANIFEST}")',
        "",
    ),
    one("shards hold their times", ("order",), f"{SWEEPS}.workers.work:save_cell", 'float("nan")', "1.0 * id(trace)"),
    one(
        "all seeds draw the same prompts",
        ("prompts",),
        f"{SWEEPS}.workers.work:_run",
        '.examples(asked["n"], axes["seed"])',
        '.examples(asked["n"], 0)',
    ),
    one(
        "drafters change the prompts",
        ("prompts",),
        f"{SWEEPS}.workers.work:_run",
        '.examples(asked["n"], axes["seed"])',
        '.examples(asked["n"], axes["seed"] + 10 * bool(axes["drafter"]))',
    ),
    one(
        "a failure ends the sweep",
        ("failures",),
        f"{SWEEPS}.workers.holder:Holder.run",
        "except Exception as error:",
        "except ArithmeticError as error:",
    ),
    one("a full disk ends nothing", ("full disk",), f"{SWEEPS}.engine:_run", "waiting.stop()", "pass"),
    one("Ctrl-C is not told", ("Ctrl-C",), f"{SWEEPS}.engine:_run", "stopped_by = INTERRUPTED", "pass"),
    one("cells end without a line", ("log",), f"{SWEEPS}.engine:_run", "log.write(event)", "pass"),
    one(
        "a dry run writes its plan",
        ("dry run",),
        f"{SWEEPS}.dry_run:dry_run",
        "store = SweepStore(url)",
        'store = SweepStore(url)\n        store.write("sweep.json", b"{}")',
    ),
    one(
        "a dry run loads in no time",
        ("dry times",),
        f"{SWEEPS}.dry_run:dry_run",
        " + loading / min(hands, max(len(counts), 1))",
        "",
    ),
    one(
        "every cell loads its model",
        ("loading",),
        f"{SWEEPS}.workers.holder:Holder._load",
        "if self._key == cell.model_key:",
        "if False:",
    ),
    # -- who is told apart
    one("threads are no part of a digest", ("digests",), f"{SWEEPS}.code:origin", '"threads": threads', '"threads": 1'),
    one(
        "adapters are told apart by name",
        ("adapters' bytes",),
        f"{SWEEPS}.plan:_sources",
        "folder_digest(adapter_directory(",
        "str(adapter_directory(",
    ),
    one("ranges end early", ("digests",), f"{SWEEPS}.cells:_spread", "last + 1", "last"),
    one(
        "the compiler is no part of a digest",
        ("compiled",),
        f"{SWEEPS}.plan:_sources",
        'axes["products"] == "compiled"',
        "False",
    ),
    one(
        "one model serves all products",
        ("compiled",),
        f"{SWEEPS}.cells:Cell.model_key",
        'axes["products"]',
        '"torch"',
    ),
    one(
        "versions are mixed",
        ("versions",),
        f"{SWEEPS}.results:Sweep.__init__",
        "index if all_versions else index.filter(pa.array(is_planned, pa.bool_()))",
        "index",
    ),
    one("axes are taken to be there", ("fewer axes",), f"{SWEEPS}.index:_row", '["axes"].get(name)', '["axes"][name]'),
    # -- what is refused
    one(
        "an exit after the last layer",
        ("drafters",),
        f"{CHECKS}:_check_parts",
        "facts.n_layers - 1)",
        "facts.n_layers)",
    ),
    one(
        "a layer too many",
        ("layers",),
        f"{CHECKS}:_check_parts",
        '["layer"] < facts.n_layers',
        '["layer"] <= facts.n_layers',
    ),
    one("heads are not counted", ("heads",), f"{CHECKS}:_check_parts", "< facts.n_heads", "< 99"),
    one("options are not read", ("options",), f"{SWEEPS}.factory:parse_change", "set(options) - set(known)", "()"),
    one("a lens is believed", ("lenses",), f"{CHECKS}:_check_stored_lens", "not folder.is_dir()", "False"),
    one("a lens fits all", ("other lenses",), f"{CHECKS}:_check_stored_lens", "if shape !=", "if False and shape !="),
    one(
        "words are numbers", ("numbers",), f"{SWEEPS}.factory:parse_change", "type(options[key]) not in kinds", "False"
    ),
    one("positions have no end", ("positions",), f"{CHECKS}:complaint", "if last_changed >", "if -9 >"),
    one(
        "an object is made of a text",
        ("objects",),
        f"{CHECKS}:_check_parts",
        "if name in NEEDS_OBJECTS:",
        "if False:",
    ),
    one(
        "adapters are looked for later",
        ("adapters",),
        f"{CHECKS}:_check_model",
        'adapter_directory(axes["adapter"], axes["model"])',
        "pass",
    ),
    one(
        "tokens in front are not counted",
        ("pads",),
        f"{SWEEPS}.facts:ModelFacts.count_tokens",
        "count + -count % self.thinking.chunk",
        "count",
    ),
    one(
        "no token stands in front",
        ("first tokens",),
        f"{SWEEPS}.facts:_plain_facts",
        "add_bos_token=True",
        "add_bos_token=False",
    ),
    one("seeds end early", ("ranges of seeds",), f"{SWEEPS}.settings:_span", "last + 1", "last"),
    one("names say all", ("ranges of seeds",), f"{SWEEPS}.cells:told_apart", "> 1]", "> 0]"),
    one("rows are not counted", ("capacity",), f"{CHECKS}:complaint", "if needed > run.capacity:", "if False:"),
    one("a thinking model compiles", ("products",), f"{CHECKS}:_check_products", "if is_thinking:", "if False:"),
    one("a budget is no limit", ("disk budget",), f"{SWEEPS}.plan:require_room", "if there + coming >", "if 0 >"),
    one(
        "a folder is open to all",
        ("one folder",),
        f"{SWEEPS}.storage.lock:_locked",
        "with FileLock(path, timeout=0):",
        "if True:",
    ),
    # -- workers
    one(
        "the next model comes first",
        ("grouping", "loading"),
        f"{SWEEPS}.workers.queue:Waiting.take",
        "if not self._by_model.get(held):",
        "if True:",
    ),
    one(
        "all begin with one model",
        ("shared models",),
        f"{SWEEPS}.workers.queue:Waiting.take",
        "/ (1 + self._holders.get(key, 0))",
        "",
    ),
    one(
        "what is put back comes last",
        ("put back",),
        f"{SWEEPS}.workers.queue:Waiting.put_back",
        "appendleft(",
        "append(",
    ),
    one(
        "a stopped queue goes on",
        ("put back",),
        f"{SWEEPS}.workers.queue:Waiting.take",
        "if self.is_stopped:",
        "if False:",
    ),
    one("a death costs no retry", ("retries",), f"{SWEEPS}.backends.processes:_bury", "+= 1", "+= 0"),
    # -- what is committed
    one(
        "a shard is built in its place",
        ("cut in a folder",),
        f"{STORE}.commit",
        'made = staging / f"cacheprobe-{digest}-{secrets.token_hex(4)}"',
        "made = Path(self.path(SHARDS)) / digest\n    made.parent.mkdir(exist_ok=True)",
    ),
    one("a manifest is put first", ("cut far away",), f"{STORE}._put", "(*names, MANIFEST)", "(MANIFEST, *names)"),
    one("half a shard stays", ("half a shard",), f"{STORE}._rename", "if (target / MANIFEST).exists():", "if True:"),
    one("a leftover stays", ("half a shard",), f"{STORE}.commit", "shutil.rmtree(made, ignore_errors=True)", "pass"),
    # -- what is read
    one(
        "pyarrow reads ahead",
        ("index",),
        f"{SWEEPS}.index:_stored",
        ", pre_buffer=False).read(use_threads=False)",
        ").read()",
    ),
    one("files are told apart by their own names", ("tables",), f"{SWEEPS}.results:Sweep._shard_table", "[-2]", "[-1]"),
    one("conditions on cells are dropped", ("traces",), f"{SWEEPS}.results:Sweep.traces", " where {where}", ""),
    # -- leases
    one("a lease overwrites", ("conditions",), f"{LEASE}:_take", "if store.create(name, _lease(holder)):", "if False:"),
    one(
        "a lease is taken by the first of two puts",
        ("one lease", "a lease that ran out"),
        f"{LEASE}:_take",
        "if not store.create(name, _lease(holder)) and not _is_held(store, name, holder):",
        "if not store.create(name, _lease(holder)) and False:",
    ),
    one(
        "a lease that holds is passed by",
        ("a lease is kept",),
        f"{LEASE}:_take",
        "- time.time()) > 0",
        "- time.time()) > 9999",
    ),
    one(
        "a lease that ran out holds",
        ("a lease that ran out",),
        f"{LEASE}:_take",
        "- time.time()) > 0",
        "- time.time()) > -99",
    ),
    one(
        "a lost lease is renewed",
        ("a lease taken over",),
        f"{LEASE}:renewed",
        " or _newest(store)[0] != _number(name)",
        "",
    ),
]
