"""What the README shows is run, and what it lists is there."""

import re
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_tree_is_true() -> None:
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", README, re.DOTALL).group(1)
    folder = ""
    names = 0
    for line in tree.splitlines():
        path = re.match(r" *(\S+)", line).group(1)
        base = ROOT / "cacheprobe" if line.startswith("  ") else ROOT
        folder = base / path if path.endswith("/") else base
        assert folder.exists(), line
        for name in re.findall(r"\b\w+\.py\b", line):
            assert (folder / name).exists() or (base / name).exists(), f"{line}: no {name}"
            names += 1
    assert names >= 10
    packages = {p.name for p in (ROOT / "cacheprobe").iterdir() if (p / "__init__.py").exists()}
    assert all(f"  {name}/ " in tree for name in packages)


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < 500_000


def test_the_commands_exist() -> None:
    from cacheprobe.cli.app import app

    shown = set(re.findall(r"^    cacheprobe (\w+)", README, re.MULTILINE))
    assert shown == {name for name in app if not name.startswith("-")} and "doctor" in shown


def test_numbers_are_those_of_a_stored_measurement() -> None:
    """Every ratio in the table stands in the JSON that the command printed on that processor."""
    import json

    section = README.split("## Numbers")[1].split("##")[0]
    shown = re.findall(r"`(\w+)_ratio`" + r" \| ([\d.]+) \| ([\d.]+|) ?" * 2 + r"\|", section)
    assert len(shown) == section.count("_ratio`") == 4
    for place, file in enumerate(("main-job", "main-job-amx")):
        stored = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())
        for name, *numbers in shown:
            ratio, over_roofline = numbers[2 * place : 2 * place + 2]
            assert float(ratio) == stored[f"{name}_ratio"]
            assert over_roofline == str(stored.get(f"{name}_over_roofline", ""))
        assert stored["cpu"] in section and stored["torch"] in section and f"--rounds {stored['rounds']} " in section


def test_every_extra_is_documented() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(extras)


def test_the_tables_of_the_pages_are_what_was_measured() -> None:
    """And every table is included in one page."""
    tables = runpy.run_path(str(ROOT / "scripts/write_tables.py"))["tables"]()
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert {path.stem for path in (ROOT / "docs/tables").iterdir()} == set(tables)
    for name, text in tables.items():
        assert (ROOT / f"docs/tables/{name}.txt").read_text() == text, "run python scripts/write_tables.py"
        assert pages.count(f"{{include}} tables/{name}.txt") == 1, name
