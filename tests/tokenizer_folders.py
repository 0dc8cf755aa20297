"""Tokenizer folders made on the spot: one id a byte, then reserved tokens at ids of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(
    special: Mapping[str, int],
    plain: Mapping[str, int] | None = None,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """A byte-level BPE without merges.

    Args:
      special: ids of tokens that are flagged special.
      plain: ids of further added tokens that are not.
      normalizer: through which also the added tokens are looked for; NFC, and not, if absent.
    """
    plain = plain or {}
    # Tokens that the model has already keep their ids when they are added.
    vocab = {c: i for i, c in enumerate(BYTES)} | dict(special) | dict(plain)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.normalizer = normalizers.NFC() if normalizer is None else normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    seen = normalizer is not None
    backend.add_special_tokens([AddedToken(text, normalized=seen) for text in special])
    backend.add_tokens([AddedToken(text, normalized=seen) for text in plain])
    return backend


def write(folder: Path, special: Mapping[str, int], plain: Mapping[str, int] | None = None) -> Path:
    """Writes ``tokenizer.json`` alone."""
    folder.mkdir(exist_ok=True)
    byte_level(special, plain).save(str(folder / "tokenizer.json"))
    return folder
