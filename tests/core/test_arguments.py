"""Wrong values of arguments: refused at every door, before anything is computed, by name and with what was expected."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.cli.app import main
from cacheprobe.core.config import EngineConfig
from cacheprobe.engine import sizes
from cacheprobe.models.plain.lm import PlainLM
from tests.tiny import SMALL, loaded

P = "[[1, 2, 3]]"
SURROGATE = r"'a \ud800 b'"

WRONG = {  # a call's prompts and settings, as source -> the name and the expectation that the message has
    f"{P}, capture=7": "capture must be a text of S, T, C and Z, or None, got 7",
    f"{P}, capture=cp.CaptureConfig(heads=3)": "unknown site of heads 3; choose one of q, k, v",
    f"{P}, capture=cp.CaptureConfig(layers=[1.5])": "capture layers: an entry must be a whole number, got 1.5",
    f"{P}, capture=cp.CaptureConfig(phases=4)": "unknown entry of phases to capture 4; choose one of prefill",
    f"{P}, capture=cp.CaptureConfig(top_k=2.5)": "top_k must be a whole number of at least 1, got 2.5",
    f"{P}, capture=cp.CaptureConfig(prompt_hypotheses='no')": "prompt_hypotheses must be True or False, got 'no'",
    f"{P}, deterministic='yes'": "deterministic, if neither a flag nor a list, must be a number, got 'yes'",
    f"{P}, deterministic=[0.0]": "deterministic: an index must be a whole number, got 0.0",
    f"{P}, deterministic=float('nan')": "deterministic as a fraction must lie between 0 and 1, got nan",
    f"{P}, layers=[1.5]": "layers: a layer must be a whole number, got 1.5",
    f"{P}, layers=[1], capture=cp.CaptureConfig(layers=[0])": "layers=[1] and CaptureConfig(layers=(0,)) both name",
    f"{P}, seed=-1": "seed must be a non-negative integer, got -1",
    f"{P}, seed=1.5": "seed must be a whole number, got 1.5",
    f"{P}, max_new_tokens='5'": "max_new_tokens must be a whole number, got '5'",
    f"{P}, sampling=5": "sampling must be a cp.SamplingParams, got a int",
    f"{P}, sampling=cp.SamplingParams(stop=5)": "stop must hold texts of at least one character, got 5",
    f"{P}, sampling=cp.SamplingParams(stop=[{SURROGATE}])": r"stop must be text that UTF-8 can encode, got half of a "
    r"surrogate pair, '\ud800', at character 2",
    f"{P}, sampling=cp.SamplingParams(stop_token_ids=[1.5])": "a token id must be a whole number of at least 0",
    f"{P}, sampling=cp.SamplingParams(stop_token_ids=[10**9])": "stop_token_ids holds 1000000000, outside",
    f"{P}, sampling=cp.SamplingParams(temperature='0.5')": "temperature must be a number, got '0.5'",
    "cp.Request([1], arrival_step=-4)": "arrival_step must be a whole number of at least 0, got -4",
    "cp.Request([1], is_deterministic='yes')": "is_deterministic must be True or False, got 'yes'",
    "cp.Request([1], sampling=dict(n=2))": "sampling must be a cp.SamplingParams, got a dict",
    "cp.Request([1], sampling=cp.SamplingParams(stop_token_ids=97))": "request 0: stop_token_ids holds 97, outside the",
    "cp.Request(b'abc')": "a prompt must be text or a list of token ids, got b'abc'; decode it first",
    f"cp.Request({SURROGATE})": "a prompt must be text that UTF-8 can encode",
    "b'abc'": "a prompt is text, a list of token ids, a cp.Chat, a task example or a Request; got bytes",
    "[b'abc']": "request 0: a prompt is text, a list of token ids, a cp.Chat, a task example or a Request; got b'abc'",
    "[[1], [1.5]]": "request 1: a prompt is text, a list of token ids",
    f"[[1], {SURROGATE}]": "request 1: the prompt must be text that UTF-8 can encode",
}  # fmt: skip

TAKEN = """
import json
import numpy as np
import torch
import cacheprobe as cp
from tests.tiny import SMALL, loaded
own = cp.SamplingParams(
    seed=np.int64(3), max_new_tokens=torch.tensor(4), temperature=np.float32(0.5), stop_token_ids=np.array([96, 95])
)
assert (own.seed, own.max_new_tokens, own.temperature, own.stop_token_ids) == (3, 4, 0.5, (96, 95))
request = cp.Request(np.array([1, 2, 3]), own, is_deterministic=np.bool_(True), arrival_step=np.int32(2))
assert request.is_deterministic is True and request.arrival_step == 2
prompts = [request, torch.tensor([4, 5])]
trace = cp.run(loaded(), prompts, **SMALL, deterministic=np.bool_(False), layers=np.int64(1), capture=["S", "Z"])
assert trace.requests[0].prompt_token_ids == (1, 2, 3) and trace.requests[1].prompt_token_ids == (4, 5)
assert trace.store.layers == (1,) and trace.store.sites == ("S",)
"""
"""Numbers and flags of numpy and torch."""
WRONG_KINDS = """
kinds = []
for model, prompt, settings in [
    ("smollm2-135m", [1], {}),
    (loaded(), [1], {"capacity": 1.5}),
    (loaded(), [1], {"drafter": "early_exit"}),
    (loaded(), [1], {"path": 3}),
    (loaded(), None, {}),
    (loaded(), [""], {}),
]:
    try:
        cp.run(model, prompt, **{**SMALL, **settings})
    except ValueError as error:
        kinds.append(str(error))
for status in (3, ["committed"]):
    try:
        trace.rows(0, status)
    except ValueError as error:
        kinds.append(str(error))
"""
EVERY_DOOR = """
model, said = loaded(), {"wrong kinds": kinds}
def unused(*args, **named):
    raise SystemError("the model computed something")
type(model).forward = unused
for call in json.load(open(0)):
    for door in ("run", "stream", "reference"):
        settings = {name: value for name, value in SMALL.items() if f"{name}=" not in call or "(" in call}
        if door == "stream":
            del settings["progress"]
        try:
            eval(f"cp.{door}(model, {call}, path='bridge', **settings)")
            said[f"{door}: {call}"] = "accepted"
        except Exception as error:
            said[f"{door}: {call}"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@cache
def refusals() -> dict[str, Any]:
    """What every door says of every wrong call, in a process of its own: here, the type checks that the tests switch on
    would answer first. The model cannot compute there."""
    program = TAKEN + WRONG_KINDS + EVERY_DOOR
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps([*WRONG]), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_wrong_kinds_of_argument() -> None:
    expected = (
        "needs a model from cp.load_model",
        "capacity must be a whole number",
        "a drafter is an object such as cp.drafters.EarlyExit",
        "unknown path 3",
        "a prompt is text, a list of token ids",
        "has no tokenizer",
        "unknown status 3",
        "unknown status ['committed']",
    )
    for line, part in zip(refusals()["wrong kinds"], expected, strict=True):
        assert part in line


@pytest.mark.parametrize("door", ["run", "stream", "reference"])
def test_a_wrong_value_is_refused_by_name(door: str) -> None:
    for call, expected in WRONG.items():
        said = refusals()[f"{door}: {call}"]
        assert said.startswith("ValueError: ") and expected in said and "\n" not in said, said


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--capture", "7"], "unknown site to capture '7'"),
        (["--stop", "\ud800"], "stop must be text that UTF-8 can encode"),
        (["--prompt", "\ud800"], "--prompt must be text that UTF-8 can encode"),
        (["--window", "0"], "window must be a whole number of at least 1, got 0"),
        (["--n", "0"], "n must be at least 1, got 0"),
    ],
)
def test_the_command_refuses_before_it_loads_a_model(flags, message, tmp_path, monkeypatch, capsys) -> None:
    def loads(*args: object, **named: object) -> None:
        raise SystemError("a model was loaded")

    monkeypatch.setattr(cp, "load_model", loads)
    monkeypatch.setattr(sys, "argv", ["cacheprobe", "run", "--out", str(tmp_path / "t"), "--prompt", "a", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


# -- sizes


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with 4 GiB available, on which nothing computes and no large cache is made."""

    def computes(*args: object, **named: object) -> None:
        raise SystemError("the model computed something")

    def make(self: PlainLM, rows: int, capacity: int):
        assert rows * capacity == 1, "a cache was made before it was known to fit"
        return right(self, rows, capacity)

    right = PlainLM.new_cache
    loaded().layer_shapes  # noqa: B018  known from one short forward, which comes before
    monkeypatch.setattr(sizes, "available_bytes", lambda device=None: 4 << 30)
    monkeypatch.setattr(PlainLM, "new_cache", make)
    monkeypatch.setattr(PlainLM, "forward", computes)
    return 4 << 30


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"group": 10**6},
            ["a cache for 1 requests at once", "passes of 1000000 (group)", "largest that fits: group="],
        ),
        ({"capacity": 10**9}, ["passes of 2 (group)", "capacity 1000000000", "largest that fits: capacity="]),
        ({"prefill_group": 10**6}, ["passes of 1000000 (prefill_group)", "largest that fits: prefill_group="]),
        ({"sampling": cp.SamplingParams(n=10**5)}, ["100000 requests", "n=", "max_new_tokens=", "capture less"]),
        ({"sampling": cp.SamplingParams(n=10**12), "capture": None}, ["1000000000000 requests", "n="]),
    ],
)
@pytest.mark.parametrize("door", ["run", "stream"])
def test_a_size_that_cannot_fit_is_refused_with_its_bytes(door: str, settings, parts, small_machine: int) -> None:
    asked = {**SMALL, "capture": "STCZ", "path": "plain", **settings}
    if door == "stream":
        del asked["progress"]
    with pytest.raises(
        ValueError, match=r"need [\d,]+ bytes .*; 4,294,967,296 bytes \(4.0 GiB\) are available"
    ) as said:
        getattr(cp, door)(loaded(), [[1, 2, 3]], **asked)
    assert all(part in str(said.value) for part in parts), said.value


@pytest.mark.parametrize("name", ["group", "capacity", "n"])
def test_the_largest_value_that_is_named_fits_and_the_next_does_not(name: str, small_machine: int) -> None:
    def refused(value: int) -> str:
        sampling = cp.SamplingParams(n=value if name == "n" else 1)
        try:
            cp.run(
                loaded(), [[1]], **{**SMALL, **({} if name == "n" else {name: value})}, sampling=sampling, path="plain"
            )
        except ValueError as error:
            return str(error)
        except (SystemError, AssertionError):  # it went on to compute
            return ""
        raise AssertionError("the run ended")

    said = refused(10**9)
    largest = int(said.split(f"{name}=")[1].split()[0].strip(";"))
    assert not refused(largest) and "bytes" in refused(largest + 1)


def test_available_memory_is_the_least_that_is_told(tmp_path, monkeypatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\n")
    (tmp_path / "unlimited").write_text("max\n")
    (tmp_path / "limit").write_text("4096\n")
    monkeypatch.setattr(sizes, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(sizes, "CGROUP_LIMITS", (tmp_path / "unlimited", tmp_path / "none"))
    assert sizes.available_bytes() == 5 * 1024
    monkeypatch.setattr(sizes, "CGROUP_LIMITS", (tmp_path / "limit",))
    assert sizes.available_bytes() == 4096
    monkeypatch.setattr(sizes, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(sizes, "CGROUP_LIMITS", ())
    assert sizes.available_bytes() is None or sizes.available_bytes() > 2**20  # all memory, where a system tells it
    assert sizes.available_bytes(torch.device("meta")) is None


# -- names

TOKENS = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("use", "near"),
    [
        (lambda: cp.Request(TOKENS, arrival=2), "arrival_step"),
        (lambda: cp.CaptureConfig(site="S"), "sites"),
        (lambda: cp.SamplingParams(max_new_token=3), "max_new_tokens"),
        (lambda: cp.lode_model, "load_model"),
        (lambda: cp.plots.lens_grids, "lens_grid"),
        (lambda: cp.interventions.zero(request_id=0, sit="S", layer=1), "site"),
        (lambda: cp.patching.causal_tracing(loaded(), TOKENS, [0], sample=2), "samples"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(use: Callable[[], object], near: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError), match=rf"; did you mean {near}\?"):
        use()


def test_an_unknown_name_without_a_near_one_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown argument 'qqq'$"):
        cp.Request(TOKENS, qqq=1)
    with pytest.raises(AttributeError, match="'qqq'$"):
        _ = cp.Request(TOKENS).qqq


def test_settings_are_copied_and_pickled_as_before() -> None:
    for settings in (cp.Request(TOKENS, keep_kv=True), cp.CaptureConfig("SZ", top_k=3), EngineConfig(window=8)):
        assert copy.copy(settings) == pickle.loads(pickle.dumps(settings)) == replace(settings) == settings
        assert not hasattr(settings, "_repr_html_")
