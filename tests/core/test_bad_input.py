"""Bad input: a one-line error that names the thing and the remedy, before anything is computed."""

import numpy as np
import pytest

import cacheprobe as cp
from cacheprobe.core.config import pick_deterministic, resolve_layers
from tests.tiny import SMALL, loaded

P = [[1, 2, 3]]


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[]], {}, "request 0: the prompt is empty"),
        ([], {}, "there are no prompts"),
        ([[1, 97]], {}, "request 0: token id 97 is outside the vocabulary of 97"),
        ([[1], [-1]], {}, "request 1: token id -1"),
        ([3.5], {}, "request 0: a prompt is text, a list of token ids"),
        ([[1] * 3000], {"capacity": 4096}, "exceed the model's context of 2048; shorten the prompt"),
        ([[1] * 80], {}, r"need 102 cache slots, capacity is 96; set capacity=102"),
        ([[1] * 2], {"capacity": 24, "pad_prefill": True}, "need 32 cache slots"),  # the padded prefill chunk
        (P, {"window": 0}, "window must be a whole number of at least 1, got 0"),
        (P, {"group": 0}, "group must be"),
        (P, {"window": 100, "capacity": 99}, "window of 100 rows is larger than the capacity of 99; lower it"),
        (P, {"capture": cp.CaptureConfig(positions=(2, 22))}, "position 22 lies outside every.*computes 0 to 21"),
        (P, {"layers": [3]}, "unknown layer 3; the model has layers 0 to 2"),
        (P, {"layers": []}, "no layers|at least one"),
        (P, {"deterministic": 1.5}, "between 0 and 1"),
        (P, {"deterministic": [1]}, "names request 1, but there are requests 0 to 0"),
        (P, {"deterministic": [True, False]}, "2 flags for 1 requests"),
        (P, {"drafter": cp.drafters.EarlyExit(layer=3)}, "unknown layer 3 for EarlyExit.*0 to 1; FastPath"),
        (P, {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_run_refuses(prompts, settings, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cp.run(loaded(), prompts, **{**SMALL, **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [(cp.SamplingParams, "temperature", -1.0), (cp.SamplingParams, "temperature", float("nan"))]
    + [(cp.CaptureConfig, "dtype", "int4"), (cp.CaptureConfig, "positions", ()), (cp.CaptureConfig, "sites", "")]
    + [(cp.CaptureConfig, "every", 0), (cp.CaptureConfig, "statuses", ("rejected",))],
)
def test_settings_check_themselves(of: type, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name.removesuffix("es").removesuffix("s")):
        of(**{name: value})


def test_deterministic_picks() -> None:
    assert pick_deterministic(0.5, 8) == {0, 2, 4, 6} and pick_deterministic(0.25, 8) == {0, 4}
    assert pick_deterministic(True, 3) == {0, 1, 2} and pick_deterministic(0.0, 3) == set()
    assert pick_deterministic(np.array([False, True]), 2) == pick_deterministic([False, True], 2) == {
        1
    } and pick_deterministic([2], 3) == {2}
    assert (
        resolve_layers([-1, 0, 2], 3) == (0, 2) and resolve_layers("all", 2) == (0, 1) and resolve_layers(1, 3) == (1,)
    )


def test_a_requests_own_settings_win() -> None:
    own = cp.SamplingParams(temperature=1.0, seed=7, max_new_tokens=3)
    requests = [cp.Request([1, 2], sampling=own), cp.Request([1, 2], is_deterministic=True), [1, 2]]
    trace = cp.run(loaded(), requests, **SMALL, seed=5)
    first, second, third = (r.sampling for r in trace.requests)
    assert (first.temperature, first.seed, first.max_new_tokens) == (1.0, 7, 3) and len(trace.committed(0)) == 3
    assert second.seed != third.seed and second.temperature == 0 and len(trace.committed(1)) == 20
    assert [r.is_deterministic for r in trace.requests] == [False, True, False]
    assert [r.request_id for r in trace.requests] == [0, 1, 2]


@pytest.mark.parametrize("name", ["logits_processor", "grammar", "mirostat_tau", "num_beams"])
def test_a_processor_that_cannot_be_rolled_back_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is no sampling setting here.*committed tokens.*repetition_penalty"):
        cp.SamplingParams(**{name: 1})
