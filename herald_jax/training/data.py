"""Training batches: one clean context and several branches that ask about it.

A batch row is ``[context (C) | branch 0 (S) | branch 1 (S) ...]``. Every branch continues the
context at position C: the last few tokens of the document, a question, its answer and the end of
text. One block of each branch is being decoded: some of its answer tokens are masked. Where the
branch starts inside a block is random, as prompts end anywhere in serving.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from herald_jax.training.tasks import Document, Sentence, Style, make_document
from herald_jax.training.vocabulary import EOS_ID, MASK_ID, Encoder

NONE, ANSWER, END, FILL, COPY = range(5)
BRANCH_BLOCKS = 2
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum; batches of equal ``shape`` share a compiled program.

    Attributes:
      context: C, tokens of clean context, a multiple of the block size.
      rows: documents in a batch; ``branches``: questions asked of each.
      facts: fewest and most facts in a document.
      copy_share: share of branches that repeat a span of the context with holes.
      supervised: whether the first layer's bindings are supervised.
    """

    name: str
    context: int
    rows: int
    branches: int
    facts: tuple[int, int]
    style: Style = field(default_factory=Style)
    copy_share: float = 0.1
    supervised: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """What decides the compiled program."""
        return self.rows, self.context, self.branches


@dataclass(frozen=True)
class _Fact:
    """Token positions of a fact in the context; ``stop`` ends the value."""

    sentence: Sentence
    key: tuple[int, int]
    start: int
    stop: int


def bindings(stage: Stage) -> int:
    """How many binding targets a row has room for."""
    return 12 * stage.branches + min(stage.context, 256)


def batch_shapes(stage: Stage, block: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of every array of a batch."""
    width = stage.context + stage.branches * BRANCH_BLOCKS * block
    room = bindings(stage)
    return {
        "tokens": ((stage.rows, width), np.int32),
        "targets": ((stage.rows, width), np.int32),
        "classes": ((stage.rows, width), np.int32),
        "bind": ((stage.rows, room, 3), np.int32),
        "bound": ((stage.rows, room), np.bool_),
    }


def _locate(document: Document, encoder: Encoder, context: int) -> tuple[list[int], list[_Fact]]:
    ids: list[int] = []
    facts = []
    for sentence in document.sentences:
        part, starts = encoder.encode(sentence.atoms)
        base = len(ids)
        ids += part
        if sentence.is_fact and base + starts[sentence.value[1]] < context:
            first, last = base + starts[sentence.key[0]], base + starts[sentence.key[1]] - 1
            value = base + starts[sentence.value[0]], base + starts[sentence.value[1]]
            facts.append(_Fact(sentence, (first, last), *value))
    return ids, facts


def _masked(rng: random.Random, slots: list[int]) -> list[int]:
    """Which of the slots are masked: all (the first decoding step), a suffix, or some."""
    kind = rng.random()
    if kind < 0.4 or len(slots) < 2:
        return slots
    if kind < 0.7:
        return slots[rng.randrange(len(slots)) :]
    rate = rng.random()
    return [slot for slot in slots if rng.random() < rate] or [rng.choice(slots)]


def _ask(
    rng: random.Random, encoder: Encoder, tail: list[int], fact: _Fact, block: int
) -> tuple[list[int], list[int], list[int], tuple[int, int]] | None:
    """A question branch: tokens, masked tokens, classes and the key's positions in it."""
    size = BRANCH_BLOCKS * block
    question, starts = encoder.encode(fact.sentence.question)
    answer, _ = encoder.encode(fact.sentence.atoms[slice(*fact.sentence.value)])
    need = len(question) + len(answer) + 1
    if need > size:
        return None
    head = tail[: rng.randint(0, min(block - 1, size - need))]
    start = len(head) + len(question)
    clean = head + question + answer
    end = len(clean)
    clean += [EOS_ID] * (size - end)
    current = rng.randint(start // block, end // block)
    low, high = max(start, current * block), (current + 1) * block
    seen = list(clean)
    classes = [NONE] * size
    for slot in _masked(rng, list(range(low, high))):
        seen[slot] = MASK_ID
        classes[slot] = ANSWER if slot < end else END if slot == end else FILL
    # Blocks after the current one do not exist yet; nothing that is scored sees them.
    seen[high:] = [MASK_ID] * (size - high)
    if not any(kind in (ANSWER, END) for kind in classes):
        return None
    key = fact.sentence.question_key
    return clean, seen, classes, (len(head) + starts[key[0]], len(head) + starts[key[1]] - 1)


def _copy(
    rng: random.Random, encoder: Encoder, tail: list[int], ids: list[int], context: int, block: int
) -> tuple[list[int], list[int], list[int]]:
    """A copying branch: a span of the context again, with holes in its second block."""
    size = BRANCH_BLOCKS * block
    head = tail[: rng.randint(0, block // 2)] + encoder.ids("\n\n")
    length = min(size - len(head), context // 2)
    source = rng.randint(0, context - length)
    clean = head + ids[source : source + length]
    clean += [EOS_ID] * (size - len(clean))
    seen, classes = list(clean), [NONE] * size
    rate = rng.uniform(0.1, 0.7)
    for slot in range(block, len(head) + length):
        if rng.random() < rate:
            seen[slot], classes[slot] = MASK_ID, COPY
    return clean, seen, classes


def make_batch(encoder: Encoder, stage: Stage, block: int, seed: int, index: int) -> Batch:
    """Makes batch ``index`` of a stage; equal arguments give equal arrays.

    Returns:
      ``tokens``, ``targets``, ``classes``: int32 [rows, C + branches * S]; ``bind``: int32
      [rows, M, 3] (query, first and last key token, positions in the row); ``bound``: bool
      [rows, M], which of those are real.
    """
    rng = random.Random(f"{seed}/{index}")
    size, room = BRANCH_BLOCKS * block, bindings(stage)
    batch: Batch = {
        name: np.zeros(shape, dtype) for name, (shape, dtype) in batch_shapes(stage, block).items()
    }
    for row in range(stage.rows):
        while True:
            count = rng.randint(*stage.facts)
            document = make_document(rng, stage.context + block, count, encoder.cost, stage.style)
            ids, facts = _locate(document, encoder, stage.context)
            if len(ids) >= stage.context and facts:
                break
        tail = ids[stage.context :][: block - 1]
        batch["tokens"][row, : stage.context] = ids[: stage.context]
        slots: list[tuple[int, int, int]] = []
        for branch in range(stage.branches):
            base = stage.context + branch * size
            if rng.random() < stage.copy_share:
                clean, seen, classes = _copy(rng, encoder, tail, ids, stage.context, block)
            else:
                asked = _ask(rng, encoder, tail, rng.choice(facts), block)
                while asked is None:
                    asked = _ask(rng, encoder, tail, rng.choice(facts), block)
                clean, seen, classes, (first, last) = asked
                slots += [
                    (base + slot, base + first, base + last)
                    for slot, kind in enumerate(classes)
                    if kind in (ANSWER, END)
                ]
            where = slice(base, base + size)
            batch["tokens"][row, where] = seen
            batch["targets"][row, where] = clean
            batch["classes"][row, where] = classes
        values = [(at, *fact.key) for fact in facts for at in range(fact.start, fact.stop + 1)]
        rng.shuffle(values)
        targets = (slots + values)[:room]
        batch["bind"][row, : len(targets)] = targets
        batch["bound"][row, : len(targets)] = True
    return batch
