"""The registry finds plug-ins by their files, and says so in one line when it cannot."""

import importlib
import sys
from pathlib import Path

import pytest

import cacheprobe
from cacheprobe.core import registry

GADGET = """
from cacheprobe.core.registry import register

@register("gadgets", {name!r})
class {cls}:
    pass
"""


@pytest.fixture
def gadgets(tmp_path, monkeypatch):
    """The folder of a kind of its own, beside those of the package; forgotten afterwards."""
    folder = tmp_path / "gadgets"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "zig.py").write_text(GADGET.format(name="zig", cls="Zig"))
    (folder / "add.py").write_text(GADGET.format(name="add", cls="Add"))
    monkeypatch.setattr(cacheprobe, "__path__", [*cacheprobe.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_plugins", {})
    monkeypatch.setattr(registry, "_scanned", set())
    importlib.invalidate_caches()
    yield folder
    for module in [name for name in sys.modules if name.startswith("cacheprobe.gadgets")]:
        del sys.modules[module]
    vars(cacheprobe).pop("gadgets", None)


def test_files_of_the_folder_are_found_and_sorted(gadgets):
    assert "cacheprobe.gadgets.add" not in sys.modules  # nothing is imported before the first question
    assert registry.names("gadgets") == ("add", "zig")
    assert registry.find("gadgets", "zig").__name__ == "Zig"
    assert dict(registry.available("gadgets")) == {name: registry.find("gadgets", name) for name in ("add", "zig")}


def test_unknown_name_says_what_there_is(gadgets):
    with pytest.raises(ValueError) as caught:
        registry.find("gadgets", "zag")
    message = str(caught.value)
    assert "'zag'" in message and "add, zig" in message and "choose" in message and "\n" not in message


def test_a_name_may_be_written_with_either_dash(gadgets):
    (gadgets / "both.py").write_text(GADGET.format(name="zig_zag", cls="ZigZag"))
    assert registry.find("gadgets", "zig-zag") is registry.find("gadgets", "zig_zag")
    assert registry.same_name("a-b", ["a_b", "a-b"]) == "a-b" and registry.same_name("a", ["b"]) is None


def test_unknown_kind_is_not_an_empty_kind():
    with pytest.raises(ValueError, match="unknown kind of plug-in 'gizmos'"):
        registry.names("gizmos")


def test_two_plugins_of_one_name_are_refused(gadgets):
    (gadgets / "other.py").write_text(GADGET.format(name="add", cls="Other"))
    with pytest.raises(ValueError, match=r"two gadgets are named 'add': .*rename one"):
        registry.names("gadgets")


def test_a_refused_folder_is_refused_again(gadgets):
    """A failed scan must not pass for a finished one, with some of its plug-ins missing."""
    (gadgets / "broken.py").write_text("import a_module_that_is_absent")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_absent"):
            registry.names("gadgets")


def test_reloading_a_file_replaces_its_plugin(gadgets):
    before = registry.find("gadgets", "add")
    importlib.reload(sys.modules["cacheprobe.gadgets.add"])
    assert registry.find("gadgets", "add") is not before


def test_plugins_cannot_be_slipped_in_through_the_answer(gadgets):
    with pytest.raises(TypeError):
        registry.available("gadgets")["extra"] = object


def test_installed_packages_add_plug_ins(gadgets, tmp_path, monkeypatch):
    """By entry points; one that cannot be loaded is left out with a warning. Dash imports importlib_metadata, whose
    entry points are of another class than Python's."""
    importlib.import_module("importlib_metadata")
    (tmp_path / "their_package.py").write_text("class Lever: ...\n")
    about = tmp_path / "their_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[cacheprobe.gadgets]\nlever = their_package:Lever\nbroken = their_package:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match="'broken' among gadgets, of the package their-package, is left out"):
        assert "lever" in registry.names("gadgets")
    assert registry.find("gadgets", "lever").__name__ == "Lever" and "broken" not in registry.names("gadgets")


def test_the_docs_name_the_group_of_entry_points_that_is_read(monkeypatch):
    groups = []
    monkeypatch.setattr(registry, "entry_points", lambda group: groups.append(group) or ())
    monkeypatch.setattr(registry, "_scanned", set())
    registry.names("drafters")
    page = (Path(__file__).parents[2] / "docs/plugins.md").read_text()
    assert [f"group `{group}`" in page and f'"{group}"' in registry.__doc__ for group in groups] == [True]
