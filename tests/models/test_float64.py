"""Models in float64, which tell how far from the truth the others are: nothing on the way may be narrower."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cacheprobe as cp
from cacheprobe.models.hf import bridge
from cacheprobe.models.hf import lm as base
from cacheprobe.models.plain import lm as copied
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.ops.readout import read_logits
from tests.feeding import fed_in_parts, texts
from tests.tiny import PROMPTS, QUICK_FAMILIES, SMALL, by_modules, loaded
from tests.twins.equivalence import read_logits_slowly


class Narrowings(TorchDispatchMode):
    """Counts float64 tensors that are turned into narrower ones, below whatever asked for it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, Tensor)]
        if isinstance(out, Tensor) and out.dtype == torch.float32 and any(g.dtype == torch.float64 for g in given):
            self.count += 1
        return out


def narrowings(form: Any) -> int:
    ids = texts(9)[0][None]
    with Narrowings() as seen:
        form.forward(ids, form.new_cache(1, 16), [0], [0])
        form.read_out(torch.ones(2, form.d_model, dtype=torch.float64))
    return seen.count


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_nothing_is_narrowed_on_the_way(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(family, torch.float64)
    forms = [model.bridged(), model, by_modules(model)]
    assert [narrowings(form) for form in forms] == [0, 0, 0]
    for module in (bridge, base, copied):
        monkeypatch.setattr(module, "keeping_float64", lambda dtype: nullcontext())
    found = [narrowings(form) > 0 for form in (model, forms[2])]
    assert found == [family != "gpt2"] * 2, "the control: norms, rotations and softmaxes round, but GPT-2's"


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_both_forms_agree_far_below_float32(family: str) -> None:
    model = loaded(family, torch.float64)
    ours, theirs = (fed_in_parts(form, texts(14, 9)) for form in (model, model.bridged()))
    for what, expected in theirs.items():
        assert ours[what].dtype == torch.float64
        assert close(ours[what], expected, 1e-13, because="fused attention takes its sums in another order")
    narrow = fed_in_parts(loaded(family), texts(14, 9))  # the control: float32's own distance
    assert not close(narrow["logits row 0"].double(), ours["logits row 0"], 1e-8, because="float32")


def test_equal_in_float32_is_not_equal() -> None:
    """Ids and ranks are of the logits' own order."""
    step = 1e-12
    logits = torch.linspace(-3, 1, 300, dtype=torch.float64).repeat(2, 1)
    logits[0, 40:44] = torch.tensor([2, 2 + step, 2, 2 + 2 * step], dtype=torch.float64)
    logits[1, 290] = 1 + step
    targets = torch.tensor([40, 299])
    found, slowly = read_logits(logits, targets, 5), read_logits_slowly(logits, targets, 5)
    assert found.top_token_ids.tolist() == slowly["ids"].tolist()
    assert found.top_token_ids[0, :4].tolist() == [43, 41, 40, 42] and found.target_rank.tolist() == [2, 1]
    assert found.target_rank.tolist() == slowly["rank"].tolist()
    assert close(found.entropy_nats, slowly["entropy"].float(), 1e-6, because="told in float32")
    assert close(found.target_logprob_nats, slowly["target_logprob"].float(), 1e-6, because="told in float32")
    assert {column.dtype for column in found} == {torch.int64, torch.float32}


def test_a_run_is_recorded_edited_and_stored(tmp_path: Path) -> None:
    model = loaded("llama", torch.float64)
    settings = dict(**SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=True)
    trace, oracle = cp.run(model, PROMPTS, **settings), cp.reference(model, PROMPTS, **SMALL)
    assert trace.fingerprint["dtype"] == "float64" and trace.num_rolled_back > 0
    assert [trace.digest(i) for i in range(5)] == [oracle.digest(i) for i in range(5)]
    trace.save(tmp_path)
    states = cp.load_trace(tmp_path).states("S", 1, 0)
    assert states.dtype == torch.float64 and bitwise(states, trace.states("S", 1, 0))
    assert not bitwise(states.float().double(), states)  # the control: float32 would not hold them
    plain = cp.run(model, PROMPTS[:1], **SMALL)
    own = plain.states("S", 1, 0)
    for given, is_same in ((own, True), (own.float(), False)):
        itself = cp.interventions.replace(given, request_id=0, site="S", layer=1, positions=range(len(own)))
        again = cp.run(model, PROMPTS[:1], **SMALL, interventions=[itself])
        assert bitwise(plain.states("S", 2, 0), again.states("S", 2, 0)) == is_same


def test_thoughts_in_float64() -> None:
    examples = cp.tasks.CoinFlip(people=2).examples(n=2, seed=0)
    runs = [
        cp.run(
            cp.load_model("coinflip-thinking", dtype=dtype), examples, capacity=128, max_new_tokens=4, progress=False
        )
        for dtype in ("float64", "float32")
    ]
    assert [run.committed(0) for run in runs[:1]] == [run.committed(0) for run in runs[1:]]
    states = [run.states("S", 1, 0) for run in runs]
    assert states[0].dtype == torch.float64
    assert 1e-9 < float((states[0] - states[1].double()).abs().max()) < 1e-3
