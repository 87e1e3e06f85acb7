"""Prepares and executes a run: tries its pass shapes, runs the main loop under the run's hooks, and records it in
memory or to disk.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace

from cacheprobe.analysis.reading import readable
from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import DraftCosts, Observer
from cacheprobe.core.values import JsonDict
from cacheprobe.edits.interventions.checks import Drafting
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafters.base import drafted_layers, head_of, require_drafter
from cacheprobe.engine.drafters.early_exit import FastPath
from cacheprobe.engine.drafts.lengths import drafts_may_stop
from cacheprobe.engine.drafts.timing import costs_of
from cacheprobe.engine.fingerprint import FingerprintMismatch, RunGuard
from cacheprobe.engine.loop import generation_loop, run_reference
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.shapes import FEWEST_PROMPTS, Hooked, batches_prompts
from cacheprobe.engine.sizes import require_room
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.feeding import captured_places
from cacheprobe.models.heads.lm import DraftHeadLM
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.recording.assemble import assemble, meta_before
from cacheprobe.trace.recording.disk_writer import DiskWriter
from cacheprobe.trace.recording.head_passes import HeadPasses
from cacheprobe.trace.recording.observers import Tee
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.trace import Trace


@dataclass(frozen=True)
class PreparedRun:
    """Holds what a run's loop works on: the states of its requests, its editor of interventions and its checker."""

    plan: RunPlan
    """Its config may be another than that of the plan that was prepared."""
    states: Sequence[SequenceState]
    checker: RecomputeChecker
    editor: Editor | None = None
    is_reference: bool = False
    """Whether the slow reference runs the requests."""
    draft_costs: DraftCosts | None = None
    """What passes and draft tokens cost; None without a drafter, or with one that always drafts."""
    head: DraftHeadLM | None = None
    """The drafter's head; None if it has none."""
    head_editor: Editor | None = None
    """Applies the interventions on the head's layers; None without any."""
    head_positions: Mapping[int, int] = field(default_factory=dict)
    """By request id: the last position of which the head's row is recorded, by an earlier process."""

    def rounds(
        self, observer: Observer, step: int = -1, head_passes: HeadPasses | None = None
    ) -> Generator[int, None, None]:
        """Returns the generator of step numbers that runs the requests that have not ended. No pass runs before its
        first `next`. step: number of the last step that an earlier process has run.  head_passes: records those of the
        drafter's head."""
        model, config = self.plan.model, self.plan.config
        ahead = [state for state in self.states if not state.is_ended]
        if self.states and not ahead:  # all requests ended in an earlier process
            return (number for number in ())
        if self.is_reference:
            return run_reference(model, ahead, config, observer, self.checker, self.editor)

        def new_runner() -> ModelRunner:
            """Returns a ModelRunner with a new cache, which has a row for dummies."""
            cache = model.new_cache(min(len(ahead), config.max_batch) + 1, config.capacity)
            return ModelRunner(model, cache, observer, self.checker, self.editor, step)

        return generation_loop(new_runner, ahead, config, self.plan.drafter, self.draft_costs, head_passes)

    @contextmanager
    def hooks(self, recorder: Recorder | None = None, head_passes: HeadPasses | None = None) -> Iterator[None]:
        """Inside the `with`, the hooks of the interventions, and of the recorders if given, are on model and head."""
        with ExitStack() as stack:
            if self.editor is not None:  # first, so that the changed states are recorded
                stack.enter_context(self.plan.model.editing(self.editor.sites, self.editor.edit))
            if recorder is not None:
                sink = self.checker.listening(recorder.on_state)
                stack.enter_context(self.plan.model.capturing(recorder.wanted(), sink))
            if head_passes is not None:
                stack.enter_context(head_passes.hooks())
            yield


def prepare(plan: RunPlan, is_reference: bool = False, draft_costs: DraftCosts | None = None) -> PreparedRun:
    """Returns a PreparedRun with a new state for each request. With a drafter all are verified, else the deterministic
    ones; with determinism="invariant" these are not verified, but invariant. For the reference, all are.

    draft_costs: those of the run that goes on; None lets them be measured, if the run has a drafter that saves time.
    Tries the run's pass shapes, and may choose others than the plan's. Raises: ShapeRefused if no allowed
    shape is batch-invariant; ValueError for a drafter that does not fit the model, and for interventions that cannot
    act.
    """
    is_drafted, is_invariant = plan.drafter is not None, plan.config.is_invariant
    if is_drafted and not is_reference:
        require_drafter(plan.drafter, plan.model)
    states = []
    for request in plan.requests:
        is_decided = is_reference or is_drafted or request.is_deterministic
        is_verified = is_decided and (is_drafted or not is_invariant)
        sampling = request.sampling or plan.sampling
        states.append(SequenceState(request, is_verified, sampling, plan.model.decode, is_decided and is_invariant))
        states[-1].is_edited = request.cached is not None
    head = None if is_reference else head_of(plan.drafter, plan.model)
    run = PreparedRun(plan, states, RecomputeChecker(plan.model), is_reference=is_reference, head=head)
    run = replace(run, editor=_make_editor(run), head_editor=_make_head_editor(run))
    run = _with_tried_shapes(run) if any(state.reads_in_chunks for state in states) else run
    if is_drafted and not is_reference:
        run = replace(run, draft_costs=draft_costs or costs_of(run.plan, run.checker))
    return run


def _with_tried_shapes(run: PreparedRun) -> PreparedRun:
    """Returns the run with pass shapes that a trial found to be batch-invariant."""
    plan, states, before = run.plan, run.states, run.plan.config
    places = tuple(captured_places(plan.model, plan.capture, plan.layers))
    hooked = Hooked(places, tuple(run.editor.sites) if run.editor is not None else ())
    is_any = any(state.request.is_deterministic for state in states)
    # the slow reference needs the shapes of a deterministic run; other runs keep their window
    replaceable = {*plan.unset_shapes} - (set() if is_any or run.is_reference else {"window"})
    most = 1 if run.is_reference else min(len(states), before.group if plan.drafter is not None else before.max_batch)

    def require_all_fit(config: EngineConfig) -> None:
        """Raises: ValueError if the model refuses the window, or a request does not fit the cache."""
        plan.model.check_settings(config.window)
        for state in states:
            require_room(config, state.request, state.sampling.max_new_tokens or 1)

    with hold_model(plan.model):
        config = run.checker.trial(before, hooked, replaceable, is_any, require_all_fit, most)
        if "prefill_group" in plan.unset_shapes and not run.is_reference:
            prompts = {state.request.prompt_token_ids for state in states if state.reads_in_chunks}
            at_once = min(len(prompts), before.max_batch)
            run.checker.batches_prompts = batches_prompts(plan.model, config, hooked, at_once)
            is_free = plan.drafter is not None and drafts_may_stop(config, plan.drafter)
            is_free &= not (run.checker.batches_prompts or hooked.edited or config.pad_prefill)
            if is_free and at_once >= FEWEST_PROMPTS:
                for state in states:  # one by one, their prompts would take longer than the drafts save
                    state.reads_freely = not state.request.is_deterministic and not state.is_invariant
    run = replace(run, plan=replace(plan, config=config))
    return replace(run, editor=_make_editor(run)) if config.window != before.window else run


def _make_editor(run: PreparedRun) -> Editor | None:
    """Returns the Editor of the run's interventions; None without interventions."""
    plan, drafter = run.plan, run.plan.drafter or FastPath()
    own = [one for one in plan.interventions if run.head is None or one.layer < plan.model.n_layers]
    if not own:
        return None
    drafting = None
    if not run.is_reference:
        drafting = Drafting(drafter.name, drafted_layers(drafter, plan.model), plan.config.window)
    return Editor(own, plan.model, run.states, drafting)


def _make_head_editor(run: PreparedRun) -> Editor | None:
    """Returns the Editor of the interventions on the layers of the drafter's head, which are counted after those of the
    model; None without any, and for a drafter without a head. Raises: ValueError for a layer that the head lacks, and
    for a request that starts from a KVSnapshot, which holds no states for the head."""
    model = run.plan.model
    if run.head is None:
        return None
    if started := [state.request_id for state in run.states if state.request.cached is not None]:
        raise ValueError(
            f"request {started[0]} starts from a KVSnapshot, which holds no states for the head of {run.head.name}; "
            "use another drafter"
        )
    own = [replace(one, layer=one.layer - model.n_layers) for one in run.plan.interventions]
    own = [one for one in own if one.layer >= 0]
    for one, given in zip(own, (one for one in run.plan.interventions if one.layer >= model.n_layers), strict=True):
        if one.layer >= run.head.n_layers:
            last = model.n_layers + run.head.n_layers - 1
            raise ValueError(
                f"{given}: unknown layer {given.layer}; the model has layers 0 to {model.n_layers - 1}, its draft head "
                f"{model.n_layers} to {last}"
            )
    if timed := [one for one in own if one.phases is not None]:
        raise ValueError(f"{timed[0]}: a draft head has rows of phase draft alone; leave out phases=")
    return Editor(own, run.head, run.states, is_of_head=True) if own else None


class Execution:
    """Holds one run: its requests' states, its recorder, and the writer (`disk`) if it is recorded to disk."""

    def __init__(
        self,
        run: PreparedRun,
        observers: Sequence[Observer] = (),
        disk: DiskWriter | None = None,
        step: int = -1,
        **meta: object,
    ) -> None:
        """Sets up the run, whose first pass runs later. meta: entries of the Trace's metadata.  disk: writes the run;
        None for the memory.  step: number of the last step that an earlier process has run."""
        self._run, self.disk, self._meta = run, disk, meta
        plan, states = self.plan, self.states = run.plan, run.states
        self.recorder = plan.recorder()
        self.head_passes = None
        if run.head is not None:
            head_recorder = plan.head_recorder(run.head)
            self.head_passes = HeadPasses(run.head, head_recorder, run.head_editor, run.head_positions)
        self._guard = RunGuard(plan.model, plan.fingerprint)
        if disk is not None:
            with hold_model(plan.model):
                known = [(one, meta_before(one, *about)) for one, about in self._recorded(self._known())]
            disk.begin(plan.requests, states, known)
        writers = () if disk is None else (disk,)
        of_head = () if self.head_passes is None else (self.head_passes,)
        self._rounds = run.rounds(Tee(self.recorder, *of_head, *writers, *observers), step, self.head_passes)

    def _known(self) -> JsonDict:
        """Returns the entries of the metadata that the run adds before its first pass."""
        costs, freely = self._run.draft_costs, [state.request_id for state in self.states if state.reads_freely]
        own = {} if costs is None else {"draft_costs": costs.record()}
        return self.plan.meta({**self._meta, **own, **({"read_freely": freely} if freely else {})})

    def _recorded(
        self, meta: JsonDict
    ) -> list[tuple[Recorder, tuple[JsonDict, EngineConfig, CaptureConfig, JsonDict]]]:
        """Returns the recorder of the run, and that of the drafter's head if its passes are recorded. Each comes with
        (fingerprint, engine settings, capture settings, `meta`): what its metadata is made from."""
        plan, passes, fingerprint = self.plan, self.head_passes, self._guard.fingerprint
        found = [(self.recorder, (fingerprint, plan.config, plan.capture, meta))]
        if passes is not None:
            missing = {"ledger": "a head's cache is its own, and has no ledger"}
            of_target = {"target": plan.model.name, "first_layer": plan.model.n_layers}
            own = {**meta, "missing": missing, "head": of_target, "interventions": []}
            facts = {**fingerprint, **passes.head.fingerprint()}
            found.append((passes.recorder, (facts, plan.config, passes.recorder.config, own)))
        return found

    def run(self) -> Trace:
        """Runs every request to its end and returns the recorded Trace. Runs in other threads wait meanwhile."""
        with closing(self._rounds), self._guard.holding(self._run.hooks(self.recorder, self.head_passes)):
            for _ in self._rounds:
                self._end_round()
        return self._trace()

    def steps(self) -> Generator[int, None, Trace]:
        """Runs the requests and yields the step number after each round. The generator's return value is the Trace.

        While the generator waits, the run's hooks are not on the model, and other runs may use the model.
        """
        with closing(self._rounds):
            while True:
                with self._guard.holding(self._run.hooks(self.recorder, self.head_passes)):
                    step = next(self._rounds, None)
                if step is None:
                    break
                self._end_round()
                yield step
        return self._trace()

    def _end_round(self) -> None:
        """Lets the writer, if there is one, name in the journal what it has written."""
        if self.disk is not None:
            self.disk.end_round(self.states)

    def _trace(self) -> Trace:
        """Returns the Trace of a finished run, with its metadata, errors, interventions and kept KVSnapshots.

        Raises: FingerprintMismatch if weights or settings changed since the run began. What was recorded on the disk is
        then deleted: nobody knows which of it has which weights, and it could be continued.
        """
        plan, states = self.plan, self.states
        try:
            self._guard.require_unchanged()
        except FingerprintMismatch:
            if self.disk is not None:
                self.disk.wait()
                self.disk.place.drop()
            raise
        errors = {str(state.request_id): state.error for state in states if state.error}
        meta = {**self._known(), "errors": errors, "missing": plan.missing_answers()}
        with hold_model(plan.model):
            recorded = self._recorded(meta)
            if self.disk is None:
                trace, *of_head = [assemble(one, plan.requests, *about) for one, about in recorded]
                trace.head = of_head[0] if of_head else None
            else:
                trace = self.disk.trace(states, [(meta_before(one, *about), about[-1]) for one, about in recorded])
                if trace.head is not None and self.head_passes is not None:
                    trace.head.model = self.head_passes.head
        trace.interventions = plan.interventions
        trace.kept_rows = {s.request_id: s.kept_rows for s in states if s.kept_rows is not None}
        return readable(trace)
