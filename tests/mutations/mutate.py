"""Puts a bug into the loaded package, by replacing a function or an attribute by name, and takes it out again."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cacheprobe.engine import shapes
from tests import request_checks
from tests.invariants import machines
from tests.tiny import loaded

Replace = Callable[[Any], Any]
"""Takes the function (of a property: its getter) or value that has a name, and returns what has this name instead."""


@dataclass(frozen=True)
class Mutation:
    """A bug, and the tests that must notice it."""

    name: str
    red: tuple[str, ...]
    """Names of guards. For invariants: what follows "test_invariant_" in the names of tests, or the start of it."""
    bugs: Mapping[str, Replace]
    """By target: module:function, module:NAME or module:Class.method."""


def bug(name: str, red: tuple[str, ...], target: str, replace: Replace) -> Mutation:
    """Returns a mutation that replaces one name."""
    return Mutation(name, red, {target: replace})


class BrokenMutation(Exception):
    """The mutation does not say what it meant to: its target has gone, or its replacement cannot run."""


CLUMSY = (NameError, AttributeError, TypeError, SyntaxError, ImportError, BrokenMutation)
"""Errors that show a badly written mutation rather than a bug that was caught."""


# -- replacements that several mutations share


def instead(value: Any) -> Replace:
    """Replaces the target by this function or value."""
    return lambda real: value


def without(path: str) -> Replace:
    """In the target, a method, calls of `self.<path>` do nothing."""

    def make(real: Any) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            *outer, name = path.split(".")
            with patch.object(attrgetter(".".join(outer))(self) if outer else self, name, lambda *a, **o: None):
                return real(self, *args, **options)

        return method

    return make


def under(change: Callable[..., dict[str, Any]]) -> Replace:
    """The target, a method, works with other settings in `self.config`. change: takes its arguments."""

    def make(real: Any) -> Any:
        def method(self: Any, *args: Any) -> Any:
            with patch.object(self, "config", replace(self.config, **change(self, *args))):
                return real(self, *args)

        return method

    return make


def inside(target: str, make: Callable[..., Any]) -> Replace:
    """While the target runs, another name is replaced. make: takes that name's function and the target's arguments.

    Not for a target that several threads run at once: the last to leave would not restore the name.
    """

    def outer(real: Any) -> Any:
        def function(*args: Any, **options: Any) -> Any:
            with ExitStack() as stack:
                put(target, lambda other: make(other, *args, **options), stack)
                return real(*args, **options)

        return function

    return outer


# -- putting them in place


def put(target: str, replace: Replace, stack: ExitStack) -> None:
    """Replaces the target until the stack closes, in every module and table that holds a function of this name.

    A name that a module has imported is replaced in that module only.
    Raises: BrokenMutation if there is no such target.
    """
    module_name, _, path = target.partition(":")
    *outer, name = path.split(".")
    try:
        module = import_module(module_name)
        holder = attrgetter(".".join(outer))(module) if outer else module
        original = vars(holder)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise BrokenMutation(f"there is no {target}") from error
    if isinstance(original, property):
        stack.enter_context(patch.object(holder, name, property(replace(original.fget))))
        return
    new = replace(original)
    stack.enter_context(patch.object(holder, name, new))
    if holder is module and getattr(original, "__module__", None) == module_name:
        for other in [m for n, m in sys.modules.items() if n.startswith(("cacheprobe", "tests")) and m is not None]:
            if vars(other).get(name) is original:
                stack.enter_context(patch.object(other, name, new))
            for table in [held for held in vars(other).values() if type(held) is dict]:
                if found := {key: new for key, value in table.items() if value is original}:
                    stack.enter_context(patch.dict(table, found))


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The package with the bug in it. Whatever a buggy run may leave changed is put back after it.

    The trial that a run makes of its shape passes, and so does the check of its requests' states: the tests are to
    notice by themselves.
    """
    with pristine(), ExitStack() as stack:
        stack.enter_context(patch.object(shapes, "_fault", lambda *shape: None))
        stack.enter_context(patch.object(request_checks, "IS_ON", False))
        for target, replace in mutation.bugs.items():
            put(target, replace, stack)
        yield


@contextmanager
def pristine() -> Iterator[None]:
    """Puts back hooks, the environment and grad mode."""
    # `loaded` keeps one model for each way of asking, and the tests ask for the first in two
    models = [loaded(), *(loaded("llama", dtype) for dtype in (torch.float32, torch.bfloat16))]
    models += [machines.rounding_by_shape(), machines.wide_bfloat16()]
    hooks = [
        (held, dict(held))
        for model in models
        for module in model.model.modules()
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


def notices(mutation: Mutation, test: Callable[[], None]) -> bool:
    """Returns whether the test fails with the bug in place. Raises: BrokenMutation for a replacement that cannot
    run."""
    with applied(mutation), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            test()
        except (Exception, machines.Breach, pytest.fail.Exception) as error:
            if is_clumsy(error):
                raise BrokenMutation(f"{mutation.name}: {error!r}") from error
            return True
    return False


def is_clumsy(error: BaseException | None) -> bool:
    """Returns whether an error, or one that it came from, shows that the replacement is no working code."""
    while error is not None:
        if type(error) in CLUMSY:
            return True
        error = error.__cause__
    return False
