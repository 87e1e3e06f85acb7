"""The slow twins: each written to be read, sharing no code with what it checks."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheprobe.core.records import SamplingParams
from cacheprobe.ops.acceptance import StopRule


def num_accepted_slowly(draft: list[int], targets: list[int]) -> int:
    """Every prefix tried, the longest equal one kept."""
    return max(n for n in range(len(draft) + 1) if list(draft[:n]) == list(targets[:n]))


def ends_slowly(generated: Sequence[int], rule: StopRule) -> bool:
    """The whole text is decoded for every token."""
    return generated[-1] in rule.token_ids or any(text in rule.decode(list(generated)) for text in rule.texts)


def sample_token_slowly(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """Plain Python over a list, the first largest wins."""
    values = [float(x) for x in logits.double()]
    if temperature > 0:
        words = np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw(len(values))
        uniform = [((int(word) >> 12) + 0.5) / 2**52 for word in words]
        values = [v / temperature - math.log(-math.log(u)) for v, u in zip(values, uniform, strict=True)]
    best = 0
    for token_id, value in enumerate(values):
        if value > values[best]:
            best = token_id
    return best


def lowest_topk_slowly(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A stable sort: of equals the lowest id first."""
    picked = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return values.gather(1, picked), picked


def read_logits_slowly(logits: Tensor, targets: Tensor, top_k: int) -> dict[str, Tensor]:
    """One row at a time, in float64, by the definitions."""
    out: dict[str, list] = {name: [] for name in ("ids", "logprobs", "entropy", "rank", "target_logprob")}
    for row, target in zip(logits.double(), targets.tolist(), strict=True):
        logprobs = row - torch.logsumexp(row, 0)
        order = sorted(range(len(row)), key=lambda i, row=row: (-float(row[i]), i))
        out["ids"].append(order[:top_k])
        out["logprobs"].append([float(logprobs[i]) for i in order[:top_k]])
        out["entropy"].append(-sum(math.exp(p) * p for p in logprobs.tolist() if p > -math.inf))
        out["rank"].append(order.index(target) if target >= 0 else -1)
        out["target_logprob"].append(float(logprobs[target]) if target >= 0 else math.nan)
    return {name: torch.tensor(values) for name, values in out.items()}


def hf_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Hugging Face's own greedy decoding, one sequence alone."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids)
    )
    return out[0, len(prompt) :].tolist()


def target_scores_slowly(logits: Tensor, sampling: SamplingParams, prefix: list[int]) -> list[float]:
    """One token at a time over Python lists; every filter ranks all tokens by score, then by id."""
    scores = [float(x) for x in logits.double()]
    penalty, removed = sampling.repetition_penalty, -math.inf
    if penalty is not None:
        scores = [(s * penalty if s < 0 else s / penalty) if i in set(prefix) else s for i, s in enumerate(scores)]
    if not sampling.temperature:
        return scores
    scores = [s / sampling.temperature for s in scores]
    ranking = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = ranking[: sampling.top_k] if sampling.top_k else ranking
    weights = {i: math.exp(scores[i] - scores[ranking[0]]) for i in kept}
    if sampling.top_p is not None and sampling.top_p < 1:
        limit = sampling.top_p * math.fsum(weights.values())
        kept = [i for rank, i in enumerate(kept) if rank == 0 or math.fsum(weights[j] for j in kept[:rank]) < limit]
    if sampling.min_p:
        kept = [i for i in kept if weights[i] >= sampling.min_p]
    return [s if i in kept else removed for i, s in enumerate(scores)]


def choose_token_slowly(logits: Tensor, sampling: SamplingParams, prefix: list[int], position: int) -> int:
    """The slow sampler over the slow scores."""
    scores = torch.tensor(target_scores_slowly(logits, sampling, prefix), dtype=torch.float64)
    temperature = 1.0 if sampling.temperature else 0.0  # they are divided by it already
    return sample_token_slowly(scores, temperature, sampling.seed or 0, position)


def accept_or_recover_slowly(
    target: list[float], draft: list[float] | None, token_id: int, seed: int, position: int
) -> tuple[bool, int]:
    """Algorithm 1 of Leviathan et al. 2023 for one token, term by term; its two chances from words 2 and 3."""
    q = [float(i == token_id) for i in range(len(target))] if draft is None else draft
    words = [int(np.random.Philox(key=seed, counter=[0, position, stream, 0]).random_raw(1)[0]) for stream in (2, 3)]
    to_accept, to_recover = [((word >> 12) + 0.5) / 2**52 for word in words]
    excess = [max(0.0, p - q) for p, q in zip(target, q, strict=True)]
    if to_accept < target[token_id] / q[token_id] or sum(excess) == 0:
        return True, token_id
    passed = 0.0
    for i, weight in enumerate(excess):
        passed += weight / sum(excess)
        if to_recover < passed:
            return False, i
    raise AssertionError("probabilities that sum to less than a number below 1")


def ngram_draft_slowly(text: list[int], max_ngram: int, min_ngram: int, length: int) -> list[int]:
    """Every size from the longest down, every place from the left; each drafted token is text for the next."""
    grown = list(text)
    while len(grown) < len(text) + length:
        for size in range(min(max_ngram, len(grown) - 1), min_ngram - 1, -1):
            newest = grown[len(grown) - size :]
            next_ones = [grown[i + size] for i in range(len(grown) - size) if grown[i : i + size] == newest]
            if next_ones:
                latest_first = next_ones[::-1]
                grown.append(max(latest_first, key=next_ones.count))  # of equals the first, which is the latest
                break
        else:
            break
    return grown[len(text) :]


def replayed_slowly(live: PreTrainedModel, token_ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """One forward over a whole text, without cache and drafts. Returns (S of every block but the last, each [t, m];
    log-probabilities [t, v] of the next token)."""
    with torch.no_grad():
        out = live(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    return [state[0] for state in out.hidden_states[1:-1]], out.logits[0].float().log_softmax(-1)
