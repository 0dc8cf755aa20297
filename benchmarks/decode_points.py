"""Which points each named preset of ``benchmarks.decode`` measures, the telling ones first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from herald_jax.engine.config import KeyIndex
from herald_jax.kv.device_cache import Transfer

MODELS = ("llada2.0-mini", "sdar-8b")
#: Marks the largest batch that fits both memories.
LARGEST = 0


@dataclass(frozen=True)
class Point:
    """One method at one batch and context length.

    Attributes:
      batch: slots, or ``LARGEST``.
      budget: share of the prefix, unless ``tokens`` names K.
    """

    model: str
    method: str
    context: int
    batch: int = LARGEST
    steps: int = 20
    budget: float = 0.05
    tokens: int | None = None
    candidates_ratio: float | None = None
    key_index: KeyIndex = "int8"
    transfer: Transfer = "full"

    @property
    def name(self) -> str:
        """What a result is found by when a run goes on."""
        parts = [self.model, self.method, f"{self.context // 1024}K", f"b{self.batch or 'max'}"]
        parts += [f"T{self.steps}", f"k{self.tokens}" if self.tokens else f"{self.budget:g}"]
        parts += [] if self.candidates_ratio is None else [f"c{self.candidates_ratio:g}"]
        parts += [self.key_index] + ([] if self.transfer == "full" else [self.transfer])
        return " ".join(parts)


def _both(model: str, context: int, methods: tuple[str, ...], **changes: object) -> list[Point]:
    return [replace(Point(model, method, context), **changes) for method in methods]  # type: ignore[arg-type]


def headline() -> list[Point]:
    """Dense, herald-merged and merged, each at its own largest batch: 32K, then 64K and 16K.

    At 64K the host is the limit, unless the device reads the rows itself.
    """
    return [
        replace(point, transfer="direct" if context > 32768 and point.method != "dense" else "full")
        for context in (32768, 65536, 16384)
        for model in MODELS
        for point in _both(model, context, ("dense", "herald-merged", "merged"))
    ]


def table2() -> list[Point]:
    """The paper's Table II: every method at its own largest batch, 16K and 32K.

    The others at the budgets that the paper gives them: 2.5%, where MAGE is near lossless, and 20%.
    """
    return [
        point
        for context in (32768, 16384)
        for model in MODELS
        for point in (
            *_both(model, context, ("dense", "herald-merged", "herald-draft")),
            Point(model, "herald-draft-indexed", context),
            Point(model, "mage-offload", context, budget=0.025),
            Point(model, "infinigen", context, budget=0.2),
        )
    ]


def ceilings() -> list[Point]:
    """Figure 5: what each resource would allow, for designs that these methods stand for."""
    methods = ("dense", "herald-merged", "herald-draft", "mage-offload-cpu")
    return _both("llada2.0-mini", 32768, methods)


def batches() -> list[Point]:
    """Figures 4 and 12: throughput by batch, LLaDA2.0-mini at 32K."""
    sweeps = {"dense": (4, 8, 16, 24, LARGEST), "herald-merged": (16, 32, 48, 64, 96, LARGEST)}
    return [
        Point("llada2.0-mini", method, 32768, batch)
        for method, sizes in sweeps.items()
        for batch in reversed(sizes)
    ]


def ablation() -> list[Point]:
    """Figure 13: from full-KV streaming to the merged query over an index."""
    methods = ("mage-offload", "herald-draft", "herald-merged")
    return [p for context in (32768, 16384) for p in _both("llada2.0-mini", context, methods)] + [
        Point("llada2.0-mini", "herald-merged", 32768, key_index="none"),
        Point("llada2.0-mini", "merged", 32768, candidates_ratio=1.0),
    ]


def steps() -> list[Point]:
    """Figure 14: denoising steps from 8 to 32."""
    return [
        Point("llada2.0-mini", method, 32768, steps=count)
        for count in (8, 32, 16, 24)
        for method in ("dense", "herald-merged")
    ]


def fixed() -> list[Point]:
    """K = 1,024 whatever the length, at 64K."""
    return [
        point
        for model in MODELS
        for point in (
            Point(model, "herald-merged", 65536, tokens=1024, transfer="direct"),
            Point(model, "dense", 65536),
        )
    ]


def short() -> list[Point]:
    """Batch 1 and 128 at 1K tokens, where the cache is no limit."""
    return [
        Point("llada2.0-mini", method, 1024, batch)
        for batch in (1, 128)
        for method in ("dense", "herald-merged")
    ]


PRESETS = {
    "headline": headline,
    "table2": table2,
    "ceilings": ceilings,
    "batches": batches,
    "ablation": ablation,
    "steps": steps,
    "fixed": fixed,
    "short": short,
}
