"""Cases of verdicts: drafts that agree for a while, requests that end, rows that are refused."""

import torch

from cacheprobe_kernels.base import Arguments, Case, Draws

BY_ROW = (
    "drafts",
    "draft_lengths",
    "targets",
    "target_lengths",
    "num_left",
    "stop_token_ids",
    "last_positions",
    "rows",
)
WRITTEN = ("token_ids", "codes", "hidden", "lengths")


def verdict_inputs(case: Case, draws: Draws) -> Arguments:
    """Three targets of four are the candidates; some last candidates have no target beyond them.

    Of ten and more rows the first leaves a hole, the second is no row and the third has more candidates than targets.
    """
    b, k, s, stops = (case.sizes[name] for name in ("b", "k", "s", "stops"))
    drafts, targets = draws.integers(0, 9, b, k), draws.integers(0, 9, b, k + 1)
    draft_lengths, last_positions = draws.integers(0, k + 1, b), draws.integers(0, s - k - 1, b)
    rows, lengths, target_lengths = draws.order(b + 2)[:b], draws.integers(0, s, b + 2), draft_lengths + 1
    if draws.device.type != "meta":
        targets[:, :k] = torch.where(draws.integers(0, 4, b, k) > 0, drafts, targets[:, :k])
        target_lengths[draft_lengths > 0] -= draws.integers(0, 2, int((draft_lengths > 0).sum()))
        lengths[rows] = last_positions + draws.integers(0, k + 2, b)
        if b >= 10:
            last_positions[0], rows[1], target_lengths[2] = lengths[rows[0]] + 1, b + 2, 0
            draft_lengths[2] = 1
    return {
        "drafts": drafts,
        "draft_lengths": draft_lengths,
        "targets": targets,
        "target_lengths": target_lengths,
        "num_left": draws.integers(1, k + 3, b),
        "stop_token_ids": draws.integers(-1, 9, b, stops),
        "last_positions": last_positions,
        "rows": rows,
        "token_ids": draws.integers(0, 4, b + 2, s + 1),
        "codes": draws.integers(0, 5, b + 2, s, dtype=torch.uint8),
        "hidden": draws.integers(0, 2, b + 2, s, dtype=torch.bool),
        "lengths": lengths,
    }
