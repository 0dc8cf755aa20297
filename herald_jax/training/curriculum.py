"""What is learned in which order, and the shapes of the networks that learn it."""

from __future__ import annotations

import random

from herald_jax.models.config import ModelConfig
from herald_jax.training.data import Stage
from herald_jax.training.tasks import Style
from herald_jax.training.vocabulary import EOS_ID, MASK_ID

ADVANCE_AT = 0.95
# A stage that stays below that for so many steps is left too, if it is mostly right.
PATIENCE, PATIENT_AT = 2500, 0.8
# Share of batches that rehearse an earlier stage, so that short contexts stay in the mix.
REHEARSAL = 0.25

SINGLE = Style(digits=(1, 1), value_words=(1, 1), mention_share=0.0)
SHORT = Style(digits=(2, 4), value_words=(1, 2), mention_share=0.0)
FULL = Style()


def stages(name: str) -> list[Stage]:
    """The curriculum called ``name``: "tiny" for one GPU, "micro" for a quick run on a CPU.

    Every stage is left once answers are right at ``ADVANCE_AT``: first values of one token, then
    of several tokens, then longer contexts with more facts.
    """
    lengths: tuple[int, ...]
    if name == "micro":
        rows, branches, lengths = 8, 4, (96, 192)
    elif name == "tiny":
        rows, branches, lengths = 32, 8, (128, 512, 1024)
    else:
        raise ValueError(f"curriculum={name!r} is not one of 'tiny', 'micro'")
    first = lengths[0]
    plan = [
        Stage("single tokens", first, rows, branches, (2, first // 16), SINGLE),
        Stage("short values", first, rows, branches, (2, first // 16), SHORT),
        Stage("full values", first, rows, branches, (2, first // 16), FULL),
    ]
    for length in lengths[1:]:
        # The number of tokens in a batch stays about the same; each document is asked more.
        scale = max(1, length // 512)
        plan.append(
            Stage(
                f"{length} tokens",
                length,
                max(8, rows // scale),
                branches if name == "micro" else min(16, branches * scale),
                (2, length // 24),
                FULL,
                supervised=False,
            )
        )
    return plan


def choose(plan: list[Stage], reached: int, seed: int, index: int) -> int:
    """Which stage batch ``index`` belongs to, ``reached`` being the newest one open."""
    rng = random.Random(f"stage/{seed}/{index}")
    first = min(2, reached)
    if rng.random() < REHEARSAL and reached > first:
        return rng.randrange(first, reached)
    return reached


def model_config(name: str, vocab_size: int) -> ModelConfig:
    """The network called ``name``: "tiny" is the embedded model, "micro" a study of it."""
    shapes = {"tiny": (256, 4, 8, 2, 64, 768), "micro": (96, 2, 4, 2, 32, 192)}
    if name not in shapes:
        raise ValueError(f"model={name!r} is not one of 'tiny', 'micro'")
    hidden, layers, heads, kv_heads, head_dim, inner = shapes[name]
    return ModelConfig(
        family="sdar",
        vocab_size=-(-vocab_size // 64) * 64,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        block_size=32,
        mask_token_id=MASK_ID,
        stop_token_ids=(EOS_ID,),
        exact_layers=1,
    )
