"""Reports which required and optional packages are installed."""

from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement

from cacheprobe.doctor.findings import Finding

INSTALL = "pip install 'cacheprobe{0}', or in a checkout pip install -e '.{0}'"


def software(project: str = "cacheprobe") -> list[Finding]:
    """Returns a finding on the required packages with their versions, and one on each extra."""
    try:
        asked = [Requirement(text) for text in metadata.requires(project) or ()]
    except metadata.PackageNotFoundError:
        return [
            Finding(project, "not installed, used as source: what it needs cannot be looked up", True),
        ]
    base = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    found = [_finding("base", base, INSTALL.format(""), True)]
    for extra in metadata.metadata(project).get_all("Provides-Extra") or ():
        own = [one for one in asked if one not in base and one.marker and one.marker.evaluate({"extra": extra})]
        found.append(_finding(f"extra {extra}", own, INSTALL.format(f"[{extra}]"), False))
    return found


def versions(names: Iterable[str]) -> list[Finding]:
    """Returns the installed versions of packages by name."""
    return [Finding(name, _version(name) or "not installed", _version(name) is not None) for name in names]


def _finding(name: str, asked: list[Requirement], remedy: str, demo_needs_it: bool) -> Finding:
    wrong = []
    for one in asked:
        version = _version(one.name)
        if version is None:
            wrong.append(f"{one.name} is missing")
        elif not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} is {version} instead of {one.specifier}")
    said = "; ".join(wrong) or f"installed: {', '.join(sorted(one.name for one in asked)) or 'nothing is asked for'}"
    return Finding(name, said, not wrong, remedy if wrong else "", demo_needs_it)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
