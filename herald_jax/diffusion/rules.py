"""Named generation rules: how authors and engines decide what a block accepts.

Nothing here imports JAX, so that commands can name the rules without waiting for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal

Strategy = Literal["dynamic", "static", "sequential", "entropy_bounded"]
Compare = Literal["gt", "ge", "near"]
Fallback = Literal["most_confident", "leftmost"]
Confidence = Literal["unfiltered", "filtered"]

#: What the options with names may be.
CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("dynamic", "static", "sequential", "entropy_bounded"),
    "compare": ("gt", "ge", "near"),
    "fallback": ("most_confident", "leftmost"),
    "confidence": ("unfiltered", "filtered"),
}
#: What the options with numbers may be: the kind of number, its range, and the range in words.
NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "threshold": (Real, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "steps": (Integral, lambda value: value >= 1, "1 or more"),
    "small_block": (Integral, lambda value: value >= 1, "1 position or more"),
    "edit_threshold": (Real, lambda value: 0 <= value <= 1, "0 (any change) to 1 (none)"),
    "max_post_steps": (Integral, lambda value: 0 <= value <= 10_000, "0 to 10000"),
    "entropy_bound": (Real, lambda value: 0 <= value < math.inf, "a number of 0 or more"),
    "temperature": (Real, lambda value: 0 <= value <= 100, "0 (greedy) to 100"),
    "top_k": (Integral, lambda value: 0 <= value < 2**31, "0 (off) to 2**31 - 1"),
    "top_p": (Real, lambda value: 0 < value <= 1, "a number above 0 and at most 1, which is off"),
    "seed": (Integral, lambda value: 0 <= value < 2**32, "a number from 0 to 2**32 - 1"),
}


def flag(name: str) -> str:
    """How an option is spelled on the command line."""
    return "--" + name.replace("_", "-")


def check_options(options: Mapping[str, Any], spell: Callable[[str], str] = flag) -> None:
    """Refuses values that no rule could have.

    Args:
      options: values by option; None and options without a range pass.
      spell: how the message names an option.

    Raises:
      ValueError: one sentence that names the option and what would work.
    """
    for name, value in options.items():
        if value is None:
            continue
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(
                f"{spell(name)} {value!r} is unknown: use one of {', '.join(CHOICES[name])}"
            )
        if name in NUMBERS:
            kind, within, wanted = NUMBERS[name]
            if isinstance(value, bool) or not isinstance(value, kind) or not within(value):
                raise ValueError(f"{spell(name)} {value!r} cannot be used: give {wanted}")


@dataclass(frozen=True)
class Rule:
    """All options of a generation rule.

    Attributes:
      name: what users call it; ``summary``: one line; ``source``: whose defaults these are.
      strategy: "dynamic" accepts what passes the threshold and at least the step's quota, "static"
        exactly the quota, "sequential" the quota from the left, "entropy_bounded" the positions of
        least entropy whose sum stays below ``entropy_bound`` (nats).
      threshold: confidence that passes; ``compare``: above it ("gt"), or equal too ("ge"), or also
        all within 1e-5 of the most confident one ("near").
      steps: T, over which the quota of B positions is spread; None is B, one position a step.
      fallback: what fills the quota when too few pass.
      confidence: of the sampled token, before or after top-k and top-p; so with entropy.
      clamp_quota: the quota never exceeds the masked positions. False reproduces a top-k without
        that limit, which rewrites known positions.
      small_block: only the leftmost part of so many positions that still has masks may accept.
      edit_threshold: accepted tokens are replaced where another one is more confident than this;
        None never edits, 0 edits wherever the network prefers another token.
      max_post_steps: rounds of edits once nothing is masked, at most.
      temperature: 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off.
      ban_mask: the [MASK] token is never proposed.
    """

    name: str
    summary: str
    source: str
    strategy: Strategy = "dynamic"
    threshold: float = 0.95
    steps: int | None = None
    compare: Compare = "gt"
    fallback: Fallback = "most_confident"
    confidence: Confidence = "unfiltered"
    clamp_quota: bool = True
    small_block: int | None = None
    edit_threshold: float | None = None
    max_post_steps: int = 16
    entropy_bound: float = 0.35
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ban_mask: bool = True

    def __post_init__(self) -> None:
        check_options({field.name: getattr(self, field.name) for field in fields(self)})


_SDAR = "SDAR, generate.py"
_LLADA20, _LLADA21 = "LLaDA2.0, generate()", "LLaDA2.1, generate()"
_SGLANG, _FAST = "SGLang 0.5.23", "Fast-dLLM v2, batch_sample"

_ALL = (
    Rule(
        "sdar",
        "greedy, all above 0.95 or the most confident",
        "SDAR, OpenCompass evaluation",
    ),
    Rule(
        "sdar-static",
        "greedy, exactly B / T most confident a step",
        "SDAR, OpenCompass evaluation at threshold 1",
        strategy="static",
    ),
    Rule("sdar-sequential", "greedy, B / T from the left a step", _SDAR, strategy="sequential"),
    Rule(
        "sdar-entropy",
        "greedy, the surest positions of total entropy below 0.35",
        "SDAR and JetEngine, entropy_bounded",
        strategy="entropy_bounded",
    ),
    Rule(
        "sdar-script",
        "sampled, all above 0.85 after filtering",
        _SDAR,
        threshold=0.85,
        confidence="filtered",
        temperature=1.0,
    ),
    Rule("trado", "sampled, all above 0.9", "TraDo, evaluation", threshold=0.9, temperature=1.0),
    Rule(
        "jetengine",
        "sampled, all above 0.9 or the leftmost",
        "JetEngine, low_confidence_dynamic",
        threshold=0.9,
        fallback="leftmost",
        temperature=1.0,
    ),
    Rule(
        "lmdeploy",
        "greedy, all from 0.85 up or the most confident",
        "LMDeploy 0.18",
        threshold=0.85,
        compare="ge",
    ),
    Rule(
        "dinfer",
        "greedy, all from 0.9 up or as good as the most confident",
        "dInfer, threshold decoder as benchmarked",
        threshold=0.9,
        compare="near",
    ),
    Rule(
        "llada2.0",
        "greedy, all above 0.95 or the most confident",
        _LLADA20,
        confidence="filtered",
    ),
    Rule(
        "llada2.1",
        "greedy, all above 0.7, edits above 0.5 (quality)",
        "LLaDA2.1, recommended for quality",
        threshold=0.7,
        edit_threshold=0.5,
        confidence="filtered",
    ),
    Rule(
        "llada2.1-speed",
        "greedy, all above 0.5, edits at any confidence",
        "LLaDA2.1, recommended for speed",
        threshold=0.5,
        edit_threshold=0.0,
        confidence="filtered",
    ),
    Rule(
        "llada2.1-hf",
        "greedy, all above 0.95, edits above 0.9",
        _LLADA21,
        edit_threshold=0.9,
        confidence="filtered",
    ),
    Rule("sglang", "greedy, all above 0.95 or the most confident", f"{_SGLANG}, LowConfidence"),
    Rule(
        "sglang-joint",
        "greedy, all above 0.5, edits at any confidence",
        f"{_SGLANG}, JointThreshold",
        threshold=0.5,
        edit_threshold=0.0,
    ),
    Rule(
        "fast-dllm-v2",
        "greedy, one position a step in small blocks of 8",
        _FAST,
        threshold=1.0,
        small_block=8,
        confidence="filtered",
        top_p=0.95,
    ),
    Rule(
        "fast-dllm-v2-chat",
        "greedy, all above 0.9 in small blocks of 8",
        "Fast-dLLM v2, chat script",
        threshold=0.9,
        small_block=8,
        confidence="filtered",
        top_p=0.95,
    ),
)

#: Every rule by its name.
RULES: dict[str, Rule] = {rule.name: rule for rule in _ALL}


def rule_named(name: str, where: str = "--rule") -> Rule:
    """The rule of that name.

    Args:
      where: the option or file that says it, for the message.

    Raises:
      ValueError: there is none.
    """
    if name not in RULES:
        raise ValueError(f"{where} {name!r} is unknown: use one of {', '.join(RULES)}")
    return RULES[name]
