"""Documents with facts to look up, made by rule: filler sentences, facts in prose, tables.

A document is a sequence of atoms: strings that the pre-tokenizer never splits or joins, so the
token ids of a text are the ids of its atoms in order and spans of tokens are known exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from herald_jax.training import words

Cost = Callable[[str], int]


@dataclass(frozen=True)
class Style:
    """What a document may contain.

    Attributes:
      adjectives, nouns, values: how many words of each list may occur in facts.
      digits: shortest and longest number; ``value_words``: fewest and most words of a word value.
      word_share: share of facts whose value is words rather than digits.
      table_share: share of documents whose facts stand in a table rather than in prose.
      mention_share: share of filler sentences that mention a key-like pair without a value.
    """

    adjectives: int = len(words.ADJECTIVES)
    nouns: int = len(words.NOUNS)
    values: int = len(words.VALUE_WORDS)
    digits: tuple[int, int] = (3, 6)
    value_words: tuple[int, int] = (1, 2)
    word_share: float = 0.4
    table_share: float = 0.35
    mention_share: float = 0.1


@dataclass(frozen=True)
class Question:
    """A question about the document and its one right answer, both plain text."""

    text: str
    answer: str


@dataclass(frozen=True)
class Sentence:
    """Atoms of one sentence; spans are [start, stop) in atoms and empty where there is no fact.

    ``key`` is the asked name ("blue harbor"), ``value`` what to answer, and the atom at
    ``value[1]`` ends the value (a full stop or a line break).
    """

    atoms: tuple[str, ...]
    key: tuple[int, int] = (0, 0)
    value: tuple[int, int] = (0, 0)
    question: tuple[str, ...] = ()
    question_key: tuple[int, int] = (0, 0)

    @property
    def is_fact(self) -> bool:
        """Whether the sentence states a value."""
        return self.value[1] > 0


@dataclass(frozen=True)
class Document:
    """A text, the questions that it answers (in order of their facts), and its sentences."""

    text: str
    questions: list[Question]
    sentences: list[Sentence] = field(repr=False, default_factory=list)


def atoms_of(text: str) -> tuple[str, ...]:
    """Splits plain words and digits into atoms: " blue", " 4", "8"; no punctuation inside."""
    atoms: list[str] = []
    for word in text.split():
        atoms += [" " + word[0], *word[1:]] if word.isdigit() else [" " + word]
    return tuple(atoms)


def prompt_text(document: str, question: str) -> str:
    """Joins document and question exactly as in training; the answer follows after a space."""
    return f"{document.rstrip()}\n\nQuestion: {question}\nAnswer:"


def question_atoms(attribute: str, key: str) -> tuple[tuple[str, ...], tuple[int, int]]:
    """Atoms of what ``prompt_text`` appends to a document, and the span of the key in them."""
    head = ("\n\n", "Question", ":", " What", " is", " the", *atoms_of(attribute), " of", " the")
    name = atoms_of(key)
    tail = ("?", "\n", "Answer", ":")
    return (*head, *name, *tail), (len(head), len(head) + len(name))


def _value(rng: random.Random, style: Style) -> str:
    if rng.random() < style.word_share:
        count = rng.randint(*style.value_words)
        return " ".join(rng.choice(words.VALUE_WORDS[: style.values]) for _ in range(count))
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(*style.digits)))


def _fact(rng: random.Random, key: str, attribute: str, value: str, table: bool) -> Sentence:
    name, what, answer = atoms_of(key), atoms_of(attribute), atoms_of(value)
    form = "table" if table else rng.choice(("of", "note", "for"))
    before: tuple[str, ...]
    between: tuple[str, ...]
    end: tuple[str, ...]
    if form == "table":
        before, between, end = (" -",), (":",), ("\n",)
    elif form == "of":
        before, between, end = (" The", *what, " of", " the"), (" is",), (".",)
    elif form == "note":
        before, between, end = (" Note", " that", " the", *what, " of", " the"), (" is",), (".",)
    else:
        before, between, end = (" For", " the"), (",", " the", *what, " is"), (".",)
    key_span = (len(before), len(before) + len(name))
    start = key_span[1] + len(between)
    question, question_key = question_atoms(attribute, key)
    return Sentence(
        (*before, *name, *between, *answer, *end),
        key_span,
        (start, start + len(answer)),
        question,
        question_key,
    )


def _filler(rng: random.Random, style: Style) -> Sentence:
    who, what, when = rng.choice(words.PEOPLE), rng.choice(words.THINGS), rng.choice(words.TIMES)
    action, manner = rng.choice(words.ACTIONS), rng.choice(words.MANNERS)
    if rng.random() < style.mention_share:
        place = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
        text = f"The {who} {action} the {what} near the {place}"
    elif rng.random() < 0.5:
        text = f"The {who} {action} the {what} {manner} before {when}"
    else:
        text = f"After {when} the {who} {action} a {what} and the {rng.choice(words.THINGS)}"
    return Sentence((*atoms_of(text), "."))


def make_document(
    rng: random.Random,
    tokens: int,
    facts: int,
    cost: Cost | None = None,
    style: Style | None = None,
) -> Document:
    """Makes a document of at most ``tokens`` tokens with ``facts`` facts of distinct keys.

    Args:
      rng: source of randomness; equal states give equal documents.
      tokens: length aimed at, reached within one sentence.
      facts: how many facts; the document may grow beyond ``tokens`` to hold them all.
      cost: tokens of one atom (``Encoder.cost``); one each when left out.
      style: what may occur; everything by default.

    Returns:
      The document; ``questions[i]`` asks for its i-th fact.

    Raises:
      ValueError: if the style has fewer keys than ``facts``.
    """
    style = style or Style()
    cost = cost or (lambda atom: 1)
    if facts > style.adjectives * style.nouns:
        raise ValueError(f"facts={facts} is more than the {style.adjectives * style.nouns} keys")
    keys: dict[str, None] = {}
    while len(keys) < facts:
        adjective = rng.choice(words.ADJECTIVES[: style.adjectives])
        keys[f"{adjective} {rng.choice(words.NOUNS[: style.nouns])}"] = None
    table = rng.random() < style.table_share
    shared = rng.choice(words.ATTRIBUTES)
    stated = [
        _fact(
            rng, key, shared if table else rng.choice(words.ATTRIBUTES), _value(rng, style), table
        )
        for key in keys
    ]
    heading = Sentence(("\n", "List", " of", " each", *atoms_of(shared), ":", "\n"))
    given = [heading, *stated] if table else stated
    room = tokens - sum(cost(atom) for sentence in given for atom in sentence.atoms)
    filler: list[Sentence] = []
    while True:
        sentence = _filler(rng, style)
        room -= sum(cost(atom) for atom in sentence.atoms)
        if room < 0:
            break
        filler.append(sentence)
    if table:
        at = rng.randint(0, len(filler))
        sentences = [*filler[:at], *given, *filler[at:]]
    else:
        sentences = filler
        places = sorted(rng.randint(0, len(filler)) for _ in stated)
        for place, sentence in reversed(list(zip(places, stated, strict=True))):
            sentences.insert(place, sentence)
    return as_document(sentences)


def as_document(sentences: list[Sentence]) -> Document:
    """Joins sentences; the text starts without a space and the atoms follow suit."""
    first = sentences[0]
    sentences = [
        replace(first, atoms=(first.atoms[0].removeprefix(" "), *first.atoms[1:])),
        *sentences[1:],
    ]
    questions = []
    for sentence in sentences:
        if sentence.is_fact:
            text = "".join(sentence.question).removeprefix("\n\nQuestion: ")
            answer = "".join(sentence.atoms[slice(*sentence.value)]).strip()
            questions.append(Question(text.removesuffix("\nAnswer:"), answer))
    text = "".join(atom for sentence in sentences for atom in sentence.atoms)
    return Document(text, questions, sentences)
