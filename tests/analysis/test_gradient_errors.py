"""What `cp.gradients` refuses, each by name and with a remedy."""

from functools import cache
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.passes import EngineError
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.lm import ThinkingLM
from tests.thinking.test_thinking import tiny
from tests.tiny import PROMPTS, SMALL, loaded, perturbed

PROMPT = [5, 17, 3, 44]
OPTIONS: dict[str, Any] = {**SMALL}
METRIC = cp.analysis.logit_difference(7, 11)


def model() -> Any:
    return loaded("llama", torch.float64)


@cache
def traced() -> cp.Trace:
    return cp.run(model(), PROMPTS[:2], drafter=cp.drafters.EarlyExit(layer=1), capture=None, **OPTIONS)


def of_prompt(metric: Any, **options: Any) -> Any:
    return cp.gradients(model(), PROMPT, metric, progress=False, **options)


def of_trace(trace: cp.Trace, **options: Any) -> Any:
    return cp.gradients(model(), trace, METRIC, progress=False, **options)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda logits, text: logits[-1], r"request 0, metric <lambda>: .* one number, got shape \[97\]; end it with"),
        (lambda logits, text: logits[-1, 7].item(), "must return a tensor of one number, got a float"),
        (lambda logits, text: logits[-1, 7].detach(), "does not depend on the logits by differentiable steps"),
        (lambda logits, text: logits[-1, 7] * float("nan"), "returned nan; a gradient needs a finite number"),
        (lambda logits, text: logits[-1, 7] / 0, "returned -?inf; a gradient needs a finite number"),
        (lambda logits, text: torch.ones(1, requires_grad=True), "site S of layer 0 does not exist"),
        (lambda logits, text: (logits[-1, 7] - logits[-1, 7]).abs().sqrt(), "site S of layer 0 has NaN or infinite"),
        (cp.analysis.logit_difference(7, 11, position=4), "request 0: position 4 lies outside its text, .* 0 to 3"),
        (cp.analysis.token_logprob(97), "token ids below 97"),
        (cp.analysis.text_logprob(range(3, 4)), "no token follows at the positions of text_logprob"),
    ],
)
def test_a_metric_without_a_gradient_is_refused(metric: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_prompt(metric)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(sites="SZ"), "unknown site 'Z'; choose one of pre, S, T, C, z"),
        (dict(sites=()), "there is no site; sites are pre, S, T, C, z"),
        (dict(layers=[3]), "layer 3 lies outside the model"),
        (dict(layers=[]), "there is no layer"),
        (dict(request_ids=[0]), "request_ids= chooses requests of a trace"),
    ],
)
def test_a_place_that_is_not_there_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_prompt(METRIC, **options)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([PROMPT, []], "request 1: the prompt is empty"),
        ([PROMPT, [97]], "request 1: token id 97 is outside"),
        ([[1] * 3000], "request 0: 3000 tokens exceed the model's context"),
        ([], "there are no prompts"),
    ],
)
def test_a_prompt_that_cannot_be_fed_is_refused(prompts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cp.gradients(model(), prompts, METRIC, progress=False)


def test_cached_entries_are_refused() -> None:
    request = cp.Request([1, 2, 3, 4], cached=cp.kv_snapshot(model(), [1, 2, 3]))
    with pytest.raises(ValueError, match="request 0 begins with cached keys and values; give its whole prompt"):
        cp.gradients(model(), request, METRIC, progress=False)
    trace = cp.run(model(), [request], capture=None, **OPTIONS)
    with pytest.raises(ValueError, match="began from a KVSnapshot or had interventions"):
        of_trace(trace)


def test_a_run_with_interventions_is_refused() -> None:
    zero = cp.interventions.zero(request_id=0, site="C", layer=1)
    with pytest.raises(ValueError, match="began from a KVSnapshot or had interventions"):
        of_trace(cp.run(model(), [PROMPT], interventions=zero, capture=None, **OPTIONS))


def test_a_trace_of_other_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="the trace is of weights"):
        cp.gradients(perturbed(model(), 0.01), traced(), METRIC, progress=False)


def test_a_request_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError, match="no request 9"):
        of_trace(traced(), request_ids=[9])
    with pytest.raises(ValueError, match="no request generated a token"):
        of_trace(traced(), request_ids=[])


def test_rows_without_a_gradient_are_refused() -> None:
    trace = traced()
    rows = trace.rows()
    found = of_trace(trace, request_ids=[1], rejected=False, sites="S", layers=[2])
    rejected = rows[(rows.status == "rolled_back") & (rows.request_id == 1)]
    own = rows[(rows.status == "committed") & (rows.request_id == 1)]
    for chosen, said in (
        (rejected, "has no gradient; compute them with rejected=True"),
        (rows[(rows.status == "committed") & (rows.request_id == 0)], "request 0: row .* has no gradient; give the"),
        (own.assign(status="abandoned"), "was abandoned, so no verdict says its text"),
        (own.assign(token_id=96), "read token 96 at position 0, its text has 7; give rows of the trace"),
        (rows[:0], "there is no row"),
    ):
        assert said.startswith("there") or len(chosen)
        with pytest.raises(ValueError, match=said):
            found.of_rows("S", 2, chosen)
    with pytest.raises(
        ValueError, match=r"no gradient at site 'T' of layer 2; computed were sites \['S'\], layers \[2\]"
    ):
        found.of_rows("T", 2, own)
    with pytest.raises(KeyError, match="no gradient of request 0"):
        found.of_request("S", 2, 0)


def test_models_with_thoughts_are_refused() -> None:
    lm = ThinkingLM(tiny(thinks=False))
    with pytest.raises(ModelError, match="is no transformers model, so no gradient is taken"):
        cp.gradients(lm, PROMPT, METRIC, progress=False)
    with pytest.raises(ModelError, match="is no transformers model, so no gradient is taken"):
        cp.patching.attribution(lm, PROMPT, [5, 17, 4, 44])


def test_the_forward_inside_a_step_is_refused() -> None:
    """A hook that differentiates the model in the middle of a run would change its numbers."""

    def differentiate(state: Any, context: Any) -> Any:
        of_prompt(METRIC)
        return state

    change = cp.interventions.hook("S", differentiate, layers=[1])
    with pytest.raises(EngineError, match="in the middle of a step"):
        cp.run(model(), [PROMPT], interventions=change, capture=None, **OPTIONS)
