"""The MTP drafter: the same drafts as transformers' `generate(use_mtp=True)` and as the slow chain, and no change of
what is committed."""

from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator

import cacheprobe as cp
from cacheprobe.core.registry import make
from cacheprobe.models.base import ModelError
from tests.by_hand import generated
from tests.models.heads.checkpoints import FAMILIES, draft_slowly, module_slowly, original
from tests.models.heads.test_mtp import folder, loaded
from tests.tiny import loaded as other_model

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3] * 40, [11, 1], [10, 5, 2, 8, 7, 0, 6]]
NEW = 14
SETTINGS: dict[str, Any] = dict(window=4, group=2, capacity=96, max_new_tokens=NEW, draft_length=3, progress=False)
SAMPLED = cp.SamplingParams(temperature=0.8, top_k=4, top_p=0.95, repetition_penalty=1.1)
GREEDY = cp.SamplingParams()
QUICK = ("deepseek_v3", "qwen3_5_text", "qwen2")
"""Families that differ most: experts and latent attention, recurrent layers, a layout that transformers lacks."""
every_family = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow]) for family in FAMILIES]
)


def drafts(trace: cp.Trace, request_id: int) -> list[tuple[list[int], list[int]]]:
    """(whole text before the draft, draft tokens) of each verified draft of a request."""
    lines = trace.events().query("request_id == @request_id and phase == 'verify'")
    text = [*PROMPTS[request_id], *trace.committed(request_id)]
    starts = lines.draft_start.fillna(0).astype(int)
    pairs = zip(starts, lines.draft_token_ids, strict=True)
    return [(text[:start], list(tokens)) for start, tokens in pairs if len(tokens)]


@every_family
def test_a_chain_drafts_what_whole_forwards_say(family: str) -> None:
    """Every draft, after accepted and rejected ones, is that of the module over the whole text, without a cache; what
    is committed is that of the model alone."""
    live = original(folder(family))
    module = module_slowly(family, folder(family), live)
    drafter = cp.drafters.MTP(loaded(family), length=3)
    trace = cp.run(loaded(family), PROMPTS, **SETTINGS, sampling=GREEDY, drafter=drafter)
    num_whole = 0
    for request_id, prompt in enumerate(PROMPTS):
        assert trace.committed(request_id) == generated(live, prompt, NEW)
        for text, tokens in drafts(trace, request_id):
            num_whole += len(tokens) == 3
            assert tokens == draft_slowly(live, module, text, len(tokens))
    accepted = trace.events().num_accepted.dropna()
    assert num_whole > 20 and accepted.sum() > 2 and trace.num_rolled_back > 20 and accepted.nunique() > 1


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_drafts_and_text_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate(use_mtp=True) drafts one token a round; each is ours, and so is the text. transformers refuses models
    with recurrent layers, whose states its assisted generation does not roll back."""
    live, theirs = original(folder(family)), list[tuple[list[int], list[int]]]()
    own = MTPCandidateGenerator.get_candidates

    def noted(self: MTPCandidateGenerator, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, input_ids, *args, **kwargs)
        text, whole = input_ids[0].tolist(), found[0][0].tolist()
        theirs.extend([(text, whole[len(text) :])] if len(whole) > len(text) else [])
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    settings = {**SETTINGS, "draft_length": 1, "sampling": GREEDY}
    trace = cp.run(loaded(family), PROMPTS, **settings, drafter=cp.drafters.MTP(length=1))
    for request_id, prompt in enumerate(PROMPTS):
        theirs.clear()
        ids = torch.tensor([prompt])
        same = dict(max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
        text, ours = live.generate(ids, **same, use_mtp=True)[0, len(prompt) :], drafts(trace, request_id)
        assert ours == [one for one in theirs if len(one[0]) < len(prompt) + NEW - 1]  # the last token needs no draft
        assert len(ours) > 5
        assert trace.committed(request_id) == text.tolist() == live.generate(ids, **same)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@every_family
def test_no_draft_changes_what_is_committed(family: str, sampling: cp.SamplingParams) -> None:
    """Deterministic and other requests in one batch, some preempted: the tokens of all, and the bits of the
    deterministic ones' log-probabilities and states."""
    settings: dict[str, Any] = {**SETTINGS, "sampling": sampling, "seed": 3, "deterministic": [0, 2, 4]}
    alone = cp.run(loaded(family), PROMPTS, **settings)
    less_room = dict(max_kv_tokens=80, max_batch=3)
    trace = cp.run(loaded(family), PROMPTS, **settings, **less_room, drafter=cp.drafters.MTP())
    assert trace.events().num_accepted.sum() > 1 and trace.num_rolled_back > 20 and trace.meta["preemptions"]
    for request_id in range(len(PROMPTS)):
        assert trace.committed(request_id) == alone.committed(request_id)
    for request_id in (0, 2, 4):
        assert trace.logprobs(request_id) == alone.logprobs(request_id)
        assert trace.digest(request_id) == alone.digest(request_id)


def test_the_drafter_by_name_and_its_refusals() -> None:
    drafter = make("drafters", "mtp:length=2")
    assert repr(drafter) == "MTP(length=2, model=None, folder=None)"
    trace = cp.run(loaded("qwen3_5_text"), PROMPTS, **SETTINGS, drafter=drafter)
    assert trace.num_drafted and max(map(len, trace.events().draft_token_ids)) == 2
    with pytest.raises(ModelError, match="LlamaForCausalLM was made without files"):
        cp.run(other_model(), PROMPTS, **SETTINGS, drafter=drafter)
    with pytest.raises(ModelError, match="LlamaForCausalLM was made without files"):
        cp.drafters.MTP(other_model())
    with pytest.raises(ValueError, match="needs a model from cp.load_model"):
        cp.drafters.MTP(other_model().live)
    with pytest.raises(ValueError, match=r"length=0\) would draft nothing"):
        cp.drafters.MTP(length=0)
    with pytest.raises(ValueError, match="holds the module of .*qwen2, and the run is of LlamaForCausalLM"):
        cp.run(other_model(), PROMPTS, **SETTINGS, drafter=cp.drafters.MTP(loaded("qwen2")))
