"""`make test-versions`: each set of versions is found before the environment's; one failure does not hide others."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_versions.sh"


def test_each_set_of_versions_is_used_and_one_failure_fails_all(tmp_path: Path) -> None:
    for name, version in (("transformers", "5.22.2"), ("transformers", "5.21.1"), ("transformer-lens", "4.0.0")):
        folder = tmp_path / f"{name}-{version}" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    look = (
        "from importlib.metadata import version; import sys; found = version('transformers'), "
        "version('transformer-lens'); print(*found, file=open(sys.argv[1], 'a')); "
        "print('1 failed in 1s' if found[0] == '5.21.1' else '2 passed in 1s'); sys.exit(found[0] == '5.21.1')"
    )
    fake = tmp_path / "pytest.sh"
    fake.write_text(f'"{sys.executable}" -c "{look}" "$0.asked"\n')
    wanted = ["transformers==5.21.1", "transformers==5.22.2 transformer-lens==4.0.0"]
    command = ["bash", str(SCRIPT), f"bash {fake}", *wanted]
    done = subprocess.run(command, env={**os.environ, "VERSIONS_FOLDER": str(tmp_path)}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert [re.sub(r"; \d+ s", "", line) for line in lines] == [
        "transformers==5.21.1: FAILED (1 failed)",
        "transformers==5.22.2 transformer-lens==4.0.0: passed (2 passed)",
    ]
    assert done.returncode == 1
    asked = Path(f"{fake}.asked").read_text().splitlines()
    assert asked[0].split()[0] == "5.21.1" and asked[1] == "5.22.2 4.0.0"
