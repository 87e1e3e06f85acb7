"""From a recorder that has seen a whole run to its Trace."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cacheprobe.capture.recorder import Recorder
from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks import accuracy
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.thoughts import thought_states, thoughts_table
from cacheprobe.trace.trace import Trace


def assemble(
    recorder: Recorder,
    requests: Sequence[Request],
    fingerprint: dict[str, Any],
    config: EngineConfig,
    capture: CaptureConfig,
    meta: dict[str, Any],
) -> Trace:
    """Read the last lens tiles, join the states, build the tables."""
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
            "fingerprint": fingerprint,
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


def _thinking(model: CachedLM) -> dict[str, Any]:
    """What a picture of thoughts asks of the model: where states enter and thoughts are read, and what S of the first
    chunk is."""
    config = getattr(model, "config", None)
    return {
        "l_in": getattr(config, "l_in", None),
        "l_out": getattr(config, "l_out", None),
        "feeds_back": getattr(config, "feeds_back", True),
        "learned_first_state": getattr(config, "learned_first_state", False),
    }


def _unread(recorder: Recorder, columns: dict[str, Any]) -> dict[str, str]:
    """Readings that a lens failed to give: of each such request, and of the whole run if there are no others."""
    errors = recorder.reader.errors if recorder.reader is not None else {}
    whole = {"Z": next(iter(errors.values()))} if errors and not columns else {}
    return whole | {f"Z of request {request_id}": why for request_id, why in errors.items()}


def _behaviour_or_why(
    recorder: Recorder, requests: Sequence[Request], texts: dict[int, str]
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """(`behaviour`, {}) or, where a user's own task fails to score the texts, (None, why)."""
    try:
        return behaviour(recorder, requests, texts), {}
    except Exception as error:
        why = f"the task's examples could not be scored, {type(error).__name__}: {error!s:.200}"
        return None, {"behaviour": why}


def behaviour(recorder: Recorder, requests: Sequence[Request], texts: dict[int, str]) -> dict[str, Any] | None:
    """How the model does on the task it was given: accuracy of the text, mass on the answers, chance.

    answer_mass: mean probability that the first generated token is one of the answers.
    forced_accuracy: share of prompts where the right answer is the likelier of the two.
    Both are null where the tokenizer starts the answers with one token, or joins them to the prompt.
    None where no request came from a task, or where tasks with different answers, and so no common chance, are mixed.
    Requests that were cancelled are left out.
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
