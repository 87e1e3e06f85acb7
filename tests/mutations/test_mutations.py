"""Every mutation turns the tests of its invariants red, and every invariant has a mutation."""

import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable

import pytest

from tests import invariants
from tests.invariants.machines import Breach
from tests.mutations import in_cache, in_engine, in_output
from tests.mutations.mutate import BrokenMutation, Edit, Mutation, applied, is_clumsy

MUTATIONS = [*in_engine.MUTATIONS, *in_cache.MUTATIONS, *in_output.MUTATIONS]


def invariant_tests() -> dict[str, Callable[[], None]]:
    """Name after "test_invariant_" -> test, in the order of the files."""
    tests: dict[str, Callable[[], None]] = {}
    for info in pkgutil.iter_modules(invariants.__path__):
        if info.name.startswith("test_"):
            module = importlib.import_module(f"{invariants.__name__}.{info.name}")
            tests |= {
                name.removeprefix("test_invariant_"): value
                for name, value in vars(module).items()
                if name.startswith("test_invariant_")
            }
    return tests


def survives(mutation: Mutation, prefix: str) -> bool:
    """Whether all tests of an invariant pass with the bug in place. Raises: BrokenMutation for code that cannot run."""
    asked = [test for name, test in invariant_tests().items() if name.startswith(prefix)]
    if not asked:
        raise BrokenMutation(f"there is no test of invariant {prefix}")
    return not any(notices(test, mutation) for test in asked)


def notices(test: Callable[[], None], mutation: Mutation) -> bool:
    """Whether the test fails with the bug in place. Raises: BrokenMutation for code that cannot run."""
    with applied(mutation), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            test()
        except BrokenMutation:
            raise
        except (Exception, Breach, pytest.fail.Exception) as error:
            if is_clumsy(error):
                raise BrokenMutation(f"{mutation.name}: {error!r}") from error
            return True
    return False


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
    assert any(notices(invariant_tests()[name], mutation) for mutation in tried)


def test_every_invariant_is_told_in_its_docstring() -> None:
    for name, test in invariant_tests().items():
        assert test.__doc__ and re.match(r"\d\d_[a-z]", name), name


def test_the_harness_can_fail() -> None:
    """A change that changes nothing survives; one whose text is not there, or is no code, is not taken for noticed."""
    target = "cacheprobe.ops.acceptance:num_accepted"
    harmless = Mutation("harmless", ("11",), (Edit(target, "return n", "return n + 0"),))
    assert survives(harmless, "11_accept_rule_by_hand")
    for old, new in (("no such text", ""), ("return n", "return unknown_name")):
        with pytest.raises(BrokenMutation):
            survives(Mutation("broken", ("11",), (Edit(target, old, new),)), "11_accept_rule_by_hand")
