"""D2 against an oracle that shares only the model's forward with the engine: == for tokens, bitwise for states."""

from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine import committer
from cacheprobe.ops.equality import bitwise
from tests.tiny import PROMPTS, loaded
from tests.twins.plain_oracle import decode_plainly, states_of_trace

pytestmark = pytest.mark.determinism

NEW = 12
LONG = [[(7 * i + 3) % 90 for i in range(70)], *PROMPTS[:3]]
"""The first prompt is longer than one span of attention."""


def differences(trace: cp.Trace, model: Any, prompts: list[list[int]], temperature: float) -> list[str]:
    """What the oracle finds otherwise; it must have rejected guesses, or it shows little."""
    found, num_compared, num_rejected = [], 0, 0
    for i, prompt in enumerate(prompts):
        seed = trace.requests[i].sampling.seed
        oracle = decode_plainly(model, prompt, trace.fingerprint, NEW, temperature, seed)
        num_rejected += oracle.num_rejected
        if trace.committed(i) != oracle.token_ids:
            found.append(f"tokens of request {i}")
            continue
        # the engine's sum in float32 against one in float64
        if not torch.allclose(torch.tensor(trace.logprobs(i)), torch.tensor(oracle.logprobs_nats), rtol=0, atol=1e-5):
            found.append(f"log-probabilities of request {i}")
        for site, layer in {(site, layer) for site, layer, _ in oracle.states}:
            for position, vector in states_of_trace(trace, i, site, layer).items():
                num_compared += 1
                if not bitwise(vector, oracle.states[site, layer, position]):
                    found.append(f"{site} of request {i}, layer {layer}, position {position}")
    assert found or num_compared > 9 * model.n_layers * NEW  # S, T and C of all tokens
    assert num_rejected or trace.fingerprint["window"] == 1
    return found


@pytest.mark.parametrize(
    ("family", "drafter", "dtype", "temperature"),
    [
        ("llama", None, torch.bfloat16, 0.8),
        ("gpt2", cp.drafters.NGram(length=4), torch.float32, 0.0),
        ("gemma2", cp.drafters.EarlyExit(layer=0), torch.bfloat16, 0.0),
    ],
)
def test_a_run_equals_the_plain_oracle(family: str, drafter: Any, dtype: torch.dtype, temperature: float) -> None:
    model = loaded(family, dtype)
    sampling = cp.SamplingParams(temperature=temperature, max_new_tokens=NEW, stop_token_ids=())
    trace = cp.run(
        model, LONG, drafter=drafter, deterministic=True, capacity=128, sampling=sampling, seed=5, progress=False
    )
    assert differences(trace, trace.model, LONG, temperature) == []


def test_the_reference_equals_the_plain_oracle() -> None:
    """cp.reference shares its sampling and its cache with the engine; the plain oracle does not."""
    sampling = cp.SamplingParams(temperature=0.8, max_new_tokens=NEW, stop_token_ids=())
    settings: dict[str, Any] = dict(window=4, group=4, capacity=128, sampling=sampling, path="bridge", progress=False)
    trace = cp.reference(loaded("qwen3"), LONG, **settings)
    assert differences(trace, trace.model, LONG, 0.8) == []


def test_another_choice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine and cp.reference share a sampler: a fault in it is seen by the plain oracle alone."""
    choose_next = committer.choose_next

    def shifted(state: Any, logits: torch.Tensor, drafted: Any, position: int, *more: Any) -> int:
        return choose_next(state, logits, drafted, position + 1, *more)

    monkeypatch.setattr(committer, "choose_next", shifted)
    sampling = cp.SamplingParams(temperature=0.8, max_new_tokens=NEW, stop_token_ids=())
    settings: dict[str, Any] = dict(window=1, group=4, capacity=128, sampling=sampling, progress=False)
    trace = cp.run(loaded("qwen3"), LONG, deterministic=True, **settings)
    oracle = cp.reference(loaded("qwen3"), LONG, **settings)
    assert all(trace.committed(i) == oracle.committed(i) for i in range(len(LONG)))
    assert "tokens of request 0" in differences(trace, trace.model, LONG, 0.8)
