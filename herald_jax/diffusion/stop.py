"""Where an answer ends: stop tokens, stop strings, the length limit; on generated tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

FinishReason = Literal["stop", "length"]


def end_of(
    generated: Sequence[int], stop_ids: Sequence[int], limit: int
) -> tuple[int, FinishReason | None]:
    """Length of the answer within ``generated`` and why it ends there.

    Args:
      generated: tokens after the prompt, in order; never the prompt remainder.
      stop_ids: ids that end the answer; the first one found is not part of it.
      limit: the request's ``max_new_tokens``.

    Returns:
      (number of answer tokens, "stop" | "length" | None when the answer goes on).
    """
    stops = set(stop_ids)
    for index, token in enumerate(generated[:limit]):
        if token in stops:
            return index, "stop"
    if len(generated) >= limit:
        return limit, "length"
    return len(generated), None


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Index of the earliest stop string in ``text``, or None."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return min(found, default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may still become part of a stop string or a character.

    Streaming holds these back so that the deltas joined equal the final text.
    """
    solid = text.rstrip("\ufffd")
    tail = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(solid)), 0, -1):
            if solid.endswith(stop[:size]):
                tail = max(tail, size)
                break
    return len(text) - len(solid) + tail


def tokens_for(text_length: int, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """Fewest leading tokens whose text reaches ``text_length`` characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[:middle])) >= text_length:
            high = middle
        else:
            low = middle + 1
    return low
