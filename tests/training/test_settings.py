"""The settings of trainings: each checks itself before any model or run is loaded."""

from typing import Any

import pytest

from cacheprobe.training.settings import (
    DictionarySettings,
    Eagle3Settings,
    LoraSettings,
    MtpSettings,
    TunedLensSettings,
)


@pytest.mark.parametrize(
    ("settings", "bad", "match"),
    [
        (LoraSettings, dict(task="poker"), "unknown task of a training 'poker'; choose one of coin-flip"),
        (LoraSettings, dict(steps=0), "steps must be more than 0"),
        (LoraSettings, dict(rank=True), "rank must be a whole number"),
        (LoraSettings, dict(learning_rate=float("nan")), "learning_rate must be a number"),
        (LoraSettings, dict(max_people=23), "max_people=23 is more than the 22 names"),
        (LoraSettings, dict(curriculum=1.5), "curriculum is a share"),
        (TunedLensSettings, dict(momentum=1.0), "momentum must be below 1"),
        (TunedLensSettings, dict(texts=-1), "texts must be a whole number of at least 0"),
        (TunedLensSettings, dict(length=1), "length, .* must be a whole number of at least 2"),
        (DictionarySettings, dict(site="z"), "unknown site to train on 'z'"),
        (DictionarySettings, dict(features=96, k=97), "k must be at most the number of features, 96"),
        (DictionarySettings, dict(held_out=1.0), "held_out is a share"),
        (Eagle3Settings, dict(draft_vocab=0), "draft_vocab must be a whole number of at least 1"),
        (MtpSettings, dict(steps=0), "steps must be"),
    ],
)
def test_settings_are_checked(settings: Any, bad: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        settings(**bad)
