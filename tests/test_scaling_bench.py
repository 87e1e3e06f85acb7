"""The benchmark of scaling in small: every size is measured, and a trace's cost piece after piece."""

import pytest

from cacheprobe_benchmarks import scaling
from tests.tiny import loaded


def test_it_measures_every_size_and_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dict(BATCHES=(1, 2), CONTEXTS=(8,), LAYERS=(1, 3), LONG=80, CAPACITY=96, PIECE=16, NEW_TOKENS=6)
    for name, value in small.items():
        monkeypatch.setattr(scaling, name, value)
    found = scaling.measure(loaded(), rounds=1)
    assert [list(found[f"{kind}_over_nothing"]) for kind in ("batch", "context", "layers")] == [
        ["1", "2"],
        ["8"],
        ["1", "3"],
    ]
    assert 3 <= len(found["milliseconds_per_token"]) <= 4 and found["last_over_first"] > 0
