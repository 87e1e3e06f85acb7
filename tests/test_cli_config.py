"""Settings from a file: flags win, names are checked, and the run keeps what it was made with."""

from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.cli import app
from cacheprobe.cli_config import read
from cacheprobe.views.listings import run_listings

ROOT = Path(__file__).parents[1]
FILE = """
model: coinflip-thinking
dtype: float32
task: coin_flip
n: 3
people: 2
window: 4
capacity: 128
max-new-tokens: 2
heads: [z, v]
kv_rows: null
progress: false
seed: 5
"""


def command(*words: str) -> object:
    return app(list(words), result_action="return_value", exit_on_error=False, print_error=False)


def test_flags_win_over_the_file_and_the_run_keeps_both(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    out = tmp_path / "run"
    command("run", "--config", str(tmp_path / "run.yaml"), "--out", str(out), "--n", "2", "--heads", "q")
    trace = cp.load_trace(out)
    expected = cp.tasks.CoinFlip(people=2).examples(2, seed=5)
    assert [request.example for request in trace.requests] == expected
    assert trace.store.heads == ("q",) and trace.meta["config"]["capacity"] == 128
    kept = trace.meta["command"]
    assert kept["name"] == "run" and kept["config"] == "run.yaml"
    assert kept["settings"]["n"] == 2 and kept["settings"]["seed"] == 5 and kept["settings"]["heads"] == ["q"]
    assert not {"out", "config", "progress", "kv_rows", "adapter", "stop"} & set(kept["settings"])
    shown = {listing.title: dict(listing.rows) for listing in run_listings(trace) if not listing.columns}
    assert shown["cacheprobe run, settings from run.yaml"]["max_new_tokens"] == "2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", "unknown setting 'modle' in .*; did you mean model?"),
        ("max_new_token: 3", "did you mean max_new_tokens?"),
        ("qqqq: 3", "unknown setting 'qqqq' in .*; there are out, model, dtype"),
        ("config: other.yaml", "unknown setting 'config'"),
        ("7: 3", "unknown setting '7'"),
        ("seed: 1\nseed: 2", "seed is given twice"),
        ("max-new-tokens: 1\nmax_new_tokens: 2", "gives max_new_tokens twice"),
        ("task: {coin_flip: {people: 2}}", "task in .* is a mapping; write a value as on the command line"),
        ("- seed", "holds a list instead of settings"),
        ("", "holds nothing instead of settings"),
        ("{}", "holds nothing instead of settings"),
        ("seed: [1", "is not readable as YAML"),
        ("seed: !!python/object/apply:os.getcwd []", "is not readable as YAML"),
    ],
)
def test_what_is_no_setting_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        command("run", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_value_of_another_type_is_refused_with_its_file(tmp_path: Path) -> None:
    from cyclopts import CycloptsError

    for text in ("seed: many", "seed: [1, 2]", "window: true"):
        (tmp_path / "run.yaml").write_text(text)
        with pytest.raises(CycloptsError, match=r"run\.yaml"):
            command("run", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run"))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no config file nowhere\.yaml"):
        command("run", "--config", "nowhere.yaml", "--out", "x")


def test_the_committed_configs_are_settings_of_run() -> None:
    known = [argument.field_info.name for argument in app["run"].assemble_argument_collection()]
    files = sorted((ROOT / "data" / "configs").glob("*.yaml"))
    assert files
    for path in files:
        settings = read(path, known)
        assert {"out", "model", "seed"} <= set(settings)
        assert f"--config data/configs/{path.name}" in path.read_text()
