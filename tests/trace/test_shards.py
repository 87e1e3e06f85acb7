"""A saved run reads the stored vectors that are asked for, and no more blocks of its files than hold them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheprobe.ops.equality import bitwise
from cacheprobe.trace import state_store as shards
from cacheprobe.trace.manifest import BLOCK_BYTES, CheckedFiles, TraceError
from cacheprobe.trace.state_store import ShardStore
from cacheprobe.trace.storage import RunFiles

WIDTH = 512
COUNTS = (3_000, 0, 5_000, 1)


def stored(directory: Path, dtype: torch.dtype = torch.float32) -> ShardStore:
    """Shards as the writer of a run leaves them, one of them empty: three blocks and more of each tensor."""
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(3)
    files = RunFiles(directory, directory, "made")
    for number, count in enumerate(COUNTS):
        made = {f"{site}.{layer}": torch.randn(count, WIDTH, generator=draw) for site in "SC" for layer in (0, 4)}
        tensors = {key: states.to(dtype) for key, states in made.items()}
        files.write(f"{number}.safetensors", lambda path, tensors=tensors: save_file(tensors, path))
    return ShardStore(CheckedFiles(directory, files.checksums), list(files.sizes), "SC", [0, 4])


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the reads from here on."""
    sizes, read = [], CheckedFiles.read

    def counted(self: CheckedFiles, name: str, *range_: Any) -> Any:
        data = read(self, name, *range_)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(CheckedFiles, "read", counted)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_vectors_are_those_of_the_whole_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = stored(tmp_path, dtype)
    some_places = [[0], [8_000], [2_999, 3_000], [7, 7, 5, 7_999, 0, 3_001], [*range(2_900, 3_100)], []]
    for indices in (*some_places, [*range(0, 8_001, 401)]):
        index = torch.tensor(indices, dtype=torch.long)
        store = ShardStore(whole.files, whole.shards, "SC", [0, 4])
        for site, layer in (("S", 0), ("C", 4)):
            some = store.some_of(site, layer, index)
            assert bitwise(some, whole.all_of(site, layer)[index]) and some.shape == (len(indices), WIDTH)


def test_one_vector_reads_its_own_bytes(tmp_path: Path, bytes_read: list[int]) -> None:
    store = stored(tmp_path)
    assert len(store.stored("S", 0)) == sum(COUNTS)
    del bytes_read[:]
    store.some_of("S", 4, torch.tensor([4_321]))
    assert sum(bytes_read) == WIDTH * 4
    store.some_of("S", 4, torch.tensor([10, 12, 5_000]))  # the first two lie in one block
    assert bytes_read[1:] == [3 * WIDTH * 4, WIDTH * 4]
    del bytes_read[:]
    store.some_of("S", 0, torch.tensor([], dtype=torch.long))
    assert sum(bytes_read) == 0


def test_a_tensor_that_is_read_again_and_again_is_kept(tmp_path: Path, bytes_read: list[int]) -> None:
    store, size = stored(tmp_path), sum(COUNTS) * WIDTH * 4
    for index in range(200):
        store.some_of("S", 0, torch.tensor([index * 40]))
    assert sum(bytes_read) < 2 * size
    del bytes_read[:]
    store.some_of("S", 0, torch.tensor([17]))
    assert not bytes_read


def test_the_kept_tensors_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_read: list[int]) -> None:
    monkeypatch.setattr(shards, "KEPT_BYTES", 2 * sum(COUNTS) * WIDTH * 4)
    store = stored(tmp_path)
    for place in (("S", 0), ("S", 4), ("S", 0), ("C", 0)):  # the last one takes the place of S.4
        store.all_of(*place)
    del bytes_read[:]
    store.all_of("S", 0)
    store.all_of("C", 0)
    assert not bytes_read
    store.all_of("S", 4)
    assert bytes_read


@pytest.mark.parametrize("index", [-1, 8_001, 10**9])
def test_an_index_without_a_vector_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=rf"indices 0 to 8000, got .*{index}"):
        stored(tmp_path).some_of("S", 0, torch.tensor([3, index]))


def test_a_damaged_block_is_found_where_it_is_read(tmp_path: Path) -> None:
    store = stored(tmp_path)
    path = tmp_path / "2.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 3)
        file.write(b"abc")
    of_end, last = next(
        (place, layer) for place in "SC" for layer in (0, 4)
        if store._places[f"{place}.{layer}"][1][1]["data_offsets"][1] == path.stat().st_size
    )  # fmt: skip
    far = BLOCK_BYTES // (WIDTH * 4) + 1
    store.some_of(of_end, last, torch.tensor([7_999 - far]))
    with pytest.raises(TraceError, match=r"2.safetensors was changed after the run was saved.*bytes \d+ to \d+ differ"):
        store.some_of(of_end, last, torch.tensor([7_999]))
