"""The thought lens: T over other layers, against one chunk alone, and the thought itself at the layer that T reads."""

import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.base import LensError
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.ops.equality import close
from cacheprobe.ops.readout import read_logits
from tests.thinking.test_thinking import tiny
from tests.thinking.test_thinking_engine import FREE, PROMPTS, RUN, lm
from tests.tiny import loaded
from tests.twins.lenses_slowly import thought_slowly


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    model = lm(think_while_decoding=True)
    return cp.run(model, PROMPTS, deterministic=True, drafter=cp.drafters.EarlyExit(layer=1), sampling=FREE, **RUN)


def test_at_its_own_layer_it_is_the_thought(trace: cp.Trace) -> None:
    """Every thought of the run, rolled-back ones too, from the kept states of the block below l_out."""
    table = cp.analysis.read_thoughts(trace)
    own = table[table.layer == trace.model.config.l_out - 1]
    thoughts = trace.thoughts().set_index("thought")
    assert len(own) == len(thoughts) and own.is_thought.all() and {"rolled_back", "committed"} <= set(own.status)
    assert own.said.tolist() == thoughts.loc[own.thought].said.tolist()
    mine, theirs = (torch.tensor(t.to_numpy()) for t in (own.entropy_nats, thoughts.loc[own.thought].entropy_nats))
    assert close(mine, theirs, 1e-5, because="another number of chunks in a product")
    assert not table[table.layer == 0].is_thought.all()


def test_other_layers_are_read_as_a_chunk_alone_is(trace: cp.Trace) -> None:
    model = trace.model
    layers = torch.stack([trace.states("S", layer, 0)[:8].unflatten(0, (2, 4)) for layer in (0, 1)], 1).flatten(0, 1)
    read = cp.lenses.ThoughtLens().read(model, layers)
    for chunk, ids, first in zip(layers, read.token_ids.tolist(), read.first_logits, strict=True):
        said, logits = thought_slowly(model, chunk)
        assert ids[: len(said)] == said
        assert close(
            first[first > -1e30], logits[logits > -1e30], 1e-5, because="another number of chunks in a product"
        )
    table = cp.analysis.read_thoughts(trace, layers=[0]).query("request_id == 0 and status == 'committed' and end < 8")
    assert table.sort_values("end").token_ids.tolist() == [thought_slowly(model, layers[i])[0] for i in (0, 2)]


def test_layers_that_did_not_run_have_no_line(trace: cp.Trace) -> None:
    table = cp.analysis.read_thoughts(trace)
    lost = set(table[table.layer == 2].thought)
    assert lost < set(table[table.layer == 1].thought)  # the drafter stops after layer 1


def test_what_cannot_be_read_is_named(trace: cp.Trace) -> None:
    with pytest.raises(LensError, match="unknown layer 9"):
        cp.analysis.read_thoughts(trace, layers=[9])
    with pytest.raises(LensError, match="writes no thoughts"):
        cp.lenses.ThoughtLens().check(loaded())
    with pytest.raises(LensError, match=r"chunks of \(4, 32\), got \(3, 32\)"):
        cp.lenses.ThoughtLens().read(trace.model, torch.zeros(1, 3, 32))
    bare = cp.run(trace.model, PROMPTS[:1], sampling=FREE, **RUN, capture="T")
    with pytest.raises(ValueError, match="site S was not captured"):
        cp.analysis.read_thoughts(bare, layers=[1])


def test_the_contract_of_lenses_where_it_speaks_of_chunks(trace: cp.Trace) -> None:
    """Of every layer, the first token is the likeliest, and a trace of other weights is refused: what it says there
    would be no reading of that model."""
    for layer in (0, trace.model.config.l_out - 1):
        read = cp.lenses.ThoughtLens().read(trace.model, trace.states("S", layer, 0)[:8].unflatten(0, (2, 4)))
        assert (read_logits(read.first_logits, read.token_ids[:, 0], 1).target_rank == 0).all()
    foreign = ThinkingLM(tiny(seed=1, think_while_decoding=True), name="thinker")
    with pytest.raises(ValueError, match="the trace is of weights"):
        cp.analysis.read_thoughts(trace, model=foreign)
