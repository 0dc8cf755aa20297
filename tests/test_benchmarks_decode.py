"""The decoding benchmark: which points its options ask for."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.decode import points

NOTHING = dict.fromkeys(("steps", "candidates_ratio", "key_index", "batch"))
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
    assert "32K bmax T20 0.05 int4" in next(p.name for p in changed if p.method == "merged")
