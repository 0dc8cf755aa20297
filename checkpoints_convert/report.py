"""What a conversion says: how a folder differs from its configuration, or what was done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from herald_jax.checkpoint_folder import CheckpointError
from herald_jax.models.config import ModelConfig

#: Entries of one kind that a message lists; a mixture has thousands of tensors.
LISTED = 20


class ConversionError(CheckpointError):
    """The tensors of a checkpoint are not those of its configuration.

    Attributes:
      missing, unexpected: tensor names.
      misshaped: "name: stored shape, expected shape".
      problems: what is wrong with the files themselves, or with the values in them.
    """

    def __init__(
        self,
        source: Path,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        misshaped: Iterable[str] = (),
        problems: Iterable[str] = (),
    ) -> None:
        # Parameters that share a tensor find the same fault in it.
        self.missing, self.unexpected = _once(missing), _once(unexpected)
        self.misshaped, self.problems = _once(misshaped), _once(problems)
        groups = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "mis-shaped": self.misshaped,
            "unusable": self.problems,
        }
        counts = ", ".join(f"{len(group)} {name}" for name, group in groups.items() if group)
        lines = [f"{source} does not match its config.json: {counts}"]
        for name, group in groups.items():
            lines += [f"  {name}: {entry}" for entry in _shortened(group)]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
      tensors: tensors read; ``parameters``: numbers written; ``nbytes``: their bytes.
      memory_bound: bytes of host memory the conversion may have added at its peak.
      notes: what was taken from the folder's name, and what was decided where the checkpoint
        contradicts itself.
    """

    source: str
    out: str
    config: ModelConfig
    dtype: str
    tensors: int
    parameters: int
    nbytes: int
    memory_bound: int
    seconds: float
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def _once(entries: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(entries))


def _shortened(entries: Sequence[str]) -> list[str]:
    more = len(entries) - LISTED
    return list(entries) if more <= 0 else [*entries[:LISTED], f"and {more} more"]
