"""What a user of Thinking States models meets: lines of a demo, names and seeds of trainings, words, and settings."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.analysis.summary import thoughts_text
from cacheprobe.cli.app import app
from cacheprobe.core.registry import find
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.models.thinking.store import read_config, save_thinking
from cacheprobe.tasks import CoinFlip, Permutations
from cacheprobe.training.thinking.presets import PRESETS
from cacheprobe.training.thinking.run import TEST_SEED, VARIANT_SEEDS, train, train_thinking
from tests.command import Done, cacheprobe
from tests.tiny import hf_model
from tests.training.test_thinking_settings import quick

RUN: dict[str, Any] = dict(window=4, deterministic=[0, 1], capacity=128, progress=False)
ON: dict[str, Any] = dict(max_new_tokens=14, sampling=cp.SamplingParams(stop_token_ids=()))
"""The answer and its end are shorter than a chunk; what is written after them is thought about."""


def command(*args: str) -> Done:
    return cacheprobe(*args, COLUMNS="500")


def thinker(**settings: Any) -> ThinkingLM:
    lm = cp.load_model("coinflip-thinking", progress=False, **settings)
    assert isinstance(lm, ThinkingLM)
    return lm


# -- what is printed of thoughts


def test_a_thought_is_true_where_the_table_says_so_and_is_said_to_be_cut() -> None:
    """A thought that ran on, "heads tails heads tails ...", was called true of either state, and not cut."""
    lm = thinker()
    heads, tails = (lm.encode(word, add_special_tokens=False)[0] for word in ("heads", "tails"))
    asked = CoinFlip(people=5).examples(n=1, seed=3)

    def saying(*words: int) -> cp.Trace:
        """A run in which T says these words again and again, in every thought."""

        def said(logits: torch.Tensor, hook: object) -> torch.Tensor:
            for i in range(logits.shape[-2]):
                logits[..., i, words[i % len(words)]] = 1e4
            return logits

        with lm.model.hooks(fwd_hooks=[("thinking.hook_logits", said)] if words else []):
            return cp.run(lm, asked, deterministic=True, capacity=128, max_new_tokens=3, progress=False)

    own, cut, silent = saying(), saying(heads, tails), saying(lm.config.eos_id)
    for trace in (own, cut, silent):
        table = trace.thoughts().sort_values("end")
        *lines, answer = thoughts_text(trace, 0).splitlines()
        assert len(lines) == len(table) and answer.startswith("  answer: ")
        for line, thought in zip(lines, table.itertuples(), strict=True):
            is_known = not pd.isna(thought.true_state)
            is_true = not pd.isna(thought.agrees) and bool(thought.agrees)
            assert ("(true" in line) == is_true
            assert (f"(it is {thought.true_state}" in line) == (is_known and not is_true)
            assert ("cut at the limit)" in line) == (not thought.has_ended)
    assert not cut.thoughts().has_ended.any() and own.thoughts().has_ended.all()
    said = thoughts_text(cut, 0)
    assert "(it is heads; cut at the limit)" in said and "(true; cut at the limit)" in said
    assert "-> <eos>  (it is heads)" in thoughts_text(silent, 0) and "(true" not in thoughts_text(silent, 0)


# -- trainings


def test_the_help_lists_the_tasks_and_presets_that_there_are() -> None:
    """The list is written by hand, since PRESETS are not to be had without torch, which a help does not wait for."""
    done = command("train", "thinking-states", "--help")
    said = " ".join(done.stdout.replace("│", " ").split())
    tasks = re.search(r"--task STR (.*?) \(of ", said)
    assert tasks is not None and set(re.split(r", | or ", tasks[1])) == set(PRESETS)
    listed = {task: names.split(", ") for task, names in re.findall(r"Of ([\w-]+): ([\w, -]+)\.", said)}
    assert listed == {task: list(presets) for task, presets in PRESETS.items()}


def test_a_task_has_one_name_with_either_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS["coin-flip"], "quick", quick(1))
    record = train_thinking("coin_flip", "quick", "thinking", 0, tmp_path, progress=False)
    assert record["task"] == "coin-flip" and "--task coin-flip " in record["command"]
    assert find("tasks", "coin-flip") is find("tasks", "coin_flip") is CoinFlip


def test_a_name_of_the_other_command_is_answered_with_what_to_write() -> None:
    with pytest.raises(
        ValueError, match=r"unknown task with presets \(s3 and s5 are permutations\) 'permutations'; choose"
    ):
        train_thinking("permutations", "tiny", "thinking", 0, Path("nowhere"), progress=False)
    for task, elements in (("s3", 3), ("s5", 5)):
        assert PRESETS[task]["tiny"].task(4) == Permutations(steps=4, elements=elements)


def test_no_training_has_the_seeds_of_the_tests(tmp_path: Path) -> None:
    """--seed 1000001 was trained on the very texts that the tables test with, as were seeds just below by a variant."""
    preset = quick(1)
    highest = TEST_SEED - 1 - VARIANT_SEEDS * (len(preset.variants) - 1)
    assert len(preset.variants) == 5 and highest == 995_999
    for seed in (TEST_SEED + 1, highest + 1):
        with pytest.raises(ValueError, match=f"seed={seed} is none to train with: .* give 0 to {highest}"):
            train(preset, "thinking", seed, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    train(preset, "thinking", highest)
    train(replace(preset, variants=({},)), "thinking", TEST_SEED - 1)
    done = command("train", "thinking-states", "--seed", str(TEST_SEED + 1), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and done.stderr.startswith("error: seed=1000001 is none to train with")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


# -- a shipped model


def test_an_unknown_word_is_answered_with_the_words_of_the_model() -> None:
    lm = thinker()
    remedy = r"the word 'Zebediah' .*; use its own words, which model\.tokenizer\.get_vocab\(\) lists"
    with pytest.raises(ModelError, match=remedy):
        cp.run(lm, ["A coin's state is heads. Zebediah flips. What's the state? A:"], progress=False)
    assert "flips" in lm.tokenizer.get_vocab() and "Zebediah" not in lm.tokenizer.get_vocab()


def test_thinking_while_decoding_is_asked_of_load_model() -> None:
    asked = CoinFlip(people=5).examples(n=4, seed=3)
    lm = thinker(think_while_decoding=True)
    trace = cp.run(lm, asked, **RUN, **ON)
    table = trace.thoughts()
    assert set(table.phase) == {"prefill", "decode", "verify"}
    lengths = [request.num_prompt_tokens for request in trace.requests]
    assert all((table[table.request_id == i].end >= length).any() for i, length in enumerate(lengths))
    read = [length + len(trace.committed(i)) - 1 for i, length in enumerate(lengths)]  # the newest token was not
    kept = table[table.status == "committed"].groupby("request_id").size()
    assert kept.tolist() == [count // lm.chunk for count in read]
    for plain in (thinker(), thinker(think_while_decoding=False)):
        usual = cp.run(plain, asked, **RUN, **ON)
        assert set(usual.thoughts().phase) == {"prefill"} and usual.fingerprint != trace.fingerprint
        assert "think_while_decoding" not in usual.fingerprint


def test_a_model_that_is_stored_with_the_setting_can_be_told_otherwise(tmp_path: Path) -> None:
    """What is told after the loading is the model's own setting where it is saved again, and fits its hashes."""
    lm = thinker(think_while_decoding=True)
    folder = save_thinking(tmp_path / "on", lm.model, lm.tokenizer, lm.record)
    assert read_config(folder)["config"]["think_while_decoding"] is True
    stored, off = (cp.load_model(folder, think_while_decoding=told) for told in (None, False))
    assert isinstance(stored, ThinkingLM) and isinstance(off, ThinkingLM)
    assert stored.config == lm.config and off.config == thinker().config
    assert "think_while_decoding" not in stored.fingerprint() and off.fingerprint()["think_while_decoding"] is False


def test_what_a_model_cannot_think_of_is_refused() -> None:
    for model, message in (
        ("coinflip-plain", "coinflip-plain writes no thoughts, in no phase; leave out think_while_decoding"),
        ("no-such-model", "no-such-model is no Thinking States model, so think_while_decoding"),
        (hf_model(), "a live LlamaForCausalLM is no Thinking States model, so think_while_decoding"),
    ):
        for wanted in (True, False):
            with pytest.raises(ModelError, match=message):
                cp.load_model(model, think_while_decoding=wanted)
    with pytest.raises(ModelError, match="must be True or False, got 'yes'"):
        thinker().set_think_while_decoding("yes")
    live = thinker().model
    assert cp.load_model(live, think_while_decoding=True).config.think_while_decoding


def test_the_command_line_can_ask_for_it_and_verifies_what_it_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    asked = ("--model", "coinflip-thinking", "--dtype", "float32", "--task", "coin-flip", "--people", "5", "--n", "2")
    settings = ("--deterministic", "1", "--max-new-tokens", "12", "--capacity", "128", "--no-progress")
    app(["run", "--out", out, *asked, *settings, "--think-while-decoding"], result_action="return_value")
    trace = cp.load_trace(out)
    assert trace.fingerprint["think_while_decoding"] is True
    assert trace.meta["command"]["settings"]["think_while_decoding"] is True
    capsys.readouterr()
    assert app(["verify", out, "--no-progress"], result_action="return_value") == 0
    assert capsys.readouterr().out.startswith("equal to the oracle")
