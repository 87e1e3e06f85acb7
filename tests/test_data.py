"""The committed sets in data/ are what scripts/make_data.py makes, and are what data/README.md says."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cacheprobe.tasks import CoinFlip, load_examples

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "coin_flip_bench.jsonl": {4: 16},
    "coin_flip_demo.jsonl": {2: 4, 3: 2, 4: 2},
    "coin_flip_eval.jsonl": {1: 50, 2: 50, 3: 50, 4: 50},
}


def test_the_script_makes_the_committed_bytes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, ROOT / "scripts/make_data.py", tmp_path], check=True, env=environment)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "data").glob("*.jsonl")}
    assert sorted(made) == sorted(committed) == sorted(SIZES)
    for name in made:
        assert made[name] == committed[name], f"data/{name} differs; run python scripts/make_data.py"


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_balance_are_as_documented(name):
    examples = load_examples(ROOT / "data" / name)
    assert Counter(len(example.events) for example in examples) == SIZES[name]
    answers = Counter((len(example.events), example.answer) for example in examples)
    assert answers == {(people, a): n // 2 for people, n in SIZES[name].items() for a in (" heads", " tails")}


def test_no_question_stands_twice():
    prompts = [example.prompt for name in SIZES for example in load_examples(ROOT / "data" / name)]
    assert len(set(prompts)) == len(prompts) == 224


def test_the_benchmark_set_is_the_one_a_notebook_makes():
    assert load_examples(ROOT / "data/coin_flip_bench.jsonl") == CoinFlip(people=4).examples(n=16, seed=0)


def test_the_readme_speaks_of_every_file():
    readme = (ROOT / "data/README.md").read_text()
    assert "python scripts/make_data.py" in readme and "Apache-2.0" in readme
    for path in (ROOT / "data").glob("*.jsonl"):
        assert path.name in readme
