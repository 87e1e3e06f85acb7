"""Reports whether figures can be written to picture files."""

from importlib.util import find_spec

from cacheprobe.cli.doctor.findings import Finding
from cacheprobe.cli.doctor.software import INSTALL
from cacheprobe.views.images import browser_path

_HTML = "reports in HTML need neither"


def pictures() -> list[Finding]:
    """Returns findings on kaleido and Chromium, which `cacheprobe report --figures` needs to write pictures."""
    has_kaleido, browser = find_spec("kaleido") is not None, browser_path()
    return [
        Finding("kaleido", "installed" if has_kaleido else f"not installed; {_HTML}", has_kaleido,
                "" if has_kaleido else INSTALL.format("[dash]")),
        Finding("chromium", browser or f"none that kaleido would find; {_HTML}", browser is not None,
                "" if browser else "as root apt-get install chromium, or name one in BROWSER_PATH"),
    ]  # fmt: skip
