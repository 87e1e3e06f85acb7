"""Compiles a C++ file of this folder for this machine's processor, once; the library is kept in a cache folder."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.resources import files
from pathlib import Path

from cacheprobe.core.files import write_whole

COMPILERS = ("g++", "clang++", "c++")
"""C++ compilers, tried in this order; $CXX, if set, is used instead."""

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-std=c++17", "-shared", "-fPIC")


class CompilerError(RuntimeError):
    """Raised if a compiled operation cannot be built or used on this machine."""


@cache
def compiler() -> str:
    """Returns the path of the C++ compiler, as text: of $CXX if it is set, else the first of COMPILERS that is
    installed. Raises: CompilerError if there is none."""
    own_choice = os.environ.get("CXX")
    for name in (own_choice,) if own_choice else COMPILERS:
        if path := shutil.which(name):
            return path
    raise CompilerError(
        f"no C++ compiler was found ({own_choice or ', '.join(COMPILERS)}); install one, name it in CXX, or leave out "
        'products="compiled"'
    )


def digest(source: str) -> str:
    """Returns a hash, 16 hexadecimal digits, of a compiled library's source, flags, compiler version and processor.
    Raises: CompilerError without a compiler."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    return hashlib.sha256("\0".join((source, *FLAGS, version, _processor())).encode()).hexdigest()[:16]


def library_digest(name: str) -> str:
    """Returns the digest (16 hexadecimal digits) of the library that `library` would build from C++ file `name`,
    without building it. Raises: CompilerError without a compiler."""
    return digest(_source(name))


def library(name: str, folder: Path) -> tuple[ctypes.CDLL, str]:
    """Returns (library compiled from C++ file `name` of ops/compiled, its digest). It is compiled only if `folder` does
    not hold it. Raises: CompilerError without a compiler, or if the library cannot be compiled or loaded."""
    source = _source(name)
    key = digest(source)
    path = folder / f"{Path(name).stem}-{key}.so"
    if not path.exists():
        write_whole(path, lambda temporary: _compile(source, temporary))
    try:
        return ctypes.CDLL(str(path)), key
    except OSError as error:
        raise CompilerError(f"{path} cannot be loaded ({error}); remove it, and it is compiled again") from error


def _source(name: str) -> str:
    folder = files("cacheprobe.ops.compiled")
    return "".join((folder / part).read_text(encoding="utf-8") for part in ("lanes.h", name))


def _compile(source: str, path: Path) -> None:
    command = [compiler(), *FLAGS, "-x", "c++", "-", "-o", str(path)]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise CompilerError(
            f"{compiler()} failed with exit status {done.returncode}: {reason}; name another compiler in CXX, or leave "
            'out products="compiled"'
        )


def _processor() -> str:
    """Returns text with the machine type and the processor's name and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    kept = {line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
    return "\n".join((platform.machine(), *sorted(kept)))
