"""Files of requests and of results, one JSON object a line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from herald_jax.cli.console import Refused, note

#: How every line that this project writes begins.
RESULT_START = b'{"id": '


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
    # JSON strings may hold the other characters that splitlines() takes for the end of a line.
    for number, line in enumerate(read_text(path, "--requests").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(
                f"--requests {path} line {number} has half a character, the surrogate "
                f"{error.object[error.start]!r}: write whole ones"
            ) from error
        except RecursionError as error:
            raise Refused(f"--requests {path} line {number} is nested too deeply") from error
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
    """Results appended to a file line by line; those already there need not be made again.

    Nothing of the file changes before the first result is written.
    """

    def __init__(self, path: Path, inputs: Iterable[Path] = ()) -> None:
        """Reads what is there.

        Args:
          path: a file that holds results, or a new one in a folder that exists.
          inputs: files that results must not be appended to.

        Raises:
          Refused: the file cannot be written or holds something else than results.
        """
        self.path = path
        self.done: set[str] = set()
        self._stream: BinaryIO | None = None
        try:
            content = self._content(inputs)
        except OSError as error:
            raise Refused(f"--output {path} cannot be written: {error.strerror}") from error
        *whole, last = content.split(b"\n")
        for number, line in enumerate(whole, start=1):
            self._note_done(number, line)
        self._kept = len(content) - len(last)
        self._cut = self._is_cut(last)
        self._unended = bool(last) and not self._cut
        if self._unended:
            # A result that lacks nothing but the end of its line.
            self._note_done(len(whole) + 1, last)

    def _content(self, inputs: Iterable[Path]) -> bytes:
        if not self.path.exists():
            if self.path.is_symlink():
                raise Refused(f"--output {self.path} is a link to nothing: name a file")
            if not self.path.parent.is_dir():
                raise Refused(f"--output {self.path} cannot be written: there is no such folder")
            _check_writable(self.path.parent)
            return b""
        if not self.path.is_file():
            raise Refused(
                f"--output {self.path} is not a regular file: name a file, or leave --output out "
                "to print results"
            )
        for path in inputs:
            if self.path.samefile(path):
                raise Refused(f"--output {self.path} is the file of the prompts: name another one")
        _check_writable(self.path)
        return self.path.read_bytes()

    @staticmethod
    def _is_cut(line: bytes) -> bool:
        """Whether this is the beginning of a result, cut off in mid-write."""
        if not line or not (line.startswith(RESULT_START) or RESULT_START.startswith(line)):
            return False
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return True
        return False

    def _note_done(self, number: int, line: bytes) -> None:
        try:
            result = json.loads(line)
            name, reason = result["id"], result["finish_reason"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
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
        if self._stream is not None:
            self._stream.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends one result and hands it to the system; a cut-off last line is dropped first.

        Raises:
          Refused: the file cannot be written.
        """
        try:
            stream = self._open() if self._stream is None else self._stream
            stream.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
            stream.flush()
        except OSError as error:
            raise Refused(f"--output {self.path} cannot be written: {error.strerror}") from error

    def _open(self) -> BinaryIO:
        self._stream = stream = self.path.open("ab")
        if self._cut:
            note(f"note: the last line of {self.path} was cut off and is dropped")
            stream.truncate(self._kept)
        elif self._unended:
            stream.write(b"\n")
        return stream


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
