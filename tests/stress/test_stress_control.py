"""The negative control tries kinds of traffic until one diverges without verification, and says which.

With ONEDNN_MAX_CPU_ISA=AVX2 the control of SmolLM2 in bfloat16 was void: products in 16 bits treat every row alike.
"""

import pytest

from cacheprobe.engine import consistency
from cacheprobe.stress.control import Traffic, negative_control, traffic_to_try
from cacheprobe.stress.subjects import Subject, near_tie_subjects

pytestmark = pytest.mark.determinism

NEAR_TIE = near_tie_subjects()[0]
DIVERGES = Traffic(NEAR_TIE, num_prompts=6, new_tokens=12, batches=(6, 1))
ALIKE = Traffic(NEAR_TIE, num_prompts=2, new_tokens=4, batches=(1, 1))
"""The same batch size twice: nothing can differ."""


def test_it_counts_what_batches_change() -> None:
    """Near twins in float32: unverified they say other tokens in other batches, verified they do not."""
    figures = negative_control([DIVERGES])
    assert figures["control_sequences"] == 6 and figures["control_traffic"] == str(DIVERGES)
    assert figures["control_unverified_differ"] > 0 == figures["control_verified_differ"]


def test_it_goes_on_until_one_kind_diverges() -> None:
    figures = negative_control([ALIKE, DIVERGES, ALIKE])
    assert list(figures["control_tried"]) == [str(ALIKE), str(DIVERGES)]
    assert figures["control_tried"][str(ALIKE)] == {"tokens": 0, "logprobs": 0}
    assert figures["control_traffic"] == str(DIVERGES) and figures["control_unverified_differ"] > 0
    assert figures["control_tried"][str(DIVERGES)]["tokens"] == figures["control_unverified_differ"]


def test_it_is_void_if_none_diverges() -> None:
    figures = negative_control([ALIKE])
    assert figures["control_traffic"] == "none" and figures["control_sequences"] == 2
    assert figures["control_unverified_differ"] == figures["control_verified_differ"] == 0


def test_verified_log_probabilities_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verified run whose log-probabilities depend on the batch is a difference, though its tokens are the same."""
    right = Traffic.run

    def run(traffic: Traffic, subject: Subject, is_verified: bool) -> dict[str, int]:
        differing = right(traffic, subject, is_verified)
        return {**differing, "logprobs": 2} if is_verified else differing

    monkeypatch.setattr(Traffic, "run", run)
    assert negative_control([DIVERGES])["control_verified_differ"] == 2


def test_a_refused_shape_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    right = consistency._fault
    refused = NEAR_TIE.group, NEAR_TIE.window
    monkeypatch.setattr(consistency, "_fault", lambda *of: "row 0" if of[1:3] == refused else right(*of))
    figures = negative_control([DIVERGES])
    assert NEAR_TIE.key in figures["control_refused_shapes"] and figures["control_verified_differ"] == 0
    assert figures["control_traffic"].startswith(f"{NEAR_TIE.key} as W")


def test_a_control_beside_a_stress_test_tries_the_real_model_first_and_float32() -> None:
    """Products in float32 depend on the number of rows in each environment of scripts/test_processors.sh."""
    kinds = list(traffic_to_try())
    assert kinds[0].subject.is_real and kinds[0].subject.dtype == "bfloat16"
    assert max(kind.num_prompts for kind in kinds if kind.subject.is_real) > 32
    assert any(not kind.subject.is_real and kind.subject.dtype == "float32" for kind in kinds)
    assert len({str(kind) for kind in kinds}) == len(kinds)
