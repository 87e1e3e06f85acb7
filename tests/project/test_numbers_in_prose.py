"""Numbers in sentences of the docs are those of stored results. Of tables, test_readme.py says the same."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cacheprobe_analyses.coin_state_patch import Result as Patched

ROOT = Path(__file__).parents[2]
BENCHMARKS, ANALYSES = "benchmarks/results/", "analyses/results/"
RATIOS = "{stc_ratio:.2f}, {stcz_ratio:.2f} and {stcz_half_deterministic_ratio:.2f}"


def nld_flips_of_noise(held: dict[str, Any]) -> tuple[int, int, int]:
    """Answers that noise flips: of the thinking model, of how many, and of SmolLM2."""
    thinking, real = (Patched.of(one).frame for one in held.values())
    noise = thinking[thinking.treatment == "noise"]
    return int(noise.flips.sum()), int(noise.n.sum()), int(real[real.treatment == "noise"].flips.sum())


def share(held: dict[str, Any], table: str, layer: int, **chosen: str) -> float:
    """The share, in per cent, of one line of prediction-depths.json."""
    lines = [one for one in held[table] if one["layer"] == layer and chosen.items() <= one.items()]
    assert len(lines) == 1
    return 100 * lines[0]["share"]


def gains(held: dict[str, Any]) -> list[float]:
    """Percentage points by which early exit's rejected drafts are preferred to unrelated ones, layers 20 to 28."""
    table = pd.DataFrame(held["disagreement"])
    some = table[(table.drafter == "early_exit") & table.layer.between(20, 28)]
    return [100 * x for x in (some.share - some.control)]


def shuffled(held: dict[str, Any]) -> list[float]:
    return [line["shuffled"] for one in held["found"] for line in one["lines"]]


def mean_right(held: dict[str, Any], cell: str) -> float:
    """Right answers in per cent, over seeds, of one cell of thinking-states.json or thinking-variations.json."""
    cells = held["cells"][cell]
    return 100 * sum(one["right"] for one in cells) / sum(one["texts"] for one in cells)


CLAIMS: list[tuple[Any, ...]] = [
    # page, what it says with numbers named as in the stored result, that result, and what {} stands for
    (
        "patching.md",
        "ours takes {pair[seconds_median][ours]:.1f} seconds and TransformerLens "
        "{pair[seconds_median][transformerlens]:.1f} (`speedup_over_transformerlens` {speedup_over_transformerlens}), "
        "or {speedup_where_the_first_token_differs} times as long if the prompts differ from their first token on. "
        "The numbers differ by at most {pair[largest_difference]:.1e} (`largest_difference`).",
        BENCHMARKS + "patching.json",
    ),
    (
        "patching.md",
        "(`ours_from_truth` {precision[ours_from_truth]:.1e}, "
        "`transformerlens_from_truth` {precision[transformerlens_from_truth]:.1e})",
        BENCHMARKS + "patching.json",
    ),
    (
        "benchmarks.md",
        "on the AMD processor that was measured (ratio {stc_ratio:.2f}); with Z of every generated token it takes "
        "{stcz_ratio:.2f} times",
        BENCHMARKS + "main-job.json",
    ),
    *(
        ("benchmarks.md", said + RATIOS, f"{BENCHMARKS}main-job-{name}.json")
        for name, said in (
            ("waiting", "`main-job-waiting.json` (waiting threads, torch's default) has "),
            ("intel", "`main-job-intel.json` "),
            ("amx", "`main-job-amx.json` (matrix units) "),
        )
    ),
    (
        "benchmarks.md",
        "The goals were 1.60, 1.30 and 1.50 times the roofline. Measured: {stc_over_roofline}, {stcz_over_roofline} "
        "and {stcz_half_deterministic_over_roofline}.",
        BENCHMARKS + "main-job.json",
    ),
    (
        "benchmarks.md",
        "With matrix units, S, T and C take {share_of_seconds[stc][compiled loops]:.2f} of the time in compiled loops, "
        "{share_of_seconds[stc][forward and lens, outside the loops]:.2f} elsewhere in the forward, "
        "{share_of_seconds[stc][recording]:.2f} for recording (`share_of_seconds`).",
        BENCHMARKS + "main-job-amx.json",
    ),
    (
        "results-determinism.md",
        "In {:,} compared tokens of random traffic there was no difference on an Intel processor",
        BENCHMARKS + "stress.json",
        lambda r: (r["compared_tokens"],) if r["differences"] == 0 else (),
    ),
    (
        "results-determinism.md",
        "and none in {:,} on an AMD processor",
        BENCHMARKS + "stress-amd.json",
        lambda r: (r["compared_tokens"],) if r["differences"] == 0 else (),
    ),
    (
        "results-determinism.md",
        "Deterministic requests keep {:.0f} to 100 % of the throughput in the default setting",
        BENCHMARKS + "determinism.json",
        lambda r: (100 * min(r[f"kept_at_{n}"] for n in ("2", "10", "50", "100", "10_stc", "100_stc")),),
    ),
    (
        "lora.md",
        "the likelier of heads and tails is then still the true state in {:.0f} % of the cases",
        BENCHMARKS + "lora-answer-alone.json",
        lambda r: (100 * r["curve"][-1]["states_right"],),
    ),
    (
        "lora.md",
        "The base writes neither in at least {:.0f} % of its texts",
        BENCHMARKS + "lora-flips.json",
        lambda r: (100 * min(one["unparsed"] / one["questions"] for one in r["cells"]["base"]),),
    ),
    (
        "analyses.md",
        "Noise of the same length flips {} of {} answers of the thinking model and none of SmolLM2's",
        ANALYSES + "coin-state-patch.json",
        lambda r: nld_flips_of_noise(r)[:2] if nld_flips_of_noise(r)[2] == 0 else (),
    ),
    (
        "analyses-states.md",
        "swapping only the earlier people's moves the answer by {:.3f}",
        ANALYSES + "coin-rows.json",
        lambda r: (
            (t := pd.DataFrame(r["effects"]).query("unit == 'span' and treatment == 'swapped'"))
            [t["where"] == "earlier person's words"][["total", "n"]].sum().pipe(lambda s: s.total / s.n),
        ),
    ),
    (
        "analyses-drafts.md",
        "{:.0f} % at layer 20, {:.0f} % at layer 24",
        ANALYSES + "prediction-depths.json",
        lambda r: [share(r, "final", layer, kind="later tokens") for layer in (20, 24)],
    ),
    (
        "analyses-drafts.md",
        "layer 24 does in {:.0f} %, layer 28 in {:.0f} %",
        ANALYSES + "prediction-depths.json",
        lambda r: [share(r, "disagreement", layer, drafter="early_exit") for layer in (24, 28)],
    ),
    (
        "analyses-drafts.md",
        "From layer 20 to 28 the difference is {:.0f} to {:.0f} percentage points",
        ANALYSES + "prediction-depths.json",
        lambda r: (min(gains(r)), max(gains(r))),
    ),
    (
        "analyses-drafts.md",
        "Layer 2 predicts nearly as well as layer 26 (AUROC {found[0][lines][0][auroc]:.3f} and "
        "{found[0][lines][4][auroc]:.3f})",
        ANALYSES + "rollback-prediction.json",
    ),
    (
        "analyses-drafts.md",
        "give an AUROC of {:.2f} to {:.2f}, not 0.5",
        ANALYSES + "rollback-prediction.json",
        lambda r: (min(shuffled(r)), max(shuffled(r))),
    ),
    (
        "analyses-drafts.md",
        "had no rollback in {} candidates in bfloat16",
        ANALYSES + "rollback-prediction.json",
        lambda r: (r["found"][-1]["drafts"],) if r["found"][-1]["rollbacks"] == 0 else (),
    ),
    (
        "analyses-states.md",
        "names a wrong state in {} of {} texts, and {} of these have the right parity",
        ANALYSES + "s3-algorithm.json",
        lambda r: next(
            (one["wrong"], one["texts"], one["parity_right_of_wrong"]) for one in r["lengths"]
            if one["operations"] == 8 and one["model"].startswith("plain, 4 layers, 8")
        ),
    ),
    (
        "thinking-states.md",
        "changes the answer in {flipped[other state]} of {texts} texts. Putting the same state in again changes it in "
        "{flipped[own state again]}, noise of the same norm in {flipped[noise of its norm]}, and no state in "
        "{flipped[no state]}.",
        ANALYSES + "thoughts-are-causal.json",
    ),
    (
        "thinking-states.md",
        "on {:.2f} % of those of 20",
        ANALYSES + "thinking-states.json",
        lambda r: (mean_right(r, "coin-flip tiny no_feedback: 20 operations"),),
    ),
    (
        "thinking-states.md",
        "{:.2f} % of texts of 20 operations and {:.2f} % of texts of 10 to 100 are right",
        ANALYSES + "thinking-states.json",
        lambda r: [mean_right(r, f"coin-flip paper thinking: {n} operations") for n in ("20", "[10, 100]")],
    ),
    (
        "thinking-states.md",
        "they still fall to {:.0f} to {:.0f} % at 20 operations",
        ANALYSES + "thinking-states.json",
        lambda r: sorted(
            mean_right(r, f"coin-flip position-jumps {arm}: 20 operations") for arm in ("plain", "chain_of_thought")
        ),
    ),
    (
        "thinking-states.md",
        "With only the own chunk, {right[attention to the own chunk]} do",
        ANALYSES + "state-or-attention.json",
    ),
    (
        "thinking-states.md",
        "**Without states**, {right[no states]} of {texts} answers are right",
        ANALYSES + "state-or-attention.json",
    ),
    (
        "thinking-states.md",
        "Back-propagation through time takes up to {:.1f} times as long with 16 chunks",
        ANALYSES + "training-cost.json",
        lambda r: (max(one["ratios"]["through time"] for one in r["lines"] if one["chunks"] == 16),),
    ),
    (
        "thinking-states.md",
        "One change is remembered over {} chunks",
        ANALYSES + "thought-gap.json",
        lambda r: (max(r["chunks"]["1 of 128"]),) if r["right"]["delta"]["1 of 128"] == r["texts"] else (),
    ),
    (
        "thinking-states.md",
        "its loss on new texts is {gold:.2f} nats with them and {opposite:.2f} with those of the other coin",
        ANALYSES + "pretrained-learns.json",
    ),
]  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS, ids=[f"{page}-{said[:30]}" for page, said, *_ in CLAIMS])
def test_the_numbers_of_a_sentence_are_stored(claim: tuple[Any, ...]) -> None:
    page, said, result, *computed = claim
    stored = json.loads((ROOT / result).read_text(encoding="utf-8"))
    numbers = [number for compute in computed for number in compute(stored)]
    expected = re.sub(r"e-0(\d)", r"e-\1", said.format(*numbers, **stored))
    assert expected in " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def test_the_short_table_of_thinking_states_is_that_of_the_results() -> None:
    """Each "here" is the cell for 10 to 100 operations of one line of the table that a script writes."""
    page, appendix = ((ROOT / "docs" / name).read_text() for name in ("thinking-states.md", "tables/thinking-main.txt"))
    lines = [line.split(" | ") for line in appendix.splitlines() if line.startswith(("| coin-flip |", "| variables |"))]
    stored = {tuple(cell.strip("|` ") for cell in line[:3]): (line[3].strip(), line[6].strip()) for line in lines}
    shown = re.findall(r"^\| (coin flip|variables) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(shown) == 6
    for task, arm, here, paper in shown:
        arm = {"answer alone": "no chain of thought"}.get(arm, arm)
        preset = "attention-crowding" if arm == "Thinking States" else "tiny"
        assert stored[task.replace(" ", "-"), arm, preset] == (paper, here)
