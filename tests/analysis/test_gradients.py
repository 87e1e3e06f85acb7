"""Gradients with respect to states: equal to central differences in float64, of committed and of rejected tokens."""

from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.edits.gradient_texts import GradientText
from cacheprobe.edits.gradients import Gradients
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.field.tiny_family import tiny_family
from tests.tiny import PROMPTS, SMALL, hf_model, loaded
from tests.twins.gradients_slowly import gradient_slowly, logits_slowly, rejected_texts_slowly, states_slowly

FAMILIES = ("llama", "gpt2", pytest.param("gemma2", marks=pytest.mark.slow))
TOLERANCE = 1e-6
"""Of the largest derivative of a site and layer. A central difference of step 1e-5 is exact to 1e-9 of values of about
1, and rounding of the forward adds 1e-11 / derivative; a gradient of a wrong text, site or position is off by 1."""
TOKENS = (7, 11)
METRIC = cp.analysis.logit_difference(*TOKENS)
OPTIONS: dict[str, Any] = {**SMALL}
PROMPT = [5, 17, 3, 44, 9, 60, 21]


def apart(logits: Tensor) -> float:
    """The metric of the twin."""
    return float(logits[-1, TOKENS[0]] - logits[-1, TOKENS[1]])


@cache
def traced(family: str) -> cp.Trace:
    """Of a drafter that is often wrong, so that drafts are rejected; its rows and the verifier's are kept."""
    model = loaded(family, torch.float64)
    options = {**OPTIONS, "max_new_tokens": 8}
    return cp.run(model, PROMPTS[:2], drafter=cp.drafters.EarlyExit(layer=1), capture="STC", **options)


@cache
def computed(family: str) -> Gradients:
    return cp.gradients(loaded(family, torch.float64), traced(family), METRIC, progress=False)


def assert_close(found: list[float], slow: list[float]) -> None:
    largest = max(map(abs, slow))
    assert largest > 1e-3  # the control: something was compared
    assert max(abs(a - b) for a, b in zip(found, slow, strict=True)) <= TOLERANCE * largest


def directions(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("family", "site"), [("llama", "S"), ("llama", "C"), ("gpt2", "T")])
def test_gradients_of_committed_tokens_are_central_differences(family: str, site: str) -> None:
    trace, model = traced(family), hf_model(family, torch.float64)
    text = [*trace.requests[1].prompt_token_ids, *trace.committed(1)][:-1]
    for layer in (0, 2):
        whole = computed(family).of_request(site, layer, 1)
        assert whole.shape == trace.states(site, layer, 1).shape
        along = directions(*whole.shape)
        slow = [gradient_slowly(model, text, (site, layer), p, along[p], apart) for p in range(len(text))]
        assert_close((whole * along).sum(-1).tolist(), slow)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_rejected_tokens_are_central_differences(family: str) -> None:
    """Of the verifier's rows and of the drafter's, each after the text that the row had read."""
    trace, model = traced(family), hf_model(family, torch.float64)
    rows = trace.rows(status="rolled_back")
    texts = rejected_texts_slowly(trace)
    assert len(texts) > 2 and set(rows.phase) == {"decode", "verify"}
    for site, layer in (("S", 0), ("T", 1), ("C", 2)):
        found = computed(family).of_rows(site, layer, rows)
        along = directions(*found.shape)
        slow = []
        for i, row in enumerate(rows.itertuples()):
            step = min(step for request, step in texts if request == row.request_id and step >= row.step)
            text, _ = texts[row.request_id, step]
            slow.append(gradient_slowly(model, text, (site, layer), row.position, along[i], apart))
        assert_close((found * along).sum(-1).tolist(), slow)


def test_every_number_of_a_gradient_is_a_central_difference() -> None:
    trace, model = traced("llama"), hf_model("llama", torch.float64)
    text = [*trace.requests[1].prompt_token_ids, *trace.committed(1)][:-1]
    gradient = computed("llama").of_request("S", -2, 1)[2]
    slow = [gradient_slowly(model, text, ("S", 1), 2, one, apart) for one in torch.eye(32, dtype=torch.float64)]
    assert_close(gradient.tolist(), slow)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", ["pre", "z"])
def test_gradients_of_a_prompt_are_central_differences(family: str, site: str) -> None:
    model = loaded(family, torch.float64)
    found = cp.gradients(model, PROMPT, METRIC, sites=site, layers=[2, 0], progress=False)
    for layer in (0, 2):
        gradient = found.of_request(site, layer, 0).flatten(1)
        along = directions(*gradient.shape)
        plain = hf_model(family, torch.float64)
        slow = [gradient_slowly(plain, PROMPT, (site, layer), p, along[p], apart) for p in range(len(PROMPT))]
        assert_close((gradient * along).sum(-1).tolist(), slow)
    assert set(found.table.status) == {"prompt"} and found.table.row.isna().all() and found.table.step.isna().all()


@pytest.mark.parametrize(
    ("metric", "slow"),
    [
        (cp.analysis.token_logprob(7, position=3), lambda logits: float(logits[3].log_softmax(-1)[7])),
        (cp.analysis.logit_difference(7, 11, position=0), lambda logits: float(logits[0, 7] - logits[0, 11])),
        (
            cp.analysis.text_logprob(),
            lambda logits: sum(float(logits[p].log_softmax(-1)[PROMPT[p + 1]]) for p in range(6)),
        ),
        (cp.analysis.text_logprob(range(2, 3)), lambda logits: float(logits[2].log_softmax(-1)[PROMPT[3]])),
        (
            lambda logits, text: logits[:, text.token_ids[0]].square().sum(),
            lambda logits: float((logits[:, 5] ** 2).sum()),
        ),
    ],
)
def test_every_metric_is_that_of_the_logits(metric: Any, slow: Any) -> None:
    plain = hf_model("llama", torch.float64)
    found = cp.gradients(loaded("llama", torch.float64), PROMPT, metric, sites="S", layers=[1], progress=False)
    assert found.texts.metric[0] == pytest.approx(slow(logits_slowly(plain, PROMPT, ("S", 1), lambda x: x)), rel=1e-9)
    gradient = found.of_request("S", 1, 0)
    along = directions(*gradient.shape)
    wanted = [gradient_slowly(plain, PROMPT, ("S", 1), p, along[p], slow) for p in range(len(PROMPT))]
    assert_close((gradient * along).sum(-1).tolist(), wanted)


def test_the_log_probability_of_a_text_is_of_what_was_generated_or_drafted() -> None:
    """Of a committed text as the run recorded it; of a rejected draft, its own tokens from the rejected one on."""
    trace, model = traced("llama"), loaded("llama", torch.float64)
    found = cp.gradients(model, trace, cp.analysis.text_logprob(), sites="S", layers=[2], progress=False)
    texts, slow = found.texts, rejected_texts_slowly(trace)
    for request_id in (0, 1):
        value = texts.metric[(texts.request_id == request_id) & (texts.status == "committed")].item()
        assert value == pytest.approx(sum(trace.logprobs(request_id)), rel=1e-6)  # recorded in float32
    rejected = texts[texts.status == "rolled_back"]
    assert list(zip(rejected.request_id, rejected.step, strict=True)) == sorted(slow)
    for line in rejected.itertuples():
        text, first = slow[line.request_id, line.step]
        logits = logits_slowly(hf_model("llama", torch.float64), text, ("S", 2), lambda value: value)
        nats = logits.log_softmax(-1)
        assert line.metric == pytest.approx(float(sum(nats[p - 1, text[p]] for p in range(first, len(text)))), rel=1e-9)


def test_the_table_has_a_line_for_every_committed_and_rejected_row() -> None:
    trace, found = traced("gpt2"), computed("gpt2")
    rows = trace.rows()
    rows = rows[(rows.status == "committed") | ((rows.status == "rolled_back") & (rows.phase == "verify"))]
    part = found.table[(found.table.site == "T") & (found.table.layer == 1)].sort_values("row", ignore_index=True)
    columns = ["row", "request_id", "step", "status", "position", "token_id", "token"]
    pd.testing.assert_frame_equal(
        part[columns], rows[columns].sort_values("row", ignore_index=True), check_dtype=False, check_categorical=False
    )
    gradients, states = found.of_rows("T", 1, part), trace.vectors("T", 1, part.row.tolist()).double()
    assert part.gradient_norm.tolist() == pytest.approx(gradients.norm(dim=-1).tolist(), rel=1e-12)
    # the states of the run come from passes with a cache, whose sums have another order
    assert part.gradient_times_state.tolist() == pytest.approx((gradients * states).sum(-1).tolist(), abs=1e-9)
    assert len(found.table) == 9 * len(rows)
    assert repr(found) == (
        f"Gradients(logit_difference(7, 11, position=-1) of {loaded('gpt2', torch.float64).name}: 2 committed texts, "
        f"{len(rejected_texts_slowly(trace))} rejected drafts; sites S, T, C; 3 layers)"
    )


def test_a_superseded_row_has_the_gradient_of_the_committed_one() -> None:
    trace = cp.run(loaded("llama", torch.float64), PROMPTS[:2], deterministic=True, capture=None, **OPTIONS)
    rows = trace.rows(status="superseded")
    found = cp.gradients(loaded("llama", torch.float64), trace, METRIC, sites="S", layers=[1], progress=False)
    assert len(rows) > 10
    wanted = [found.of_request("S", 1, row.request_id)[row.position] for row in rows.itertuples()]
    assert torch.equal(found.of_rows("S", 1, rows), torch.stack(wanted))


def test_some_requests_and_no_rejected_drafts() -> None:
    trace = traced("llama")
    found = cp.gradients(loaded("llama", torch.float64), trace, METRIC, request_ids=[1], rejected=False, progress=False)
    assert found.texts.request_id.tolist() == [1]
    assert torch.equal(found.of_request("S", 2, 1), computed("llama").of_request("S", 2, 1))


def test_examples_of_a_task_and_requests_are_prompts() -> None:
    task = cp.tasks.CoinFlip(people=2)
    tokenizer = cp.tasks.word_tokenizer(task.vocabulary())
    model = cp.load_model(tiny_model("llama-tied", size=replace(TINY, vocab=len(tokenizer))), tokenizer=tokenizer)
    (example,) = task.examples(1)
    ids = model.encode(example.prompt_text())
    seen: list[GradientText] = []

    def metric(logits: Tensor, text: GradientText) -> Tensor:
        seen.append(text)
        return logits[-1, text.token_id(" heads")]

    found = cp.gradients(model, [example, cp.Request([1, 2, 3])], metric, progress=False)
    assert [text.token_ids for text in seen] == [ids, (1, 2, 3)] and [text.example for text in seen] == [example, None]
    assert found.texts.num_tokens.tolist() == [len(ids), 3]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_model_stays_as_it_was(is_frozen: bool) -> None:
    """Also inside inference mode, and with frozen weights."""
    model = BridgeLM.wrap(hf_model("llama", torch.float64), None, "llama")
    weights = list(model.bridge.parameters())
    for weight in weights:
        weight.requires_grad_(not is_frozen)
    before = model.weights_checksum
    with torch.inference_mode():
        found = cp.gradients(model, PROMPT, METRIC, progress=False)
    whole = cp.gradients(loaded("llama", torch.float64), PROMPT, METRIC, progress=False)
    assert torch.equal(found.of_request("T", 0, 0), whole.of_request("T", 0, 0))
    assert model.weights_checksum == before
    assert all(weight.grad is None and weight.requires_grad is not is_frozen for weight in weights)
    assert not any(point.fwd_hooks for name, point in model.bridge.hook_dict.items() if name.endswith("resid_post"))


def test_a_hook_on_the_bridge_acts() -> None:
    """What the gradient is of is the edited model: with T of layer 2 at zero, nothing flows through it."""
    model = BridgeLM.wrap(hf_model("llama", torch.float64), None, "llama")
    at = next(name for name in model.bridge.hook_dict if name.startswith("blocks.2.") and name.endswith("attn_out"))
    with model.bridge.hooks(fwd_hooks=[(at, lambda value, hook: value * 0)]):
        found = cp.gradients(model, PROMPT, METRIC, sites="S", progress=False)
    assert found.of_request("S", 1, 0)[:-1].abs().max() == 0 < found.of_request("S", 1, 0)[-1].abs().max()


@pytest.mark.slow
def test_in_16_bits_the_gradient_is_near() -> None:
    exact = cp.gradients(loaded("llama", torch.float32), PROMPT, METRIC, sites="S", progress=False)
    rough = cp.gradients(loaded("llama", torch.bfloat16), PROMPT, METRIC, sites="S", progress=False)
    pair = [one.of_request("S", 2, 0)[-1].double() for one in (exact, rough)]
    assert torch.nn.functional.cosine_similarity(*pair, dim=0) > 0.9
    assert rough.of_request("S", 2, 0).dtype == torch.bfloat16


def test_states_of_the_twin_are_those_of_the_run() -> None:
    """The twin's control: it looks at the same place."""
    trace = traced("gemma2")
    text = [*trace.requests[1].prompt_token_ids, *trace.committed(1)][:-1]
    for site in "STC":
        slow = states_slowly(hf_model("gemma2", torch.float64), text, (site, 1))
        assert (slow - trace.states(site, 1, 1)).abs().max() < 1e-9


@pytest.mark.parametrize("family", ["falcon", "mamba"])
def test_families_that_add_in_place_or_have_no_mlp(family: str) -> None:
    """Without an MLP, C is a state of zeros that is added: its gradient is that of S."""
    found = cp.gradients(cp.load_model(tiny_family(family)), [[1, 2, 3, 4]], METRIC, progress=False)
    s, c = (found.of_request(site, 0, 0) for site in "SC")
    assert c.abs().max() > 0 and torch.allclose(s, c, rtol=1e-4, atol=1e-6)
