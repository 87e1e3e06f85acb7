"""Bugs of what is measured: probes, rollback_prediction, patching grids, interventions and cache surgery."""

from collections.abc import Callable

from tests import test_foresight as rollback_prediction
from tests import test_interventions as interventions
from tests import test_patching as patching
from tests import test_probes as probes
from tests import test_surgery as surgery
from tests.mutations.mutate import Mutation, one

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
        "S", None, "twin"
    ),
    "evictions forget nothing": interventions.test_steps_choose_passes_and_an_eviction_forgets_nothing,
    "swaps": interventions.test_swapped_requests_take_each_others_place,
    "draws know their position": interventions.test_resampled_positions_draw_by_position_alone,
    "masked rows": lambda: surgery.test_a_masked_position_is_seen_by_no_later_token("twin"),
    "rows are values": surgery.test_rows_are_values_of_their_own,
}
"""What must notice: tests that build all they need themselves."""

RIDGE, GROUPS, AUROC = "cacheprobe.probes.ridge", "cacheprobe.probes.groups", "cacheprobe.probes.auroc"
PATCHING, MADE = "cacheprobe.patching", "cacheprobe.interventions"
ROWS = "cacheprobe.kvcache.surgery"

MUTATIONS: list[Mutation] = [
    one(
        "the penalty is chosen on another fold",
        ("ridge is scikit-learn's",),
        f"{RIDGE}:_of_layers",
        "folds == (fold + 1) % num_folds",
        "folds == (fold + 2) % num_folds",
    ),
    one(
        "the tested fold is trained on",
        ("ridge is scikit-learn's", "noise holds nothing"),
        f"{RIDGE}:_of_layers",
        "said = ridge_scores(states[:, ~test], targets[~test]",
        "said = ridge_scores(states, targets",
    ),
    one(
        "folds split groups",
        ("groups stay together",),
        f"{GROUPS}:group_folds",
        "return fold_of[inverse]",
        "return np.random.default_rng(seed).permutation(fold_of[inverse])",
    ),
    one(
        "prompts that begin alike are apart",
        ("prompts that begin alike",),
        f"{GROUPS}:joined_groups",
        'parent[root(("member", member))] = root(("shared", text))',
        'root(("member", member))',
    ),
    one(
        "control labels are drawn by example",
        ("control tasks",),
        f"{GROUPS}:control_labels",
        "return drawn[:, [place[word] for word in words]]",
        "return np.random.default_rng(seed).choice(labels, size=(number, len(words)))",
    ),
    one(
        "the last of equal ranks is taken",
        ("ties share their rank",),
        f"{AUROC}:auroc",
        "(np.cumsum(counts) - (counts - 1) / 2)",
        "np.cumsum(counts)",
    ),
    one(
        "examples are drawn again, not groups",
        ("groups are drawn whole",),
        f"{AUROC}:resampled_auroc",
        "np.flatnonzero(groups == group) for group in np.unique(groups)",
        "np.array([i]) for i in range(len(groups))",
    ),
    one(
        "a patch is one position early",
        ("a cell is the naive run",),
        f"{PATCHING}.activation:_cell",
        "[position : position + 1]",
        "[position - 1 : position]",
    ),
    one(
        "another head is written",
        ("a head is the naive run",),
        f"{PATCHING}.activation:_cell",
        "vectors[:, head], head)",
        "vectors[:, head], (head + 1) % 4)",
    ),
    one(
        "behind the prefix stands the clean run",
        ("a prefix is the naive run", "one and zero"),
        f"{PATCHING}.prefix:prefix_cell",
        "corrupt.at(site, layer)[position + 1 :]",
        "clean.at(site, layer)[position + 1 :]",
    ),
    one(
        "a flip is told of the clean run",
        ("flips",),
        f"{PATCHING}.grid:pair_table",
        "!= (low > 0)",
        "!= (high > 0)",
    ),
    one(
        "windows of layers begin one lower",
        ("tracing is the naive run",),
        f"{PATCHING}.tracing:window_of",
        "(window - 1) // 2",
        "window // 2",
    ),
    one(
        "all draws of noise are one",
        ("tracing is the naive run",),
        f"{PATCHING}.tracing:causal_tracing",
        "derive_seed(seed, sample)",
        "derive_seed(seed, 0)",
    ),
    one(
        "all positions take the first vector",
        ("a change is a plain hook's",),
        f"{MADE}.base:Intervention.vectors_at",
        "self.positions.index(p)",
        "min(self.positions.index(p), 0)",
    ),
    one(
        "an eviction loses the change",
        ("evictions forget nothing",),
        f"{MADE}.editor:Editor._acts",
        "slot.position in self._written[number] if is_hidden else",
        "False if is_hidden else",
    ),
    one(
        "a swap gives a request its own states",
        ("swaps",),
        f"{MADE}.make:swap",
        "return one(a, b), one(b, a)",
        "return one(a, a), one(b, b)",
    ),
    one(
        "draws depend on the pass",
        ("draws know their position",),
        f"{MADE}.base:Intervention.vectors_at",
        "uniform_noise(self.seed, p, 1",
        "uniform_noise(self.seed, positions.index(p), 1",
    ),
    one(
        "masked rows are attended to",
        ("masked rows", "rows are values"),
        f"{ROWS}:put_rows",
        "cache.hidden[row, sorted(rows.hidden)] = True",
        "pass",
    ),
    one(
        "an edit writes into the rows that it was made of",
        ("rows are values",),
        f"{ROWS}:KVSnapshot._with",
        "held[part][layer].clone()",
        "held[part][layer]",
    ),
]
