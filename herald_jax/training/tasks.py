"""Questions about a document, their answers, and what each answer token must look up.

The prompt is the document, a blank line, ``Question: ...`` and ``Answer:``; the answer follows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from herald_jax.training import words
from herald_jax.training.documents import Cost, Document, Entry, Style, atoms_of, make_document

UNKNOWN = " not stated"
# Tokens kept for question and answer, raised in steps when a question needs more.
RESERVE, RESERVE_STEP, ATTEMPTS = 32, 8, 400
# Answers of so many atoms count as passages: they go over several blocks.
LONG = 12
Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """A question in atoms, with its one right answer.

    ``about`` is the (first) name asked for, or how the sentence begins. ``prompt`` is all that
    follows the document, up to and including "Answer:" (and the beginning of a sentence that shall
    be continued). ``keys[i]`` is the span, in the atoms of prompt and answer together, of the name
    that answer atom ``i`` belongs to, or None; the last entry is that of the end of text.
    """

    kind: str
    about: str
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    keys: tuple[Span | None, ...]

    @property
    def prompt_text(self) -> str:
        """The prompt's part after the document."""
        return "".join(self.prompt)

    @property
    def answer_text(self) -> str:
        """The answer without the space or line break before it."""
        return "".join(self.answer).strip()

    @property
    def text(self) -> str:
        """The bare question."""
        return self.prompt_text.split("Question: ")[1].split("\nAnswer:")[0]


@dataclass(frozen=True)
class Item:
    """One thing to ask a model, as plain text.

    Attributes:
      guess: the answer to another such question: about the same document, or about another where
        the document has one fact.
      facts: keys of the document; ``depth``: where what is asked about stands, 0 first, 1 last.
    """

    prompt: str
    answer: str
    guess: str
    facts: int
    depth: float


@dataclass(frozen=True)
class Task:
    """Documents of one style and one kind of question.

    Attributes:
      kind: what ``make_question`` is asked for.
      tokens_per_fact: the document has a key for so many of its tokens, at least ``least`` and
        at most ``most``.
    """

    kind: str
    style: Style
    tokens_per_fact: int = 64
    least: int = 8
    most: int = 64

    def facts(self, tokens: int) -> int:
        """Keys of a document of ``tokens`` tokens."""
        return max(self.least, min(self.most, tokens // self.tokens_per_fact))


_NEEDLE = Style(table_share=0.0, prose_share=1.0, held_out=True, mention_share=0.0)
_TABLE = Style(table_share=1.0, prose_share=0.5, held_out=True)
TASKS = {
    "needle": Task("one", _NEEDLE, least=1, most=1),
    "prose": Task("one", replace(_NEEDLE, prose_share=0.0, mention_share=0.1)),
    "table": Task("one", _TABLE),
    "passage": Task("passage", replace(_NEEDLE, passage_share=1.0), 256, 2, 16),
    "several": Task("several", _TABLE),
    "every": Task("every", replace(_NEEDLE, repeat_share=0.5)),
    "reference": Task("reference", replace(_NEEDLE, alias_share=0.5)),
    "continue": Task("continue", _NEEDLE),
    "absent": Task("absent", _NEEDLE),
}


def _asked(body: tuple[str, ...], begun: tuple[str, ...] = ()) -> tuple[str, ...]:
    return ("\n\n", "Question", ":", *body, "\n", "Answer", ":", *begun)


def _named(prefix: tuple[str, ...], key: str, attribute: str) -> tuple[tuple[str, ...], Span]:
    """The question for one key, and the key's span in its prompt."""
    name = atoms_of(key)
    head = (*prefix, *atoms_of(attribute), " of", " the")
    start = 3 + len(head)
    return _asked((*head, *name, "?")), (start, start + len(name))


def ask_one(entry: Entry, document: Document) -> Question:
    """The value of one key, followed through a reference if there is one."""
    prompt, span = _named((" What", " is", " the"), entry.key, entry.attribute)
    values = entry.values or next(e.values for e in document.entries if e.key == entry.alias)
    answer = atoms_of(values[0])
    kind = "reference" if entry.alias else "one" if len(answer) < LONG else "passage"
    return Question(kind, entry.key, prompt, answer, (span,) * (len(answer) + 1))


def ask_absent(key: str, attribute: str) -> Question:
    """A key that the document does not have."""
    prompt, span = _named((" What", " is", " the"), key, attribute)
    answer = atoms_of(UNKNOWN)
    return Question("absent", key, prompt, answer, (span,) + (None,) * len(answer))


def ask_every(entry: Entry) -> Question:
    """All values of one key, in the order of the document."""
    prompt, span = _named((" What", " is", " every"), entry.key, entry.attribute)
    answer: tuple[str, ...] = ()
    for value in entry.values:
        answer += (",",) * bool(answer) + atoms_of(value)
    return Question("every", entry.key, prompt, answer, (span,) * (len(answer) + 1))


def ask_several(entries: list[Entry]) -> Question:
    """One line "key: value" for each of several keys, in the order of the question."""
    body: tuple[str, ...] = (" What", " belongs", " to")
    for number, entry in enumerate(entries):
        body += (",",) * bool(number) + (" the", *atoms_of(entry.key))
    prompt = _asked((*body, "?"))
    answer: tuple[str, ...] = ()
    keys: list[Span | None] = []
    for number, entry in enumerate(entries):
        name, value = atoms_of(entry.key), atoms_of(entry.values[0])
        lead = ("\n",) * bool(number) + (" -",)
        start = len(prompt) + len(answer) + len(lead)
        answer += (*lead, *name, ":", *value)
        # The line break after a value ends it, as the end of text does for the last.
        before: list[Span | None] = [None] * (len(lead) - bool(number) + len(name) + 1)
        keys += [*before, *[(start, start + len(name))] * (len(value) + 1)]
    return Question("several", entries[0].key, prompt, answer, tuple(keys))


def ask_continue(sentence: tuple[str, ...], begin: int) -> Question:
    """A sentence of the document, given its first ``begin`` atoms; the answer is the rest."""
    atoms = (" " + sentence[0].removeprefix(" "), *sentence[1:])
    body = (" How", " does", " this", " sentence", " go", " on", "?")
    known, rest = atoms[:begin], atoms[begin:]
    about = "".join(known).strip()
    return Question("continue", about, _asked(body, known), rest, (None,) * (len(rest) + 1))


def split_words(sentence: str) -> tuple[str, ...]:
    """An ordinary sentence cut before its spaces, so that no token crosses a cut."""
    parts = sentence.split(" ")
    return tuple(part if not number else " " + part for number, part in enumerate(parts))


def new_key(rng: random.Random, document: Document) -> str:
    """A name that the document has no fact about."""
    taken = {entry.key for entry in document.entries}
    text = document.text
    while True:
        key = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
        if key not in taken and key not in text:
            return key


def make_question(rng: random.Random, kind: str, document: Document) -> Question | None:
    """A question, or None where the document has nothing to ask for.

    Args:
      kind: "one" short value, a "passage", "every" value of one key, "several" keys, "reference",
        a key that refers to another, "absent", a key the document does not have, or "continue",
        a sentence.
    """
    entries = document.entries
    single = [entry for entry in entries if len(entry.values) == 1]
    if kind in ("one", "passage"):
        wanted = [e for e in single if (len(atoms_of(e.values[0])) >= LONG) == (kind == "passage")]
        return ask_one(rng.choice(wanted), document) if wanted else None
    if kind == "reference":
        aliases = [entry for entry in entries if entry.alias]
        return ask_one(rng.choice(aliases), document) if aliases else None
    if kind == "every":
        many = [entry for entry in entries if len(entry.values) > 1]
        return ask_every(rng.choice(many)) if many else None
    if kind == "several" and len(single) > 1:
        short = [entry for entry in single if len(atoms_of(entry.values[0])) < LONG]
        count = min(len(short), rng.randint(2, 5))
        return ask_several(rng.sample(short, count)) if count > 1 else None
    if kind == "absent":
        attribute = entries[0].attribute if entries else "label"
        return ask_absent(new_key(rng, document), attribute)
    if kind == "continue":
        filler = [s.atoms for s in document.sentences[1:] if not s.is_fact and s.atoms[0] != "\n"]
        for _ in range(8):
            if not filler:
                return None
            chosen = rng.choice(filler)
            atoms = split_words(chosen[0].strip()) if len(chosen) == 1 else chosen
            begin = rng.randint(3, 5)
            known = "".join(atoms[:begin]).strip()
            if len(atoms) > begin + 2 and document.text.count(known) == 1:
                return ask_continue(tuple(atoms), begin)
    return None


def make_item(task: str, rng: random.Random, tokens: int, cost: Cost) -> Item:
    """A fresh document with one question of a task in ``TASKS``.

    Prompt and answer together take at most ``tokens`` tokens, and fewer by a random number below
    32, by up to 8 for the question, and by less than one sentence of filler.

    Raises:
      ValueError: the task is unknown or the document too short for its facts.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown: use one of {', '.join(TASKS)}")
    chosen = TASKS[task]
    facts, room = chosen.facts(tokens), tokens - rng.randint(0, 31)
    reserve = RESERVE
    for _ in range(ATTEMPTS):
        depth = rng.random() if facts == 1 or chosen.style.table_share else None
        document = make_document(rng, room - reserve, facts, cost, chosen.style, depth)
        question = make_question(rng, chosen.kind, document)
        if question is None:
            continue
        asked = sum(map(cost, (*question.prompt, *question.answer)))
        if asked + _length(document, cost) <= room and asked >= reserve - RESERVE_STEP:
            other = document
            if facts == 1:
                other = make_document(rng, room - reserve, facts, cost, chosen.style, depth)
            guess = make_question(rng, chosen.kind, other) or question
            prompt = document.text.rstrip() + question.prompt_text
            depth = _depth(document, question)
            return Item(prompt, question.answer_text, guess.answer_text, facts, depth)
        reserve = -(-asked // RESERVE_STEP) * RESERVE_STEP
    raise ValueError(f"a document of {tokens} tokens is too short for task {task!r}")


def _length(document: Document, cost: Cost) -> int:
    return sum(cost(atom) for sentence in document.sentences for atom in sentence.atoms)


def _depth(document: Document, question: Question) -> float:
    """Where what is asked about begins, as a share of the document's sentences; 1 if nowhere."""
    for number, sentence in enumerate(document.sentences):
        name = "".join(sentence.atoms[slice(*sentence.key)]).strip()
        begun = "".join(sentence.atoms).strip().startswith(question.about)
        if name == question.about if sentence.is_fact else begun:
            return number / len(document.sentences)
    return 1.0
