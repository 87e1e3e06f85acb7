"""Compares what a comment behind a line of an example says of its value with the value: shapes and columns."""

import ast
import io
import re
import tokenize
from typing import Any

SHAPE = re.compile(r"(?:\w+ -> )?\[([\w+, ]+)\]")
"""Such as "[h, p + 1] for each", or "site -> [layer, position]" of a dict's values."""
COLUMNS = re.compile(r"(?:\w+: )?((?:[a-z_]+, ){2,}[a-z_]+)(?: \.\.\.)?")
"""Such as "tidy: layer, head, position", or "row, token, layer ..."."""


def comments_of(code: str) -> dict[int, str]:
    """The comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def complaint(comment: str, value: Any) -> str:
    """What is wrong with a comment about a value; nothing if it is right, or says neither shapes nor columns."""
    if shape := SHAPE.match(comment):
        names, sizes = [name.strip() for name in shape[1].split(",")], {}
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if len(one.shape) != len(names):
                return f"{comment}: has the shape {list(one.shape)}"
            for name, size in zip(names, one.shape, strict=True):
                is_of_each = isinstance(value, list) and not name.isalpha()  # p + 1 differs between the tensors
                if sizes.setdefault(name, size) != size and not is_of_each:
                    return f"{comment}: {name} is {sizes[name]} and {size}"
    if listed := COLUMNS.fullmatch(comment):
        lacking = [name for name in listed[1].split(", ") if name not in value]
        return f"{comment}: there is no {', '.join(lacking)}" if lacking else ""
    return ""


def run_and_compare(code: str, name: str, scope: dict[str, Any]) -> list[str]:
    """Runs a program statement by statement, and returns what is wrong with its comments."""
    comments, wrong = comments_of(code), []
    for node in ast.parse(code).body:
        comment = comments.get(node.end_lineno or 0, "")
        if isinstance(node, ast.Expr):
            value = eval(compile(ast.Expression(node.value), name, "eval"), scope)
        else:
            exec(compile(ast.Module([node], []), name, "exec"), scope)
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if not isinstance(target, ast.Name):
                continue
            value = scope[target.id]
        if said := complaint(comment, value):
            wrong.append(said)
    return wrong
