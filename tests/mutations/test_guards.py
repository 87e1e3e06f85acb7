"""Every bug of sweeps and of what is measured turns the tests that guard it red, and each of these tests has a bug."""

from collections.abc import Callable
from pathlib import Path

import pytest

import cacheprobe as cp
from tests.mutations import guards_of_sweeps, in_sweeps, in_tools
from tests.mutations.guards_of_sweeps import Place
from tests.mutations.mutate import Mutation, notices
from tests.sweeps.test_sweeps import SMALL

MUTATIONS = [*in_sweeps.MUTATIONS, *in_tools.MUTATIONS]
GUARDS: dict[str, Callable[[Place], None]] = {
    **guards_of_sweeps.GUARDS,
    **{name: lambda place, test=test: test() for name, test in in_tools.GUARDS.items()},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "sweep"
    assert cp.sweep(SMALL, out=out, progress=False).is_complete
    return out


def is_red(mutation: Mutation, guard: str, finished: Path, tmp_path: Path) -> bool:
    """Returns whether the guard fails with the bug in place."""
    (tmp_path / guard).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        return notices(mutation, lambda: GUARDS[guard](Place(finished, tmp_path / guard, patch)))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(mutation: Mutation, finished: Path, tmp_path: Path) -> None:
    survived = [guard for guard in mutation.red if not is_red(mutation, guard, finished, tmp_path)]
    assert not survived, f"nothing noticed: {mutation.name}; asked were {', '.join(survived)}"


@pytest.mark.parametrize("guard", guards_of_sweeps.GUARDS)
def test_a_guard_passes_where_there_is_no_bug(guard: str, finished: Path, tmp_path: Path) -> None:
    """Guards of tools are tests as they are, which their own files run."""
    assert not is_red(Mutation("none", (guard,), {}), guard, finished, tmp_path)


def test_every_guard_has_a_mutation() -> None:
    assert {guard for mutation in MUTATIONS for guard in mutation.red} == set(GUARDS)
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
