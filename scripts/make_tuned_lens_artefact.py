"""Write a lens with the tuned-lens package itself, and its readings, for tests/lenses/test_tuned_lens.py.

    pip install --no-deps tuned-lens==0.2.0 simple-parsing docstring-parser
    python scripts/make_tuned_lens_artefact.py

In an environment of its own beside what this project needs: the package asks for other versions, and its lenses run
with these. The model is the tiny llama of the tests, with random weights; the lens is trained on random tokens for a
moment, so that its translators are no longer zero.
"""

import sys
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import save_file

from cacheprobe_benchmarks.shared.tiny import VOCAB, tiny_model

sys.modules["transformer_lens"] = None  # the package asks it for a class that it no longer has
TunedLens = import_module("tuned_lens.nn.lenses").TunedLens

FOLDER = Path(__file__).parent.parent / "tests" / "fixtures" / "tuned_lens_package"
STEPS, RATE, TOKENS = 60, 0.3, 48


def main() -> None:
    model = tiny_model("llama")
    lens = TunedLens.from_model(model)
    generator = torch.Generator().manual_seed(0)
    parameters = list(lens.layer_translators.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True)
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (4, TOKENS), generator=generator)
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        wanted = out.logits.log_softmax(-1)
        losses = [
            (wanted.exp() * (wanted - lens(hidden, i).log_softmax(-1))).sum(-1).mean()
            for i, hidden in enumerate(out.hidden_states[:-1])
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    print("divergence by hidden state, nats:", [round(loss.item(), 3) for loss in losses])
    lens.save(FOLDER)
    ids = torch.randint(VOCAB, (1, 6), generator=generator)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[:-1]
        said = {f"logits.{i}": lens(h, i)[0].contiguous() for i, h in enumerate(hidden)}
    save_file(said | {f"hidden.{i}": h[0].contiguous() for i, h in enumerate(hidden)}, FOLDER / "read.safetensors")
    print(f"wrote {FOLDER}")


if __name__ == "__main__":
    main()
