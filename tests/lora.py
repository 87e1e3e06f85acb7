"""A tiny model that reads coin-flip questions, and short trainings of it."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cacheprobe.models.hf.adapters import CONFIG, WEIGHTS
from cacheprobe.tasks.coin_flip import NAMES
from cacheprobe.training.lora.run import train_lora
from cacheprobe.training.lora.train import LoraTrainer
from cacheprobe.training.settings import LoraSettings
from cacheprobe_benchmarks.shared.tiny import VOCAB, tiny_model

SMALL = dict(steps=6, batch=4, micro_batch=2, max_people=2, rank=2, first_layer=1, learning_rate=0.05, warmup_steps=1)


def tokenizer() -> PreTrainedTokenizerFast:
    """Every word of the task's questions is a token; some names too, the other names are unknown."""
    words = "<unk> A coin 's state is heads tails . , then flips does not flip What the ? :".split()
    words += [name for name in NAMES if name not in words][: VOCAB - len(words)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("'s|[.,?:]"), "isolated")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def trainer(folder: Path | None = None, **changes) -> LoraTrainer:
    return LoraTrainer(tiny_model(), tokenizer(), LoraSettings(**{**SMALL, **changes}), folder)


def edited(adapter: Path, target: Path, **config) -> Path:
    """A copy with other settings, and without training.json, as peft would leave it."""
    target.mkdir()
    (target / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes())
    stored = json.loads((adapter / CONFIG).read_text()) | config
    (target / CONFIG).write_text(json.dumps(stored))
    return target


def save_base(path: Path) -> Path:
    tiny_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def train_small(base: Path, out: Path) -> Path:
    train_lora(LoraSettings(**SMALL, model=str(base)), out, progress=False, checkpoint_every=3)
    return out
