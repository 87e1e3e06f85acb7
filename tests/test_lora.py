"""LoRA: it learns, goes on to the same bits, merges to what peft computes, and what does not fit is refused."""

import copy
import inspect
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.models.adapters import CONFIG, TRAINING, WEIGHTS, merge_adapter
from cacheprobe.models.base import ModelError
from cacheprobe.models.tiny import VOCAB, tiny_model
from cacheprobe.tasks.coin_flip import NAMES, CoinFlip
from cacheprobe.training.lora import LoraTrainer
from cacheprobe.training.lora_batches import batches_of, encode, examples_of
from cacheprobe.training.lora_checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from cacheprobe.training.lora_evaluate import Cell, Reply, evaluate, replies
from cacheprobe.training.lora_report import table
from cacheprobe.training.lora_run import LARGEST_ADAPTER, train_lora
from cacheprobe.training.lora_settings import HELD_OUT_NAMES, TRAIN_NAMES, LoraSettings
from tests.tiny import loaded

SMALL = dict(steps=6, batch=4, micro_batch=2, max_people=2, rank=2, first_layer=1, learning_rate=0.05, warmup_steps=1)


def tokenizer() -> PreTrainedTokenizerFast:
    """Every word of the task's questions is a token; some names too, the other names are unknown."""
    words = "<unk> A coin 's state is heads tails . , then flips does not flip What the ? :".split()
    words += [name for name in NAMES if name not in words][: VOCAB - len(words)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("'s|[.,?:]"), "isolated")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def trainer(**changes) -> LoraTrainer:
    return LoraTrainer(tiny_model(), tokenizer(), LoraSettings(**{**SMALL, **changes}))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapters") / "coin"
    train_lora(LoraSettings(**SMALL, model=str(base)), out, progress=False, checkpoint_every=3)
    return out


def edited(adapter: Path, target: Path, **config) -> Path:
    """A copy with other settings, and without training.json, as peft would leave it."""
    target.mkdir()
    (target / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes())
    stored = json.loads((adapter / CONFIG).read_text()) | config
    (target / CONFIG).write_text(json.dumps(stored))
    return target


def test_names_are_split() -> None:
    assert HELD_OUT_NAMES == NAMES[3::4] and set(HELD_OUT_NAMES) | set(TRAIN_NAMES) == set(NAMES)
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
    losses = [ours.run_step() for _ in range(40)]
    unmoved = [idle.run_step() for _ in range(40)]
    first, last = losses[0], losses[-1]
    assert last["answer_loss_nats"] < 0.5 * first["answer_loss_nats"] and last["answers_right"] >= 0.25
    assert unmoved[-1]["answer_loss_nats"] > 0.8 * unmoved[0]["answer_loss_nats"]
    assert all(torch.equal(w, before[name]) for name, w in ours.model.named_parameters() if name in before)
    assert {int(name.split("layers.")[1][0]) for name in ours.trained} == {1, 2}, "first_layer=1 of three"


def test_resuming_is_the_same_bits(tmp_path: Path) -> None:
    whole = trainer()
    for _ in range(6):
        whole.run_step()
    first = trainer()
    for _ in range(3):
        first.run_step()
    save_checkpoint(first, tmp_path, {"curve": [1]})
    second = trainer()
    assert load_checkpoint(second, tmp_path) == {"curve": [1]} and second.step == 3
    for _ in range(3):
        second.run_step()
    assert all(torch.equal(second.trained[name], weight) for name, weight in whole.trained.items())
    forgetful = trainer()
    load_checkpoint(forgetful, tmp_path)
    forgetful.optimizer.state.clear()
    for _ in range(3):
        forgetful.run_step()
    assert not all(torch.equal(forgetful.trained[name], weight) for name, weight in whole.trained.items())


def test_a_stopped_training_ends_in_the_same_file(base: Path, trained: Path, tmp_path: Path, monkeypatch) -> None:
    settings, step = LoraSettings(**SMALL, model=str(base)), LoraTrainer.run_step

    def stops(self):
        if self.step == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LoraTrainer, "run_step", stops)
    with pytest.raises(KeyboardInterrupt):
        train_lora(settings, tmp_path, progress=False, checkpoint_every=3)
    assert not (tmp_path / WEIGHTS).exists() and (tmp_path / CHECKPOINT).exists()
    monkeypatch.setattr(LoraTrainer, "run_step", step)
    done = train_lora(settings, tmp_path, progress=False, checkpoint_every=3)
    assert done["starts"] == 2 and [point["step"] for point in done["curve"]] == [3, 6]
    assert (tmp_path / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    assert train_lora(settings, tmp_path, progress=False) == done, "finished: nothing is trained again"
    with pytest.raises(ValueError, match="other settings .steps=6 there, 7 asked"):
        train_lora(LoraSettings(**{**SMALL, "steps": 7}, model=str(base)), tmp_path)


def test_a_checkpoint_of_other_settings_or_half_a_file_is_refused(tmp_path: Path) -> None:
    ours = trainer()
    ours.run_step()
    save_checkpoint(ours, tmp_path, {})
    with pytest.raises(ValueError, match="other settings .seed=0 there, 1 asked"):
        load_checkpoint(trainer(seed=1), tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((tmp_path / CHECKPOINT).read_bytes()[:-9])
    with pytest.raises(ValueError, match="no checkpoint of a training"):
        load_checkpoint(trainer(), tmp_path)


def test_merged_is_what_peft_computes(base: Path, trained: Path) -> None:
    """peft adds the two small products to each layer's output, we add their product to the weights: float32 sums in
    another order, 1e-6 of the largest logit apart, times the depth."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    ours = cp.load_model(base, adapter=trained)
    theirs = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), trained).eval()
    plain = LlamaForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        merged, unmerged, without = (model(ids).logits for model in (ours.bridge.original_model, theirs, plain))
    largest = unmerged.abs().max()
    assert (merged - unmerged).abs().max() < 1e-5 * largest < (merged - without).abs().max()
    assert ours.weights_note == "LoRA adapter coin of rank 2 merged in"
    assert ours.weights_sha256 != cp.load_model(base).weights_sha256


def test_another_dtype_is_rounded_after_the_merge(base: Path, trained: Path) -> None:
    exact = dict(cp.load_model(base, adapter=trained).bridge.original_model.named_parameters())
    rounded = cp.load_model(base, adapter=trained, dtype="bfloat16").bridge.original_model
    assert all(torch.equal(weight, exact[name].bfloat16()) for name, weight in rounded.named_parameters())


def test_a_stored_run_names_its_adapter(base: Path, trained: Path, tmp_path: Path, capsys) -> None:
    from cacheprobe.cli import app

    run = ["run", "--out", str(tmp_path / "run"), "--model", str(base), "--adapter", str(trained), "--dtype", "float32"]
    app([*run, "--prompt", "A coin", "--deterministic", "1", "--max-new-tokens", "3"], result_action="return_value")
    assert cp.load_trace(tmp_path / "run").meta["weights_note"] == "LoRA adapter coin of rank 2 merged in"
    assert app(["verify", str(tmp_path / "run")], result_action="return_value") == 0
    assert "equal to the oracle" in capsys.readouterr().out


def test_an_adapter_of_another_model_is_refused_by_name(base: Path, trained: Path, tmp_path: Path) -> None:
    tiny_model(seed=9).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=rf"was trained on {base} \(weights \w+\), not on {tmp_path / 'other'}"):
        cp.load_model(tmp_path / "other", adapter=trained)
    with pytest.raises(ModelError, match="was trained on tiny-gpt, not on"):
        cp.load_model(base, adapter=edited(trained, tmp_path / "named", base_model_name_or_path="tiny-gpt"))
    assert cp.load_model(base, adapter=edited(trained, tmp_path / "right", base_model_name_or_path="x/tiny-llama"))
    wider = edited(trained, tmp_path / "wider")
    tensors = load_file(wider / WEIGHTS)
    key = next(key for key in tensors if key.endswith("q_proj.lora_A.weight"))
    save_file({**tensors, key: torch.zeros(2, 33)}, wider / WEIGHTS)
    with pytest.raises(ModelError, match=r"q_proj has matrices \(2, 33\).*belongs to another model"):
        cp.load_model(base, adapter=wider)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(r=3), "at rank 3; the adapter belongs to another model"),
        (dict(r=0), "rank 0 and lora_alpha 16 are not"),
        (dict(use_dora=True), "sets use_dora=True.*merge it with peft"),
        (dict(rank_pattern={"q_proj": 4}), "sets rank_pattern"),
        (dict(bias="all"), "sets bias='all'"),
        (dict(something_new=1), "sets something_new=1"),
        (dict(peft_type="IA3"), "is a IA3 adapter; only LORA"),
    ],
)
def test_other_kinds_of_adapters_are_refused(base: Path, trained: Path, tmp_path: Path, config, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cp.load_model(base, adapter=edited(trained, tmp_path / "edited", **config))


def test_a_refused_adapter_changes_nothing(trained: Path, tmp_path: Path) -> None:
    """The second matrix pair does not fit; the first is not added before that is seen."""
    adapter = edited(trained, tmp_path / "half")
    tensors = load_file(adapter / WEIGHTS)
    last = sorted(key for key in tensors if key.endswith("lora_B.weight"))[-1]
    save_file({**tensors, last: torch.zeros(5, 2)}, adapter / WEIGHTS)
    live, before = tiny_model(), copy.deepcopy(tiny_model().state_dict())
    with pytest.raises(ModelError, match="belongs to another model"):
        merge_adapter(live, "tiny-llama", adapter)
    assert all(torch.equal(weight, before[name]) for name, weight in live.state_dict().items())


def test_no_pickle_is_read(base: Path, trained: Path, tmp_path: Path) -> None:
    adapter = edited(trained, tmp_path / "pickled")
    torch.save(load_file(adapter / WEIGHTS), adapter / "adapter_model.bin")
    (adapter / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="adapter_model.bin is a pickle, which is never read"):
        cp.load_model(base, adapter=adapter)


def test_a_changed_file_is_refused(base: Path, trained: Path, tmp_path: Path) -> None:
    adapter = edited(trained, tmp_path / "changed")
    (adapter / TRAINING).write_bytes((trained / TRAINING).read_bytes())
    assert cp.load_model(base, adapter=adapter)
    save_file({key: 2 * value for key, value in load_file(adapter / WEIGHTS).items()}, adapter / WEIGHTS)
    with pytest.raises(ModelError, match=r"is not the file that training.json speaks of"):
        cp.load_model(base, adapter=adapter)


def test_unknown_adapters(base: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown adapter 'poker' for .*cacheprobe train lora") as caught:
        cp.load_model(base, adapter="poker")
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="not into a live LlamaForCausalLM"):
        cp.load_model(tiny_model(), adapter="coin-flip")


def test_an_adapter_is_small(base: Path, tmp_path: Path, trained: Path, monkeypatch) -> None:
    assert LARGEST_ADAPTER == 5_000_000
    monkeypatch.setattr("cacheprobe.training.lora_run.LARGEST_ADAPTER", (trained / WEIGHTS).stat().st_size // 4)
    with pytest.raises(ValueError, match="bytes.*lower rank, or raise first_layer"):
        train_lora(LoraSettings(**SMALL, model=str(base)), tmp_path, progress=False)
    assert not list(tmp_path.iterdir()), "seen before anything is trained"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(task="poker"), "no training for the task 'poker'; there is one for coin-flip"),
        (dict(steps=0), "steps must be more than 0"),
        (dict(rank=True), "rank must be a whole number"),
        (dict(learning_rate=float("nan")), "learning_rate must be a number"),
        (dict(max_people=23), "max_people=23 is more than the 22 names"),
        (dict(curriculum=1.5), "curriculum is a share"),
    ],
)
def test_settings_are_checked(changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSettings(**changes)


def test_models_that_cannot_be_trained_are_refused() -> None:
    for family in ("gpt2", "gemma2"):
        with pytest.raises(ModelError, match="cannot be trained here.*llama-like"):
            LoraTrainer(tiny_model(family), tokenizer(), LoraSettings(**SMALL))
    with pytest.raises(ModelError, match="first_layer=3 leaves no block of 3"):
        trainer(first_layer=3)


def test_the_command_s_defaults_are_the_settings() -> None:
    from cacheprobe.cli_train import lora

    offered = {name: parameter.default for name, parameter in inspect.signature(lora).parameters.items()}
    settings = LoraSettings().as_dict()
    assert all(offered[name] == value for name, value in settings.items() if name in offered)
    assert LoraSettings().command() == "cacheprobe train lora --model smollm2-135m --task coin-flip"
    assert LoraSettings(seed=3).command().endswith("--task coin-flip --seed 3")


def test_replies_are_those_of_a_run(base: Path) -> None:
    model = cp.load_model(base)
    examples = [example for people in (2, 1, 2) for example in CoinFlip(people=people).examples(3)]
    trace = cp.run(model, examples, capture=None, max_new_tokens=5, progress=False)
    given = replies(model, [example.prompt for example in examples], 5, batch=2)
    assert [reply.text for reply in given] == [trace.text(index) for index in range(9)]
    assert len({reply.text for reply in given}) > 1
    for example, reply in zip(examples, given, strict=True):
        ids = torch.tensor([model.encode(example.prompt)])
        with torch.no_grad():
            heads, tails = tiny_model()(ids).logits[0, -1, list(example.answer_token_ids(model.tokenizer))]
        assert reply.choice == int(tails > heads)


def test_a_reply_ends_at_a_stop_token(base: Path) -> None:
    model = cp.load_model(base)
    (whole,) = replies(model, ["A coin"], 6)
    third = model.encode(whole.text)[2]
    model.stop_token_ids = (third,)
    (cut,) = replies(model, ["A coin"], 6)
    assert whole.text.startswith(cut.text) and len(model.encode(cut.text)) <= 2


def test_an_evaluation_counts_silence_as_wrong(monkeypatch) -> None:
    given = [Reply(" heads", 0), Reply(" Tails.", 1), Reply("", 0), Reply(" nothing", 1)] * 2
    monkeypatch.setattr("cacheprobe.training.lora_evaluate.replies", lambda *_: given)
    (cell,) = evaluate(loaded(), [2], [0.1], questions=8)
    answers = [example.answer for example in CoinFlip(2, 0.1, names=HELD_OUT_NAMES).examples(8, seed=1)]
    num_right = sum(reply.text.lower().rstrip(".") == answer for reply, answer in zip(given, answers, strict=True))
    num_forced = sum((" heads", " tails")[reply.choice] == answer for reply, answer in zip(given, answers, strict=True))
    assert (cell.questions, cell.unparsed, cell.correct, cell.forced_correct) == (8, 4, num_right, num_forced)
    assert num_right != num_forced and Cell.from_dict(cell.as_dict()) == cell
    shown = table({"base": [cell], "adapter": [cell]})
    assert f"| {12.5 * num_right} % (" in shown and f"| {12.5 * num_forced} % (" in shown and "4 unparsed" in shown
