"""Every bug of sweeps turns the tests that guard it red, and each of these tests has a bug to notice."""

import warnings
from pathlib import Path

import pytest

import cacheprobe as cp
from tests.mutations.in_sweeps import GUARDS, MUTATIONS, Place
from tests.mutations.mutate import BrokenMutation, Mutation, applied, is_clumsy
from tests.test_sweeps import SMALL


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "sweep"
    assert cp.sweep(SMALL, out=out, progress=False).is_complete
    return out


def notices(mutation: Mutation, guard: str, place: Place) -> bool:
    """Whether the guard fails with the bug in place. Raises: BrokenMutation for code that cannot run."""
    with applied(mutation), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            GUARDS[guard](place)
        except (Exception, pytest.fail.Exception) as error:
            if is_clumsy(error):
                raise BrokenMutation(f"{mutation.name}: {error!r}") from error
            return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(mutation: Mutation, finished: Path, tmp_path: Path) -> None:
    survived = []
    for guard in mutation.red:
        (tmp_path / guard).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            if not notices(mutation, guard, Place(finished, tmp_path / guard, patch)):
                survived.append(guard)
    assert not survived, f"nothing noticed: {mutation.name}; asked were {', '.join(survived)}"


def test_every_guard_has_a_mutation() -> None:
    assert {guard for mutation in MUTATIONS for guard in mutation.red} == set(GUARDS)
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_passes_where_there_is_no_bug(guard: str, finished: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        GUARDS[guard](Place(finished, tmp_path, patch))
