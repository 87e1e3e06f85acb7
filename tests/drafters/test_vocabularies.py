"""A draft model of another tokenizer, or of one that is padded to another size: what is shared, and that nothing of it
changes a text."""

import copy
import json
import random
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.engine import committer
from cacheprobe.engine.drafters import DraftModel
from cacheprobe.models.hf.text import TokenText
from cacheprobe.models.known import GEMMA, SMOLLM2, embedded_directory
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.vocabularies import VocabularyMap, _joined
from cacheprobe_benchmarks.shared.tiny import Size, tiny_model
from tests.drafters.test_drafters import Context, new_state
from tests.engine.test_engine_drafts import chance, exact_pairs

CORPUS = [
    f"{name} flips the {thing} {count} times, and the {thing} is still {side}.\n"
    for name in ("Alice", "Bob", "Chloé", "東京")
    for thing in ("coin", "card", "lamp", "small coin")
    for count in ("two", "three", "17", "several")
    for side in ("up", "down", "heads up", "on the table")
]
TEXTS = ["Alice flips the coin two times, and", "The lamp is still on the table.\nBob flips", "Chloé 17 東京 🙂 flips"]
SPECIAL = ["<unk>", "<s>", "</s>"]
RUN: dict[str, Any] = dict(
    window=4, group=2, max_new_tokens=24, capacity=128, draft_length=3, progress=False, capture=None
)
SAMPLING = {
    "greedy": cp.SamplingParams(stop_token_ids=()),
    "sampled": cp.SamplingParams(temperature=0.9, top_k=20, seed=3, repetition_penalty=1.1, stop_token_ids=()),
}


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As of GPT-2: a BPE over bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend)


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """As of Llama 2 and T5: a Unigram with ▁ for a space, one in front of a text, byte tokens and a start token.
    Its pieces are those of a BPE, as a trained Unigram is another one in each process."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=SPECIAL, show_progress=False)
    learnt.train_from_iterator([text.replace("\n", "") for text in CORPUS], trainer)
    names = sorted(learnt.get_vocab(), key=learnt.token_to_id)
    single = [(f"<0x{byte:02X}>", -99.0) for byte in range(256)]
    pieces = [*((name, 0.0) for name in SPECIAL), *single, *((name, -9 - i / 99) for i, name in enumerate(names[3:]))]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.add_special_tokens(SPECIAL)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrapped(backend)


TOKENIZERS = {"byte level": byte_level, "sentencepiece": sentencepiece}
PAIRS = [(byte_level, sentencepiece), (sentencepiece, byte_level)]


def words(names: list[str], offset: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each word."""
    built = Tokenizer(models.WordLevel({"<unk>": 0} | {name: offset + i for i, name in enumerate(names, 1)}, "<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>")


def permuted(tokenizer: PreTrainedTokenizerFast) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The same tokenizer with other numbers, and the new number of each token."""
    order = list(range(len(tokenizer)))
    random.Random(0).shuffle(order)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in parts["added_tokens"]:
        token["id"] = order[token["id"]]
    parts["added_tokens"].sort(key=lambda token: token["id"])
    model = parts["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {name: order[i] for name, i in model["vocab"].items()}
    else:
        model["vocab"] = [pair for _, pair in sorted(zip(order, model["vocab"], strict=True))]
        model["unk_id"] = order[model["unk_id"]]
    for token in ((parts["post_processor"] or {}).get("special_tokens") or {}).values():
        token["ids"] = [order[i] for i in token["ids"]]
    return wrapped(Tokenizer.from_str(json.dumps(parts))), order


def live(size: int) -> Any:
    return tiny_model("llama", size=Size(size, hidden=32, mlp=48, layers=2, heads=4, initializer_range=0.3))


def with_rows(model: Any, size: int, ids: dict[int, int]) -> Any:
    """The model's blocks under a vocabulary of `size`: row ids[i] of embedding and unembedding is row i of the model;
    the others are almost zero, so that nothing draws them."""
    made = live(size)
    made.model.layers.load_state_dict(model.model.layers.state_dict())
    made.model.norm.load_state_dict(model.model.norm.state_dict())
    with torch.no_grad():
        for old, new in ((model.model.embed_tokens, made.model.embed_tokens), (model.lm_head, made.lm_head)):
            new.weight *= 0.01
            new.weight[list(ids.values())] = old.weight[list(ids)]
    return made


def verified(trace: cp.Trace) -> Any:
    return trace.events().query("phase == 'verify'")


def text(tokenizer: Any) -> Any:
    """What a model does with its tokenizer."""
    made = TokenText.of(tokenizer)
    made.d_vocab = len(tokenizer)
    return made


# -- what is shared


def test_tokens_are_equal_by_what_they_stand_for() -> None:
    """Written out by hand. The letter Ġ is no space in a SentencePiece vocabulary, nor is <0x0A> a byte in another."""

    def owner(names: list[str], special: list[str]) -> Any:
        ids = {name: i for i, name in enumerate([*names, *special])}
        tokenizer = SimpleNamespace(get_vocab=lambda: ids, bos_token_id=None, all_special_ids=[ids[s] for s in special])
        tokenizer = type("Fake", (SimpleNamespace,), {"__hash__": object.__hash__})(**vars(tokenizer))
        return SimpleNamespace(tokenizer=tokenizer, d_vocab=len(ids), encode=lambda text, **_: [])

    bytes_of = owner(["the", "Ġthe", "Ċ", "Ã©", "æ", "Ġ", "ĠĠ", "<0x0A>", "Äł", "<pad>"], ["</s>", "<|im_end|>"])
    pieces = ["<0x0A>", "<0xE6>", "▁", "▁▁", "▁the", "the", "é", "\n", "Ġ", "▁coin", "</s>"]
    marked = owner(pieces, ["<pad>", "<eos>", "<|im_end|>"])
    names = {"the": "the", "Ġthe": "▁the", "Ċ": "\n", "Ã©": "é", "æ": "<0xE6>", "Ġ": "▁", "ĠĠ": "▁▁", "Äł": "Ġ"}
    want = {**names, "<|im_end|>": "<|im_end|>"}
    ours, theirs = bytes_of.tokenizer.get_vocab(), marked.tokenizer.get_vocab()
    assert VocabularyMap(bytes_of, marked).draft_ids == {ours[a]: theirs[b] for a, b in want.items()}
    back = VocabularyMap(marked, bytes_of)
    assert back.draft_ids == {theirs[b]: ours[a] for a, b in [*want.items(), ("Ċ", "<0x0A>")]}
    logits = back.to_target(torch.arange(12.0)[None])[0]
    finite = {i: int(value) for i, value in enumerate(logits.tolist()) if value > -torch.inf}
    assert finite == {theirs[b]: ours[a] for a, b in want.items()}  # the newline once, and as a token of its own


@cache
def real(name: str) -> Any:
    return text(AutoTokenizer.from_pretrained(embedded_directory(name)))


@pytest.mark.parametrize(("target", "draft"), [*PAIRS, (SMOLLM2, GEMMA), (GEMMA, SMOLLM2)])
def test_a_text_in_the_other_tokens_reads_the_same(target: Any, draft: Any) -> None:
    """Words, numbers, code, several scripts, and every beginning of them, characters that are cut included."""
    ours, theirs = (real(one) if isinstance(one, str) else text(one()) for one in (target, draft))
    shared = VocabularyMap(ours, theirs)
    assert not shared.has_same_ids and shared.num_shared > 100
    starts, start = theirs.encode(""), theirs.tokenizer.bos_token_id
    for line in (*TEXTS, *CORPUS[:3], "def f(x):\n\n    return {'a': [x, -1.5e-3]}  # ok", " naïve, Ελλάδα, привет 🙂"):
        ids = ours.encode(line)
        for end in range(1, len(ids) + 1):
            found = shared.to_draft(ids[:end])
            assert tuple(found[: len(starts)]) == starts and found.count(start) <= 1
            assert _joined(shared._of_draft, found) == _joined(shared._meanings, ids[:end])
            read, want = (
                one.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for one, tokens in ((theirs, found), (ours, ids[:end]))
            )
            assert read.lstrip() == want.lstrip() or "\ufffd" in read + want


def test_what_is_not_shared_is_encoded_as_the_draft_model_encodes_it() -> None:
    """A Chinese word that one tokenizer cuts inside its characters is one token of the other."""
    ours, theirs = real(SMOLLM2), real(GEMMA)
    found = VocabularyMap(ours, theirs).to_draft(ours.encode("in 東京 now"))
    assert tuple(found) == theirs.encode("in 東京 now")


# -- the same weights behind another vocabulary


@pytest.mark.parametrize("acceptance", ["equality", "rejection"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_same_weights_with_permuted_tokens_are_always_right(kind: str, sampling: str, acceptance: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    other, order = permuted(tokenizer)
    n = len(tokenizer)
    model = with_rows(live(n), n + 40, {i: i for i in range(n)})
    target = cp.load_model(model, tokenizer)
    drafter = DraftModel(cp.load_model(with_rows(model, n + 8, dict(enumerate(order))), other), length=3)
    settings = dict(**RUN, sampling=SAMPLING[sampling], acceptance=acceptance)
    trace = cp.run(target, TEXTS, **settings, drafter=drafter)
    assert verified(trace).num_accepted.sum() > 40 and trace.num_rolled_back == 0 and not trace.meta["errors"]
    if acceptance == "equality":
        plain = cp.run(target, TEXTS, **settings)
        assert [trace.committed(i) for i in range(3)] == [plain.committed(i) for i in range(3)]


# -- other tokenizers


@cache
def pair(target: Any, draft: Any) -> tuple[PlainLM, DraftModel]:
    """Two models of two tokenizers with the same blocks, and the same rows for shared tokens: often right."""
    size, own = len(target()), len(draft())
    shared = VocabularyMap(text(target()), text(draft())).draft_ids
    model = with_rows(live(size), size, {i: i for i in shared})
    for layer in model.model.layers:  # the newest token says most of the next one, however the text before it is cut
        layer.self_attn.o_proj.weight.data *= 0.1
    ours = cp.load_model(model, target())
    return ours, DraftModel(cp.load_model(with_rows(model, own + 8, shared), draft()), length=3)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_another_tokenizer_changes_no_token(target: Any, draft: Any, sampling: str) -> None:
    ours, drafter = pair(target, draft)
    settings = dict(**RUN, sampling=SAMPLING[sampling])
    plain, trace = cp.run(ours, TEXTS, **settings), cp.run(ours, TEXTS, **settings, drafter=drafter, deterministic=True)
    assert [trace.committed(i) for i in range(3)] == [plain.committed(i) for i in range(3)]
    assert verified(trace).num_accepted.sum() > 5 and trace.num_rolled_back and not trace.meta["errors"]
    shared = VocabularyMap(ours, drafter.model).draft_ids
    assert {token for ids in trace.events().draft_token_ids for token in ids} <= shared.keys()


@pytest.mark.parametrize("is_broken", [False, True], ids=["as it is", "every candidate accepted"])
def test_rejection_keeps_the_distribution_with_another_tokenizer(is_broken: bool) -> None:
    """As the test of that name in tests/engine/test_engine_drafts.py."""
    ours, drafter = pair(*PAIRS[0])
    prompt = list(ours.encode(TEXTS[0]))
    sampling = cp.SamplingParams(temperature=1.0, top_k=3, max_new_tokens=4, n=500, stop_token_ids=())
    settings = {**RUN, "group": 8, "capacity": 64, "max_batch": 64, "max_new_tokens": 4, "seed": 4}
    always = lambda *args: (True, args[2])  # noqa: E731
    with patch.object(committer, "accept_or_recover", always if is_broken else committer.accept_or_recover):
        trace = cp.run(ours, [cp.Request(prompt, sampling)], **settings, acceptance="rejection", drafter=drafter)
    counts = Counter((trace.committed(i)[1], trace.committed(i)[2]) for i in range(500))
    found = chance(counts, exact_pairs(prompt, sampling, ours), 500)
    assert (found < 1e-12) if is_broken else (found > 5e-5)
    assert is_broken or 0 < trace.num_rolled_back < trace.num_drafted


def test_a_text_that_is_longer_in_the_other_tokens_ends_with_the_draft_models_context() -> None:
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    small = cp.load_model(tiny_model("gpt2", size=Size(256, 32, 48, 2, 4, 0.3)), wrapped(letters))
    target = cp.load_model(live(len(byte_level())), byte_level())
    prompts = [list(target.encode("".join(CORPUS)[:n])) for n in (small.n_ctx - 1, small.n_ctx, small.n_ctx + 1, 20)]
    assert max(map(len, prompts)) < small.n_ctx // 2
    context = Context()
    context.model = target
    drafts = DraftModel(small).extend(context, [new_state(prompt, i) for i, prompt in enumerate(prompts)])
    assert [len(draft) for draft in drafts] == [2, 1, 0, 4]
    trace = cp.run(target, ["".join(CORPUS)[:120]], **RUN, drafter=DraftModel(small))
    assert trace.num_drafted and not trace.meta["errors"]


def test_gemma_drafts_for_smollm2() -> None:
    target, drafter = cp.load_model(SMOLLM2, progress=False), DraftModel(cp.load_model(GEMMA, progress=False))
    prompts = ["The capital of France is", "One, two, three, four,"]
    settings = {**RUN, "max_new_tokens": 12}
    plain, trace = cp.run(target, prompts, **settings), cp.run(target, prompts, **settings, drafter=drafter)
    assert [trace.committed(i) for i in (0, 1)] == [plain.committed(i) for i in (0, 1)]
    assert verified(trace).num_accepted.sum() > 8


# -- replays


def test_a_replay_with_another_tokenizer_counts_as_the_run(tmp_path: Any) -> None:
    ours, drafter = pair(*PAIRS[1])
    settings = dict(RUN, sampling=cp.SamplingParams(temperature=0.9, seed=1, stop_token_ids=()), capture="S")
    saved = cp.run(ours, TEXTS, **settings).save(tmp_path / "run")
    table = cp.analysis.acceptance(cp.load_trace(saved, ours), drafter, windows=4, progress=False)
    events = verified(cp.run(ours, TEXTS, **settings, drafter=drafter))
    of_run = [(len(own), sum(map(len, own.draft_token_ids)), own.num_accepted.sum()) for _, own in
              events.groupby("request_id")]  # fmt: skip
    assert [(r.passes, r.drafted, r.accepted) for r in table.itertuples()] == of_run and table.accepted.sum() > 5
    with pytest.raises(ValueError, match="same tokenizer, or give the run its model"):
        cp.analysis.acceptance(cp.load_trace(saved), drafter, windows=4, progress=False)


# -- refusals


def test_tokenizers_that_share_next_to_nothing_are_refused_by_name() -> None:
    def named(name: str, tokenizer: PreTrainedTokenizerFast) -> PlainLM:
        model = cp.load_model(live(60), tokenizer)
        model.name = name
        return model

    target = named("big", words([f"w{i}" for i in range(50)]))
    shared = [f"w{i}" for i in range(4)]
    for common, count in ((0, "1 token"), (3, "4 tokens")):  # <unk> is shared, too
        draft = named("small", words([*shared[:common], *(f"v{i}" for i in range(40 - common))], 5))
        said = rf"small and big share {count}, less than 10% of the 41 of the smaller one.*use a draft"
        with pytest.raises(ValueError, match=said):
            cp.run(target, ["w1 w2"], **RUN, drafter=DraftModel(draft))
    DraftModel(named("small", words([*shared, *(f"v{i}" for i in range(36))], 5))).check(target)


# -- one tokenizer, two sizes


@cache
def qwen() -> PreTrainedTokenizerFast:
    return words([f"w{i}" for i in range(1, 151_646)])


@pytest.mark.parametrize(("target_size", "draft_size"), [(151_936, 152_064), (152_064, 151_936)])
def test_sizes_of_qwen_draft_for_each_other_and_never_draft_an_id_without_a_token(
    target_size: int, draft_size: int
) -> None:
    n = len(qwen())
    base = live(n)
    eager = with_rows(base, draft_size, {i: i for i in range(n)})
    with torch.no_grad():
        eager.lm_head.weight[n:] = 50 * eager.lm_head.weight[7].sign()  # without a mask it says nothing else
    target = cp.load_model(with_rows(base, target_size, {i: i for i in range(n)}), qwen())
    drafter = DraftModel(cp.load_model(eager, qwen()), length=3)
    for sampling in (cp.SamplingParams(), cp.SamplingParams(temperature=0.8, seed=2, top_k=5)):
        settings: dict[str, Any] = {**RUN, "max_new_tokens": 8, "sampling": sampling}
        plain = cp.run(target, ["w1 w2 w3", "w50 w60000"], **settings)
        for acceptance in ("equality", "rejection"):
            trace = cp.run(target, ["w1 w2 w3", "w50 w60000"], **settings, drafter=drafter, acceptance=acceptance)
            assert verified(trace).num_accepted.sum() >= 8 and not trace.meta["errors"]
            assert max(token for ids in trace.events().draft_token_ids for token in ids) < n
            if acceptance == "equality":
                assert [trace.committed(i) for i in (0, 1)] == [plain.committed(i) for i in (0, 1)]


def test_a_token_that_is_added_later_is_drafted_from_then_on() -> None:
    ours, theirs = copy.deepcopy(words(["a", "b", "c"])), copy.deepcopy(words(["c", "b", "a"]))
    target, draft = cp.load_model(live(8), ours), DraftModel(cp.load_model(live(8), theirs))
    draft.check(target)
    before = draft._reader.vocabulary(target).num_shared
    assert draft._reader.vocabulary(target) is draft._reader.vocabulary(target)
    for tokenizer in (ours, theirs):
        tokenizer.add_tokens("new")
    assert (before, draft._reader.vocabulary(target).num_shared) == (4, 5)
