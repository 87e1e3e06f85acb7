"""Attention heads: what a run keeps of them against plain hooks on Hugging Face's own model, and the oracle's bits."""

from functools import cache
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.engine.plan import make_plan
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain import watch
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.trace.recording.recorder import Recorder
from tests.field.tiny_family import tiny_family
from tests.tiny import PROMPTS, QUICK_FAMILIES, SMALL, hf_model, loaded
from tests.twins.heads_slowly import heads_slowly

pytestmark = pytest.mark.determinism

VECTORS, EVERY = ("q", "k", "v", "z"), ("q", "k", "v", "z", "pattern")
SUMS = "rows of other products, and attention over a whole capacity: sums are reordered"
FEW = {**SMALL, "max_new_tokens": 8}
EARLY = cp.drafters.EarlyExit(layer=1)


def captured(heads: str | tuple[str, ...], sites: str | None = None, **filters: object) -> cp.CaptureConfig:
    return cp.CaptureConfig(sites=sites, heads=heads, **filters)


@cache
def drafted(path: str = "auto", heads: tuple[str, ...] = EVERY) -> cp.Trace:
    """Mostly rolled back: an early layer drafts."""
    return cp.run(loaded(), PROMPTS, **SMALL, capture=captured(heads, "S"), path=path, drafter=EARLY, deterministic=[0])


@pytest.mark.parametrize("path", ["plain", "bridge"])
@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_heads_equal_hugging_faces(family: str, path: str) -> None:
    trace = cp.run(loaded(family), PROMPTS[:2], **FEW, capture=captured(EVERY), path=path, drafter=EARLY)
    assert trace.fingerprint["path"] == path and trace.num_rolled_back > 0
    plain = hf_model(family)
    for i, prompt in enumerate(PROMPTS[:2]):
        there = heads_slowly(plain, [*prompt, *trace.committed(i)][:-1])
        for layer in range(3):
            for site in VECTORS:
                ours = trace.heads(site, layer, i)
                assert ours.shape == there[site, layer].shape
                assert close(ours, there[site, layer], 1e-5, because=SUMS), (site, layer)
            assert close(trace.pattern(layer, i), there["pattern", layer], 1e-5, because=SUMS), layer
    assert not close(trace.heads("q", 1, 1), there["z", 1], 1e-1, because="the control: sites differ")


def test_rolled_back_rows_are_those_of_their_branch() -> None:
    """What a rejected candidate's row held is what Hugging Face computes of the committed text and the draft."""
    trace, plain = drafted(), hf_model()
    event = trace.events().query("num_rolled_back > 1").iloc[0]
    request, draft = int(event.request_id), list(event.draft_token_ids)
    text = [*PROMPTS[request], *trace.committed(request)][: event.draft_start] + draft
    there = heads_slowly(plain, text)
    rows = trace.rows(request, "rolled_back").query(f"step == {event.step}")
    assert len(rows) and rows.token_id.tolist() == draft[event.num_accepted :][: len(rows)]
    for site in VECTORS:
        ours = trace.vectors(site, 2, rows)
        assert close(ours, there[site, 2][rows.position.tolist()], 1e-5, because=SUMS), site
    for weights, position in zip(trace.pattern_rows(2, rows), rows.position, strict=True):
        assert weights.shape == (4, position + 1)
        assert close(weights, there["pattern", 2][:, position, : position + 1], 1e-5, because=SUMS)
    committed = trace.heads("z", 2, request)[rows.position.tolist()[:1]]
    assert not close(trace.vectors("z", 2, rows[:1]), committed, 1e-2, because="the control: the branches differ")


def test_a_sliding_window_hides_what_has_left_it() -> None:
    trace = cp.run(loaded("gemma3", window=8), PROMPTS[2:3], **SMALL, capture=captured(("pattern",)))
    there = heads_slowly(hf_model("gemma3", window=8), [*PROMPTS[2], *trace.committed(0)][:-1])
    for layer in range(3):
        assert close(trace.pattern(layer, 0), there["pattern", layer], 1e-5, because=SUMS)
    slides = [bool((trace.pattern(layer, 0)[:, 40, :30] == 0).all()) for layer in range(3)]
    assert True in slides and False in slides


@pytest.mark.parametrize(
    ("path", "dtype"), [("plain", torch.bfloat16), ("plain", torch.float32), ("bridge", torch.bfloat16)], ids=str
)
def test_a_deterministic_request_has_the_oracles_heads(path: str, dtype: torch.dtype) -> None:
    """D1 and D2 hold for what heads held: under traffic and a drafter, with requests that come late, bit for bit."""
    settings = dict(**FEW, capture=captured(EVERY, "STC"), path=path)
    model = loaded("llama", dtype)
    late = [cp.Request(PROMPTS[1], arrival_step=5), cp.Request(PROMPTS[4], is_deterministic=True, arrival_step=3)]
    trace = cp.run(model, [PROMPTS[0], *late, PROMPTS[2]], **settings, deterministic=[0], drafter=cp.drafters.NGram())
    oracle = cp.reference(model, [PROMPTS[0], PROMPTS[4]], **settings)
    for ours, theirs in ((0, 0), (2, 1)):
        assert trace.digest(ours) == oracle.digest(theirs)
        for site in VECTORS:
            assert bitwise(trace.heads(site, 1, ours), oracle.heads(site, 1, theirs))
        assert bitwise(trace.pattern(1, ours), oracle.pattern(1, theirs))
    replayed = cp.verify(trace, progress=False)
    assert replayed.is_equal and replayed.num_states == (12 + 14) * 3 * (3 + len(EVERY))


def test_verify_sees_a_changed_pattern() -> None:
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=captured(("pattern",)), deterministic=True)
    assert cp.verify(trace, progress=False).is_equal
    trace.pattern_rows(2, trace.rows(0, "committed"))[9][3, 4] += 1e-6
    assert "position 9: site pattern of layer 2 differs" in cp.verify(trace, progress=False).first_difference


def test_an_early_exit_holds_nothing_above_it() -> None:
    trace = drafted()
    rows = trace.rows(0)
    early = rows[rows.num_layers == 2]
    assert len(early) and bool(torch.isfinite(trace.vectors("z", 1, early)).all())
    assert all(bool(weights.isfinite().all()) for weights in trace.pattern_rows(1, early))
    with pytest.raises(ValueError, match="the drafter stopped after layer 1, so there is no state at layer 2"):
        trace.vectors("z", 2, early)
    with pytest.raises(ValueError, match="the drafter stopped after layer 1"):
        trace.pattern_rows(2, early)


def test_heads_by_the_same_filters() -> None:
    wanted = dict(layers=(0, 2), positions=(3, 4, 5), phases=("verify",), dtype="bfloat16")
    few = cp.run(loaded(), PROMPTS[1:2], **SMALL, capture=captured(EVERY, **wanted), drafter=EARLY)
    all_of_it = cp.run(loaded(), PROMPTS[1:2], **SMALL, capture=captured(EVERY), drafter=EARLY)
    rows = few.rows(0)
    kept = rows[rows.state_index >= 0]
    assert set(kept.position) == {3, 4, 5} and set(kept.phase) == {"verify"}
    assert set(kept.status) == {"committed", "rolled_back"} and few.store.layers == (0, 2)
    for site in VECTORS:
        assert bitwise(few.vectors(site, 2, kept), all_of_it.vectors(site, 2, kept).bfloat16())
    for a, b in zip(few.pattern_rows(2, kept), all_of_it.pattern_rows(2, kept), strict=True):
        assert bitwise(a, b.bfloat16())
    with pytest.raises(ValueError, match="was not kept; capture filters were positions="):
        few.pattern(2, 0)
    with pytest.raises(ValueError, match="layer 1 was not captured"):
        few.heads("q", 1, 0)


def test_heads_survive_a_save(tmp_path: Path) -> None:
    trace = cp.run(loaded(), [cp.Request(PROMPTS[0], cp.SamplingParams(n=2, temperature=1.0))], **SMALL,
                   capture=captured(EVERY, "S"), drafter=EARLY)  # fmt: skip
    again = cp.load_trace(trace.save(tmp_path), model=loaded())
    for i in range(2):  # the second shares the first one's prompt rows
        assert again.digest(i) == trace.digest(i) and trace.pattern(0, i).shape == (4, 24, 24)
        assert bitwise(again.pattern(1, i), trace.pattern(1, i))
        assert bitwise(again.heads("v", 1, i), trace.heads("v", 1, i))
    held = cp.analysis.to_activation_cache(again, 0)
    assert bitwise(held["blocks.1.attn.hook_pattern"][0], trace.pattern(1, 0))
    assert held["z", 1].shape == (1, 24, 4, 8) and held["k", 1].shape == (1, 24, 2, 8)


def test_nothing_is_kept_where_nothing_was_asked_for() -> None:
    """The default capture listens to what it did before, runs on the twin, and has the same fingerprint."""
    model, config = loaded(), EngineConfig()
    recorder = Recorder(model, cp.CaptureConfig(), (0, 1, 2), cp.lenses.LogitLens(), {0: (1, 2)})
    assert {site for site, _ in recorder.wanted()} == {"pre", "S", "T", "C"}
    plain = cp.run(model, PROMPTS[:1], **SMALL)
    heard = cp.run(model, PROMPTS[:1], **SMALL, capture=captured(VECTORS, "STCZ"))
    assert plain.fingerprint == heard.fingerprint and plain.fingerprint["path"] == "plain"
    assert plain.store.heads == () and bitwise(plain.states("S", 2, 0), heard.states("S", 2, 0))
    pairs = [("S", 1), *((site, layer) for layer in range(3) for site in VECTORS)]
    before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.modules())
    with model.capturing(pairs, lambda *heard: None):
        pass
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.modules()) == before
    assert make_plan(model, PROMPTS[:1], vars(config)).path_reason.startswith("plain")


def test_a_pattern_depends_on_no_other_request() -> None:
    """Nor does listening to it change the bits of the rest; in a run of one request, or of five."""
    settings = dict(**FEW, capture=captured(("pattern",), "ST"), deterministic=True)
    alone, among = cp.run(loaded(), PROMPTS[:1], **settings), cp.run(loaded(), PROMPTS, **settings)
    assert bitwise(alone.pattern(2, 0), among.pattern(2, 0))
    unheard = cp.run(loaded(), PROMPTS[:1], **FEW, capture="ST", deterministic=True)
    assert bitwise(unheard.states("S", 2, 0), alone.states("S", 2, 0))


def test_a_layer_that_attends_twice_has_no_pattern() -> None:
    with pytest.raises(ModelError, match="attends more than once, so no single pattern is there"):
        cp.run(cp.load_model(tiny_family("diffllama")), PROMPTS[:1], **SMALL, capture=captured(("pattern",)))


def test_heads_of_a_joint_projection_are_found_by_their_values() -> None:
    """GPT-2 has all queries first, GPT-NeoX those of each head."""
    assert {family: loaded(family).joints[1].groups for family in ("gpt2", "gpt-neox")} == {"gpt2": 1, "gpt-neox": 4}
    assert not loaded().joints and all(choose_path(loaded(f), heads=VECTORS)[0] is loaded(f) for f in ("gpt2", "llama"))


@pytest.mark.parametrize("changed", [lambda k, v: (k, v.flip(1)), lambda k, v: (2 * k, v)], ids=["values", "keys"])
def test_a_joint_projection_with_other_values_is_left_to_the_bridge(changed, monkeypatch: pytest.MonkeyPatch) -> None:
    real = watch._WritingProbe.update
    monkeypatch.setattr(watch._WritingProbe, "update", lambda self, k, v, *more: real(self, *changed(k, v), *more))
    model = cp.load_model(hf_model("gpt2"))
    chosen, reason = choose_path(model, heads=("k",))
    assert isinstance(chosen, BridgeLM) and "has no module for blocks.0.attn.hook_k" in reason
    assert choose_path(model)[0] is model  # for all else it serves


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown site of heads 'w'; choose one of q, k, v, z, pattern"):
        captured("w")
    assert captured("z").heads == ("z",) and captured(("z", "q")).heads == ("q", "z")
    trace = drafted("plain", ("z",))
    with pytest.raises(ValueError, match=r"site q was not captured; this run kept S, z; run it with .*heads=\('q',\)"):
        trace.heads("q", 0, 0)
    with pytest.raises(ValueError, match="site pattern was not captured"):
        trace.pattern(0, 0)
    with pytest.raises(ValueError, match="unknown site 'S' of heads"):
        trace.heads("S", 0, 0)
    with pytest.raises(ValueError, match="ask for them with pattern_rows"):
        drafted().heads("pattern", 0, 0)
    rows = cp.kv_snapshot(loaded(), PROMPTS[0])
    cut = cp.run(loaded(), [cp.Request(PROMPTS[0], cached=rows)], **SMALL, capture=captured(("pattern",)))
    assert cut.pattern_rows(0, cut.rows(0, "committed"))[0].shape == (4, 5)
    with pytest.raises(ValueError, match="request 0 has rows at positions 4 to 23 alone"):
        cut.pattern(0, 0)


def test_a_thinking_model_gives_vectors_and_refuses_patterns() -> None:
    model = cp.load_model("coinflip-thinking")
    prompt = list(range(5, 13))
    trace = cp.run(
        model, [prompt], capture=captured(VECTORS, "STC"), max_new_tokens=8, deterministic=True, progress=False
    )
    assert trace.heads("z", 1, 0).shape[1:] == model.head_shape and cp.verify(trace, progress=False).is_equal
    with pytest.raises(ModelError, match="attends without forming a pattern"):
        cp.run(model, [prompt], capture=captured(("pattern",)), progress=False)


def test_a_refused_pattern_leaves_no_listener() -> None:
    with pytest.raises(ModelError, match="no layer 99"), loaded().capturing([("pattern", 0), ("pattern", 99)], print):
        pass
    assert not loaded().attention_listeners
