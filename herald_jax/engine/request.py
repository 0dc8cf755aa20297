"""Requests, what comes back for them, and their JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from herald_jax.kv.full_pool import Booking

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Overrides:
    """Generation options that a request sets for itself; None takes those of the call."""

    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
      id: the caller's name for it.
      prompt_ids: int32 [P], P >= 1.
      max_new_tokens: tokens generated at most.
      own: options of this request alone.
    """

    id: str
    prompt_ids: np.ndarray
    max_new_tokens: int
    own: Overrides = Overrides()

    def rows(self, block_size: int) -> int:
        """Positions reserved: prompt + max_new_tokens, rounded up to whole blocks."""
        return -(-(len(self.prompt_ids) + self.max_new_tokens) // block_size) * block_size


@dataclass
class Result:
    """What one request produced.

    Attributes:
      text: the answer, without the stop token or stop string.
      token_ids: the answer's tokens, cut the same way.
      finish_reason: "stop", "length" or "error" (then ``error`` is one sentence).
      prompt_tokens, completion_tokens: counts; prompt and stop token are not completion.
      seconds: from admission to the end; ``prefill_seconds``: of which prefill.
      blocks, steps: denoised blocks and forward passes this request took part in.
    """

    id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: Finish = "length"
    error: str | None = None
    prompt_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    blocks: int = 0
    steps: int = 0

    @property
    def completion_tokens(self) -> int:
        """Delivered tokens."""
        return len(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        """The output line of ``--requests``."""
        line: dict[str, Any] = {
            "id": self.id,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
        }
        if self.error is not None:
            line["error"] = self.error
        line["usage"] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        line["timing"] = {
            "seconds": round(self.seconds, 4),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "blocks": self.blocks,
            "steps": self.steps,
        }
        return line


@dataclass(frozen=True)
class Delta:
    """Committed text of one more block of a request, for streaming; deltas joined give the text."""

    id: str
    text: str
    token_ids: list[int]


@dataclass(eq=False)
class Slot:
    """A request being decoded, and what the batch must remember of it.

    Attributes:
      lead: where logits are shifted, the token that the pass before the block at ``start`` said.
    """

    request: Request
    booking: Booking | None
    result: Result
    start: int = 0
    seed: int = 0
    lead: int | None = None
    generated: list[int] = field(default_factory=list)
    selected: int = 0
    emitted_text: int = 0
    emitted_tokens: int = 0
    admitted_at: float = 0.0

    def block(self, block_size: int, mask_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [B] and mask bool [B] of the block at ``start`` before its first step."""
        tokens = np.full(block_size, mask_id, np.int32)
        masked = np.ones(block_size, bool)
        head = self.request.prompt_ids[self.start : self.start + block_size]
        tokens[: len(head)] = head
        masked[: len(head)] = False
        if self.lead is not None and not len(head):
            tokens[0], masked[0] = self.lead, False
        return tokens, masked

    def is_last(self, block_size: int) -> bool:
        """Whether the block at ``start`` is the last one the request has room for."""
        return self.start + block_size >= self.request.rows(block_size)


def failed(request: Request, error: str) -> Result:
    """The result of a request that could not be served."""
    return Result(
        request.id,
        finish_reason="error",
        error=error,
        prompt_tokens=len(request.prompt_ids),
    )
