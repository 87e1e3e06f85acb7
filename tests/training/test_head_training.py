"""EAGLE-3 heads and MTP modules that were trained on a trace draft better than untrained ones, and are read again."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.cli.flags import attribute_docs
from cacheprobe.cli.train import eagle3 as eagle3_command
from cacheprobe.cli.train import mtp as mtp_command
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.eagle3_files import load_eagle3
from cacheprobe.models.heads.load_mtp import load_mtp
from cacheprobe.models.heads.module import HeadModule
from cacheprobe.ops.equality import bitwise
from cacheprobe.tasks import CoinFlip, word_tokenizer
from cacheprobe.training import eagle3, heads, mtp
from cacheprobe.training.heads import HeadTraining, checkpoint_folder, split_texts
from cacheprobe.training.settings import Eagle3Settings, HeadSettings, MtpSettings
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.tiny import SMALL, loaded
from tests.twins.heads_slowly import chain_losses_slowly

TASK = CoinFlip(people=3)
RUN: Any = {**SMALL, "capacity": 192, "max_new_tokens": 32, "sampling": cp.SamplingParams(stop_token_ids=())}
EAGLE3 = Eagle3Settings(steps=100, batch=4, chain=2, learning_rate=5e-3, held_out=0.2, draft_vocab=40)
MTP = MtpSettings(steps=100, batch=4, learning_rate=5e-3, held_out=0.2)
FEW = replace(EAGLE3, steps=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama that knows the words of coin-flip questions, whose text follows mostly from its last words."""
    tokenizer = word_tokenizer(TASK.vocabulary())
    folder = tmp_path_factory.mktemp("model")
    size = replace(TINY, vocab=len(tokenizer), layers=7, initializer_range=0.15)
    tiny_model("llama-tied", size=size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[CachedLM]:
    yield cp.load_model(str(folder))


@pytest.fixture(scope="module")
def trace(model: CachedLM) -> cp.Trace:
    return cp.run(model, [TASK.example(i % 36, 0) for i in range(40)], **RUN, capture="S")


def training(trace: cp.Trace, settings: HeadSettings, out: Path | None = None) -> HeadTraining:
    """The training that train_eagle3 or train_mtp makes."""
    model = heads.model_of_trace(trace)
    is_eagle = isinstance(settings, Eagle3Settings)
    layers = [layer for _, layer in eagle3.sites_of(model, settings)] if is_eagle else [model.n_layers - 1]
    texts, _ = split_texts(trace, layers, settings)
    checkpoints = None if out is None else checkpoint_folder(out)
    if isinstance(settings, Eagle3Settings):
        token_ids = eagle3.draft_vocabulary(texts, model.d_vocab, settings.draft_vocab)
        module: HeadModule = eagle3.fresh_eagle3(model, token_ids, settings)
        return HeadTraining(module, token_ids, eagle3.SHARED, texts, settings, checkpoints)
    assert isinstance(settings, MtpSettings)
    return HeadTraining(mtp.fresh_mtp(model, settings), None, mtp.SHARED, texts, settings, checkpoints)


@pytest.mark.parametrize(
    ("train", "settings", "drafter"),
    [
        (eagle3.train_eagle3, EAGLE3, cp.drafters.Eagle3),
        (eagle3.train_eagle3, replace(EAGLE3, norm_output=True), cp.drafters.Eagle3),
        (mtp.train_mtp, MTP, cp.drafters.MTP),
    ],
    ids=["eagle3", "norm_output", "mtp"],
)
def test_it_drafts_better_than_untrained_on_held_out_questions(
    train: Callable[..., dict[str, Any]],
    settings: HeadSettings,
    drafter: Callable[..., Any],
    trace: cp.Trace,
    model: CachedLM,
    tmp_path: Path,
) -> None:
    """And the committed tokens are those of a run without drafts."""
    about = train(trace, settings, tmp_path / "head", progress=False)
    train(trace, replace(settings, steps=1, learning_rate=1e-9), tmp_path / "untrained", progress=False)
    pairs = list(zip(about["held_out_agreement"], about["untrained_agreement"], strict=True))
    assert len(pairs) == settings.chain and all(after > before + 0.1 for after, before in pairs)
    questions = [TASK.example(i, 1) for i in range(8)]
    plain = cp.run(model, questions, **RUN, capture=None, deterministic=True)
    accepted = []
    for name in ("head", "untrained"):
        run = cp.run(model, questions, **RUN, capture=None, drafter=drafter(folder=tmp_path / name), draft_length=2)
        assert [run.committed(i) for i in range(8)] == [plain.committed(i) for i in range(8)]
        accepted.append(int(run.events().num_accepted.sum()))
    assert accepted[0] > accepted[1]


@pytest.mark.parametrize("settings", [FEW, replace(FEW, norm_output=True), replace(MTP, steps=6)], ids=str)
def test_a_training_that_was_stopped_ends_with_the_same_bits(
    settings: HeadSettings, trace: cp.Trace, model: CachedLM, tmp_path: Path
) -> None:
    """Which the folder that it writes gives back, with the target's embedding."""
    whole, out = training(trace, settings), tmp_path / "head"
    whole.run(progress=False)
    training(trace, settings, out).run(until=3, progress=False)
    train: Any = eagle3.train_eagle3 if isinstance(settings, Eagle3Settings) else mtp.train_mtp
    about = train(trace, settings, out, progress=False)
    assert about["training"] == settings.as_dict() and not (out / "training").exists()
    head = load_eagle3(out, model) if isinstance(settings, Eagle3Settings) else load_mtp(model, out)
    own = dict(head.live.named_parameters())
    assert own.keys() == dict(whole.module.named_parameters()).keys()
    assert all(bitwise(own[name], weight) for name, weight in whole.module.named_parameters())
    assert whole.token_ids is None or bitwise(head.token_ids, whole.token_ids)
    assert not bitwise(head.live.model.norm.weight, training(trace, settings).module.model.norm.weight)


@pytest.mark.parametrize("settings", [EAGLE3, replace(EAGLE3, norm_output=True), MTP], ids=["eagle3", "norm", "mtp"])
def test_gradients_are_those_of_chains_alone(settings: HeadSettings, trace: cp.Trace, model: CachedLM) -> None:
    """Texts of three lengths in a batch; the target's probabilities by a forward without a cache."""
    made = training(trace, replace(settings, chain=3))
    module, weights = made.module, list(made.loop.weights.values())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # as if trained: the first norms are 1, and the first columns of the embedding are small
        for weight in weights:
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    lengths: dict[int, int] = {}
    for one in made.texts.request_ids:
        lengths.setdefault(len(made.texts.token_ids(one)), one)
    chosen = list(lengths.values())[:3]
    losses = made.losses(made.texts.batch(chosen))
    slowly: list[list[torch.Tensor]] = [[], [], []]
    for one in chosen:
        text = torch.tensor(made.texts.token_ids(one))
        states = torch.stack([trace.states("S", layer, one) for layer in made.texts.layers], dim=1)
        probs = model.live(text[None, :-1]).logits[0].softmax(-1).detach()
        probs = probs if made.token_ids is None else probs[:, made.token_ids]
        first = trace.requests[one].num_prompt_tokens - 1
        of_text = chain_losses_slowly(module, text, states, probs, first, 3)
        slowly = [[*others, *own] for others, own in zip(slowly, of_text, strict=True)]
    by_hand = [torch.stack(one).mean() for one in slowly]
    torch.testing.assert_close(torch.stack(losses), torch.stack(by_hand), rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(torch.stack(some).sum(), weights) for some in (losses, by_hand))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_the_draft_vocabulary_has_the_most_frequent_tokens(trace: cp.Trace, model: CachedLM) -> None:
    texts, held_out = split_texts(trace, [0], EAGLE3)
    counts = [0] * model.d_vocab
    for one in texts.request_ids:
        for token in [*trace.requests[one].prompt_token_ids, *trace.committed(one)]:
            counts[token] += 1
    by_count = sorted(range(model.d_vocab), key=lambda token: (-counts[token], token))
    assert eagle3.draft_vocabulary(texts, model.d_vocab, 12).tolist() == sorted(by_count[:12])
    prompts = [{trace.requests[i].prompt_token_ids for i in side.request_ids} for side in (texts, held_out)]
    assert not prompts[0] & prompts[1] and sum(map(len, prompts)) == len({r.prompt_token_ids for r in trace.requests})


def test_the_help_describes_the_flags_that_settings_inherit() -> None:
    own, inherited = attribute_docs(MtpSettings), attribute_docs(HeadSettings)
    assert own["texts"] == inherited["texts"] and own["learning_rate"] == "Highest learning rate."
    assert own["chain"] != inherited["chain"] and {"chain", "steps", "batch"} <= own.keys()


def test_the_commands_record_train_and_compare(
    folder: Path, trace: cp.Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheprobe.cli.train_heads.NUM_PROMPTS", 2)
    monkeypatch.setattr("cacheprobe.engine.execution.costs_of", lambda *_: None)  # drafts are always on
    few: Any = dict(model=str(folder), texts=14, new_tokens=8, steps=2, batch=4, held_out=0.2, progress=False)
    monkeypatch.setattr("cacheprobe.cli.train_heads.NEW_TOKENS", 8)
    eagle3_command(out=tmp_path / "a", seeds=2, draft_vocab=20, **few)
    shown = capsys.readouterr().out
    assert shown.count("by place in a chain") == 2 and shown.count("Eagle3(") == 4 and "EarlyExit(layer=5" in shown
    assert "NGram(" in shown and "2 held-out prompts, window 8" in shown
    recorded = cp.load_trace(tmp_path / "a" / "run")
    assert [request.sampling.temperature for request in recorded.requests[:3]] == [0, 1, 0]
    with monkeypatch.context() as patch:
        patch.setattr("cacheprobe.run", None)  # the texts are there
        with pytest.raises(ValueError, match=r"seed-0 exists; choose another folder"):
            eagle3_command(out=tmp_path / "a", draft_vocab=20, **few)
        with pytest.raises(ValueError, match="holds a run of other prompts"):
            eagle3_command(out=tmp_path / "a", **{**few, "texts": 15})
    mtp_command(run=trace.save(tmp_path / "run"), out=tmp_path / "b", **few)
    assert "MTP(" in capsys.readouterr().out and not (tmp_path / "b" / "run").exists()
    about = tmp_path / "b" / "seed-0" / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "model_name": "another"}))
    with pytest.raises(ValueError, match="holds an MTP module of another, the model is"):
        cp.drafters.MTP(folder=about.parent).check(recorded.model or cp.load_model(str(folder), dtype="float32"))


def test_what_does_not_fit_is_refused(
    trace: cp.Trace, model: CachedLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"

    def train(trace: cp.Trace, settings: Eagle3Settings = FEW) -> None:
        eagle3.train_eagle3(trace, settings, out, progress=False)

    with pytest.raises(ValueError, match=r"needs S of layers \(1, 2, 3, 6\).*run with capture='S'"):
        train(cp.run(model, [TASK.example(i, 0) for i in range(8)], **RUN, capture="T"))
    with pytest.raises(ValueError, match="a step draws 500 texts, the trace has 33 "):
        train(trace, replace(FEW, batch=500))
    with pytest.raises(ValueError, match="not on the input of block 0; leave out 0"):
        train(trace, replace(FEW, layer_ids=(0, 2, 3)))
    with pytest.raises(ValueError, match="layer ids .* lie in 0 to 7"):
        train(trace, replace(FEW, layer_ids=(2, 3, 9)))
    with pytest.raises(ValueError, match="the trace has one prompt"):
        train(cp.run(model, [TASK.example(0, 0)], **RUN, capture="S"))
    other = cp.load_trace(trace.save(tmp_path / "run"))
    with pytest.raises(ValueError, match="loaded without its model"):
        train(other)
    other.model = loaded()
    with pytest.raises(ValueError, match="the run was made with weights"):
        train(other)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"trained in float32, .* in torch.bfloat16"):
        patch.setattr(model, "dtype", torch.bfloat16)
        mtp.train_mtp(trace, MTP, out, progress=False)
    assert not out.exists()
    training(trace, FEW, out).run(until=1, progress=False)
    with pytest.raises(ValueError, match="holds a training with other settings"):
        train(trace, replace(FEW, seed=1))
    train(trace)
    with pytest.raises(ValueError, match="head exists; choose another folder"):
        train(trace)
    for wrong in (dict(held_out=1.5), dict(draft_vocab=0), dict(chain=0)):
        with pytest.raises(ValueError):
            replace(FEW, **wrong)


def test_one_text_at_a_time_has_the_losses_of_a_batch(trace: cp.Trace) -> None:
    made = training(trace, EAGLE3)
    chosen = made.texts.request_ids[:3]
    parts = [heads.chain_rows(made.module, made.texts.batch(some), 2) for some in (chosen, *[[one] for one in chosen])]
    for k in range(2):
        torch.testing.assert_close(parts[0][k][0], torch.cat([one[k][0] for one in parts[1:]]))
