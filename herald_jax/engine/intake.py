"""Reads prompts: text, chat messages or token ids become requests, or say why they cannot."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields as options_of
from typing import Any

import numpy as np

from herald_jax.diffusion.rules import Strategy, check_options
from herald_jax.engine.request import Overrides, Request, Result, failed
from herald_jax.models.config import ModelConfig
from herald_jax.tokenizer import Tokenizer, check_ids

Prompt = str | Sequence[int] | Mapping[str, Any]

#: Options a request may set for itself.
OWN = tuple(option.name for option in options_of(Overrides))
FIELDS = ("id", "prompt", "messages", "prompt_ids", "max_new_tokens", "enable_thinking", *OWN)


class Intake:
    """Turns prompts into requests for one model; a bad one harms no other."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_context: int | None,
        *,
        strategy: Strategy = "dynamic",
    ) -> None:
        """Reads for one generation.

        Args:
          max_context: the engine's limit in tokens besides the model's own.
          strategy: of the generation's rule; a request's own threshold needs "dynamic".
        """
        self.config, self.tokenizer, self.max_context = config, tokenizer, max_context
        self.strategy = strategy

    def read(self, index: int, prompt: Prompt, max_new_tokens: int, chat: bool) -> Request | Result:
        """Reads one prompt.

        Args:
          index: its place, and its id unless it has one.
          prompt: text, token ids, or a mapping with some of ``FIELDS``.
          max_new_tokens: unless the mapping says otherwise.
          chat: wrap text in the model's chat template.

        Returns:
          A request, or a failed result with one sentence.
        """
        fields: dict[str, Any]
        if isinstance(prompt, Mapping):
            fields = dict(prompt)
        else:
            fields = {"prompt" if isinstance(prompt, str) else "prompt_ids": prompt}
        name = str(fields.get("id", index))
        if not _is_text(name):
            return failed(_nobody(str(index)), f"request {index}: id is not valid Unicode text")
        try:
            limit = fields.get("max_new_tokens", max_new_tokens)
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise ValueError(f"max_new_tokens {limit!r} is not a number of 1 or more")
            ids = self._encode(fields, chat)
            self._check_length(len(ids), limit)
            own = {option: fields.get(option) for option in OWN}
            check_options(own, str)
            if own["threshold"] is not None and self.strategy != "dynamic":
                raise ValueError(f"threshold does nothing with strategy {self.strategy}")
        except ValueError as error:
            return failed(_nobody(name), f"request {name}: {error}")
        return Request(name, np.asarray(ids, np.int32), limit, Overrides(**own))

    def _encode(self, fields: Mapping[str, Any], chat: bool) -> list[int]:
        unknown = sorted(str(key) for key in set(fields) - set(FIELDS))
        if unknown:
            raise ValueError(f"field {unknown[0]!r} is unknown: use {', '.join(FIELDS)}")
        given = [key for key in ("prompt", "messages", "prompt_ids") if key in fields]
        if len(given) != 1:
            raise ValueError("give exactly one of prompt, messages and prompt_ids")
        value, thinking = fields[given[0]], fields.get("enable_thinking")
        if not isinstance(thinking, bool | None):
            raise ValueError(f"enable_thinking is true or false, not {thinking!r}")
        if thinking is not None and given[0] != "messages" and not (chat and given[0] == "prompt"):
            raise ValueError("enable_thinking is for chat: give messages, or a prompt with --chat")
        if given[0] == "prompt_ids":
            ids = check_ids(_integers(value), self.config)
        elif self.tokenizer is None:
            raise ValueError("this model was loaded without a tokenizer: give prompt_ids")
        elif given[0] == "messages":
            ids = self.tokenizer.encode_chat(_messages(value), enable_thinking=thinking)
        elif not _is_text(value):
            raise ValueError("prompt is not a string of valid Unicode text")
        elif chat:
            user = {"role": "user", "content": value}
            ids = self.tokenizer.encode_chat([user], enable_thinking=thinking)
        else:
            ids = self.tokenizer.encode(value)
        if not len(ids):
            raise ValueError("the prompt is empty: give at least one token")
        return list(ids)

    def _check_length(self, prompt: int, new: int) -> None:
        # Beyond the length a network was made for answers degrade, so that must be asked for.
        limit, name = self.max_context, "--max-context"
        if limit is None:
            limit, name = self.config.max_position_embeddings, "the model's context of"
        if prompt + new > limit:
            raise ValueError(
                f"{prompt} prompt tokens and {new} new ones are over {name} {limit}: shorten the "
                "prompt, lower --max-new-tokens or raise --max-context"
            )


def _nobody(name: str) -> Request:
    return Request(name, np.zeros(0, np.int32), 1)


def _is_text(value: object) -> bool:
    """Whether ``value`` is a string without lone surrogates, which nothing can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integers(value: object) -> list[int]:
    """Token ids of any integer type.

    Raises:
      ValueError: this is not a list of integers.
    """
    try:
        if isinstance(value, str | bytes | Mapping):
            raise TypeError
        ids = list(value)  # type: ignore[call-overload]
        if any(isinstance(item, bool) for item in ids):
            raise TypeError
        return [operator.index(item) for item in ids]
    except TypeError:
        raise ValueError("prompt_ids is not a list of token ids") from None


def _messages(value: object) -> list[dict[str, Any]]:
    """Chat messages.

    Raises:
      ValueError: this is not a list of objects with a role and a content.
    """
    good = isinstance(value, list | tuple) and all(
        isinstance(item, Mapping) and _is_text(item.get("role")) and _is_text(item.get("content"))
        for item in value
    )
    if not good or not value:
        raise ValueError('messages is not a list of {"role": text, "content": text}, at least one')
    return [dict(item) for item in value]  # type: ignore[attr-defined]
