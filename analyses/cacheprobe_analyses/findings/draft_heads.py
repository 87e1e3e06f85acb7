"""Runs a model with the draft heads of a finding's settings, and trains heads that are missing."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.base import CachedLM

TINY = "tiny"
"""Stands for a random model of a few thousand weights, for tests."""


@dataclass(frozen=True)
class Settings:
    """A seed draws other prompts, and reads other heads, one as EAGLE-3 and one with norm_output; the model is the
    same. Half of the prompts are of tasks, half are texts that the model wrote."""

    model: str = "smollm2-135m"
    heads: str = "runs/heads"
    """Folder with a head's folder for each seed, SEED and SEED-norm; what is missing is trained and kept there. If
    empty, heads are trained anew, and not kept."""
    prompts: int = 48
    prompt_tokens: int = 48
    """Of a text that the model wrote."""
    new_tokens: int = 48
    texts: int = 128
    """Texts that a missing head is trained on, a tenth of them held out; four a step."""
    text_tokens: int = 64
    """Generated tokens of such a text, at most."""
    steps: int = 100
    """Training steps of a missing head."""
    draft_vocab: int = 4096
    """Tokens that a missing head can draft."""


class _Eagle3(cp.drafters.Eagle3):
    """Drafts whatever it costs, so that the costs are not measured first."""

    always_drafts = True


def drafted_traces(settings: Settings, seed: int, length: int) -> Iterator[cp.Trace]:
    """Yields a run of the seed's prompts with drafts of `length` tokens by its EAGLE-3 head, and one with its head with
    norm_output. Their traces keep what the model fed the head, the model's last states, and the head's attention."""
    model = load(settings.model)
    with ExitStack() as stack:
        kept = Path(settings.heads or stack.enter_context(TemporaryDirectory()))
        for has_norm in (False, True):
            folder = trained_head(model, settings, seed, has_norm, kept)
            drafter = _Eagle3(folder, length=length, layers_are="inputs")
            layers = [layer for _, layer in drafter.head(model).target_sites]
            capture = cp.CaptureConfig("SZ", layers=(*layers, model.n_layers - 1), heads=("pattern",))
            yield cp.run(
                model, prompts(model, settings, seed), drafter=drafter, window=length + 1, draft_length=length,
                max_new_tokens=settings.new_tokens, capture=capture, progress=False,
            )  # fmt: skip


def trained_head(model: CachedLM, settings: Settings, seed: int, has_norm: bool, kept: Path) -> Path:
    """Returns the folder of a seed's head in `kept`, and trains it first if it is missing: as `cacheprobe train eagle3`
    does, on texts that are recorded once for all heads."""
    from cacheprobe.cli.train_heads import record_texts
    from cacheprobe.training.eagle3 import sites_of, train_eagle3
    from cacheprobe.training.settings import Eagle3Settings

    folder = kept / f"{seed}{'-norm' if has_norm else ''}"
    if not (folder / "about.json").exists():
        of = Eagle3Settings(texts=settings.texts, new_tokens=settings.text_tokens, steps=settings.steps, batch=4,
                            draft_vocab=settings.draft_vocab, seed=seed, norm_output=has_norm)  # fmt: skip
        layers = [layer for _, layer in sites_of(model, of)]
        run = kept / "run"
        is_there = (run / "manifest.json").exists()
        texts = cp.load_trace(run, model) if is_there else record_texts(model, of, layers, run, False)
        train_eagle3(texts, of, folder, progress=False)
    return folder


def prompts(model: CachedLM, settings: Settings, seed: int) -> list[list[int]]:
    """Returns the seed's prompts as token ids: half from the tasks, as the heads were trained but drawn apart, and half
    of them texts that the model wrote at temperature 1 after one random token."""
    from cacheprobe.models.feeding import continue_texts
    from cacheprobe.training.tuned_lens import task_prompts

    draw, half = torch.Generator().manual_seed(seed), settings.prompts // 2

    def sampled(texts: list[int], logits: Tensor) -> list[int]:
        """Returns a next token for each text, never one that ends it."""
        scores = logits.float().clone()
        scores[:, list(model.stop_token_ids)] = -torch.inf
        return torch.multinomial(scores.softmax(-1), 1, generator=draw)[:, 0].tolist()

    first = [[token] for token in torch.randint(model.d_vocab, (settings.prompts - half,), generator=draw).tolist()]
    written = continue_texts(model, first, settings.prompt_tokens, sampled)
    return [*map(list, task_prompts(model, half, seed, "held-out", in_chat=True)), *written]


@cache
def load(name: str) -> CachedLM:
    """Returns the model, one for all seeds, since it is not changed."""
    if name != TINY:
        return cp.load_model(name, dtype="float32", progress=False)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2)
    of = LlamaConfig(**sizes, initializer_range=0.3, max_position_embeddings=256, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cp.load_model(LlamaForCausalLM(of).eval())
