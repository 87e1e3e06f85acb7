"""What a deliberate attack tries: edits that leave no count, forged manifests, forked processes, odd settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.engine.fingerprint import FingerprintMismatch
from cacheprobe.trace.manifest import TraceError
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

RUN: dict[str, Any] = {**SMALL, "capture": "S"}
STREAMED = {name: value for name, value in RUN.items() if name != "progress"}


def fresh() -> Any:
    """A model of its own, whose weights a test may edit."""
    return cp.load_model(hf_model(seed=5))


# -- weights that change inside a run, through .data, which neither address nor edit count shows


def edit_at(model: Any, position: int = 12) -> Callable[[Any], bool]:
    """A predicate of rows to keep that edits a weight at this position."""
    weight = next(iter(model.bridge.original_model.parameters()))

    def keep(row: Any) -> bool:
        if row.position == position:
            weight.data.add_(0.5)
        return True

    return keep


def test_a_reference_and_a_replay_whose_weights_changed_end_with_an_error() -> None:
    for act in (
        lambda model, capture: cp.reference(model, PROMPTS[:1], **{**RUN, "capture": capture}),
        lambda model, capture: cp.replay(model, [[9] * 20], prompts=[PROMPTS[0]], capture=capture, progress=False),
    ):
        model = fresh()
        with pytest.raises(FingerprintMismatch, match="weights_sha256"):
            act(model, cp.CaptureConfig(sites="S", keep=edit_at(model)))


def test_a_recorded_run_whose_weights_changed_leaves_nothing_to_resume(tmp_path: Path) -> None:
    model, out = fresh(), tmp_path / "run"
    capture = cp.CaptureConfig(sites="S", keep=edit_at(model))
    with pytest.raises(FingerprintMismatch, match="begin and end of one run.*weights_sha256"):
        cp.run(model, PROMPTS[:2], out=out, **{**RUN, "capture": capture})
    assert [path.name for path in out.iterdir()] == []
    with pytest.raises(TraceError, match="holds no run"):
        cp.resume(out, fresh())


def test_a_resumed_run_whose_weights_change_ends_with_an_error(tmp_path: Path) -> None:
    """The first process records until it is killed; the second one edits a weight."""
    model, out = fresh(), tmp_path / "run"
    capture = cp.CaptureConfig(sites="S", keep=edit_at(model, 10**9))
    stream = cp.stream(model, PROMPTS[:2], out=out, **{**STREAMED, "capture": capture})
    for _ in zip(range(6), stream, strict=False):
        pass
    del stream
    with pytest.raises(FingerprintMismatch, match="weights_sha256"):
        cp.resume(out, model, keep=edit_at(model, 18), progress=False)


# -- forged manifests


@pytest.mark.parametrize("value", [None, "no digest"])
def test_a_manifest_without_its_checksum_is_refused(value: object, tmp_path: Path) -> None:
    trace = cp.run(fresh(), PROMPTS[:1], **RUN)
    path = trace.save(tmp_path / "run") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["requests"][0]["committed_token_ids"][0] += 1
    path.write_text(json.dumps({**manifest, "manifest_sha256": value}))
    with pytest.raises(TraceError, match="manifest"):
        cp.load_trace(tmp_path / "run")


# -- odd values


@pytest.mark.parametrize("out", [5, "runs/\0x"])
def test_an_out_that_is_no_path_is_named(out: Any) -> None:
    model = loaded()
    calls: list[Callable[[], object]] = [
        lambda: cp.run(model, PROMPTS[:1], out=out, **RUN),
        lambda: cp.stream(model, PROMPTS[:1], out=out, **STREAMED),
        lambda: cp.reference(model, PROMPTS[:1], out=out, **RUN),
        lambda: cp.verify(cp.run(model, PROMPTS[:1], deterministic=True, **RUN), model, out=out),
        lambda: cp.replay(model, [[9, 9]], prompts=[PROMPTS[0]], out=out),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="out must be the path of a folder"):
            call()
    with pytest.raises(ValueError, match="out must be the path of a folder|out in the sweep's settings"):
        cp.sweep(dict(out=out, grid=dict(model=["smollm2-135m"], task=["coin_flip"]), run=dict(n=1)))
    for open_run in (lambda: cp.load_trace(out), lambda: cp.resume(out, model)):
        with pytest.raises(ValueError, match="directory must be the path of a folder"):
            open_run()
    with pytest.raises(ValueError, match="directory must be the path of a folder"):
        cp.run(model, PROMPTS[:1], **RUN).save(out)
