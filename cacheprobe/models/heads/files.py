"""Reads folders of draft heads: config.json and tensors, one at a time, from safetensors or as weights of a torch
file."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheprobe.core.live import LiveModule
from cacheprobe.core.values import JsonDict
from cacheprobe.lenses.dictionaries.files import read_json, read_torch_weights
from cacheprobe.models.heads.module import HeadModule

_PICKLE = "pytorch_model.bin"


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """Holds the config of a folder, and reads its tensors one at a time, by name."""

    folder: Path
    config: JsonDict
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor in the folder's files, by name."""
    _kept: Mapping[str, "Tensor | Path"] = field(repr=False)
    """Where each tensor is: a tensor of a torch file, or the path of its safetensors file."""

    def tensor(self, name: str) -> Tensor:
        """Returns one tensor, on the CPU. Raises: ValueError if it is missing or cannot be read."""
        if name not in self._kept:
            raise ValueError(f"{self.folder} holds no tensor {name}; it has {', '.join(sorted(self.shapes)[:5])}, ...")
        kept = self._kept[name]
        if isinstance(kept, Tensor):
            return kept
        try:
            with safe_open(kept, "pt") as stored:
                return stored.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{name} in {kept} cannot be read ({error!s:.120}); get the file again") from error


def open_head(folder: "str | Path", pickle: str = _PICKLE) -> HeadFiles:
    """Returns the files of a draft head's folder. Tensors of safetensors files (model*.safetensors, or any if there are
    none) are read when they are asked for; those of a torch file, which must hold tensors alone, at once.

    pickle: name of the torch file, which is read if there is no safetensors file.
    Raises: ValueError if there is no config.json or no file of tensors, and for a broken file, or a torch file that
    names anything but tensors.
    """
    path = Path(folder)
    try:
        config = read_json(path / "config.json")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{path} holds no readable config.json ({reason!s:.120}); give the folder of a draft head"
        ) from error
    kept: dict[str, Tensor | Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as stored:
                found = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is broken ({error!s:.120}); get the file again") from error
        if twice := sorted(found.keys() & kept.keys()):
            raise ValueError(f"{path} holds {twice[0]} in {file.name} and {kept[twice[0]]}; keep one of the files")
        shapes |= found
        kept |= dict.fromkeys(found, file)
    if not kept:
        kept |= _of_torch_file(path / pickle)
        shapes = {name: tuple(tensor.shape) for name, tensor in kept.items() if isinstance(tensor, Tensor)}
    return HeadFiles(path, dict(config), shapes, kept)


def _of_torch_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a torch file. Raises: ValueError if it is missing, or holds anything but tensors."""
    try:
        return read_torch_weights(path)
    except OSError as error:
        raise ValueError(
            f"{path.parent} holds no .safetensors file and no {path.name}; give the folder of a draft head"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} is not read, since a torch file may run code and this one is not tensors alone ({error!s:.160}); "
            "convert it to safetensors"
        ) from error


def target_token_ids(files: HeadFiles, draft_vocab: int, vocab: int) -> Tensor | None:
    """Returns the target's id [v] of each of the head's tokens; None if they have one vocabulary. Raises: ValueError if
    d2t is missing, leaves the vocabulary, maps two tokens to one, or contradicts t2d."""
    if "d2t" not in files.shapes:
        if draft_vocab != vocab:
            raise ValueError(f"{files.folder} holds no d2t, and has {draft_vocab} of {vocab} tokens; give a whole head")
        return None
    offsets = files.tensor("d2t")
    if offsets.shape != (draft_vocab,) or offsets.is_floating_point():
        raise ValueError(
            f"{files.folder}: d2t must be {draft_vocab} whole numbers, got {tuple(offsets.shape)} of {offsets.dtype}; "
            "give a head whose config and tensors fit"
        )
    token_ids = torch.arange(draft_vocab) + offsets.long()
    low, high, remedy = int(token_ids.min()), int(token_ids.max()), "d2t is the target's id minus the head's"
    if low < 0 or high >= vocab:
        raise ValueError(f"{files.folder}: d2t gives ids {low} to {high}, the target's are 0 to {vocab - 1}; {remedy}")
    if len(token_ids.unique()) != draft_vocab:
        raise ValueError(f"{files.folder}: d2t gives one target id to several of the head's tokens; {remedy}")
    if "t2d" in files.shapes:
        wanted = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, token_ids, True)
        if not torch.equal(files.tensor("t2d").bool(), wanted):
            raise ValueError(f"{files.folder}: t2d marks other tokens than d2t; {remedy}")
    return token_ids


def fill(
    module: HeadModule,
    files: HeadFiles,
    stored_name: Callable[[str], str],
    given: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    others: Collection[str] | None = (),
) -> None:
    """Puts the tensors of a folder into a module that was built on the "meta" device.

    stored_name: returns the name in the folder of a parameter of the module.  given: parameters that are taken as they
    are, not from the folder, by name.  dtype, device: of the parameters that are read.
    others: names of tensors in the folder that may be there besides; None for any.
    Raises: ValueError for a missing tensor, one of another shape, or one that has no place in the module.
    """
    wanted = {name: stored_name(name) for name, _ in module.named_parameters() if name not in given}
    parameters = dict(module.named_parameters())
    for name, stored in wanted.items():
        shape = tuple(parameters[name].shape)
        if files.shapes.get(stored) != shape:
            there = files.shapes.get(stored, "missing")
            raise ValueError(
                f"{files.folder}: {stored} must be of shape {shape}, as config.json says, and is {there}; give a head "
                "whose config and tensors fit"
            )
    if others is not None and (odd := sorted(set(files.shapes) - {*wanted.values(), *others})):
        raise ValueError(
            f"{files.folder} holds {odd[0]}, which a head with this config.json does not have; a setting may be missing"
        )
    read = {name: files.tensor(stored).to(device, dtype) for name, stored in wanted.items()}
    module.load_state_dict({**read, **given}, assign=True)
    rotary: LiveModule = module.model.rotary_emb  # its tensors are computed, not stored
    module.model.rotary_emb = type(rotary)(module.config).to(device)
    module.requires_grad_(False).eval()
