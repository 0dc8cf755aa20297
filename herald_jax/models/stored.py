"""How parameters lie in Hugging Face checkpoints, and the names that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from herald_jax.models.config import ModelConfig


@dataclass(frozen=True)
class Stored:
    """How a parameter lies in a Hugging Face checkpoint.

    torch stores a projection as [out, in], Flax as [in, out].

    Attributes:
      name: the tensor's name; ``{i}`` is the layer, ``{e}`` the expert.
      transposed: its last two axes are swapped here.
      rows: (first, last, all) of the output axis, where one tensor holds several parameters.
      stacked: how many tensors, by expert, make up the parameter's first axis; 0 for one tensor.
    """

    name: str
    transposed: bool = False
    rows: tuple[int, int, int] | None = None
    stacked: int = 0

    def names(self, layer: str) -> tuple[str, ...]:
        """The names of all its tensors."""
        name = self.name.replace("{i}", layer)
        if not self.stacked:
            return (name,)
        return tuple(name.replace("{e}", str(expert)) for expert in range(self.stacked))

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that each of its tensors must have, from the parameter's."""
        shape = list(parameter[1:] if self.stacked else parameter)
        if self.transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        if self.rows is not None:
            shape[max(0, len(shape) - 2)] = self.rows[2]
        return tuple(shape)


#: Parameter path, with ``{i}`` for the layer -> ways to store it, the usual one first.
Tensors = Mapping[str, tuple[Stored, ...]]


def decoder_tensors() -> dict[str, tuple[Stored, ...]]:
    """The names that Llama, Qwen2, Qwen3 and their descendants share."""
    layer = "model.layers.{i}."
    names = {
        "embedding.embedding": Stored("model.embed_tokens.weight"),
        "norm.scale": Stored("model.norm.weight"),
        "lm_head.kernel": Stored("lm_head.weight", True),
        "layers.{i}.input_norm.scale": Stored(layer + "input_layernorm.weight"),
        "layers.{i}.mlp_norm.scale": Stored(layer + "post_attention_layernorm.weight"),
        "layers.{i}.attention.q_norm.scale": Stored(layer + "self_attn.q_norm.weight"),
        "layers.{i}.attention.k_norm.scale": Stored(layer + "self_attn.k_norm.weight"),
    }
    for part in "qkvo":
        name = f"{layer}self_attn.{part}_proj."
        names[f"layers.{{i}}.attention.{part}.kernel"] = Stored(name + "weight", True)
        names[f"layers.{{i}}.attention.{part}.bias"] = Stored(name + "bias")
    for part in ("gate", "up", "down"):
        names[f"layers.{{i}}.mlp.{part}.kernel"] = Stored(f"{layer}mlp.{part}_proj.weight", True)
    return {path: (way,) for path, way in names.items()}


def expert_tensors(config: ModelConfig) -> dict[str, tuple[Stored, ...]]:
    """The names of routed experts: one by one, stacked by kind, or gate and up in one tensor."""
    assert config.experts is not None
    experts, inner = config.experts.count, config.experts.intermediate_size
    folder = "model.layers.{i}.mlp.experts."
    fused = {"gate": (0, inner, 2 * inner), "up": (inner, 2 * inner, 2 * inner)}
    found = {}
    for part in ("gate", "up", "down"):
        ways = [
            Stored(f"{folder}{{e}}.{part}_proj.weight", True, stacked=experts),
            Stored(f"{folder}{part}_proj", True),
            Stored(f"{folder}{part}_proj.weight", True),
        ]
        if part in fused:
            ways.append(Stored(f"{folder}gate_up_proj", True, rows=fused[part]))
        found[f"layers.{{i}}.mlp.experts.{part}"] = tuple(ways)
    return found
