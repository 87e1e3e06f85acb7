"""The benchmark of rollbacks of recurrent states: every way computes the same logits, and a way that forgets to go back
is found."""

import pytest

from cacheprobe_benchmarks.speed import recurrent_rollback as bench


def test_every_way_gives_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    told = bench.run(1, **bench.SMALL)["window 4"]
    assert set(told["over_kept"]) == {"kept", "replayed", "chunked"}
    # chunks and single tokens round differently, by about 1e-6 of the largest logit
    assert told["largest_difference"] < 1e-5
    assert told["kilobytes_a_row"]["kept"] == pytest.approx(2.5 * told["kilobytes_a_row"]["replayed"], rel=0.01)
    monkeypatch.setattr(bench.StateBefore, "drop", lambda self, row, start: None)
    record = bench.StateBefore.record

    def newest(self: bench.StateBefore, layer: int, row: int, position: int, states: bench.LayerStates) -> None:
        """The fault of `crop`: the state of the rejected tokens stays."""
        record(self, layer, row, position, states)
        self._of_row[row][layer] = dict.fromkeys(range(-1, self.start + 96), states)

    monkeypatch.setattr(bench.StateBefore, "record", newest)
    assert bench.run(1, **bench.SMALL)["window 4"]["largest_difference"] > 1e-3
