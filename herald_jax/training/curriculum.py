"""What is learned in which order, and the shapes of the networks that learn it."""

from __future__ import annotations

import random

from herald_jax.models.config import ModelConfig
from herald_jax.training.data import Stage
from herald_jax.training.documents import Style
from herald_jax.training.vocabulary import EOS_ID, MASK_ID

# Short answers that are less often right keep a stage open, however long it takes.
MOSTLY = 0.8
# Share of batches that rehearse an earlier stage, so that short contexts stay in the mix.
REHEARSAL = 0.2

SINGLE = Style(digits=(1, 1), value_words=(1, 1), mention_share=0.0)
SHORT = Style(digits=(2, 4), value_words=(1, 2), mention_share=0.0)
FULL = Style()
MIXED = Style(passage_share=0.2, repeat_share=0.12, alias_share=0.15, prose_share=0.5)
MIX = (
    ("one", 0.22),
    ("passage", 0.22),
    ("several", 0.12),
    ("every", 0.08),
    ("reference", 0.08),
    ("absent", 0.04),
    ("continue", 0.08),
    ("copy", 0.1),
    ("text", 0.06),
)
GOALS = (("one", 0.95), ("passage", 0.75), ("copy", 0.9), ("continue", 0.8))


def stages(name: str) -> list[Stage]:
    """The curriculum called ``name``: "tiny" for one GPU, "micro" for a quick run on a CPU.

    First values of one token, then of several, then all kinds of questions, then longer contexts
    with more facts; each stage is left as its goals and patience say.
    """
    lengths: tuple[int, ...]
    if name == "micro":
        rows, branches, lengths = 8, 4, (96, 192)
    elif name == "tiny":
        rows, branches, lengths = 32, 8, (128, 256, 512, 1024, 2048, 4096, 8192)
    else:
        raise ValueError(f"curriculum={name!r} is not one of 'tiny', 'micro'")
    first = lengths[0]
    few = (2, first // 16)
    plan = [
        Stage("single tokens", first, rows, branches, few, style=SINGLE),
        Stage("short values", first, rows, branches, few, style=SHORT),
        Stage("full values", first, rows, branches, few, style=FULL),
        Stage(
            "all kinds",
            lengths[1],
            rows,
            branches,
            (2, lengths[1] // 32),
            3,
            MIXED,
            MIX,
            goals=GOALS,
            patience=3000,
        ),
    ]
    for length in lengths[2:]:
        # The number of tokens in a batch stays about the same; each document is asked more.
        scale = max(1, length // 512)
        plan.append(
            Stage(
                f"{length} tokens",
                length,
                max(4, rows // scale),
                min(24, branches * scale),
                (1, min(64, length // 32)),
                3,
                MIXED,
                MIX,
                supervised=False,
                goals=GOALS,
                patience=600,
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
    shapes = {"tiny": (256, 6, 8, 2, 64, 768), "micro": (96, 3, 4, 2, 32, 192)}
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
        max_position_embeddings=8192,
        block_size=32,
        mask_token_id=MASK_ID,
        stop_token_ids=(EOS_ID,),
        exact_layers=1,
    )
