"""Keeps the counts and differences of a stress test, in a JSON file from which a later call continues."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from cacheprobe.core.files import write_json
from cacheprobe.stress.oracle import ReferenceResult
from cacheprobe.stress.subjects import REAL, Subject


@dataclass
class Tally:
    """Holds the counts, the differences and the expected outputs of a stress test. `save` writes the tally to a JSON
    file, and `load` reads that file."""

    episodes: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    """Number of tokens compared, by subject and shape."""
    distinct: Counter[str] = field(default_factory=Counter)
    """Number of tokens that the slow reference (`cp.reference`) computed for pool requests, by subject; each is
    compared at least once.
    """
    natural: Counter[str] = field(default_factory=Counter)
    """Number of natural rollbacks, by subject (see `kind_of_rollback`)."""
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    answers: dict[str, ReferenceResult] = field(default_factory=dict)
    """Expected output by subject and request, so that the slow reference computes each once."""
    pools: Counter[str] = field(default_factory=Counter)
    """Number of requests in each subject's pool, from which episodes draw."""
    episodes_of: Counter[str] = field(default_factory=Counter)
    """Number of episodes, by subject."""
    fingerprints: dict[str, dict] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Reason for each refused shape of passes, by subject and shape."""

    @property
    def num_compared(self) -> int:
        """Number of tokens compared, over all subjects; a token compared twice counts twice."""
        return sum(self.compared.values())

    @property
    def num_distinct(self) -> int:
        """Number of tokens that the slow reference (`cp.reference`) computed for pool requests, over all subjects; each
        counts once."""
        return sum(self.distinct.values())

    def compared_of(self, subject: Subject) -> int:
        """Returns the number of tokens compared for a subject, in its own shape and in shapes that replaced it."""
        in_other_shapes = f"{subject.key} as "
        return sum(n for key, n in self.compared.items() if key == subject.key or key.startswith(in_other_shapes))

    def save(self, path: Path) -> None:
        """Writes the tally to a JSON file, completely or not at all: after an error the earlier file is unchanged."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict() would spoil a Counter
        content["answers"] = {key: asdict(answer) for key, answer in self.answers.items()}
        write_json(path, content, indent=None)

    @classmethod
    def load(cls, path: Path) -> "Tally":
        """Returns the tally from a file that `save` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        content["answers"] = {
            key: ReferenceResult(**{**answer, "tokens": tuple(answer["tokens"])})
            for key, answer in content["answers"].items()
        }
        counters = ("compared", "distinct", "natural", "counts", "pools", "episodes_of")
        return cls(**{**content, **{name: Counter(content[name]) for name in counters}})

    def numbers(self) -> dict:
        """Returns the figures of the stress test as a dict: the amounts tested, refused shapes of passes, the number of
        differences, and seconds."""
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
        """Returns the figures as lines of text for a terminal, with the first ten differences."""
        numbers = self.numbers()
        del numbers["refused_shapes"]
        width = max(map(len, numbers))
        lines = [f"{name:<{width}}  {value}" for name, value in numbers.items()]
        lines.append(refused_line(self.refused))
        return "\n".join([*lines, *(f"DIFFERENCE {difference}" for difference in self.differences[:10])])


def refused_line(refused: dict[str, str]) -> str:
    """Returns text for a terminal: how many shapes of passes were refused because they are not batch-invariant, and a
    line with the reason for each."""
    named = "".join(f"\n  {key}: {reason}" for key, reason in sorted(refused.items()))
    return f"shapes refused by the trial: {len(refused)}{named}"


def _by_dtype(counted: Counter[str]) -> dict[str, int]:
    """Returns counts by subject as counts by dtype, in a dict."""
    sums: Counter[str] = Counter()
    for subject, count in counted.items():
        sums[subject.split()[1]] += count
    return dict(sorted(sums.items()))


def _of_real(counted: Counter[str]) -> int:
    return sum(count for subject, count in counted.items() if subject.startswith(REAL))
