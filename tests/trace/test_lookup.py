"""Lines of one request, and states of chosen rows, are found without a scan of the table, and by no old index."""

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.trace.data import Lookup
from tests.tiny import loaded

LONG = dict(max_new_tokens=3, max_batch=4, capacity=64, progress=False)


def test_every_request_of_a_run_is_read_with_one_index_of_each_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call once made a new index of the whole table, or compared every line with the request's number."""
    trace = cp.run(loaded(), [[1, 2, n] for n in range(24)], capture=cp.CaptureConfig(heads=("pattern",)), **LONG)
    built: list[str] = []
    monkeypatch.setattr(Lookup, "_index", counting(Lookup._index, built))
    digests = [trace.digest(n) for n in range(24)]
    ledgers = [len(trace.ledger(n)) for n in range(24)]
    assert len(set(digests)) == 24 and ledgers == [5] * 24  # 3 tokens of the prompt, 2 of 3 new ones
    assert len(built) == 5  # rows: by request, by number, starts of patterns; events and ledger: by request


def counting(real, built: list[str]):
    """Returns `Lookup._index`, which notes the name of every index that it builds."""

    def index(self: Lookup, table: pd.DataFrame, name, build):
        return real(self, table, name, lambda: (built.append(str(name)), build())[1])

    return index


def test_lines_equal_those_of_a_scan() -> None:
    table = pd.DataFrame({"request_id": [3, 1, 3, 2, 1], "x": list("abcde")}, index=[5, 6, 7, 8, 9])
    lookup = Lookup()
    for request_id in (1, 2, 3, 4):
        pd.testing.assert_frame_equal(lookup.lines_of(table, request_id), table[table.request_id == request_id])


@pytest.mark.parametrize("dtype", ["int64", "Int64"])
def test_another_table_is_indexed_again(dtype: str) -> None:
    table = pd.DataFrame({"request_id": pd.array([0, 0, 1], dtype=dtype), "x": [1, 2, 3]})
    lookup = Lookup()
    assert lookup.lines_of(table, 0).x.tolist() == [1, 2]
    table.loc[0, "x"] = 9
    assert lookup.lines_of(table, 0).x.tolist() == [9, 2]
    assert lookup.lines_of(table.iloc[1:], 1).x.tolist() == [3]
    changed = table.assign(request_id=[1, 0, 1])
    assert [lookup.lines_of(changed, n).x.tolist() for n in (0, 1)] == [[2], [9, 3]]


def test_states_of_chosen_rows_come_in_their_order_and_twice_if_asked_for() -> None:
    trace = cp.run(loaded(), [[1, 2, 3], [4, 5]], capture="S", **LONG)
    rows = trace.rows(1, "committed").row.tolist()
    states = trace.vectors("S", -1, rows)
    assert torch.equal(trace.vectors("S", -1, [rows[1], rows[0], rows[1]]), states[[1, 0, 1]])
    with pytest.raises(KeyError, match="no row 999"):
        trace.vectors("S", 0, [rows[0], 999])
