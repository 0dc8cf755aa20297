"""Training state on disk: exact for resuming, and exported the Hugging Face way for converting."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from herald_jax.models.config import ModelConfig
from herald_jax.training.loss import Params, optimizer


@dataclass
class Progress:
    """Where a run stands; everything but the weights and moments.

    ``recent`` holds the accuracies by kind of the newest batches of the reached stage, which was
    opened at step ``opened``; ``released`` is the step at which the binding supervision began to
    fade, or -1. ``chosen`` holds the stages of the batches from ``step`` on that were asked for
    already, ``unread`` stage and metrics of the last steps, which are not in ``history`` yet.
    ``plan`` names the stages of the curriculum.
    """

    step: int = 0
    reached: int = 0
    opened: int = 0
    seconds: float = 0.0
    released: int = -1
    recent: list[dict[str, float]] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    unread: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)


def save_state(folder: Path, params: Params, moments: Any, progress: Progress) -> None:
    """Writes everything a run needs to go on as if it had never stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves((params, moments))
    partial = folder / "state.partial.npz"
    arrays = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    # The counters travel in the same file, so that a stop between two writes cannot split them.
    text = np.frombuffer(json.dumps(asdict(progress)).encode(), np.uint8)
    np.savez(partial, progress=text, **arrays)  # type: ignore[arg-type]
    partial.replace(folder / "state.npz")


def load_state(folder: Path, params: Params) -> tuple[Params, Any, Progress]:
    """Reads what ``save_state`` wrote; ``params`` gives the shapes.

    Raises:
      ValueError: the saved weights are those of another network, or the file is damaged.
    """
    like = (params, optimizer().init(params))
    leaves, tree = jax.tree.flatten(like)
    broken = f"{folder}/state.npz is no state of a training run: use another --out"
    other = f"{folder}/state.npz belongs to another network; use another --model or --out"
    try:
        with np.load(folder / "state.npz") as saved:
            if len(saved.files) != len(leaves) + 1:
                raise ValueError(other)
            loaded = [jax.numpy.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))]
            progress = Progress(**json.loads(saved["progress"].tobytes()))
    except ValueError as error:
        if str(error) == other:
            raise
        raise ValueError(broken) from error
    except (OSError, EOFError, KeyError, TypeError, UnpicklingError, BadZipFile) as error:
        raise ValueError(broken) from error
    if any(old.shape != new.shape for old, new in zip(leaves, loaded, strict=True)):
        raise ValueError(other)
    progress.unread = [(number, metrics) for number, metrics in progress.unread]
    restored_params, restored_moments = jax.tree.unflatten(tree, loaded)
    return restored_params, restored_moments, progress


def hf_tensors(params: Params) -> dict[str, np.ndarray]:
    """Tensors under their Hugging Face names and orientation (linear weights are [out, in])."""
    tensors = {
        "model.embed_tokens.weight": params["embedding"]["embedding"],
        "model.norm.weight": params["norm"]["scale"],
    }
    for index, layer in params["layers"].items():
        prefix = f"model.layers.{index}"
        attention, mlp = layer["attention"], layer["mlp"]
        tensors[f"{prefix}.input_layernorm.weight"] = layer["input_norm"]["scale"]
        tensors[f"{prefix}.post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        for name in ("q", "k", "v", "o"):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = attention[name]["kernel"].T
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = attention[name]["scale"]
        for name in ("gate", "up", "down"):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = mlp[name]["kernel"].T
    return {
        name: np.ascontiguousarray(np.asarray(tensor, np.float32).astype(ml_dtypes.bfloat16))
        for name, tensor in tensors.items()
    }


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of an SDAR checkpoint, with the block size and the mask written down."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "bos_token_id": None,
        "eos_token_id": config.stop_token_ids[0],
        "pad_token_id": config.stop_token_ids[0],
        "torch_dtype": "bfloat16",
        "herald": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "stop_token_ids": list(config.stop_token_ids),
            "exact_layers": config.exact_layers,
        },
    }


def export(folder: Path, config: ModelConfig, params: Params) -> None:
    """Writes config.json and model.safetensors (bfloat16)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n")
    save_file(hf_tensors(params), folder / "model.safetensors", metadata={"format": "pt"})
