"""Whether a fixed shape computes every row alike, wherever it stands: tried before it is relied on.

Decode-verify-rollback needs the same bits for a token in any row of the batch and any slot of the window. Libraries do
not promise it, and some shapes break it: a vectorised loop ends with a scalar tail, and a matrix product may treat its
last row by itself, so that the last rows of an odd shape are rounded differently (measured on CPU: SiLU over 9 rows of
48 in float32; 13 rows of 576 x 1536 in bfloat16).
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cacheprobe.config import EngineConfig
from cacheprobe.models.base import CachedLM

_known: "WeakKeyDictionary[CachedLM, dict[tuple[int, ...], str | None]]" = WeakKeyDictionary()
_NEARBY = 8
"""Larger groups that are tried for the error message."""
_ROWS_TRIED, _MOST_TEXTS = 1000, 24
"""Rows x layers to compute at least in a trial, and texts at most."""


def require_consistent(model: CachedLM, config: EngineConfig) -> None:
    """Try the verifier's shape, and the prefill's where several prompts share one; once for each model and shape.

    Raises: ValueError naming the place that differs, and a group that does not.
    """
    if fault := _fault(model, config.group, config.window, config.capacity):
        better = next(
            (g for g in range(config.group + 1, config.group + _NEARBY) if not _fault_of(model, g, config)), None
        )
        remedy = f"set group={better}" if better else "choose another window or group; even numbers serve best"
        raise ValueError(
            f"verify passes of {config.group} x {config.window} rows do not compute every row alike on this machine: "
            f"{fault}; {remedy}"
        )
    if config.prefill_group > 1 and (
        fault := _fault(model, config.prefill_group, config.prefill_chunk, config.capacity)
    ):
        raise ValueError(
            f"prefill passes of {config.prefill_group} x {config.prefill_chunk} rows do not compute every row alike on "
            f"this machine: {fault}; set prefill_group=1"
        )


def _fault_of(model: CachedLM, group: int, config: EngineConfig) -> str | None:
    return _fault(model, group, config.window, config.capacity)


def _fault(model: CachedLM, batch: int, width: int, capacity: int) -> str | None:
    shapes = _known.setdefault(model, {})
    key = (batch, width, capacity, torch.get_num_threads())
    if key not in shapes:
        shapes[key] = _try(model, batch, width, capacity)
    return shapes[key]


def _try(model: CachedLM, batch: int, width: int, capacity: int) -> str | None:
    """The first place whose logits differ from the same token's elsewhere, in words; None where there is none.

    One text stands in every row, and is then fed again from later starts, so that each token has been in several slots.
    A fault shows in a few elements only, so small models are tried with several texts.
    """
    num_texts = min(max(_ROWS_TRIED // (batch * width * model.n_layers), 1), _MOST_TEXTS)
    for seed in range(num_texts):
        if fault := _try_text(model, batch, width, capacity, seed):
            return fault
    return None


def _try_text(model: CachedLM, batch: int, width: int, capacity: int, seed: int) -> str | None:
    shifts = sorted({0, 1, width // 2, width - 1} if width > 1 else {0})
    if capacity < 2 * width:  # no room to shift; such a run has one window in all
        shifts = [0]
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, model.d_vocab, (width + max(shifts),), generator=generator)
    cache = model.new_cache(batch, capacity)
    first: Tensor | None = None
    for shift in shifts:
        token_ids = text[shift : shift + width].expand(batch, width).contiguous()
        logits = model.forward(token_ids, cache, range(batch), [shift] * batch)
        if first is None:
            first = logits
        for row in range(batch):
            wrong = (logits[row, : width - shift] != first[0, shift:]).any(-1).nonzero()
            if len(wrong):
                slot = int(wrong[0])
                return f"row {row} slot {slot} gives other logits than row 0 slot {slot + shift}"
    return None
