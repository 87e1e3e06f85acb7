"""Every mutation turns the tests of its invariants red, and every invariant has a mutation."""

import importlib
import pkgutil
import re
from collections.abc import Callable
from functools import partial

import pytest

from tests import invariants
from tests.mutations import in_cache, in_engine, in_output
from tests.mutations.mutate import BrokenMutation, Mutation, bug, instead, notices

MUTATIONS = [*in_engine.MUTATIONS, *in_cache.MUTATIONS, *in_output.MUTATIONS]


def invariant_tests() -> dict[str, partial[None]]:
    """Name after "test_invariant_" -> test, in the order of the files."""
    tests: dict[str, partial[None]] = {}
    for info in pkgutil.iter_modules(invariants.__path__):
        if info.name.startswith("test_"):
            module = importlib.import_module(f"{invariants.__name__}.{info.name}")
            tests |= {
                name.removeprefix("test_invariant_"): partial(run_all, value)
                for name, value in vars(module).items()
                if name.startswith("test_invariant_")
            }
    return tests


def run_all(test: Callable[..., None]) -> None:
    """Runs a test once, or once for each value if it is parametrized over one name."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for given in [{name: value} for name, values in marks for value in values] or [{}]:
        test(**given)


def survives(mutation: Mutation, prefix: str) -> bool:
    """Whether all tests of an invariant pass with the bug in place. Raises: BrokenMutation for code that cannot run."""
    asked = [test for name, test in invariant_tests().items() if name.startswith(prefix)]
    if not asked:
        raise BrokenMutation(f"there is no test of invariant {prefix}")
    return not any(notices(mutation, test) for test in asked)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(mutation: Mutation) -> None:
    survived = [prefix for prefix in mutation.red if survives(mutation, prefix)]
    assert not survived, f"nothing noticed: {mutation.name}; asked were the tests of {', '.join(survived)}"


def test_every_invariant_has_a_test_and_a_mutation() -> None:
    tested = {name[:2] for name in invariant_tests()}
    mutated = {prefix[:2] for mutation in MUTATIONS for prefix in mutation.red}
    assert tested == mutated == {f"{number:02}" for number in range(1, 28)}
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("name", invariant_tests())
def test_every_test_of_an_invariant_notices_a_mutation(name: str) -> None:
    """Those of its own invariant are tried first."""
    tried = sorted(MUTATIONS, key=lambda mutation: name[:2] not in {prefix[:2] for prefix in mutation.red})
    assert any(notices(mutation, invariant_tests()[name]) for mutation in tried)


def test_every_invariant_is_told_in_its_docstring() -> None:
    for name, test in invariant_tests().items():
        assert test.args[0].__doc__ and re.match(r"\d\d_[a-z]", name), name


def test_the_harness_can_fail() -> None:
    """A replacement that changes nothing survives. One whose target has gone, or that cannot run, counts as an
    error."""
    target = "cacheprobe.ops.acceptance:num_accepted"
    same = bug("harmless", ("11",), target, lambda real: lambda draft, targets: real(draft, targets) + 0)
    assert survives(same, "11_accept_rule_by_hand")
    gone = ("cacheprobe.nowhere:f", "cacheprobe.ops.acceptance:gone", "cacheprobe.ops.acceptance:StopRule.gone")
    cannot_run = [bug("gone", ("11",), name, instead(None)) for name in gone]
    cannot_run += [bug("unknown", ("11",), target, instead(lambda draft, targets: unknown_name))]
    cannot_run += [bug("arguments", ("11",), target, instead(lambda draft: 0))]
    for mutation in cannot_run:
        with pytest.raises(BrokenMutation):
            survives(mutation, "11_accept_rule_by_hand")
