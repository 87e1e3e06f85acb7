"""Bugs of the cache: provenance, lengths, masks, rows that leak, and of the model over it."""

from tests.mutations.in_engine import BOOKS, SCHEDULER, STEPPER, VERIFY_PASS
from tests.mutations.mutate import Edit, Mutation, one, then

CACHE = "cacheprobe.kvcache.cache:KVCache"
TWIN = "cacheprobe.models.fast.hooked_hf"
STAGED = "cacheprobe.models.hf.cache:staged"
HIDDEN = "hidden = slots > positions[..., None]"
RESTORE = """held = (*self.cache.keys, *self.cache.values)
    before = [one.clone() for one in held]
    result = self.runner.run("verify", entries, self.config.window, batch=self.config.group)
    for state in states:
        for one, kept in zip(held, before):
            end = state.last_committed_position + len(state.draft)
            start = state.last_committed_position
            one[state.row, :, start:end] = kept[state.row, :, start:end]"""

MUTATIONS = [
    # -- who wrote a row
    one(
        "the fast path's keys and values stay",
        ("02", "13_kv_provenance"),
        f"{STEPPER}.verify",
        f"result = self.runner.run({VERIFY_PASS})",
        RESTORE,
    ),
    one("the ledger calls verified rows provisional", ("13",), f"{BOOKS}.settle", '"verified"', '"provisional"'),
    one(
        "keys are added to what a slot held",
        ("04", "13"),
        f"{CACHE}.store",
        "keys[row, :, start : start + width] = k",
        "keys[row, :, start : start + width] += k",
    ),
    one(
        "one row of a shared prompt is forgotten",
        ("22",),
        f"{CACHE}.copy_row",
        "held[target, :, :length] = held[source, :, :length]",
        "held[target, :, : length - 1] = held[source, :, : length - 1]",
    ),
    # -- lengths
    one(
        "rejected rows are not truncated",
        ("14",),
        f"{BOOKS}.settle",
        "self._truncate(state, last_committed_position)",
        "pass",
    ),
    one(
        "the last_committed_position is one too far",
        ("14",),
        f"{BOOKS}.settle",
        "last_committed_position + len(committed)",
        "last_committed_position + len(committed) + 1",
    ),
    one(
        "a rollback shortens everybody",
        ("14", "16"),
        f"{BOOKS}.settle",
        "self._truncate(state, last_committed_position)",
        then(
            "self._truncate(state, last_committed_position)",
            "if verdict.is_rollback:",
            "    self.cache.lengths[:] = (self.cache.lengths - 1).clamp(min=0)",
            "    self.cache.lengths[state.row] += 1",
        ),
    ),
    one(
        "a rollback zeroes the rows of its neighbour",
        ("16",),
        f"{BOOKS}.settle",
        "self._truncate(state, last_committed_position)",
        then(
            "self._truncate(state, last_committed_position)",
            "if verdict.is_rollback:",
            "    self.cache.scrub((state.row + 1) % self.cache.rows, 0)",
        ),
    ),
    # -- rows
    one(
        "the row of a cancelled request is kept",
        ("15",),
        f"{SCHEDULER}.retire",
        "if row >= 0:",
        'if row >= 0 and state.finish != "cancelled":',
    ),
    one("an evicted request's row is kept", ("15",), f"{BOOKS}.evict", "self.cache.release(state.row)", "pass"),
    one("a row is given twice", ("15",), f"{CACHE}.allocate", "row = self._taken.index(False)", "row = 0"),
    one(
        "releasing twice is allowed",
        ("15_no_double_free",),
        f"{CACHE}.release",
        "if not self._taken[row]:",
        "if False:",
    ),
    # -- masks and shapes
    one(
        "the mask shows one slot more",
        ("06_padding_independence_in_one", "08"),
        f"{CACHE}.mask",
        HIDDEN,
        HIDDEN + " + 1",
    ),
    one(
        "the mask shows the whole window",
        ("06_padding_independence_in_one", "08"),
        f"{CACHE}.mask",
        HIDDEN,
        "hidden = slots > positions.amax(-1, keepdim=True)[..., None]",
    ),
    Mutation(
        "attention runs over the used length",
        ("07_window_offset_independence_of_shapes",),
        (
            Edit(
                "cacheprobe.engine.model_runner:ModelRunner._reach",
                'reach_of_pass if phase == "prefill" and self.shape[1] > SPAN_STEP else reach_of_positions',
                "reach_of_pass",
            ),
        ),
    ),
    one(
        "positions count from the window's start",
        ("07",),
        STAGED,
        "positions.clamp(max=n_ctx - 1)",
        "(positions - positions[:, :1]).clamp(max=n_ctx - 1)",
    ),
    one(
        "the cache begins as NaN",
        ("02", "05"),
        "cacheprobe.kvcache.cache:_slots",
        "return torch.zeros(rows, heads, held, width,",
        "return torch.full((rows, heads, held, width), torch.nan,",
    ),
    one(
        "a neighbour's row is attended",
        ("05",),
        f"{CACHE}.row_view",
        "row, _ = self._staged_places[batch_row]",
        "row, _ = self._staged_places[batch_row - 1]",
    ),
    one(
        "logits differ from call to call",
        ("04",),
        f"{TWIN}:HookedHF.forward",
        "return out if logit_slots is None",
        "out = out + 1e-4 * torch.rand_like(out)\n    return out if logit_slots is None",
    ),
    # -- the capture
    one(
        "the drafter's rows are canonical",
        ("02",),
        "cacheprobe.capture.recorder:Recorder.on_commit",
        '"committed" if row.phase == "verify" else "candidate"',
        '"candidate" if row.phase == "verify" else "committed"',
    ),
    Mutation(
        "a tile of readings is as high as it needs",
        ("09_fixed_shape_also",),
        (
            Edit(
                "cacheprobe.capture.lens_reader:LensReader._read_tile",
                "torch.zeros(LENS_TILE, self.model.d_model",
                "torch.zeros(count, self.model.d_model",
            ),
            Edit(
                "cacheprobe.capture.lens_reader:LensReader._read_tile",
                "torch.zeros(LENS_TILE, dtype",
                "torch.zeros(count, dtype",
            ),
            Edit(
                "cacheprobe.capture.lens_reader:LensReader._read_tile", "torch.full((LENS_TILE,)", "torch.full((count,)"
            ),
        ),
    ),
    # -- switches
    one(
        "hooks stay on the model",
        ("26",),
        f"{TWIN}:HookedHF.capturing",
        "stack.callback(_listen(place, hear).remove)",
        "_listen(place, hear)",
    ),
    one(
        "attention leaves one thread behind",
        ("26",),
        "cacheprobe.ops.attention.by_request:_Threads.__exit__",
        "torch.set_num_threads(self._all)",
        "pass",
    ),
    one(
        "gradients stay off",
        ("26",),
        "cacheprobe.engine.loop:prepare",
        "if not states:",
        '__import__("torch").set_grad_enabled(False)\n    if not states:',
    ),
]
