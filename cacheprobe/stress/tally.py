"""What a proof has tried so far: counts, differences, and the file that lets it go on after a break."""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from cacheprobe.stress.oracle import Answer
from cacheprobe.stress.subjects import REAL, Subject


@dataclass
class Tally:
    """Everything that a proof prints. Written whole after every episode."""

    episodes: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    """Tokens compared, by subject."""
    distinct: Counter[str] = field(default_factory=Counter)
    """Tokens that the oracle gave, by subject: each compared at least once."""
    natural: Counter[str] = field(default_factory=Counter)
    """Natural rollbacks, by subject."""
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    answers: dict[str, Answer] = field(default_factory=dict)
    """By subject and request: the oracle is asked once."""
    pools: Counter[str] = field(default_factory=Counter)
    """Requests in each subject's pool."""
    episodes_of: Counter[str] = field(default_factory=Counter)
    """Episodes, by subject."""
    fingerprints: dict[str, dict] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Shapes that the trial refused: by subject and shape, the reason."""

    @property
    def num_compared(self) -> int:
        return sum(self.compared.values())

    @property
    def num_distinct(self) -> int:
        return sum(self.distinct.values())

    def compared_of(self, subject: Subject) -> int:
        """Returns the tokens compared for a subject, in its own shape and in those that replaced it."""
        in_other_shapes = f"{subject.key} as "
        return sum(n for key, n in self.compared.items() if key == subject.key or key.startswith(in_other_shapes))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            held = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict() would spoil a Counter
            held["answers"] = {key: asdict(answer) for key, answer in self.answers.items()}
            json.dump(held, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> "Tally":
        held = json.loads(path.read_text(encoding="utf-8"))
        held["answers"] = {
            key: Answer(**{**answer, "tokens": tuple(answer["tokens"])}) for key, answer in held["answers"].items()
        }
        counters = ("compared", "distinct", "natural", "counts", "pools", "episodes_of")
        return cls(**{**held, **{name: Counter(held[name]) for name in counters}})

    def numbers(self) -> dict:
        """The figures, for a file: what was tried, and what differed."""
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
        """The figures as lines for a terminal."""
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
    """Sums over the subjects of each dtype."""
    sums: Counter[str] = Counter()
    for subject, count in counted.items():
        sums[subject.split()[1]] += count
    return dict(sorted(sums.items()))


def _of_real(counted: Counter[str]) -> int:
    return sum(count for subject, count in counted.items() if subject.startswith(REAL))
