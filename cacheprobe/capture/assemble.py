"""Builds the Trace from a recorder, after the run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from cacheprobe.capture.recorder import Recorder
from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks import accuracy
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.thoughts import thought_states, thoughts_table
from cacheprobe.trace.trace import Trace


def assemble(
    recorder: Recorder,
    requests: Sequence[Request],
    fingerprint: Mapping[str, object],
    config: EngineConfig,
    capture: CaptureConfig,
    meta: JsonDict,
) -> Trace:
    """Returns the Trace: reads the last lens tiles, joins the states, builds the tables."""
    model = recorder.model
    tokens = {r.request_id: list(recorder.finished[r.request_id].committed) for r in requests}
    texts = {request_id: model.decode(token_ids) for request_id, token_ids in tokens.items()}
    rows = tables.rows_table(recorder.rows, model.token_texts)
    columns = recorder.reader.finish() if recorder.reader is not None else {}
    hypotheses = tables.hypotheses_table(columns, rows, recorder.lens.name, model.token_texts) if columns else None
    thoughts, events = recorder.thoughts, tables.events_table(recorder.steps)
    behaved, failed = _behaviour_or_why(recorder, requests, texts)
    missing = {**meta.get("missing", {}), **_unread(recorder, columns), **failed}
    checks = [asdict(check) for check in (recorder.residual_check, recorder.lens_check) if check.num_rows]
    return Trace(
        requests=tuple(requests),
        tokens=tokens,
        texts=texts,
        row_table=rows,
        hypothesis_table=hypotheses,
        event_table=events,
        token_table=tables.tokens_table(rows, tokens, events, columns, model.token_texts),
        ledger_table=tables.ledger_table(recorder.ledger),
        store=recorder.store(),
        thought_table=thoughts_table(thoughts, rows, requests, tokens, model) if thoughts else None,
        thought_states=thought_states(thoughts) if thoughts else None,
        meta={
            **{name: value for name, value in meta.items() if name != "missing"},
            "fingerprint": dict(fingerprint),
            "config": asdict(config),
            "capture": {**asdict(capture), "layers": list(recorder.layers)},
            "lens": recorder.lens.name,
            "weights_note": model.weights_note,
            "cache_row_bytes": model.new_cache(1, 1).cache_bytes,
            "thought_layer": getattr(getattr(model, "config", None), "l_out", None),
            "thinking": _thinking(model) if thoughts else None,
            "checks": checks,
            "finish": {str(r.request_id): recorder.finished[r.request_id].reason for r in requests},
            "preemptions": recorder.preemptions,
            "self_checks": {"compared": recorder.num_compared, "differences": recorder.differences},
            "behaviour": behaved,
            **({"missing": missing} if missing else {}),
        },
        model=model,
    )


def _thinking(model: CachedLM) -> dict[str, object]:
    """Returns the settings that a picture of thoughts needs: the layers where thoughts enter and are read, and the
    states that are added to the first chunk.
    """
    config = getattr(model, "config", None)
    return {
        "l_in": getattr(config, "l_in", None),
        "l_out": getattr(config, "l_out", None),
        "feeds_back": getattr(config, "feeds_back", True),
        "learned_first_state": getattr(config, "learned_first_state", False),
    }


def _unread(recorder: Recorder, columns: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns why readings are missing, for each request whose lens failed, and for the whole run if no request has
    readings.
    """
    errors = recorder.reader.errors if recorder.reader is not None else {}
    whole = {"Z": next(iter(errors.values()))} if errors and not columns else {}
    return whole | {f"Z of request {request_id}": why for request_id, why in errors.items()}


def _behaviour_or_why(
    recorder: Recorder, requests: Sequence[Request], texts: dict[int, str]
) -> tuple[dict[str, float | None] | None, dict[str, str]]:
    """Returns (`behaviour`, {}), or (None, {"behaviour": reason}) if a user's own task fails to score the texts."""
    try:
        return behaviour(recorder, requests, texts), {}
    except Exception as error:
        why = f"the task's examples could not be scored, {type(error).__name__}: {error!s:.200}"
        return None, {"behaviour": why}


def behaviour(recorder: Recorder, requests: Sequence[Request], texts: dict[int, str]) -> dict[str, float | None] | None:
    """Returns the model's accuracy on the run's task, the probability of its answers, and chance.

    answer_mass: mean probability that the first generated token is one of the answers.
    forced_accuracy: share of prompts whose right answer is the most likely of the allowed answers.
    Both are null if the tokenizer starts two answers with the same token, or joins an answer to the prompt.
    Returns None if no request came from a task, or if tasks with different answers, so without a common chance, are
    mixed.
    Cancelled requests are left out.
    """
    ended = [r for r in requests if recorder.finished[r.request_id].reason != "cancelled"]
    asked = [r for r in ended if r.example is not None]
    if len({tuple(sorted(r.example.question.answers)) for r in asked}) != 1:
        return None
    score = accuracy([r.example for r in asked], [texts[r.request_id] for r in asked])
    masses = [recorder.answer_mass[r.request_id] for r in asked if r.request_id in recorder.answer_mass]
    low, high = score.interval
    known = {
        "num_examples": score.num_examples,
        "accuracy": score.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "num_unparsed": score.num_unparsed,
        "chance": score.chance,
    }
    if len(masses) < len(asked):
        return {**known, "answer_mass": None, "forced_accuracy": None}
    right = [
        mass[r.example.answers.index(r.example.answer)]
        > max(m for i, m in enumerate(mass) if r.example.answers[i] != r.example.answer)
        for r, mass in zip(asked, masses, strict=True)
    ]
    return {
        **known,
        "answer_mass": sum(sum(mass) for mass in masses) / len(masses),
        "forced_accuracy": sum(right) / len(right),
    }
