"""The prompts that the study of recall decodes: the only place of it that knows a task."""

from __future__ import annotations

import random

from herald_jax.tokenizer import Tokenizer
from herald_jax.training.tasks import make_document, prompt_text

SEED = 3_000_017
#: Tokens left free for the question.
QUESTION = 32


def prompt_ids(tokenizer: Tokenizer, tokens: int, index: int) -> list[int]:
    """Token ids of the ``index``-th document of about ``tokens`` tokens with its question."""
    rng = random.Random(f"recall/{SEED}/{tokens}/{index}")
    costs: dict[str, int] = {}

    def cost(atom: str) -> int:
        if atom not in costs:
            costs[atom] = len(tokenizer.encode(atom))
        return costs[atom]

    document = make_document(rng, tokens - QUESTION, max(4, tokens // 64), cost)
    return tokenizer.encode(prompt_text(document.text, rng.choice(document.questions).text))
