"""DFlash and Medusa in the engine: against transformers' own drafts, and against runs without a drafter; their caches
and recorded rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantModel, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration
from transformers.generation import candidate_generator

import cacheprobe as cp
from cacheprobe.engine.drafters import DFlash, Medusa
from cacheprobe.engine.drafters.base import DraftContext
from cacheprobe.engine.drafters.chain import ChainDrafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.ops.equality import bitwise
from tests.models.heads.block_heads import BLOCK, hidden, medusa_tensors, native_folder, often_right, write, zlab_folder
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.tiny import PROMPTS, SMALL, VOCAB, hf_model, loaded

ALWAYS = {**SMALL, "draft_length": 8}
PREEMPTED = {"max_kv_tokens": 70, "capacity": 64, "prefill_chunk": 16}
SAMPLING = {
    "greedy": cp.SamplingParams(),
    "sampled": cp.SamplingParams(temperature=0.8, top_k=20, top_p=0.95, repetition_penalty=1.1),
}
DRAFTERS: dict[str, Callable[[], ChainDrafter]] = {
    "dflash": lambda: DFlash(often_right("dflash")),
    "medusa": lambda: Medusa(often_right("medusa")),
}


@cache
def undrafted(sampling: str) -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, sampling=SAMPLING[sampling], deterministic=[0, 2])


def muse_glimmer() -> MuseGlimmerForConditionalGeneration:
    """The target that transformers' own heads are for. It norms its embeddings, but not those of a head's block."""
    text = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    text |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=16)
    text |= dict(eos_token_id=None, bos_token_id=None, pad_token_id=None, initializer_range=0.3)
    vision = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    config = MuseGlimmerConfig(text_config=text, vision_config=vision, out_hidden_size=16, projector_hidden_size=16)
    torch.manual_seed(0)
    model = MuseGlimmerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.3)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("kind", ["often right", "sliding", "muse_glimmer"])
def test_drafts_and_tokens_are_transformers_round_by_round(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text alone there, all in one batch here; drafts that are accepted, in part, or not at all."""
    hf = muse_glimmer() if kind == "muse_glimmer" else hf_model()
    folder = often_right("dflash") if kind == "often right" else tmp_path
    if kind != "often right":
        layers = ["sliding_attention" if kind == "sliding" else "full_attention", "full_attention"]
        native_folder(folder, layer_types=layers, target_layer_ids=[0, len(layers) - 1])
    model = cp.load_model(hf) if kind == "muse_glimmer" else loaded()
    settings = {**ALWAYS, "window": BLOCK}
    if kind == "muse_glimmer":  # it runs on a bridge, whose shapes are those that a trial finds
        settings = {name: value for name, value in ALWAYS.items() if name not in ("window", "group")}
    trace = cp.run(model, PROMPTS, **settings, drafter=DFlash(folder))
    rounds: list[tuple[int, list[int]]] = []
    propose = candidate_generator.DFlashTokenCandidateGenerator.get_candidates

    def noting(self: Any, input_ids: Tensor, *args: Any, **others: Any) -> Any:
        found = propose(self, input_ids, *args, **others)
        rounds.append((input_ids.shape[1], found[0][0, input_ids.shape[1] :].tolist()))
        return found

    monkeypatch.setattr(candidate_generator.DFlashTokenCandidateGenerator, "get_candidates", noting)
    assistant = MuseGlimmerAssistantModel.from_pretrained(folder)
    named = dict(assistant_model=assistant, speculation_type="dflash", max_new_tokens=20, do_sample=False)
    for i, prompt in enumerate(PROMPTS):
        rounds.clear()
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        out = hf.generate(torch.tensor([prompt]), attention_mask=mask, **named)
        assert trace.committed(i) == out[0, len(prompt) :].tolist()
        verify = trace.events().query(f"phase == 'verify' and request_id == {i}")
        ours = [(e.draft_start, list(e.draft_token_ids)) for e in verify.itertuples() if len(e.draft_token_ids)]
        theirs = [(start, tokens) for start, tokens in rounds if tokens]
        assert [start for start, _ in ours] == [start for start, _ in theirs][: len(ours)]
        assert len(ours) >= len(theirs) - 1  # the last one has room for one token alone
        for (_, mine), (_, other) in zip(ours, theirs, strict=False):
            assert mine == other[: len(mine)] and mine
    counts = set(trace.events().query("phase == 'verify'").num_accepted)
    assert kind != "often right" or {0, 1, BLOCK - 1} <= counts


@pytest.mark.parametrize("settings", [{}, PREEMPTED], ids=["plain", "preempted"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_and_log_probabilities_are_those_without_a_drafter(name: str, sampling: str, settings: dict) -> None:
    """Deterministic requests and others in one batch; the former's log-probabilities bit for bit."""
    drafted = {**ALWAYS, **settings, "sampling": SAMPLING[sampling], "deterministic": [0, 2]}
    trace, want = cp.run(loaded(), PROMPTS, **drafted, drafter=DRAFTERS[name]()), undrafted(sampling)
    verify = trace.events().query("phase == 'verify'")
    assert trace.num_rolled_back > 0 and (sampling == "sampled" or verify.num_accepted.sum() > 20)
    assert not settings or trace.meta["preemptions"]
    assert [trace.committed(i) for i in range(5)] == [want.committed(i) for i in range(5)]
    for i in (0, 2):
        assert trace.logprobs(i) == want.logprobs(i) and trace.digest(i) == want.digest(i)


@dataclass(frozen=True, eq=False)
class Apart(DFlash):
    """Runs its blocks on a copy of its cache, which so never sees a row of a block."""

    name: ClassVar[str] = "dflash"

    def read_block(self, context: DraftContext, head: HeadLM, states: Sequence[SequenceState]) -> Tensor:
        run = head.run_block

        def apart(token_ids: Tensor, kept: Any, *places: Any) -> Tensor:
            before = [tensor.clone() for tensor in (*kept.keys, *kept.values)]
            out = run(token_ids, kept, *places)
            for tensor, old in zip((*kept.keys, *kept.values), before, strict=True):
                tensor.copy_(old)
            return out

        vars(head)["run_block"] = apart
        try:
            return super().read_block(context, head, states)
        finally:
            del vars(head)["run_block"]


def test_a_heads_cache_is_that_of_a_head_that_never_saw_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[type, dict[int, list[Tensor]]] = {}
    release = ChainDrafter.release

    def noting(self: ChainDrafter, state: SequenceState) -> None:
        if state in self._fed:
            (own,) = self._own.values()
            row, fed = own.row_of(state), self._fed[state]
            parts = [tensor[row, :, :fed].clone() for tensor in (*own.cache.keys, *own.cache.values)]
            kept.setdefault(type(self), {})[state.request_id] = parts
        release(self, state)

    monkeypatch.setattr(ChainDrafter, "release", noting)
    traces = [cp.run(loaded(), PROMPTS, **ALWAYS, drafter=kind(often_right("dflash"))) for kind in (DFlash, Apart)]
    assert traces[0].num_rolled_back > 10 and traces[0].events().num_accepted.sum() > 20
    assert [traces[0].committed(i) for i in range(5)] == [traces[1].committed(i) for i in range(5)]
    seen, apart = kept[DFlash], kept[Apart]
    assert seen.keys() == apart.keys() == {*range(len(PROMPTS))}
    for request in seen:
        assert len(seen[request][0][0]) > len(PROMPTS[request])
        assert all(bitwise(a, b) for a, b in zip(seen[request], apart[request], strict=True))


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_row_is_recorded_at_the_position_before_the_token_that_it_drafts(name: str) -> None:
    """Its states give this token as their first choice; the verdict on the row is that on the token before."""
    trace = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=DRAFTERS[name]())
    read = trace.hypotheses(include_rolled_back=True, include_head=True)
    read = read[(read.phase == "draft") & (read.layer == read.layer.max())]
    assert read.layer.max() == loaded().n_layers + trace.head.model.n_layers - 1
    verify = trace.events().query("phase == 'verify'")
    assert verify.num_accepted.max() == 3 and verify.num_accepted.min() == 0
    for event in verify[verify.draft_token_ids.map(len) > 0].itertuples():
        mine = read[(read.request_id == event.request_id) & (read.step < event.step)]
        mine = mine[mine.step == mine.step.max()].iloc[: len(event.draft_token_ids)]
        first = event.draft_start - 1
        assert mine.position.tolist() == list(range(first, first + len(event.draft_token_ids)))
        assert mine.token_id.tolist() == list(event.draft_token_ids)
    rows = trace.head.rows()
    assert not rows.role.isna().any() and {"committed", "superseded", "rolled_back"} <= {*rows.status}


def test_rows_of_medusa_have_the_state_of_the_last_position_with_one() -> None:
    """The newest committed token has no state yet: head j, on the state of position p, drafts that of p + 2 + j."""
    trace = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=DRAFTERS["medusa"]())
    rows, width = trace.head.rows(0), loaded().d_model
    text = [*PROMPTS[0], *trace.committed(0)]
    normed, model = hidden(text)[-1], trace.head.model
    for row in rows[rows.status == "committed"].itertuples():
        wanted = model.run(trace.states("S", 2, 0)[row.position - 1][None, None])[0]
        group = rows[(rows.step == row.step)].sort_values("position")
        got = trace.head.vectors("S", 0, group)
        torch.testing.assert_close(got, wanted[: len(group)], rtol=1e-5, atol=1e-5)
        assert group.token_id.tolist() == [text[row.position]] * len(group)
        entering = got[0, :width] - trace.head.vectors("C", 0, group)[0, :width]
        torch.testing.assert_close(entering, normed[row.position - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*DRAFTERS, "chain"])
def test_rows_of_draft_tokens_that_do_not_fit_the_window_are_abandoned(name: str) -> None:
    """The head drafts more tokens than a pass can verify."""
    drafter = TinyHeadDrafter(length=8) if name == "chain" else DRAFTERS[name]()
    trace = cp.run(loaded(), PROMPTS, **{**ALWAYS, "window": 2}, drafter=drafter)
    rows = trace.head.rows()
    events = trace.events().query("phase == 'verify'")
    for event in events[events.draft_token_ids.map(len) > 0].itertuples():
        mine = rows[(rows.request_id == event.request_id) & (rows.step < event.step)]
        mine = mine[mine.step == mine.step.max()]
        late = mine[mine.position > event.draft_start]
        assert set(late.status) <= {"abandoned"}
    assert (rows.status == "abandoned").sum() > 10 and not rows.status.isna().any()
    assert [trace.committed(i) for i in range(5)] == [undrafted("greedy").committed(i) for i in range(5)]


@pytest.mark.parametrize(("name", "site"), [("dflash", "T"), ("medusa", "C")])
def test_edits_reach_the_head_and_change_no_committed_token(name: str, site: str) -> None:
    first = loaded().n_layers
    edit = cp.interventions.zero(site=site, layer=first, request_id=0)
    plain, edited = (
        cp.run(loaded(), PROMPTS, **ALWAYS, drafter=DRAFTERS[name](), deterministic=[0], interventions=one)
        for one in ((), edit)
    )
    assert [edited.committed(i) for i in range(5)] == [plain.committed(i) for i in range(5)]
    assert edited.logprobs(0) == plain.logprobs(0)
    assert not edited.head.vectors(site, 0, edited.head.rows(0)).any()
    assert edited.head.vectors(site, 0, edited.head.rows(1)).any()
    drafts = [
        [tuple(ids) for ids in trace.events().query("request_id == 0").draft_token_ids] for trace in (plain, edited)
    ]
    assert drafts[0] != drafts[1]


def test_a_block_is_drafted_only_where_the_heads_context_holds_it(tmp_path: Path) -> None:
    """The head's context ends before the model's: drafts end with it, and the run goes on without them."""
    zlab_folder(tmp_path, max_position_embeddings=30)
    text = [(7 * i + 3) % 90 for i in range(18)]
    settings = {**ALWAYS, "max_new_tokens": 20}
    trace = cp.run(loaded(), [text], **settings, drafter=DFlash(tmp_path))
    assert trace.committed(0) == cp.run(loaded(), [text], **SMALL).committed(0)
    newest = trace.head.rows().query("status == 'committed'").position
    assert newest.min() == 18 and newest.max() == 30 - BLOCK


def test_a_head_of_another_model_is_refused_before_the_run(tmp_path: Path) -> None:
    zlab_folder(tmp_path / "head", num_target_layers=7)
    with pytest.raises(ValueError, match="head is a head for another model: its num_target_layers is 7"):
        cp.run(loaded(), PROMPTS, **SMALL, drafter=DFlash(tmp_path / "head"))
    write(tmp_path / "heads", {}, medusa_tensors(width=64))
    with pytest.raises(ValueError, match="heads is for another model"):
        cp.run(loaded(), PROMPTS, **SMALL, drafter=Medusa(tmp_path / "heads"))
    with pytest.raises(ValueError, match="holds no readable config.json"):
        cp.run(loaded(), PROMPTS, **SMALL, drafter=Medusa(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"DFlash\(length=0\)"):
        DFlash(tmp_path / "head", length=0)
