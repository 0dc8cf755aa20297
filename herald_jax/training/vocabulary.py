"""The embedded model's tokenizer: a byte-level BPE trained on the synthetic documents."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from herald_jax.training import prose, words
from herald_jax.training.documents import make_document
from herald_jax.training.tasks import UNKNOWN, make_question

EOS, MASK = "<|endoftext|>", "<|mask|>"
EOS_ID, MASK_ID = 0, 1
# Line breaks, words, single digits and punctuation never merge across one another, so atoms of
# the generators are pre-tokens and digits keep one token each.
PATTERN = r"\n+| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def corpus(seed: int, documents: int) -> Iterator[str]:
    """Yields generated documents with their questions, ordinary prose, and every listed word."""
    ordinary = prose.sentences()  # first, so that its absence is told before the long work
    rng = random.Random(seed)
    for _ in range(documents):
        document = make_document(rng, 400, rng.randint(1, 16))
        question = make_question(rng, "one", document)
        yield document.text + question.prompt_text + UNKNOWN if question else document.text
    yield from ordinary
    # Often enough that every word of the lists becomes one token.
    for name in ("ADJECTIVES", "NOUNS", "VALUE_WORDS", "PEOPLE", "ACTIONS", "THINGS", "TIMES"):
        yield (" " + " ".join(getattr(words, name))) * 100


def build_tokenizer(vocab_size: int = 4096, seed: int = 0, documents: int = 2000) -> Tokenizer:
    """Trains the tokenizer; equal arguments give an equal tokenizer.

    Args:
      vocab_size: entries including 256 bytes, end of text (id 0) and mask (id 1).
      seed, documents: of the training text.

    Returns:
      The tokenizer; its vocabulary may stay smaller than ``vocab_size``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, documents), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, readable by transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Encoder:
    """Token ids of atoms, remembered: documents repeat few atoms many times."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    @classmethod
    def load(cls, path: Path) -> Encoder:
        """Reads ``tokenizer.json``."""
        return cls(Tokenizer.from_file(str(path)))

    def ids(self, atom: str) -> list[int]:
        """Ids of one atom."""
        found = self._ids.get(atom)
        if found is None:
            found = self._ids[atom] = self.tokenizer.encode(atom).ids
        return found

    def cost(self, atom: str) -> int:
        """How many tokens an atom takes."""
        return len(self.ids(atom))

    def encode(self, atoms: Sequence[str]) -> tuple[list[int], list[int]]:
        """Ids of a sequence of atoms, and where each atom starts (with the end appended)."""
        ids: list[int] = []
        starts: list[int] = []
        for atom in atoms:
            starts.append(len(ids))
            ids += self.ids(atom)
        return ids, [*starts, len(ids)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids up to the first end of text."""
        kept: list[int] = []
        for token in ids:
            if token == EOS_ID:
                break
            kept.append(int(token))
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))
