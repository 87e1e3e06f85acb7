"""A long run in the real format, made without a model: what a dashboard is slow with is its size alone."""

from pathlib import Path

import numpy as np
import pandas as pd

import cacheprobe as cp
from cacheprobe.trace.state_store import MemoryStore
from cacheprobe.trace.tables.build import LedgerChange
from cacheprobe.trace.tables.schema import TABLES, typed
from cacheprobe.trace.tables.token_history import token_texts_of
from cacheprobe_benchmarks.shared.tiny import tiny_model

PROMPT, WINDOW, VOCAB, TOP = 16, 4, 5000, 5


def save_large_run(folder: Path, requests: int, tokens: int, layers: int) -> Path:
    """Requests in one batch, windows of four, every third of them rolled back at its last candidate; a reading of every
    verified row at every layer."""
    rows, events, ledger = _schedule(requests, tokens)
    small = cp.run(cp.load_model(tiny_model()), [[1, 2, 3]], max_new_tokens=2, capacity=96, progress=False)
    finish = {str(r): "length" for r in range(requests)}
    capture = {**small.meta["capture"], "layers": list(range(layers))}
    readings = _readings(rows, layers)
    trace = cp.Trace(
        requests=tuple(
            cp.Request(tuple(range(PROMPT)), request_id=r, prompt_token_ids=tuple(range(PROMPT)),
                       sampling=cp.SamplingParams(max_new_tokens=tokens))
            for r in range(requests)
        ),
        tokens={r: [_token(r, PROMPT + i) for i in range(tokens)] for r in range(requests)},
        texts={r: f"answer {r}" for r in range(requests)},
        row_table=rows,
        stored_readings=readings,
        token_table=token_texts_of(rows, readings),
        event_table=events,
        ledger_table=ledger,
        store=MemoryStore({}),
        meta={**small.meta, "finish": finish, "capture": capture},
    )  # fmt: skip
    return trace.save(folder)


def _token(request: int, position: int) -> int:
    return (position * 31 + request * 7) % VOCAB


def _schedule(requests: int, tokens: int) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    rows: list[tuple] = []
    events: list[dict] = []
    ledger: list[LedgerChange] = []

    def event(step: int, phase: str, request: int, **more) -> None:
        empty = {name: [] for name in TABLES["events"] if name.endswith(("_ids", "_nats"))}
        held = {**dict.fromkeys(TABLES["events"]), **empty, "margin_nats": (request + step) % 7 / 2}
        events.append({**held, "step": step, "phase": phase, "request_id": request, "batch_rows": requests,
                       "batch_slots": 4, "seconds": 0.01, **more})  # fmt: skip

    for r in range(requests):
        rows += [(r, 0, "prefill", "prompt", "committed", p, p) for p in range(PROMPT)]
        event(0, "prefill", r, committed_token_ids=[_token(r, PROMPT)], committed_logprobs_nats=[-0.5])
        ledger.append(LedgerChange(r, 0, 0, PROMPT, "prefill"))
    step, newest, window = 1, PROMPT, 0
    while newest < PROMPT + tokens - 1:
        drafted = min(WINDOW - 1, PROMPT + tokens - 1 - newest)
        lost = window % 3 == 2
        kept = drafted - lost
        for d in range(drafted):
            for r in range(requests):
                at = newest + d
                status = "rolled_back" if lost and d == drafted - 1 else "superseded"
                rows.append((r, step, "decode", "accepted", status, at, _token(r, at)))
                event(step, "decode", r, proposed_token_ids=[_token(r, at + 1)])
                ledger.append(LedgerChange(r, step, at, at + 1, "provisional"))
            step += 1
        room = PROMPT + tokens - 1 - newest
        committed = min(kept + 1, room)
        for r in range(requests):
            for t in range(drafted + 1):
                status = "committed" if t < committed else "rolled_back"
                rows.append((r, step, "verify", "accepted", status, newest + t, _token(r, newest + t)))
            draft = [_token(r, newest + 1 + t) for t in range(drafted)]
            event(
                step, "verify", r, draft_start=newest + 1, draft_token_ids=draft, num_accepted=kept,
                target_token_ids=[_token(r, newest + 1 + t) for t in range(drafted + 1)],
                num_rolled_back=drafted - kept,
                committed_token_ids=[_token(r, newest + 1 + t) for t in range(committed)],
                committed_logprobs_nats=[-0.25] * committed,
            )  # fmt: skip
            ledger.append(LedgerChange(r, step, newest, newest + drafted + 1, "free"))
            ledger.append(LedgerChange(r, step, newest, newest + committed, "verified"))
        newest, step, window = newest + committed, step + 1, window + 1
    columns = ["request_id", "step", "phase", "role", "status", "position", "token_id"]
    table = pd.DataFrame(rows, columns=columns)
    table.insert(0, "row", np.arange(len(table)))
    table["token"] = [f" t{i}" for i in table.token_id]
    table["num_layers"], table["state_index"] = 99, -1
    return typed(table, "rows"), typed(events, "events"), typed(ledger, "ledger")


def _readings(rows: pd.DataFrame, layers: int) -> pd.DataFrame:
    is_read = (rows.phase == "verify") | ((rows.phase == "prefill") & (rows.position == PROMPT - 1))
    read = rows[is_read].sort_values(["request_id", "step", "row"])
    count = len(read) * layers
    about = read.loc[read.index.repeat(layers)].reset_index(drop=True)
    layer = np.tile(np.arange(layers), len(read))
    target = (about.position.to_numpy() + 1) * 31 + about.request_id.to_numpy() * 7
    target = target % VOCAB
    generator = np.random.default_rng(0)
    settled = generator.integers(layers // 2, layers, len(read)).repeat(layers)
    first = np.where(layer >= settled, target, generator.integers(0, VOCAB, count))
    top = np.stack([(first + 17 * k) % VOCAB for k in range(TOP)], axis=1)
    nats = np.sort(generator.uniform(-8, 0, (count, TOP)), axis=1)[:, ::-1].copy()
    texts = np.array([f" t{i}" for i in range(VOCAB)], dtype=object)
    return pd.DataFrame(
        {
            **{k: about[k] for k in ("row", "request_id", "step", "phase", "role", "status", "position")},
            "layer": layer,
            "site": "S",
            "lens": "logit",
            "token_id": first,
            "token": texts[first],
            "logprob_nats": nats[:, 0].astype("float32"),
            "entropy_nats": generator.uniform(0, 8, count).astype("float32"),
            "committed_token_id": pd.array(target, dtype="Int64"),
            "committed_token": texts[target],
            "rank": pd.array(np.where(first == target, 0, 40), dtype="Int64"),
            "committed_logprob_nats": np.where(first == target, nats[:, 0], -9.0).astype("float32"),
            "agrees": pd.array(first == target, dtype="boolean"),
            "top_token_ids": list(top),
            "top_logprob_nats": list(nats.astype("float32")),
        }
    )
