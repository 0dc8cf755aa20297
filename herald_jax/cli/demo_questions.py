"""What ``herald demo`` asks: documents made from a seed, and questions whose answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from herald_jax.cli.console import Refused
from herald_jax.training import prose
from herald_jax.training.documents import Document, cost_of, make_document
from herald_jax.training.tasks import TASKS, Question, ask_one, make_item

TOKENS_PER_FACT = 64
#: Kept free of a document's tokens for the question and its answer.
RESERVE = 64
#: Documents made at most in search of a fitting one.
ATTEMPTS = 500


@dataclass(frozen=True)
class Asked:
    """A question after a document, as token ids, and its one right answer.

    Attributes:
      kind: "prose" or "table", where a short answer stands, or a name in ``tasks.TASKS``.
      blocks: how many generated blocks the answer takes.
    """

    kind: str
    question: str
    answer: str
    prompt: list[int]
    blocks: int


@dataclass(frozen=True)
class ShortTask:
    """Questions with short answers about one document of so many tokens and facts."""

    tokens: int
    facts: int
    asked: list[Asked]


class Maker:
    """Makes questions; equal tokenizers and seeds give equal ones.

    A prompt is prefilled but for its last, unfinished block, which the answer goes on with: after
    a prompt of ``n`` tokens the first generated block has room for ``B - n % B``.
    """

    def __init__(self, encode: Callable[[str], list[int]], block: int, seed: int) -> None:
        """Reads the prose that documents are filled with.

        Raises:
          Refused: this Python has none.
        """
        try:
            prose.sentences(held_out=True)
        except prose.NoProse as error:
            raise Refused(str(error)) from error
        self.encode, self.block, self.seed = encode, block, seed
        self._cost = cost_of(encode)

    def short(self, tokens: int, count: int) -> ShortTask:
        """``count`` questions about one document: half of it has facts in prose, half a table.

        The document with any question and answer takes at most ``tokens`` tokens. In either half
        one answer crosses into a second block, the others end in the first.

        Raises:
          Refused: no such document was found.
        """
        rng = random.Random(f"demo/short/{tokens}/{self.seed}")
        facts = max(count, tokens // TOKENS_PER_FACT)
        for _ in range(ATTEMPTS):
            shares = {"prose": facts // 2, "table": facts - facts // 2}
            halves = {kind: self._half(rng, kind, tokens, share) for kind, share in shares.items()}
            keys = [entry.key for half in halves.values() for entry in half.entries]
            text = " ".join(half.text for half in halves.values()).rstrip()
            length = len(self.encode(text))
            if len(set(keys)) < len(keys) or length > tokens - RESERVE:
                continue
            asked: list[Asked] = []
            for kind, half in halves.items():
                made = [self._asked(kind, text, ask_one(e, half)) for e in half.entries]
                far = [item for item in made if item.blocks > 1]
                near = [item for item in made if item.blocks == 1]
                wanted = count - len(asked) if asked else count // 2
                if far and len(near) >= wanted - 1:
                    asked += [rng.choice(far), *rng.sample(near, wanted - 1)]
            if len(asked) == count:
                return ShortTask(length, facts, asked)
        raise Refused(f"no document of {tokens} tokens has {count} such facts")

    def item(self, task: str, tokens: int, *, blocks: int = 1) -> Asked:
        """A question of a task in ``TASKS`` about a document of its own.

        Args:
          tokens: most tokens of prompt and answer together.
          blocks: fewest generated blocks that the answer takes.

        Raises:
          Refused: no such question was found.
        """
        rng = random.Random(f"demo/{task}/{tokens}/{self.seed}")
        for _ in range(ATTEMPTS):
            item = make_item(task, rng, tokens, self._cost)
            question = item.prompt.rpartition("Question: ")[2].partition("\nAnswer:")[0]
            asked = self._placed(task, question, item.answer, item.prompt)
            if asked.blocks >= blocks:
                return asked
        raise Refused(f"no {task} of {tokens} tokens has an answer of {blocks} blocks")

    def _half(self, rng: random.Random, kind: str, tokens: int, facts: int) -> Document:
        # Both kinds stand among ordinary prose where the task has any.
        style = TASKS["needle" if kind == "prose" else "table"].style
        return make_document(rng, (tokens - RESERVE) // 2, facts, self._cost, style)

    def _asked(self, kind: str, text: str, question: Question) -> Asked:
        prompt = text + question.prompt_text
        return self._placed(kind, question.text, question.answer_text, prompt)

    def _placed(self, kind: str, question: str, answer: str, prompt: str) -> Asked:
        ids = self.encode(prompt)
        last = len(ids) + len(self.encode(" " + answer)) - 1
        blocks = last // self.block - len(ids) // self.block + 1
        return Asked(kind, question, answer, ids, blocks)
