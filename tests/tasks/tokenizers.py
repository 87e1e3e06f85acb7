"""Tokenizers that cut the words of coin flips into pieces."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cacheprobe.tasks import CoinFlip


def byte_pieces(special_tokens: list[str]) -> Tokenizer:
    """Byte-level BPE so small that an operation ends on the token that completes its verb."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=275, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    texts = [example.prompt + answer for example in CoinFlip(people=3).examples(20) for answer in (" heads", " tails")]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
