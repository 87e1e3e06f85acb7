"""Reads EAGLE-3 heads in the layouts of speculators and of SafeAILab, vLLM and SGLang; writes that of speculators."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.values import JsonDict, require_one_of
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.eagle3 import SWITCHES, Eagle3Module, eagle3_config
from cacheprobe.models.heads.files import HeadFiles, fill, open_head, target_token_ids
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.models.known import EMBEDDED
from cacheprobe.models.settings import live_model

_CONVENTIONS = ("inputs", "outputs")
_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "model.embed_tokens.weight"
_FOR_TRAINING = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of a folder that are no parameters of the head."""


def load_eagle3(
    folder: "str | Path",
    target: CachedLM,
    *,
    layer_ids: Sequence[int] | None = None,
    layers_are: str | None = None,
    verifier: str | None = None,
) -> HeadLM:
    """Returns the EAGLE-3 head in a folder, for a target model, in the target's dtype and on its device.

    Layouts: that of speculators (config.json with speculators_model_type), and that of SafeAILab, vLLM and SGLang
    (config.json of the block itself, "midlayer." for "layers.0."). Without embed_tokens, the head shares the target's.
    A missing `norm_before_residual` means False in both, as in speculators' and SafeAILab's own code. (vLLM takes True
    if it is missing in speculators' layout, where speculators always writes it.)

    layer_ids: layers of the target that the head reads, if not those in config.json; by default 2, n/2 and n - 3 of n.
    layers_are: "inputs" if id j is the stream that enters block j, so 0 ... n; "outputs" if it is the stream that
    leaves block j, so 0 ... n - 1. None: inputs, as vLLM and speculators count. In a folder that speculators did not
    write, ids that begin with 1 must be told apart: SGLang takes them for outputs, vLLM for inputs.
    verifier: the name that the head stores for its target, if the target has another name here.
    Source: EAGLE-3, Li et al. 2025 (arXiv 2503.01840); github.com/vllm-project/speculators, SafeAILab/EAGLE.
    Twin: speculators' Eagle3DraftModel, close(1e-5) in float32.
    Raises: ValueError for a folder of something else, a head of another model, ids that do not fit, and missing,
    misshapen or unknown tensors.
    """
    files = open_head(folder)
    settings, block, is_speculators = _settings(files)
    where = str(files.folder)
    _require_target(where, settings, block, target, verifier)
    try:
        ids, convention = _layer_ids(settings, target.n_layers, layer_ids, layers_are, is_speculators)
        sites = target_sites(ids, convention, target.n_layers)
        with torch.device("meta"):
            config = eagle3_config(block, settings, len(sites), target.d_model, target.n_ctx)
            module = Eagle3Module(config)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error}") from error
    stored_name = _stored_name(files)
    _require_width(files, stored_name("fc.weight"), len(sites), target)
    given = {} if stored_name(_EMBEDDING) in files.shapes else {_EMBEDDING: _embedding(where, target, module)}
    fill(module, files, stored_name, given, target.dtype, target.device, _FOR_TRAINING)
    token_ids = target_token_ids(files, int(config.draft_vocab_size), target.d_vocab)
    return HeadLM(module, target, files.folder.name, sites, token_ids, f"EAGLE-3 head for {target.name}")


def target_sites(ids: Sequence[int], convention: str, n_layers: int) -> list[tuple[str, int]]:
    """Returns (site, layer) of the target for each layer id. convention: "inputs" or "outputs", see `load_eagle3`.

    The stream that enters block j is S of layer j - 1, and "pre" of layer 0 for j = 0.
    Raises: ValueError for ids out of range, or one that is given twice.
    """
    require_one_of("layers_are", convention, _CONVENTIONS)
    first, last = (0, n_layers) if convention == "inputs" else (0, n_layers - 1)
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not first <= i <= last for i in ids):
        raise ValueError(
            f"layer ids that are {convention} of {n_layers} blocks lie in {first} to {last}, got {[*ids]}; give "
            "layer_ids=, or layers_are= if the ids are counted otherwise"
        )
    if len({*ids}) != len(ids):
        raise ValueError(f"layer ids must differ, got {[*ids]} for {n_layers} layers; give layer_ids=")
    outputs = [i - 1 if convention == "inputs" else i for i in ids]
    return [("S", layer) if layer >= 0 else ("pre", 0) for layer in outputs]


def save_eagle3(head: HeadLM, folder: "str | Path", verifier: str) -> Path:
    """Writes an EAGLE-3 head in speculators' layout, with its embedding, and returns the folder's path.

    verifier: name or directory of the target model, which speculators stores.
    Raises: ValueError for a head of another kind.
    """
    module = head.live
    if not isinstance(module, Eagle3Module):
        raise ValueError(f"{head.name} is a {type(module).__name__}, not an EAGLE-3 head; save it as its own kind")
    config, path = module.config, Path(folder)
    own = {*SWITCHES, "draft_vocab_size", "num_target_states", "target_hidden_size", "architectures"}
    block = {name: one for name, one in config.to_dict().items() if name not in own}
    tensors = {
        name.removeprefix("model."): weight.detach().to("cpu", copy=True).contiguous()
        for name, weight in module.named_parameters()
    }
    if (token_ids := head.token_ids) is not None:
        token_ids = token_ids.cpu()
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
        tensors["t2d"] = torch.zeros(head.d_vocab, dtype=torch.bool).index_fill_(0, token_ids, True)
    is_narrow = config.target_hidden_size == config.hidden_size
    written: JsonDict = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if is_narrow else config.target_hidden_size,
        _IDS: [0 if site == "pre" else layer + 1 for site, layer in head.target_sites],
        **{name: getattr(config, name) for name in SWITCHES},
        "dtype": str(head.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "transformer_layer_config": block,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
    write_json(path / "config.json", written)
    write_whole(path / "model.safetensors", lambda place: save_file(tensors, place, {"format": "pt"}))
    return path


def _settings(files: HeadFiles) -> tuple[JsonDict, JsonDict, bool]:
    """Returns (settings of the head, fields of its block, whether speculators wrote the folder). Raises: ValueError for
    a head of another kind."""
    config = files.config
    if (kind := config.get("speculators_model_type")) is not None:
        block = config.get("transformer_layer_config")
        if kind != "eagle3" or not isinstance(block, dict):
            raise ValueError(
                f"{files.folder} holds a {kind!r:.40} head with no EAGLE-3 config; load it as its own kind"
            )
        return config, block, True
    nested = config.get("eagle_config") or {}
    settings = {**config, **nested}
    if settings.get("use_aux_hidden_state", True) is not True:
        raise ValueError(
            f"{files.folder} reads one state after the target's last norm (use_aux_hidden_state), EAGLE-3 heads here "
            "read several before it; use another head"
        )
    return settings, config, False


def _layer_ids(
    settings: Mapping[str, object],
    n_layers: int,
    given: Sequence[int] | None,
    convention: str | None,
    is_speculators: bool,
) -> tuple[Sequence[int], str]:
    """Returns the layer ids and their convention. Raises: ValueError if the convention must be stated."""
    stored = settings.get(_IDS)
    if given is None and not isinstance(stored, list):  # EAGLE-3's default is one of inputs
        return [2, n_layers // 2, n_layers - 3], "inputs"
    ids: Sequence[int] = given if given is not None else stored if isinstance(stored, list) else []
    if convention is None and given is None and not is_speculators and ids[:1] == [1]:
        raise ValueError(
            f"layer ids {ids} may be inputs of blocks, as vLLM takes them, or outputs, as SGLang does where the first "
            'is 1; say layers_are="inputs" or layers_are="outputs"'
        )
    return ids, convention or "inputs"


def _require_target(
    where: str, settings: Mapping[str, object], block: Mapping[str, object], target: CachedLM, verifier: str | None
) -> None:
    """Raises: ValueError if a config names another target: a width, a vocabulary or a name."""
    width = settings.get("target_hidden_size") or block.get("hidden_size")
    if width != target.d_model:
        raise ValueError(f"{where} reads states of width {width}, {target.name} has {target.d_model}; use its own head")
    if (size := block.get("vocab_size")) != target.d_vocab:
        raise ValueError(
            f"{where} is for a vocabulary of {size} tokens, {target.name} has {target.d_vocab}; use its own head"
        )
    about = settings.get("speculators_config")
    stored = (about.get("verifier") or {}).get("name_or_path") if isinstance(about, dict) else None
    here = EMBEDDED[target.name].hub if target.name in EMBEDDED else target.name
    is_unnamed = here == type(live_model(target)).__name__
    if not stored or stored == verifier or (verifier is None and is_unnamed):
        return
    if verifier is not None or Path(stored).name.casefold() != Path(here).name.casefold():
        raise ValueError(
            f"{where} is a head of {stored}, the model is {verifier or here}; if both are the same, say "
            f"verifier={stored!r}"
        )


def _stored_name(files: HeadFiles) -> Callable[[str], str]:
    """Returns a function from the name of a parameter of Eagle3Module to its name in the folder."""
    is_whole = any(name.startswith("model.") for name in files.shapes)
    has_midlayer = any("midlayer." in name for name in files.shapes)

    def stored_name(name: str) -> str:
        """Returns the name in the folder."""
        bare = name.removeprefix("model.")
        bare = bare.replace("layers.0.", "midlayer.") if has_midlayer else bare
        return f"model.{bare}" if is_whole and f"model.{bare}" in files.shapes else bare

    return stored_name


def _require_width(files: HeadFiles, name: str, num_states: int, target: CachedLM) -> None:
    """Raises: ValueError if fc reads another number of states than there are layer ids."""
    shape = files.shapes.get(name, ())
    if len(shape) == 2 and shape[1] != num_states * target.d_model:
        raise ValueError(
            f"{files.folder}: fc reads {shape[1]} numbers, {num_states} layers of width {target.d_model} give "
            f"{num_states * target.d_model}; give layer_ids= as the head was trained"
        )


def _embedding(where: str, target: CachedLM, module: Eagle3Module) -> Tensor:
    """Returns the target's embedding matrix, without a copy. Raises: ValueError if it is not one of the head's
    shape."""
    weight = getattr(live_model(target).get_input_embeddings(), "weight", None)
    wanted = tuple(module.get_input_embeddings().get_parameter("weight").shape)
    if not isinstance(weight, Tensor) or tuple(weight.shape) != wanted:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else "none"
        raise ValueError(
            f"{where} holds no embed_tokens, and {target.name} has an embedding of shape {got}, not {wanted}; give a "
            "head with an embedding of its own"
        )
    return weight.detach()
