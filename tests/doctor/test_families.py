"""The table of `cacheprobe doctor --models`: telling families pass all columns, others are refused with a reason, and a
planted fault turns its column red."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cacheprobe.cli import look
from cacheprobe.cli.doctor.families import rows, table
from cacheprobe.cli.doctor.families.columns import COLUMNS
from cacheprobe.cli.doctor.families.rows import Row, measure
from cacheprobe.cli.doctor.families.tiny import families
from cacheprobe.cli.doctor.families.variants import VARIANTS
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.plain.sites import PlainSites
from cacheprobe.models.plain.structure import AddedPart, PlainBlock

TELLING = {
    "llama": "fast",
    "granite": "bridge",  # scales what it adds
    "bloom": "plain",  # ALiBi
    "opt": "plain",  # MLP output without batch dimension
    "exaone4": "fast",  # norms after attention and MLP, sliding windows
    "mamba2": "plain",  # recurrent states alone, no MLP
    "jamba": "plain",  # recurrent states, attention and experts
    "rwkv": "plain",  # recurrent states of two modules a block, in a list of its own
    "falcon_h1": "plain",  # a recurrent state beside keys and values, both scaled
    "nemotron_h": "plain",  # a mixer or an MLP in each block, least time steps
    "gemma4_text": "plain",  # blocks that scale the stream and add a third part
}
LEAST_GREEN = 45
Edit = Callable[[Tensor], Tensor | None]
DOCS = Path(__file__).parents[2] / "docs/families.txt"


@pytest.mark.parametrize("family", TELLING)
def test_a_telling_family_passes_every_column(family: str) -> None:
    row = measure(family)
    assert row.is_green, row.reasons
    assert row.path == TELLING[family]
    assert _documented(row)


def _documented(row: Row) -> bool:
    """Whether docs/families.txt has the same path and columns for the family; numbers in a reason may differ."""
    facts = table.markdown_line(row).rpartition(" | ")[0]
    return any(line.startswith(facts) for line in DOCS.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("family", ["inkling_text", "minimax", "bart", "openai-gpt", "gemma3n_text"])
def test_a_family_without_rollback_is_refused_with_a_reason(family: str) -> None:
    row = measure(family)
    assert row.is_refused and not row.path and row.reasons[0]
    assert _documented(row)


def _plant_forgetful_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback after which the first rejected token's keys and values come back."""
    truncate, store = KVCache.truncate, KVCache.store
    stale: dict[int, tuple[int, int, list[Tensor], list[Tensor]]] = {}

    def remember(cache: KVCache, row: int, length: int) -> None:
        keys, values = ([t[row, :, length].clone() for t in tensors] for tensors in (cache.keys, cache.values))
        stale[id(cache)] = row, length, keys, values
        truncate(cache, row, length)

    def store_again(cache: KVCache, layer: int, *arguments: Any) -> slice | Tensor:
        written = store(cache, layer, *arguments)
        if id(cache) in stale:
            row, slot, keys, values = stale[id(cache)]
            cache.keys[layer][row, :, slot], cache.values[layer][row, :, slot] = keys[layer], values[layer]
        return written

    monkeypatch.setattr(KVCache, "truncate", remember)
    monkeypatch.setattr(KVCache, "store", store_again)


def _plant_early_t(monkeypatch: pytest.MonkeyPatch) -> None:
    """T captured at the attention, before the norm that follows."""
    own = PlainSites._add_sum

    def early(self: PlainSites, stack: ExitStack, block: PlainBlock, parts: Sequence[AddedPart], edit: Edit) -> None:
        is_t = tuple(parts) == block.attended
        own(self, stack, block, (replace(parts[0], path=block.attention),) if is_t else parts, edit)

    monkeypatch.setattr(PlainSites, "_add_sum", early)


def _plant_lost_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits that are computed and not applied."""
    own = PlainSites._add_hooks

    def lost(self: PlainSites, stack: ExitStack, site: str, layer: int, edit: Callable[[Tensor], object]) -> None:
        own(self, stack, site, layer, lambda value: (edit(value), None)[1])

    monkeypatch.setattr(PlainSites, "_add_hooks", lost)


@pytest.mark.parametrize(
    ("plant", "family", "column"),
    [
        (_plant_forgetful_rollback, "opt", "rollback"),
        (_plant_early_t, "kolibri1", "S/T/C"),
        (_plant_lost_edit, "opt", "edits"),
    ],
    ids=["a rejected row comes back", "T before its norm", "a lost edit"],
)
def test_a_planted_fault_turns_its_column_red(
    plant: Callable[[pytest.MonkeyPatch], None], family: str, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "COLUMNS", {column: COLUMNS[column]})
    assert measure(family).cells == {"loads": True, column: True}
    plant(monkeypatch)
    assert measure(family).cells == {"loads": True, column: False}


@pytest.mark.slow
def test_every_family_is_green_refused_or_named() -> None:
    found = table.measure_all(table.names_to_measure(), progress=False)
    of_families = [row for row in found if row.name in families()]
    assert sum(row.is_green for row in of_families) >= LEAST_GREEN
    assert not [row.name for row in found if row.is_crash]
    for row in of_families:
        assert _documented(row), row
    wrong = [row for row in found if not row.is_green and not row.is_refused]
    assert all(row.reasons for row in wrong)


def test_a_crash_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies at its first family, and one that finishes."""
    monkeypatch.setattr(table.sys, "executable", "/bin/false")
    (row,) = list(table._measured(["llama"]))
    assert row.is_crash and not row.is_refused and "process ended" in row.reasons[0]


def test_the_command_prints_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = Row("llama", "LlamaForCausalLM", dict.fromkeys(("loads", *COLUMNS), True), "fast")
    bad = Row("phi", "PhiForCausalLM", {**good.cells, "D1": False}, "plain", ["D1: other bits"])
    refused = Row("mamba", "MambaForCausalLM", {"loads": False}, "", ["recurrent"])
    monkeypatch.setattr(table, "measure_all", lambda names, progress: [good, bad, refused])
    assert look.doctor(models=True, families="llama,phi,mamba") == 1
    said = capsys.readouterr().out
    assert "1 of 3 pass all columns, 1 are refused, 1 fail a column" in said and "D1: other bits" in said
    look.doctor(models=True, json=True)
    stored = json.loads(capsys.readouterr().out)
    assert [one["is_green"] for one in stored] == [True, False, False]
    assert [Row.from_json(one) for one in stored] == [good, bad, refused]
    look.doctor(models=True, markdown=True)
    assert "| phi | plain | all but D1 | D1: other bits |" in capsys.readouterr().out


def test_names_of_families() -> None:
    assert len(families()) > 60
    assert table.names_to_measure("llama, qwen3") == ["llama", "qwen3"]
    assert set(VARIANTS) <= set(table.names_to_measure())
    assert all(variant.family in families() for variant in VARIANTS.values())
    with pytest.raises(ValueError, match="unknown family 'lama'.*llama"):
        table.names_to_measure("lama")
    with pytest.raises(ValueError, match="add --models"):
        look.doctor(families="llama")


def test_an_error_of_a_column_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: object) -> str:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(rows, "COLUMNS", {"Z": broken})
    row = measure("llama")
    assert row.cells == {"loads": True, "Z": False} and row.reasons[-1] == "Z: RuntimeError: a shape is wrong"
