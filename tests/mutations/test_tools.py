"""Every bug of what is measured turns the tests that guard it red, and each of these tests has a bug to notice."""

import warnings

import pytest

from tests.mutations.in_tools import GUARDS, MUTATIONS
from tests.mutations.mutate import BrokenMutation, Mutation, applied, is_clumsy


def notices(mutation: Mutation, guard: str) -> bool:
    """Whether the guard fails with the bug in place. Raises: BrokenMutation for code that cannot run."""
    with applied(mutation), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            GUARDS[guard]()
        except (Exception, pytest.fail.Exception) as error:
            if is_clumsy(error):
                raise BrokenMutation(f"{mutation.name}: {error!r}") from error
            return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(mutation: Mutation) -> None:
    survived = [guard for guard in mutation.red if not notices(mutation, guard)]
    assert not survived, f"nothing noticed: {mutation.name}; asked were {', '.join(survived)}"


def test_every_guard_has_a_mutation() -> None:
    assert {guard for mutation in MUTATIONS for guard in mutation.red} == set(GUARDS)
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
