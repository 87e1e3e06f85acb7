"""An error about a name of an earlier version gives today's name; one about a misspelt name gives the nearest."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.core.values import RENAMED
from cacheprobe.models.base import ModelError
from cacheprobe.training.thinking.presets import preset_of
from tests.tiny import loaded

TOKENS = [1, 2, 3, 4]


def small_trace() -> cp.Trace:
    return cp.run(loaded(), [TOKENS], max_new_tokens=2, capture=None, progress=False)


OLD: list[tuple[str, type[Exception], Callable[[], object]]] = [
    ("kv_rows", TypeError, lambda: cp.run(loaded(), [TOKENS], kv_rows=64)),
    ("kv_rows", TypeError, lambda: EngineConfig(kv_rows=64)),
    ("keep_rows", TypeError, lambda: cp.Request(TOKENS, keep_rows=True)),
    ("keep_rows", TypeError, lambda: replace(cp.Request(TOKENS), keep_rows=True)),
    ("keep_rows", AttributeError, lambda: cp.Request(TOKENS).keep_rows),
    ("keeps_rows", AttributeError, lambda: cp.CaptureConfig().keeps_rows),
    ("keeps_kv", AttributeError, lambda: cp.CaptureConfig().keeps_kv),
    ("rows_needed", AttributeError, lambda: EngineConfig().rows_needed(1, 1)),
    ("Grid", AttributeError, lambda: cp.patching.Grid),
    ("lens_picture", AttributeError, lambda: cp.plots.lens_picture),
    ("hidden_parts", AttributeError, lambda: cp.kv_snapshot(loaded(), TOKENS).hidden_parts),
    ("cache_rows", AttributeError, lambda: cp.cache_rows(loaded(), TOKENS)),
    ("cache_rows", AttributeError, lambda: cp.stream(loaded(), [TOKENS]).cache_rows(0)),
    ("cache_rows", AttributeError, lambda: cp.analysis.cache_rows),
    ("foresight", AttributeError, lambda: cp.probes.foresight),
    ("Foresight", AttributeError, lambda: cp.probes.Foresight),
    ("foresight_figure", AttributeError, lambda: cp.plots.foresight_figure),
    ("settling_figure", AttributeError, lambda: cp.plots.settling_figure),
    ("agreement_figure", AttributeError, lambda: cp.plots.agreement_figure),
    *((name, AttributeError, lambda name=name: getattr(cp.analysis, name)) for name in (
        "settling", "read", "readings", "rejected", "thought_readings", "thought_insides")),
    ("candidate", ValueError, lambda: small_trace().rows(status="candidate")),
    ("twin", ValueError, lambda: cp.run(loaded(), [TOKENS], path="twin")),
    ("far", ModelError, lambda: preset_of("coin-flip", "far")),
    ("all-jump", ModelError, lambda: preset_of("coin-flip", "all-jump")),
    ("no-jumps", ModelError, lambda: preset_of("coin-flip", "no-jumps")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "use"), OLD, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(OLD)])
def test_an_old_name_is_refused_with_the_new_one(
    name: str, error: type[Exception], use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cp.analysis, name, raising=False)  # a module of that name that another test imported
    with pytest.raises(error, match=f"{name}.*; it is named {RENAMED[name]} now"):
        use()


def test_the_old_method_names_its_old_column_too() -> None:
    with pytest.raises(AttributeError, match="cp.analysis.prediction_depth.*settling_layer is named prediction_depth"):
        small_trace().settling()
    assert "prediction_depth" in cp.analysis.prediction_depth(cp.run(loaded(), [TOKENS], max_new_tokens=2)).columns


def test_every_old_name_is_tried() -> None:
    """The column settling_layer is tried above."""
    assert {name for name, *_ in OLD} == RENAMED.keys() - {"settling_layer"}


@pytest.mark.parametrize(
    ("use", "near"),
    [
        (lambda: cp.Request(TOKENS, arrival=2), "arrival_step"),
        (lambda: cp.CaptureConfig(site="S"), "sites"),
        (lambda: cp.SamplingParams(max_tokens=3), "max_new_tokens"),
        (lambda: cp.lode_model, "load_model"),
        (lambda: cp.plots.lens_grids, "lens_grid"),
        (lambda: cp.interventions.zero(request_id=0, sit="S", layer=1), "site"),
        (lambda: cp.patching.causal_tracing(loaded(), TOKENS, [0], sample=2), "samples"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(use: Callable[[], object], near: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError), match=rf"; did you mean {near}\?"):
        use()


def test_an_unknown_name_without_a_near_one_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown argument 'qqq'$"):
        cp.Request(TOKENS, qqq=1)
    with pytest.raises(AttributeError, match="'qqq'$"):
        _ = cp.Request(TOKENS).qqq


def test_settings_are_copied_and_pickled_as_before() -> None:
    for settings in (cp.Request(TOKENS, keep_kv=True), cp.CaptureConfig("SZ", top_k=3), EngineConfig(window=8)):
        assert copy.copy(settings) == pickle.loads(pickle.dumps(settings)) == replace(settings) == settings
        assert not hasattr(settings, "_repr_html_")
