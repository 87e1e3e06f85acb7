"""Examples of every task in files and in `datasets`, and the import of public rows."""

import json

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from cacheprobe.core import registry
from cacheprobe.tasks import (
    Boxes,
    CoinFlip,
    CoinFlipWei,
    example_from_record,
    example_record,
    from_dataset,
    load_examples,
    save_examples,
    to_dataset,
    word_tokenizer,
)
from cacheprobe.tasks.coin_flip_wei import parse_wei, wei_question
from tests.simulators import SIMULATORS

VARIANTS = [(name, options) for name, simulator in SIMULATORS.items() for options in simulator.variants]
every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{n}-{o}" for n, o in VARIANTS])
ROW = "Q: A coin is heads up. {} Is the coin still heads up?"
NOTE = 'Note that "flip" here means "reverse".'
LOOSE = "Q: A coin is heads up. rushawn flips the coin. de'andre  does not flip the coin.  Is the coin still heads up?"


@every_variant
def test_files_give_back_equal_examples(name, options, tmp_path):
    examples = registry.find("tasks", name)(**options).examples(4, seed=7)
    save_examples(tmp_path / "set.jsonl", examples)
    loaded = load_examples(tmp_path / "set.jsonl")
    assert loaded == examples and list(map(hash, loaded)) == list(map(hash, examples))
    assert [example_from_record(example_record(example)) for example in examples] == examples


def test_shots_and_chat_are_kept_of_other_tasks_too(tmp_path):
    examples = CoinFlipWei(shots=2, chat=True).examples(3)
    save_examples(tmp_path / "set.jsonl", examples)
    assert load_examples(tmp_path / "set.jsonl") == examples


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": ["a"]}, "events need one state"),
        ({"text": 3}, "write the file with save_examples"),
        ({"more": 1}, "expected an object"),
    ],
)
def test_a_malformed_question_is_named(tmp_path, change, message):
    record = json.loads(json.dumps(example_record(Boxes().examples(1)[0])))
    record["question"] |= change
    (tmp_path / "set.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"set\.jsonl, line 1: ") as error:
        load_examples(tmp_path / "set.jsonl")
    assert message in str(error.value)


@every_variant
def test_every_task_is_exported(name, options):
    examples = registry.find("tasks", name)(**options).examples(3, seed=7)
    rows = to_dataset(examples)
    assert {"inputs", "targets", "states", "operations"} <= set(rows.column_names)
    for row, example in zip(rows, examples, strict=True):
        assert (row["inputs"], row["targets"]) == (example.prompt, example.answer.strip())
        assert tuple(row["states"]) == example.states
        assert row["operations"] == [example.prompt[start:end] for start, end in example.operations]
    assert ("flips" in rows.column_names) == name.startswith("coin_flip")
    assert from_dataset(rows) == examples


def test_a_row_that_was_changed_apart_from_its_example_is_refused():
    rows = to_dataset(Boxes().examples(2, seed=7))
    for column, message in (("inputs", "the inputs 'x' are not the example's"), ("targets", "has the target 'x'")):
        changed = rows.map(lambda row, i, column=column: {**row, column: "x"} if i else row, with_indices=True)
        with pytest.raises(ValueError, match=f"^row 1: .*{message}"):
            from_dataset(changed)
    with pytest.raises(ValueError, match="^row 0: "):
        from_dataset(rows.map(lambda row: {**row, "example": "{}"}))


@given(seed=st.integers(0, 999), people=st.integers(1, 9))
def test_the_export_of_yes_and_no_questions_can_be_imported(seed, people):
    examples = CoinFlipWei(people=people).examples(3, seed)
    rows = to_dataset(examples).select_columns(["inputs", "targets"])
    assert from_dataset(rows) == examples
    assert [parse_wei(e.question.text) for e in examples] == [wei_question(e.events) for e in examples]


def test_rows_in_public_wording_are_read():
    texts = [
        ROW.format("Whitney flips the coin. Erika does not flip the coin."),
        LOOSE,
        f"{ROW[3:].format('Tj flips the coin. ')}  {NOTE}",
    ]
    found = from_dataset(Dataset.from_dict({"inputs": texts, "targets": ["no", "no", " No"], "targets_vec": [0, 0, 0]}))
    assert [e.prompt for e in found] == [f"{text}\nA:" for text in texts]
    assert found[1].events == (("rushawn", True), ("de'andre", False))
    assert [e.prompt[start:end] for e in found[:1] for start, end in e.operations] == [
        "Whitney flips the coin",
        "Erika does not flip the coin",
    ]
    assert [e.states for e in found] == [("heads", "tails", "tails")] * 2 + [("heads", "tails")]
    tokenizer = word_tokenizer(CoinFlipWei(names=["Whitney", "Erika"]).vocabulary())
    assert found[0].states_after_tokens(tokenizer)[-1] == "tails"


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("A coin is tails up. Al flips the coin. Is the coin still tails up?", "no", "does not begin with"),
        (ROW.format(""), "yes", "after 0 sentences"),
        (ROW.format("Al spins the coin."), "yes", "comes 'Al spins the coin. Is the coin"),
        (ROW.format("Al flips the coin. Bo eats."), "no", "after 1 sentences like"),
        (ROW.format("Al turns around and Bo flips the coin."), "no", "after 0 sentences like"),
        (ROW.format("Al flips the coin.") + " Perhaps.", "no", "comes 'Is the coin still heads up? Perhaps.'"),
        (ROW.format("Al flips the coin."), "yes", "has the target 'yes', but gives 'no'"),
        (ROW.format("Al flips the coin."), "maybe", "has the target 'maybe'"),
        (None, "yes", "must be texts, got None"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_with_its_index_and_text(text, target, message):
    good = ROW.format("Al flips the coin.")
    rows = Dataset.from_dict({"inputs": [good, text], "targets": ["no", target]})
    with pytest.raises(ValueError, match=r"^row 1: ") as error:
        from_dataset(rows)
    assert message in str(error.value) and (text is None or repr(text) in str(error.value))


def test_sets_without_the_fields_are_refused():
    with pytest.raises(ValueError, match=r"no column \['inputs'\]; it has \['question', 'targets'\]"):
        from_dataset(Dataset.from_dict({"question": ["x"], "targets": ["y"]}))
    with pytest.raises(ValueError, match="the set has no rows"):
        from_dataset(Dataset.from_dict({"inputs": [], "targets": []}))
    assert to_dataset(CoinFlip().examples(2)).num_rows == 2
