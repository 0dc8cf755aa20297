"""Training batches: one clean context and several branches that ask about it.

A batch row is ``[context (C) | branch 0 (S) | branch 1 (S) ...]``. Every branch continues the
context at position C: the last few tokens of the document, a question, its answer and the end of
text; or ordinary text with holes. One block of each branch is being decoded: some of its tokens
are masked. Where the branch starts inside a block is random, as prompts end anywhere in serving.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from herald_jax.training.documents import Document, Style, filler, make_document
from herald_jax.training.tasks import Question, make_question
from herald_jax.training.vocabulary import EOS_ID, MASK_ID, Encoder

NONE, ANSWER, END, FILL = range(4)
# What a branch may be; the last two are texts with holes: a piece of the context once more, and
# what follows the context (masked language modelling).
KINDS = ("one", "passage", "every", "several", "reference", "absent", "continue", "copy", "text")
Batch = dict[str, np.ndarray]
Span = tuple[int, int]


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum; batches of equal ``shape`` share a compiled program.

    Attributes:
      context: C, tokens of clean context, a multiple of the block size.
      rows: documents in a batch; ``branches``: questions asked of each.
      blocks: S in blocks.
      facts: fewest and most keys in a document.
      mix: shares of the kinds of branches, in any unit.
      supervised: whether the first layer's bindings are supervised.
      goals: accuracies, by kind, at which the stage is left; ``patience``: after so many steps it
        is left anyway, unless short answers are still mostly wrong.
    """

    name: str
    context: int
    rows: int
    branches: int
    facts: tuple[int, int]
    blocks: int = 2
    style: Style = field(default_factory=Style)
    mix: tuple[tuple[str, float], ...] = (("one", 1.0),)
    supervised: bool = True
    goals: tuple[tuple[str, float], ...] = (("one", 0.95),)
    patience: int = 1500

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What decides the compiled program."""
        return self.rows, self.context, self.branches, self.blocks


@dataclass(frozen=True)
class Branch:
    """One branch: clean tokens, tokens as the network sees them, what is scored, what is bound.

    ``bound`` holds (position, first and last token of the name it belongs to), in the branch.
    """

    kind: str
    clean: list[int]
    seen: list[int]
    classes: list[int]
    bound: list[tuple[int, int, int]]


def bindings(stage: Stage) -> int:
    """How many binding targets a row has room for."""
    return 24 * stage.branches + min(stage.context, 384)


def batch_shapes(stage: Stage, block: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of every array of a batch."""
    width = stage.context + stage.branches * stage.blocks * block
    room = bindings(stage)
    return {
        "tokens": ((stage.rows, width), np.int32),
        "targets": ((stage.rows, width), np.int32),
        "classes": ((stage.rows, width), np.int32),
        "kinds": ((stage.rows, stage.branches), np.int32),
        "bind": ((stage.rows, room, 3), np.int32),
        "bound": ((stage.rows, room), np.bool_),
    }


def _masked(rng: random.Random, slots: list[int]) -> list[int]:
    """Which of the slots are masked: all (the first decoding step), a suffix, or some."""
    kind = rng.random()
    if kind < 0.4 or len(slots) < 2:
        return slots
    if kind < 0.7:
        return slots[rng.randrange(len(slots)) :]
    rate = rng.random()
    return [slot for slot in slots if rng.random() < rate] or [rng.choice(slots)]


def ask(
    rng: random.Random, encoder: Encoder, tail: list[int], question: Question, size: int, block: int
) -> Branch | None:
    """A branch of ``size`` tokens that answers a question, or None where it does not fit."""
    prompt = len(question.prompt)
    ids, starts = encoder.encode((*question.prompt, *question.answer))
    if len(ids) + 1 > size:
        return None
    head = tail[: rng.randint(0, min(block - 1, size - len(ids) - 1))]
    start, end = len(head) + starts[prompt], len(head) + len(ids)
    clean = head + ids + [EOS_ID] * (size - end)
    current = rng.randint(start // block, end // block)
    low, high = max(start, current * block), (current + 1) * block
    seen, classes = list(clean), [NONE] * size
    for slot in _masked(rng, list(range(low, high))):
        seen[slot] = MASK_ID
        classes[slot] = ANSWER if slot < end else END if slot == end else FILL
    # Blocks after the current one do not exist yet; nothing that is scored sees them.
    seen[high:] = [MASK_ID] * (size - high)
    if ANSWER not in classes and END not in classes:
        return None
    bound = []
    for number, key in enumerate(question.keys):
        if key is None:
            continue
        first, last = len(head) + starts[key[0]], len(head) + starts[key[1]] - 1
        if MASK_ID in seen[first : last + 1]:
            continue
        at = len(head) + starts[prompt + number]
        until = at + 1 if at == end else len(head) + starts[prompt + number + 1]
        bound += [(s, first, last) for s in range(at, until) if classes[s] in (ANSWER, END)]
    return Branch(question.kind, clean, seen, classes, bound)


def fill_holes(rng: random.Random, kind: str, clean: list[int], block: int) -> Branch:
    """A text of whole blocks with holes in one of them."""
    size = len(clean)
    seen, classes = list(clean), [NONE] * size
    current, rate = rng.randrange(size // block), rng.uniform(0.1, 0.7)
    slots = range(current * block, (current + 1) * block)
    for slot in [slot for slot in slots if rng.random() < rate] or [rng.choice(slots)]:
        seen[slot], classes[slot] = MASK_ID, ANSWER
    seen[(current + 1) * block :] = [MASK_ID] * (size - (current + 1) * block)
    return Branch(kind, clean, seen, classes, [])


def _context(
    rng: random.Random, encoder: Encoder, stage: Stage, size: int
) -> tuple[Document, list[int], list[tuple[int, int, int]]]:
    """A document, ids of the context and the text after it, and the bindings of its values."""
    while True:
        count = rng.randint(*stage.facts)
        document = make_document(rng, stage.context, count, encoder.cost, stage.style)
        ids: list[int] = []
        bound = []
        for sentence in document.sentences:
            part, starts = encoder.encode(sentence.atoms)
            if sentence.is_fact:
                first, last = starts[sentence.key[0]], starts[sentence.key[1]] - 1
                values = range(starts[sentence.value[0]], starts[sentence.value[1]] + 1)
                bound += [(len(ids) + at, len(ids) + first, len(ids) + last) for at in values]
            ids += part
        if len(ids) > stage.context:
            continue
        while len(ids) < stage.context + size:
            for sentence in filler(rng, size + 256, encoder.cost, stage.style):
                ids += encoder.encode(sentence.atoms)[0]
        return document, ids, bound


def _branch(
    rng: random.Random,
    encoder: Encoder,
    stage: Stage,
    document: Document,
    ids: list[int],
    block: int,
) -> Branch:
    kinds, shares = zip(*stage.mix, strict=True)
    size, tail = stage.blocks * block, ids[stage.context :]
    while True:
        kind = rng.choices(kinds, shares)[0]
        if kind == "text":
            return fill_holes(rng, kind, tail[:size], block)
        if kind == "copy":
            at = rng.randint(0, stage.context - size)
            return fill_holes(rng, kind, ids[at : at + size], block)
        question = make_question(rng, kind, document)
        branch = question and ask(rng, encoder, tail, question, size, block)
        if branch:
            return branch


def make_batch(encoder: Encoder, stage: Stage, block: int, seed: int, index: int) -> Batch:
    """Makes batch ``index`` of a stage; equal arguments give equal arrays.

    Returns:
      ``tokens``, ``targets``, ``classes``: int32 [rows, C + branches * S]; ``kinds``: int32 [rows,
      branches], indices into ``KINDS``; ``bind``: int32 [rows, M, 3] (query, first and last token
      of a name, positions in the row); ``bound``: bool [rows, M], which of those are real.
    """
    rng = random.Random(f"{seed}/{index}")
    size, room = stage.blocks * block, bindings(stage)
    batch: Batch = {
        name: np.zeros(shape, dtype) for name, (shape, dtype) in batch_shapes(stage, block).items()
    }
    for row in range(stage.rows):
        document, ids, values = _context(rng, encoder, stage, size)
        batch["tokens"][row, : stage.context] = ids[: stage.context]
        slots: list[tuple[int, int, int]] = []
        for number in range(stage.branches):
            branch = _branch(rng, encoder, stage, document, ids, block)
            base = stage.context + number * size
            where = slice(base, base + size)
            batch["tokens"][row, where] = branch.seen
            batch["targets"][row, where] = branch.clean
            batch["classes"][row, where] = branch.classes
            batch["kinds"][row, number] = KINDS.index(branch.kind)
            slots += [(base + s, base + first, base + last) for s, first, last in branch.bound]
        rng.shuffle(slots)
        rng.shuffle(values)
        targets = slots[: 24 * stage.branches]
        targets += values[: room - len(targets)]
        batch["bind"][row, : len(targets)] = targets
        batch["bound"][row, : len(targets)] = True
    return batch
