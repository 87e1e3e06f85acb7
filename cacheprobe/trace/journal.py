"""Reads and writes the journal of a run that is recorded to disk: a list of its whole files. Does not import torch.

The first line describes the run. Each later line describes a part: its files with their checksums, and what the run had
done at its end. A line begins with a checksum of itself, and is on the disk before the next part is written. So after a
kill all lines but perhaps the last are whole, and so is every file that a whole line names.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cacheprobe import __version__
from cacheprobe.core.files import fsync
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import FORMAT_VERSION, JOURNAL, CheckedFiles, TraceError, of_head, require_format

_FORMAT = "cacheprobe journal"


@dataclass(frozen=True)
class Journal:
    """Holds the whole lines of a run's journal."""

    directory: Path
    header: JsonDict
    """run_id, requests, meta, the lists sites, heads and layers, and "head": the last four of the drafter's head."""
    parts: tuple[JsonDict, ...]
    num_bytes: int
    """Bytes of the whole lines; later ones are of a line that was not written to its end."""

    @property
    def run_id(self) -> str:
        """Id of the run, which its file names hold."""
        return self.header["run_id"]

    @property
    def files(self) -> CheckedFiles:
        """The files of all parts."""
        named: JsonDict = {"files": {}, "blocks": {}}
        for part in self.parts:
            for name, of_files in named.items():
                of_files |= part[name]
        return CheckedFiles(self.directory, {**self.header, **named})

    @property
    def head(self) -> "Journal | None":
        """What the journal says of the drafter's head, in the same form; None if the run has none."""
        header, parts = of_head(self.header), (of_head(part) for part in self.parts)
        if header is None:
            return None
        return Journal(self.directory, header, tuple(part for part in parts if part is not None), self.num_bytes)

    @property
    def last_step(self) -> int:
        """Number of the last step that the journal has; -1 without one."""
        return self.parts[-1]["step"] if self.parts else -1

    @property
    def next_number(self) -> int:
        """Number, in file names, of the part that follows."""
        return self.parts[-1]["next_number"] if self.parts else 0

    @property
    def waiting(self) -> JsonDict | None:
        """Name, size and checksum of the file with the rows that wait for their next token; None if no row waits."""
        return self.parts[-1]["waiting"] if self.parts else None

    def gathered(self, key: str) -> JsonDict:
        """Returns a dict of an entry of the parts that has new values by request id; a later part replaces the value
        of an earlier one."""
        return {request_id: value for part in self.parts for request_id, value in part[key].items()}

    @property
    def texts(self) -> dict[int, str]:
        """Text of each request's committed tokens so far."""
        texts = dict.fromkeys((request["request_id"] for request in self.header["requests"]), "")
        for part in self.parts:
            for request_id, (num_kept, added) in part["texts"].items():
                texts[int(request_id)] = texts[int(request_id)][:num_kept] + added
        return texts

    @property
    def token_texts(self) -> dict[int, str]:
        """Text of each token so far, by token id."""
        return {token_id: text for part in self.parts for token_id, text in part["token_texts"]}

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Committed token ids by request id."""
        tokens: dict[int, list[int]] = {request["request_id"]: [] for request in self.header["requests"]}
        for part in self.parts:
            for request_id, token_ids in part["committed"].items():
                tokens[int(request_id)] += token_ids
        return tokens


def begin_journal(directory: Path, header: JsonDict) -> None:
    """Writes a new journal with its first line. header: see `Journal.header`."""
    temporary = directory / f"{JOURNAL}.tmp"
    about = {"format": _FORMAT, "format_version": FORMAT_VERSION, "cacheprobe": __version__}
    temporary.write_bytes(_line({**about, **header}))
    fsync(temporary)
    os.replace(temporary, directory / JOURNAL)
    fsync(directory)


def append_part(directory: Path, part: JsonDict) -> None:
    """Appends one line to the journal, and waits until it is on the disk."""
    with (directory / JOURNAL).open("ab") as file:
        file.write(_line(part))
        file.flush()
        os.fsync(file.fileno())


def read_journal(directory: Path) -> Journal | None:
    """Returns the journal of the run in a directory; None if there is none. Raises: TraceError if it is damaged, or of
    another program or version."""
    path = directory / JOURNAL
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    contents, num_bytes = _whole_lines(path, data)
    if not contents:
        raise TraceError(f"{path}: line 1 was changed after it was written; restore the file")
    header = contents[0]
    if header.get("format") != _FORMAT:
        raise TraceError(f"{path} is of another program")
    require_format(directory, header)
    return Journal(directory, header, tuple(contents[1:]), num_bytes)


def _whole_lines(path: Path, data: bytes) -> tuple[list[JsonDict], int]:
    """Returns (the objects of the whole lines in `data`, the bytes of these lines). Raises: TraceError if a whole line
    follows one that is not."""
    lines = data.splitlines(keepends=True)
    contents = [_content(line) for line in lines]
    whole = next((i for i, content in enumerate(contents) if content is None), len(lines))
    if any(content is not None for content in contents[whole:]):
        raise TraceError(f"{path}: line {whole + 1} was changed after it was written; restore the file")
    return [content for content in contents[:whole] if content is not None], sum(map(len, lines[:whole]))


def cut_journal(journal: Journal) -> None:
    """Removes from the file what follows the whole lines."""
    with (journal.directory / JOURNAL).open("r+b") as file:
        file.truncate(journal.num_bytes)
        os.fsync(file.fileno())


def _line(content: JsonDict) -> bytes:
    text = json.dumps(content, ensure_ascii=False).encode()
    return f"{xxhash.xxh3_128_hexdigest(text)} ".encode() + text + b"\n"


def _content(line: bytes) -> JsonDict | None:
    """Returns the object of a line; None if the line is not whole or was changed."""
    sums, _, text = line.removesuffix(b"\n").partition(b" ")
    is_whole = line.endswith(b"\n") and xxhash.xxh3_128_hexdigest(text).encode() == sums
    return json.loads(text) if is_whole else None
