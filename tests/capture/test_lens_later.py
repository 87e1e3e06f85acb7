"""lens="later": Z that is read from the stored S equals Z that is read during the run, bit for bit."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.analysis.summary import closing
from cacheprobe.cli.app import app
from cacheprobe.engine import sizes
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.recording.lens_reader import LensReader
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.report.listings import run_listings
from cacheprobe.views.report.report import report_html
from tests.field.subjects import smollm2
from tests.thinking.test_thinking import tiny
from tests.tiny import PROMPTS, SMALL, loaded, perturbed

EARLY = dict(drafter=cp.drafters.EarlyExit(layer=1))
SHORT = {**SMALL, "max_new_tokens": 8}
RUNS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "plain": ("llama", torch.float32, {}),
    "some deterministic": ("gpt-neox", torch.bfloat16, dict(deterministic=[1, 4], window=4)),
    "early exit": ("llama", torch.bfloat16, EARLY),
    "early exit, deterministic": ("gpt-neox", torch.float32, dict(**EARLY, deterministic=True)),
}
"""Without a drafter and with one, deterministic and not; early exit has rolled-back rows with fewer layers."""


def both(model: CachedLM, prompts: Any, **settings: Any) -> tuple[cp.Trace, cp.Trace]:
    """The same run twice: Z read during it, and Z left for later."""
    now, later = (cp.run(model, prompts, **settings, lens=lens) for lens in (None, "later"))
    assert later.is_unread and later.recorded_readings is None and not now.is_unread
    return now, later


def require_equal(now: cp.Trace, later: cp.Trace) -> None:
    """Every row and column of all readings and tokens; floats bit for bit."""
    ours, theirs = (trace.hypotheses(include_rolled_back=True) for trace in (later, now))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    for name in ("logprob_nats", "entropy_nats", "committed_logprob_nats"):
        assert ours[name].to_numpy().tobytes() == theirs[name].to_numpy().tobytes()
    tops = (list(table[table.site == "S"].top_logprob_nats) for table in (ours, theirs))
    assert all(mine.tobytes() == other.tobytes() for mine, other in zip(*tops, strict=True))
    assert later.token_table is not None and now.token_table is not None
    pd.testing.assert_frame_equal(later.token_table, now.token_table)
    assert later.meta.keys() == now.meta.keys() and not later.is_unread


@pytest.mark.parametrize("name", RUNS)
def test_readings_are_those_of_the_run(name: str) -> None:
    family, dtype, settings = RUNS[name]
    require_equal(*both(loaded(family, dtype), PROMPTS, **{**SMALL, **settings}))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, cp.drafters.EarlyExit(layer=24)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_readings_of_smollm2_are_those_of_the_run(deterministic: bool, drafter: Any) -> None:
    """Trained weights in bfloat16, whose draft rows often have other bits than the verified rows."""
    prompts = cp.tasks.CoinFlip(people=2).examples(3, seed=0)
    settings: dict[str, Any] = dict(deterministic=deterministic, drafter=drafter, max_new_tokens=4, progress=False)
    require_equal(*both(smollm2(), prompts, **settings))


@pytest.mark.parametrize(
    ("capture", "settings"),
    [
        (cp.CaptureConfig("SZ", layers=(0, 2), top_k=3), {}),
        (cp.CaptureConfig("SZ", positions=(6, 9, 10)), {}),
        (cp.CaptureConfig("STCZ", heads=("z",), prompt_hypotheses=True), dict(sampling=cp.SamplingParams(n=2))),
        (cp.CaptureConfig("SZ", dtype="float32"), {}),
        ("STCZ", dict(max_kv_tokens=80, max_new_tokens=12)),
        ("STCZ", dict(max_new_tokens=1)),
    ],
)
def test_readings_are_those_of_the_run_whatever_is_kept(capture: Any, settings: dict[str, Any]) -> None:
    """Filters, prompts, samples that share a prompt, states in a wider dtype, preemption."""
    model = loaded("llama", torch.bfloat16)
    now, later = both(model, PROMPTS, **{**SHORT, **EARLY, "deterministic": [1], "capture": capture, **settings})
    assert bool(now.meta["preemptions"]) == ("max_kv_tokens" in settings)
    require_equal(now, later)


def test_a_thinking_model_is_read_later(tmp_path: Path) -> None:
    """Its thoughts stand among the readings, as in a run that reads at once."""
    model = cp.load_model(tiny(), progress=False)
    now, later = both(model, PROMPTS[:2], max_new_tokens=6, progress=False)
    assert {"S", "thought"} == set(now.hypotheses().site)
    require_equal(now, later)


# -- what reads, and what does not


@pytest.fixture
def later() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SHORT, **EARLY, lens="later")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collects the number of tiles that any lens reader reads."""
    tiles: list[int] = []
    right = LensReader._read_tile
    monkeypatch.setattr(LensReader, "_read_tile", lambda self: (tiles.append(1), right(self))[1])
    yield tiles


def test_a_run_reads_nothing_and_a_table_reads_once(reads: list[int]) -> None:
    settings = dict(**SHORT, **EARLY, lens="later")
    later = cp.run(loaded(), PROMPTS, **settings)
    for text in (repr(later), later.text(0), closing(later, True)):
        assert text
    assert later.is_unread and not reads and "not read yet" in closing(later, True)
    later.hypotheses()
    count = len(reads)
    assert count and "share of readings" in closing(later, True)
    later.hypotheses(), cp.analysis.agreement(later)
    assert len(reads) == count


@pytest.mark.parametrize("view", [lambda trace: report_html(trace, 0), lambda trace: cp.verify(trace, progress=False)])
def test_whatever_needs_readings_reads(view: Any, later: cp.Trace, reads: list[int]) -> None:
    view(later)
    assert reads and not later.is_unread


def test_a_stream_and_the_reference_read_later() -> None:
    settings = {name: value for name, value in SMALL.items() if name != "progress"}
    stream = cp.stream(loaded(), PROMPTS[:2], **settings, capture="SZ", lens="later")
    assert sum(len(piece.token_ids) for piece in stream)
    plain = cp.run(loaded(), PROMPTS[:2], **SMALL, capture="SZ")
    require_equal(plain, stream.trace())
    require_equal(*(cp.reference(loaded(), PROMPTS[:2], **SMALL, lens=lens) for lens in (None, "later")))


# -- saved runs


def test_a_run_saved_unread_is_read_when_it_is_loaded_with_its_model(later: cp.Trace, tmp_path: Path) -> None:
    now = cp.run(loaded(), PROMPTS, **SHORT, **EARLY)
    folder = later.save(tmp_path / "run")
    assert later.is_unread and not list(folder.glob("hypotheses-*"))
    again = cp.load_trace(folder, loaded())
    require_equal(now, again)
    again.save(folder, overwrite=True)  # now with its readings
    table = cp.load_trace(folder).hypotheses(include_rolled_back=True)
    assert table.equals(cp.load_trace(now.save(tmp_path / "now")).hypotheses(include_rolled_back=True))
    assert StoredRun(folder).has_readings and not StoredRun(folder).is_unread


def test_a_run_saved_unread_says_so_without_its_model(later: cp.Trace, tmp_path: Path) -> None:
    """No view takes it for a run without a lens, and none shows an empty table."""
    folder = later.save(tmp_path / "run")
    trace, stored = cp.load_trace(folder), StoredRun(folder)
    for ask in (trace.hypotheses, lambda: stored.readings(0), lambda: cp.analysis.agreement(trace)):
        with pytest.raises(ValueError, match=r'lens="later".*not read yet.*cp.load_trace\(dir, model='):
            ask()
    assert "is not read yet" in report_html(trace, 0) and "read no lens" not in report_html(trace, 0)
    listings = {listing.title: listing for listing in run_listings(trace)}
    assert dict(listings["run"].rows)["lens"] == "logit, not read yet"
    assert "is not read yet" in listings["first choice = committed token, by layer"].note
    assert "not read yet" in closing(trace, True)
    run_list = RunList.of([folder])
    assert run_list.reader.menu(run_list.tables(0))[0]["label"] == "none recorded yet"
    assert cp.verify(trace, loaded(), progress=False).num_readings == 0  # nothing is deterministic
    assert not trace.is_unread, "a replay with the model has read it"


def test_another_model_does_not_read_it(later: cp.Trace) -> None:
    later.model = perturbed(loaded(), 1e-3)
    with pytest.raises(ValueError, match="the trace is of weights"):
        later.hypotheses()
    assert later.is_unread


def test_other_settings_are_named(later: cp.Trace) -> None:
    """Fewer threads may round otherwise: the readings come, with a warning."""
    threads = torch.get_num_threads()
    later.meta["fingerprint"]["threads"] = threads + 1
    with pytest.warns(RuntimeWarning, match=rf"threads is {threads} and was {threads + 1}"):
        later.hypotheses()


def test_the_same_settings_are_not_warned_of(later: cp.Trace, tmp_path: Path) -> None:
    """Loaded with the same model."""
    trace = cp.load_trace(later.save(tmp_path / "run"), loaded())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(later.hypotheses()) == len(trace.hypotheses())


# -- what fails


def test_a_lens_that_fails_on_a_request_fails_later_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' readings stay, and a warning names the request when it is read."""
    marked = cp.run(loaded(), PROMPTS, **SMALL).states("S", 1, 1)[-3:-1]
    now, later = both(loaded(), PROMPTS, **SMALL)
    right = LogitLens.to_residual

    def fails(self: LogitLens, states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        if bool((states[:, None] == marked).all(-1).any()):
            raise IndexError("no such layer")
        return right(self, states, layers)

    monkeypatch.setattr(LogitLens, "to_residual", fails)
    with pytest.warns(RuntimeWarning, match=r"request 1 step \d+ layer \d: lens logit failed with IndexError"):
        got = later.hypotheses()
    assert list(later.missing) == ["Z of request 1"]
    want = now.hypotheses()
    pd.testing.assert_frame_equal(got, want[want.request_id != 1].reset_index(drop=True), check_exact=True)


def test_a_lens_that_always_fails_leaves_the_reason(monkeypatch: pytest.MonkeyPatch, later: cp.Trace) -> None:
    def fails(*given: Any) -> None:
        raise IndexError("no such layer")

    monkeypatch.setattr(LogitLens, "to_residual", fails)
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match=r"this trace has no Z: request \d step"):
        later.hypotheses()


def test_an_interrupted_reading_can_be_repeated(monkeypatch: pytest.MonkeyPatch, later: cp.Trace) -> None:
    def stops(self: LensReader) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LensReader, "_read_tile", stops)
        with pytest.raises(KeyboardInterrupt):
            later.hypotheses()
    assert later.is_unread and len(later.hypotheses())


def test_the_memory_of_readings_is_checked_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that leaves Z for later holds no readings, so it needs less memory than a run that reads."""
    needed = []
    right = sizes.require_records_fit
    for lens in (None, "later"):
        with monkeypatch.context() as patch:
            patch.setattr(sizes, "available_bytes", lambda device=None: 1)
            with pytest.raises(ValueError, match=r"need ([\d,]+) bytes") as said:
                capture = cp.CaptureConfig("SZ" if lens is None else "S")
                right(loaded(), capture, range(3), [(5, 20, 1)])
            needed.append(int(str(said.value).split("need ")[1].split()[0].replace(",", "")))
    assert needed[0] - needed[1] == 20 * 3 * sizes.READING_BYTES
    enough = needed[0] - 1  # for one prompt, of the states alone
    monkeypatch.setattr("cacheprobe.engine.plan.require_cache_fits", lambda *given: None)
    monkeypatch.setattr(sizes, "available_bytes", lambda device=None: enough)
    run = dict(capture="SZ", **SMALL)
    with pytest.raises(ValueError, match="need"):
        cp.run(loaded(), PROMPTS[:1], **run)
    later = cp.run(loaded(), PROMPTS[:1], **run, lens="later")
    with pytest.raises(ValueError, match=r"lens readings of 20 rows x 3 layers need 54,000 bytes"):
        monkeypatch.setattr(sizes, "available_bytes", lambda device=None: 53_999)
        later.hypotheses()
    monkeypatch.setattr(sizes, "available_bytes", lambda device=None: 54_000)
    assert len(later.hypotheses()) == 60


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ("TCZ", r"capture='TCZ' has no S; set capture='STCZ'"),
        ("STC", r"capture='STC' has no Z; set capture='STCZ'"),
        (None, r"capture=None has no S and no Z; set capture='SZ'"),
        (cp.CaptureConfig("SZ", dtype="bfloat16"), "needs S unrounded: capture dtype bfloat16 .* float32"),
    ],
)
def test_what_cannot_be_read_later_is_refused(capture: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cp.run(loaded(), PROMPTS, **SMALL, capture=capture, lens="later")


def test_another_text_is_no_lens() -> None:
    with pytest.raises(ValueError, match=r"lens='latre' is neither \"logit\" nor \"later\"; did you mean later"):
        cp.run(loaded(), PROMPTS, **SMALL, lens="latre")
    assert cp.run(loaded(), PROMPTS[:1], **SMALL, lens="logit").hypotheses().lens.unique().tolist() == ["logit"]


# -- the command line


def test_the_flag(tmp_path: Path) -> None:
    settings = dict(model="coinflip-thinking", task="coin_flip", n="2", dtype="float32", max_new_tokens="3")
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    for folder, more in (("later", ["--lens", "later"]), ("now", [])):
        command = ["run", *flags, *more, "--no-progress", "--out", str(tmp_path / folder)]
        app(command, result_action="return_value", exit_on_error=False, print_error=False)
    model = cp.load_model("coinflip-thinking", dtype="float32", progress=False)
    later, now = (cp.load_trace(tmp_path / folder, model) for folder in ("later", "now"))
    assert later.is_unread and later.meta["command"]["settings"]["lens"] == "later" and not now.is_unread
    require_equal(now, later)
