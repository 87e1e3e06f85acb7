"""Attention crowding in training, and the analysis that tells it from distance."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from cacheprobe.models.hf.hooked import HookPoint
from cacheprobe.models.thinking.blocks import attend
from cacheprobe.training.thinking.losses import attention_crowding, collate, losses, skipping_positions
from cacheprobe.training.thinking.presets import PRESETS, preset_of
from cacheprobe.training.thinking.run import train
from cacheprobe_analyses.thinking import crowding_or_distance as crowding
from tests.thinking.test_thinking import tiny
from tests.training.test_thinking_settings import quick
from tests.training.test_thinking_training import items


def test_a_query_sees_as_many_tokens_as_its_position_says() -> None:
    """From the third chunk on; before it nothing is far. The own chunk and the one before count once."""
    batch = collate(items(20), "thinking")
    positions = skipping_positions(batch, 4, 500, seed=1)
    bias = attention_crowding(positions, 4)
    b, t = positions.shape
    assert bias.shape == (b, 1, t, t) and (positions[:, -1] >= t).any()
    counted = bias[:, 0].exp()
    for query in range(t):
        near = max(query // 4 - 1, 0) * 4
        assert (counted[:, query, near:] == 1).all()
        seen = counted[:, query, : query + 1].sum(1)
        wanted = positions[:, query] + 1 if near else torch.full((b,), query + 1)
        # float32 sums of at most a thousand, through a logarithm and back
        assert torch.allclose(seen, wanted.float(), rtol=1e-5)
    assert not attention_crowding(torch.arange(t)[None], 4).any()


def test_a_bias_of_log_n_is_a_key_that_stands_there_n_times() -> None:
    """The slow twin holds the copies."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    times = torch.tensor([1, 5, 2, 1, 40, 1])
    fast = attend(q, (k, v, times.log()[None, None, None]), HookPoint())
    copies = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
    slow = attend(q, (*copies, torch.zeros(1, 1, 1, 1)), HookPoint())
    assert torch.allclose(fast, slow, rtol=1e-5, atol=1e-6)  # reordered sums in float32


def test_a_bias_that_hides_is_a_window_and_nothing_later_is_ever_seen() -> None:
    model = tiny()
    batch = collate(items(4), "thinking")
    at = torch.arange(batch.token_ids.shape[1])
    lowest = torch.finfo(torch.float32).min
    hides = (lowest * (at[:, None] - at >= 5)).expand(len(batch.token_ids), 1, -1, -1)
    with torch.inference_mode():
        biased = model(batch.token_ids, batch.thoughts, None, hides)
        windowed = tiny(attention_window=5)
        windowed.load_state_dict(model.state_dict())
        for a, b in zip(biased, windowed(batch.token_ids, batch.thoughts), strict=True):
            assert torch.equal(a, b)
        changed = batch.token_ids.clone()
        changed[:, -1] += 1
        later = model(changed, batch.thoughts, None, torch.zeros_like(hides))[0]
        assert torch.equal(
            later[:, :-1], model(batch.token_ids, batch.thoughts, None, torch.zeros_like(hides))[0][:, :-1]
        )


def test_attention_crowding_changes_a_training_which_none_without_it_resumes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain, crowded = quick(), replace(quick(), attention_crowding=True)
    a, b = train(plain, "thinking", 0), train(crowded, "thinking", 0, tmp_path)
    assert any(not torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="holds a training with attention_crowding True, not False; give another"):
        train(plain, "thinking", 0, tmp_path)


def test_the_preset_attention_crowding_is_the_tiny_one_with_it() -> None:
    crowded, plain = preset_of("coin-flip", "attention-crowding"), preset_of("coin-flip", "tiny")
    assert replace(crowded, attention_crowding=False) == replace(plain, arms={})


def test_losses_are_those_under_the_bias() -> None:
    model, batch = tiny(), collate(items(5), "thinking")
    positions = skipping_positions(batch, 4, 500, seed=1)
    bias = attention_crowding(positions, 4)
    assert not torch.equal(
        losses(model, batch, positions)["thoughts"], losses(model, batch, positions, bias)["thoughts"]
    )
    without = losses(model, batch, positions, torch.zeros_like(bias))
    assert torch.allclose(without["thoughts"], losses(model, batch, positions)["thoughts"], rtol=1e-6)  # other kernels


# -- the analysis


def test_margins_are_positive_where_a_first_token_is_chosen_and_nowhere_else() -> None:
    """Text by text, by the largest logit."""
    trained = train(quick(40), "thinking", 0)
    texts = trained.items((2,), 30)
    judged = set()
    for text, row in zip(texts, crowding.margins(trained.model, texts), strict=True):
        one = collate([text], "thinking")
        with torch.inference_mode():
            logits = trained.model(one.token_ids, one.thoughts)[1]
        chosen = [int(logits[0, k, 0].argmax()) == thought[0] for k, thought in enumerate(text.thoughts)]
        assert chosen == (row > 0).tolist()
        judged.update(chosen)
    assert judged == {False, True}


def test_a_chunk_read_once_more_is_the_chunk_as_it_was_read() -> None:
    """Untouched; and on every way where no more tokens are there than few."""
    trained = train(quick(40), "thinking", 0)
    (text,) = trained.items((30,), 1)
    (read,) = crowding.margins(trained.model, [text])
    c, beside = trained.model.config.chunk, crowding.BESIDE
    last_few = crowding.KEPT // c + beside // c  # the last chunk before whose own two and those beside stand so many
    for chunk in (4, 9, last_few + 1, 25):
        got = crowding.reread(trained.model, text, chunk, crowding.WAYS)
        assert got["untouched"] == pytest.approx(float(read[chunk]), abs=1e-3)  # another order of sums, float32
        same = [way for way, margin in got.items() if margin == pytest.approx(got["untouched"], abs=1e-3)]
        assert (len(same) == len(crowding.WAYS)) == (chunk <= last_few + 1), (chunk, got)


def test_few_that_count_as_many_are_as_many_and_near_ones_are_not_moved_beyond_the_beside() -> None:
    for way in crowding.WAYS.values():
        seen, moved, bias = crowding._seen(way, 400)
        assert len(seen) == (400 if way.tokens == "all" else crowding.KEPT)
        assert bias.exp().sum() == pytest.approx(400 if way.tokens == "all" or way.counts_as_many else crowding.KEPT)
        back, was = 399 - (seen + moved), 399 - seen
        assert torch.equal(back, was % crowding.KEPT if way.is_near else was)
        assert (was.max() < crowding.KEPT) == (way.tokens == "newest")


def test_wrong_places_are_those_of_the_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS["coin-flip"], "quick", quick(3))
    config = crowding.Config((("quick", 0), ("quick", 1)), tmp_path, operations=12, texts=2)
    result = crowding.run(config)
    wrong = result.models["quick seed 0"]["wrong"]
    places = sum(result.kinds.values())  # those with a text before
    assert wrong > places > 0 and result.texts == 4
    assert {w["places"] for ways in result.ways.values() for w in ways.values()} == {places}
    assert result.ways["quick seed 0"]["untouched"]["wrong"] == places
    assert any("NAME" in kind and "the state before being" in kind for kind in result.kinds)
    assert crowding.Result(**json.loads(json.dumps(asdict(result)))) == result
    assert "| quick seed 1 |" in result.table() and "| quick seed 1 |" in result.ways_table()
    assert len(result.kinds_listed()) == len(result.kinds)
