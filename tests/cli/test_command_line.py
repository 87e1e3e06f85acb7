"""What a user types by mistake is answered at once, by name; what the help shows works."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import cacheprobe as cp
from cacheprobe.cli.app import app
from cacheprobe.core.live import ModelError
from cacheprobe.models import known
from cacheprobe.trace.manifest import TraceError
from tests.tiny import PROMPTS, SMALL, loaded

RUN = ("run", "--out", "x", "--prompt", "heads")


def command(*words: str) -> Any:
    return app(list(words), result_action="return_value", exit_on_error=False, print_error=False)


def bound(*words: str) -> dict[str, Any]:
    _, given, *_ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    return given.kwargs | ({"files": given.args} if given.args else {})


def commands(of: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that can be typed, with its words."""
    for name in [name for name in of if not name.startswith("-")]:
        if of[name].default_command is not None:
            yield (*path, name), of[name]
        yield from commands(of[name], (*path, name))


COMMANDS = dict(commands(app))


def test_all_commands_are_walked() -> None:
    assert {("run",), ("hypotheses",), ("train", "lora"), ("import", "vllm"), ("bench", "compare")} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_of_every_command_has_a_help_text(words: tuple[str, ...]) -> None:
    """Before, options that a docstring listed together, as in "request, layer", had none."""
    options = COMMANDS[words].assemble_argument_collection(parse_docstring=True)
    assert not [one.names for one in options if not one.parameter.help]


@pytest.mark.parametrize(
    ("words", "flag", "values"),
    [
        (("hypotheses", "r", "--out", "x.csv"), "--layer", ("3", "5")),
        (("run", "--out", "x"), "--layers", ("3", "-1")),
        (("run", "--out", "x"), "--prompt", ("two words", "heads")),
        (("dash", "r"), "--lens", ("a", "b")),
        (("import", "generate", "f", "--out", "x"), "--stop", ("1", "2")),
        (("train", "lora"), "--flip-probability", ("0.25", "0.5")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_flag_takes_several_values_in_both_ways(words: tuple[str, ...], flag: str, values: tuple[str, str]) -> None:
    name, (one, two) = flag.removeprefix("--").replace("-", "_"), values
    kind = type(bound(*words, flag, one)[name][0])
    expected = (kind(one), kind(two))
    assert bound(*words, flag, one, two)[name] == expected
    assert bound(*words, flag, one, flag, two)[name] == expected
    with pytest.raises(Exception, match=flag):
        bound(*words, flag)


def test_the_last_flag_does_not_swallow_the_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name at least one saved run.*name runs before --lens"):
        command("dash", "--lens", "a", str(tmp_path))


# -- models


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub may be asked, which the tests' environment switches off."""
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)


@pytest.fixture
def offline(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection comes about, and none is asked for by a library."""

    def refused(*_: Any) -> None:
        raise OSError("no network")

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(known.socket, "create_connection", refused)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", forbidden)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2-135", "unknown model 'smollm2-135'; did you mean smollm2-135m?"),
        ("coinflip_thinking", "did you mean coinflip-thinking?"),
        ("my-mdel", "did you mean my-model?"),
        ("./my-mdel", r"there is no directory ./my-mdel; did you mean my-model\?"),
        ("gpt2", "this machine and huggingface.co cannot be reached; to get it, run: hf download gpt2, .*; shipped: "),
        ("an owner/a name", "not on this machine"),
    ],
)
def test_a_mistyped_model_is_refused_without_the_hub(
    name: str, said: str, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the hub's client tried for 33 s to reach it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    for ask in (cp.load_model, lambda name: command(*RUN, "--model", name)):
        with pytest.raises(ModelError, match=said):
            ask(name)


def test_the_hub_is_not_asked_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    with pytest.raises(ModelError, match="not on this machine and HF_HUB_OFFLINE is set"):
        cp.load_model("gpt2")


def test_a_name_server_that_does_not_answer_is_not_waited_for(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, answered = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        is_over.wait(20)
        answered.set()
        raise OSError("no such name")

    monkeypatch.setattr(known.socket, "create_connection", slow)
    monkeypatch.setattr(known, "SECONDS_TO_CONNECT", 0.2)
    assert known.why_no_hub().endswith("cannot be reached") and not answered.is_set()
    is_over.set()


def test_a_hub_that_can_be_reached_is_asked(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Connection:
        def close(self) -> None: ...

    def connect(where: Any, timeout: float) -> Connection:
        asked.append(where)
        return Connection()

    monkeypatch.setattr(known.socket, "create_connection", connect)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    known.require_known("gpt2")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    known.require_known("gpt2")
    assert asked == [("huggingface.co", 443), ("proxy.example", 3128)]


def test_the_error_comes_before_torch(tmp_path: Path) -> None:
    program = "import sys\nfrom cacheprobe.cli.app import main\ntry:\n main()\nfinally:\n print('torch' in sys.modules)"
    words = [*RUN, "--model", "smollm2-135"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "did you mean smollm2-135m?" in done.stderr and done.stdout == "False\n"


# -- layers and drafters


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("cacheprobe.models.loaders.load_model", forbidden)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--layers", "1", "7"), "unknown layer 7; the model has layers 0 to 3"),
        (("--layers", "-5"), "unknown layer -5"),
        (("--drafter", "early_exit:layer=3"), "unknown layer 3 for EarlyExit; .* can stop after 0 to 2"),
    ],
)
def test_a_wrong_layer_is_told_before_weights_are_loaded(
    key: str, words: tuple[str, ...], said: str, tmp_path: Path, no_weights: None
) -> None:
    """Before, after 15 s."""
    (tmp_path / "config.json").write_text(json.dumps({key: 4}))
    for model in (str(tmp_path), "coinflip-thinking"):
        with pytest.raises(ValueError, match=said):
            command(*RUN, "--model", model, *words)
    with pytest.raises(AssertionError, match="weights were loaded"):
        command(*RUN, "--model", str(tmp_path), "--layers", "0", "-1", "--drafter", "early_exit:layer=2")


def test_a_model_whose_depth_is_not_known_is_loaded(tmp_path: Path, no_weights: None) -> None:
    for text in ("{}", "[]", "{", '{"text_config": {"n_layers": "4"}}'):
        (tmp_path / "config.json").write_text(text)
        assert known.num_layers(str(tmp_path)) is None
    with pytest.raises(AssertionError, match="weights were loaded"):
        command(*RUN, "--model", str(tmp_path), "--layers", "99")
    assert known.num_layers("coinflip-thinking") == 4 and known.num_layers("nobody/nothing") is None


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (
            "early_exit:lyer=20",
            r"argument 'lyer'; did you mean layer\?; its settings are layer, lens$",
        ),
        ("early_exit", "missing 1 required positional argument: 'layer'; its settings are layer, lens$"),
    ],
)
def test_a_setting_that_a_drafter_has_not_is_named(drafter: str, said: str, no_weights: None) -> None:
    with pytest.raises(ValueError, match=said):
        command(*RUN, "--model", "coinflip-plain", "--drafter", drafter)


# -- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs."""
    folder = tmp_path_factory.mktemp("all") / "runs"
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL)
    trace.save(folder / "demo")
    trace.save(folder / "demo-thinking")
    return folder


@pytest.mark.parametrize("words", [("verify",), ("show",), ("report",), ("hypotheses", "--out", "x.csv")], ids=" ".join)
def test_a_folder_of_runs_names_them(words: tuple[str, ...], folder: Path) -> None:
    """Before, it was called a run that was not saved to its end."""
    with pytest.raises(TraceError, match="holds runs: demo, demo-thinking; give one of them, such as .*demo$"):
        command(words[0], str(folder), *words[1:])
    with pytest.raises(TraceError, match=f"holds runs: {folder.name}/demo, {folder.name}/demo-thinking;"):
        command(words[0], str(folder.parent), *words[1:])


def test_an_empty_folder_is_called_unfinished(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="was not saved to its end"):
        command("show", str(tmp_path))


def test_dash_refuses_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    """Before, it listened with nothing to show."""
    with pytest.raises(ValueError, match=f"there is no {tmp_path / 'nowhere'}; name a saved run"):
        command("dash", str(folder), str(tmp_path / "nowhere"))


@pytest.mark.parametrize("words", [("bench",), ("bench", "list")], ids=" ".join)
def test_bench_lists_the_benchmarks(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    command(*words)
    assert "main-job       " in capsys.readouterr().out


def test_a_pipe_that_is_closed_is_no_error() -> None:
    """As in `cacheprobe bench | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "cacheprobe", "bench"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert done.stderr == "" and done.returncode == 141
