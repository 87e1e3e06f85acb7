"""Rules that the source keeps. Each is a function from source to complaints, and each is shown planted violations."""

import ast
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (  # imports point to a line above; what shares a line stays apart
    ("core",),
    ("ops",),
    ("kvcache", "tasks", "lenses.dictionaries"),
    ("models",),
    ("lenses",),
    ("engine.drafters", "edits"),
    ("engine",),
    ("trace",),
    ("trace.recording",),
    ("edits.gradient_texts",),
    ("training", "edits.gradients", "edits.patchscopes"),
    ("analysis",),
    ("engine.plan", "lenses.probes"),
    ("engine.drafts.timing",),
    ("engine.execution", "trace.importers.entry"),
    ("engine.continuation", "engine.estimates", "engine.draft_costs"),
    ("api", "views"),
    ("sweeps", "trace.replays"),
    ("views.dashboard",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
"""A part is a room, or a folder or file of a room that stands on another level than the rest."""


def part_of(name: str) -> str:
    """Returns the part that a dotted name below cacheprobe belongs to: the longest that it begins with, else its
    first word."""
    names = [part for part in LEVEL if f"{name}.".startswith(f"{part}.")]
    return max(names, key=len, default=name.split(".")[0])


LONGEST_FILE, LARGEST_MEDIAN = 400, 185
"""Lines. The median was 150 while the package had 551 files: two fifths of them were folded into their only callers."""

HOOK_NAME = re.compile(r"(^|[^\w ])blocks\\?\.|\bblocks\.\d|hook_(resid|attn|mlp|embed|pos_embed|normalized|scale)")

ONLY_IN = {  # a module, and the files that may import it
    "transformer_lens": re.compile(r"cacheprobe/models/hf/(bridge\w*|hooked)\.py"),
    "plotly": re.compile(r"cacheprobe/views/.+\.py"),
    "dash": re.compile(r"cacheprobe/views/dashboard/.+\.py"),
    "triton": re.compile(r"kernels/.+\.py"),
    "cacheprobe_kernels": re.compile(r"kernels/.+\.py"),
}
NEVER_IN_VIEWS = {"torch", "transformers", "transformer_lens"}
PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
LOADS_WEIGHTS = "cacheprobe/lenses/dictionaries/files.py"
"""The one file that reads other projects' torch files, as weights alone."""
LATE = {"torch", "triton", "cacheprobe_kernels", "transformers", "transformer_lens", "pandas", "plotly", "datasets"}
"""Not loaded by `import cacheprobe`."""

# written with brackets so that this file does not hold what it looks for
MACHINE = re.compile(r"(?<![\w.~-])/(work|root)[/]|/opt/(wheels|pypi)\b|pypi[.]org/simple|files[.]pythonhosted")


def source_files(*folders: str) -> dict[str, str]:
    """Path below the top folder -> text, of the Python files of the project's own folders."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in found}


def listed_files() -> dict[str, str]:
    """Path -> text of every text file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    paths = (ROOT / name for name in listed.split("\0") if name)
    content = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    return {name: data.decode("utf-8", "replace") for name, data in content.items() if b"\0" not in data}


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions too; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}" if node.module else base) for alias in node.names)


def layer_complaints(files: Mapping[str, str]) -> Iterator[str]:
    """Imports inside cacheprobe that do not point down; the package's own __init__ loads lazily and is exempt."""
    for path, source in files.items():
        part = part_of(".".join(PurePosixPath(path).parts[1:]).removesuffix(".py").removesuffix(".__init__"))
        if part == "__init__":
            continue
        if part not in LEVEL:
            yield f"{path}: {part!r} has no place in LAYERS"
            continue
        for line, name in imports(source):
            if name.startswith("."):
                yield f"{path}:{line}: relative import"
            if name.split(".")[0] != "cacheprobe" or name == "cacheprobe.__version__":
                continue
            target = part_of(name.partition(".")[2])
            if target not in LEVEL:
                if part != "cli":  # they may use the package as its users do
                    yield f"{path}:{line}: imports {name}, which is no part of the package"
            elif target != part and not LEVEL[target] < LEVEL[part]:
                yield f"{path}:{line}: {part} imports {target}, which is not below it"


def is_view(path: str) -> bool:
    """Says whether a file reads tables alone. The dashboard also starts models, for flips."""
    return path.startswith("cacheprobe/views/") and not path.startswith("cacheprobe/views/dashboard/")


def size_complaints(files: Mapping[str, str]) -> Iterator[str]:
    lines = {path: source.count("\n") for path, source in files.items()}
    for path, count in lines.items():
        if count > LONGEST_FILE:
            yield f"{path}: {count} lines, {LONGEST_FILE} at most"
    package = [count for path, count in lines.items() if path.startswith("cacheprobe/") and count]
    if package and statistics.median(package) >= LARGEST_MEDIAN:
        yield f"cacheprobe/: the median file has {statistics.median(package)} lines, under {LARGEST_MEDIAN} wanted"


def hook_name_complaints(files: Mapping[str, str]) -> Iterator[str]:
    """Hook names written out, other than in the table and in docstrings."""
    for path, source in files.items():
        if path == "cacheprobe/core/hook_names.py":
            continue
        tree = ast.parse(source)
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                if HOOK_NAME.search(node.value):
                    yield f"{path}:{node.lineno}: hook name {node.value!r}; take it from cacheprobe.core.hook_names"


def library_complaints(files: Mapping[str, str]) -> Iterator[str]:
    for path, source in files.items():
        for line, name in imports(source):
            top = name.split(".")[0]
            if top in ONLY_IN and not ONLY_IN[top].fullmatch(path):
                yield f"{path}:{line}: imports {top}, which belongs in {ONLY_IN[top].pattern}"
            if top in NEVER_IN_VIEWS and is_view(path):
                yield f"{path}:{line}: a view imports {top}; views read tables"


def kernel_complaints(files: Mapping[str, str]) -> Iterator[str]:
    """What the kernels know of cacheprobe: their references, the registry, and single files that know nothing else."""
    for path, source in files.items():
        for line, name in imports(source) if path.startswith("kernels/") else ():
            part = (*name.split("."), "")[1]
            if name.split(".")[0] == "cacheprobe" and part not in ("ops", *LAYERS[0]):
                yield f"{path}:{line}: imports {name}; a kernel knows cacheprobe.ops and single files alone"


def pickle_complaints(files: Mapping[str, str]) -> Iterator[str]:
    """Ways to load code that was stored as data."""
    for path, source in files.items():
        yield from (f"{path}:{line}: imports {n}" for line, n in imports(source) if n.split(".")[0] in PICKLERS)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load" and path == LOADS_WEIGHTS:
                if not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords):
                    yield f"{path}:{node.lineno}: torch.load that may run code; say weights_only=True"
                continue
            loads = {"torch.load", "pandas.read_pickle"} - ({"torch.load"} if path == LOADS_WEIGHTS else set())
            if isinstance(node, ast.Attribute) and ast.unparse(node) in loads:
                yield f"{path}:{node.lineno}: {ast.unparse(node)}; states are kept in safetensors"
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                yield f"{path}:{node.value.lineno}: allow_pickle"


def machine_complaints(files: Mapping[str, str]) -> Iterator[str]:
    """What is true of one machine only: its folders, and addresses of package registries."""
    for path, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if found := MACHINE.search(line):
                yield f"{path}:{number}: {found.group()}"


def loaded_early(statement: str, unwanted: Iterable[str]) -> list[str]:
    """Which of the unwanted modules a statement loads in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*sorted({set(unwanted)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


PACKAGE = source_files("cacheprobe")
ALL_CODE = source_files("cacheprobe", "kernels", "analyses", "tests", "benchmarks", "scripts", "docs")
SHIPPED = source_files("cacheprobe", "kernels", "analyses")


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (layer_complaints, PACKAGE),
        (size_complaints, ALL_CODE),
        (hook_name_complaints, SHIPPED),
        (library_complaints, SHIPPED),
        (kernel_complaints, SHIPPED),
        (pickle_complaints, SHIPPED),
    ],
)
def test_the_source_keeps_the_rule(rule, files):
    assert files
    complaints = list(rule(files))
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layer_complaints, "cacheprobe/ops/x.py", "def late():\n    import cacheprobe.models.hf.bridge"),
        (layer_complaints, "cacheprobe/views/x.py", "from cacheprobe.api import run"),
        (layer_complaints, "cacheprobe/engine/x.py", "from . import step"),
        (layer_complaints, "cacheprobe/misc.py", ""),
        (size_complaints, "tests/x.py", "pass\n" * (LONGEST_FILE + 1)),
        (size_complaints, "cacheprobe/x.py", "pass\n" * LARGEST_MEDIAN),
        (hook_name_complaints, "cacheprobe/engine/x.py", "name = f'blocks.{i}.hook_x'"),
        (hook_name_complaints, "kernels/cacheprobe_kernels/x.py", "pattern = r'^blocks\\.(\\d+)'"),
        (library_complaints, "cacheprobe/models/fast/lm.py", "from transformer_lens import HookPoint"),
        (library_complaints, "cacheprobe/views/figures.py", "from torch import Tensor"),
        (kernel_complaints, "kernels/cacheprobe_kernels/x.py", "import cacheprobe"),
        (pickle_complaints, "cacheprobe/trace/x.py", "from pickle import loads"),
        (pickle_complaints, "cacheprobe/lenses/dictionaries/files.py", "torch.load(path)"),
        (pickle_complaints, "cacheprobe/trace/x.py", "np.load(path, allow_pickle=True)"),
        (machine_complaints, "docs/x.md", "pip install --find-links " + "/opt" + "/wheels torch"),
        (machine_complaints, "constraints.txt", "torch @ https://files." + "pythonhosted.org/torch.whl"),
        (machine_complaints, "docs/x.md", "cache in /" + "root/.cache"),
    ],
)
def test_the_rule_catches_a_planted_violation(rule, path, source):
    assert len(list(rule({path: source}))) == 1


def test_no_machine_is_named_in_the_project():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are the project's")
    complaints = list(machine_complaints(listed_files()))
    assert not complaints, "\n".join(complaints)


def test_import_cacheprobe_is_quick():
    assert loaded_early("import cacheprobe", LATE) == []
    assert loaded_early("import cacheprobe.core.registry, cacheprobe.tasks", {*LATE, "numpy"}) == []
    assert loaded_early("import cacheprobe, pandas", LATE) == ["pandas"]


def test_views_do_not_load_torch_by_a_detour():
    """A view that imports a table helper, which imports a tensor helper, would make every figure wait for torch."""
    paths = [path for path in PACKAGE if is_view(path)]
    views = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    assert loaded_early("\n".join(f"import {view}" for view in views), NEVER_IN_VIEWS) == []
