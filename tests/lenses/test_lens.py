"""Lenses: the contract that each one must keep, and the logit lens against TransformerLens' own."""

import pytest
import torch
from transformer_lens.tools.analysis import logit_lens

import cacheprobe as cp
from cacheprobe.models.hf.lm import HuggingFaceLM
from cacheprobe.ops.equality import close
from cacheprobe.trace.self_checks import CaptureError
from tests.tiny import PROMPTS, QUICK_FAMILIES, SMALL, loaded


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_readings_equal_transformer_lens(family: str) -> None:
    """Every layer's log-probability of the committed token and its rank, on the finished text."""
    model = loaded(family)
    trace = cp.run(model, PROMPTS[:1], **SMALL)
    text = torch.tensor([PROMPTS[0] + trace.committed(0)])
    theirs = logit_lens(model.bridge, text[:, :-1], positions=None, targets=text[:, 1:], return_type="log_probs")
    labels = list(theirs.labels)
    values, ranks = theirs.values[..., 0], theirs.rank_trajectory()
    hypotheses = trace.hypotheses()
    for layer in range(model.n_layers):
        row = next(i for i, label in enumerate(labels) if label in (f"{layer + 1}_pre", f"{layer}_post", "final_post"))
        ours = hypotheses.query(f"layer == {layer} and status == 'committed'").sort_values("position")
        at = ours.position.tolist()
        mine = torch.tensor(ours.committed_logprob_nats.to_numpy())
        assert close(mine, values[row, 0, at], 1e-5, because="products with other numbers of rows")
        assert ours["rank"].tolist() == ranks[row, 0, at].tolist()


def test_every_run_checks_the_last_layer_and_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are in the trace with their tolerance, and they fail where they should."""
    trace = cp.run(loaded(), PROMPTS, **SMALL, deterministic=0.5)
    names = {check["name"]: check for check in trace.meta["checks"]}
    assert len(names) == 2 and all(check["num_rows"] > 0 and check["worst"] <= 1 for check in names.values())
    model = loaded()
    right = HuggingFaceLM.read_out
    monkeypatch.setattr(HuggingFaceLM, "read_out", lambda self, states: right(self, states) * 1.001)
    with pytest.raises(CaptureError, match="last layer's Z"):
        cp.run(model, PROMPTS, **SMALL, drafter=cp.drafters.FastPath())
    monkeypatch.setattr(HuggingFaceLM, "read_out", right)
    hook = ("blocks.1.hook_mlp_out", lambda value, hook: value + 1e-3)
    with pytest.raises(CaptureError, match="resid_post = resid_pre"):
        with model.bridge.hooks(fwd_hooks=[("blocks.1.hook_out", lambda value, hook: value + 1e-3)]):
            cp.run(model, PROMPTS, **SMALL)
    with model.bridge.hooks(fwd_hooks=[hook]):
        assert len(cp.run(model, PROMPTS, **SMALL).requests) == 5  # an edit of C reaches the stream, so the sum holds
