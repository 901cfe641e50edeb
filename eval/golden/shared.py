"""Golden models whose layers share keys and values; `make.py` makes them with the others.

The `kv-shared` models have layers that read the keys and values of an earlier one. No model of these
architectures does in transformers, so its layers are patched: where a layer shares, its projections to
k and v give what the owner's gave. The shared layers' own projections are not in the files.
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import make


def cases():
    """Models whose layers share keys and values: the case, the config's key, and who reads whom."""
    yield (
        make.llama("kv-shared", **make.SMALL, num_hidden_layers=4, tie_word_embeddings=True),
        dict(num_kv_shared_layers=2),
        [0, 1, 1, 1],
    )
    # Biases, and windows: a layer shares with the last one of its type.
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    yield (
        make.Case(
            "kv-shared-window",
            Qwen2ForCausalLM,
            Qwen2Config,
            **make.SMALL,
            num_hidden_layers=5,
            use_sliding_window=True,
            sliding_window=13,
            layer_types=kinds,
        ),
        dict(num_kv_shared_layers=2),
        [0, 1, 2, 1, 2],
    )
    # Norms of heads, and an owner that is not the last.
    yield (
        make.Case("kv-shared-map", Qwen3ForCausalLM, Qwen3Config, **make.SMALL, num_hidden_layers=4),
        dict(kv_share_map=[0, 0, 2, 0]),
        [0, 0, 2, 0],
    )


class Kept(torch.nn.Module):
    """A projection that keeps what it gave last."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, None

    def forward(self, x):
        self.last = self.inner(x)
        return self.last


class Borrowed(torch.nn.Module):
    """A projection that gives what another one gave last."""

    def __init__(self, owner):
        super().__init__()
        self.owner = [owner]  # In a list, so that it is no submodule.

    def forward(self, x):
        return self.owner[0].last


def share_kv(model, owners):
    """Lets layers read their owners' keys and values, before the rotation, which is the same."""
    layers = [layer.self_attn for layer in model.model.layers]
    for layer, owner in enumerate(owners):
        for name in ["k_proj", "v_proj"]:
            if layer == owner:
                setattr(layers[layer], name, Kept(getattr(layers[layer], name)))
            else:
                setattr(layers[layer], name, Borrowed(getattr(layers[owner], name)))
        if layer != owner and hasattr(layers[layer], "k_norm"):
            layers[layer].k_norm = layers[owner].k_norm


def make_one(case, key, owners, seed):
    make.make(case, seed, lambda model: share_kv(model, owners))
    folder = make.OUT / case.name
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **key}, indent=2) + "\n")
    shared = [f"layers.{layer}.self_attn.{part}" for layer, owner in enumerate(owners)
              if layer != owner for part in ["k_proj", "v_proj", "k_norm"]]  # fmt: skip
    state = load_file(folder / "model.safetensors")
    state = {name: value for name, value in state.items() if not any(part in name for part in shared)}
    save_file(state, folder / "model.safetensors", metadata=dict(format="pt"))


def make_all(only):
    for seed, (case, key, owners) in enumerate(cases()):
        if not only or only in case.name:
            make_one(case, key, owners, 4000 + seed)
            print(case.name)
