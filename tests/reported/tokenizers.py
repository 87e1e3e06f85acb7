"""Twenty small tokenizers as people bring them: four kinds, each as five owners configure it."""

from collections.abc import Callable
from pathlib import Path

import tokenizers as tk
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "the coin is heads and alice flips the coin then bob flips it",
    "what is the state of the coin? heads or tails",
    "two and two is four, alice said to bob.",
]
SIZE = 80
"""Tokens before those that an owner adds."""
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|turn|>", "<|end|>"]


def _byte_level() -> tk.Tokenizer:
    made = tk.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=SPECIAL, show_progress=False))
    return made


def _metaspace() -> tk.Tokenizer:
    made = tk.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=SPECIAL, show_progress=False))
    return made


def _sentencepiece() -> tk.Tokenizer:
    """As Llama's: the text begins with a space that decoding takes away."""
    made = tk.Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, max_piece_length=6
    )
    made.train_from_iterator(TEXTS, trainer)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def _words() -> tk.Tokenizer:
    words = sorted({word for text in TEXTS for word in text.split()})
    made = tk.Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *words])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


KINDS: dict[str, Callable[[], tk.Tokenizer]] = {
    "byte-level": _byte_level,
    "metaspace": _metaspace,
    "sentencepiece": _sentencepiece,
    "words": _words,
}


def _wrapped(made: tk.Tokenizer, **tokens: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **tokens)


def _around(made: tk.Tokenizer, single: str) -> tk.Tokenizer:
    pairs = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return made


def _with_additions(made: tk.Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = _wrapped(made, bos_token="<s>", eos_token="<|end|>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *([tokenizer.backend_tokenizer.normalizer] if made.normalizer else [])]
    )
    tokenizer.padding_side = "left"
    return tokenizer


OWNERS: dict[str, Callable[[tk.Tokenizer], PreTrainedTokenizerFast]] = {
    "bare": lambda made: _wrapped(made),
    "start token not added": lambda made: _wrapped(made, bos_token="<s>", eos_token="</s>"),
    "start token added": lambda made: _wrapped(_around(made, "<s> $A"), bos_token="<s>", eos_token="</s>"),
    "end token added": lambda made: _wrapped(_around(made, "$A </s>"), eos_token="</s>", pad_token="</s>"),
    "own additions": _with_additions,
}
NAMES = [f"{kind}, {owner}" for kind in KINDS for owner in OWNERS]


def build(name: str) -> PreTrainedTokenizerFast:
    """Returns one of the twenty tokenizers, new each time. It has fewer than 97 tokens."""
    kind, _, owner = name.partition(", ")
    return OWNERS[owner](KINDS[kind]())


def stored(name: str, folder: Path) -> PreTrainedTokenizerFast:
    """Returns one of the twenty, saved in a folder and read from there, so that it has a name that libraries may read
    again; then with tokens and a template that the folder does not have."""
    build(name).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<by hand>"])
    return tokenizer
