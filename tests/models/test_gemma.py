"""Gemma 3 270M from its Python packages: its terms are shown before it is converted, and a real run equals the model of
transformers."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheprobe as cp
from cacheprobe.models import known
from cacheprobe.models.base import ModelError
from cacheprobe.models.known import EMBEDDED, GEMMA, embedded_directory, embedded_state
from cacheprobe.models.plain.lm import PlainLM
from tests.field.columns import COLUMNS, TinySubject
from tests.field.original import states_of

OPTIONS: Any = dict(
    drafter=cp.drafters.NGram(min_ngram=1),
    deterministic=True,
    max_new_tokens=8,
    capacity=64,
    window=4,
    group=2,
    capture="STC",
    sampling=cp.SamplingParams(stop_token_ids=()),
    progress=False,
)
PROMPTS = [
    "The coin is heads up. Alice flips the coin. Bob flips the coin. Is the coin still heads up?",
    "one two three four one two three four one two",
    "The capital of France is",
]


@pytest.fixture(autouse=True)
def installed() -> None:
    """Skips where the packages are absent, which fails in CI."""
    if embedded_state(GEMMA) == "absent":
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not installed: {EMBEDDED[GEMMA].install}")


@cache
def gemma(dtype: str) -> PlainLM:
    return cp.load_model(GEMMA, dtype=dtype, progress=False)


@cache
def subject() -> TinySubject:
    """The model behind our loader, and the same folder in transformers' own hands, in float32."""
    original: Any = AutoModelForCausalLM.from_pretrained(embedded_directory(GEMMA), dtype=torch.float32)
    return TinySubject(original.eval(), gemma("float32").blocks, gemma("float32"))


@pytest.mark.parametrize("column", COLUMNS)
def test_a_run_equals_transformers_own_model(column: str) -> None:
    """In float32: tokens of `generate`, states of hooks, logits, edits and patching, as near as the column says."""
    assert COLUMNS[column](subject()) == ""


def test_a_text_is_continued_as_transformers_continues_it() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_directory(GEMMA))
    trace = cp.run(gemma("float32"), PROMPTS, **OPTIONS)
    assert 0 < trace.num_rolled_back < trace.num_drafted
    for request, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        theirs = subject().original.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0]
        assert [*trace.requests[request].prompt_token_ids, *trace.committed(request)] == theirs.tolist()


def test_a_deterministic_request_has_the_same_bits_alone_and_in_a_batch_in_bfloat16() -> None:
    together = cp.run(gemma("bfloat16"), PROMPTS, **OPTIONS)
    assert 0 < together.num_rolled_back < together.num_drafted
    for request, prompt in enumerate(PROMPTS[:2]):
        alone = cp.run(gemma("bfloat16"), [prompt], **OPTIONS)
        assert alone.committed(0) == together.committed(request)
        assert alone.digest(0) == together.digest(request)


def test_a_rejected_draft_leaves_no_bit_in_bfloat16() -> None:
    assert COLUMNS["rollback"](TinySubject(None, [], gemma("bfloat16"))) == ""


def test_the_logit_lens_is_the_model_s_own_norm_and_unembedding() -> None:
    """In layers below the last, too: those that `generate` does not read out."""
    ours, original = subject().drafted, subject().original
    table = ours.hypotheses()
    table = table[(table.request_id == 0) & (table.site == "S") & (table.status == "committed")]
    for layer in (0, 8, 16):
        rows = table[table.layer == layer]
        with torch.inference_mode():
            logits = original.lm_head(original.model.norm(ours.states("S", layer, 0)))
        expected = logits.log_softmax(-1)[rows.position.tolist()].max(-1)
        assert len(rows) == 8 and rows.token_id.tolist() == expected.indices.tolist()
        # float32: 262,144 summands of a softmax in another order
        assert rows.logprob_nats.tolist() == pytest.approx(expected.values.tolist(), abs=1e-3)


def test_states_of_the_first_layer_are_not_those_of_the_last() -> None:
    """The control of the comparisons above: a wrong layer is far outside their tolerance."""
    states = states_of(subject().original, subject().blocks, [2, 4521, 603])
    assert (states["S", 0] - states["S", 17]).abs().max() > 0.1 * states["S", 17].abs().max()


def test_the_report_names_the_model_and_its_weights(tmp_path: Path) -> None:
    text = cp.plots.write_report(subject().drafted, tmp_path / "report.html").read_text()
    assert "gemma-3-270m" in text and "Gemma 3 270M from a Q4_K_M GGUF, dequantised" in text


@pytest.fixture
def unconverted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; the conversion only notes the size of what it is given."""

    def convert(gguf: Path, header: object, progress: bool, directory: Path) -> None:
        (directory / "config.json").write_text(str(gguf.stat().st_size))

    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(known, "convert", convert)
    return tmp_path


def test_the_terms_are_shown_once_before_the_conversion_and_kept(
    unconverted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    joined, own = [], known.convert

    def after_the_terms(gguf: Path, *more: Any) -> None:
        joined.append((gguf, capsys.readouterr().err))
        own(gguf, *more)

    monkeypatch.setattr(known, "convert", after_the_terms)
    folder = embedded_directory(GEMMA, progress=False)
    assert embedded_directory(GEMMA, progress=False) == folder and embedded_state(GEMMA) == "converted"
    ((file, said),) = joined
    assert "Gemma Terms of Use apply" in said and "ai.google.dev/gemma/terms" in said
    assert Path(said.split()[-1]).is_file() and said.split()[-1].endswith("GEMMA_TERMS.html")
    assert json.loads((folder / "contents.json").read_text())["terms"] == said.strip()
    assert (folder / "config.json").read_text() == "253113024" and not file.exists()
    assert {path.name for path in folder.iterdir()} == {"config.json", "contents.json"}
    assert capsys.readouterr().err == ""


def test_a_file_that_is_not_the_tested_one_is_refused(unconverted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, GEMMA, EMBEDDED[GEMMA]._replace(sha256="0" * 64))
    with pytest.raises(ModelError, match="its parts join to SHA-256 a5fd3b62230a.*, not 000"):
        cp.load_model(GEMMA)
    assert not [path for path in unconverted.iterdir() if path.is_dir()]


@pytest.mark.parametrize("missing", EMBEDDED[GEMMA].packages)
def test_without_one_of_its_packages_it_says_how_to_get_them(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = known.find_spec
    monkeypatch.setattr(known, "find_spec", lambda name: None if name == missing else own(name))
    with pytest.raises(ModelError, match=r"gemma-3-270m is not here.*pip install 'cacheprobe\[gemma\]'.*make gemma"):
        cp.load_model(GEMMA)
