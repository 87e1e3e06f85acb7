"""The benchmark of the field's ways of recording, in small: every arm ends up with the same states' bytes."""

from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.states import field, nnsight_arm


def test_every_arm_keeps_what_it_says() -> None:
    model = cp.load_model("smollm2-135m", dtype="bfloat16", progress=False)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    arms = {
        "ours": field._ours(model, prompts, 3),
        "hooks": field._hooks(hf := HuggingFace(), prompts, 3),
        "hidden_states": field._hidden_states(hf, prompts, 3),
        "transformer_lens": field._transformer_lens(model, prompts, 3),
    }
    of_a_token = model.n_layers * model.d_model * 2
    tokens = len(prompts) * (8 + 3 - 1)  # nothing is computed of the newest one
    assert arms["ours"] == arms["hooks"] == 3 * tokens * of_a_token
    assert arms["hidden_states"] == tokens * of_a_token * (model.n_layers + 1) / model.n_layers
    assert arms["transformer_lens"] == 3 * (tokens + len(prompts)) * of_a_token


@pytest.mark.slow
def test_nnsight_keeps_the_same_bytes_in_a_process_of_its_own() -> None:
    """It is fetched into the user's cache the first time; where nothing can be fetched, this fails and says so."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    ((took, beside, kept),) = nnsight_arm.measure(prompts, new_tokens=3, rounds=1)
    assert took > 0 < beside
    assert kept == 3 * len(prompts) * (8 + 3 - 1) * 30 * 576 * 2


def test_without_nnsight_the_benchmark_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nobody is asked for the name
    monkeypatch.setattr(nnsight_arm, "PACKAGES", ("cacheprobe-no-such-package==1",))
    with pytest.raises(RuntimeError, match="pip could not install cacheprobe-no-such-package==1: .*No matching"):
        next(nnsight_arm.measure([[1, 2]], new_tokens=1, rounds=1))
    assert list(tmp_path.iterdir()) == []  # nothing half installed
