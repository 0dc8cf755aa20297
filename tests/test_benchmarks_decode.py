"""The decoding benchmark: which points its options ask for."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

from benchmarks.decode import _of_ceilings, points
from benchmarks.decode_ceilings import designs
from benchmarks.environment import write

NOTHING = dict.fromkeys(("steps", "candidates_ratio", "key_index", "transfer", "batch"))
ALL = {"quick": False, "models": [], "methods": [], "contexts": []}


def test_options_of_an_index_change_the_methods_that_have_one():
    plain = points(SimpleNamespace(preset=["ablation"], **NOTHING, **ALL))
    assert {point.key_index for point in plain} == {"int8", "none"}
    asked = SimpleNamespace(preset=["ablation"], **NOTHING | {"key_index": "int4"}, **ALL)
    changed = points(asked)
    kept = {point.method: point.key_index for point in changed}
    assert kept["herald-merged"] == kept["merged"] == "int4"
    assert kept["mage-offload"] == kept["herald-draft"] == "int8"
    # With one index for all, the point without one is no other.
    assert len(changed) == len(plain) - 1
    assert "32K bmax T20 0.05 c1 int4" in next(p.name for p in changed if p.method == "merged")


def test_a_ratio_and_a_transfer_go_to_methods_that_have_one():
    more = NOTHING | {"candidates_ratio": 1.25, "transfer": "changes"}
    asked = points(SimpleNamespace(preset=["headline", "table2"], **more, **ALL))
    ratios = {point.method: point.candidates_ratio for point in asked}
    assert ratios["merged"] == ratios["herald-merged"] == 1.25
    assert ratios["dense"] is ratios["herald-draft"] is None
    sent = {point.method: point.transfer for point in asked}
    assert sent["herald-draft"] == sent["merged"] == "changes"
    assert sent["dense"] == sent["mage-offload"] == sent["infinigen"] == "full"
    ablation = points(SimpleNamespace(preset=["ablation"], **more, **ALL))
    assert {p.candidates_ratio for p in ablation if p.method == "merged"} == {1}


def row(method: str, **changes: object) -> dict[str, object]:
    moved = {"full": 1e9, "selected": 5e7, "candidates": 1e8}
    own = {"method": method, "batch": 10, "block": 32, "steps": 19, "fetched_bytes": moved}
    speed = {"ideal_tokens_per_second": 800.0, "block_ms": 500.0, "stall_fraction": 0.0}
    return own | speed | {"retrieval_ms": 0.0} | changes


def test_ceilings_are_those_of_the_slowest_resource():
    """Tokens of a block over what each resource needs for it, at a link of 10 GB/s."""
    rows = [
        row("dense"),
        row("herald-merged", retrieval_ms=200.0),
        row("mage-offload-cpu", stall_fraction=0.8),
    ]
    found = {each["design"].split(":")[0]: each for each in designs(rows, 1e10)}
    assert len(found) == 5
    every = found["all KV fetched at every step"]
    assert every["fetching KV"] == 32 * 1e10 / (20 * 1e9)
    assert every["limit"] == "fetching KV"
    assert found["selected KV fetched at every step"]["fetching KV"] == 320
    merged = found["herald-merged"]
    assert (merged["fetching KV"], merged["device"], merged["host"]) == (3200, 800, 1600)
    assert merged["limit"] == "device"
    waiting = found["mage-offload-cpu"]
    assert waiting["host"] == 800
    assert waiting["limit"] in ("host", "device")
    assert found["all KV on the device"]["host"] is None


def test_rows_of_older_files_have_no_ceiling():
    old = row("dense")
    del old["fetched_bytes"]
    assert designs([old], 1e10) == []


def test_ceilings_are_not_taken_from_other_presets_or_memories():
    """Several presets, and runs with other limits, may share a file."""
    own = SimpleNamespace(preset=["ceilings"], **NOTHING, **ALL)
    both = SimpleNamespace(preset=["ceilings", "headline"], **NOTHING, **ALL)
    asked = SimpleNamespace(**vars(both), device_bytes=80e9, dtype="bfloat16")
    measured = {"device_memory_gb": 80.0, "dtype": "bfloat16"}
    rows = [{"point": point.name, **measured} for point in points(both)]
    rows += [{**each, "device_memory_gb": None} for each in rows]
    rows += [{**each, "dtype": "float32"} for each in rows]
    wanted = [{"point": point.name, **measured} for point in points(own)]
    assert sorted(map(str, _of_ceilings(rows, asked))) == sorted(map(str, wanted))


def test_results_replace_files_only(tmp_path):
    """A link stays a link, and what is no file, like /dev/null, is written to."""
    result, link, pipe = tmp_path / "result", tmp_path / "link", tmp_path / "pipe"
    result.write_text("old")
    link.symlink_to(result)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (link, pipe):
            write(path, {}, [{"n": 1}])
        assert json.loads(os.read(reader, 1 << 16))["rows"] == [{"n": 1}]
    finally:
        os.close(reader)
    assert link.is_symlink()
    assert json.loads(result.read_text())["rows"] == [{"n": 1}]
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "result"]
