"""Files of requests and results: what is read, what is refused, and that nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from herald_jax.cli import main, request_files
from herald_jax.cli.console import Refused


def test_ids_are_places_unless_given(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "id": 7}\n{"prompt": "c"}\n')
    assert [fields["id"] for fields in request_files.read_requests(path)] == ["0", "7", "2"]


@pytest.mark.parametrize("space", ["\u2028", "\u0085", "\x1c", "\u2029"])
def test_only_newlines_end_a_line(tmp_path: Path, space: str) -> None:
    path = tmp_path / "r.jsonl"
    line = json.dumps({"prompt": f"a{space}b"}, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n{line}\n".encode())
    read = request_files.read_requests(path)
    assert [fields["prompt"] for fields in read] == [f"a{space}b"] * 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "\\ud800", "prompt": "a"}', "line 2 has half a character"),
        ('{"prompt": "a\\udfff"}', "line 2 has half a character"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 2 has half a character"),
        ("[" * 100_000, "line 2 is nested too deeply"),
        ('{"prompt": "a", "id": ' + "[" * 100_000, "line 2 is nested too deeply"),
    ],
)
def test_a_line_that_cannot_be_answered_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(Refused, match=said):
        request_files.read_requests(path)


RESULT = b'{"id": "a", "text": "x", "finish_reason": "stop"}'


@pytest.mark.parametrize(
    ("content", "after"),
    [
        (b"", b""),
        (RESULT + b"\n", RESULT + b"\n"),
        (RESULT, RESULT + b"\n"),
        (RESULT + b'\n{"id": "b", "te', RESULT + b"\n"),
        (RESULT + b'\n{"id": "b", "text": "\xc3', RESULT + b"\n"),
        (RESULT + b'\n{"i', RESULT + b"\n"),
    ],
)
def test_results_are_appended_to_results(tmp_path: Path, content: bytes, after: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with request_files.ResultFile(path) as results:
        assert results.done == ({"a"} if content else set())
        assert path.read_bytes() == content
        for name in "bc":
            results.write({"id": name, "finish_reason": "stop"})
    wanted = after + b"".join(b'{"id": "%s", "finish_reason": "stop"}\n' % n for n in (b"b", b"c"))
    assert path.read_bytes() == wanted


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b'{"prompt": "hi"}',
        b'{"id": "a", "prompt": "hi"}',
        RESULT + b"\nnotes",
        b"\xff",
    ],
)
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"line \d is not a result"):
        request_files.ResultFile(path)
    assert path.read_bytes() == content


def test_output_is_a_file_apart_from_the_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes(RESULT + b"\n")
    os.link(prompts, tmp_path / "same.jsonl")
    with pytest.raises(Refused, match="is the file of the prompts"):
        request_files.ResultFile(tmp_path / "same.jsonl", [prompts])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("pipe", "."):
        with pytest.raises(Refused, match="is not a regular file"):
            request_files.ResultFile(tmp_path / name)
    with pytest.raises(Refused, match="is a link to nothing"):
        request_files.ResultFile(tmp_path / "link")
    with pytest.raises(Refused, match="there is no such folder"):
        request_files.ResultFile(tmp_path / "no" / "file")


def test_a_refused_run_leaves_the_output_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": "b", "te')
    arguments = ["generate", "--prompt", "a", "--model", str(tmp_path / "no"), "--output"]
    assert main([*arguments, str(path)]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert path.read_bytes() == b'{"id": "b", "te'
    assert main([*arguments, str(tmp_path / "new.jsonl")]) == 2
    assert not (tmp_path / "new.jsonl").exists()
