"""Puts a bug into the loaded package and takes it out again."""

import builtins
import dis
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch

from cacheprobe.engine import consistency
from cacheprobe.models.paths import choose_path
from tests.invariants import machines
from tests.tiny import loaded


@dataclass(frozen=True)
class Edit:
    """In the source of a function or method, this text, found once, becomes another."""

    target: str
    """module:function or module:Class.method."""
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A bug and the invariants whose tests must notice it."""

    name: str
    red: tuple[str, ...]
    """What follows "test_invariant_" in the name of a test: a number, or more of it where one of several is meant."""
    edits: tuple[Edit, ...]


def one(name: str, red: tuple[str, ...], target: str, old: str, new: str) -> Mutation:
    """A mutation of a single edit."""
    return Mutation(name, red, (Edit(target, old, new),))


def then(statement: str, *lines: str, indent: int = 4) -> str:
    """A statement of a function's body with more lines after it."""
    return "\n".join([statement, *(" " * indent + line for line in lines)])


class BrokenMutation(Exception):
    """The mutation does not say what it meant to: its text is not there, or what it became cannot run."""


CLUMSY = (NameError, AttributeError, SyntaxError, ImportError)
"""Errors that show a badly written mutation rather than a bug that was caught."""


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The package with the bug in it. Whatever a buggy run may leave thrown is put back after it.

    The trial that a run makes of its shape passes: the tests are to notice by themselves.
    """
    with pristine(), ExitStack() as stack:
        stack.enter_context(patch.object(consistency, "_fault", lambda *shape: None))
        for target in dict.fromkeys(edit.target for edit in mutation.edits):
            _apply(target, [edit for edit in mutation.edits if edit.target == target], stack)
        yield


def _apply(target: str, edits: Sequence[Edit], stack: ExitStack) -> None:
    module_name, _, path = target.partition(":")
    module = import_module(module_name)
    *outer, name = path.split(".")
    holder: Any = module
    for part in outer:
        holder = getattr(holder, part)
    original = vars(holder)[name]
    function = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        if source.count(edit.old) != 1:
            raise BrokenMutation(f"{target} holds {source.count(edit.old)} times, not once: {edit.old!r}")
        source = source.replace(edit.old, edit.new)
    code = compile(source, f"<{target}>", "exec")
    if unknown := [known for known in _globals(code) if known not in vars(module) and not hasattr(builtins, known)]:
        raise BrokenMutation(f"{target} speaks of {unknown[0]}, which is not there")
    made: dict[str, Any] = {}
    exec(code, vars(module), made)
    stack.enter_context(patch.object(holder, name, made[name]))
    if holder is module:  # modules hold the function by name, and in tables
        ours = [m for n, m in sys.modules.items() if n.startswith(("cacheprobe", "tests")) and m is not None]
        for other in ours:
            if other is not module and vars(other).get(name) is original:
                stack.enter_context(patch.object(other, name, made[name]))
            for table in [held for held in vars(other).values() if type(held) is dict]:
                if found := {key: made[name] for key, value in table.items() if value is original}:
                    stack.enter_context(patch.dict(table, found))


def _globals(code: CodeType) -> Iterator[str]:
    """Global names that a piece of code reads, in its functions too."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


@contextmanager
def pristine() -> Iterator[None]:
    """Puts back hooks, the twins that were in use, the environment and grad mode."""
    # `loaded` keeps one model for each way of asking, and the tests ask for the first in two
    models = [loaded(), *(loaded("llama", dtype) for dtype in (torch.float32, torch.bfloat16))]
    twins = [choose_path(model, "twin")[0] for model in models]
    trials = [model.twin_trial for model in models]
    twins += [machines.rounding_by_shape(), machines.wide_bfloat16()]
    hooks = [
        (held, dict(held))
        for twin in twins
        for module in twin.model.modules()
        for held in (module._forward_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    ]
    was_enabled = torch.is_grad_enabled()
    with patch.dict(os.environ):
        try:
            yield
        finally:
            torch.set_grad_enabled(was_enabled)
            for held, before in hooks:
                held.clear()
                held.update(before)
            for model, trial in zip(models, trials, strict=True):  # one that was tried under the bug may keep its hooks
                model.twin_trial = trial


def is_clumsy(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, shows that the mutated code is no code."""
    while error is not None:
        if isinstance(error, CLUMSY):
            return True
        error = error.__cause__
    return False
