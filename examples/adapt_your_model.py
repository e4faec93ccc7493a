"""Adapt your own model: wrap it, watch it, save it, reset it.

Runs in under a minute on a CPU, without a download: `python examples/adapt_your_model.py`. The cells (`# %%`) open as a
notebook in editors that know the format, and in Jupyter with jupytext. Needs `pip install '.[demo]'`.
"""

# %% [markdown]
# ## Your model and your images
#
# Use any `nn.Module` that takes a batch of images and returns logits `[batch, classes]`. Here it is a small network
# trained on MNIST inside a class of your own. It normalises the images itself.

# %%
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import dpl
from dpl.demo.digits import load_source_network, uci_digits


class MyClassifier(nn.Module):
    """A network of your own. The library knows nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, _ = load_source_network()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, 10]."""
        logits: Tensor = self.body(images.clamp(0, 1))
        return logits


network = MyClassifier().eval()
images, labels = uci_digits()  # other writers and scanners; the labels only measure accuracy
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[:384]
batches = [order[start : start + 32] for start in range(0, len(order), 32)]

# %% [markdown]
# ## Before
#
# Measure the model without adaptation first. Everything else is compared with it.


# %%
@torch.no_grad()
def accuracy_of_source() -> float:
    """Return the accuracy of the unadapted network, in percent."""
    return 100 * float((network(images[order]).argmax(dim=1) == labels[order]).float().mean())


source = accuracy_of_source()
print(f"source: {source:.1f} %")

# %% [markdown]
# ## Adapt
#
# `guard=True` compares the adapted model with the source model, without labels, and stops adaptation that does harm.
# Each batch is predicted before the model adapts to it.

# %%
model = dpl.adapt(network, "dpl", lr=1e-4, guard=True)
print(f"{len(model.trainable)} tensors train, for instance {model.trainable[:2]}")

correct = 0
for number, rows in enumerate(batches):
    logits = model(images[rows])
    correct += int((logits.argmax(dim=1) == labels[rows]).sum())
    if number % 4 == 3:
        seen = 32 * (number + 1)
        print(f"after {seen} images: {100 * correct / seen:.1f} % so far, {model.last.confident:.0%} confident")

adapted = 100 * correct / len(order)
print(f"adapting: {adapted:.1f} % over the whole stream, {adapted - source:+.1f} against the source model")

# %% [markdown]
# ## What the guard did
#
# Nothing, on this stream. The same update with cross-entropy (`pl`) collapses, and the guard stops it.

# %%
print(f"events with dpl: {len(model.guard.events) if model.guard else 0}")
risky = dpl.adapt(network, "pl", lr=1e-4, guard=True)
for rows in batches[:10]:
    risky(images[rows])
events = list(risky.guard.events) if risky.guard else []
print(f"events with pl: {[event.action for event in events]}; predicted by: {risky.last.guard['answered_by']}")

# %% [markdown]
# ## Save and load
#
# A snapshot holds weights, optimizer, memory and random state, without pickle. The loaded model makes the same
# predictions.

# %%
with tempfile.TemporaryDirectory() as folder:
    snapshot = model.save(Path(folder) / "today")
    again = dpl.load(snapshot, network)
    first = images[order[:32]]
    print("equal predictions after loading:", torch.equal(again.predict(first), model.predict(first)))

# %% [markdown]
# ## Reset, or export the weights
#
# `reset` restores the source model. `model.model` is an ordinary module with your own parameter names, which you can
# use without this library.

# %%
weights = {name: value.clone() for name, value in model.model.state_dict().items()}
model.reset()
unchanged = all(torch.equal(value, network.state_dict()[name]) for name, value in model.model.state_dict().items())
print("weights after reset equal the source model's:", unchanged)

plain = MyClassifier()
plain.load_state_dict(weights)
with torch.no_grad():
    end = 100 * float((plain.eval()(images[order]).argmax(dim=1) == labels[order]).float().mean())
print(f"the adapted weights in a plain network: {end:.1f} % on the same images")
