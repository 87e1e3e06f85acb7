"""A state that a draft row and the verified row of a position share is read once, and nothing else changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.trace.recording import lens_reader
from cacheprobe.trace.recording.lens_reader import LENS_TILE, LensReader, Queued
from tests.tiny import PROMPTS, SMALL, loaded

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "deterministic": ("llama", dict(deterministic=True)),
    "fast path": ("gpt-neox", dict(drafter=cp.drafters.FastPath(), lens="later")),
    "early exit": ("llama", dict(drafter=cp.drafters.EarlyExit(layer=1))),
}


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LensReader]]:
    """Collects every lens reader that is made."""
    made: list[LensReader] = []
    right = LensReader.__init__
    monkeypatch.setattr(LensReader, "__init__", lambda self, *given: (made.append(self), right(self, *given))[1])
    yield made


@pytest.fixture
def reading_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that makes readers find no equal states, so that they read every state."""

    def unequal(pairs: Any) -> list[torch.Tensor]:
        return [torch.zeros(min(len(a.layers), len(b.layers)), dtype=torch.bool) for a, b in pairs]

    return lambda: monkeypatch.setattr(lens_reader, "_same_states", unequal)


@pytest.mark.parametrize("name", RUNS)
def test_equal_states_are_read_once(name: str, readers: list[LensReader], reading_all: Callable[[], None]) -> None:
    """As many as have equal bits on this processor: in bfloat16 often all draft rows. All columns stay as they are."""
    family, settings = RUNS[name]
    model, settings = loaded(family, torch.bfloat16), {**SMALL, "max_new_tokens": 12, **settings}
    trace = cp.run(model, PROMPTS, **settings)
    table = trace.hypotheses(include_rolled_back=True)
    once = readers[-1]
    assert once.num_read + once.num_copied == len(table)
    assert once.num_copied == _equal_states(trace)
    reading_all()
    again = cp.run(model, PROMPTS, **settings).hypotheses(include_rolled_back=True)
    assert (readers[-1].num_read, readers[-1].num_copied) == (len(table), 0)
    pd.testing.assert_frame_equal(table, again, check_exact=True)
    assert table.logprob_nats.to_numpy().tobytes() == again.logprob_nats.to_numpy().tobytes()


def _equal_states(trace: cp.Trace) -> int:
    """Counts the readings of states that an earlier row of the same request, position, layer and target also had.

    Slowly: one row after another, each state as bytes.
    """
    seen, count = set(), 0
    for layer, table in trace.hypotheses(include_rolled_back=True).fillna({"committed_token_id": -1}).groupby("layer"):
        table = table.sort_values("row")
        states = trace.vectors("S", int(layer), table)
        for reading, state in zip(table.itertuples(), states.view(torch.int16).numpy(), strict=True):
            key = (reading.request_id, reading.position, layer, reading.committed_token_id, state.tobytes())
            count += key in seen
            seen.add(key)
    return count


def test_fewer_tiles_are_read(monkeypatch: pytest.MonkeyPatch, reading_all: Callable[[], None]) -> None:
    """1,200 states, 600 of them draft rows': three tiles without copies, two with them."""
    tiles, right = [], LogitLens.to_residual

    def counting(self: LogitLens, states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        tiles.append(len(states))
        return right(self, states, layers)

    monkeypatch.setattr(LogitLens, "to_residual", counting)
    states = torch.randn(200, 3, loaded().d_model, generator=torch.Generator().manual_seed(2))
    rows = [Queued(i, i % 200, states[i % 200].clone(), torch.arange(3), 7, 0, i // 200) for i in range(400)]
    once, table = read(rows)
    assert (tiles, once.num_read, once.num_copied) == ([LENS_TILE] * 2, 600, 600)
    reading_all()
    every, again = read(rows)
    assert (tiles[2:], every.num_read, every.num_copied) == ([LENS_TILE] * 3, 1200, 0)
    pd.testing.assert_frame_equal(table, again, check_exact=True)


def rows_of(*states: torch.Tensor, **places: Any) -> list[Queued]:
    """Rows of request 0 at position 4 with these states [layers, m]; places: what differs for the last one."""
    rows = [Queued(i, 4, s.clone(), torch.arange(len(s)), 7, 0, i) for i, s in enumerate(states)]
    for name, value in places.items():
        setattr(rows[-1], name, value)
    return rows


def read(rows: list[Queued]) -> tuple[LensReader, pd.DataFrame]:
    reader = LensReader(loaded(), LogitLens(), 3)
    reader.queue_together(rows)
    columns = reader.take()
    flat = {name: list(column.numpy()) for name, column in columns.items()}
    return reader, pd.DataFrame(flat).sort_values(["row", "layer"], ignore_index=True)


def some_states(layers: int = 3) -> torch.Tensor:
    return torch.randn(layers, loaded().d_model, generator=torch.Generator().manual_seed(2))


def test_layers_are_compared_one_by_one() -> None:
    """Three rows: the second differs from the first at layer 1, the third has fewer layers and the second's bits."""
    first = some_states()
    second = first.clone()
    second[1, -1] = torch.nextafter(second[1, -1], torch.tensor(9.0))
    reader, table = read(rows_of(first, second, second[:2]))
    assert (reader.num_read, reader.num_copied, len(table)) == (4, 4, 8)
    alone = LensReader(loaded(), LogitLens(), 3)
    for queued in rows_of(first, second, second[:2]):
        alone.queue_resolved(queued)
    columns = alone.take()
    assert alone.num_read == 8
    want = pd.DataFrame({n: list(c.numpy()) for n, c in columns.items()}).sort_values(["row", "layer"])
    pd.testing.assert_frame_equal(table, want.reset_index(drop=True), check_exact=True)


@pytest.mark.parametrize("place", [dict(position=5), dict(target=8), dict(request_id=1)])
def test_a_row_elsewhere_is_read(place: dict[str, int]) -> None:
    """Another position, target or request: its reading would be the same only by chance, or has another rank."""
    reader, _ = read(rows_of(some_states(), some_states(), **place))
    assert (reader.num_read, reader.num_copied) == (6, 0)


def test_a_negative_zero_is_read() -> None:
    """It equals zero as a number, and is another state."""
    zero = some_states()
    zero[0, 0] = 0.0
    negative = zero.clone()
    negative[0, 0] = -0.0
    reader, _ = read(rows_of(zero, negative))
    assert (reader.num_read, reader.num_copied) == (4, 2)


def test_copies_of_a_failed_request_are_left_out(monkeypatch: pytest.MonkeyPatch, readers: list[LensReader]) -> None:
    """A request on which the lens failed has neither readings nor copies."""
    model = loaded("llama", torch.bfloat16)
    settings = dict(**SMALL, deterministic=True)
    want = cp.run(model, PROMPTS, **settings)
    marked, right = want.states("S", 1, 1)[-3:-1], LogitLens.to_residual

    def fails(self: LogitLens, states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        if bool((states[:, None] == marked).all(-1).any()):
            raise IndexError("no such layer")
        return right(self, states, layers)

    monkeypatch.setattr(LogitLens, "to_residual", fails)
    with pytest.warns(RuntimeWarning, match="request 1 step"):
        table = cp.run(model, PROMPTS, **settings).hypotheses()
    others = want.hypotheses().query("request_id != 1").reset_index(drop=True)
    pd.testing.assert_frame_equal(table, others, check_exact=True)
    assert readers[-1].num_copied < len(table)
