"""Networks against transformers' Qwen3 and Llama, loaded through the real converter and loader.

The recorded values under tests/fixtures come from tests/oracle/make_fixtures.py. Comparing logits
through the real loading path is what AI-Hypercomputer/maxtext PR#581 needed to find a wrong RoPE
permutation.
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle.parity import TOLERANCE, cached, prompt_lengths, uncached

from checkpoints_convert import convert
from herald_jax import checkpoint
from herald_jax.models.decoder import Decoder

FIXTURES = sorted(p for p in (Path(__file__).parent / "fixtures").iterdir() if p.is_dir())


@pytest.fixture(scope="module", params=FIXTURES, ids=lambda folder: folder.name)
def loaded(request, tmp_path_factory) -> tuple[Decoder, dict[str, np.ndarray]]:
    out = tmp_path_factory.mktemp("converted") / request.param.name
    convert(request.param, out, dtype="float32")
    _, model = checkpoint.load(out)
    return model, dict(np.load(request.param / "expected.npz"))


def test_every_layer_and_the_logits_equal_transformers(loaded):
    model, expected = loaded
    hidden, logits = uncached(model, expected["tokens"])
    assert hidden.shape == expected["hidden"].shape
    for layer, (ours, theirs) in enumerate(zip(hidden, expected["hidden"], strict=True)):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, err_msg=f"after layer {layer}")
    np.testing.assert_allclose(logits, expected["logits"], atol=TOLERANCE)


def test_whole_pass_equals_transformers(loaded):
    model, expected = loaded
    logits = nnx.jit(type(model).__call__)(model, jnp.asarray(expected["tokens"]))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected["logits"], atol=TOLERANCE)


def test_cached_blocks_equal_transformers(loaded):
    model, expected = loaded
    tokens = expected["tokens"]
    for prompt in prompt_lengths(model.config.block_size, tokens.shape[1]):
        hidden, logits = cached(model, tokens, prompt, 2 * model.config.block_size)
        np.testing.assert_allclose(hidden, expected["hidden"], atol=TOLERANCE)
        np.testing.assert_allclose(logits, expected["logits"], atol=TOLERANCE)


def test_the_comparison_notices_another_block_size(loaded):
    """The recorded values depend on the mask, so that agreeing with them means something."""
    model, expected = loaded
    tokens = expected["tokens"]
    hidden, _ = uncached(model, tokens[:, : model.config.block_size - 1])
    theirs = expected["hidden"][:, :, : hidden.shape[2]]
    assert np.abs(hidden[-1] - theirs[-1]).max() > 100 * TOLERANCE


def test_half_precision_stays_near(tmp_path):
    """bfloat16 logits, compared by direction: their rounding is no implementation's own."""
    source = Path(__file__).parent / "fixtures" / "sdar_b4"
    expected = np.load(source / "expected.npz")
    convert(source, tmp_path / "half")
    _, model = checkpoint.load(tmp_path / "half")
    assert model.layers[0].attention.q.kernel.dtype == jnp.bfloat16
    logits = np.asarray(nnx.jit(type(model).__call__)(model, jnp.asarray(expected["tokens"])))
    theirs = expected["logits"]
    cosine = (logits * theirs).sum() / np.linalg.norm(logits) / np.linalg.norm(theirs)
    assert 0.999 < cosine < 1 - 1e-7
