"""The benchmark of the field's ways of recording, in small: every arm ends up with the same states' bytes."""

import pytest

import cacheprobe as cp
from cacheprobe_benchmarks import field
from cacheprobe_benchmarks.hugging_face import HuggingFace


def test_every_arm_keeps_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field, "NEW_TOKENS", 3)
    model = cp.load_model("smollm2-135m", dtype="bfloat16", progress=False)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    arms = {
        "ours": field._ours(model, prompts),
        "hooks": field._hooks(hf := HuggingFace(), prompts),
        "hidden_states": field._hidden_states(hf, prompts),
        "transformer_lens": field._transformer_lens(model, prompts),
    }
    of_a_token = model.n_layers * model.d_model * 2
    tokens = len(prompts) * (8 + 3 - 1)  # nothing is computed of the newest one
    assert arms["ours"] == arms["hooks"] == 3 * tokens * of_a_token
    assert arms["hidden_states"] == tokens * of_a_token * (model.n_layers + 1) / model.n_layers
    assert arms["transformer_lens"] == 3 * (tokens + len(prompts)) * of_a_token
