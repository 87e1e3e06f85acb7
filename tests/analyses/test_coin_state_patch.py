"""The analysis of patched coin states: each patch is what it says, in both ways of running it, refused at chance."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.core.hook_names import hook_name
from cacheprobe_analyses.coin import coin_state_patch as patches
from tests.analyses.test_coin_rows import model

ROOT = Path(__file__).parents[2]
PLAIN = patches.Config("a tiny model", people=2, texts=2)
THINKS = patches.Config(people=1, control_every=2)


@cache
def found(which: str) -> pd.DataFrame:
    """Of the first question of the first pair, by place, layer and treatment."""
    lm, config = (model(), PLAIN) if which == "plain" else (cp.load_model("coinflip-thinking"), THINKS)
    four = patches.questions(lm, config, 0)
    patch = patches._cells if which == "plain" else patches._runs
    return pd.DataFrame(patch(lm, four[0], four[1], four[2], config)).set_index(["place", "layer", "treatment"])


@pytest.mark.parametrize("which", ["plain", "thinking"])
def test_nothing_is_zero_and_everything_is_one(which: str) -> None:
    """The own states change nothing; the last state of the last layer is all that the answer is read from; and what
    stands behind the word says nothing any more at the word itself, in the last layer."""
    table = found(which)
    top = table.index.get_level_values("layer").max()
    again = table.xs("own again", level="treatment")
    assert len(again) > 5 and again.nld.abs().max() < 1e-5 and not again.flip.any()
    assert table.nld[patches.END, top, "other coin"] == pytest.approx(1, abs=1e-4)
    assert abs(table.nld[patches.WORD, top, "other coin"]) < 1e-5
    assert abs(table.nld[patches.END, top, "noise"]) > 1e-3
    assert {place for place, _, _ in table.index} >= {"person 1", patches.WORD, patches.END}


def test_the_words_state_before_any_layer_reads_it_is_the_other_question() -> None:
    """A cell of the middle against one plain forward with the state put in by hand."""
    lm = model()
    four = patches.questions(lm, PLAIN, 0)
    ids = [lm.encode(example.prompt_text(lm.tokenizer)) for example in four[:2]]
    at = patches.places_of(cp.run(lm, list(four[:2]), **patches.SETTINGS))["person 1"][0]
    kept: dict[str, object] = {}
    name = hook_name("S", 0)

    def keep(value, hook):
        kept[hook.name] = value[0, at].clone()

    def put(value, hook):
        value[0, at] = kept[hook.name]
        return value

    bridge, columns = lm.bridge, [lm.encode(a, add_special_tokens=False)[0] for a in patches.ANSWERS]

    def apart(logits) -> float:
        return float(logits[0, -1, columns[0]] - logits[0, -1, columns[1]])

    import torch

    with torch.inference_mode():
        low, high = (apart(bridge(torch.tensor([one]))) for one in ids)
        bridge.run_with_hooks(torch.tensor([ids[1]]), fwd_hooks=[(name, keep)])
        now = apart(bridge.run_with_hooks(torch.tensor([ids[0]]), fwd_hooks=[(name, put)]))
    assert found("plain").nld["person 1", 0, "other coin"] == pytest.approx((now - low) / (high - low), abs=1e-4)


def test_a_model_at_chance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a tiny model answers \d of 4 questions rightly, no more than chance"):
        patches.measure(model(), PLAIN)


def test_the_stored_result_is_whole_and_on_the_page() -> None:
    """The page has some of the layers; each of its lines says what the whole table says."""
    held = json.loads((ROOT / "analyses/results/coin-state-patch.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/tables/coin-state-patch.txt").read_text(encoding="utf-8")
    for name, one in held.items():
        result = patches.Result.of(one)
        whole = result.table().replace("-0.000", "0.000").splitlines()
        shown = [line for line in page.split(f"`{name}`:")[1].split("\n\n")[1].splitlines() if line[2].isdigit()]
        assert shown and all(any(line.startswith(told.rstrip("|")) for line in whole) for told in shown)
        assert asdict(result) == one and result.right == result.questions
        assert len(result.figure().layout.annotations) == len(set(result.frame.place))
