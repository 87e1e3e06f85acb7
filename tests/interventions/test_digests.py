"""What the fingerprint says of a hook's function: other edits get another digest, and values of any kind raise no
error; and wrong arguments of `hook` are named.
"""

import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cacheprobe as cp
from cacheprobe.core.values import source_sha256
from cacheprobe.edits.interventions import hook
from cacheprobe.edits.interventions.digests import _is_installed, function_digest
from tests.tiny import PROMPTS, SMALL, loaded

RUN: dict[str, Any] = {**SMALL, "max_new_tokens": 8, "capture": "S"}


def using(value: object) -> Callable[..., Tensor]:
    return lambda state, context: state if value is None else state * 1


def fingerprint(edit: object) -> object:
    return cp.run(loaded(), PROMPTS[:1], interventions=edit, **RUN).fingerprint["interventions"]


# fmt: off
PAIR = (lambda s, c: s * 2, lambda s, c: s * 3)
# fmt: on
F_K = 1.0


def test_functions_of_one_source_line_differ() -> None:
    assert function_digest(PAIR[0]) != function_digest(PAIR[1])
    assert function_digest(lambda s, c: s in {1, 2}) != function_digest(lambda s, c: s in {1, 3})


def test_the_digest_is_taken_when_a_run_starts(tmp_path: Path) -> None:
    by = 1.0
    edit = hook("S", lambda state, context: state * by, layers=[0, 1], own_fingerprint=True)
    assert fingerprint(edit) == fingerprint(edit)
    before = fingerprint(edit)
    trace = cp.run(loaded(), PROMPTS[:1], interventions=edit, deterministic=True, **RUN)
    assert cp.verify(trace, loaded(), interventions=edit, progress=False).is_equal
    by = 0.3
    assert before != fingerprint(edit)
    with pytest.raises(ValueError, match="different schedules; interventions"):
        cp.verify(trace, loaded(), interventions=edit, progress=False)


def test_a_function_that_counts_its_calls_keeps_the_digest_of_its_run() -> None:
    seen: list[int] = []

    def counts(state: Tensor, context: cp.interventions.StateContext) -> Tensor:
        seen.append(context.position)
        return state

    trace = cp.run(loaded(), PROMPTS[:1], interventions=hook("S", counts, layers=1), **RUN)
    assert seen and len(trace.committed(0)) == 8


class Base:
    def factor(self) -> float:
        return 2.0


class UsesGlobal(Base):
    def __call__(self, state: Tensor, context: object) -> Tensor:
        return state * F_K * self.factor()


def test_globals_of_a_callable_object_and_base_classes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = function_digest(UsesGlobal())
    assert before == function_digest(UsesGlobal()) and not before[1]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "F_K", 3.0)
        assert function_digest(UsesGlobal()) != before
    with monkeypatch.context() as patch:
        patch.setattr(Base, "factor", lambda self: 5.0)
        assert function_digest(UsesGlobal()) != before
    assert function_digest(UsesGlobal()) == before


def test_a_module_of_the_users_counts_by_what_the_function_uses_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("mine")
    exec("K, LOCK = 1.0, object\ndef f(s):\n    return s * K", vars(mine))
    monkeypatch.setitem(sys.modules, "mine", mine)
    assert not _is_installed("mine") and _is_installed("torch.nn") and _is_installed("json")

    def edit(state: Tensor, context: object) -> Tensor:
        return mine.f(state)

    before = function_digest(edit)
    assert before == function_digest(edit) and not before[1]
    monkeypatch.setattr(mine, "K", 2.0)
    assert function_digest(edit) != before
    assert function_digest(using([mine]))[1] == "its variable value[0], a module"


SCALE = 1.0


def test_an_attribute_is_no_global_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataclass, whose methods name its fields, had another digest after a global of a field's name was set."""

    def edit(state: Tensor, context: Any) -> Tensor:
        return state * context.SCALE

    before = function_digest(edit)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert function_digest(edit) == before


def test_a_users_module_that_the_function_imports_is_reported() -> None:
    def edit(state: Tensor, context: object) -> Tensor:
        import math

        import tests.tiny

        return state * math.pi * len(tests.tiny.PROMPTS)

    assert function_digest(edit)[1] == "the module tests.tiny, which it imports"


@pytest.mark.parametrize(
    "value",
    [random.Random(1), torch.Generator(), np.random.default_rng(1), iter([1]), random.random],
    ids=lambda value: type(value).__name__,
)
def test_a_state_outside_of_attributes_is_reported(value: object) -> None:
    assert function_digest(using(value))[1]


def nested(levels: int) -> list:
    made: list = []
    for _ in range(levels):
        made = [made]
    return made


def empty_cell() -> Callable[..., Tensor]:
    def edit(state: Tensor, context: object) -> Tensor:
        return later

    if edit is None:
        later = state
    return edit


class Hostile:
    @property
    def __dict__(self) -> dict:  # type: ignore[override]
        raise OSError("no")


class Slotted:
    __slots__ = ("__by",)

    def __init__(self, by: object) -> None:
        self.__by = by


VALUES: list[tuple[str, Any, Any]] = [
    ("text array", np.array(["a", "b"]), np.array(["a", "c"])),
    ("object array", np.array([1, "b"], dtype=object), np.array([1, "c"], dtype=object)),
    ("dates", np.array(["2020-01-01"], dtype="M8[D]"), np.array(["2020-01-02"], dtype="M8[D]")),
    ("backwards", np.arange(4.0)[::-1], np.arange(4.0)),
    ("big-endian", np.arange(4, dtype=">f8"), np.arange(1, 5, dtype=">f8")),
    ("masked", np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
    ("empty", torch.zeros(0), torch.zeros(1)),
    ("conjugate", torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
    ("bfloat16", torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
    ("whole number", 10**5000, 10**5000 + 1),
    ("set", {"a", "b", 3}, {"a", "c", 3}),
    ("keys", {"k" * 60 + "a": 1}, {"k" * 60 + "b": 1}),
    ("slots", Slotted(1), Slotted(2)),
    ("slice", slice(1, 2), slice(1, 3)),
    ("half a character", "\ud800", "\ud801"),
    ("scalar", np.float32(1), np.float32(2)),
    ("cycle", (lambda a: (a.append(a), a)[1])([1]), (lambda a: (a.append(a), a)[1])([2])),
]


@pytest.mark.parametrize(("value", "other"), [one[1:] for one in VALUES], ids=[one[0] for one in VALUES])
def test_values_of_many_kinds_are_told_apart(value: Any, other: Any) -> None:
    assert function_digest(using(value)) == function_digest(using(value)) != function_digest(using(other))
    assert not function_digest(using(value))[1]


@pytest.mark.parametrize(
    "value", [torch.eye(2).to_sparse(), torch.eye(2, device="meta"), nested(5000), Hostile(), [Hostile()]]
)
def test_values_that_cannot_be_hashed_raise_no_error(value: object) -> None:
    assert function_digest(using(value))[1].startswith("its variable value")


def test_a_variable_without_a_value_and_a_read_only_array() -> None:
    assert not function_digest(empty_cell())[1]
    array = np.arange(3.0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not function_digest(using(array))[1]


class Probe(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        nn.init.ones_(self.linear.weight), nn.init.zeros_(self.linear.bias)

    def forward(self, state: Tensor) -> Tensor:
        return self.linear(state) * self.scale


def test_a_torch_module_counts_by_class_weights_buffers_and_mode() -> None:
    moved, shifted = Probe(), Probe()
    moved.linear.weight.data[0, 0] = 2
    shifted.mean[0] = 1
    digests = [function_digest(using(one)) for one in (Probe(), Probe(2.0), moved, shifted, Probe().eval())]
    assert len(set(digests)) == 5 and not any(unnamed for _, unnamed in digests)
    assert function_digest(using(Probe())) == digests[0]
    edit = hook("S", using(Probe()), layers=1, own_fingerprint=True)
    assert cp.run(loaded(), PROMPTS[:1], interventions=edit, deterministic=True, **RUN).committed(0)


def test_a_hook_patches_from_another_run() -> None:
    base, same, other = (cp.run(loaded(), PROMPTS[i : i + 1], **RUN) for i in (0, 0, 1))

    def patched(run: cp.Trace) -> tuple[cp.interventions.Intervention, ...]:
        return hook("S", lambda s, c: run.states("S", 1, 0)[0], layers=1, own_fingerprint=True)

    found = [
        cp.run(loaded(), PROMPTS[:1], interventions=patched(one), deterministic=True, **RUN) for one in (base, other)
    ]
    assert found[0].fingerprint["interventions"] != found[1].fingerprint["interventions"]
    assert cp.verify(found[0], loaded(), interventions=patched(same), progress=False).is_equal


def test_an_object_whose_class_is_in_c_has_a_source_digest() -> None:
    exec("class Unread:\n    def __call__(self):\n        pass", made := {"__name__": "nowhere"})
    made["Unread"].__call__ = SimpleNamespace(__code__=FunctionType.__code__)
    assert len(source_sha256(made["Unread"]())) == 64


def test_lambdas_of_one_line_have_sources_of_their_own() -> None:
    """As the functions of lenses are named: the source that Python gives is the whole line."""
    one, other = (lambda x: x * 2), (lambda x: x * 3)
    assert source_sha256(one) != source_sha256(other)


def test_the_digest_is_that_of_another_process(tmp_path: Path) -> None:
    """Sets of texts have another order in each process."""
    (tmp_path / "mine.py").write_text(
        "from cacheprobe.edits.interventions.digests import function_digest\n"
        "NAMES = {'a', 'b', 'c', 'd'}\n"
        "def edit(s, c):\n    return s if s in {'p', 'q', 'r', 't'} else (NAMES, (1, 2), (1, 2))\n"
        "def digest():\n    return function_digest(edit)\n"
    )
    code = "import sys; sys.path.insert(0, sys.argv[1]); import mine; print(mine.digest())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(said) == 1 and "''" in said.pop()


def untyped(*args: Any, **options: Any) -> Any:
    """Calls `hook`; the checker of annotations then gives the error in its own words."""
    return getattr(hook, "__wrapped__", hook)(*args, **options)


def same(state: Tensor, context: object) -> Tensor:
    return state


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: untyped("S", 3, layers=1), r"must be a function of \(state, context\), got 3"),
        (lambda: untyped(loaded().live, same), r"give the module's name as in named_modules\(\)"),
        (lambda: untyped("S", same, layers="all"), r"got 'all'; for all layers give range\(model.n_layers\)"),
        (lambda: untyped("lm_head", same, layers=[0, 1]), "if 'lm_head' is a module of the model, leave out layer="),
        (
            lambda: untyped("blocks.1.attn.hook_q", same),
            "such as model.layers.1.self_attn.q_proj, or model.layers.1.self_attn.query for",
        ),
        (lambda: untyped("v", same, layers=2), r"such as model.layers.2.self_attn.v_proj$"),
        (lambda: untyped("blocks.1.attn.hook_pattern", same), "attention weights, which cannot be changed"),
        (lambda: untyped("blocks.1.attn.hook_z", same), "say site='T' with layer=1 and head="),
    ],
)
def test_wrong_arguments_of_hook_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_generator_of_requests_is_for_every_layer() -> None:
    made = hook("S", same, layers=[0, 1], request_id=(i for i in (0, 2)))
    assert [one.request_id for one in made] == [(0, 2), (0, 2)]
