"""Bugs of what is measured: probes, rollback_prediction, patching grids, interventions and cache surgery."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cacheprobe.edits.patching.grid import difference
from tests.analysis import test_patching as patching
from tests.analysis import test_probes as probes
from tests.analysis import test_rollback_prediction as rollback_prediction
from tests.interventions import test_interventions as interventions
from tests.kvcache import test_surgery as surgery
from tests.mutations.mutate import bug, inside, instead

GUARDS: dict[str, Callable[[], None]] = {
    "ridge is scikit-learn's": lambda: probes.test_scores_are_scikit_learns((40, 12)),
    "noise holds nothing": probes.test_a_probe_finds_what_is_there_and_nothing_else,
    "groups stay together": probes.test_what_stands_in_one_group_is_never_split,
    "prompts that begin alike": probes.test_groups_join_prompts_that_begin_alike,
    "control tasks": probes.test_control_tasks_give_a_word_one_label,
    "ties share their rank": rollback_prediction.test_auroc_counts_pairs,
    "groups are drawn whole": rollback_prediction.test_groups_are_drawn_whole,
    "a cell is the naive run": lambda: patching.test_every_cell_is_the_naive_run("llama", "S"),
    "a head is the naive run": lambda: patching.test_every_head_is_the_naive_run("llama"),
    "a prefix is the naive run": lambda: patching.test_every_prefix_is_the_naive_run("llama", "S"),
    "one and zero": lambda: patching.test_everything_is_one_and_nothing_is_zero("llama"),
    "flips": patching.test_flips_and_nld_are_those_of_the_logits,
    "tracing is the naive run": lambda: patching.test_tracing_is_the_naive_run_with_the_same_noise("T", 2),
    "a change is a plain hook's": lambda: interventions.test_a_run_equals_a_plain_hook_without_a_cache(
        "S", None, "plain"
    ),
    "preemptions forget nothing": interventions.test_steps_choose_passes_and_an_preemption_forgets_nothing,
    "swaps": interventions.test_swapped_requests_take_each_others_place,
    "draws know their position": interventions.test_resampled_positions_draw_by_position_alone,
    "masked rows": lambda: surgery.test_a_masked_position_is_seen_by_no_later_token("plain"),
    "rows are values": surgery.test_rows_are_values_of_their_own,
}
"""What must notice: tests that build all they need themselves."""

RIDGE, GROUPS, AUROC = (
    "cacheprobe.lenses.probes.ridge",
    "cacheprobe.lenses.probes.ridge",
    "cacheprobe.lenses.probes.rollback_prediction",
)
PATCHING, MADE = "cacheprobe.edits.patching", "cacheprobe.edits.interventions"
SURGERY = "cacheprobe.kvcache.surgery"


def _fits_all(real: Any, states: Any, targets: Any, *given: Any) -> Any:
    """Scores of a tested fold come from a fit on all examples."""

    def ridge_scores(train: Any, own: Any, test: Any, penalties: Any) -> Any:
        is_final = train.shape[1] + test.shape[1] == states.shape[1]  # nothing is held back to choose a penalty on
        chosen = (states.double(), targets.double()) if is_final else (train, own)
        return real(*chosen, test, penalties)

    return ridge_scores


def _apart(real: Any) -> Any:
    def joined_groups(members: Any, shared: Any) -> Any:
        members = list(members)
        return real(members, members)

    return joined_groups


def _last_of_equals(scores: Any, labels: Any) -> float:
    ranks, positive = np.searchsorted(np.sort(scores), scores, side="right"), int(labels.sum())
    return (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))


def _rolled(axis: int) -> Any:
    """A cell takes the donor's states of the next position (axis 0) or head (axis 1)."""

    def make(real: Any) -> Any:
        def cell(donor: Any, *place: Any) -> Any:
            rolled = {key: states.roll(1, axis) for key, states in donor.states.items()}
            return real(replace(donor, states=rolled), *place)

        return cell

    return make


def _into_its_source(real: Any) -> Any:
    def with_(self: Any, *given: Any) -> Any:
        made = real(self, *given)
        for old, new in zip((*self.keys, *self.values), (*made.keys, *made.values), strict=True):
            old.copy_(new)
        return made

    return with_


def _of_themselves(real: Any) -> Any:
    def swap(*given: Any, **where: Any) -> Any:
        a, b = real(*given, **where)
        return replace(a, vectors=b.vectors), replace(b, vectors=a.vectors)

    return swap


MUTATIONS = [
    bug(
        "the penalty is chosen on another fold",
        ("ridge is scikit-learn's",),
        f"{RIDGE}:_of_layers",
        lambda real: lambda states, targets, folds, n, *more: real(states, targets, -folds % n, n, *more),
    ),
    bug(
        "the tested fold is trained on",
        ("ridge is scikit-learn's", "noise holds nothing"),
        f"{RIDGE}:_of_layers",
        inside(f"{RIDGE}:ridge_scores", _fits_all),
    ),
    bug(
        "folds split groups",
        ("groups stay together",),
        f"{GROUPS}:group_folds",
        lambda real: lambda *given, **more: np.random.default_rng(0).permutation(real(*given, **more)),
    ),
    bug("prompts that begin alike are apart", ("prompts that begin alike",), f"{GROUPS}:joined_groups", _apart),
    bug(
        "control labels are drawn by example",
        ("control tasks",),
        f"{GROUPS}:control_labels",
        lambda real: lambda words, *given, **more: real(range(len(list(words))), *given, **more),
    ),
    bug("the last of equal ranks is taken", ("ties share their rank",), f"{AUROC}:auroc", instead(_last_of_equals)),
    bug(
        "examples are drawn again, not groups",
        ("groups are drawn whole",),
        f"{AUROC}:resampled_auroc",
        lambda real: (
            lambda scores, labels, groups, *more, **named: real(scores, labels, np.arange(len(labels)), *more, **named)
        ),
    ),
    bug("a patch is one position early", ("a cell is the naive run",), f"{PATCHING}.pairs:_cell", _rolled(0)),
    bug("another head is copied", ("a head is the naive run",), f"{PATCHING}.pairs:_cell", _rolled(1)),
    bug(
        "behind the prefix stands the clean run",
        ("a prefix is the naive run", "one and zero"),
        f"{PATCHING}.pairs:prefix_cell",
        lambda real: lambda clean, corrupt, *place: real(clean, clean, *place),
    ),
    bug(
        "a flip is told of the clean run",
        ("flips",),
        f"{PATCHING}.grid:pair_table",
        lambda real: (
            lambda said, axes, tokens, clean, corrupt: real(said, axes, tokens, clean, corrupt).assign(
                flip=lambda table: (table.logit_difference > 0) != (difference(clean) > 0)
            )
        ),
    ),
    bug(
        "windows of layers begin one lower",
        ("tracing is the naive run",),
        f"{PATCHING}.tracing:window_of",
        lambda real: lambda layer, window, n_layers: real(layer - (window % 2 == 0), window, n_layers),
    ),
    bug(
        "all draws of noise are one",
        ("tracing is the naive run",),
        f"{PATCHING}.tracing:derive_seed",
        lambda real: lambda seed, sample: real(seed, 0),
    ),
    bug(
        "all positions take the first vector",
        ("a change is a plain hook's",),
        f"{MADE}.base:Intervention.vectors_at",
        lambda real: lambda self, positions: real(self, [self.positions[0]] * len(positions)),
    ),
    bug(
        "a preemption loses the change",
        ("preemptions forget nothing",),
        f"{MADE}.editor:Editor._acts",
        lambda real: (
            lambda self, number, one, slot: (
                not (slot.is_again and one.steps is not None) and real(self, number, one, slot)
            )
        ),
    ),
    bug("a swap gives a request its own states", ("swaps",), f"{MADE}.make:swap", _of_themselves),
    bug(
        "draws depend on the pass",
        ("draws know their position",),
        f"{MADE}.base:Intervention.vectors_at",
        lambda real: lambda self, positions: real(self, list(range(len(positions)))),
    ),
    bug(
        "masked rows are attended to",
        ("masked rows", "rows are values"),
        f"{SURGERY}:put_snapshot",
        lambda real: lambda rows, *place: real(replace(rows, hidden=frozenset()), *place),
    ),
    bug(
        "an edit writes into the rows that it was made of",
        ("rows are values",),
        f"{SURGERY}:KVSnapshot._with",
        _into_its_source,
    ),
]
