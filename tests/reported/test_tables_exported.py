"""Texts of exported tables are read back as they are; so are missing values."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.cli import look
from cacheprobe.core.export import write_table
from cacheprobe.views.dashboard.view import csv_text
from tests.tiny import VOCAB, hf_model

WORDS = ["null", "NA", "nan", "NaN", "None", "N/A", "<NA>", "#N/A", "1", "007", "1e5", "True", "inf", 'a"b', '"', ",",
         "=1+1", "'", "\\", "东京", "{}", "[1]"]  # fmt: skip
"""What pandas' defaults read as missing, as numbers or as flags, and what CSV must quote."""
TEXTS = ("token", "read_token", "committed_token", "drafted_token")


def read_back(path: Path) -> pd.DataFrame:
    """As docs/hypotheses.md says."""
    return pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(TEXTS, "str"))


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    """Each word is fed, and is generated, once."""
    words = [*WORDS, *(f"w{i}" for i in range(VOCAB - len(WORDS)))]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=words[-1])
    said = {"prompt_token_ids": [50, 51], "token_ids": list(range(len(WORDS)))}
    return cp.replay(cp.load_model(hf_model(), tokenizer=tokenizer), [said], window=4, capacity=96, progress=False)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_texts_that_look_like_nothing_or_numbers_are_read_back(trace: cp.Trace, ending: str, tmp_path: Path) -> None:
    out = tmp_path / f"readings.{ending}"
    look.hypotheses(trace.save(tmp_path / "run"), out=out)
    table = read_back(out) if ending == "csv" else pd.read_parquet(out)
    last = table[table.layer == table.layer.max()].sort_values("position")
    assert last.committed_token.tolist() == WORDS
    assert last.read_token.tolist()[1:] == WORDS[:-1]
    for name in TEXTS:
        assert table[name].dtype == "str"
        assert table[name].isna().tolist() == trace.hypotheses()[name].isna().tolist()
    assert (
        table.drafted_token.isna().equals(table.drafted_token_id.isna()) and 0 < table.drafted_token.isna().mean() < 1
    )
    tops = [json.loads(cell) if ending == "csv" else list(cell) for cell in table.top_tokens]
    assert tops == trace.hypotheses().top_tokens.tolist()


@pytest.mark.parametrize("write", [write_table, lambda table, to: to.write_text(csv_text(table), encoding="utf-8")])
def test_every_text_survives_a_csv_file(write, tmp_path: Path) -> None:
    """Line ends, a byte order mark and wide spaces too; lists of any column are JSON."""
    texts = [*WORDS, " null", "a\nb", "a\rb", "a\r\nb", "\ufeff", "\u2003", "\u00a0", "東京🙂", None]
    if write is not write_table:
        texts.remove("=1+1")  # a spreadsheet would compute it, so it gets an apostrophe
    ids = [np.array([1, 2]), [], ("a", 'b"'), {"a": np.float32(0.5)}, *[None] * (len(texts) - 4)]
    write(pd.DataFrame({"token": pd.array(texts, "str"), "ids": ids, "nats": -1.5}), tmp_path / "x.csv")
    table = read_back(tmp_path / "x.csv")
    assert table.token.tolist()[:-1] == texts[:-1] and table.token.isna().tolist()[-1]
    assert [json.loads(cell) for cell in table.ids[:4]] == [[1, 2], [], ["a", 'b"'], {"a": 0.5}]
    assert table.ids[4:].isna().all() and (table.nats == -1.5).all()
