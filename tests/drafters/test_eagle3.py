"""EAGLE-3 heads as drafters."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.registry import make
from cacheprobe.engine.drafters import Eagle3
from cacheprobe.engine.drafters import eagle3 as module
from cacheprobe.engine.drafters.base import require_drafter
from cacheprobe.models.feeding import feed
from cacheprobe.models.heads.eagle3 import Eagle3Module
from cacheprobe.models.heads.eagle3_files import load_eagle3, save_eagle3
from cacheprobe.models.heads.lm import HeadLM
from tests.models.heads.eagle3_heads import folder_for_three_layers, speculators_folder, target
from tests.models.heads.test_convention import head_of
from tests.tiny import PROMPTS, SMALL, loaded


def chain_by_hand(head: HeadLM, text: Sequence[int], length: int) -> list[int]:
    """The greedy drafts after a text, each from a forward of the head's module over all rows, without a cache."""
    fed = feed(loaded(), torch.tensor([text]), head.target_sites)
    states = torch.stack([fed.states[site] for site in head.target_sites], dim=2)[:, :-1]
    live, ids = head.live, head.token_ids
    assert isinstance(live, Eagle3Module) and ids is not None
    tokens, drafted = list(text[1:]), list[int]()
    with torch.inference_mode():
        given = live.entering(states)
        for _ in range(length):
            live.given = given
            residual = live.residual(torch.tensor([tokens]))
            live.given = None
            drafted.append(int(ids[live.lm_head(live.model.norm(residual[0, -1])).argmax()]))
            tokens.append(drafted[-1])
            given = torch.cat([given, live.fed_back(residual[:, -1:])], dim=1)
    return drafted


@pytest.mark.parametrize("settings", [{}, {"norm_output": True, "norm_before_residual": True}])
def test_its_drafts_are_those_of_the_head_without_a_cache(settings: dict[str, bool], tmp_path: Path) -> None:
    """Of every draft of a run, after whatever was rolled back; the draft's tokens are the target's ids."""
    folder = speculators_folder(tmp_path, **settings)
    drafter = Eagle3(folder, length=3, layer_ids=[1, 2, 3])
    trace = cp.run(loaded(), PROMPTS[:3], **SMALL, drafter=drafter, draft_length=3)
    events, compared = trace.events(), 0
    for event in events[events.draft_token_ids.map(len) > 0].itertuples():
        text = [*PROMPTS[event.request_id], *trace.committed(event.request_id)][: event.draft_start]
        assert list(event.draft_token_ids) == chain_by_hand(drafter.head(loaded()), text, len(event.draft_token_ids))
        compared += 1
    assert compared > 20 and trace.num_rolled_back


def test_it_is_made_by_a_command_line() -> None:
    folder = folder_for_three_layers()
    drafter = make("drafters", f"eagle3:folder={folder},length=2,layers_are=outputs,verifier=tiny")
    assert isinstance(drafter, Eagle3) and (drafter.length, drafter.layers_are) == (2, "outputs")
    with pytest.raises(ValueError, match=r"that are outputs of 3 blocks lie in 0 to 2, got \[1, 2, 3\]"):
        require_drafter(drafter, loaded())
    with pytest.raises(ValueError, match="cannot be made from .*missing 1 required positional argument: 'folder'"):
        make("drafters", "eagle3")
    with pytest.raises(ValueError, match=r"Eagle3\(length=0\) would draft nothing"):
        make("drafters", f"eagle3:folder={folder},length=0")
    with pytest.raises(ValueError, match="folder of Eagle3 must be the path of a folder"):
        require_drafter(Eagle3(""), loaded())


def test_a_head_is_read_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(module, "load_eagle3", lambda *args, **named: calls.append(args) or load_eagle3(*args, **named))
    drafter = Eagle3(folder_for_three_layers())
    for _ in range(2):
        cp.run(loaded(), PROMPTS[:1], **SMALL, drafter=drafter)
    assert len(calls) == 1


def test_layers_counted_otherwise_are_refused_unless_they_are_stated(tmp_path: Path) -> None:
    """Before the run begins, by what the head predicts."""
    folder = save_eagle3(head_of([1, 3, 4]), tmp_path, "tiny")  # trained on the states that enter 2, 4, 5
    with pytest.raises(ValueError, match=r'better from those that enter blocks \[2, 4, 5\].* layers_are="outputs"'):
        cp.run(target(), PROMPTS[:1], **SMALL, drafter=Eagle3(folder))
    for stated in (Eagle3(folder, layers_are="outputs"), Eagle3(folder, layer_ids=[1, 3, 4])):
        assert cp.run(target(), PROMPTS[:1], **SMALL, drafter=stated).events().draft_token_ids.map(len).sum() > 0
