"""Builds the Trace of a run from its Recorder, after the last pass."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.core.tokens import special_token_ids, visible
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.models.conversation import stopped_by
from cacheprobe.tasks import accuracy
from cacheprobe.trace.recording.recorder import Recorder, Source
from cacheprobe.trace.recording.stored_states import missing_readings, read_now
from cacheprobe.trace.state_store import MemoryStore
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.build import Part
from cacheprobe.trace.tables.reasoning import spans_of
from cacheprobe.trace.tables.thoughts import first_logits, thought_lines, thought_states, thoughts_table
from cacheprobe.trace.trace import Trace


def assemble(
    recorder: Recorder,
    requests: Sequence[Request],
    fingerprint: Mapping[str, object],
    config: EngineConfig,
    capture: CaptureConfig,
    meta: JsonDict,
) -> Trace:
    """Returns the Trace of a finished run from its Recorder. Call it once, since it frees the recorder's states.

    Reads the remaining rows through the lens, joins the states and builds the tables. If `capture` has Z and the
    recorder does not read it, the trace reads Z at its first use. meta: more entries of trace.meta.
    """
    if recorder.reader is not None:
        recorder.reader.require_ended()
    part = recorder.take()
    tokens = {r.request_id: list(recorder.finished[r.request_id].committed) for r in requests}
    before = meta_before(recorder, fingerprint, config, capture, meta, has_thoughts=bool(part.thoughts))
    trace = trace_of_part(part, recorder, requests, tokens, before)
    trace.meta |= meta_after(recorder, requests, trace.texts, bool(part.columns), meta)
    trace.reading_later = read_now if trace.is_unread else None
    return trace


def trace_of_part(
    part: Part, source: Source, requests: Sequence[Request], tokens: dict[int, list[int]], meta: JsonDict
) -> Trace:
    """Returns the Trace of a run whose only part is in memory. source: gave the part.  tokens: committed ids by
    request.

    Twin: the Trace of the same run in several parts on disk, ==: the tables have the same lines, and the states the
    same bits.
    """
    texts_of, thoughts = source.texts.token_texts, part.thoughts
    built = tables.part_tables(part, tokens, texts_of)
    rows, thought_table, readings, features = built["rows"], None, None, None
    if thoughts:
        assert source.model is not None
        lines = thought_lines(thoughts, requests, source.model)
        thought_table = thoughts_table(lines, first_logits(thoughts), rows, tokens)
    if part.columns:
        readings = tables.hypotheses_table(part.columns, rows, meta["lens"], texts_of)
    if part.features is not None:
        features = tables.feature_table(part.features, rows, meta["capture"]["statuses"])
    return Trace(
        requests=tuple(requests),
        tokens=tokens,
        texts={r.request_id: source.texts.decode(tokens[r.request_id], after=r.prompt_token_ids) for r in requests},
        row_table=rows,
        stored_readings=readings,
        event_table=built["events"],
        token_table=built["tokens"],
        ledger_table=built["ledger"],
        store=MemoryStore(part.states),
        thought_table=thought_table,
        feature_table=features,
        thought_states=thought_states(thoughts) if thoughts else None,
        meta=meta,
        model=source.model,
    )


def meta_before(
    recorder: Recorder,
    fingerprint: Mapping[str, object],
    config: EngineConfig,
    capture: CaptureConfig,
    meta: JsonDict,
    has_thoughts: bool = True,
) -> JsonDict:
    """Returns the entries of trace.meta that are known before the first pass. meta: more entries.  has_thoughts: False
    if the model wrote none."""
    model = recorder.model
    return {
        **{name: value for name, value in meta.items() if name not in ("missing", "errors")},
        "fingerprint": dict(fingerprint),
        "config": asdict(config),
        "capture": {**capture.record(), "layers": list(recorder.layers)},
        "lens": recorder.lens.name,
        **({"is_lens_later": True} if capture.reads_lens and recorder.reader is None else {}),
        "weights_note": model.weights_note,
        "special_token_ids": list(special_token_ids(model)),
        "d_vocab": model.d_vocab,
        "cache_row_bytes": model.new_cache(1, 1).cache_bytes,
        "thought_layer": getattr(getattr(model, "config", None), "l_out", None),
        "thinking": _thinking(model) if has_thoughts else None,
    }


def meta_after(
    recorder: Recorder, requests: Sequence[Request], texts: Mapping[int, str], has_readings: bool, meta: JsonDict
) -> JsonDict:
    """Returns the entries of trace.meta that are known after the last pass. meta: the run's "errors" and "missing"."""
    so_far = recorder.so_far()
    errors = recorder.reader.errors if recorder.reader is not None else {}
    missing = {**meta.get("missing", {}), **missing_readings(errors, has_readings)}
    try:
        scores = behaviour(recorder, requests, texts)
    except Exception as error:
        scores = None
        missing["behaviour"] = f"the task's examples could not be scored, {type(error).__name__}: {error!s:.200}"
    stopped = {
        str(r.request_id): stopped_by(recorder.model, r, ended.committed)
        for r in requests
        if (ended := recorder.finished[r.request_id]).reason == "stop"
    }
    return {
        **({"errors": meta["errors"]} if "errors" in meta else {}),
        "finish": {str(r.request_id): recorder.finished[r.request_id].reason for r in requests},
        "stopped_by": stopped,
        **{name: so_far[name] for name in ("checks", "preemptions", "self_checks")},
        "behaviour": scores,
        **({"missing": missing} if missing else {}),
    }


def _thinking(model: CachedLM) -> dict[str, object] | None:
    """Returns a dict of the settings of a Thinking States model that pictures of its thoughts need: l_in, l_out,
    feeds_back and learned_first_state; None for another model."""
    defaults = {"l_in": None, "l_out": None, "feeds_back": True, "learned_first_state": False}
    config = getattr(model, "config", None)
    settings = {name: getattr(config, name, default) for name, default in defaults.items()}
    return None if settings["l_out"] is None else settings


def _answered(model: CachedLM, request: Request, text: str) -> str:
    """Returns the generated text. Puts "<think>" before it if the prompt ends inside a block of reasoning."""
    ids = request.prompt_token_ids
    shown = [visible(token) for token in model.token_texts(ids)]
    spans = spans_of(request, ids, shown, special_token_ids(model), "<think>", "</think>")
    return f"<think>{text}" if spans and not spans[-1][2] else text


def behaviour(
    recorder: Recorder, requests: Sequence[Request], texts: Mapping[int, str]
) -> dict[str, float | None] | None:
    """Returns a dict that scores the run on its task: num_examples, accuracy, accuracy_low, accuracy_high,
    num_unparsed, chance, answer_mass, forced_accuracy.

    answer_mass: mean probability that the first generated token begins an answer that the task allows.
    forced_accuracy: share of prompts whose right answer is the most likely of the allowed answers.
    Both are None if a request chose no token, or if the first tokens of its answers are unknown: two answers begin with
    the same token, or the tokenizer joins an answer to the prompt.
    Returns None if no request came from a task, or if the requests' tasks allow different answers.
    Cancelled requests are left out.
    """
    ended = [r for r in requests if recorder.finished[r.request_id].reason != "cancelled"]
    scored = [r for r in ended if r.example is not None]
    if len({tuple(sorted(r.example.question.answers)) for r in scored}) != 1:
        return None
    score = accuracy([r.example for r in scored], [_answered(recorder.model, r, texts[r.request_id]) for r in scored])
    masses = [recorder.answer_mass[r.request_id] for r in scored if r.request_id in recorder.answer_mass]
    low, high = score.interval
    known = {
        "num_examples": score.num_examples,
        "accuracy": score.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "num_unparsed": score.num_unparsed,
        "chance": score.chance,
    }
    if len(masses) < len(scored):
        return {**known, "answer_mass": None, "forced_accuracy": None}
    right = [
        mass[r.example.answers.index(r.example.answer)]
        > max(m for i, m in enumerate(mass) if r.example.answers[i] != r.example.answer)
        for r, mass in zip(scored, masses, strict=True)
    ]
    return {
        **known,
        "answer_mass": sum(sum(mass) for mass in masses) / len(masses),
        "forced_accuracy": sum(right) / len(right),
    }
