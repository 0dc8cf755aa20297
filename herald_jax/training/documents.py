"""Documents with facts to look up, made by rule: prose between facts, tables, references.

A document is a sequence of atoms: strings that the pre-tokenizer never splits or joins, so the
token ids of a text are the ids of its atoms in order and spans of tokens are known exactly.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from herald_jax.training import prose, words

Cost = Callable[[str], int]
Form = Literal["prose", "table"]


def cost_of(encode: Callable[[str], Sequence[int]]) -> Cost:
    """How many tokens an atom takes, remembered: documents repeat few atoms many times."""
    return functools.cache(lambda atom: len(encode(atom)))


@dataclass(frozen=True)
class Style:
    """What a document may contain.

    Attributes:
      adjectives, nouns, values: how many words of each list may occur in facts.
      digits: shortest and longest number; ``value_words``: fewest and most words of a word value.
      word_share: share of facts whose value is words rather than digits.
      passage: fewest and most words of a long value; ``passage_share``: share of such facts.
      table_share: share of documents whose facts stand in a table rather than in prose.
      repeat_share: share of keys that are stated several times, each time with another value.
      alias_share: share of keys that have, instead of a value, a reference to another key.
      mention_share: share of filler sentences that mention a key-like pair without a value.
      prose_share: share of documents whose filler is ordinary prose rather than made by rule.
      held_out: take the prose that is never trained on.
    """

    adjectives: int = len(words.ADJECTIVES)
    nouns: int = len(words.NOUNS)
    values: int = len(words.VALUE_WORDS)
    digits: tuple[int, int] = (3, 6)
    value_words: tuple[int, int] = (1, 2)
    word_share: float = 0.4
    passage: tuple[int, int] = (12, 48)
    passage_share: float = 0.0
    table_share: float = 0.35
    repeat_share: float = 0.0
    alias_share: float = 0.0
    mention_share: float = 0.1
    prose_share: float = 0.0
    held_out: bool = False


@dataclass(frozen=True)
class Sentence:
    """Atoms of one sentence; spans are [start, stop) in atoms and empty where there is no fact.

    ``key`` spans the asked name ("blue harbor"), ``value`` what to answer or, for a reference, the
    name referred to; the atom at ``value[1]`` ends the value (a full stop or a line break).
    """

    atoms: tuple[str, ...]
    key: tuple[int, int] = (0, 0)
    value: tuple[int, int] = (0, 0)

    @property
    def is_fact(self) -> bool:
        """Whether the sentence states something about a key."""
        return self.value[1] > 0


@dataclass(frozen=True)
class Entry:
    """What a document says about one key: its values in order, or the key it refers to."""

    key: str
    attribute: str
    values: tuple[str, ...]
    alias: str | None = None


@dataclass(frozen=True)
class Document:
    """Sentences in order and what they state; ``form`` is where the facts stand."""

    sentences: list[Sentence] = field(repr=False)
    entries: list[Entry]
    form: Form

    @property
    def text(self) -> str:
        """The document as one string."""
        return "".join(atom for sentence in self.sentences for atom in sentence.atoms)


def atoms_of(text: str) -> tuple[str, ...]:
    """Splits plain words and digits into atoms: " blue", " 4", "8"; no punctuation inside."""
    atoms: list[str] = []
    for word in text.split():
        atoms += [" " + word[0], *word[1:]] if word.isdigit() else [" " + word]
    return tuple(atoms)


def _value(rng: random.Random, style: Style) -> str:
    kind = rng.random()
    if kind < style.passage_share:
        # A long value is words, or numbers of a few digits each.
        if rng.random() < 0.25:
            count = rng.randint(style.passage[0] // 4, style.passage[1] // 4)
            return " ".join(_digits(rng, (2, 3)) for _ in range(max(1, count)))
        count = rng.randint(*style.passage)
        return " ".join(rng.choice(words.VALUE_WORDS[: style.values]) for _ in range(count))
    if rng.random() < style.word_share:
        count = rng.randint(*style.value_words)
        return " ".join(rng.choice(words.VALUE_WORDS[: style.values]) for _ in range(count))
    return _digits(rng, style.digits)


def _digits(rng: random.Random, length: tuple[int, int]) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(*length)))


def _fact(rng: random.Random, key: str, attribute: str, value: str, form: Form) -> Sentence:
    name, what, answer = atoms_of(key), atoms_of(attribute), atoms_of(value)
    shape = "table" if form == "table" else rng.choice(("of", "note", "for"))
    before: tuple[str, ...]
    between: tuple[str, ...]
    end: tuple[str, ...]
    if shape == "table":
        before, between, end = (" -",), (":",), ("\n",)
    elif shape == "of":
        before, between, end = (" The", *what, " of", " the"), (" is",), (".",)
    elif shape == "note":
        before, between, end = (" Note", " that", " the", *what, " of", " the"), (" is",), (".",)
    else:
        before, between, end = (" For", " the"), (",", " the", *what, " is"), (".",)
    key_span = (len(before), len(before) + len(name))
    start = key_span[1] + len(between)
    span = (start, start + len(answer))
    return Sentence((*before, *name, *between, *answer, *end), key_span, span)


def _reference(key: str, other: str, form: Form) -> Sentence:
    """ " The blue harbor has the same as the red mill." or its line in a table."""
    name, target = atoms_of(key), atoms_of(other)
    before: tuple[str, ...]
    between: tuple[str, ...]
    end: tuple[str, ...]
    if form == "table":
        before, between, end = (" -",), (":", " same", " as"), ("\n",)
    else:
        before, between, end = (" The",), (" has", " the", " same", " as", " the"), (".",)
    key_span = (len(before), len(before) + len(name))
    start = key_span[1] + len(between)
    span = (start, start + len(target))
    return Sentence((*before, *name, *between, *target, *end), key_span, span)


def _made(rng: random.Random, style: Style) -> Sentence:
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


def filler(rng: random.Random, room: int, cost: Cost, style: Style) -> list[Sentence]:
    """Sentences that state nothing and fill ``room`` tokens, but for less than one sentence."""
    filled: list[Sentence] = []
    ordinary = rng.random() < style.prose_share
    pool = prose.sentences(style.held_out) if ordinary else ()
    while True:
        sentence = Sentence((" " + rng.choice(pool),)) if ordinary else _made(rng, style)
        room -= sum(map(cost, sentence.atoms))
        if room < 0:
            return filled
        filled.append(sentence)


def _entries(rng: random.Random, facts: int, style: Style, form: Form) -> list[Entry]:
    keys: dict[str, None] = {}
    while len(keys) < facts:
        adjective = rng.choice(words.ADJECTIVES[: style.adjectives])
        keys[f"{adjective} {rng.choice(words.NOUNS[: style.nouns])}"] = None
    shared = rng.choice(words.ATTRIBUTES)
    entries: list[Entry] = []
    for key in keys:
        attribute = shared if form == "table" else rng.choice(words.ATTRIBUTES)
        stated = [entry for entry in entries if len(entry.values) == 1]
        if stated and rng.random() < style.alias_share:
            entries.append(Entry(key, attribute, (), rng.choice(stated).key))
            continue
        repeats = rng.randint(2, 4) if rng.random() < style.repeat_share else 1
        entries.append(Entry(key, attribute, tuple(_value(rng, style) for _ in range(repeats))))
    return entries


def make_document(
    rng: random.Random,
    tokens: int,
    facts: int,
    cost: Cost | None = None,
    style: Style | None = None,
    depth: float | None = None,
) -> Document:
    """Makes a document of at most ``tokens`` tokens about ``facts`` distinct keys.

    Args:
      rng: source of randomness; equal states give equal documents.
      tokens: length aimed at, reached within one sentence.
      facts: how many keys; the document may grow beyond ``tokens`` to hold them all.
      cost: tokens of one atom (``Encoder.cost``); one each when left out.
      style: what may occur; everything but long values and ordinary prose by default.
      depth: where the facts stand, 0 the beginning to 1 the end; everywhere when left out.

    Returns:
      The document; ``entries`` are in the order in which keys were drawn.

    Raises:
      ValueError: if the style has fewer keys than ``facts``.
    """
    style = style or Style()
    cost = cost or (lambda atom: 1)
    if facts > style.adjectives * style.nouns:
        raise ValueError(f"facts={facts} is more than the {style.adjectives * style.nouns} keys")
    form: Form = "table" if rng.random() < style.table_share else "prose"
    entries = _entries(rng, facts, style, form)
    stated: list[Sentence] = []
    for entry in entries:
        if entry.alias is not None:
            stated.append(_reference(entry.key, entry.alias, form))
        stated += [_fact(rng, entry.key, entry.attribute, value, form) for value in entry.values]
    given = list(stated)
    if form == "table":
        title = atoms_of(entries[0].attribute) if entries else ()
        given.insert(0, Sentence(("\n", "List", " of", " each", *title, ":", "\n")))
    room = tokens - sum(cost(atom) for sentence in given for atom in sentence.atoms)
    filled = filler(rng, room, cost, style)
    if form == "table":
        at = rng.randint(0, len(filled)) if depth is None else round(depth * len(filled))
        sentences = [*filled[:at], *given, *filled[at:]]
    else:
        sentences = filled
        if depth is None:
            places = [rng.randint(0, len(filled)) for _ in stated]
        else:
            places = [round(depth * len(filled))] * len(stated)
        mixed = _mixed(rng, stated)
        for place, sentence in reversed(list(zip(sorted(places), mixed, strict=True))):
            sentences.insert(place, sentence)
    return Document(_opened(sentences), entries, form)


def _mixed(rng: random.Random, stated: list[Sentence]) -> list[Sentence]:
    """In random order, but what is said of one key keeps its order: that of the answer."""
    keys = [sentence.atoms[slice(*sentence.key)] for sentence in stated]
    remaining = {key: [s for s, k in zip(stated, keys, strict=True) if k == key] for key in keys}
    return [remaining[key].pop(0) for key in rng.sample(keys, len(keys))]


def _opened(sentences: list[Sentence]) -> list[Sentence]:
    """The text starts without a space."""
    first = sentences[0]
    atoms = (first.atoms[0].removeprefix(" "), *first.atoms[1:])
    return [replace(first, atoms=atoms), *sentences[1:]]
