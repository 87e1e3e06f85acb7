"""Keeps the counts and differences of a stress test, in a file from which it can continue."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from cacheprobe.core.files import write_json
from cacheprobe.stress.oracle import Answer
from cacheprobe.stress.subjects import REAL, Subject


@dataclass
class Tally:
    """Everything that a stress test reports. The file is replaced as a whole."""

    episodes: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    """Number of tokens compared, by subject."""
    distinct: Counter[str] = field(default_factory=Counter)
    """Number of tokens that the oracle computed, by subject; each is compared at least once."""
    natural: Counter[str] = field(default_factory=Counter)
    """Number of natural rollbacks, by subject."""
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    answers: dict[str, Answer] = field(default_factory=dict)
    """Oracle's answer by subject and request, so that the oracle computes each once."""
    pools: Counter[str] = field(default_factory=Counter)
    """Number of requests in each subject's pool."""
    episodes_of: Counter[str] = field(default_factory=Counter)
    """Number of episodes, by subject."""
    fingerprints: dict[str, dict] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Reason for each shape that the trial refused, by subject and shape."""

    @property
    def num_compared(self) -> int:
        """Number of tokens compared, over all subjects."""
        return sum(self.compared.values())

    @property
    def num_distinct(self) -> int:
        """Number of distinct tokens compared, over all subjects."""
        return sum(self.distinct.values())

    def compared_of(self, subject: Subject) -> int:
        """Returns the tokens compared for a subject, in its own shape and in those that replaced it."""
        in_other_shapes = f"{subject.key} as "
        return sum(n for key, n in self.compared.items() if key == subject.key or key.startswith(in_other_shapes))

    def save(self, path: Path) -> None:
        """Writes the tally to a JSON file; after an error the earlier file is unchanged."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict() would spoil a Counter
        held["answers"] = {key: asdict(answer) for key, answer in self.answers.items()}
        write_json(path, held, indent=None)

    @classmethod
    def load(cls, path: Path) -> "Tally":
        """Returns the tally of a file that `save` wrote."""
        held = json.loads(path.read_text(encoding="utf-8"))
        held["answers"] = {
            key: Answer(**{**answer, "tokens": tuple(answer["tokens"])}) for key, answer in held["answers"].items()
        }
        counters = ("compared", "distinct", "natural", "counts", "pools", "episodes_of")
        return cls(**{**held, **{name: Counter(held[name]) for name in counters}})

    def numbers(self) -> dict:
        """Returns the figures for a file: the amounts tested, and the number of differences."""
        return {
            "episodes": self.episodes,
            "compared_tokens": self.num_compared,
            "distinct_tokens": self.num_distinct,
            "real_model_distinct_tokens": _of_real(self.distinct),
            "real_model_compared_tokens": _of_real(self.compared),
            "subjects": len(self.compared),
            "models": len({subject.split()[0] for subject in self.compared}),
            "compared_by_dtype": _by_dtype(self.compared),
            "rollbacks_natural_by_dtype": _by_dtype(self.natural),
            "rollbacks_natural_real_model": _of_real(self.natural),
            **dict(sorted(self.counts.items())),
            "shapes_refused_by_trial": len(self.refused),
            "refused_shapes": dict(sorted(self.refused.items())),
            "differences": len(self.differences),
            "seconds": round(self.seconds),
        }

    def text(self) -> str:
        """Returns the figures as lines for a terminal."""
        numbers = self.numbers()
        del numbers["refused_shapes"]
        width = max(map(len, numbers))
        lines = [f"{name:<{width}}  {value}" for name, value in numbers.items()]
        lines.append(refused_line(self.refused))
        return "\n".join([*lines, *(f"DIFFERENCE {difference}" for difference in self.differences[:10])])


def refused_line(refused: dict[str, str]) -> str:
    """Returns how many shapes the trial refused, and which, for a terminal."""
    named = "".join(f"\n  {key}: {reason}" for key, reason in sorted(refused.items()))
    return f"shapes refused by the trial: {len(refused)}{named}"


def _by_dtype(counted: Counter[str]) -> dict[str, int]:
    """Returns the counts summed by dtype."""
    sums: Counter[str] = Counter()
    for subject, count in counted.items():
        sums[subject.split()[1]] += count
    return dict(sorted(sums.items()))


def _of_real(counted: Counter[str]) -> int:
    return sum(count for subject, count in counted.items() if subject.startswith(REAL))
