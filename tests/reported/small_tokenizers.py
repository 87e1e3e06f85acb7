"""Tokenizers of few words, for the tiny models: of llama's kind, and of whole words."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["▁The", "▁coin", "▁is", "▁heads", "▁tails", "▁up", "▁Alice", "▁flips", "▁it", "▁not", "▁nothing", "▁coins",
         "▁", "heads", "tails", "s", ".", ",", "?", "("]  # fmt: skip


def llama_like() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a ▁ before every text and writes each space as ▁, as llama 2's does. It has 23 ids."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((word, -9.0 if len(word) == 1 else -1.0) for word in WORDS)]
    inner = Tokenizer(models.Unigram(vocab, unk_id=0))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def whole_words() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, split at spaces. Others become <unk>, which it does not name."""
    vocab = {word: i for i, word in enumerate(["<unk>", "The", "coin", "is", "heads", "tails", "not"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner)
