"""Bugs of the loop: verdicts, windows, shapes, prefill, eviction."""

from tests.mutations.mutate import Edit, Mutation, one, then

BOOKS, CHOOSING = "cacheprobe.engine.committer:Committer", "cacheprobe.engine.choosing"
STEPPER, PREFILL = "cacheprobe.engine.step:Engine", "cacheprobe.engine.prefill:Prefill"
SCHEDULER, STATE = "cacheprobe.engine.scheduler:Scheduler", "cacheprobe.kvcache.sequence:SequenceState"
ACCEPTED = "cacheprobe.ops.acceptance:num_accepted"
SETUP = "cacheprobe.plan:RunPlan"
STOP_SCRUBS = "self.cache.scrub(state.row, 0)"
VERIFY_PASS = '"verify", entries, self.config.window, batch=self.config.group'


MUTATIONS = [
    # -- what a verdict commits
    one(
        "one candidate too many is accepted",
        ("03", "11"),
        ACCEPTED,
        "return n",
        "return min(n + 1, len(draft_token_ids))",
    ),
    one(
        "a mismatch in the last row is overlooked",
        ("03_candidate_independence_with", "11"),
        ACCEPTED,
        "return n",
        "return n + (n == len(draft_token_ids) - 1)",
    ),
    one("one candidate too few is accepted", ("11",), ACCEPTED, "return n", "return max(n - 1, 0)"),
    one(
        "a full match commits no bonus token",
        ("11",),
        f"{BOOKS}.judge",
        "draft[:n] + targets[n : n + 1]",
        "(draft if draft and n == len(draft) else draft[:n] + targets[n : n + 1])",
    ),
    one(
        "rejected candidates stay in the draft",
        ("11",),
        f"{STATE}.commit",
        "self.drop_draft()",
        "del self.draft[: len(token_ids)]",
    ),
    one(
        "the verdict is read one row off",
        ("02", "11"),
        f"{STEPPER}.verify",
        "self.committer.judge(entry, result.out[b])",
        "self.committer.judge(entry, result.out[b].roll(1, 0))",
    ),
    one(
        "the verdict of the first request goes to all",
        ("05", "16"),
        f"{STEPPER}.verify",
        "self.committer.judge(entry, result.out[b])",
        "self.committer.judge(entry, result.out[result.batch_index[0]])",
    ),
    # -- who is verified, and when
    one(
        "deterministic requests are not verified",
        ("01", "02"),
        f"{SETUP}.states",
        "is_all_verified or drafter is not None or request.is_deterministic",
        "is_all_verified or drafter is not None",
    ),
    one(
        "all requests are verified",
        ("24",),
        f"{SETUP}.states",
        "is_all_verified or drafter is not None or request.is_deterministic",
        "True",
    ),
    one(
        "an adaptive draft is committed as it comes",
        ("01",),
        f"{STEPPER}.decode",
        "if not state.is_verified:",
        "if not state.is_verified or self.config.draft_length == 'adaptive':",
    ),
    one(
        "a group with dummies waits for ever",
        ("10",),
        f"{SCHEDULER}.ready_groups",
        "any(state.is_verified for state in self.growing())",
        "True",
    ),
    one(
        "a drafter with nothing to say is asked for ever", ("10",), f"{STATE}.is_ready", "self.draft_is_closed or ", ""
    ),
    one(
        "piggybacked come in any number",
        ("24_selectivity_riders_fill",),
        f"{SCHEDULER}.piggybacked",
        "[: -num_ready % self.config.group]",
        "[:]",
    ),
    # -- windows and shapes
    one(
        "the committed token is not fed again",
        ("12",),
        f"{STEPPER}.verify",
        "Entry(state, (state.token_ids[-1], *fed), state.last_committed_position, True, len(fed))",
        "Entry(state, tuple(fed) or (state.token_ids[-1],), state.last_committed_position + bool(fed), True, len(fed))",
    ),
    one(
        "a decode is fed the token before the newest",
        ("12",),
        f"{STATE}.newest",
        "(self.draft or self.token_ids)[-1]",
        "[*self.token_ids, *self.draft][-2:][0]",
    ),
    one(
        "verify is as wide as its longest draft",
        ("01", "09_fixed_shape"),
        f"{STEPPER}.verify",
        VERIFY_PASS,
        '"verify", entries, max(len(e.token_ids) for e in entries), batch=self.config.group',
    ),
    one(
        "verify has no dummies",
        ("01", "05_neighbour_independence_in_company", "09_fixed_shape"),
        f"{STEPPER}.verify",
        ", batch=self.config.group",
        "",
    ),
    one(
        "a fixed pass attends to no more than is in use",
        ("07_window_offset_independence_of_the_bridge",),
        "cacheprobe.engine.model_runner:ModelRunner.run",
        "self.cache.capacity if batch is not None else max(starts) + width",
        "max(starts) + width",
    ),
    one(
        "a pass that does not fit is run in another shape",
        ("09_fixed_shape_or",),
        "cacheprobe.engine.model_runner:ModelRunner.run",
        "size = len(entries) if batch is None else batch",
        "size, width = max(len(entries), batch or 0), max(width, longest)",
    ),
    one(
        "dummies are put into rows that are taken",
        ("05",),
        "cacheprobe.engine.model_runner:place_rows",
        "if cache.is_free(row)",
        "if not cache.is_free(row)",
    ),
    # -- prefill
    one(
        "verified prompts are read in their own width",
        ("01", "21"),
        f"{PREFILL}._read_group",
        "width = chunk if is_padded else",
        "width =",
    ),
    one(
        "an evicted request's prompt is padded where it was not",
        ("21_prefill_determinism_without_pads",),
        f"{PREFILL}.rebuild",
        "chunk if self.config.pad_prefill else len(ids)",
        "chunk",
    ),
    Mutation(
        "verified prompts are read together",
        ("01", "21"),
        (
            Edit(
                f"{PREFILL}.read", "self.config.prefill_group if states[0].is_verified else len(states)", "len(states)"
            ),
            Edit(f"{PREFILL}._read_group", "self.config.prefill_group if is_fixed else None", "None"),
        ),
    ),
    one(
        "chunks are shorter in company",
        ("01", "21"),
        f"{PREFILL}._read_group",
        "self.config.prefill_chunk if is_fixed",
        "self.config.prefill_chunk - (self.runner.cache.num_free_rows < 5) if is_fixed",
    ),
    one(
        "logits of a prefill group depend on where the others end",
        ("21_prefill_determinism_of_groups",),
        f"{PREFILL}._logit_slots",
        "None if needed and is_fixed",
        "None if len(needed) > 1 and is_fixed",
    ),
    one(
        "rows are shared with a request that is not verified",
        ("22",),
        "cacheprobe.engine.step:_same_prompt",
        "(o.request.prompt_token_ids, o.is_verified) == wanted",
        "o.request.prompt_token_ids == wanted[0]",
    ),
    # -- eviction
    one(
        "an evicted request is read back in one piece",
        ("23",),
        f"{PREFILL}.rebuild",
        "if not state.is_verified:",
        "if True:",
    ),
    one(
        "an evicted request is read back by prefill",
        ("23",),
        f"{PREFILL}.rebuild",
        'self._rewrite("verify", state, ids, start, window, self.config.group, is_checked=True)',
        'self._rewrite("prefill", state, ids, start, window, 1)',
    ),
    one(
        "an evicted request is not read back",
        ("23",),
        f"{PREFILL}.rebuild",
        "prompt, first = state.request.prompt_token_ids, state.request.num_cached",
        "return",
    ),
    one("an evicted request keeps its draft", ("23",), f"{BOOKS}.evict", "self._give_up_draft(state)", "pass"),
    one(
        "an eviction takes back a committed token",
        ("17_monotone_release",),
        f"{BOOKS}.evict",
        "self._give_up_draft(state)",
        then(
            "self._give_up_draft(state)",
            "del state.token_ids[max(state.last_committed_position, state.request.num_prompt_tokens + 1) :]",
        ),
    ),
    # -- failures
    one(
        "a failed step stays in the capture",
        ("25",),
        f"{STEPPER}._retries",
        "self.runner.observer.on_failure(self.runner.step)",
        "pass",
    ),
    one(
        "NaN is seen by the capture first",
        ("25",),
        "cacheprobe.engine.model_runner:ModelRunner.run",
        "self._require_numbers(",
        "(lambda *args: None)(",
    ),
    one(
        "requests are committed while others are judged",
        ("25",),
        f"{STEPPER}.verify",
        "verdicts.append((entry.state, self.committer.judge(entry, result.out[b])))",
        "self.committer.settle(entry.state, self.committer.judge(entry, result.out[b]))",
    ),
    Mutation(
        "a failed row is not scrubbed",
        ("25_exception_safety_in_a_run",),
        (
            Edit(f"{BOOKS}.scrub", "self.cache.scrub(state.row, int(self.cache.lengths[state.row]))", "pass"),
            Edit(f"{BOOKS}.stop", STOP_SCRUBS, "pass"),
        ),
    ),
    one(
        "a request that failed leaves NaN in what it had committed",
        ("25_exception_safety_of_who_comes_next",),
        f"{BOOKS}.stop",
        STOP_SCRUBS,
        "pass",
    ),
    one(
        "a group that fails is given up whole",
        ("25",),
        f"{STEPPER}._retries",
        "return [[state] for state in states if not state.error]",
        '[self.committer.stop(state, "error", error=str(error)) for state in states if not state.error]; return []',
    ),
    # -- the negative control
    Mutation(
        "the fast path decodes and reads one request at a time",
        ("27",),
        (
            Edit(f"{PREFILL}.read", "else len(states)", "else 1"),
            Edit(
                f"{STEPPER}.feed_newest",
                'out = self.runner.run("decode", entries, 1, num_layers=num_layers).out',
                then(
                    'outs = [self.runner.run("decode", [e], 1, num_layers=num_layers).out for e in entries]',
                    'out = __import__("torch").cat(outs)',
                ),
            ),
        ),
    ),
]
