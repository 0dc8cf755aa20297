"""Files of requests and of results, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from herald_jax.cli.console import Refused, note


def read_text(path: Path, option: str) -> str:
    """A text file that an option names.

    Raises:
      Refused: it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(f"{option} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{option} {path} is not UTF-8 text: byte {error.start} is bad") from error


def read_requests(path: Path) -> list[dict[str, Any]]:
    """The requests of a file, each with an id (its place among the requests, if it names none).

    Raises:
      Refused: the file or a line of it is no good; the message names the line.
    """
    requests: list[dict[str, Any]] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(read_text(path, "--requests").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise Refused(f"--requests {path} line {number} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise Refused(
                f'--requests {path} line {number} is not a JSON object: write {{"prompt": "..."}}'
            )
        fields["id"] = str(fields.get("id", len(requests)))
        earlier = lines_of.setdefault(fields["id"], number)
        if earlier != number:
            raise Refused(
                f"--requests {path} line {number} has the id {fields['id']!r} of line {earlier}: "
                "give every request its own"
            )
        requests.append(fields)
    if not requests:
        raise Refused(f'--requests {path} holds no request: write a line like {{"prompt": "..."}}')
    return requests


class ResultFile:
    """Results appended to a file line by line; those already there need not be made again."""

    def __init__(self, path: Path) -> None:
        """Reads what is there; a last line that was cut off in mid-write is dropped.

        Raises:
          Refused: the file cannot be written or holds something else than results.
        """
        self.path = path
        self.done: set[str] = set()
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            for number, line in enumerate(whole.splitlines(), start=1):
                self._note_done(number, line)
            if len(whole) < len(content):
                note(f"note: the last line of {path} was cut off and is dropped")
                with path.open("r+b") as stream:
                    stream.truncate(len(whole))
            self._stream: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise Refused(f"--output {path} cannot be written: {error.strerror}") from error

    def _note_done(self, number: int, line: bytes) -> None:
        try:
            result = json.loads(line)
            name, reason = result["id"], result["finish_reason"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(
                f"--output {self.path} line {number} is not a result: name a new file, or one "
                "that an earlier run wrote"
            ) from error
        if reason != "error":
            self.done.add(str(name))

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends one result and hands it to the system."""
        self._stream.write(json.dumps(result, ensure_ascii=False) + "\n")
        self._stream.flush()
