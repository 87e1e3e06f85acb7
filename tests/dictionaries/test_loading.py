"""Loading and saving of dictionaries: what names of folders say, settings that are refused, and an interrupted save."""

from pathlib import Path

import pytest
import torch

from cacheprobe.core.hook_names import gemma_scope_hooks
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from tests.dictionaries.planted import random_dictionary, saved


@pytest.mark.parametrize(
    ("path", "hooks"),
    [
        ("/a/transcoder-comparison/gemma-scope-2b-pt-res/layer_3/width_16k/params.npz", ("hook_resid_post", None)),
        ("/a/my-transcoders/gemma-scope-2-1b-pt/resid_post/layer_2_width_16k/config.json", ("hook_resid_post", None)),
        ("/layer_9/b/gemma-scope-2-1b-pt/transcoder/layer_2_width_16k/config.json", ("hook_mlp_in", "hook_mlp_out")),
        ("/gemma-scope-2b-pt-mlp/layer_3/a/b/c/d/e", None),
    ],
)
def test_the_folders_nearest_to_a_file_say_what_it_is(path: str, hooks: tuple[str, str | None] | None) -> None:
    layer = 3 if "layer_3" in path else 2
    wanted = hooks and tuple(name and f"blocks.{layer}.{name}" for name in hooks)
    assert gemma_scope_hooks(path) == wanted


def test_settings_of_torch_files_are_refused_elsewhere(tmp_path: Path) -> None:
    saved(random_dictionary(), tmp_path)
    with pytest.raises(DictionaryError, match="k= and architecture= are for .pt files"):
        Dictionary.load(tmp_path / "dictionary", k=1)


def test_a_save_that_was_interrupted_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(random_dictionary(layer=1), tmp_path)

    def stop(path: Path, content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cacheprobe.lenses.dictionaries.formats.write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        random_dictionary(layer=2, seed=1).save(folder)
    with pytest.raises(DictionaryError, match="it holds none of cfg.json"):
        Dictionary.load(folder)


@pytest.mark.parametrize("scaling", ["constant_norm_rescale", "layer_norm"])
def test_a_state_of_zeros_has_numbers(scaling: str) -> None:
    mine = random_dictionary(normalize_activations=scaling)
    assert bool(torch.isfinite(mine.encode(torch.zeros(2, 32))).all())
    assert bool(torch.isfinite(mine.reconstruct(torch.zeros(2, 32))).all())
