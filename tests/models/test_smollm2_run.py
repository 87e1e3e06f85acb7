"""The real model in bfloat16, where shapes change bits: rollbacks happen, and the output is the oracle's."""

import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.terminal import DASH_PORT
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace

RUN = dict(window=4, group=2, capacity=128, max_new_tokens=8, progress=False)
EXAMPLES = cp.tasks.CoinFlip(people=3).examples(4, seed=5)
IGNORE_EOS = cp.SamplingParams(stop_token_ids=())


@cache
def smollm2() -> PlainLM:
    return cp.load_model("smollm2-135m", dtype="bfloat16", progress=False)


@cache
def oracle() -> cp.Trace:
    return cp.reference(smollm2(), EXAMPLES, **RUN, sampling=IGNORE_EOS)


@pytest.fixture(scope="module")
def drafted() -> cp.Trace:
    drafter = cp.drafters.EarlyExit(layer=26)
    return cp.run(smollm2(), EXAMPLES, **RUN, sampling=IGNORE_EOS, drafter=drafter, deterministic=True)


def test_drafted_run_equals_the_oracle_with_real_rollbacks(drafted: cp.Trace) -> None:
    assert drafted.num_rolled_back >= 4 and drafted.num_drafted - drafted.num_rolled_back >= 4
    for i in range(4):
        assert drafted.committed(i) == oracle().committed(i)
        assert drafted.digest(i) == oracle().digest(i)


def test_readings_of_committed_rows_equal_the_oracles(drafted: cp.Trace) -> None:
    """Z comes in tiles of one height, so that a row's reading depends on the row alone."""
    columns = ["request_id", "position", "layer"]
    tables = []
    for trace in (drafted, oracle()):
        hypotheses = trace.hypotheses()
        tables.append(hypotheses[hypotheses.status == "committed"].sort_values(columns).reset_index(drop=True))
    ours, theirs = tables
    assert len(ours) == len(theirs) == 4 * RUN["max_new_tokens"] * 30
    for column in ("token_id", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats"):
        assert (ours[column] == theirs[column]).all(), column


def test_fast_path_in_mixed_traffic_equals_the_oracle() -> None:
    """Two deterministic requests among others, in one decode batch."""
    trace = cp.run(smollm2(), EXAMPLES, **RUN, sampling=IGNORE_EOS, deterministic=0.5)
    for i in (0, 2):
        assert trace.requests[i].is_deterministic
        assert trace.committed(i) == oracle().committed(i) and trace.digest(i) == oracle().digest(i)
    provenance = {i: set(trace.ledger(i).provenance) for i in range(4)}
    assert provenance[0] == {"prefill", "verified"} and provenance[1] == {"prefill", "decoded"}


def by_hand() -> tuple[float, float]:
    """Returns the probability of the answers after the prompt, as a mean over the examples, and how often the right one
    leads: by Hugging Face's own model in float32."""
    model, masses, right = HuggingFace(torch.float32).model, [], []
    for example in EXAMPLES:
        ids = torch.tensor([smollm2().encode(example.prompt)])
        with torch.inference_mode():
            probs = model(ids).logits[0, -1].softmax(-1)
        said = {answer: smollm2().encode(answer, add_special_tokens=False)[0] for answer in example.answers}
        masses.append(sum(float(probs[token]) for token in said.values()))
        right.append(max(said, key=lambda answer: float(probs[said[answer]])) == example.answer)
    return sum(masses) / len(masses), sum(right) / len(right)


def test_behaviour_is_reported_and_claims_nothing(drafted: cp.Trace, capsys: pytest.CaptureFixture) -> None:
    """In float32 it is Hugging Face's. In bfloat16 two processors' logits differ by up to .3, and the answers' mean
    probability, of .002, by as many nats."""
    from cacheprobe.analysis.summary import behaviour_line, summary

    mass, right = by_hand()
    precise = cp.load_model("smollm2-135m", dtype="float32", progress=False)
    exact = cp.run(precise, EXAMPLES, **{**RUN, "max_new_tokens": 1}, capture="S", layers=[0]).meta["behaviour"]
    assert exact["answer_mass"] == pytest.approx(mass, rel=1e-3) and 0 < mass < 0.02
    assert exact["forced_accuracy"] == right
    behaviour = drafted.meta["behaviour"]
    assert behaviour["chance"] == 0.5
    assert abs(math.log(behaviour["answer_mass"] / mass)) < 0.5
    assert "nothing here speaks of the model's state" in behaviour_line(behaviour)
    assert "4-bit dequantised" in summary(drafted)
    cp.run(smollm2(), EXAMPLES[:1], **{**RUN, "max_new_tokens": 1, "progress": True}, capture="S", layers=[0])
    assert "chance 50%" in capsys.readouterr().out


def test_the_report_of_the_real_model_is_small_and_whole(drafted: cp.Trace, tmp_path: Path) -> None:
    """As in the demo: all layers of a dozen tokens. Nothing is fetched, by tag or by style."""
    path = cp.plots.write_report(drafted, tmp_path / "report.html")
    assert path.stat().st_size < 8_000_000
    own = path.read_text().split("</head>")[1].replace(f'<a href="http://127.0.0.1:{DASH_PORT}/', "")
    assert "lens-grid-all" in own and re.findall(r"(?:src|href|action)=.?https?:|url\(.?https?:|@import", own) == []
