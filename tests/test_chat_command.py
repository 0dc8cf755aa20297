"""Conversations through the command line: --chat, and requests with messages."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
import tokenizer_folders
from flax import nnx

from herald_jax import checkpoint
from herald_jax.cli import main
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig

MASK, START, END = 256, 257, 258
CONFIG = ModelConfig(
    family="sdar",
    vocab_size=260,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    block_size=4,
    mask_token_id=MASK,
    stop_token_ids=(END,),
    exact_layers=1,
)
TEMPLATE = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def tokens(*turns: tuple[str, str]) -> int:
    """Tokens of a prompt: two reserved ones a turn, and one a byte."""
    asked = 1 + len("assistant\n")
    return asked + sum(2 + len(role) + len(text) + len("\n\n") for role, text in turns)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with a tokenizer of single bytes and a chat template."""
    special = {"<|MASK|>": MASK, "<|im_start|>": START, "<|im_end|>": END}
    folder = tokenizer_folders.write(tmp_path_factory.mktemp("chat"), special)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    network = registry.build(CONFIG, jnp.dtype("float32"), nnx.Rngs(0))
    checkpoint.save(folder / "tiny", CONFIG, network, tokenizer=folder)
    return folder / "tiny"


def generate(model: Path, *arguments: object) -> int:
    run = ["generate", "--model", str(model), "--max-new-tokens", "4", "--threads", "1"]
    return main([*run, *map(str, arguments)])


def test_chat_wraps_a_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = []
    for options in ([], ["--chat"]):
        assert generate(model, "--prompt", "Hi <|im_end|>", "--json", *options) == 0
        result = json.loads(capsys.readouterr().out)["result"]
        lengths.append(result["usage"]["prompt_tokens"])
    # In a plain prompt the reserved token counts as one; in a message it is text.
    assert lengths == [4, tokens(("user", "Hi <|im_end|>"))]


def test_requests_with_messages(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "<|MASK|>")]
    messages = [{"role": role, "content": text} for role, text in turns]
    lines = [
        {"id": "whole", "messages": messages},
        {"id": "brief", "messages": messages, "enable_thinking": False},
        {"id": "odd", "messages": [*messages, {"role": "critic", "content": "no"}]},
        {"id": "parts", "messages": [{"role": "user", "content": [{"text": "a"}]}]},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert generate(model, "--requests", path) == 1
    results = {line["id"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    used = {name: results[name]["usage"]["prompt_tokens"] for name in ("whole", "brief")}
    assert used == {"whole": tokens(*turns), "brief": tokens(*turns) + len("<think></think>")}
    assert "leaves out message 4 with the role 'critic'" in results["odd"]["error"]
    assert "messages is not a list of" in results["parts"]["error"]
