"""Options of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, about: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": about, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """Options of a run; ``steps`` and ``seconds`` bound it, whichever comes first.

    The learning rate warms up over ``warmup`` steps and falls as a cosine over the last
    ``decay_share`` of the run. ``bind_weight`` fades to zero over ``fade`` steps once the last
    supervised stage is passed. Each field's metadata has its ``help`` and ``choices``.

    Raises:
      ValueError: one sentence that names the option.
    """

    seed: int = _option(0, "of weights and batches")
    steps: int = _option(1_000_000, "end after so many steps, or after --seconds")
    seconds: float = _option(540.0, "end after so many seconds of training, stops not counted")
    rate: float = _option(7e-4, "highest learning rate")
    warmup: int = _option(100, "steps over which the rate rises")
    decay_share: float = _option(0.35, "share of the run, its last, over which the rate falls")
    bind_weight: float = _option(0.5, "weight of the supervision of the first layer")
    fade: int = _option(300, "steps over which that weight fades once bindings are learned")
    workers: int = _option(0, "processes that make batches; 0: one a core, but for two cores")
    save_every: float = _option(60.0, "seconds between saves")
    dtype: str = _option(
        "float32",
        "of the computation; weights are kept in float32 while training",
        ("float32", "bfloat16"),
    )
    attention: str = _option(
        "xla", "implementation; cudnn needs a GPU and bfloat16", ("xla", "cudnn")
    )

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 1), ("fade", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{_named(self, name)} is too few: give {least} or more")
        for name in ("seconds", "rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{_named(self, name)} is not a number above 0: give one")
        for name in ("bind_weight", "save_every"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{_named(self, name)} is not 0 or a number above it: give one")
        if not 0 < self.decay_share <= 1:
            raise ValueError(
                f"{_named(self, 'decay_share')} is no share: give more than 0, up to 1"
            )
        for name, entry in type(self).__dataclass_fields__.items():
            choices = entry.metadata["choices"]
            if choices and getattr(self, name) not in choices:
                raise ValueError(f"{_named(self, name)} is unknown: use {' or '.join(choices)}")
        if self.attention == "cudnn" and self.dtype != "bfloat16":
            raise ValueError(
                f"--attention cudnn cannot compute in {self.dtype}: add --dtype bfloat16"
            )


def _named(settings: Settings, name: str) -> str:
    return f"--{name.replace('_', '-')} {getattr(settings, name)}"
