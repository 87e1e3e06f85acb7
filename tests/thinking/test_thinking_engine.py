"""Thinking States models in the loop: thoughts are as deterministic, and as provisional, as the tokens they follow."""

from functools import cache

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.hook_names import resid_pre_name
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.cache import cache_memory
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.models.thinking.rounds import Rounds
from cacheprobe.tasks import CoinFlip, word_tokenizer
from tests.thinking.test_thinking import text, tiny
from tests.twins.thinking_slowly import read_slowly

PROMPTS = [text(8), text(17, 1), [5] * 20, text(4, 2), text(13, 3)]
RUN = dict(window=4, group=2, capacity=64, prefill_chunk=8, max_new_tokens=10, progress=False)
FREE = cp.SamplingParams(stop_token_ids=())


@cache
def lm(think_while_decoding: bool = False) -> ThinkingLM:
    """One for all tests: its shapes are tried once."""
    return ThinkingLM(tiny(think_while_decoding=think_while_decoding), name="thinker")


@pytest.mark.parametrize("while_decoding", [False, True])
@pytest.mark.parametrize("drafter", [None, cp.drafters.EarlyExit(layer=1)])
def test_deterministic_thoughts_are_the_oracles(while_decoding: bool, drafter) -> None:
    """D1 and D2: tokens, log-probabilities, states and thoughts, beside other requests, arrivals and rollbacks."""
    model = lm(think_while_decoding=while_decoding)
    requests = [cp.Request(p, FREE, is_deterministic=i != 1, arrival_step=3 * i) for i, p in enumerate(PROMPTS)]
    trace = cp.run(model, requests, drafter=drafter, max_batch=3, **RUN)
    oracle = cp.reference(model, requests, **RUN)
    for i in (0, 2, 3, 4):
        assert trace.digest(i) == oracle.digest(i)
    if drafter is not None:
        assert trace.committed(1) == oracle.committed(1)  # D3
    assert cp.verify(trace, progress=False).is_equal


def test_thoughts_are_those_of_one_chunk_after_another() -> None:
    model = lm(think_while_decoding=True)
    trace = cp.run(model, PROMPTS, deterministic=True, drafter=cp.drafters.EarlyExit(layer=1), sampling=FREE, **RUN)
    table = trace.thoughts()
    for i, prompt in enumerate(PROMPTS):
        said = [*prompt, *trace.committed(i)][:-1]  # the newest token was never read
        want = read_slowly(model.model, said, len(prompt)).thoughts
        mine = table[(table.request_id == i) & (table.status == "committed")].sort_values("chunk")
        assert [tuple(ids) for ids in mine.token_ids] == want
        assert mine.chunk.tolist() == list(range(len(want))) and (mine.end == mine.start + 3).all()


def test_a_draft_that_is_rolled_back_takes_its_thoughts_with_it() -> None:
    model = lm(think_while_decoding=True)
    trace = cp.run(model, PROMPTS, deterministic=True, drafter=cp.drafters.EarlyExit(layer=1), sampling=FREE, **RUN)
    table = trace.thoughts()
    lost = table[table.status == "rolled_back"]
    assert len(lost) > 3 and set(lost.phase) == {"decode", "verify"}
    rows = trace.row_table.set_index("row")
    assert (rows.loc[table.row, "status"].to_numpy() == table.status.to_numpy()).all()
    assert (rows.loc[table.row, "position"].to_numpy() == table.end.to_numpy()).all()
    assert trace.thought_states.shape == (len(table), 4, 32)
    for thought in table.head(5).itertuples():
        again = model.state_of(tuple(thought.token_ids))
        assert torch.equal(trace.thought_states[thought.thought], again)


def test_activations_of_t_and_c_are_those_captured_while_it_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, of rolled-back thoughts too. Live, T's last call has every token of the thought but the newest."""
    model = lm(think_while_decoding=True)
    names = [n for n in model.model.hook_dict if n.startswith("thinking.") and "pattern" not in n]
    live: dict[bytes, dict[str, torch.Tensor]] = {}
    think = Rounds._think

    def captured_thinking(self: Rounds, end, hidden: torch.Tensor):
        captured: dict[str, torch.Tensor] = {}
        hooks = [(name, lambda value, hook: captured.update({hook.name: value[0]})) for name in names]
        with self.model.hooks(fwd_hooks=hooks):
            thought = think(self, end, hidden)
        live[hidden.numpy().tobytes()] = captured
        return thought

    monkeypatch.setattr(Rounds, "_think", captured_thinking)
    trace = cp.run(model, PROMPTS, deterministic=True, drafter=cp.drafters.EarlyExit(layer=1), sampling=FREE, **RUN)
    monkeypatch.undo()
    table = trace.thoughts()
    assert {"committed", "rolled_back"} <= set(table.status)
    for thought in table.itertuples():
        insides = cp.analysis.thought_activations(trace, thought.thought)
        hidden, count = insides["thinking.hook_in"][: model.config.chunk], len(thought.token_ids)
        for name, value in live[hidden.numpy().tobytes()].items():
            is_read_out = len(value) == model.config.max_thought + 1
            known = count if is_read_out else model.config.chunk + count - 1
            assert torch.equal(insides[name][:known], value[:known]), name
        said = insides["thinking.hook_logits"].log_softmax(-1)[range(count), list(thought.token_ids)]
        assert said.tolist() == list(thought.logprobs_nats)
        assert torch.equal(insides["compression.hook_state"], trace.thought_states[thought.thought])


def test_insides_that_cannot_be_told_are_refused() -> None:
    model = lm()
    trace = cp.run(model, PROMPTS[:2], deterministic=True, sampling=FREE, **RUN)
    with pytest.raises(KeyError, match=r"no thought 99 in this trace; it has thoughts 0 to \d+"):
        cp.analysis.thought_activations(trace, 99)
    with pytest.raises(ValueError, match="the trace is of weights"):
        cp.analysis.thought_activations(trace, 0, model=ThinkingLM(tiny(seed=5), name="another"))
    turned = [("thinking.hook_logits", lambda value, hook: -value)]
    with (
        model.model.hooks(fwd_hooks=turned),
        pytest.raises(ValueError, match=r"thought 0 of request 0 .* and thinker thinks .* there; give the model that"),
    ):
        cp.analysis.thought_activations(trace, 0)
    bare = cp.run(model, PROMPTS[:2], deterministic=True, sampling=FREE, capture=None, **RUN)
    with pytest.raises(ValueError, match="site S was not captured; this run kept no states"):
        cp.analysis.thought_activations(bare, 0)


def test_prompt_thoughts_alone_while_the_answer_is_written() -> None:
    """The paper's models think while the prompt is read; an unfinished last chunk writes no thought."""
    trace = cp.run(lm(), PROMPTS, deterministic=[0, 2], sampling=FREE, **RUN)
    table = trace.thoughts()
    assert set(table.phase) == {"prefill"} and set(table.status) == {"committed"}
    assert table.groupby("request_id").size().tolist() == [len(prompt) // 4 for prompt in PROMPTS]


def test_preemption_and_shared_prompts_keep_thoughts() -> None:
    model = lm(think_while_decoding=True)
    twice = cp.SamplingParams(n=2, temperature=1.0, stop_token_ids=())
    requests = [cp.Request(PROMPTS[2], twice, is_deterministic=True), *PROMPTS[:2]]
    settings = {**RUN, "deterministic": True, "sampling": FREE}
    trace = cp.run(model, requests, max_kv_tokens=56, **settings)
    assert trace.meta["preemptions"]
    oracle = cp.reference(model, requests, **settings)
    assert [trace.digest(i) for i in range(4)] == [oracle.digest(i) for i in range(4)]
    table = trace.thoughts()
    prompt_thoughts = [table[(table.request_id == i) & (table.end < 20)].token_ids.map(tuple).tolist() for i in (0, 1)]
    assert prompt_thoughts[0] == prompt_thoughts[1] and len(prompt_thoughts[0]) == 5


def test_thoughts_stand_among_the_hypotheses() -> None:
    trace = cp.run(lm(), PROMPTS[:2], deterministic=True, sampling=FREE, **RUN)
    table, thoughts = trace.hypotheses(), trace.thoughts()
    mine = table[table.site == "thought"]
    assert len(mine) == len(thoughts) and set(mine.layer) == {2} and set(mine.lens) == {"thinking block"}
    first = {i: trace.committed(i)[0] for i in (0, 1)}
    assert all(row.committed_token_id == first[row.request_id] for row in mine.itertuples())
    spoken = thoughts.set_index("row").token_ids.map(len)
    for row in mine.itertuples():
        if spoken[row.row] == 1:
            assert row.agrees is not True and row.agrees is not False
        else:
            assert row.agrees == (row.token_id == row.committed_token_id)
    assert len(cp.analysis.lens_readings(trace)) + len(mine) == len(table)
    assert set(cp.analysis.prediction_depth(trace).row) <= set(cp.analysis.lens_readings(trace).row)


def test_a_stored_run_has_its_thoughts(tmp_path) -> None:
    model = lm(think_while_decoding=True)
    trace = cp.run(model, PROMPTS, deterministic=True, sampling=FREE, **RUN)
    loaded = cp.load_trace(trace.save(tmp_path / "run"), model)
    assert torch.equal(loaded.thought_states, trace.thought_states)
    assert loaded.thoughts().text.tolist() == trace.thoughts().text.tolist()
    assert [loaded.digest(i) for i in range(5)] == [trace.digest(i) for i in range(5)]
    assert cp.verify(loaded, model, progress=False).is_equal


def test_another_thought_is_a_difference() -> None:
    model = lm()
    trace = cp.run(model, PROMPTS[:2], deterministic=True, sampling=FREE, **RUN)
    trace.thought_table.at[0, "token_ids"] = [2, 1]
    found = cp.verify(trace, progress=False)
    assert "thought 0 is" in found.first_difference


def test_a_pattern_hook_of_the_user_s_is_called_in_a_run() -> None:
    """Attention request by request forms no pattern; where one is asked for, the pass forms it for all requests."""
    model, seen = lm(), []
    settings = dict(max_new_tokens=2, capacity=64, window=4, group=4, progress=False)
    plain = cp.run(model, [[3, 4, 5, 6, 7]], deterministic=True, **settings)
    with model.model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", lambda value, hook: seen.append(value.shape))]):
        hooked = cp.run(model, [[3, 4, 5, 6, 7]], deterministic=True, **settings)
    assert seen and hooked.committed(0) == plain.committed(0)


def test_other_models_say_that_they_do_not_think() -> None:
    from tests.tiny import SMALL, loaded

    trace = cp.run(loaded(), [[1, 2, 3]], **SMALL)
    with pytest.raises(ValueError, match="wrote no thoughts"):
        trace.thoughts()


def test_a_window_that_thoughts_cannot_keep_step_with_is_refused() -> None:
    with pytest.raises(ModelError, match="set window=8"):
        cp.run(lm(think_while_decoding=True), PROMPTS, **{**RUN, "window": 6})
    cp.run(lm(), PROMPTS[:1], **{**RUN, "window": 6})


def test_text_is_padded_to_whole_chunks_and_strangers_are_refused() -> None:
    task = CoinFlip(people=3)
    tokenizer = word_tokenizer(task.vocabulary())
    model = ThinkingLM(tiny(d_vocab=len(tokenizer)), tokenizer, "coin")
    trace = cp.run(model, task.examples(n=3, seed=0), deterministic=True, progress=False, max_new_tokens=3)
    assert all(request.num_prompt_tokens % 4 == 0 for request in trace.requests)
    table = trace.thoughts()
    last = table.groupby("request_id").true_state.last().tolist()
    assert last == [example.states[-1] for example in task.examples(n=3, seed=0)]
    with pytest.raises(ModelError, match="has no tokenizer"):
        cp.run(lm(), ["A coin"])


def test_sixteen_bits() -> None:
    """What is masked stays finite where float32's lowest number would round to minus infinity."""
    dtype = torch.float16
    model = ThinkingLM(tiny().to(dtype))
    rows = model.new_cache(1, 16)
    memory = cache_memory(model.config, StagedCache(rows, [0], [0], 4))
    bias = memory(0, *torch.zeros(2, 1, 2, 4, 16, dtype=dtype))[2]
    assert bias.dtype == dtype and bool(torch.isfinite(bias).all()) and float(bias.min()) < -60_000
    trace = cp.run(model, PROMPTS[:2], deterministic=True, sampling=FREE, **RUN)
    oracle = cp.reference(model, PROMPTS[:2], deterministic=True, sampling=FREE, **RUN)
    assert [trace.digest(i) for i in (0, 1)] == [oracle.digest(i) for i in (0, 1)]


@pytest.mark.parametrize("changes", [{}, {"feeds_back": False}, {"thinks": False}], ids=str)
def test_a_block_reads_what_the_block_before_wrote_unless_a_state_is_added(changes: dict[str, bool]) -> None:
    """So an ActivationCache of captured states names the input of every block but that one."""
    model = ThinkingLM(tiny(**changes))
    l_in, seen = model.config.l_in, dict[tuple[str, int], torch.Tensor]()
    sites = [*(("S", layer) for layer in range(model.n_layers)), *(("pre", layer) for layer in range(model.n_layers))]
    rows = model.new_cache(1, 64)
    rows.prompt_lengths[rows.allocate()] = len(PROMPTS[0])
    with model.capturing(sites, lambda site, layer, value: seen.update({(site, layer): value[0].clone()})):
        model.forward(torch.tensor([PROMPTS[0]]), rows, [0], [0])
    named = model.to_activation_cache({key: value for key, value in seen.items() if key[0] == "S"})
    assert (resid_pre_name(l_in) in named.keys()) == (model.injected_layers == ()) == bool(changes)
    assert all(torch.equal(named["resid_pre", n][0], seen["pre", n]) for n in range(1, model.n_layers) if n != l_in)
    assert torch.equal(seen["pre", l_in], seen["S", l_in - 1]) == bool(changes)
