"""Compares random traffic, bit for bit, with the slow reference (`cp.reference`), which computes each request alone.

`cp.verify` compares tokens, log-probabilities, states, heads and readings, of cancelled requests up to the last token.
Greedy answers in float32 are also compared with Hugging Face's own decoding. A negative control shows that without
verification the output of some traffic depends on the batch.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.kvcache.status import checked_states
from cacheprobe.models.settings import numeric_settings, processor_name
from tests.stress.subjects import REAL, Subject, in_accepted_shape, near_tie_subjects, real_subjects, tiny_subjects
from tests.stress.traffic import Corrupted, Episode, draw_episode, draw_request

SHARES = {"tiny": 0.875, "near_ties": 0.1, "real": 0.025}
"""Share of the compared tokens, by kind of subject: a token of the real model takes forty times a tiny model's time."""


@dataclass
class Tally:
    """Holds what a soak compared, and the differences that it found."""

    compared: Counter[str] = field(default_factory=Counter)
    """Number of tokens compared, by subject."""
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Reason for each refused shape of passes, by subject and shape."""

    def figures(self) -> dict[str, Any]:
        """Returns the amounts compared, the refused shapes and the number of differences."""
        return {
            "compared_tokens": self.compared.total(),
            "real_model_compared_tokens": sum(n for key, n in self.compared.items() if key.startswith(REAL)),
            "models": len({key.split()[0] for key in self.compared}),
            **dict(sorted(self.counts.items())),
            "shapes_refused_by_trial": len(self.refused),
            "refused_shapes": self.refused,
            "differences": len(self.differences),
        }


def one_episode(subject: Subject, tally: Tally, seed: Sequence[int], most_requests: int = 6) -> None:
    """Runs one episode of random traffic, and adds what was compared and every difference to `tally`."""

    def compute(shape: Subject) -> tuple[Episode, cp.Trace]:
        """Draws the episode in this shape and runs it, as a stream if it is one."""
        drawn = draw_episode(shape, seed, most_requests)
        settings = {**shape.settings, **drawn.keywords}
        if drawn.num_abandoned:
            pieces = cp.stream(shape.model, drawn.requests, **settings)
            for _ in zip(range(drawn.num_abandoned), pieces, strict=False):
                pass
            pieces.close()
        if not drawn.is_stream:
            return drawn, cp.run(shape.model, drawn.requests, **settings, progress=False)
        pieces = cp.stream(shape.model, drawn.requests, **settings)
        for number, _ in enumerate(pieces, 1):
            for request_id, after in drawn.cancelled.items():
                if number == after:
                    pieces.cancel(request_id)
        return drawn, pieces.trace()

    shape, (drawn, trace) = in_accepted_shape(subject, tally.refused, compute)
    where = f"{shape.key}, seed {list(seed)}"
    tally.differences += [f"{where}: request {i} ended with {error}" for i, error in trace.meta["errors"].items()]
    if not trace.meta["errors"]:
        compared = cp.verify(trace, shape.model, progress=False)
        if compared.first_difference is not None:
            tally.differences.append(f"{where}: {compared.first_difference}")
        tally.compared[subject.name] += compared.num_tokens
        tally.counts["states_and_heads_compared"] += compared.num_states
        tally.counts["readings_compared"] += compared.num_readings
        if not drawn.interventions:
            _third_party(shape, tally, trace)
    _count(tally, trace, drawn)


def _third_party(subject: Subject, tally: Tally, trace: cp.Trace) -> None:
    """Compares greedy requests with Hugging Face's `generate` on an untouched copy of the model, in float32. Subjects
    with near ties are left out: there the last bits decide, which differ with Hugging Face's shapes."""
    if subject.dtype != "float32" or subject.disagrees:
        return
    plain: Any = subject.build()
    for request in trace.requests:
        sampling = request.sampling
        assert sampling is not None
        ends = trace.meta["finish"][str(request.request_id)]
        if not (request.is_deterministic and sampling.is_greedy and sampling.is_plain) or ends == "cancelled":
            continue
        ids = torch.tensor([list(request.prompt)])
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop_token_ids) or None, pad_token_id=0,
        )  # fmt: skip
        theirs, ours = out[0, ids.shape[1] :].tolist(), trace.committed(request.request_id)
        tally.counts["third_party_tokens"] += len(theirs)
        if theirs != ours:
            tally.differences.append(f"{subject.key}: Hugging Face says {theirs}, cacheprobe {ours}")


def _count(tally: Tally, trace: cp.Trace, drawn: Episode) -> None:
    counts, events = tally.counts, trace.event_table
    for row in events[events.num_rolled_back.fillna(0) > 0].itertuples():
        position = int(row.draft_start + row.num_accepted)
        counts[f"rollbacks_{kind_of_rollback(drawn, trace.requests[row.request_id], position)}"] += 1
    cancelled = sum(reason == "cancelled" for reason in trace.meta["finish"].values())
    counts["episodes"] += 1
    counts[f"episodes_drafter_{drawn.drafter_name}"] += 1
    for site in trace.store.heads:
        counts[f"episodes_with_{site}"] += 1
    counts["requests_deterministic"] += sum(request.is_deterministic for request in drawn.requests)
    counts["interventions"] += len(drawn.interventions)
    counts["streams"] += drawn.is_stream
    counts["streams_abandoned"] += bool(drawn.num_abandoned)
    counts["requests_cancelled"] += cancelled
    counts["preemptions"] += len(trace.meta["preemptions"])
    together = trace.store.heads and drawn.interventions and trace.meta["preemptions"] and cancelled
    counts["episodes_with_all_together"] += bool(together)


def kind_of_rollback(episode: Episode, request: cp.Request, position: int) -> str:
    """Returns why the draft token at `position` was rejected: injected (it was replaced on purpose), natural (the fast
    path itself said another token than the verifier), or other (another drafter, or rejection sampling)."""
    if isinstance(episode.drafter, Corrupted) and (request.request_id, position) in episode.drafter.altered:
        return "injected"
    by_equality = episode.settings["acceptance"] == "equality" or request.is_deterministic
    return "natural" if by_equality and episode.drafter_name in ("none", "fast_path") else "other"


def soak(
    kinds: dict[str, list[Subject]],
    num_tokens: int,
    seed: int,
    report: Callable[[Tally], None],
) -> Tally:
    """Runs episodes of the subjects, by kind (see SHARES) in turn, until `num_tokens` tokens were compared."""
    tally, done = Tally(), Counter()
    episodes: Counter[str] = Counter()
    while tally.compared.total() < num_tokens:
        kind = min(kinds, key=lambda kind: done[kind] / SHARES[kind])  # the kind with the smallest part of its share
        before = tally.compared.total()
        subject = kinds[kind][episodes[kind] % len(kinds[kind])]
        one_episode(subject, tally, [seed, episodes.total()])
        episodes[kind] += 1
        done[kind] += tally.compared.total() - before
        report(tally)
    return tally


@dataclass(frozen=True)
class Traffic:
    """Holds traffic of the negative control: a model, and prompts that are decoded greedily in batches of several
    sizes."""

    subject: Subject
    num_prompts: int = 13
    new_tokens: int = 24
    batches: tuple[int, ...] = (13, 3, 1)

    def run(self, shape: Subject, is_verified: bool) -> tuple[int, int]:
        """Returns how many requests have other tokens, and how many have other log-probabilities, in another batch."""
        sampling = cp.SamplingParams(temperature=0.0, max_new_tokens=self.new_tokens, stop_token_ids=())
        requests = [cp.Request(draw_request(self.subject, n).prompt, sampling) for n in range(self.num_prompts)]
        settings = dict(deterministic=is_verified, capture=None, progress=False, **shape.settings)
        traces = [cp.run(shape.model, requests, **settings, max_batch=size) for size in self.batches]
        tokens = [len({tuple(trace.committed(i)) for trace in traces}) > 1 for i in range(len(requests))]
        nats = [len({tuple(trace.logprobs(i)) for trace in traces}) > 1 for i in range(len(requests))]
        return sum(tokens), sum(nats)


def traffic_to_try(has_real: bool) -> Iterator[Traffic]:
    """Yields traffic for the negative control. Which diverges depends on the libraries: with
    ONEDNN_MAX_CPU_ISA=AVX2 products in 16 bits are batch-invariant, so float32 is tried too."""
    if has_real:
        real = real_subjects()[0]
        yield Traffic(real)
        yield Traffic(real, num_prompts=40, new_tokens=16, batches=(40, 5))  # products of more than 32 rows
        yield Traffic(replace(real, dtype="float32"))
    yield from map(Traffic, near_tie_subjects())


def negative_control(to_try: Iterable[Traffic]) -> dict[str, Any]:
    """Runs traffic without verification until the tokens of one kind differ between batch sizes, then runs that kind
    verified. The result is void if no kind differs without verification; nothing may differ with it."""
    refused: dict[str, str] = {}
    for traffic in to_try:
        unverified, _ = traffic.run(traffic.subject, is_verified=False)
        if unverified:
            _, verified = in_accepted_shape(traffic.subject, refused, lambda s, t=traffic: t.run(s, is_verified=True))
            return {
                "control_traffic": traffic.subject.key,
                "control_sequences": traffic.num_prompts,
                "control_unverified_differ": unverified,
                "control_verified_differ": max(verified),
            }
    return {"control_traffic": "none", "control_unverified_differ": 0, "control_verified_differ": 0}


def stress(num_tokens: int, seed: int, has_real: bool, report: Callable[[Tally], None]) -> dict[str, Any]:
    """Returns the figures of a soak of all subjects and its negative control; `has_passed` says whether nothing
    differed, and the control did without verification."""
    began = time.monotonic()
    kinds = {"tiny": tiny_subjects(), "near_ties": near_tie_subjects(), "real": real_subjects()}
    if not has_real:
        del kinds["real"]
    with checked_states():
        tally = soak(kinds, num_tokens, seed, report)
    control = negative_control(traffic_to_try(has_real))
    facts = numeric_settings()
    differ = len(tally.differences) + control["control_verified_differ"]
    return {
        "processor": processor_name(),
        **{name: facts[name] for name in ("threads", "torch", "cpu_capability")},
        **tally.figures(),
        **control,
        "seconds": round(time.monotonic() - began),
        "has_passed": differ == 0 and control["control_unverified_differ"] > 0,
        "first_differences": tally.differences[:10],
    }
