"""LoRA: it learns, goes on to the same bits after a stop, and is evaluated by what the model itself says."""

import inspect
import json
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.adapters import TRAINING, WEIGHTS
from cacheprobe.tasks.coin_flip import NAMES, CoinFlip
from cacheprobe.tasks.drawing import HELD_OUT_NAMES, TRAIN_NAMES
from cacheprobe.training.loop import CHECKPOINT
from cacheprobe.training.lora.evaluate import LoraScore, Reply, evaluate, replies, table
from cacheprobe.training.lora.run import train_lora
from cacheprobe.training.lora.train import LoraTrainer, batches_of, encode, examples_of
from cacheprobe.training.settings import LoraSettings
from cacheprobe_benchmarks.shared.tiny import tiny_model
from tests.lora import SMALL, save_base, tokenizer, train_small, trainer
from tests.tiny import loaded


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(base, tmp_path_factory.mktemp("adapters") / "coin")


def test_names_are_split() -> None:
    assert HELD_OUT_NAMES == NAMES[3::4] and sorted(TRAIN_NAMES + HELD_OUT_NAMES) == sorted(NAMES)
    settings = LoraSettings(steps=40)
    asked = {name for step in range(40) for example in examples_of(settings, step) for name, _ in example.events}
    assert asked == set(TRAIN_NAMES)


def test_questions_grow_and_are_balanced() -> None:
    settings = LoraSettings(steps=100, curriculum=0.5, batch=32)
    most = [max(len(example.events) for example in examples_of(settings, step)) for step in range(100)]
    assert [settings.people_at(step) for step in (0, 12, 13, 25, 38, 50, 99)] == [1, 1, 2, 3, 4, 4, 4]
    assert most[0] == 1 and most[20] == 2 and most[99] == 4
    answers = [example.answer for step in range(50, 100) for example in examples_of(settings, step)]
    assert abs(answers.count(" heads") / len(answers) - 0.5) < 0.05, "1600 fair draws miss this by four deviations"
    assert examples_of(settings, 7) == examples_of(settings, 7) != examples_of(settings, 8)


def test_the_running_state_is_asked_on_the_token_that_completes_the_words() -> None:
    words = tokenizer()
    for example in CoinFlip(people=3).examples(8):
        ids, answer, running = encode(example, words)
        assert [words.decode([ids[slot]]) for slot, _ in running] == [
            "flips" if f else "flip" for _, f in example.events
        ]
        assert tuple(("heads", "tails")[state] for _, state in running) == example.states[1:]
        assert f" {('heads', 'tails')[answer]}" == example.answer


def test_pads_change_no_logits() -> None:
    """Questions of two lengths in one batch, against each alone. Reordered float32 sums: 1e-5 of logits around 10."""
    ours = trainer()
    (batch,) = batches_of(LoraSettings(**{**SMALL, "micro_batch": 4, "curriculum": 0.0}), 1, ours.tokenizer)
    lengths = batch.answer_slots + 1
    assert len(set(lengths.tolist())) > 1
    answers, _ = ours.logits(batch)
    for row, length in enumerate(lengths):
        alone = ours.model(batch.token_ids[row : row + 1, :length]).logits[0, -1]
        assert (alone - answers[row]).abs().max() < 1e-4


def test_training_lowers_the_loss_and_leaves_the_base_alone() -> None:
    ours, idle = trainer(steps=40), trainer(steps=40, learning_rate=1e-9)
    before = {name: w.clone() for name, w in ours.model.named_parameters() if name not in ours.trained}
    losses, unmoved = ([at.losses for at in training.run()] for training in (ours, idle))
    first, last = losses[0], losses[-1]
    assert last["answer_loss_nats"] < 0.5 * first["answer_loss_nats"] and last["answers_right"] >= 0.25
    assert unmoved[-1]["answer_loss_nats"] > 0.8 * unmoved[0]["answer_loss_nats"]
    assert all(torch.equal(w, before[name]) for name, w in ours.model.named_parameters() if name in before)
    assert {int(name.split("layers.")[1][0]) for name in ours.trained} == {1, 2}, "first_layer=1 of three"


def test_a_stopped_training_ends_in_the_same_file(base: Path, trained: Path, tmp_path: Path, monkeypatch) -> None:
    settings, gradients_of = LoraSettings(**SMALL, model=str(base)), LoraTrainer.gradients_of

    def stops(self, step):
        if step == 4:
            raise KeyboardInterrupt
        return gradients_of(self, step)

    monkeypatch.setattr(LoraTrainer, "gradients_of", stops)
    with pytest.raises(KeyboardInterrupt):
        train_lora(settings, tmp_path, progress=False, checkpoint_every=3)
    assert not (tmp_path / WEIGHTS).exists() and (tmp_path / CHECKPOINT).exists()
    monkeypatch.setattr(LoraTrainer, "gradients_of", gradients_of)
    done = train_lora(settings, tmp_path, progress=False, checkpoint_every=3)
    assert done["starts"] == 2 and [point["step"] for point in done["curve"]] == [3, 6]
    assert (tmp_path / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    assert train_lora(settings, tmp_path, progress=False) == done, "finished: nothing is trained again"
    with pytest.raises(ValueError, match="other settings .steps=6 there, 7 asked"):
        train_lora(LoraSettings(**{**SMALL, "steps": 7}, model=str(base)), tmp_path)


def test_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    next(ours.run(save_every=1))
    ours.loop.save()
    (tmp_path / CHECKPOINT).write_bytes((tmp_path / CHECKPOINT).read_bytes()[:-9])
    with pytest.raises(ValueError, match="no checkpoint of a training"):
        trainer(tmp_path)


def test_models_that_cannot_be_trained_are_refused() -> None:
    for family in ("gpt2", "gemma2"):
        with pytest.raises(ModelError, match="cannot be trained here.*llama-like"):
            LoraTrainer(tiny_model(family), tokenizer(), LoraSettings(**SMALL))
    with pytest.raises(ModelError, match="first_layer=3 leaves no block of 3"):
        trainer(first_layer=3)


def test_the_command_s_defaults_are_the_settings() -> None:
    from cacheprobe.cli.train import lora

    offered = {name: parameter.default for name, parameter in inspect.signature(lora).parameters.items()}
    settings = LoraSettings().as_dict()
    assert all(offered[name] == value for name, value in settings.items() if name in offered)
    assert LoraSettings().command() == "cacheprobe train lora --model smollm2-135m --task coin-flip"
    assert LoraSettings(seed=3).command().endswith("--task coin-flip --seed 3")


def test_replies_are_those_of_a_run(base: Path) -> None:
    model = cp.load_model(base)
    words = "A coin state is heads tails flips does not flip What then the".split()
    prompts = [" ".join(words[(start + 5 * i) % 13] for i in range(3 + start % 2)) for start in range(13)]
    trace = cp.run(model, prompts, capture=None, max_new_tokens=5, progress=False)
    given = replies(model, prompts, 5, batch=4)
    assert [reply.text for reply in given] == [trace.text(index) for index in range(13)]
    heads, tails = model.tokenizer.convert_tokens_to_ids(["heads", "tails"])
    with torch.no_grad():
        logits = [tiny_model()(torch.tensor([model.encode(prompt)])).logits[0, -1] for prompt in prompts]
    assert [reply.choice for reply in given] == [int(row[tails] > row[heads]) for row in logits]
    assert {reply.choice for reply in given} == {0, 1}


def test_a_reply_ends_at_a_stop_token(base: Path) -> None:
    model = cp.load_model(base)
    (whole,) = replies(model, ["A coin"], 6)
    third = model.encode(whole.text)[2]
    model.stop_token_ids = (third,)
    (cut,) = replies(model, ["A coin"], 6)
    assert whole.text.startswith(cut.text) and len(model.encode(cut.text)) <= 2


def test_an_evaluation_counts_silence_as_wrong(monkeypatch) -> None:
    given = [Reply(" heads", 0), Reply(" Tails.", 1), Reply("", 0), Reply(" nothing", 1)] * 2
    monkeypatch.setattr("cacheprobe.training.lora.evaluate.replies", lambda *_: given)
    (cell,) = evaluate(loaded(), [2], [0.1], questions=8)
    answers = [example.answer for example in CoinFlip(2, 0.1, names=HELD_OUT_NAMES).examples(8, seed=1)]
    num_right = sum(reply.text.lower().rstrip(".") == answer for reply, answer in zip(given, answers, strict=True))
    num_forced = sum((" heads", " tails")[reply.choice] == answer for reply, answer in zip(given, answers, strict=True))
    assert (cell.questions, cell.unparsed, cell.correct, cell.forced_correct) == (8, 4, num_right, num_forced)
    assert num_right != num_forced and LoraScore.from_dict(cell.as_dict()) == cell
    shown = table({"base": [cell], "adapter": [cell]})
    assert f"| {12.5 * num_right} % (" in shown and f"| {12.5 * num_forced} % (" in shown and "4 unparsed" in shown


def test_the_commands_train_and_evaluate(base: Path, tmp_path: Path, capsys) -> None:
    from cacheprobe.cli.app import app

    out, figures = tmp_path / "adapter", tmp_path / "figures.json"
    common = ["train", "lora", "--model", str(base)]
    small = ["--steps", "2", "--batch", "2", "--rank", "1", "--first-layer", "2", "--max-people", "1"]
    app([*common, "--out", str(out), *small], result_action="return_value")
    printed = capsys.readouterr()
    assert "2 steps, 4 questions" in printed.out and "of processor time" in printed.out
    assert "2 of 2 steps" in printed.err and "minutes left" in printed.err and "held-out names" in printed.err
    told = json.loads((out / TRAINING).read_text())
    assert told["command"] == (
        f"cacheprobe train lora --model {base} --task coin-flip --max-people 1 --steps 2 --batch 2 --rank 1 "
        "--first-layer 2"
    )
    asked = ["--evaluate", str(out), "--people", "2", "--flip-probability", "0.9", "--questions", "4"]
    app([*common, *asked, "--json", str(figures)], result_action="return_value")
    stored = json.loads(figures.read_text())
    assert "| 2 | 0.9 | 4 (" in capsys.readouterr().out
    assert stored["cells"]["adapter"][0]["questions"] == 4 and stored["weights_note"]["adapter"]
    assert stored["weights_sha256"]["base"] != stored["weights_sha256"]["adapter"]
