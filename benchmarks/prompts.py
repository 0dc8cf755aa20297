"""The prompts that the study of recall decodes: the only place of it that knows a task."""

from __future__ import annotations

import random

from herald_jax.tokenizer import Tokenizer
from herald_jax.training.documents import cost_of
from herald_jax.training.tasks import make_item

SEED = 3_000_017


def prompt_ids(tokenizer: Tokenizer, task: str, tokens: int, index: int) -> list[int]:
    """Token ids of the ``index``-th document of about ``tokens`` tokens with its question."""
    rng = random.Random(f"recall/{SEED}/{task}/{tokens}/{index}")
    return tokenizer.encode(make_item(task, rng, tokens, cost_of(tokenizer.encode)).prompt)
