"""The analyses of Thinking States: what they time is what they say, and what they leave out is left out."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

import cacheprobe as cp
from cacheprobe.tasks import annotate_all, mixed
from cacheprobe.training.loop import LoopSettings
from cacheprobe.training.thinking.evaluate import evaluate
from cacheprobe.training.thinking.losses import collate, losses
from cacheprobe.training.thinking.presets import PRESETS, preset_of
from cacheprobe.training.thinking.run import TEST_SEED, train_thinking
from cacheprobe_analyses.thinking import every_length as lengths
from cacheprobe_analyses.thinking import state_or_attention as routes
from cacheprobe_analyses.thinking import thinking_variations as variations
from cacheprobe_analyses.thinking import training_cost as cost
from cacheprobe_analyses.thinking.thinking_states_table import trained_arm
from tests.thinking.test_thinking import tiny
from tests.training.test_thinking_training import SMALL, items

QUICK = cost.Config(chunks=(1, 4), batches=(2,), text_tokens=16, thought_tokens=8, repeats=2, d_vocab=19)


@pytest.mark.parametrize("changes", [{}, dict(positions="alibi", attention_window=6)])
def test_with_gold_thoughts_the_step_through_time_is_the_parallel_one(changes: dict) -> None:
    """Texts of one to five chunks, thoughts of none to two words: the same losses and the same gradients."""
    model = tiny(**changes)
    batch = collate(items(6), "thinking")
    found = []
    for step in (losses, lambda m, b: cost.losses_through_time(m, b, is_soft=False)):
        model.zero_grad(set_to_none=True)
        parts = step(model, batch)
        sum(parts.values()).backward()
        found.append((parts, {name: weight.grad for name, weight in model.named_parameters()}))
    (parallel, slopes), (through_time, again) = found
    assert all(math.isclose(parallel[part].item(), through_time[part].item(), rel_tol=1e-4) for part in parallel)
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, again[name], rtol=1e-3, atol=1e-3, msg=name)


def thoughts_slopes(is_soft: bool) -> torch.Tensor:
    """Which chunks' T the last chunk's thought reaches, [k]."""
    model, batch = tiny(), collate([next(item for item in items(20) if len(item.thoughts) == 5)], "thinking")
    seen: list[torch.Tensor] = []
    with model.hooks(fwd_hooks=[("thinking.hook_logits", lambda value, hook: seen.append(value))]):
        cost.losses_through_time(model, batch, is_soft)
    slopes = torch.autograd.grad(seen[-1].pow(2).sum(), seen, allow_unused=True)
    return torch.tensor([slope is not None and bool(slope.abs().max() > 0) for slope in slopes])


def test_gradients_run_through_time_by_way_of_soft_thoughts_alone() -> None:
    assert thoughts_slopes(is_soft=True).tolist() == [True] * 5
    assert thoughts_slopes(is_soft=False).tolist() == [False] * 4 + [True]


def test_cost_compares_the_same_number_of_tokens() -> None:
    for chunks in (1, 2, 4):
        _, batch = cost.drawn(QUICK, 3, chunks)
        assert batch.token_ids.shape == (3, 17) and batch.thoughts.numel() == 3 * 8
        assert len(batch.thoughts.flatten(0, 1).unique(dim=0)) > 1
    result = cost.run(QUICK)
    shapes = [(line.chunks, line.chunk_tokens, line.tokens_of_a_thought) for line in result.lines]
    assert shapes == [(1, 16, 8), (4, 4, 2)]
    assert result.lines[0].ratios["parallel"] == 1.0 and all(min(line.seconds.values()) > 0 for line in result.lines)
    assert [line.blocks_in_a_row for line in result.lines] == [
        {"parallel": 4, "through time": 8},
        {"parallel": 4, "through time": 20},
    ]
    held = json.loads(json.dumps(asdict(result)))
    assert cost.Result.of(held).table() == result.table() and "| 2 | 4 | 4 | 2 |" in result.table()
    with pytest.raises(ValueError, match="into 3 equal chunks"):
        replace(QUICK, chunks=(3,))


@pytest.mark.slow
def test_a_smaller_coin_model_is_trained_anew_to_the_accuracy_of_the_shipped_one(tmp_path, monkeypatch) -> None:
    """By own thoughts on fresh texts of all trained lengths and flip probabilities; saved, and loaded again."""
    small = preset_of("coin-flip", "small")
    quick = replace(small, pool=6_000, loop=replace(small.loop, steps=180, lr=4e-3, warmup=20))
    monkeypatch.setitem(PRESETS["coin-flip"], "quick", quick)
    train_thinking("coin-flip", "quick", "thinking", 0, tmp_path / "coin", progress=False)
    again, shipped = cp.load_model(str(tmp_path / "coin")), cp.load_model("coinflip-thinking")
    assert again.model.num_parameters < shipped.model.num_parameters / 4
    for lm in (again, shipped):
        texts = [text for task in quick.tasks() for text in mixed(task, quick.operations, n=40, seed=TEST_SEED + 5)]
        items = annotate_all(texts, lm.tokenizer, lm.config.chunk, lm.record["form"])
        assert evaluate(lm.model, items, "thinking").accuracy >= 0.99


def small(name: str = "base") -> variations.Variation:
    """A variation that is trained in a second, and learns nothing much."""
    variation = next(v for v in variations.variations() if v.name == name)
    preset = replace(variation.preset, operations=(1, 2), pool=60, model=SMALL, loop=LoopSettings(steps=4, batch=8))
    return replace(variation, preset=preset, tests=variation.tests[:1], num_seeds=1)


def test_variations_go_on_where_they_were(tmp_path) -> None:
    config = variations.Config((small(),), tmp_path / "models", texts=6, results=tmp_path / "cells.json")
    heard: list[str] = []
    first = variations.run(config, heard.append)
    (cell,) = first.cells["base"]["10 operations, p 0.1"]
    assert cell["texts"] == 6 and sum(texts for texts, _ in cell["by_gap"].values()) == 6 and len(heard) == 1
    assert sum(right for _, right in cell["by_gap"].values()) == cell["right"]
    held = json.loads(config.results.read_text())
    assert held == {"cells": first.cells, "models": first.models} and first.models["base"][0]["steps"] == 4
    assert variations.run(config, heard.append) == first and len(heard) == 1
    both = replace(config, variations=(small(), small("two coins, thoughts of asked")))
    assert set(variations.run(both, heard.append).cells) == {"base", "two coins, thoughts of asked"} and len(heard) == 2
    assert "| base | 1 |" in first.table() and "| base |" not in first.gaps() and first.others() == []
    more = variations.run(replace(config, variations=(replace(small(), num_seeds=2),)), heard.append)
    assert [c["seed"] for c in more.cells["base"]["10 operations, p 0.1"]] == [0, 1] and len(heard) == 3
    assert more.cells["base"]["10 operations, p 0.1"][0] == cell and "| base | 2 |" in more.table()


def test_several_seeds_are_told_by_their_mean_and_the_worst() -> None:
    counts = [
        dict(seed=seed, texts=200, right=right, thoughts_right=right - 30) for seed, right in enumerate((200, 150, 190))
    ]
    cells = [{**count, "by_gap": {"1 to 16": [100, 90], "65 or more": [100, count["right"] - 90]}} for count in counts]
    models = [
        dict(steps=300, cpu_seconds=s, cpu_seconds_to_99=to) for s, to in ((40.0, 20.0), (41.0, None), (42.0, 30.0))
    ]
    result = variations.Result({"base": {variations.GAP_TEST: cells, "of its own": cells}}, {"base": models})
    line = result.gaps().splitlines()[2]
    assert line == "| base | 90.0 of 300 |  |  | 90.0 of 300 |"
    (told,) = result.others()
    assert told.startswith("base, of its own: 90.0 % of 600 texts (95 % 87.3 to 92.2; seeds 100.0, 75.0, 95.0 %); ")
    assert told.endswith("; all thoughts right in 75.0 %")
    result = variations.Result({"base": {test.name: cells for test in variations.coin_tests()}}, {"base": models})
    told = " | ".join(["90.0 (75.0)"] * 6)
    assert result.table().splitlines()[2] == f"| base | 3 | {told} | 300 | 41 | not reached |"


def test_each_variation_changes_one_thing_and_is_tested_alike() -> None:
    tried = variations.variations()
    names = [v.name for v in tried]
    assert len(set(names)) == len(names)
    base, *others = [v for v in tried if v.preset.task is tried[0].preset.task and v.arm == "thinking"]
    for other in others:
        fields = ("form", "position_jump", "variants", "model")
        changed = [f for f in fields if getattr(other.preset, f) != getattr(base.preset, f)]
        assert len(changed) == 1, other.name
        assert other.preset.loop == base.preset.loop and other.tests[:6] == base.tests[:6]
    loops = [v for v in tried if v.name.startswith("S5")]
    assert sorted(v.preset.model["l_out"] - v.preset.model["l_in"] for v in loops) == [1, 2, 3, 4]
    assert all(v.preset.loop == loops[0].preset.loop and v.tests == loops[0].tests for v in loops)
    tuned, coin = [v for v in tried if v.arm != "thinking"], preset_of("coin-flip", "tiny")
    for v in tuned:
        assert v.preset.loop_settings(v.arm, 0) == replace(coin.loop_settings(v.arm, 0), lr=float(v.name.split()[-1]))
        assert replace(v.preset, arms={}) == replace(coin, arms={}) and v.preset.max_position_jump(v.arm) == 0
        assert v.tests == variations.coin_tests()
    assert len({(v.arm, v.name) for v in tuned}) == 4
    coins = [v for v in tried if v.name.startswith("two coins")]
    assert all(replace(v.preset.loop, batch=128) == coins[0].preset.loop and v.tests == coins[0].tests for v in coins)


def test_gaps_are_of_chunks_without_a_change() -> None:
    assert variations._bucket([(5, 1)] * 16 + [(6, 1)] * 3) == (1, 16)
    assert variations._bucket([(5, 1)] * 3 + [(6, 1)] * 33 + [(5, 1)]) == (33, 64)


def test_the_coin_is_carried_by_states_and_read_from_a_chunk_and_its_neighbour() -> None:
    result = routes.run(routes.Config(texts=16, operations=6))
    near, alone = (f"attention to the own chunk{more}" for more in (" and the one before", ""))
    assert result.right["untouched"] == result.right[near] == result.thoughts_right[near] == 16
    assert result.right["no states"] < 16 and result.thoughts_right[f"{near}, no states"] == 0
    assert result.thoughts_right[alone] < 16
    assert "untouched: 16 of 16 answers right at 6 operations" in result.table()
    (bars,) = result.figure().data
    assert list(bars.x) == list(routes.WAYS) and bars.y[0] == 1 and "16 right, 16 examples" in bars.customdata[0]


def test_ways_of_a_model_at_chance_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = cp.probes.untrained(cp.load_model("coinflip-thinking"))
    bare.record = cp.load_model("coinflip-thinking").record
    monkeypatch.setattr(cp, "load_model", lambda *args, **settings: bare)
    with pytest.raises(ValueError, match=r"answers \d+ of 8 questions rightly untouched, no more than chance"):
        routes.run(routes.Config(texts=8, operations=2))


def test_attention_reaches_no_farther_than_it_is_let() -> None:
    """The pattern that is left: the own chunk and `before` others, each row a whole."""
    model, seen = tiny(), []
    point = model.blocks[-1].attn.hook_pattern.name
    ids = torch.randint(2, 19, (2, 12), generator=torch.Generator().manual_seed(0))
    for before in (0, 1):
        with routes._reaching(model, before), model.hooks(fwd_hooks=[(point, lambda p, hook: seen.append(p))]):
            model(ids, torch.ones(2, 3, 1, dtype=torch.long))
        pattern = seen.pop().detach()
        chunks = torch.arange(12) // 4
        reached = (pattern > 0).any(0).any(0)
        causal = torch.ones(12, 12, dtype=torch.bool).tril()
        assert torch.equal(reached, causal & (chunks[:, None] - chunks <= before))
        torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 2, 12))


def test_every_length_is_tested_by_itself_and_once(tmp_path, monkeypatch) -> None:
    coin = preset_of("coin-flip", "tiny")
    quick = replace(coin, operations=(1, 2), pool=60, model=SMALL, loop=LoopSettings(steps=4, batch=8))
    monkeypatch.setitem(PRESETS["coin-flip"], "quick", quick)
    config = lengths.Config(("quick",), (0,), (3, 4), (0.5,), 6, tmp_path / "models", tmp_path / "cells.json")
    (cell,) = lengths.run(config).cells
    trained, _ = trained_arm(config.folder, "coin-flip", "quick", "thinking", 0)
    for operations in config.operations:  # a model that has learnt nothing is wrong somewhere
        verdicts = trained.test((operations,), 6, lengths.TEXTS_SEED, flip_probability=0.5)
        assert cell.wrong.get(str(operations), 0) == 6 - sum(verdicts.is_right)
    assert cell.wrong and cell.operations == (3, 4)
    monkeypatch.setattr(lengths, "trained_arm", None)  # what is known is not asked again
    assert lengths.run(config).cells == [cell]
    with pytest.raises(ValueError, match="every number from the first to the last"):
        lengths.run(replace(config, operations=(3, 5)))


def test_a_line_of_lengths_names_its_worst_seed_and_length() -> None:
    cells = [
        lengths.Cell("attention-crowding", 0.5, 0, (10, 100), 200, {"64": 2, "99": 5}),
        lengths.Cell("attention-crowding", 0.5, 1, (10, 100), 200, {}),
    ]
    assert lengths.Result(cells).table().splitlines()[2] == (
        "| attention-crowding | 0.5 | [10, 100] | 2 | 36,400 | 7 | 99.981 | 99.960 to 99.991 | 99.962 | 97.5 |"
    )
