"""Text becomes the tokens of the tokenizer as its owner configured it, on every path and at every load.

Right values: the tokenizer's own call, and transformers' `generate`.
"""

import copy
import json
from pathlib import Path

import gguf
import pytest
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.known import smollm2_directory
from tests.field.tiny_family import NotBuilt, families, tiny_family
from tests.quantised.writers import write_quantised
from tests.reported.tokenizers import NAMES, SPECIAL, build, stored
from tests.tiny import FAMILIES, QUICK_FAMILIES, SMALL, VOCAB, hf_model

TEXTS = ["2 + 2?", "the coin is heads", " Alice flips", "<s>the coin", "a<think>b</think>", "it\n\nis <pad> tails"]


def described(tokenizer: PreTrainedTokenizerFast) -> object:
    """Everything of a tokenizer that a library might set."""
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    sides = tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length
    return tokenizer.backend_tokenizer.to_str(), specials, sides, tokenizer.chat_template


def require_own(model: CachedLM, tokenizer: PreTrainedTokenizerFast, texts: list[str] = TEXTS) -> None:
    for text in texts:
        assert model.encode(text) == tuple(tokenizer(text).input_ids), text
        plain = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        assert model.encode(text, add_special_tokens=False) == plain


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if i % 6 == 0 else [pytest.mark.slow]) for i, name in enumerate(NAMES)]
)
def test_every_tokenizer_is_used_as_it_is(name: str, tmp_path: Path) -> None:
    """Live with its own object, twice; as folder, again and again; and without a bridge."""
    tokenizer = stored(name, tmp_path / "own")
    before = described(tokenizer)
    live = copy.deepcopy(hf_model())
    for _ in range(2):
        model = cp.load_model(live, tokenizer)
        assert model.tokenizer is tokenizer
        require_own(model, tokenizer)
    plain = cp.load_model(tiny_family("bloom"), tokenizer)
    assert plain.fingerprint()["path"] == "plain" and plain.tokenizer is tokenizer
    require_own(plain, tokenizer)
    assert described(tokenizer) == before

    hf_model().save_pretrained(tmp_path / "model")
    build(name).save_pretrained(tmp_path / "model")
    as_stored = AutoTokenizer.from_pretrained(tmp_path / "model")
    for _ in range(2):
        require_own(cp.load_model(tmp_path / "model"), as_stored)


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_every_family_with_a_bridge(family: str) -> None:
    tokenizer = build(NAMES[FAMILIES.index(family) % len(NAMES)])
    model = cp.load_model(copy.deepcopy(hf_model(family)), tokenizer)
    require_own(model, tokenizer)
    ids = tuple(tokenizer(TEXTS[1]).input_ids)
    assert cp.run(model, TEXTS[1], **SMALL).requests[0].prompt_token_ids == ids


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_every_family(family: str) -> None:
    tokenizer = build(NAMES[[*families()].index(family) % len(NAMES)])
    try:
        model = cp.load_model(tiny_family(family), tokenizer)
    except (NotBuilt, ModelError):
        return
    assert model.tokenizer is tokenizer
    require_own(model, tokenizer)


def test_a_bridge_has_the_tokenizer_of_its_files(tmp_path: Path) -> None:
    """TransformerLens loads the files again, with a start token that their owner did not ask for."""
    build("metaspace, start token not added").save_pretrained(tmp_path)
    as_stored = AutoTokenizer.from_pretrained(tmp_path)
    live = copy.deepcopy(hf_model())
    bridge = build_bridge_from_module(live, type(live).__name__, hf_config=live.config, tokenizer=as_stored)
    assert bridge.tokenizer("the coin").input_ids != as_stored("the coin").input_ids
    require_own(cp.load_model(bridge), as_stored)
    own = build("words, own additions")
    assert cp.load_model(bridge, own).tokenizer is own


def test_the_start_token_is_a_setting_of_the_user(tmp_path: Path) -> None:
    tokenizer = build("metaspace, start token not added")
    model = cp.load_model(copy.deepcopy(hf_model()), tokenizer, prepend_bos=True)
    start = tokenizer.bos_token_id
    assert model.encode("the coin") == (start, *tokenizer("the coin").input_ids)
    assert model.encode("<s>the coin") == tuple(tokenizer("<s>the coin").input_ids)
    assert model.encode("the coin", add_special_tokens=False) == tuple(tokenizer("the coin").input_ids)
    trace = cp.run(model, ["the coin", [7, 8]], **SMALL)
    assert trace.requests[0].prompt_token_ids[0] == start and trace.requests[1].prompt_token_ids == (7, 8)
    trace.save(tmp_path / "run")
    assert cp.load_trace(tmp_path / "run").fingerprint["prepend_bos"] is True
    plain = cp.run(cp.load_model(copy.deepcopy(hf_model()), tokenizer), "the coin", **SMALL)
    assert "prepend_bos" not in plain.fingerprint
    with pytest.raises(ModelError, match="no tokenizer with a start token"):
        cp.load_model(copy.deepcopy(hf_model()), build("words, bare"), prepend_bos=True)


def test_smollm2_continues_a_text_as_transformers_does() -> None:
    folder = smollm2_directory()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ["2 + 2?", "The capital of France is", "A coin's state is heads. Alice flips. What's the state? A:"]
    trace = cp.run(cp.load_model("smollm2-135m"), prompts, max_new_tokens=8, progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    for number, prompt in enumerate(prompts):
        inputs = tokenizer(prompt, return_tensors="pt")
        out = theirs.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
        assert [*trace.requests[number].prompt_token_ids, *trace.committed(number)] == out


@pytest.mark.parametrize(("kind", "is_added"), [("gpt2", False), ("llama", True)])
def test_a_gguf_file_says_whether_a_start_token_is_added(
    kind: str, is_added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build("byte-level, bare" if kind == "gpt2" else "metaspace, bare")
    described_model = json.loads(built.backend_tokenizer.to_str())["model"]
    names = [built.convert_ids_to_tokens(i) or f"<unused {i}>" for i in range(VOCAB)]

    class WithTokenizer(gguf.GGUFWriter):
        """Writes the tokenizer of the test into the file of a tiny llama."""

        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self.add_tokenizer_model(kind)
            self.add_token_list(names)
            self.add_token_merges([" ".join(pair) for pair in described_model["merges"]])
            self.add_token_types([3 if name in SPECIAL else 1 for name in names])
            self.add_token_scores([-float(i) for i in range(len(names))])
            self.add_bos_token_id(built.convert_tokens_to_ids("<s>"))
            self.add_eos_token_id(built.convert_tokens_to_ids("</s>"))
            self.add_add_bos_token(is_added)

    monkeypatch.setattr(gguf, "GGUFWriter", WithTokenizer)
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path / "cache"))
    write_quantised("GGUF Q8_0", tiny_family("llama", dict(intermediate_size=64)), tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert (theirs("the coin").input_ids[0] == built.convert_tokens_to_ids("<s>")) is is_added
    for _ in range(2):
        require_own(cp.load_model(tmp_path / "tiny.gguf"), theirs, TEXTS[1:4])
