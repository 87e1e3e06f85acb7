"""Bugs of what is said: noise, ties, processors, endings, streams."""

from tests.mutations.in_engine import BOOKS, CHOOSING, SETUP, STATE
from tests.mutations.mutate import Edit, Mutation, one, then

ENDING = "cacheprobe.ops.acceptance:find_ending"
STREAM = "cacheprobe.capture.stream:Stream"
PREFIX = "[*state.token_ids, *drafted][:position]"

MUTATIONS = [
    # -- noise
    one(
        "noise is keyed by the step",
        ("19",),
        f"{BOOKS}.choose",
        "choose_next(state, logits, drafted, position)",
        "choose_next(state, logits, drafted, self.runner.step)",
    ),
    one(
        "the verifier's noise is one position off",
        ("19",),
        f"{CHOOSING}:judge_by_equality",
        "draft[:t], start + t)",
        "draft[:t], start + t + 1)",
    ),
    one(
        "noise comes from a global generator",
        ("01", "19_sampling_leaves"),
        "cacheprobe.core.noise:uniform_noise",
        "words = np.random.Philox",
        "return np.random.random(width)\n    words = np.random.Philox",
    ),
    one(
        "noise does not know its position",
        ("19",),
        "cacheprobe.core.noise:uniform_noise",
        "[0, position, stream, 0]",
        "[0, 0, stream, 0]",
    ),
    one(
        "large seeds are cut to 32 bits",
        ("19",),
        "cacheprobe.core.noise:uniform_noise",
        "seed % 2**128",
        "seed % 2**32",
    ),
    one(
        "all samples have one seed",
        ("19_sampling_of_several",),
        f"{SETUP}._samples",
        "if own is None or (n > 1 and i > 0):",
        "if own is None:",
    ),
    one(
        "all requests have one seed",
        ("19_sampling_of_several",),
        f"{SETUP}._samples",
        "derive_seed(run_seed if own is None else own, first + i)",
        "derive_seed(run_seed if own is None else own, i)",
    ),
    one(
        "ties go to the highest id",
        ("19_sampling_breaks",),
        "cacheprobe.ops.sampling:lowest_argmax",
        "int(_as_numpy(logits).argmax())",
        "len(logits) - 1 - int(_as_numpy(logits)[::-1].argmax())",
    ),
    # -- processors
    one(
        "the penalty does not see the draft",
        ("20",),
        f"{CHOOSING}:choose_next",
        PREFIX,
        "list(state.token_ids)[:position]",
    ),
    one(
        "the penalty sees the prompt only",
        ("20",),
        f"{CHOOSING}:choose_next",
        PREFIX,
        "list(state.request.prompt_token_ids)",
    ),
    one(
        "the penalty sees tokens that come later",
        ("20_processor_parity_after", "23_preemption_under"),
        f"{CHOOSING}:choose_next",
        PREFIX,
        "[*state.token_ids, *drafted]",
    ),
    Mutation(
        "the penalty remembers rejected candidates",
        ("20_processor_parity_after",),
        (
            Edit(
                f"{CHOOSING}:choose_next",
                PREFIX,
                'getattr(state, "ghosts", []) + [*state.token_ids, *drafted][:position]',
            ),
            Edit(
                f"{STATE}.drop_draft",
                "self.draft.clear()",
                'self.ghosts = getattr(self, "ghosts", []) + self.draft\n    self.draft.clear()',
            ),
        ),
    ),
    # -- endings
    one(
        "a stop token in the middle of a window is overlooked",
        ("03", "18"),
        ENDING,
        "if rule.ends(said):",
        "if rule.ends(said) and index == len(token_ids) - 1:",
    ),
    one("a stop token is not kept", ("18",), ENDING, 'Ending(index + 1, "stop")', 'Ending(max(index, 1), "stop")'),
    one(
        "a drafted stop token ends the request",
        ("18",),
        f"{BOOKS}.judge",
        "ending.num_kept, ending.finish",
        'ending.num_kept, "stop" if state.draft_ends() else ending.finish',
    ),
    one(
        "a stop token is fed to the verifier",
        ("03",),
        "cacheprobe.engine.step:Engine.verify",
        "state.draft[:-1] if state.draft_ends() else state.draft",
        "state.draft",
    ),
    Mutation(
        "the bonus token may pass the limit",
        ("18",),
        (
            Edit(ENDING, "token_ids[:num_left]", "token_ids"),
            Edit(ENDING, 'Ending(num_left, "length")', 'Ending(len(token_ids), "length")'),
            Edit(f"{STATE}.draft_limit", "self.num_left - 1", "self.num_left"),
        ),
    ),
    one(
        "stop texts are sought in the newest token",
        ("18_finish_correctness_of_stop_texts",),
        "cacheprobe.ops.acceptance:StopRule.ends",
        "self.decode(generated)",
        "self.decode(generated[-1:])",
    ),
    # -- streams
    one(
        "candidates are streamed",
        ("17_monotone_release_of_a_stream",),
        "cacheprobe.engine.step:Engine.decode",
        "state.draft.extend(token_ids)",
        then(
            "state.draft.extend(token_ids)",
            "for one in self.committer.observer.observers:",
            '    getattr(one, "fresh", {}).setdefault(state.request_id, []).extend(token_ids)',
            indent=8,
        ),
    ),
    one(
        "characters are cut",
        ("17_monotone_release_of_a_stream",),
        f"{STREAM}._new_text",
        "whole = whole.rstrip(_CUT)",
        "pass",
    ),
    one(
        "a rollback takes back what was committed",
        ("17_monotone_release",),
        f"{BOOKS}.settle",
        "state.commit(committed)",
        then(
            "if verdict.num_accepted == 0 and state.num_generated > 3:",
            "    del state.token_ids[-1:]",
            "state.commit(committed)",
        ),
    ),
]
