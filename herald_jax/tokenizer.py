"""Text to token ids and back, from the tokenizer files beside a checkpoint.

Tokenizers are data: nothing is fetched and no code that a checkpoint ships is run, whatever its
``auto_map`` says. Text that a user wrote never becomes the mask token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_jax.chat import check_messages, refuse_dropped, render
from herald_jax.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """A byte-level BPE tokenizer with the reserved tokens of one network."""

    def __init__(
        self,
        backend: PreTrainedTokenizerBase,
        config: ModelConfig,
        *,
        chat_template: str | None = None,
        mask_literal: str | None = None,
    ) -> None:
        """Wraps a loaded tokenizer; ``from_directory`` is the usual way, and takes the same.

        Raises:
          ValueError: the tokenizer and the network disagree.
        """
        self._backend = backend
        self._config = config
        added = backend.added_tokens_decoder
        largest = max([len(backend) - 1, *added])
        if largest >= config.vocab_size:
            raise ValueError(
                f"the tokenizer has token id {largest} but the network's vocabulary ends at "
                f"{config.vocab_size - 1}: tokenizer and checkpoint do not belong together"
            )
        _check_mask_literal(backend, config, mask_literal)
        if backend.chat_template is None:
            backend.chat_template = chat_template
        masks = {str(token) for i, token in added.items() if i == config.mask_token_id}
        special = {str(token) for token in added.values() if token.special}
        self._mask_text = _any_of(masks)
        self._added = {str(token) for token in added.values()}
        self._reserved = masks | special

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        config: ModelConfig,
        *,
        chat_template: str | None = None,
        mask_literal: str | None = None,
    ) -> Tokenizer:
        """Loads ``tokenizer.json``, or else ``vocab.json`` and ``merges.txt``, of a directory.

        Args:
          path: a checkpoint directory.
          config: the network the ids are for.
          chat_template: Jinja to use when the directory has no chat template.
          mask_literal: how this family spells the mask; the tokenizer must know it under the
            network's mask id. None where a family's own files do not agree on a spelling.

        Raises:
          ValueError: the files are missing, unreadable, or belong to another network.
        """
        path = Path(path)
        files = ("tokenizer.json",), ("vocab.json", "merges.txt")
        if not any(all((path / name).is_file() for name in group) for group in files):
            raise ValueError(
                f"{path} has no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt"
            )
        # Imported late: it takes seconds, and most of the package does without text.
        from transformers import (  # type: ignore[attr-defined]
            PreTrainedTokenizerFast,
            Qwen2TokenizerFast,
        )

        kind = PreTrainedTokenizerFast if (path / files[0][0]).is_file() else Qwen2TokenizerFast
        try:
            backend = kind.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            # The tokenizers library raises bare Exception for malformed files.
            raise ValueError(f"the tokenizer in {path} cannot be read: {error}") from error
        return cls(backend, config, chat_template=chat_template, mask_literal=mask_literal)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with nothing added before or after.

        Special tokens written out in the text count as such, except the mask token, whose
        literal becomes ordinary characters.

        Raises:
          ValueError: the text would still give the mask token.
        """
        return self._encode(*_fence(text, self._mask_text))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, enable_thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer begins.

        Only the chat template writes special tokens and turns: what stands in the messages is
        text.

        Args:
          messages: each with "role" and "content" (both strings), oldest first.
          enable_thinking: handed to templates that know it; left out if None.

        Raises:
          ValueError: there is no chat template, it refuses a message or would leave one out, or
            a message is not what it should be.
        """
        if self._backend.chat_template is None:
            raise ValueError(
                "the checkpoint has no chat template (chat_template.jinja): use a plain prompt"
            )
        checked = check_messages(messages)
        everything = "".join(message["content"] for message in checked)
        _, fence = _fence(everything, self._chat_text)
        fenced = [
            {**message, "content": _fence(message["content"], self._chat_text, fence)[0]}
            for message in checked
        ]
        self._refuse_normalised(fenced, fence)
        text = render(self._backend, fenced, enable_thinking=enable_thinking)
        refuse_dropped(self._backend, checked, enable_thinking=enable_thinking)
        return self._encode(text, fence)

    def _refuse_normalised(self, fenced: Sequence[Mapping[str, Any]], fence: str) -> None:
        """Refuses messages whose text a tokenizer's normaliser would turn into reserved tokens.

        Raises:
          ValueError: naming the message.
        """
        if self._backend.backend_tokenizer.normalizer is None:
            return
        added = self._backend.added_tokens_decoder
        reserved = {i for i, token in added.items() if self._chat_text.fullmatch(str(token))}
        for index, message in enumerate(fenced):
            if not reserved.isdisjoint(self._encode(message["content"], fence)):
                raise ValueError(f"message {index} contains a form of a reserved token: remove it")

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids, without special tokens unless asked for."""
        text = self._backend.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    @cached_property
    def _chat_text(self) -> re.Pattern[str]:
        """What a message must not write: reserved tokens and the marks of a turn.

        A tokenizer may not flag the latter special, so they are read off an empty turn.
        """
        try:
            turn = render(
                self._backend, [{"role": "user", "content": ""}], add_generation_prompt=False
            )
        except ValueError:
            # A template that refuses this conversation; the flags have to do.
            turn = ""
        return _any_of(self._reserved | {literal for literal in self._added if literal in turn})

    def _encode(self, text: str, fence: str) -> list[int]:
        """Encodes the pieces between fences separately, so that no token spans one."""
        pieces = [piece for piece in text.split(fence) if piece]
        # Not verbose: the length that a tokenizer's files state is not that of the network.
        encoded = self._backend(pieces, add_special_tokens=False, verbose=False) if pieces else {}
        ids = [token for piece in encoded.get("input_ids", ()) for token in piece]
        if self._config.mask_token_id in ids:
            # Reached through text that the tokenizer's normaliser turns into the literal.
            raise ValueError("the prompt contains a form of the mask token: remove it")
        return ids


def check_ids(ids: Sequence[int], config: ModelConfig) -> list[int]:
    """Raw prompt ids as a list, if a network can take them.

    Raises:
      ValueError: an id is the mask token, outside the vocabulary, or not an integer.
    """
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"prompt_ids[{index}] must be an integer, not {token!r}")
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"prompt_ids[{index}] = {token} is outside the vocabulary of {config.vocab_size}"
            )
        if token == config.mask_token_id:
            raise ValueError(f"prompt_ids[{index}] = {token} is the reserved mask token: remove it")
    return list(ids)


def _check_mask_literal(
    backend: PreTrainedTokenizerBase, config: ModelConfig, literal: str | None
) -> None:
    """Refuses a tokenizer in which the mask is another token: its ids mean other things.

    Raises:
      ValueError: the literal is unknown or another token than the network's mask.
    """
    if literal is None:
        return
    found = backend.get_vocab().get(literal)
    if found != config.mask_token_id:
        known = "does not know" if found is None else f"has token {found} for"
        raise ValueError(
            f"the tokenizer {known} {literal}, which the network has as {config.mask_token_id}: "
            "use the tokenizer files of this very checkpoint"
        )


def _any_of(literals: set[str]) -> re.Pattern[str]:
    """Matches any of the literals, the longest first; nothing if there are none."""
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _fence(text: str, reserved: re.Pattern[str], fence: str | None = None) -> tuple[str, str]:
    """Puts a fence around every character of every reserved literal.

    Args:
      text: what a user wrote.
      reserved: the literals to take apart.
      fence: the fence; a private-use character that ``text`` lacks, if not given.

    Returns:
      The fenced text and the fence.
    """
    fence = fence or next(chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in text)
    marked = fence
    return reserved.sub(lambda match: marked + marked.join(match[0]) + marked, text), fence
