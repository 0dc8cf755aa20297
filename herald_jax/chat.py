"""Conversations: which messages a chat template can take, and the text it makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Roles go into the prompt as they are, so they must not be able to end a turn.
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Messages reduced to a role and a content, both text.

    Raises:
      ValueError: there is none, or one is anything else.
    """
    if not messages:
        raise ValueError("there is no message: give at least one")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(f'message {index} needs "role" and "content", both strings')
        role, content = message["role"], message["content"]
        if not ROLE.fullmatch(role):
            raise ValueError(f"message {index} has the role {role!r}: name one, such as 'user'")
        # Clients write null for what they do not use; anything else would be lost without a word.
        others = sorted((set(message) - {"role", "content"}), key=str)
        for key in others:
            if message[key] is not None:
                raise ValueError(
                    f"message {index} has the field {key!r}: only role and content are read"
                )
        checked.append({"role": role, "content": content})
    return checked


def render(
    backend: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    *,
    enable_thinking: bool | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation.

    Args:
      backend: a tokenizer with a chat template.
      messages: as ``check_messages`` gives them.
      enable_thinking: handed to the template unless None.
      add_generation_prompt: end where the assistant's answer begins.

    Raises:
      ValueError: the template refuses the messages.
    """
    options: dict[str, Any] = (
        {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    )
    try:
        text = backend.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
    except Exception as error:
        # Templates are programs of their own and raise what they like.
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return str(text)


def refuse_dropped(
    backend: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    *,
    enable_thinking: bool | None = None,
) -> None:
    """Refuses messages that the chat template would leave out without a word.

    Each content is replaced by a mark of its own, which must come out again: a template may trim
    a message or take a part of it away, but not all of it.

    Raises:
      ValueError: a message would be left out; most templates do that with roles they lack.
    """
    marks = [f"\U00100000{index}\U00100001" for index in range(len(messages))]
    marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    text = render(backend, marked, enable_thinking=enable_thinking)
    for index, mark in enumerate(marks):
        if mark not in text:
            raise ValueError(
                f"the chat template leaves out message {index} with the role "
                f"{messages[index]['role']!r}: use the roles and the order it knows"
            )
