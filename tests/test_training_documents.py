"""Documents, questions about them, and items, read again by rules of their own."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import chain, product

import pytest
from training_reader import FACT, KEY, SHIPPED, check_answer, read

from herald_jax.training import curriculum, prose, words
from herald_jax.training.documents import Document, Style, make_document
from herald_jax.training.tasks import TASKS, make_item, make_question
from herald_jax.training.vocabulary import Encoder, build_tokenizer


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load(SHIPPED)


@pytest.fixture(scope="module", params=["shipped", "small"])
def any_encoder(request: pytest.FixtureRequest, encoder: Encoder) -> Encoder:
    """With few entries most words take several tokens."""
    if request.param == "shipped":
        return encoder
    return Encoder(build_tokenizer(vocab_size=1500, documents=200))


STYLES = [
    replace(base, table_share=table, prose_share=ordinary)
    for base, table, ordinary in product(
        (Style(), replace(curriculum.MIXED, repeat_share=0.4, alias_share=0.4)), (0, 1), (0, 1)
    )
]


@pytest.mark.parametrize("style", STYLES, ids=range(len(STYLES)))
def test_documents_state_what_their_entries_say(encoder: Encoder, style: Style) -> None:
    for seed, facts in enumerate((0, 1, 5, 20)):
        made, again = (
            make_document(random.Random(seed), 1500, facts, encoder.cost, style) for _ in range(2)
        )
        assert made == again
        assert made != make_document(random.Random(99), 1500, facts, encoder.cost, style)
        values, aliases = read(made.text)
        assert values == {e.key: list(e.values) for e in made.entries if e.values}
        assert aliases == {e.key: e.alias for e in made.entries if e.alias}
        assert all(len(values[other]) == 1 for other in aliases.values())
        assert len(made.entries) == facts
        # The first word is made without its space, which may cost it tokens.
        spaced = re.sub(r"^(?=\w)", " ", made.text)
        assert len(encoder.tokenizer.encode(spaced).ids) <= 1500 or facts == 20


@pytest.mark.parametrize("table_share", [0.0, 1.0])
def test_facts_stand_at_the_depth_asked_for(encoder: Encoder, table_share: float) -> None:
    style = Style(table_share=table_share)
    for depth in (0.0, 0.5, 1.0):
        text = make_document(random.Random(1), 1000, 3, encoder.cost, style, depth).text
        at = [found.start() / len(text) for found in FACT.finditer(text)]
        assert max(abs(place - depth) for place in at) < 0.12


def test_too_many_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="facts=5 is more than the 4 keys"):
        make_document(random.Random(0), 100, 5, style=Style(adjectives=2, nouns=2))


def same_tokens(encoder: Encoder, atoms: list[str]) -> bool:
    return encoder.encode(atoms)[0] == encoder.tokenizer.encode("".join(atoms)).ids


@pytest.mark.parametrize("task", TASKS)
def test_ids_of_atoms_are_the_ids_of_the_text(any_encoder: Encoder, task: str) -> None:
    chosen, asked = TASKS[task], 0
    for seed, ordinary in product(range(6), (0.0, 1.0)):
        style = replace(chosen.style, prose_share=ordinary)
        rng = random.Random(seed)
        document = make_document(rng, 900, min(8, chosen.most), any_encoder.cost, style)
        atoms = [atom for sentence in document.sentences for atom in sentence.atoms]
        assert same_tokens(any_encoder, atoms)
        question = make_question(rng, chosen.kind, document)
        if question is None:
            continue
        asked += 1
        assert question.text in question.prompt_text
        if atoms[-1] == "\n":
            atoms.pop()
        atoms += [*question.prompt, *question.answer]
        assert same_tokens(any_encoder, atoms)
        check_answer(document.text, question.prompt_text, question.answer_text)
        words_of = [*question.prompt, *question.answer]
        assert len(question.keys) == len(question.answer) + 1
        for span in filter(None, question.keys):
            assert re.fullmatch(KEY, "".join(words_of[slice(*span)]).strip())
    assert asked >= 6


def depth_of(document: str, question: str) -> float:
    """Share of the sentences (lines, in a table) before what is asked about; 1 where nowhere."""
    sentences = re.findall(r"[^.!?\n]+[.!?\n]", f"{document}\n")
    begun = question.split("\nAnswer:")[1].strip()
    asked = re.findall(KEY, question)[:1]
    for number, sentence in enumerate(sentences):
        values, aliases = read(sentence)
        if sentence.strip().startswith(begun) if begun else asked == [*values, *aliases]:
            return number / len(sentences)
    return 1.0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [256, 700])
def test_items_are_right_and_fit(encoder: Encoder, task: str, tokens: int) -> None:
    kind = TASKS[task].kind
    longest = max(encoder.cost(f" {sentence}") for sentence in prose.sentences(True))
    for seed in range(12):
        item, again = (make_item(task, random.Random(seed), tokens, encoder.cost) for _ in "ab")
        assert item == again
        assert item.facts == TASKS[task].facts(tokens)
        document, question = item.prompt.split("\n\nQuestion: ")
        check_answer(document, f"Question: {question}", item.answer)
        used = len(encoder.tokenizer.encode(f"{item.prompt} {item.answer}").ids)
        assert tokens - 40 - longest <= used <= tokens
        assert item.depth == pytest.approx(depth_of(document, question))
        # A guess has the form of an answer: it answers another such question.
        values = list(chain(*read(document)[0].values()))
        if kind in ("passage", "reference") or task in ("prose", "table"):
            assert item.guess in values
        if kind == "every":
            assert set(item.guess.split(", ")) <= set(values)
        if kind == "absent":
            assert item.guess == item.answer
    guesses = {make_item(task, random.Random(n), tokens, encoder.cost).guess for n in range(12)}
    assert len(guesses) > 6 or kind == "absent"


def test_unknown_tasks_and_short_documents_are_refused(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="task 'poem' is unknown: use one of needle, prose"):
        make_item("poem", random.Random(0), 500, encoder.cost)
    with pytest.raises(ValueError, match="40 tokens is too short for task 'table'"):
        make_item("table", random.Random(0), 40, encoder.cost)


def test_every_listed_word_is_one_token(encoder: Encoder) -> None:
    for name in ("ADJECTIVES", "NOUNS", "VALUE_WORDS", "PEOPLE", "ACTIONS", "THINGS", "TIMES"):
        assert all(encoder.cost(f" {word}") == 1 for word in getattr(words, name))


def test_documents_can_be_empty_of_facts() -> None:
    document = make_document(random.Random(0), 200, 0)
    assert isinstance(document, Document)
    assert make_question(random.Random(0), "one", document) is None
    assert make_question(random.Random(0), "absent", document) is not None


def test_digits_and_punctuation_stand_alone(any_encoder: Encoder) -> None:
    split = any_encoder.tokenizer.pre_tokenizer.pre_tokenize_str(" 408, red.\n\n Blue")
    pieces = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in split]
    assert pieces == [" 4", "0", "8", ",", " red", ".", "\n\n", " Blue"]
