"""Runs `cacheprobe ...` in this process: a process of its own would import torch again for every command."""

import contextlib
import io
from typing import NamedTuple
from unittest import mock

from cacheprobe.cli.app import main


class Done(NamedTuple):
    """What a command ended with, under the names of subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


def cacheprobe(*args: str, **env: str) -> Done:
    """Runs the command line with these words and environment variables."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", ["cacheprobe", *args]),
        mock.patch.dict("os.environ", env),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Done(code, out.getvalue(), err.getvalue())
