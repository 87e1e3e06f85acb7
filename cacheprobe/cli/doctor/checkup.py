"""Runs the whole check-up of `cacheprobe doctor`: what is installed, what is missing, and whether `cacheprobe demo` can
run."""

from dataclasses import dataclass

from cacheprobe.cli.doctor.findings import Finding
from cacheprobe.cli.doctor.kernels import kernels
from cacheprobe.cli.doctor.machine import dtypes, machine, operations
from cacheprobe.cli.doctor.models import model_findings
from cacheprobe.cli.doctor.pictures import pictures
from cacheprobe.cli.doctor.software import software, versions
from cacheprobe.core.terminal import Listing
from cacheprobe.models.settings import numeric_settings

_NAMED = ("cacheprobe", "torch", "transformers", "transformer-lens", "plotly", "pandas")


@dataclass(frozen=True)
class Checkup:
    """Holds the findings of a check-up: a dict from the name of a section to its list of findings."""

    sections: dict[str, list[Finding]]

    @property
    def missing(self) -> list[Finding]:
        """Findings of items that are missing, from all sections, as a list."""
        return [finding for findings in self.sections.values() for finding in findings if not finding.is_there]

    @property
    def can_demo(self) -> bool:
        """Whether `cacheprobe demo` can run."""
        return not any(finding.demo_needs_it for finding in self.missing)

    @property
    def listings(self) -> list[Listing]:
        """Tables to print, as a list: one for each section, and one of the missing items and how to get each."""
        sections = [
            Listing(name, (), [(f.name, f.result) for f in findings]) for name, findings in self.sections.items()
        ]
        rows = [(f.name, f.remedy, "yes" if f.demo_needs_it else "no") for f in self.missing]
        return [
            *sections,
            Listing("missing", ("what", "how to get it", "the demo needs it"), rows, "" if rows else "nothing"),
        ]

    @property
    def demo_sentence(self) -> str:
        """Sentence that says whether `cacheprobe demo` can run, and if not, what it lacks."""
        if self.can_demo:
            return "cacheprobe demo can run"
        lacking = ", ".join(finding.name for finding in self.missing if finding.demo_needs_it)
        return f'cacheprobe demo cannot run: {lacking}; see under "missing"'


def checkup() -> Checkup:
    """Runs the checks and returns the Checkup. On a GPU, this compiles kernels."""
    fingerprint = [Finding(name, str(value) or "not set") for name, value in numeric_settings().items()]
    return Checkup(
        {
            "machine": machine(),
            "dtypes": dtypes(),
            "products and readings of a run": operations(),
            "versions": versions(_NAMED),
            "fingerprint fields of this machine": fingerprint,
            "packages": software(),
            "kernels": kernels(),
            "models": model_findings(),
            "pictures": pictures(),
        }
    )
