"""Docstrings are written as plain text; here they become what Sphinx reads.

A line such as "window, group: rows of a pass" says what something is, and what stands deeper belongs to it. Two spaces
end one such piece and begin the next. Nothing else in a docstring is markup, apart from `names` and lists.
"""

import inspect
import re
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from typing import Any

from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_NAMES = r"\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_][\w.]*)*"
_PIECE = re.compile(rf"({_NAMES}): (?=\S)")
_LIST = re.compile(r"\s*[-*] ")
_LONG = re.compile(r"\((?:'[^']*', ){8,}[^()]*\)")
_WORDS = ("Raises", "Source", "Twin", "Returns", "Columns")


def converted(lines: list[str]) -> list[str]:
    """reStructuredText for the plain lines of a docstring."""
    blocks: list[str] = []
    for line in _joined(lines):
        if not line.strip():
            blocks.append("")
        elif _LIST.match(line):
            blocks += ["", f"* {_escaped(line.strip()[2:])}", ""]
        else:
            blocks += _pieces(line)
    return blocks


def _joined(lines: list[str]) -> Iterator[str]:
    """One line for every piece or paragraph: continuations are put behind what they continue."""
    held: list[str] = []
    for line in lines:
        begins = not line.strip() or _LIST.match(line) or (_PIECE.match(line) and not line.startswith(" "))
        if begins and held:
            yield " ".join(held)
            held = []
        if not line.strip():
            yield ""
        else:
            held.append(line.rstrip() if begins else line.strip())
    if held:
        yield " ".join(held)


def _pieces(line: str) -> Iterator[str]:
    """A paragraph, or a bullet for each thing that is said of a name."""
    for part in re.split(rf"(?<=\S)  (?={_NAMES}: )", line):
        named = _PIECE.match(part)
        if named is None or (len(named[1].split()) == 1 and named[1][0].isupper() and named[1] not in _WORDS):
            yield from (_escaped(part.strip()), "")
        elif named[1] in _WORDS:
            yield from ("", f"**{named[1]}:** {_escaped(part[named.end() :])}", "")
        else:
            given = ", ".join(f"``{name}``" for name in named[1].split(", "))
            yield from ("", f"* {given}: {_escaped(part[named.end() :])}", "")


def _escaped(text: str) -> str:
    """Text that means itself, with `names` as code."""
    parts = re.split(r"`+([^`]+)`+", text)
    plain = [re.sub(r"([\\*_|])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return _glued(plain, code)


def _glued(plain: list[str], code: list[str]) -> str:
    text = plain[0]
    for literal, after in zip(code, plain[1:], strict=True):
        before = "" if not text or text[-1].isspace() else r"\ "
        behind = "" if not after or after[0].isspace() else r"\ "
        text += before + literal + behind + after
    return text


def _on_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = converted(lines)


def _on_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Long defaults, such as a hundred names, are left out."""
    return _LONG.sub("(...)", signature) if signature else signature, returns


class PublicNames(SphinxDirective):
    """Documents the functions and classes of the `__all__` of a module, each under the name that users write."""

    required_arguments = 1

    def run(self) -> list[Node]:
        """Called by Sphinx."""
        path = self.arguments[0]
        module = reduce(getattr, path.split(".")[1:], import_module(path.split(".")[0]))
        lines = []
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                lines.append(f".. auto{'class' if inspect.isclass(value) else 'function'}:: {path}.{name}")
        return self.parse_text_to_nodes("\n\n".join(lines))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("autodoc-process-signature", _on_signature)
    return {"version": "1", "parallel_read_safe": True}
