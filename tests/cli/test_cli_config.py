"""Settings from a file: flags win, names are checked, and the run keeps what it was made with."""

from dataclasses import dataclass, field, fields
from inspect import signature
from pathlib import Path
from typing import Annotated

import pytest
from cyclopts import App

import cacheprobe as cp
from cacheprobe.cli.app import app
from cacheprobe.cli.flags import flagged, given_flags, read, with_flags
from cacheprobe.cli.run import run
from cacheprobe.core.config import EngineConfig, EngineOptions
from cacheprobe.core.settings import DEFAULT_SAMPLING, ModelFlags, RunFlags
from cacheprobe.core.values import NO_FLAG, as_flag
from cacheprobe.models.loaders import LoadOptions
from cacheprobe.sweeps.settings import Axes
from cacheprobe.sweeps.settings import SweepRunSettings as SweepRun
from cacheprobe.views.report.listings import run_listings

ROOT = Path(__file__).parents[2]
FILE = """
model: coinflip-thinking
dtype: float32
task: coin_flip
n: 3
people: 2
window: 4
capacity: 128
max-new-tokens: 2
heads: [z, v]
max_kv_tokens: null
progress: false
seed: 5
"""


def command(*words: str) -> object:
    return app(list(words), result_action="return_value", exit_on_error=False, print_error=False)


def test_flags_win_over_the_file_and_the_run_keeps_both(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    out = tmp_path / "run"
    command("run", "--config", str(tmp_path / "run.yaml"), "--out", str(out), "--n", "2", "--heads", "q")
    trace = cp.load_trace(out)
    expected = cp.tasks.CoinFlip(people=2).examples(2, seed=5)
    assert [request.example for request in trace.requests] == expected
    assert trace.store.heads == ("q",) and trace.meta["config"]["capacity"] == 128
    kept = trace.meta["command"]
    assert kept["name"] == "run" and kept["config"] == "run.yaml"
    assert kept["settings"]["n"] == 2 and kept["settings"]["seed"] == 5 and kept["settings"]["heads"] == ["q"]
    assert not {"out", "config", "progress", "max_kv_tokens", "adapter", "stop"} & set(kept["settings"])
    shown = {listing.title: dict(listing.rows) for listing in run_listings(trace) if not listing.columns}
    assert shown["cacheprobe run, settings from run.yaml"]["max_new_tokens"] == "2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", "unknown setting 'modle' in .*; did you mean model?"),
        ("qqqq: 3", "unknown setting 'qqqq' in .*; there are out, dry_run, overwrite, memory_budget, model, dtype"),
        ("config: other.yaml", "unknown setting 'config'"),
        ("seed: 1\nseed: 2", "seed is given twice"),
        ("- seed", "holds no settings"),
        ("seed: !!python/object/apply:os.getcwd []", "is not readable as YAML"),
    ],
)
def test_what_is_no_setting_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        command("run", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_value_of_another_type_is_refused_with_its_file(tmp_path: Path) -> None:
    from cyclopts import CycloptsError

    for text in ("seed: many", "seed: [1, 2]", "window: true"):
        (tmp_path / "run.yaml").write_text(text)
        with pytest.raises(CycloptsError, match=r"run\.yaml"):
            command("run", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run"))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no config file nowhere\.yaml"):
        command("run", "--config", "nowhere.yaml", "--out", "x")


def bound(*words: str) -> tuple[str, tuple, dict]:
    """The command that words lead to, and what it is given."""
    function, given, *_ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    return function.__name__, given.args, {k: v for k, v in given.kwargs.items() if k != "config"}


def test_the_committed_configs_are_settings_of_their_commands() -> None:
    """Each names its command in its first line, flags on top and all."""
    files = sorted((ROOT / "data" / "configs").glob("*.yaml"))
    assert len(files) >= 3
    for path in files:
        first, *_ = path.read_text().splitlines()
        words = first.removeprefix("# cacheprobe ").split()
        config = words.index("--config") + 1
        assert words[config] == f"data/configs/{path.name}"
        words[config] = str(path)
        name, args, given = bound(*words)
        flag, value = words[-2].removeprefix("--"), words[-1]
        assert str(given[flag]) == value, first
        assert name == {"run": "run", "dash": "open_runs", "train": "thinking_states"}[words[0]]
        held = read(path, [*given, "runs"]) if words[0] != "run" else read(path, _names("run"))
        for setting, wanted in held.items():
            if setting not in (flag, "runs") and not isinstance(wanted, list):
                assert str(given[setting]) == str(wanted), (first, setting)
        assert [str(run) for run in args] == held.get("runs", [])


def _names(command: str) -> list[str]:
    return [argument.field_info.name for argument in app[command].assemble_argument_collection()]


@pytest.mark.parametrize(
    ("words", "text", "wanted"),
    [
        (["train", "lora", "--steps", "2"], "steps: 9\nfirst-layer: 4\npeople: [1, 2]\nmodel: m",
         dict(steps=2, first_layer=4, people=(1, 2), model="m")),
        (["train", "tuned-lens"], "learning_rate: 0.5\nout: x", dict(learning_rate=0.5, out=Path("x"))),
        (["train", "thinking-states", "--arm", "plain"], "arm: no_feedback\ntask: s3", dict(arm="plain", task="s3")),
        (["dash", "--lens", "b"], "lens: [a]\nmodel: m\nruns: one", dict(lens=(Path("b"),), model="m")),
    ],
)  # fmt: skip
def test_other_commands_take_a_file_too(tmp_path: Path, words: list[str], text: str, wanted: dict) -> None:
    (tmp_path / "file.yaml").write_text(text)
    _, _, given = bound(*words, "--config", str(tmp_path / "file.yaml"))
    assert {name: given.get(name) for name in wanted} == wanted
    (tmp_path / "file.yaml").write_text(text + "\nqqqq: 3")
    with pytest.raises(ValueError, match="unknown setting 'qqqq'"):
        bound(*words, "--config", str(tmp_path / "file.yaml"))


def test_runs_are_named_by_the_file_or_by_hand(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("runs: [one, two words]")
    assert bound("dash", "--config", str(tmp_path / "file.yaml"))[1] == (Path("one"), Path("two words"))
    assert bound("dash", "three", "--config", str(tmp_path / "file.yaml"))[1] == (Path("three"),)


# -- one definition


def test_the_flags_of_a_run_are_settings_of_the_calls() -> None:
    """Their names and defaults stay those of `cp.load_model` and `cp.run`, and those of a sweep's file are theirs."""
    assert set(EngineOptions.__annotations__) == {*(field.name for field in fields(EngineConfig)), "layers", "path"}
    assert {field.name for field in fields(ModelFlags)} <= {"model", *LoadOptions.__annotations__}
    call = signature(cp.run).parameters
    differ = {field.name for field in fields(RunFlags) if call[field.name].default != field.default}
    assert differ == {"lens"}  # None is the logit lens
    flags = {name: one.default for name, one in signature(run).parameters.items()}
    flags |= {field.name: getattr(DEFAULT_SAMPLING, field.name) for field in flagged(cp.SamplingParams)}
    flags["determinism"] = EngineConfig.determinism
    shared = {**Axes.model_fields, **SweepRun.model_fields}
    assert set(shared) - set(flags) == {"intervention", "prefill_chunk", "prefill_group", "pad_prefill"}
    differ = {name for name in set(shared) & set(flags) if shared[name].default not in (flags[name], None)}
    assert differ == {"task", "window", "device", "capture", "draft_length"}  # sweeps draft always


def test_fields_are_flags() -> None:
    @dataclass(frozen=True)
    class Settings:
        size: int = 3
        """Rows of it."""
        names: tuple[str, ...] = ()
        """Names, or one."""
        hidden: int = field(default=4, metadata=NO_FLAG)
        texts: object = field(default=None, metadata=as_flag(tuple[str, ...] | None, "words"))
        """Words."""

    @with_flags
    def measure(path: Path, *, settings: Settings, fast: bool = False) -> tuple[Path, Settings, bool]:
        return path, settings, fast

    @with_flags
    def given(*, settings: Annotated[dict, Settings]) -> dict:
        return settings

    assert list(signature(measure).parameters) == ["path", "size", "names", "words", "fast"]
    assert measure(Path("a"), size=5, fast=True) == (Path("a"), Settings(size=5), True)
    assert given_flags(measure(Path("a"), words=("b",))[1]) == {"size": 3, "words": ("b",)}
    assert given(size=5, words=("b",)) == {"size": 5, "texts": ("b",)} and given() == {}
    with pytest.raises(TypeError, match="hidden"):
        measure(Path("a"), hidden=5)
    of = App(default_command=measure)
    _, bound, *_ = of.parse_args(["a", "--names", "b", "c", "--words", "d"], exit_on_error=False, print_error=False)
    assert bound.kwargs == {"names": ("b", "c"), "words": ("d",)}
    said = {one.names[0]: one.parameter.help for one in of.assemble_argument_collection(parse_docstring=True)}
    assert said["--size"] == "Rows of it." and said["--names"] == "Names, or one."
