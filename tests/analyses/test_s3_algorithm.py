"""The analysis of how S3 is followed: its training, its three signatures, and what is concluded from them."""

import json
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.hook_names import hook_name
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.tasks import word_tokenizer
from cacheprobe.tasks.permutations import parity
from cacheprobe.training.loop import LoopSettings
from cacheprobe.training.thinking.losses import IGNORED
from cacheprobe_analyses.s3 import s3_algorithm as s3
from cacheprobe_analyses.s3 import s3_signatures as signatures
from cacheprobe_analyses.s3.s3_models import Subject, group_task, supervised, trained
from tests.thinking.test_thinking_engine import lm as thinker
from tests.twins import thinking_slowly

SMALL = Subject(
    "plain, small",
    operations=2,
    model=dict(n_layers=3, l_out=2, d_model=32, d_mlp=64),
    loop=LoopSettings(steps=250, batch=64, lr=5e-3, warmup=20),
)
ASKED = s3.Config((SMALL,), prompts=150, least=4, pairs=6, texts=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="module")
def result(folder) -> s3.Result:
    return s3.run(replace(ASKED, folder=folder))


def test_every_action_is_answered_by_the_state_after_it() -> None:
    task = group_task(3)
    tokenizer = word_tokenizer(task.vocabulary())
    examples = task.examples(5)
    ids, labels = supervised(examples, tokenizer)
    for row, wanted, example in zip(ids, labels, examples, strict=True):
        assert tokenizer.decode(row) == example.prompt + example.answer
        said = tokenizer.convert_ids_to_tokens(wanted[wanted != IGNORED].tolist())
        assert said == [*example.states, example.answer.strip(), "<eos>"]
        assert wanted[4] == IGNORED and tokenizer.convert_ids_to_tokens(int(row[4])) == "A"


def test_texts_of_a_training_are_never_those_of_a_test() -> None:
    with pytest.raises(ValueError, match="reach the seeds of the tests"):
        replace(SMALL, seed=10)


def test_pairs_differ_in_their_first_action_alone() -> None:
    examples = group_task(4).examples(20)
    for kind in signatures.KINDS:
        for clean, corrupt in signatures.pairs_of(examples, kind):
            assert clean.events == corrupt.events and clean.states[-1] != corrupt.states[-1]
            assert (parity(clean.states[0]) == parity(corrupt.states[0])) == (kind == "same")


def backbone() -> ThinkingLM:
    tokenizer = word_tokenizer(group_task(1).vocabulary())
    config = ThinkingConfig(len(tokenizer), thinks=False, chunk=1, n_layers=3, l_out=2, d_model=32, d_mlp=64)
    return ThinkingLM(ThinkingModel(config, seed=3), tokenizer)


@pytest.mark.parametrize("kind", ["activation", "prefix"])
def test_a_backbone_without_thoughts_is_patched_like_any_other(kind: str) -> None:
    """Each cell against a whole forward of the model, under a plain hook and without a cache."""
    lm = backbone()
    clean, corrupt = [3, 4, 5, 6, 7], [8, 4, 5, 3, 7]
    grid = getattr(cp.patching, kind)(lm, clean, corrupt, answer=(3, 4), progress=False)
    states: dict[int, torch.Tensor] = {}
    hooks = [(hook_name("S", n), lambda value, hook, n=n: states.update({n: value.clone()})) for n in range(3)]
    with torch.inference_mode(), lm.model.hooks(fwd_hooks=hooks):
        lm.model(torch.tensor([clean]))
    for line in grid.table.itertuples():
        first = 0 if kind == "prefix" else line.position

        def put(value, hook, line=line, first=first):
            value = value.clone()
            value[:, first : line.position + 1] = states[line.layer][:, first : line.position + 1]
            return value

        with torch.inference_mode(), lm.model.hooks(fwd_hooks=[(hook_name("S", line.layer), put)]):
            logits = lm.model(torch.tensor([corrupt]))[0][0, -1]
        # rows of a batch, summed in another order
        assert line.logit_difference == pytest.approx(float(logits[3] - logits[4]), abs=1e-5)
    assert grid.table.logit_difference.std() > 0.01


def test_thoughts_follow_from_the_patched_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell against the slow reading, chunk after chunk, with the clean rows written over a block's output."""
    lm, clean, corrupt = thinker(), [5, 9, 7, 11] * 3, [5, 9, 7, 11, 5, 9, 12, 11, 5, 9, 7, 11]
    block, rows = thinking_slowly._block, {}

    def apart(text: list[int], layer: int, position: int) -> float:
        def changed(part, x, *more, **named):
            out = block(part, x, *more, **named)
            if part is lm.model.blocks[layer]:
                known = rows.setdefault((layer, len(out)), out.clone())
                out[: position + 1] = known[: position + 1]
            return out

        monkeypatch.setattr(thinking_slowly, "_block", changed)
        logits = thinking_slowly.read_slowly(lm.model, text, len(text)).logits[-1]
        return float(logits[5] - logits[11])

    table, own = signatures.thought_prefixes(lm, clean, corrupt, (5, 11), capacity=64)
    assert set(table.position) == {3, 7, 11} and own < 1e-3
    high, *_ = [apart(clean, layer, -1) for layer in range(lm.n_layers)]  # each keeps a layer's clean rows
    low = apart(corrupt, 0, -1)
    for line in table.itertuples():
        wanted = (apart(corrupt, line.layer, line.position) - low) / (high - low)
        assert line.nld == pytest.approx(wanted, abs=1e-3)  # float32 sums, over a difference of order 1
    assert (table.nld - table.nld.round()).abs().max() > 0.1 and abs(high - low) > 0.1


def test_a_model_is_asked_for_its_signatures(result: s3.Result) -> None:
    made = result.models[SMALL.name]
    assert made["accuracy"] > 0.9 and made["own_again"] < 1e-4
    probes = pd.DataFrame(result.probes)
    last = probes[(probes.layer == 2) & (probes.place == 2)].set_index("label")
    assert (last.accuracy > 0.9).all() and (last.shuffled.dropna() < 0.65).all() and last.shuffled["state"] < 0.35
    assert last.low["halves"] <= last.accuracy["halves"] <= last.high["halves"] <= 1 and last.classes["halves"] == 2
    assert last.groups["state"] == last.groups["parity"] > 60 and set(probes.place) == {2}
    patches = pd.DataFrame(result.patches)
    assert set(patches.kind) == set(signatures.KINDS) and patches.pairs.max() <= 6
    ends = patches[patches.position == 2]
    assert len(ends) == 6 and ends.nld.round(3).eq(1).all() and (ends.flips == ends.pairs).all()
    by_length = {line["operations"]: line for line in result.lengths}
    assert by_length[2]["right"] > 50 and by_length[6]["right"] < by_length[2]["right"]
    for line in result.lengths:
        assert line["parity_right"] - line["right"] == line["parity_right_of_wrong"] <= line["wrong"]
    assert json.loads(json.dumps(asdict(result))) == asdict(result)
    told = result.table()
    assert f"| {SMALL.name} | 250 |" in told and "labels in random order" in told
    assert len(result.figure(SMALL.name).data) == 8
    with pytest.raises(ValueError, match="there is no model 'x'"):
        result.figure("x")


def test_a_trained_model_is_not_trained_again(result: s3.Result, folder) -> None:
    heard: list[str] = []
    lm = trained(SMALL, folder, heard.append)
    assert not heard and lm.record["cpu_seconds"] == result.models[SMALL.name]["cpu_seconds"]


def test_a_model_at_chance_is_refused(folder) -> None:
    lazy = replace(SMALL, name="lazy", loop=replace(SMALL.loop, steps=1))
    with pytest.raises(cp.probes.ProbeError, match="use a model that does it"):
        s3.run(replace(ASKED, subjects=(lazy,), folder=folder))


def test_other_halves_are_no_easier_ways_to_the_parity() -> None:
    """Nine, of three states each; whoever knows the parity alone is right about two of three."""
    assert len(set(signatures.OTHER_HALVES)) == 9 and signatures.EVEN not in signatures.OTHER_HALVES
    assert {parity(action) for action in signatures.EVEN} == {parity("123")}
    for half in signatures.OTHER_HALVES:
        assert len(half) == 3 and "123" in half
        right = [max(sum((s in half) == is_in for s in group) for is_in in (True, False))
                 for group in (signatures.EVEN, set(signatures.ACTIONS) - signatures.EVEN)]  # fmt: skip
        assert sum(right) == 4


def by_hand(parity: list[float], state: list[float], nld: list[list[float]], best_half: float = 0.7) -> s3.Result:
    """A model with these accuracies by layer, and these effects of prefixes by layer and position."""
    probes = [
        dict(model="m", label=label, layer=layer, place=8, accuracy=accuracy, high=max(accuracy, best_half))
        for label, line in (("parity", parity), ("halves", [0.6] * len(parity)), ("state", state))
        for layer, accuracy in enumerate(line)
    ]
    patches = [
        dict(model="m", kind="same", layer=layer, position=p, nld=x) for layer, line in enumerate(nld)
        for p, x in enumerate(line)
    ]  # fmt: skip
    return s3.Result({"m": {}}, probes, patches, [])


def test_order_and_reach_by_hand() -> None:
    first = by_hand([0.5, 0.96, 0.99], [0.2, 0.4, 1.0], [[1, 1, 1], [0.2, 0.6, 1], [0.7, 0.4, 0.6]])
    assert (first.read_from("m", "parity"), first.read_from("m", "state")) == ({8: 1}, {8: 2})
    assert first.order("m") == "parity first" and first.reach("m", "same") == [0, 1, 2]
    assert first.reach("m", "other") == []
    assert by_hand([0.5, 0.9, 0.99], [0.2, 0.4, 1.0], []).order("m") == "together"
    assert by_hand([0.99, 0.9, 0.99], [0.2, 0.4, 0.9], []).order("m") == "parity first"
    assert by_hand([0.5, 0.6], [0.2, 0.4], []).order("m") == "neither is read"
    easy = by_hand([0.5, 0.96, 0.99], [0.2, 0.4, 1.0], [], best_half=0.96)
    assert easy.order("m") == "any half first" and easy.other_halves("m", 1) == (0.6, 0.96)
