"""What a model family is: its Hugging Face words, its constants, what it was checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from herald_jax.models.config import ModelConfig
from herald_jax.models.stored import Stored, Tensors


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
