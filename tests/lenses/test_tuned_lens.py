"""The tuned lens: its product, its training by the published recipe, its files, and the package's artefacts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cacheprobe as cp
from cacheprobe.lenses.base import LensError
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.lenses.tuned import TunedLens, require_tuned_lens
from cacheprobe.ops.by_layer import product_by_layer
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.training.settings import TunedLensSettings
from cacheprobe.training.tuned_lens import (
    TunedLensTrainer,
    comparison,
    divergences,
    states_of,
    train_tuned_lens,
    write_texts,
)
from tests.tiny import PROMPTS, VOCAB, hf_model, loaded, perturbed
from tests.twins.lenses_slowly import (
    package_hash,
    product_by_layer_slowly,
    tuned_lens_gradients_slowly,
    tuned_logits_slowly,
)

ORDER = "sums in another order"
PACKAGE = Path(__file__).parents[1] / "fixtures" / "tuned_lens_package"
"""What the tuned-lens package wrote, and read."""


def shaken(seed: int = 3) -> TunedLens:
    lens = TunedLens.fresh(loaded())
    generator = torch.Generator().manual_seed(seed)
    for numbers in (lens.weights, lens.biases):
        numbers += 0.05 * torch.randn(numbers.shape, generator=generator)
    return lens


@pytest.mark.parametrize("num_rows", [1, 7, 8, 40])
@pytest.mark.parametrize("kind", ["mixed", "one layer", "all but the first"])
def test_product_by_layer(num_rows: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    states, weights = torch.randn(num_rows, 6, generator=generator), torch.randn(5, 6, 4, generator=generator)
    biases = torch.randn(5, 4, generator=generator)
    low, high = {"mixed": (0, 5), "one layer": (3, 4), "all but the first": (1, 5)}[kind]
    layers = torch.randint(low, high, (num_rows,), generator=generator)
    mine = product_by_layer(states, layers, weights, biases)
    assert close(mine, product_by_layer_slowly(states, layers, weights, biases), 1e-5, because=ORDER)


def test_product_has_one_shape_whatever_the_layers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's bits may depend on its height alone: every split over the layers is the same batched product."""
    shapes = set()
    right = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda b, x, w: (shapes.add((x.shape, w.shape)), right(b, x, w))[1])
    states, weights, biases = torch.randn(24, 6), torch.randn(5, 6, 6), torch.randn(5, 6)
    for layers in ([0] * 24, [4] * 24, [0, 1, 2, 3, 4, 0] * 4, [0] * 9 + [1] * 9 + [2, 3, 4, 4, 4, 4]):
        product_by_layer(states, torch.tensor(layers), weights, biases)
    assert len(shapes) == 1


def test_logits_are_those_of_the_definition() -> None:
    model, lens = loaded(), shaken()
    states = states_of(model, torch.tensor([PROMPTS[4]])).layers.flatten(0, 1)
    states, layers = torch.cat([states, states[:3]]), torch.tensor([0] * 7 + [1] * 7 + [2] * 3)
    mine = lens.logits(model, states, layers)
    assert close(mine, tuned_logits_slowly(model, lens, states, layers), 1e-5, because=ORDER)
    assert bitwise(TunedLens.fresh(model).logits(model, states, layers), model.read_out(states))


def test_gradients_are_those_of_the_definition() -> None:
    model, lens = loaded(), shaken()
    trainer = TunedLensTrainer(model, TunedLensSettings())
    with torch.no_grad():
        trainer.weights.copy_(lens.weights), trainer.biases.copy_(lens.biases)
    states = states_of(model, torch.tensor([PROMPTS[0], PROMPTS[4][:5]]))
    assert states.layers.shape == (2, 10, 32) and states.output_logprobs_nats.shape == (10, VOCAB)
    kl_nats = trainer.backward(states)
    weights, biases, slowly = tuned_lens_gradients_slowly(
        model, lens.weights, lens.biases, states.layers, states.output_logprobs_nats
    )
    assert close(kl_nats, slowly, 1e-4, because=ORDER)
    assert float(weights.abs().max()) > 0.01
    assert close(trainer.weights.grad / weights.abs().max(), weights / weights.abs().max(), 1e-4, because=ORDER)
    assert close(trainer.biases.grad / biases.abs().max(), biases / biases.abs().max(), 1e-4, because=ORDER)


def test_training_lowers_the_divergence_of_every_layer_on_held_out_text() -> None:
    """Below the logit lens at every layer, on text that was never trained on; and the model is as it was."""
    model = cp.load_model(hf_model("llama", torch.float32))
    before = model.weights_sha256
    settings = TunedLensSettings(steps=40, texts=6, length=24, held_out=6)
    about = train_tuned_lens(model, settings, progress=False).about
    pairs = list(zip(about["kl_nats_logit"], about["kl_nats_tuned"], strict=True))
    assert len(pairs) == 2 and all(tuned < 0.9 * logit for logit, tuned in pairs), pairs
    assert about["tokens"] == 40 * 6 * 24 and len(comparison(about).splitlines()) == 3
    assert model.weights_sha256 == before


def test_training_is_a_function_of_its_settings() -> None:
    settings = TunedLensSettings(steps=3, texts=2, length=12, held_out=2)
    lenses = [train_tuned_lens(loaded(), settings, progress=False) for _ in range(2)]
    assert bitwise(lenses[0].weights, lenses[1].weights) and bitwise(lenses[0].biases, lenses[1].biases)
    assert float(lenses[0].weights.abs().max()) > 0
    texts = [write_texts(loaded(), 6, 12, seed, part) for seed, part in ((0, "train"), (1, "train"), (0, "held-out"))]
    assert all(text.shape == (6, 12) for text in texts)
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_text_goes_on_as_the_model_does() -> None:
    """Tokens are drawn at temperature 1: on average, a token's log-probability is minus the entropy.

    The sum of what is left is within four standard deviations of 0. At temperature 0.2 or 2 it is far outside.
    """
    model = loaded()
    assert not model.stop_token_ids  # which are never drawn
    left = variance = 0.0
    for text in write_texts(model, 40, 24, 0, "train"):
        logprobs = states_of(model, text[None]).output_logprobs_nats[11:23].double()
        said = logprobs[torch.arange(12), text[12:]]
        probs = logprobs.exp()
        entropy = -(probs * logprobs).sum(-1)
        left += float((said + entropy).sum())
        variance += float(((probs * logprobs**2).sum(-1) - entropy**2).sum())
    assert abs(left) < 4 * variance**0.5


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(LensError, match="trained in float32"):
        TunedLensTrainer(loaded(dtype=torch.bfloat16), TunedLensSettings())
    with pytest.raises(ValueError, match="exceed the context"):
        write_texts(loaded(), 1, 10**6, 0, "train")


def test_a_saved_lens_comes_back(tmp_path: Path) -> None:
    lens = shaken()
    lens.about["settings"] = {"steps": 3}
    assert lens.save(tmp_path / "lens") == tmp_path / "lens"
    again = TunedLens.load(tmp_path / "lens", loaded())
    assert bitwise(again.weights, lens.weights) and bitwise(again.biases, lens.biases) and again.about == lens.about
    with pytest.raises(LensError, match="made for the unembedding"):
        TunedLens.load(tmp_path / "lens", perturbed(loaded(), 1e-3))
    with pytest.raises(LensError, match="holds no tuned lens"):
        TunedLens.load(tmp_path / "nothing", loaded())
    held = tmp_path / "lens" / "translators.safetensors"
    held.write_bytes(held.read_bytes()[:100])
    with pytest.raises(LensError, match="no whole tuned lens"):
        TunedLens.load(tmp_path / "lens", loaded())


@pytest.mark.parametrize(
    "changes",
    [dict(unembedding_sha256=None), dict(about=None), dict(n_layers=4), dict(d_model="32"), dict(n_layers=None)],
)
def test_a_damaged_lens_is_refused_before_a_model_is_loaded(tmp_path: Path, changes: dict) -> None:
    shaken().save(tmp_path)
    held = tmp_path / "config.json"
    assert require_tuned_lens(tmp_path)["n_layers"] == 3
    held.write_text(json.dumps(json.loads(held.read_text()) | changes))
    for read in (require_tuned_lens, lambda path: TunedLens.load(path, loaded())):
        with pytest.raises(LensError, match="no whole tuned lens"):
            read(tmp_path)


def test_a_lens_without_its_weights_is_refused(tmp_path: Path) -> None:
    package_artefact(tmp_path)
    torch.save([1, 2], tmp_path / "params.pt")
    with pytest.raises(LensError, match="a dictionary of tensors"):
        TunedLens.load(tmp_path, loaded())
    (tmp_path / "params.pt").unlink()
    with pytest.raises(LensError, match=r"it has no params.pt"):
        require_tuned_lens(tmp_path)


def package_artefact(folder: Path, **changes: object) -> nn.ModuleList:
    """What the tuned-lens package saves of a lens for the tiny model, and the translators themselves."""
    torch.manual_seed(5)
    translators = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
    config = dict(
        base_model_name_or_path="tiny", d_model=32, num_hidden_layers=3, bias=True, base_model_revision=None,
        unembed_hash=package_hash(hf_model().lm_head.weight.detach()), lens_type="linear_tuned_lens",
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    torch.save(translators.state_dict(), folder / "params.pt")
    return translators


def test_what_the_package_wrote_is_read_as_the_package_reads_it() -> None:
    """Files of tuned-lens 0.2.0 itself, beside its own logits: `scripts/make_tuned_lens_artefact.py` made both."""
    lens, theirs = TunedLens.load(PACKAGE, loaded()), load_file(PACKAGE / "read.safetensors")
    logit_lens = LogitLens()
    for layer in range(2):
        h, layers = theirs[f"hidden.{layer + 1}"], torch.full((6,), layer)
        mine = lens.logits(loaded(), h, layers)
        assert close(mine, theirs[f"logits.{layer + 1}"], 1e-5, because=ORDER)
        assert not close(mine, logit_lens.logits(loaded(), h, layers), 1e-2, because="the control: it is trained")
        assert not close(mine, theirs[f"logits.{layer}"], 1e-2, because="the control: another layer's")
    with pytest.raises(LensError, match="made for the unembedding bd868c"):
        TunedLens.load(PACKAGE, cp.load_model(hf_model("llama", seed=1)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(unembed_hash="0" * 64), "made for the unembedding 000"),
        (dict(unembed_hash=None), "made for the unembedding None"),
        (dict(num_hidden_layers=4), r"it is for \(layers, width\) \(4, 32\)"),
        (dict(lens_type="rotation"), "only linear_tuned_lens"),
    ],
)
def test_foreign_artefacts_are_refused(tmp_path: Path, changes: dict, match: str) -> None:
    package_artefact(tmp_path, **changes)
    with pytest.raises(LensError, match=match):
        TunedLens.load(tmp_path, loaded())


def test_an_artefact_of_other_shapes_is_refused(tmp_path: Path) -> None:
    package_artefact(tmp_path)
    torch.save({"1.weight": torch.zeros(3)}, tmp_path / "params.pt")
    with pytest.raises(LensError, match=r"1.weight should be of shape \(32, 32\), it is \(3,\)"):
        TunedLens.load(tmp_path, loaded())


def test_the_command_trains_on_the_tasks_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a model with a tokenizer, from its directory to a lens that its model takes."""
    from cacheprobe.cli.train import tuned_lens
    from tests.models.test_load_model import tokenizer

    base, out = tmp_path / "model", tmp_path / "lens"
    hf_model().save_pretrained(base)
    tokenizer().save_pretrained(base)
    tuned_lens(model=str(base), out=out, steps=2, texts=4, length=16, held_out=2, progress=False)
    said = capsys.readouterr().out
    assert "layer  logit lens  tuned lens" in said and "128 tokens" in said and f"lens: {out}" in said
    lens = TunedLens.load(out, cp.load_model(str(base), dtype="float32"))
    assert lens.about["settings"]["steps"] == 2 and len(lens.about["kl_nats_tuned"]) == 2
    assert float(lens.weights.abs().max()) > 0


def test_divergences_of_the_definition() -> None:
    """KL from the model's output to the reading, over Python's own sums."""
    model = loaded()
    texts = torch.tensor([PROMPTS[0], PROMPTS[4][:5]])
    mine = divergences(model, cp.lenses.LogitLens(), texts)
    states = states_of(model, texts)
    for layer in range(2):
        said = model.read_out(states.layers[layer]).double().log_softmax(-1)
        output = states.output_logprobs_nats.double()
        slowly = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(output, said, strict=True)) / len(output)
        assert abs(float(mine[layer]) - slowly) < 1e-5 * max(1, slowly)
