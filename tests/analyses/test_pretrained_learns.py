"""The analysis of a pretrained model that learns to think, whole, on a random model of a real architecture."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cacheprobe.models.base import ModelError
from cacheprobe.tasks import CoinFlip, annotate_all, mixed, word_tokenizer
from cacheprobe_analyses.thinking import pretrained_learns as learns
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama, over the words of the coin flip, whose tokenizer has one token for pad and end as SmolLM2's."""
    tokenizer = word_tokenizer(CoinFlip(people=2).vocabulary())
    tokenizer.pad_token = tokenizer.eos_token
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", size=replace(TINY, vocab=len(tokenizer))).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_both_losses_fall_where_t_and_c_alone_learn(folder: Path) -> None:
    result = learns.run(learns.Config(str(folder), steps=40, batch=8, lr=5e-3, every=10, texts=12))
    first, *_, last = result.lines
    assert [(line.first, line.last) for line in result.lines] == [(1, 10), (11, 20), (21, 30), (31, 40)]
    assert last.thoughts < 0.5 * first.thoughts and last.lm < 0.8 * first.lm
    assert result.gold < result.backbone and result.opposite != result.gold and result.texts == 12
    assert result.trained == result.added < result.parameters
    assert learns.Result.of(json.loads(json.dumps(asdict(result)))) == result
    assert f"| 31 to 40 | {last.lm:.2f} | {last.thoughts:.2f} |" in result.table()
    again = learns.run(learns.Config(str(folder), steps=3, batch=8, trains_backbone=True, every=2, texts=4))
    assert again.trained == again.parameters and [line.last for line in again.lines] == [2, 3]


def test_opposite_thoughts_have_the_other_side_and_nothing_else_changed() -> None:
    tokenizer = word_tokenizer(CoinFlip(people=2).vocabulary())
    items = annotate_all(mixed(CoinFlip(people=2), (1, 2), n=8), tokenizer, 8, "restate")
    for item, other in zip(items, learns.opposite(items), strict=True):
        assert replace(other, thoughts=item.thoughts) == item
        said = [[tokenizer.decode(thought) for thought in one.thoughts] for one in (item, other)]
        flipped = {"heads<eos>": "tails<eos>", "tails<eos>": "heads<eos>", "<eos>": "<eos>"}
        assert [flipped[thought.replace(" ", "")] for thought in said[0]] == [t.replace(" ", "") for t in said[1]]
    with pytest.raises(ValueError, match="have 0 different thoughts, not two coins' sides"):
        learns.opposite([replace(item, thoughts=((1,),) * len(item.thoughts)) for item in items])


def test_no_text_comes_twice() -> None:
    """Of one person there are few texts, and draws of them repeated: the losses were not those of fresh texts."""
    config = learns.Config()
    drawn = [example.question.text for example in learns.different_texts(config)]
    assert len(set(drawn)) == len(drawn) == config.steps * config.batch + config.texts
    with pytest.raises(ValueError, match="8016 different texts are needed and .* take fewer steps"):
        learns.different_texts(learns.Config(operations=(1,), steps=2000))


def test_models_that_cannot_be_given_thoughts_are_refused(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(CoinFlip(people=2).vocabulary())
    tiny_model("gpt2", size=replace(TINY, vocab=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="T and C cannot be added to a GPT2LMHeadModel"):
        learns.run(learns.Config(str(tmp_path)))


def test_the_stored_result_is_of_the_default_settings() -> None:
    stored = json.loads((ROOT / "analyses/results/pretrained-learns.json").read_text(encoding="utf-8"))
    result, config = learns.Result.of(stored), learns.Config()
    assert result.model == config.model and "4-bit" in result.weights and result.texts == config.texts
    assert result.lines[-1].last == config.steps and result.lines[0].last == config.every


def test_the_example_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, on the small model; each replacement must find its text."""
    page = (ROOT / "docs/thinking-model.md").read_text(encoding="utf-8").split("### A pretrained model")[1]
    code = page.split("```python\n")[1].split("```")[0]
    for shown, small in (('"smollm2-135m"', repr(str(folder))), ("capacity=128", "capacity=128, progress=False")):
        assert shown in code
        code = code.replace(shown, small)
    scope: dict = {}
    exec(code, scope)
    assert len(scope["trace"].thoughts()) == len(capsys.readouterr().out.splitlines()) - 1 > 2
