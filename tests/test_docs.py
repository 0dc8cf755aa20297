"""The documents keep their word: commands exist, links lead somewhere, the example runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from herald_jax.cli import app, main
from herald_jax.diffusion.rules import RULES
from herald_jax.engine.engine import EMBEDDED
from herald_jax.models.registry import FAMILIES
from herald_jax.selection import SELECTORS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND: Any = typer.main.get_command(app)


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert local, "every page links to another"
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in fenced(page, "sh") for line in block.splitlines() if line.strip()]
    for line in lines:
        words = [
            word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)
        ]
        if words[:1] == ["make"]:
            assert set(words[1:]) <= targets, line
        elif words[:1] == ["herald"]:
            command = COMMAND.commands[words[1]]
            known = {name for parameter in command.params for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, line


def test_options_table_names_real_options() -> None:
    command = COMMAND.commands["generate"]
    known = {name for parameter in command.params for name in parameter.opts}
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `--")]
    named = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row)}
    assert len(named) > 10
    assert named <= known


def test_every_method_has_a_row() -> None:
    table = (ROOT / "docs" / "selectors.md").read_text()
    named = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(SELECTORS)


def test_the_tables_of_models_are_those_of_the_registry(capsys) -> None:
    assert main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "models.md").read_text()
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {one["family"] for one in listed["families"]} == set(FAMILIES)
    assert set(listed["rules"]) == set(RULES)
    assert main(["models"]) == 0
    assert "LLaDA2.1-flash" in capsys.readouterr().out
    assert main(["models", "--json", "--markdown"]) == 2


def test_files_that_the_documents_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:herald_jax|host_kernels|checkpoints_convert|tests)/[\w/.]+)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="the embedded model is not in this checkout")
def test_the_python_example_runs() -> None:
    (example,) = fenced(ROOT / "README.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "stop", "48213"]
