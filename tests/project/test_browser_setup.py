"""What `make test` does about the browser: installs it where it may; else it says what is missing, and fails in CI."""

import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

from tests.chromium import chromium

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_browser.sh"
REMEDY = "apt-get install chromium"


def program(folder: Path, name: str, does: str) -> None:
    """In place of one of the machine's own."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{which('bash')}\n{does}\n")
    (folder / name).chmod(0o755)


def run(folder: Path, browser: Path, *, ci: bool = False) -> subprocess.CompletedProcess[str]:
    """The script, where no programs are but those of the folder."""
    (folder / "env").unlink(missing_ok=True)
    (folder / "env").symlink_to(str(which("env")))
    environment = {"PATH": str(folder), **({"CI": "1"} if ci else {})}
    command = [str(which("bash")), str(SCRIPT), str(browser)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("ci", [False, True])
@pytest.mark.parametrize("why", ["no apt-get", "no right to", "no network"])
def test_where_it_cannot_be_installed_it_says_so_and_fails_in_ci(tmp_path: Path, why: str, ci: bool) -> None:
    programs = tmp_path / "bin"
    program(programs, "id", "echo 1000" if why == "no right to" else "echo 0")
    program(programs, "sudo", "exit 1")
    if why != "no apt-get":
        program(programs, "apt-get", "exit 100")
    done = run(programs, tmp_path / "chromium", ci=ci)
    assert done.returncode == (1 if ci else 0)
    assert str(tmp_path / "chromium") in done.stderr and REMEDY in done.stderr
    assert ("installing" in done.stdout) == (why == "no network")


@pytest.mark.parametrize("user", ["0", "1000"])
def test_it_is_installed_once(tmp_path: Path, user: str) -> None:
    programs, browser, asked = tmp_path / "bin", tmp_path / "chromium", tmp_path / "asked"
    program(programs, "id", f"echo {user}")
    program(programs, "sudo", f'echo sudo >> {asked}; shift; "$@"')
    touch = f"if [ $2 = install ]; then echo > {browser}; {which('chmod')} +x {browser}; fi"
    program(programs, "apt-get", f'echo "$@" >> {asked}\n{touch}')
    for _ in range(2):
        done = run(programs, browser, ci=True)
        assert done.returncode == 0 and done.stderr == ""
    said = asked.read_text().splitlines()
    assert len([line for line in said if "install" in line and "chromium" in line]) == 1
    assert ("sudo" in said) == (user != "0")


def test_without_it_page_tests_are_skipped_and_fail_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = (pytest.skip.Exception, pytest.fail.Exception)
    for ci, how in (("", ends[0]), ("1", ends[1])):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(ends, match=REMEDY) as ended, chromium(tmp_path / "absent"):
            pass
        assert ended.type is how


def test_make_test_runs_it_first() -> None:
    """As `make` says when it runs nothing."""
    command = ["make", "-n", "test"]
    said = subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True, check=True).stdout
    assert 0 <= said.index(f"bash scripts/{SCRIPT.name}") < said.index("-m pytest")


def test_ci_says_that_it_is_ci_and_makes_every_check(tmp_path: Path) -> None:
    """With another program in place of `make`, which notes what it was asked for."""
    asked = tmp_path / "asked"
    program(tmp_path / "bin", "make", f'echo "$CI $1 $2" >> {asked}')
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "CI": ""}
    subprocess.run([SCRIPT.parents[1] / ".ci" / "run"], env=environment, check=True)
    said = [line.split(" ", 2) for line in asked.read_text().splitlines()]
    assert {ci for ci, *_ in said} == {"1"}
    assert {target for _, target, _ in said} >= {"lint", "types", "test", "test-processors", "demo", "bench-small"}
    assert all(more.startswith("ENVIRONMENTS=") for _, target, more in said if target == "test-processors")
