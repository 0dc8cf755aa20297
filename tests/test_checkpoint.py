"""Saving and restoring networks of this project."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hf_folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from herald_jax import checkpoint, checkpoint_folder
from herald_jax.checkpoint import CheckpointError
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig

# Reads of damaged files that the array store abandons are reported as never awaited.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

CONFIG = ModelConfig(
    family="sdar",
    vocab_size=64,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    block_size=32,
    mask_token_id=3,
    stop_token_ids=(1, 2),
    exact_layers=1,
)


@pytest.fixture(scope="module", autouse=True)
def complaints_stay_here():
    """Abandoned reads complain when collected: under this module's filters, not a later one's."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "tiny"
    checkpoint.save(path, CONFIG, registry.build(CONFIG, jnp.bfloat16, nnx.Rngs(0)))
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def equal(one, other) -> None:
    ours, theirs = registry.parameters(one), registry.parameters(other)
    assert list(ours) == list(theirs)
    for path, value in ours.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(theirs[path]), err_msg=path)


@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", True), ("float32", False)])
def test_what_is_saved_is_loaded(tmp_path, dtype, tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    model = registry.build(config, jnp.dtype(dtype), nnx.Rngs(1))
    checkpoint.save(tmp_path / "out", config, model)
    assert checkpoint.read_config(tmp_path / "out") == (config, dtype)
    loaded_config, loaded = checkpoint.load(tmp_path / "out")
    assert loaded_config == config
    equal(loaded, model)
    assert nnx.graphdef(loaded) == nnx.graphdef(model)


def test_one_item_a_layer(saved):
    assert sorted(os.listdir(saved / "params")) == [
        "embed",
        "final",
        "layer_000",
        "layer_001",
        "layer_002",
    ]


def test_config_json_says_the_same_in_hugging_face_words(saved):
    """A network made here goes through the path of every other one: its config.json is enough."""
    assert registry.from_hf(json.loads((saved / "config.json").read_text())) == CONFIG


def test_dtype_is_changed_on_the_way(saved):
    _, half = checkpoint.load(saved)
    _, single = checkpoint.load(saved, dtype="float32")
    for path, value in registry.parameters(single).items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, registry.parameters(half)[path].astype(jnp.float32))
    assert single.layers[0].attention.q.dtype == jnp.float32
    with pytest.raises(CheckpointError, match="'int8' is not supported; use bfloat16 or float32"):
        checkpoint.load(saved, dtype="int8")


_DEVICES = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from herald_jax import checkpoint
from herald_jax.models import registry
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("x",))
_, single = checkpoint.load(sys.argv[1])
_, direct = checkpoint.load(sys.argv[3])
whole = NamedSharding(mesh, P())
def split(path, shape):
    return NamedSharding(mesh, P(None, "x")) if path.endswith(".kernel") else whole
expected = registry.parameters(single)
for place, devices, share in ((whole, 4, 1), (split, 4, 4)):
    _, model = checkpoint.load(sys.argv[1], sharding=place)
    for path, value in registry.parameters(model).items():
        assert len(value.sharding.device_set) == devices, path
        part = value.addressable_shards[0].data.size * (share if "kernel" in path else 1)
        assert part == value.size, path
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[path]))
    _, read = checkpoint.load(sys.argv[3], sharding=place)
    for path, value in registry.parameters(read).items():
        assert len(value.sharding.device_set) == devices, path
        np.testing.assert_array_equal(
            np.asarray(value), np.asarray(registry.parameters(direct)[path])
        )
    checkpoint.save(sys.argv[2] + str(share), model.config, model)
    _, again = checkpoint.load(sys.argv[2] + str(share))
    for path, value in registry.parameters(again).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[path]))
assert all(len(value.sharding.device_set) == 1 for value in expected.values())
print("equal")
"""


def test_restores_onto_any_device_count(saved, tmp_path):
    """Saved by one device; restored onto one of four, replicated on four, and split over four.

    A Hugging Face folder likewise.
    """
    hf_folders.write(tmp_path / "hf")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _DEVICES, saved, tmp_path / "again", tmp_path / "hf"],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "equal", done.stderr


def test_what_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(
        CheckpointError, match="does not exist; download a Hugging Face checkpoint, or convert"
    ):
        checkpoint.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint \(no herald.json\)$"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: model_type"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("item", ["embed", "layer_001", "final"])
def test_a_lost_item_is_named(copy, item):
    shutil.rmtree(copy / "params" / item)
    with pytest.raises(CheckpointError, match=f"is damaged: params/{item} cannot be restored"):
        checkpoint.load(copy)


def test_every_truncated_file_is_noticed(saved, tmp_path):
    """Each file of a layer in turn loses its second half: an error, or the right numbers."""
    _, whole = checkpoint.load(saved)
    files = [p.relative_to(saved) for p in (saved / "params/layer_000").rglob("*") if p.is_file()]
    refused = 0
    for index, file in enumerate(files):
        damaged = Path(shutil.copytree(saved, tmp_path / str(index)))
        os.truncate(damaged / file, (damaged / file).stat().st_size // 2)
        message = None
        try:
            _, model = checkpoint.load(damaged)
        except CheckpointError as error:
            message = str(error)
        if message is None:
            equal(model, whole)
        else:
            refused += 1
            assert "params/layer_000" in message
            assert "\n" not in message
    assert refused >= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "has checkpoint format 99; this version reads 1: convert it again"),
        ({"model": {}}, r"herald.json cannot be read: KeyError"),
        ({"model": {"stop_token_ids": [], "color": 1}}, r"herald.json cannot be read: TypeError"),
    ],
)
def test_another_header_is_refused(copy, change, message):
    header = json.loads((copy / "herald.json").read_text())
    (copy / "herald.json").write_text(json.dumps({**header, **change}))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(copy)
    (copy / "herald.json").write_text('{"format":')
    with pytest.raises(CheckpointError, match=r"herald\.json cannot be read"):
        checkpoint.load(copy)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", "4"),
        ("num_kv_heads", 0),
        ("num_layers", 10**12),
        ("family", ["sdar"]),
        ("rope_theta", float("nan")),
        ("rms_norm_eps", None),
        ("stop_token_ids", [1.5]),
        ("tie_word_embeddings", "no"),
    ],
)
def test_a_field_of_another_kind_is_named(copy, field, value):
    header = json.loads((copy / "herald.json").read_text())
    header["model"][field] = value
    (copy / "herald.json").write_text(json.dumps(header))
    said = {"family": "model family", "stop_token_ids": "token ids"}.get(field, field)
    with pytest.raises(CheckpointError, match=rf"herald\.json cannot be read: .*{said}") as caught:
        checkpoint.read_config(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[]", b"5"])
def test_a_header_that_is_none_is_refused(copy, content):
    (copy / "herald.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"herald\.json cannot be read"):
        checkpoint.read_config(copy)


def test_arrays_of_another_shape_are_refused(copy):
    header = json.loads((copy / "herald.json").read_text())
    header["model"]["intermediate_size"] = 32
    (copy / "herald.json").write_text(json.dumps(header))
    with pytest.raises(CheckpointError, match="params/layer_000 cannot be restored"):
        checkpoint.load(copy)


def test_saving_over_a_checkpoint_needs_force(copy):
    model = registry.build(CONFIG, jnp.bfloat16, nnx.Rngs(7))
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoint.save(copy, CONFIG, model)
    checkpoint.save(copy, CONFIG, model, force=True)
    equal(checkpoint.load(copy)[1], model)
    assert os.listdir(copy.parent) == [copy.name]


def test_a_failed_save_keeps_the_old_checkpoint(copy, monkeypatch):
    before = checkpoint.load(copy)[1]

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.Writer, "put", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(copy, CONFIG, before, force=True)
    equal(checkpoint.load(copy)[1], before)
    assert os.listdir(copy.parent) == [copy.name]


@pytest.mark.parametrize("named", ["copy", "other"])
def test_only_a_dead_writer_of_the_same_path_is_cleaned_up(copy, named):
    """Killed between its renames, it holds the old checkpoint, which gets its name back."""
    work = copy.parent / f"{checkpoint_folder.PREFIX}dead"
    work.mkdir()
    (work / checkpoint_folder.MARK).write_text(named)
    os.rename(copy, work / "old")
    with (
        contextlib.nullcontext() if named == "other" else pytest.raises(CheckpointError),
        checkpoint_folder.building(copy),
    ):
        pass
    assert copy.is_dir()
    assert work.exists() == (named == "other")
    if named == "copy":
        checkpoint.load(copy)


def test_a_live_writer_is_left_alone(tmp_path):
    with checkpoint_folder.building(tmp_path / "out") as first:
        with checkpoint_folder.building(tmp_path / "out"):
            pass
        assert first.is_dir()
        (tmp_path / "out").rmdir()
    assert os.listdir(tmp_path) == ["out"]


def test_tokenizer_files_travel(tmp_path):
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    (tmp_path / "tok" / "other.txt").write_text("")
    model = registry.build(CONFIG, jnp.bfloat16, nnx.Rngs(0))
    checkpoint.save(tmp_path / "out", CONFIG, model, tokenizer=tmp_path / "tok")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "other.txt").exists()


def test_arrays_land_on_the_first_device_by_default(saved):
    _, model = checkpoint.load(saved)
    assert registry.parameters(model)["norm.scale"].devices() == {jax.devices()[0]}


def test_what_a_second_ctrl_c_leaves_is_known_by_its_mark(tmp_path):
    """The array store's threads may write on, so the next writer of that path removes it."""
    with (
        pytest.raises(checkpoint_folder.AbandonedWrite),
        checkpoint_folder.building(tmp_path / "out"),
    ):
        raise checkpoint_folder.AbandonedWrite
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(checkpoint_folder.PREFIX)
    (left / "new" / "late").write_text("written by a thread")
    with checkpoint_folder.building(tmp_path / "out") as folder:
        (folder / "herald.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
