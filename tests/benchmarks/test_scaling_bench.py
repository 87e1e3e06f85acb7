"""The benchmark of scaling in small: every size is measured, and a trace's cost piece after piece."""

from cacheprobe_benchmarks.speed import scaling
from tests.tiny import loaded


def test_it_measures_every_size_and_every_piece() -> None:
    """What the numbers say is checked in test_bench_ratios.py, with planted costs."""
    found = scaling.measure(loaded(), 1, scaling.SMALL["sizes"])
    assert [list(found[f"{kind}_over_nothing"]) for kind in ("batch", "context", "layers")] == [
        ["1", "2"],
        ["8"],
        ["1", "3"],
    ]
    assert 3 <= len(found["milliseconds_per_token"]) <= 4
