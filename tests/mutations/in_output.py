"""Bugs of what is said: noise, ties, processors, endings, streams."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from cacheprobe.ops.acceptance import Ending
from tests.mutations.in_engine import COMMITTER, ENGINE, STATE
from tests.mutations.mutate import Mutation, bug, inside, instead

CHOOSING, ENDING = "cacheprobe.engine.committer", "cacheprobe.ops.acceptance:find_ending"
STREAM, NOISE = "cacheprobe.trace.recording.stream:Stream", "cacheprobe.core.noise:uniform_noise"


def _seeing(prefix: Any) -> Any:
    """Processors get the tokens of `prefix(state, drafted, position)`."""

    def choose(real: Any, state: Any, logits: Any, drafted: Any, position: int, *more: Any) -> Any:
        return lambda logits, sampling, _, at: real(logits, sampling, prefix(state, drafted, position), at)

    return inside(f"{CHOOSING}:choose_token", choose)


def _remembers(real: Any) -> Any:
    def drop_draft(self: Any) -> None:
        self.ghosts = [*getattr(self, "ghosts", ()), *self.draft]
        real(self)

    return drop_draft


def _own_seed(real: Any) -> Any:
    def samples(request: Any, first: int, run_seed: int) -> Any:
        made, seed = real(request, first, run_seed), request.sampling.seed
        return made if seed is None else tuple(replace(r, sampling=replace(r.sampling, seed=seed)) for r in made)

    return samples


def _overlooks_the_middle(real: Any) -> Any:
    def find_ending(generated: Any, token_ids: Any, rule: Any, num_left: int) -> Ending:
        ending, given = real(generated, token_ids, rule, num_left), len(token_ids)
        if ending.finish != "stop" or ending.num_kept == given:
            return ending
        return Ending(num_left, "length") if given >= num_left else Ending(given, None)

    return find_ending


def _drops_the_stop(real: Any) -> Any:
    def find_ending(*given: Any) -> Ending:
        ending = real(*given)
        return ending if ending.finish != "stop" else Ending(max(ending.num_kept - 1, 1), "stop")

    return find_ending


def _ends_by_draft(real: Any) -> Any:
    def verify_draft(self: Any, entry: Any, *given: Any) -> Any:
        verdict = real(self, entry, *given)
        return replace(verdict, finish="stop") if entry.state.draft_ends() else verdict

    return verify_draft


def _feeds_all(real: Any) -> Any:
    def verify_entry(state: Any) -> Any:
        with patch.object(state, "draft_ends", lambda: False):
            return real(state)

    return verify_entry


def _limit_past_the_end(self: Any, window: int) -> int:
    return min(window - 1, self.num_left, window if self.draft_cap is None else self.draft_cap)


def _streams_candidates(real: Any) -> Any:
    def take(self: Any, states: Any, proposals: Any) -> None:
        before = {state: len(state.draft) for state in states}
        real(self, states, proposals)
        for state in states:
            for one in self.committer.observer.observers:
                fresh = getattr(one, "fresh", {})
                fresh.setdefault(state.request_id, []).extend(state.draft[before[state] :])

    return take


def _takes_back(real: Any) -> Any:
    def apply_verdict(self: Any, state: Any, verdict: Any) -> None:
        real(self, state, verdict)
        if verdict.num_accepted == 0 and state.num_generated > 4:
            del state.token_ids[-2]

    return apply_verdict


MUTATIONS = [
    # -- noise
    bug(
        "noise is keyed by the step",
        ("19",),
        f"{COMMITTER}.choose",
        inside(
            "cacheprobe.engine.committer:choose_next",
            lambda real, self, *given: lambda *asked: real(*asked[:3], self.runner.step, *asked[4:]),
        ),
    ),
    bug(
        "the verifier's noise is one position off",
        ("19",),
        f"{CHOOSING}:judge_by_equality",
        lambda real: lambda state, logits, start, best: real(state, logits, start + 1, best),
    ),
    bug(
        "noise comes from a global generator",
        ("01", "19_sampling_leaves"),
        NOISE,
        instead(lambda seed, position, width, stream=0: np.random.random(width)),
    ),
    bug(
        "noise does not know its position",
        ("19",),
        NOISE,
        lambda real: lambda seed, position, *more: real(seed, 0, *more),
    ),
    bug("large seeds are cut to 32 bits", ("19",), NOISE, lambda real: lambda seed, *more: real(seed % 2**32, *more)),
    bug("all samples have one seed", ("19_sampling_of_several",), "cacheprobe.engine.plan:_samples", _own_seed),
    bug(
        "all requests have one seed",
        ("19_sampling_of_several",),
        "cacheprobe.engine.plan:_samples",
        inside(
            "cacheprobe.engine.plan:derive_seed",
            lambda real, request, first, run_seed: lambda seed, index: real(seed, index - first),
        ),
    ),
    Mutation(
        "ties go to the highest id",
        ("19_sampling_breaks",),
        {
            "cacheprobe.ops.sampling:lowest_argmax": lambda real: lambda logits: len(logits) - 1 - real(logits.flip(0)),
            f"{CHOOSING}:top_choices": lambda real: (
                lambda model, logits: [
                    best and best._replace(token_id=logits.shape[-1] - 1 - best.token_id)
                    for best in real(model, logits.flip(-1))
                ]
            ),
        },
    ),
    # -- processors
    bug(
        "the penalty does not see the draft",
        ("20",),
        f"{CHOOSING}:choose_next",
        _seeing(lambda state, drafted, position: state.token_ids[:position]),
    ),
    bug(
        "the penalty sees tokens that come later",
        ("20_processor_parity_after", "23_preemption_under"),
        f"{CHOOSING}:choose_next",
        _seeing(lambda state, drafted, position: [*state.token_ids, *drafted]),
    ),
    Mutation(
        "the penalty remembers rejected candidates",
        ("20_processor_parity_after",),
        {
            f"{STATE}.drop_draft": _remembers,
            f"{CHOOSING}:choose_next": _seeing(
                lambda state, drafted, at: getattr(state, "ghosts", []) + [*state.token_ids, *drafted][:at]
            ),
        },
    ),
    # -- endings
    bug("a stop token in the middle of a window is overlooked", ("03", "18"), ENDING, _overlooks_the_middle),
    bug("a stop token is not kept", ("18",), ENDING, _drops_the_stop),
    bug("a drafted stop token ends the request", ("18",), f"{COMMITTER}.verify_draft", _ends_by_draft),
    bug("a stop token is fed to the verifier", ("03",), "cacheprobe.engine.step:verify_entry", _feeds_all),
    Mutation(
        "the bonus token may pass the limit",
        ("18",),
        {
            ENDING: lambda real: lambda before, ids, rule, num_left: real(before, ids, rule, max(num_left, len(ids))),
            f"{STATE}.draft_limit": instead(_limit_past_the_end),
        },
    ),
    bug(
        "stop texts are sought in the newest token",
        ("18_finish_correctness_of_stop_texts",),
        "cacheprobe.ops.acceptance:StopRule.ends",
        lambda real: lambda self, generated, newer=(): real(self, [*generated, *newer][-1:]),
    ),
    # -- streams
    bug("candidates are streamed", ("17_monotone_release_of_a_stream",), f"{ENGINE}._take", _streams_candidates),
    bug(
        "characters are cut",
        ("17_monotone_release_of_a_stream",),
        f"{STREAM}._new_text",
        lambda real: lambda self, request_id, is_over: real(self, request_id, True),
    ),
    bug(
        "a rollback takes back what was committed", ("17_monotone_release",), f"{COMMITTER}.apply_verdict", _takes_back
    ),
]
