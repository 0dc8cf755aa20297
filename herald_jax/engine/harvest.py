"""Takes a finished block's tokens: where the answer ends, what is shown, what the result says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from herald_jax.diffusion.stop import FinishReason, end_of, find_stop, held_back, tokens_for
from herald_jax.engine.config import GenerationConfig
from herald_jax.engine.request import Delta, Slot
from herald_jax.tokenizer import Tokenizer


class Harvest:
    """Ends answers by one generation's rules."""

    def __init__(
        self, generation: GenerationConfig, stop_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        """``stop_ids``: the model's, used unless the generation names its own."""
        own = generation.stop_token_ids
        self.stop_ids = stop_ids if own is None else own
        self.stop, self.tokenizer = generation.stop, tokenizer

    def take(self, slot: Slot, tokens: np.ndarray) -> FinishReason | None:
        """Adds the block int32 [B] to a slot's answer and brings its result up to date.

        Only generated positions count: a stop token in the prompt remainder ends nothing.

        Returns:
          Why the answer ends here, or None.
        """
        prompt = len(slot.request.prompt_ids)
        slot.generated += tokens[max(0, prompt - slot.start) :].tolist()
        count, reason = end_of(slot.generated, self.stop_ids, slot.request.max_new_tokens)
        ids, text = slot.generated[:count], ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(ids)
            at = find_stop(text, self.stop)
            if at is not None:
                text, reason = text[:at], "stop"
                ids = ids[: tokens_for(at, ids, self.tokenizer.decode)]
        slot.result.text, slot.result.token_ids = text, ids
        if reason is not None:
            slot.result.finish_reason = reason
        return reason

    def delta(self, slot: Slot, final: bool) -> Delta:
        """What has become certain since the last delta; all of it when ``final``."""
        text, ids = slot.result.text, slot.result.token_ids
        shown = len(text)
        if not final:
            shown = max(slot.emitted_text, shown - held_back(text, self.stop))
        count = len(ids)
        if shown < len(text) and self.tokenizer is not None:
            count = max(slot.emitted_tokens, tokens_for(shown, ids, self.tokenizer.decode))
        delta = Delta(
            slot.request.id, text[slot.emitted_text : shown], ids[slot.emitted_tokens : count]
        )
        slot.emitted_text, slot.emitted_tokens = shown, count
        return delta
