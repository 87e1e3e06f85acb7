"""Training of Thinking States models: the losses, the loop, and evaluation by the model's own thoughts."""

import json
import math
import multiprocessing
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.known import shipped_folder
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.models.thinking.store import config_hash, load_thinking, save_thinking
from cacheprobe.tasks import Annotated, CoinFlip, annotate_all, mixed, word_tokenizer
from cacheprobe.training.loop import LoopSettings, ModelLoop, one_thread, read_checkpoint
from cacheprobe.training.thinking import run as thinking_run
from cacheprobe.training.thinking.evaluate import evaluate, follows_gold
from cacheprobe.training.thinking.losses import ARMS, IGNORED, collate, losses, skipping_positions, tokens_to_write
from cacheprobe.training.thinking.presets import PRESETS, preset_of
from cacheprobe.training.thinking.recurrent import own_thoughts
from cacheprobe.training.thinking.run import load_trained, train, train_thinking
from cacheprobe_analyses.thinking import thinking_states_table as table
from cacheprobe_analyses.thinking import thoughts_are_causal as causal
from tests.thinking.test_thinking import TINY, tiny
from tests.twins.thinking_slowly import read_slowly

SMALL = dict(d_model=32, n_layers=2, n_heads=2, d_mlp=32, l_in=1, l_out=2)


def items(n: int, seed: int = 0, chunk: int = 4) -> list[Annotated]:
    """Prompts of 1 to 5 chunks with thoughts of 0 to 2 words, in TINY's vocabulary."""
    dice = random.Random(seed)
    made = []
    for _ in range(n):
        k = dice.randint(1, 5)
        prompt = tuple(dice.randrange(2, TINY["d_vocab"]) for _ in range(k * chunk))
        thoughts = tuple((*(dice.randrange(2, 19) for _ in range(dice.randint(0, 2))), 1) for _ in range(k))
        chain = tuple(dice.randrange(2, 19) for _ in range(dice.randint(1, 6)))
        made.append(Annotated(prompt, thoughts, (dice.randrange(2, 19), 1), k, chain))
    return made


@pytest.mark.parametrize("arm", ARMS)
def test_losses_are_sums_of_cross_entropies(arm: str) -> None:
    """Text by text and chunk by chunk, each thought by itself, against one pass over a padded batch."""
    thinks = arm in ("thinking", "no_feedback")
    model = tiny(thinks=thinks, feeds_back=arm != "no_feedback")
    texts = items(5)
    got = losses(model, collate(texts, arm))
    want = {"lm": 0.0, "thoughts": 0.0}
    with torch.inference_mode():
        for item in texts:
            one = collate([item], arm)
            logits, thought_logits = model(one.token_ids, one.thoughts)
            said = tokens_to_write(item, arm)
            for i, token in enumerate(said):
                want["lm"] -= float(logits[0, len(item.token_ids) - 1 + i].log_softmax(-1)[token])
            for k, thought in enumerate(item.thoughts if thinks else ()):
                for i, token in enumerate(thought):
                    want["thoughts"] -= float(thought_logits[0, k, i].log_softmax(-1)[token])
    assert math.isclose(float(got["lm"].detach()), want["lm"] / 5, rel_tol=1e-5)
    assert ("thoughts" in got) == thinks
    if thinks:
        assert math.isclose(float(got["thoughts"].detach()), want["thoughts"] / 5, rel_tol=1e-5)


def test_a_chain_of_thought_is_written_and_then_the_answer() -> None:
    item = Annotated((2, 3, 4, 5), ((9, 1), (1,)), (8, 1), 1, (6, 7))
    assert tokens_to_write(item, "chain_of_thought") == (6, 7, 8, 1) and tokens_to_write(item, "plain") == (8, 1)
    batch = collate([item], "chain_of_thought")
    assert batch.token_ids.tolist() == [[2, 3, 4, 5, 6, 7, 8]]
    assert batch.labels.tolist() == [[IGNORED] * 3 + [6, 7, 8, 1]]
    with pytest.raises(ValueError, match="annotate it with chain="):
        tokens_to_write(replace(item, chain_ids=()), "chain_of_thought")


def test_no_gradient_runs_from_chunk_to_chunk_through_thoughts() -> None:
    """A thought is discrete: a chunk's thought loss does not reach an earlier chunk's T, and its S comes from gold."""
    model = tiny()
    item = items(1, seed=3)[0]
    seen = []
    with model.hooks(fwd_hooks=[("thinking.hook_logits", lambda value, hook: seen.append(value))]):
        losses(model, collate([item], "thinking"))
    grads = torch.autograd.grad(seen[0][-1].sum(), seen[0], allow_unused=True)[0]
    assert grads[-1].any() and not grads[:-1].any()


def train_steps(folder, until: int | None) -> ModelLoop:
    model, texts = tiny(), items(40)
    loop = ModelLoop(model, LoopSettings(steps=12, batch=8, warmup=4), folder)

    def losses_of(step: int):
        dice = random.Random(step)
        return losses(model, collate([dice.choice(texts) for _ in range(8)], "thinking"))

    for _ in loop.minimise(losses_of, until):
        pass
    return loop


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path) -> None:
    torch.set_num_threads(1)
    whole = train_steps(tmp_path / "whole", None)
    train_steps(tmp_path / "broken", 7)
    again = train_steps(tmp_path / "broken", None)
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert again.step == 12 and again.cpu_seconds > 0
    with pytest.raises(ValueError, match="other settings"):
        ModelLoop(tiny(), LoopSettings(steps=13), tmp_path / "broken")


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    loop = ModelLoop(tiny(), LoopSettings(steps=3))
    with pytest.raises(FloatingPointError, match="step 0"):
        next(loop.minimise(lambda step: {"lm": torch.tensor(float("nan"), requires_grad=True)}))


def test_skipped_positions_keep_chunks_whole() -> None:
    batch = collate(items(20), "thinking")
    positions = skipping_positions(batch, 4, 500, seed=1)
    steps = positions.diff(dim=1)
    jumps = (steps != 1).nonzero()
    assert (steps >= 1).all() and len(jumps) and ((jumps[:, 1] + 1) % 4 == 0).all()
    assert torch.equal(skipping_positions(batch, 4, 0, seed=1)[0], torch.arange(positions.shape[1]))


def judged_slowly(model: ThinkingModel, item: Annotated) -> tuple[bool, bool]:
    """(answer right, thoughts right) by reading and writing one token after another."""
    prompt, written = list(item.token_ids), []
    thoughts = read_slowly(model, prompt, len(prompt)).thoughts
    for _ in range(len(item.answer_ids)):
        reading = read_slowly(model, prompt + written, len(prompt))
        written.append(int(reading.logits[-1].argmax()))
        if written[-1] == 1:
            break
    return tuple(written) == item.answer_ids, tuple(thoughts) == item.thoughts


def test_evaluation_by_own_thoughts_is_that_of_a_slow_reader() -> None:
    """A model after a few steps on few texts: right on some, wrong on others."""
    model, texts = tiny(), items(24)
    for _ in ModelLoop(model, LoopSettings(steps=60, batch=12, lr=5e-3)).minimise(
        lambda step: losses(model, collate(texts[:12], "thinking"))
    ):
        pass
    verdicts = evaluate(model, texts, "thinking")
    want = [judged_slowly(model, item) for item in texts]
    assert list(zip(verdicts.is_right, verdicts.is_thought_right, strict=True)) == want
    assert 3 < sum(verdicts.is_thought_right) < 20
    gold = follows_gold(model, texts, "thinking")
    assert all(right and thought for g, (right, thought) in zip(gold, want, strict=True) if g)
    prompts = [item.token_ids for item in texts]
    assert own_thoughts(model, prompts) == [tuple(read_slowly(model, list(p), len(p)).thoughts) for p in prompts]


def test_texts_in_other_chunks_than_the_models_are_not_evaluated() -> None:
    """They ran, and every thought was counted as wrong. Where nothing is thought, chunks are nothing but pads."""
    mixture = [*items(2), *items(3, chunk=8)]
    with pytest.raises(ValueError, match="3 of 5 texts .* the first in chunks of 8; annotate them with chunk=4"):
        evaluate(tiny(), mixture, "thinking")
    assert len(evaluate(tiny(thinks=False), mixture, "plain").is_right) == 5


def test_training_a_preset_learns_and_is_seeded() -> None:
    torch.set_num_threads(1)
    coin = preset_of("coin-flip", "tiny")
    preset = replace(coin, operations=(1, 2), pool=200, model=SMALL, loop=LoopSettings(steps=40, batch=16), arms={})
    heard = []
    a = train(preset, "thinking", 3, report=lambda at, accuracy: heard.append(at.losses))
    assert heard[-1]["lm"] < heard[0]["lm"] / 3 and heard[-1]["thoughts"] < heard[0]["thoughts"] / 1.5
    b = train(preset, "thinking", 3)
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    test = a.test((1,), 20)
    assert len(test.is_right) == 20


@pytest.mark.parametrize("task, name", [(task, name) for task, presets in PRESETS.items() for name in presets])
def test_every_preset_makes_texts_that_its_model_can_read(task: str, name: str) -> None:
    preset = preset_of(task, name)
    words = word_tokenizer(preset.vocabulary())
    for arm in ARMS:
        config = preset.config(arm, len(words))
        assert config.thinks == (arm in ("thinking", "no_feedback"))
    for variant in preset.tasks():
        texts = annotate_all(
            mixed(variant, preset.operations, n=20), words, config.chunk, preset.form, None, config.max_thought
        )
        assert len({item.num_events for item in texts}) > 1
    size = ThinkingModel(preset.config("thinking", len(words))).num_parameters
    assert size <= {"small": 66_000}.get(name, 350_000)


def test_a_training_gives_its_threads_back() -> None:
    """After an error too: the bits of a later run depend on their number."""
    torch.set_num_threads(before := 2)  # also where the tests run with one
    with pytest.raises(ValueError, match="unknown (preset|task with presets)"), one_thread():
        assert torch.get_num_threads() == 1
        preset_of("coin-flip", "enormous")
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="unknown (preset|task with presets)"):
        train_thinking("coin-flip", "enormous", "thinking", 0, Path("nowhere"), progress=False)
    assert torch.get_num_threads() == before


def test_a_training_that_was_stopped_says_when_it_was_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted before the break is counted on: it was forgotten, and the seconds came out too late or not."""
    preset = replace(preset_of("coin-flip", "tiny"), operations=(1,), pool=20, model=SMALL, arms={})
    preset = replace(preset, loop=LoopSettings(steps=210, batch=2))
    monkeypatch.setattr(thinking_run, "follows_gold", lambda model, items, arm: [True] * len(items))

    class Stop(Exception):
        pass

    def stop(at, accuracy) -> None:
        if at.step == 201:
            raise Stop

    with pytest.raises(Stop):
        train(preset, "thinking", 3, tmp_path / "broken", stop)
    before = read_checkpoint(tmp_path / "broken")[0]["notes"]
    again = train(preset, "thinking", 3, tmp_path / "broken")
    after = read_checkpoint(tmp_path / "broken")[0]["notes"]
    assert (before["good"], after["good"]) == (200 // 25, 210 // 25 + 1)
    assert again.cpu_seconds_to_99 == after["to_99"] == before["to_99"]


def test_a_thought_longer_than_the_model_may_have_is_refused() -> None:
    preset = replace(preset_of("coin-flip", "tiny"), model={**SMALL, "max_thought": 1}, pool=20)
    with pytest.raises(ValueError, match="max_thought=1"):
        train(preset, "thinking", 3)


def test_an_arm_may_be_stepped_and_jump_otherwise() -> None:
    preset = replace(PRESETS["coin-flip"]["tiny"], arms={"plain": dict(steps=7, position_jump=0)})
    settings = preset.loop_settings("plain", 3)
    assert (settings.steps, settings.seed, preset.max_position_jump("plain")) == (7, 3, 0)
    assert preset.loop_settings("thinking", 3) == replace(preset.loop, seed=3)
    assert preset.max_position_jump("thinking") == preset.position_jump


def test_processes_fill_one_table_together(tmp_path) -> None:
    """Many writers at once lose no cell, and a cell measured again takes the place of the old one."""
    path = tmp_path / "table.json"
    record = dict(command="c", parameters=1, steps=2, cpu_seconds=3.0, cpu_seconds_to_99=None)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(table._keep, [(path, f"line {i % 4}", dict(seed=i // 4), f"m{i}", record) for i in range(24)])
    table._keep(path, "line 0", dict(seed=0, right=1), "m0", record)
    held = table._read(path)
    assert {name: sorted(c["seed"] for c in cells) for name, cells in held["cells"].items()} == {
        f"line {i}": list(range(6)) for i in range(4)
    }
    assert dict(seed=0, right=1) in held["cells"]["line 0"] and len(held["models"]) == 24


def test_unknown_presets_and_arms_are_named() -> None:
    with pytest.raises(ValueError, match="coin-flip"):
        preset_of("chess", "tiny")
    with pytest.raises(ValueError, match="tiny"):
        preset_of("coin-flip", "huge")
    with pytest.raises(ValueError, match="no_feedback"):
        preset_of("coin-flip", "tiny").config("fast", 10)


# -- on disk


def saved(folder):
    task = CoinFlip(people=2)
    words = word_tokenizer(task.vocabulary())
    model = tiny(d_vocab=len(words))
    return save_thinking(folder, model, words, {"command": "cacheprobe train thinking-states"}), model


def test_a_saved_model_is_the_same_model(tmp_path) -> None:
    folder, model = saved(tmp_path / "coin")
    lm = cp.load_model(str(folder))
    assert all(torch.equal(a, b) for a, b in zip(lm.model.parameters(), model.parameters(), strict=True))
    assert lm.config == model.config and lm.encode("Alice flips.")[-1] > 2
    assert cp.load_model(str(folder), dtype="bfloat16").dtype == torch.bfloat16


def test_what_does_not_fit_together_is_refused(tmp_path) -> None:
    folder, _ = saved(tmp_path / "coin")
    held = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ModelError, match="has the hash"):
        load_thinking(folder)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_thinking(folder)
    folder, _ = saved(tmp_path / "other")
    config, remedy = held["config"], "restore it, or train the model again: cacheprobe train thinking-states"

    def refused(held: dict, message: str) -> None:
        (folder / "config.json").write_text(json.dumps(held))
        with pytest.raises(ModelError, match=rf"config\.json.*{message}.*{remedy}"):
            load_thinking(folder)

    edits = dict(chunk=8, positions="nope", eos_id=2, l_in=0, attention_window=3, feeds_back=False, max_thought=5)
    for name, value in edits.items():
        refused({**held, "config": {**config, name: value}}, "has the hash .* edited after the training")
    for name in ("config", "sha256", "record"):
        refused({key: value for key, value in held.items() if key != name}, f"has no field '{name}'")
    refused({**held, "sha256": {}}, r"has no hash of model\.safetensors")
    refused({key: value for key, value in held.items() if key != "config_sha256"}, "has no field 'config_sha256'")

    def of(config: dict) -> dict:
        return {**held, "config": config, "config_sha256": config_hash(config)}

    refused(of({"format": 1, "chunk": 4}), "without the field 'd_vocab'")
    refused(of({**config, "depth": 1}), "unknown field 'depth'")
    for change, message in (({"d_mlp": 48}, "do not fit"), ({"d_vocab": 50}, "vocabulary")):
        (folder / "config.json").write_text(json.dumps(of({**config, **change})))
        with pytest.raises(ModelError, match=message):
            load_thinking(folder)
    with pytest.raises(ModelError, match="no tokenizer or adapter"):
        cp.load_model(str(saved(tmp_path / "third")[0]), tokenizer=object())


def test_the_hash_of_a_config_is_that_of_what_it_says(tmp_path) -> None:
    """In whatever order its fields stand."""
    folder, model = saved(tmp_path / "coin")
    held = json.loads((folder / "config.json").read_text())
    turned = {**held, "config": dict(reversed(held["config"].items())), "record": {**held["record"], "seen": 1}}
    (folder / "config.json").write_text(json.dumps(turned))
    assert load_thinking(folder).config == model.config


def test_a_model_whose_record_says_nothing_of_its_training_is_no_trained_arm(tmp_path) -> None:
    folder, _ = saved(tmp_path / "coin")
    with pytest.raises(ModelError, match="coin has no 'cpu_seconds'; delete the folder, and it is trained again"):
        load_trained(folder, preset_of("coin-flip", "small"), "thinking", 0)


def test_the_shipped_coin_model_flips_the_coin() -> None:
    """Whole thoughts and answers, at lengths and flip probabilities that it was not trained on; and in the engine."""
    folder = shipped_folder("checkpoints", "coinflip-thinking")
    assert folder is not None and sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000
    lm = cp.load_model("coinflip-thinking")
    assert isinstance(lm.config, ThinkingConfig) and "train thinking-states" in lm.weights_note
    for p in (0.0, 0.5, 0.9):
        texts = CoinFlip(people=30, distinct=True, flip_probability=p).examples(n=20, seed=77)
        verdicts = evaluate(lm.model, annotate_all(texts, lm.tokenizer, 4, lm.record["form"]), "thinking")
        assert verdicts.accuracy == 1.0
    trace = cp.run(lm, texts[:2], deterministic=True, capacity=256, max_new_tokens=3, progress=False)
    assert all(trace.text(i).split()[0] == texts[i].answer.strip() for i in (0, 1))
    table = trace.thoughts()
    spoken_states = table[table.true_state.notna()]
    assert (spoken_states.text == spoken_states.true_state + " <eos>").all() and len(spoken_states) > 50


def test_the_shipped_plain_model_is_right_at_its_lengths_alone() -> None:
    """The control of the other: the same backbone and texts, no thoughts. In the engine as any other model."""
    folder = shipped_folder("checkpoints", "coinflip-plain")
    assert folder is not None and sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000
    lm = cp.load_model("coinflip-plain")
    assert not lm.config.thinks and "--arm plain" in lm.weights_note

    def accuracy(people: int) -> float:
        texts = CoinFlip(people=people, distinct=people <= 20).examples(n=60, seed=78)
        return evaluate(lm.model, annotate_all(texts, lm.tokenizer, 4, lm.record["form"]), "plain").accuracy

    assert accuracy(5) >= 0.98 and accuracy(10) >= 0.95
    assert accuracy(40) < 0.7
    texts = CoinFlip(people=4).examples(n=2, seed=9)
    trace = cp.run(lm, texts, deterministic=True, capacity=128, max_new_tokens=2, progress=False)
    assert all(trace.text(i).split()[0] == texts[i].answer.strip() for i in (0, 1)) and trace.thought_table is None


def test_swapping_a_thought_flips_the_answer() -> None:
    """The other state in place of a thought: the answer is the other. Its own state again: nothing changes."""
    result = causal.run(causal.Config(texts=16, operations=(6,)))
    assert result.flipped["other state"] == result.texts and result.flipped["own state again"] == 0
    assert "16 of 16" in result.table()
