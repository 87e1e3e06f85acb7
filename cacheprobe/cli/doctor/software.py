"""Reports which required and optional packages are installed."""

from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement

from cacheprobe.cli.doctor.findings import Finding

INSTALL = "pip install 'cacheprobe{0}', or in a checkout pip install -e '.{0}'"


def software(project: str = "cacheprobe") -> list[Finding]:
    """Returns a list of findings on the packages that `project` declares: one on all required packages, and one on each
    extra; if `project` is not installed, one that says so."""
    try:
        required = [Requirement(text) for text in metadata.requires(project) or ()]
    except metadata.PackageNotFoundError:
        return [
            Finding(project, "not installed, used as source: what it needs cannot be looked up", True),
        ]
    base = [need for need in required if need.marker is None or need.marker.evaluate({"extra": ""})]
    findings = [_finding("base", base, INSTALL.format(""), True)]
    for extra in metadata.metadata(project).get_all("Provides-Extra") or ():
        own = [need for need in required if need not in base and need.marker and need.marker.evaluate({"extra": extra})]
        findings.append(_finding(f"extra {extra}", own, INSTALL.format(f"[{extra}]"), False))
    return findings


def versions(names: Iterable[str]) -> list[Finding]:
    """Returns a list of findings, one for each package name, with the installed version or "not installed"."""
    return [Finding(name, _version(name) or "not installed", _version(name) is not None) for name in names]


def _finding(name: str, required: list[Requirement], remedy: str, demo_needs_it: bool) -> Finding:
    wrong = []
    for need in required:
        version = _version(need.name)
        if version is None:
            wrong.append(f"{need.name} is missing")
        elif not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need.name} is {version} instead of {need.specifier}")
    names = ", ".join(sorted(need.name for need in required)) or "nothing is asked for"
    result = "; ".join(wrong) or f"installed: {names}"
    return Finding(name, result, not wrong, remedy if wrong else "", demo_needs_it)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
