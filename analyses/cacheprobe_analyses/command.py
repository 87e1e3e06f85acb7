"""Gives analyses their commands: arguments named after fields of a Config, the table printed, --json FILE."""

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cacheprobe.core.files import write_json


def table_of(result: Any) -> str:
    """Returns the table of a result."""
    return result.table()


def command(doc: str, of: type, run: Callable[..., Any], shown: Callable[[Any], str] = table_of, **fields: str) -> None:
    """Runs an analysis with the arguments of the command line, prints what it found, and stores it for --json FILE.

    doc: of the analysis; its first part describes the command.  of: the Config.  run: called with it and progress=True.
    shown: the text to print.  fields: those that have an argument, each with its help.
    """
    parser = _parser(doc)
    for name, said in fields.items():
        default = getattr(of, name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=said or None)
    given = vars(parser.parse_args())
    path = given.pop("json")
    result = run(of(**given), progress=True)
    print(shown(result))
    if path:
        write_json(path, asdict(result))


def command_of_subjects(doc: str, subjects: Mapping[str, Any], run: Callable[..., Any]) -> None:
    """Runs an analysis for each subject, a name with its Config, or for --only one; prints and stores as `command`."""
    parser = _parser(doc)
    parser.add_argument("--only", choices=subjects, help="one of the models")
    given = parser.parse_args()
    results = {}
    for name in [given.only] if given.only else subjects:
        results[name] = run(subjects[name], progress=True)
        print(f"## {name}\n\n{results[name].table()}\n", flush=True)
    if given.json:
        write_json(given.json, {name: asdict(result) for name, result in results.items()})


def _parser(doc: str) -> ArgumentParser:
    parser = ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser
