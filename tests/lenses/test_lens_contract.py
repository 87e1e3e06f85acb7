"""The contract that every registered lens keeps, and its readings of S, T and C in a trace."""

import inspect
from typing import Any

import pandas as pd
import pytest
import torch
from transformer_lens.tools.analysis import logit_readout

import cacheprobe as cp
from cacheprobe.core.registry import available, find
from cacheprobe.lenses.base import Lens, LensError, require_readable, unembedding_sha256
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.lm import HuggingFaceLM
from cacheprobe.ops.equality import bitwise, close
from tests.tiny import PROMPTS, SMALL, loaded, perturbed

LENSES = [*available("lenses")]


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    """A run with rollbacks, so that states of every status are there to read."""
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


def shaken(name: str, model: CachedLM) -> Lens:
    """A lens of this kind that is no longer what it was before its training."""
    lens = available("lenses")[name].fresh(model)
    generator = torch.Generator().manual_seed(3)
    for numbers in (value for value in vars(lens).values() if isinstance(value, torch.Tensor)):
        numbers += 0.05 * torch.randn(numbers.shape, generator=generator)
    return lens


@pytest.mark.parametrize("name", LENSES)
def test_last_layer_is_the_models_own_output(name: str, trace: cp.Trace) -> None:
    """Logits for each vector, in the model's dtype, normalised when read; the last layer says what the model says."""
    model = loaded()
    lens = shaken(name, model)
    assert isinstance(lens, Lens) and lens.name == name and inspect.getdoc(type(lens)) and "S" in lens.sites
    states = torch.cat([trace.states("S", layer, 0) for layer in range(3)])
    layers = torch.arange(3).repeat_interleave(len(states) // 3)
    logits = lens.logits(model, states, layers)
    assert logits.shape == (len(states), model.d_vocab) and logits.dtype == model.dtype
    with torch.inference_mode():
        own = model.bridge.forward(torch.tensor([PROMPTS[0] + trace.committed(0)[:-1]]), return_type="logits")[0]
    assert close(logits[layers == 2], own, 1e-5, because="products with other numbers of rows")


@pytest.mark.parametrize("name", LENSES)
def test_a_row_is_batch_invariant(name: str, trace: cp.Trace) -> None:
    """All layers of a window in one product: as each layer by itself, up to the order of sums."""
    model = loaded()
    lens = shaken(name, model)
    by_layer = [trace.states("S", layer, 0) for layer in range(3)]
    together = lens.logits(model, torch.stack(by_layer, 1).flatten(0, 1), torch.arange(3).repeat(len(by_layer[0])))
    for layer, states in enumerate(by_layer):
        alone = lens.logits(model, states, torch.full((len(states),), layer))
        assert close(together[layer::3], alone, 1e-5, because="products with other numbers of rows")


@pytest.mark.parametrize("name", LENSES)
def test_a_window_of_all_layers_is_one_product(name: str, trace: cp.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify window of one request, every layer of it: the unembedding runs once."""
    model = loaded()
    lens = shaken(name, model)
    rows = trace.rows(0)
    window = rows[(rows.phase == "verify") & (rows.step == rows[rows.phase == "verify"].step.iloc[0])]
    calls: list[int] = []
    for name in ("read_out", "read_tokens"):  # the second stores no logits; None where that cannot be done
        right = getattr(HuggingFaceLM, name)

        def counting(self: HuggingFaceLM, states: torch.Tensor, *of: object, right: Any = right) -> Any:
            made = right(self, states, *of)
            calls.extend([len(states)] * (made is not None))
            return made

        monkeypatch.setattr(HuggingFaceLM, name, counting)
    table = cp.analysis.read_states(trace, lens, rows=window)
    assert len(window) > 1 and len(table) == 3 * len(window) and len(calls) == 1


@pytest.mark.parametrize("name", LENSES)
def test_what_cannot_be_read_is_named(name: str, trace: cp.Trace) -> None:
    lens = shaken(name, loaded())
    with pytest.raises(LensError, match=r"unknown layer 3 .* has layers 0 to 2"):
        cp.analysis.read_states(trace, lens, layers=[0, 3])
    with pytest.raises(LensError, match=r"unknown layer -1"):
        cp.analysis.read_states(trace, lens, layers=[-1])
    with pytest.raises(LensError, match=r"unknown site 'Q'.*S, T, C"):
        cp.analysis.read_states(trace, lens, "Q")
    for site in sorted({"S", "T", "C"} - set(lens.sites)):
        with pytest.raises(LensError, match=f"the {name} lens reads .*not {site}"):
            cp.analysis.read_states(trace, lens, site)


@pytest.mark.parametrize("name", LENSES)
def test_a_foreign_model_is_refused(name: str) -> None:
    """A lens with numbers of its own was made for one unembedding; wherever it is used it asks for that one."""
    foreign = perturbed(loaded(), 1e-3)
    lens = shaken(name, loaded())
    if not [value for value in vars(lens).values() if isinstance(value, torch.Tensor)]:
        lens.check(foreign)  # it has no numbers: it reads through whatever unembedding the model has
        return
    for use in (
        lambda: lens.check(foreign),
        lambda: cp.run(foreign, PROMPTS[:1], **SMALL, lens=lens),
        lambda: cp.drafters.EarlyExit(0, lens).check(foreign),
    ):
        with pytest.raises(
            LensError, match=rf"{unembedding_sha256(loaded())[:12]}.*{unembedding_sha256(foreign)[:12]}"
        ):
            use()


@pytest.mark.parametrize("broken", [cp.lenses.LogitLens, "logit", object()])
def test_what_is_no_lens_is_refused(broken: Any) -> None:
    with pytest.raises(LensError, match="a lens is an object such as"):
        require_readable(broken, loaded(), "S", [0])


def test_stored_states_read_as_they_were_read_in_the_run(trace: cp.Trace) -> None:
    """Every status, bit for bit: what a lens says does not depend on when it is asked."""
    again, then = cp.analysis.read_states(trace, cp.lenses.LogitLens()), trace.hypotheses()
    assert set(then.status) == {"committed", "superseded"}
    assert bitwise(torch.tensor(again.entropy_nats.to_numpy()), torch.tensor(then.entropy_nats.to_numpy()))
    pd.testing.assert_frame_equal(again, then, check_exact=True)


@pytest.mark.parametrize("site", ["T", "C"])
def test_sites_equal_transformer_lens(site: str, trace: cp.Trace) -> None:
    """Log-probability and rank of the committed token at T and C, against TransformerLens; test_lens.py has S."""
    table = cp.analysis.read_states(
        trace, cp.lenses.LogitLens(), site, rows=trace.rows(4, "committed").query("position >= 6")
    )
    assert set(table.site) == {site}
    known = table[table.committed_token_id.notna()]
    vectors = torch.stack([trace.vectors(site, r.layer, [r.row])[0] for r in known.itertuples()])
    targets = torch.tensor(known.committed_token_id.astype(int).to_numpy())
    theirs = logit_readout(loaded().bridge, vectors, targets=targets, return_type="log_probs")
    mine = torch.tensor(known.committed_logprob_nats.to_numpy())
    assert close(mine, theirs.values[..., 0], 1e-5, because="products with other numbers of rows")
    assert known["rank"].tolist() == theirs.target_ranks[..., 0].tolist()


def test_a_trace_of_other_weights_is_refused(trace: cp.Trace) -> None:
    with pytest.raises(ValueError, match="the trace is of weights"):
        cp.analysis.read_states(trace, cp.lenses.LogitLens(), model=perturbed(loaded(), 1e-3))


class Doubled(LogitLens):
    """Has logits of its own, and a `to_residual` of the class that it is made from."""

    name = "doubled"

    def logits(self, model: CachedLM, states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        return 2 * super().logits(model, states, layers)


class Halved(Doubled):
    """Changes what is read, of a lens with logits of its own."""

    name = "halved"

    def to_residual(self, states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        return states


def test_logits_of_a_subclass_are_read() -> None:
    """A lens whose logits are more than the model's output at some residual stream is asked for its logits."""
    doubled, halved = (cp.run(loaded(), PROMPTS[:1], **SMALL, lens=lens).hypotheses() for lens in (Doubled(), Halved()))
    assert (doubled.entropy_nats == halved.entropy_nats).all()
    plain, doubled = (
        cp.run(loaded(), PROMPTS[:1], **SMALL, lens=lens).hypotheses() for lens in (LogitLens(), Doubled())
    )
    assert (doubled.entropy_nats < plain.entropy_nats).all()


@pytest.mark.parametrize("name", [name for name in LENSES if hasattr(find("lenses", name), "to_residual")])
def test_logits_are_read_out_at_the_residual(name: str) -> None:
    """What lets a lens be read without stored logits."""
    model = loaded()
    lens = shaken(name, model)
    states, layers = torch.randn(6, model.d_model), torch.arange(6) % model.n_layers
    assert bitwise(lens.logits(model, states, layers), model.read_out(lens.to_residual(states, layers)))
