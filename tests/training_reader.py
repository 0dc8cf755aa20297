"""Reads documents of the generator by rules of its own: what they state, and what is right."""

from __future__ import annotations

import re
from pathlib import Path

import herald_jax
from herald_jax.training import words
from herald_jax.training.tasks import UNKNOWN

BLOCK = 32
SHIPPED = Path(herald_jax.__file__).parent / "assets/herald_tiny/tokenizer.json"
ATTRIBUTE = "|".join(words.ATTRIBUTES)
KEY = rf"(?:{'|'.join(words.ADJECTIVES)}) (?:{'|'.join(words.NOUNS)})"
FACT = re.compile(
    rf"^ - (?P<a>{KEY}): (?P<av>.+)$"
    rf"|[Tt]he (?:{ATTRIBUTE}) of the (?P<b>{KEY}) is (?P<bv>[a-z0-9 ]+)\."
    rf"|For the (?P<c>{KEY}), the (?:{ATTRIBUTE}) is (?P<cv>[a-z0-9 ]+)\."
    rf"|The (?P<d>{KEY}) has the (?P<dv>same as) the (?P<other>{KEY})\.",
    re.MULTILINE,
)


def read(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What a text states: values of every key in the order of the text, and references."""
    values: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    for found in FACT.finditer(text):
        key = next(found[name] for name in "abcd" if found[name])
        value = next(found[name] for name in ("av", "bv", "cv", "dv") if found[name])
        if found["other"] or value.startswith("same as "):
            aliases[key] = found["other"] or value.removeprefix("same as ")
        else:
            values.setdefault(key, []).append(value)
    return values, aliases


def answer_of(document: str, question: str) -> str | None:
    """The right answer by reading; None for sentences to continue, which have no one rule."""
    values, aliases = read(document)
    asked = question.split("Question: ")[1].split("\nAnswer:")[0]
    keys = re.findall(rf"the ({KEY})", asked)
    if asked.startswith("How does this sentence go on?"):
        return None
    if asked.startswith("What belongs to"):
        assert all(len(values[key]) == 1 for key in keys)
        return "\n".join(f" - {key}: {values[key][0]}" for key in keys).strip()
    (key,) = keys
    if key not in values and key not in aliases:
        assert key not in document
        return UNKNOWN.strip()
    stated = values[aliases.get(key, key)]
    if asked.startswith("What is every"):
        assert len(stated) > 1
        return ", ".join(stated)
    assert len(stated) == 1
    return stated[0]


def check_answer(document: str, question: str, answer: str) -> None:
    expected = answer_of(document, question)
    if expected is not None:
        assert answer == expected
        return
    begun = question.split("\nAnswer:")[1].strip()
    assert document.count(begun) == 1
    after = document.split(begun)[1]
    assert after.startswith(f" {answer}")
    assert answer[-1] in ".!?"
    assert after[len(answer) + 1 :][:1] in ("", " ", "\n")
