"""What a model family is: its Hugging Face words, its constants, what it was checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, known by its name.

    Attributes:
      name: its repository's name without the owner.
      parameters: how many numbers it holds.
      block_size, rule: what its config.json does not say and its name does; None for the family's.
    """

    name: str
    parameters: int
    block_size: int | None = None
    rule: str | None = None


@dataclass(frozen=True)
class Verified:
    """What a family was compared with.

    Attributes:
      oracle: an independent implementation of its network; ``tolerance``: the largest difference
        of logits in fp32 that the tests let pass.
      rules: generation rules whose greedy answers equal those of a loop over the oracle, token
        for token.
    """

    oracle: str
    tolerance: float
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One kind of network.

    Attributes:
      name: what ``ModelConfig.family`` and the tables call it.
      title: what people call it.
      model_types, architectures: the Hugging Face ``config.json`` values that select it.
      read: fields of ``ModelConfig`` that a config.json says in this family's own way; refuses
        what would compute something else.
      write: the entries of a config.json that ``read`` reads back.
      tensors: where every parameter lies.
      rule: name of the generation rule used unless the checkpoint or the user names another.
      block_size, mask_token_id, stop_token_ids: the published constants, used where the
        configuration does not state its own; None where the family has none.
      mask_literal: the text that its tokenizer must map to the mask id, where that is certain.
      chat_template: Jinja source used where a checkpoint comes without its own.
      checkpoints: published ones; ``verified``: what it was compared with.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[ModelConfig], Tensors]
    verified: Verified
    rule: str = "sdar"
    block_size: int | None = None
    mask_token_id: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    mask_literal: str | None = None
    chat_template: str | None = None
    checkpoints: tuple[Checkpoint, ...] = ()

    def checkpoint(self, name: str) -> Checkpoint | None:
        """The published checkpoint of this name, whatever its case."""
        return next((one for one in self.checkpoints if one.name.lower() == name.lower()), None)

    def stored(self, config: ModelConfig, path: str) -> tuple[str, tuple[Stored, ...]]:
        """The layer, as text, and the ways to store the parameter at a dotted path.

        Raises:
          ValueError: the family has no Hugging Face name for it.
        """
        parts = path.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        pattern = ".".join(["layers", "{i}", *parts[2:]]) if layer else path
        ways = self.tensors(config).get(pattern)
        if ways is None:
            raise ValueError(f"family {self.name} has no Hugging Face name for parameter {path}")
        return layer, ways


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
