"""Every benchmark runs at its smallest size, and a planted cost shows as the ratio that it prints.

The model is SmolLM2's in small, four layers with random weights. A cost is a number of hours that pass at once, so the
ratio of two costs is known beforehand.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.engine.estimates.run import Bounds
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.compiled import operations as choice
from cacheprobe.trace.recording.disk_writer import DiskWriter
from cacheprobe.trace.trace import Trace
from cacheprobe_benchmarks.catalogue import questions, small
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.shared.workload import Run, Timing
from cacheprobe_benchmarks.speed import acceptance, determinism, page, passes, products, speculation, torch_compile
from cacheprobe_benchmarks.states import (
    field,
    large_trace,
    lens,
    main_job,
    patching,
    to_disk,
    trace,
    tuned_lens,
)
from tests.benchmarks import planted_sweeps
from tests.planted_costs import HOUR, LAYERS, Clock, write_small_smollm2


@pytest.fixture(scope="module")
def small_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        write_small_smollm2(tmp_path_factory.mktemp("cache"), monkeypatch)
        yield


def of_main_job(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Ours over Hugging Face's, and over the roofline, which is half an hour."""

    def ours(*args: Any, capture: str, deterministic: float = 0, drafter: Any = None, **settings: Any) -> float:
        return 7 if drafter else {"STC": 1, "STCZ": 3}[capture] + 2 * bool(deterministic)

    clock.plant(cp, "run", ours)
    clock.plant(HuggingFace, "generate", 2)
    monkeypatch.setattr(main_job.Roofline, "seconds", lambda self, blocks, heads: HOUR / 2 if blocks else 0.0)
    return {
        "stc_ratio": 0.5, "stcz_ratio": 1.5, "stcz_half_deterministic_ratio": 2.5, "batch1_speculation_ratio": 3.5,
        "stc_over_roofline": 2, "stcz_over_roofline": 6, "stcz_half_deterministic_over_roofline": 10,
    }  # fmt: skip


class CostlyRun(Run):
    """A run that takes an hour, one more for each deterministic request, and four times as long if it records."""

    clock: Clock

    def __init__(self, model: Any, requests: Any, config: Any, *args: Any, capture: str | None = None) -> None:
        super().__init__(model, requests, config, *args, capture=capture)
        window = 2 if config.get("window") == 16 else 1
        self.cost = (1 + sum(one.is_deterministic for one in requests)) * (4 if capture else 1) * window

    def steps(self) -> Iterator[float]:
        self.clock.skip(self.cost)
        yield from super().steps()

    def timing(self, seconds: float) -> Timing:
        """Says that the passes of a run took four hours together."""
        told = super().timing(seconds)
        told.log.steps = [replace(step, seconds=4 * HOUR / len(told.log.steps)) for step in told.log.steps]
        return told


def of_determinism(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Throughput that is kept: the traffic without deterministic requests over that with them. Of four requests, two
    are half and four are all."""
    monkeypatch.setattr(CostlyRun, "clock", clock, raising=False)
    monkeypatch.setattr(determinism, "Run", CostlyRun)
    clock.plant(HuggingFace, "generate", 2)
    requests = determinism.traffic(cp.load_model("smollm2-135m", progress=False), **determinism.SMALL)
    ours = [one.sampling.max_new_tokens for one in requests]
    return {
        "kept_at_2": 1.0, "kept_at_10": 1.0, "kept_at_50": 1 / 3, "kept_at_100": 1 / 5,
        "kept_at_10_stc": 1.0, "kept_at_100_stc": 1 / 5, "dvr_kept_at_10": 1 / 2, "dvr_kept_at_100": 1 / 10,
        "dvr_floor_at_10": 1 / 4, "dvr_floor_at_100": 1 / 4,
        "base_over_hf": (1 / sum(ours)) / (2 / (len(ours) * max(ours))),
    }  # fmt: skip


def of_estimate(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Estimated are six hours for a run of four, and twice the files; the estimate itself takes an hour."""
    estimated = cp.estimate

    def costly(*args: Any, **settings: Any) -> Any:
        clock.skip(1)
        found = estimated(*args, **settings)
        disk = [2 * size for size in found.disk_bytes]
        return replace(found, seconds=Bounds(*[6 * HOUR] * 3), disk_bytes=Bounds(*disk))

    clock.plant(cp, "run", 4)
    exact = small("estimate")(1)["estimated_over_measured"]["float32 stcz"]
    monkeypatch.setattr(cp, "estimate", costly)
    return {
        "estimated_over_measured float32 stcz seconds": 1.5, "estimate_over_run float32 stcz": 0.25,
        "estimated_over_measured float32 stcz states": 1, "estimated_over_measured float32 drafted seconds": 1.5,
        "estimated_over_measured float32 stcz disk": 2 * exact["disk"],
    }  # fmt: skip


def of_field(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Each way over Hugging Face's; the hooks act in a `generate` of four hours."""
    clock.plant(HuggingFace, "generate", 4)
    for name, hours in {"_ours": 1, "_hooks": 2, "_hidden_states": 2, "_transformer_lens": 6}.items():
        clock.plant(field, name, hours)
    monkeypatch.setattr(field, "measure_nnsight", lambda *args: iter([(3.0, 4.0, 5_000_000)]))  # installs a package
    return {
        "ours_ratio": 0.25, "hooks_ratio": 1.5, "hidden_states_ratio": 0.5, "transformer_lens_ratio": 1.5,
        "nnsight_ratio": 0.75, "kept_mb nnsight": 5,
    }  # fmt: skip


def of_large_trace(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """In each measured process an hour for opening the run, two for the states and three for a card."""
    costs = "import pytest, cacheprobe as cp; from cacheprobe.trace.trace import Trace; "
    costs += "from cacheprobe.views.dashboard.tabs.lens import RowCard; from tests.planted_costs import Clock; "
    costs += "clock = Clock(pytest.MonkeyPatch()); clock.plant(cp, 'load_trace', 1); "
    costs += "clock.plant(Trace, 'states', 2); clock.plant(RowCard, 'draw', 3); "
    monkeypatch.setattr(large_trace, "subprocess", _costly_children(costs))
    return {"open_s": HOUR, "states_s": 2 * HOUR, "first_card_s": 3 * HOUR, "card_s": 3 * HOUR}


def of_lens(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The reading over the fastest product: of the ways, the one that asks for the unembedding is slower."""
    monkeypatch.setattr(choice, "choose", lambda *of: choice.LoopChoice(None, "a test"))
    unembedding, read = PlainLM.unembedding.fget, lens._read
    monkeypatch.setattr(PlainLM, "unembedding", property(clock.costing(unembedding, 3)))
    clock.plant(lens, "linear", 2)

    def reading(*args: Any) -> Any:
        before, told = clock.skipped, read(*args)
        clock.skipped = before + 6 * HOUR  # and nothing for what it asks for
        return told

    monkeypatch.setattr(lens, "_read", reading)
    return {"over_matmul": 3}


def of_patching(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Theirs over ours."""
    clock.plant(patching.SWEEPS, "ours", 2)
    clock.plant(patching.SWEEPS, "transformerlens", 3)
    return {"speedup_over_transformerlens": 1.5, "speedup_where_the_first_token_differs": 1.5}


def of_products(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Operations over the seconds of a product by torch, and bytes over those of a copy."""
    monkeypatch.setattr(products, "choose", lambda *of: choice.LoopChoice(None, "a test"))
    clock.plant(products, "linear", 2)
    clock.plant(products.torch.Tensor, "copy_", 4)
    seen = {"per_hour": 2 * 2 * 64 * 64 / (2 * HOUR) * 1e-9}
    monkeypatch.setattr(products, "round", lambda value, digits: value, raising=False)
    return {
        "gflops 2 x 64 x 64 torch bfloat16": seen["per_hour"], "gflops 2 x 64 x 64 torch float32": seen["per_hour"],
        "best_gflops": seen["per_hour"], "copy_gb_per_second": 2 * 2**20 / (4 * HOUR) * 1e-9,
    }  # fmt: skip


def of_scaling(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A run costs batch^2 x prompt x layers^3 x vocabulary^.5 x new tokens, a stream new tokens^2, and each table its
    own power of the number of requests."""

    def ours(model: Any, prompts: Any, *, sampling: Any, **settings: Any) -> float:
        shape = len(prompts) ** 2 * len(prompts[0]) * model.n_layers**3 * model.d_vocab**0.5
        return shape * sampling.max_new_tokens

    clock.plant(cp, "run", ours)
    clock.plant(cp, "stream", lambda model, prompts, *, sampling, **settings: sampling.max_new_tokens**2)
    clock.plant(Trace, "hypotheses", lambda trace: len(trace.requests) ** 1.5)
    clock.plant(Trace, "save", lambda trace, folder, overwrite: len(trace.requests))
    clock.plant(Trace, "logprobs", lambda trace, request_id: len(trace.requests) ** 0.1)
    slopes = {
        "batch": 2, "prompt": 1, "layers": 3, "vocabulary": 0.5, "tokens": 1, "pieces": 2, "requests": 2,
        "samples": 2, "hypotheses": 1.5, "save": 1, "each_request": 1.1,
    }  # fmt: skip
    judged = {f"axes {axis} is_linear": slope <= 1.05 for axis, slope in slopes.items()}
    return {f"slopes {axis}": slope for axis, slope in slopes.items()} | judged


def of_speculation(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Tokens per second, ours with drafts over the others'."""

    def ours(model: Any, requests: Any, config: Any, drafter: Any) -> float:
        return 2 if config is speculation.TOGETHER else 1 if drafter else 3

    def theirs(hf: Any, prompts: Any, new_tokens: int, prompt_lookup_num_tokens: int = 0) -> float:
        return 4 if prompt_lookup_num_tokens else 6 if len(prompts) == 1 else 10

    clock.plant(speculation, "timed", ours)
    clock.plant(HuggingFace, "generate", theirs)
    return {
        "repeat_over_greedy": 6, "coin_over_greedy": 6, "batch8_over_greedy": 5, "repeat_over_undrafted": 3,
        "coin_over_best_hf": 4, "repeat_over_best_hf": 4,
    }  # fmt: skip


def of_passes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A pass takes two hours, and three without the tapes."""
    one_pass = passes._pass

    def costly(model: Any, requests: int, width: int, start: int, *without: Any) -> Any:
        hours = 3 if without == (passes.WITHOUT["tapes"],) else 2
        return clock.costing(one_pass(model, requests, width, start, *without), hours)

    monkeypatch.setattr(passes, "_pass", costly)
    return {
        f"without_over_with {name} float32 {shape}": 1.5 if name == "tapes" else 1.0
        for name in passes.WITHOUT
        for shape in passes.SHAPES
    }


def of_thinking_states(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A pass of the thinking model costs an hour for each chunk in it; the plain model's run takes two."""

    def ours(model: Any, prompts: Any, *, prefill_chunk: int, **settings: Any) -> float:
        return 2 if "plain" in model.name else prefill_chunk / model.chunk

    clock.plant(cp, "run", ours)
    return {f"thinking_over_plain {n} chunks a pass": n / 2 for n in (1, 4, 16, 64)}


def of_torch_compile(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Without the compiler, which takes a minute: the compiled pass is the eager one, said to take an hour."""
    ours, static = torch_compile._ours, torch_compile._static
    monkeypatch.setattr(torch_compile, "_ours", lambda model: clock.costing(ours(model), 2))
    monkeypatch.setattr(torch_compile, "_static", lambda hf, forward: clock.costing(static(hf, forward), 3))
    monkeypatch.setattr(torch_compile, "_compiled", lambda hf: clock.costing(static(hf, hf.forward), 1))
    return {"hf_eager_over_ours": 1.5, "hf_torch_compile_over_ours": 0.5, "seconds_of_compiling": HOUR}


def of_trace(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The raw write over the save."""
    clock.plant(Trace, "save", 2)
    written = trace._written
    monkeypatch.setattr(trace, "_written", lambda *args: written(*args) + HOUR)
    return {"raw_over_save": 0.5}


def of_to_disk(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The save at the end over a run that is recorded to disk, and the raw write over the parts."""
    clock.plant(DiskWriter, "finish", 1)
    clock.plant(Trace, "save", 2)
    monkeypatch.setattr(to_disk, "_raw_over_parts", lambda *given: 0.25)
    return {"saved_over_disk": 2.0, "write_over_raw": 0.25}


def of_kept(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A run that keeps nothing takes two hours; one more with each site, and with heads."""
    clock.plant(cp, "run", lambda *args, capture, **settings: 2 + len(capture.sites) + bool(capture.heads))
    return {"over_nothing S": 1.5, "over_nothing S, T, C": 2.5, "over_nothing S, T, C, Z": 3, "over_nothing nothing": 1}


def of_tuned_lens(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The tuned lens is better by these divergences; they replace those of the training."""
    train = tuned_lens.train_tuned_lens

    def told(*args: Any) -> Any:
        lens_of_training = train(*args)
        assert len(lens_of_training.about["kl_nats_logit"]) == LAYERS - 1  # of the last one both lenses say the same
        curves = {"kl_nats_logit": [4.0, 2.0, 2.0], "kl_nats_tuned": [1.0, 3.0, 1.0]}
        return SimpleNamespace(about={**lens_of_training.about, **curves})

    monkeypatch.setattr(tuned_lens, "train_tuned_lens", told)
    return {"mean_ratio": 5 / 8, "layers_lower": 2, "layers": 3}


def of_page(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Opening takes a second of the page's clock, a click two, and a key three."""
    evaluate = page.Page.evaluate

    def costly(opened: page.Page, expression: str, given: Any) -> float:
        evaluate(opened, expression, given)
        return 1000 if expression == page.OPENED else 3000 if "key" in given else 2000

    monkeypatch.setattr(page.Page, "evaluate", costly)
    names = {"paint": 1000, "token": 2000, "step": 2000, "rejection": 3000, "request": 2000, "worst": 3000}
    return {f"batch_{name}_ms": milliseconds for name, milliseconds in names.items()}


def of_acceptance(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A verify pass takes two hours, a draft token one, an undrafted token three; real runs take the same."""
    real, measured = acceptance.timed_run, acceptance.draft_costs

    def costly(*given: Any) -> Any:
        done = real(*given)
        done.verify = [(2 * HOUR, count) for _, count in done.verify]
        done.drafts = [(HOUR * count, count) if given[2] else (3 * HOUR, 0) for _, count in done.drafts]
        return done

    def told(*given: Any, **settings: Any) -> Any:
        hours = {"verify_seconds": 2 * HOUR, "draft_seconds": HOUR, "plain_seconds": 3 * HOUR}
        hours["undrafted_seconds"] = 2 * HOUR
        return measured(*given, **settings).assign(**hours)

    monkeypatch.setattr(acceptance, "timed_run", costly)
    monkeypatch.setattr(acceptance, "draft_costs", told)
    return {"passes_expected_over_real early exit 1": 1, "speedup_expected_over_real early exit 1": 1}


PLANTED = {
    name.removeprefix("of_").replace("_", "-"): plant
    for name, plant in {**vars(planted_sweeps), **globals()}.items()
    if name.startswith("of_")
}


def test_every_benchmark_has_a_planted_cost() -> None:
    assert set(PLANTED) == set(questions())


QUICK = ("trace",)
"""Of files: the quickest."""


@pytest.mark.usefixtures("small_smollm2")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PLANTED]
)
def test_a_planted_cost_shows_as_the_ratio(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PLANTED[name](Clock(monkeypatch), monkeypatch)
    told = small(name)(1)
    assert told["benchmark"] == name and told["rounds"] == 1
    json.dumps(told)  # as the command prints it
    found = {key: _at(told, key) for key in expected}
    assert found == pytest.approx(expected, rel=0.03, abs=0.006)


def _at(told: dict[str, Any], key: str) -> Any:
    """Returns the number of a dotted key: "a b" is `told["a"]["b"]`, where a key of `told` may have blanks itself."""
    for end in range(len(key), 0, -1):
        if key[:end] in told:
            return told[key[:end]] if end == len(key) else _at(told[key[:end]], key[end + 1 :])
    raise KeyError(key)


@pytest.mark.slow
@pytest.mark.usefixtures("small_smollm2")
def test_a_real_wait_shows_in_the_main_job() -> None:
    """With the machine's own clock: every ratio is larger if we wait before each run than if Hugging Face does."""
    ratios = []
    for owner, name in ((cp, "run"), (HuggingFace, "generate")):
        with pytest.MonkeyPatch.context() as waiting:
            function = getattr(owner, name)
            waiting.setattr(
                owner, name, lambda *args, f=function, **settings: (time.sleep(0.4), f(*args, **settings))[1]
            )
            told = small("main-job")(1)
        ratios.append({name: value for name, value in told.items() if name.endswith("_ratio")})
    assert len(ratios[0]) >= 4 and all(ratios[0][name] > 1.5 * ratios[1][name] for name in ratios[0]), ratios


@pytest.mark.slow
@pytest.mark.usefixtures("small_smollm2")
@pytest.mark.parametrize("name", [name for name in questions() if name not in ("field", "memory")])
def test_the_small_form_runs_on_the_real_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `cacheprobe bench NAME --small --rounds 1` does; a minute or more for torch-compile and for the sweeps.

    Left out: field, which installs nnsight, and memory, whose child the planted test runs.
    """
    monkeypatch.delenv("CACHEPROBE_CACHE")
    assert small(name)(1)["benchmark"] == name
