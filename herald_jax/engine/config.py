"""What a user sets: how the engine runs, and how it generates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from herald_jax.diffusion.rules import (
    Compare,
    Confidence,
    Fallback,
    Rule,
    Strategy,
    check_options,
    flag,
    rule_named,
)
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import Transfer
from herald_jax.models.config import ModelConfig

KeyIndex = Literal["int8", "int4", "none"]

#: Prompt tokens that are read together. On a GPU each chunk reads all weights once; elsewhere the
#: scores of a chunk are held whole.
GPU_CHUNK, CHUNK = 4096, 512


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
      method: "auto" (dense while the KV cache fits the device, herald-merged beyond), "dense", or
        a selector's name.
      budget: selected entries per KV head in the sparse layers.
      candidates_ratio: C / K of selectors that refine on the device; None takes the selector's own.
      key_index: what selectors that scan keys alone read: "int8" or "int4", an index beside K
        and V that is a quarter or an eighth of their size in bfloat16, or "none", the keys. Others
        have no index.
      exact_layers: leading layers that keep their full KV on the device; None takes the model's.
      transfer: between blocks copy all rows that are selected ("full"), or only those that the
        device lacks ("changes"), or have the device read them itself when time is short ("direct");
        the tokens are the same.
      max_batch: slots, requests decoded together.
      max_context: longest prompt + answer in tokens, also beyond what the model was made for;
        None fits the requests at hand, up to the model's own length.
      prefill_chunk: prompt tokens per prefill program (rounded to whole blocks); None takes 4,096
        on a GPU and 512 elsewhere.
      layer_group: layers per program of the main stream; None takes 4 on an accelerator, where
        the retrieval stream's programs run in between, and all of a kind on the CPU.
      queue_depth: programs of the main stream in flight at most (0: any number); None takes 2 on
        an accelerator, one running and one waiting.
      retrieval_streams: part-batches that alternate between host and device; None picks 2 on an
        accelerator and 1 on the CPU.
      threads: host kernel threads; None takes what affinity and the cgroup's quota allow.
      device_memory, host_memory: limits in bytes; None takes what there is.
      sinks: leading positions that are always selected.
      timeout: seconds any single wait may take before the requests concerned fail.
      warm_up: compile everything before the first request; without it programs compile as they are
        met, and the requests that meet them wait.
      trace: record a timeline of both streams.
    """

    method: str = "auto"
    budget: Budget = field(default_factory=Budget)
    candidates_ratio: float | None = None
    key_index: KeyIndex = "int8"
    exact_layers: int | None = None
    transfer: Transfer = "full"
    max_batch: int = 8
    max_context: int | None = None
    prefill_chunk: int | None = None
    layer_group: int | None = None
    queue_depth: int | None = None
    retrieval_streams: int | None = None
    threads: int | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    sinks: int = 4
    timeout: float = 600.0
    warm_up: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        positive = ["max_batch", "timeout"]
        optional = ["max_context", "prefill_chunk", "layer_group", "retrieval_streams", "threads"]
        optional += ["device_memory", "host_memory"]
        positive += [name for name in optional if getattr(self, name) is not None]
        for name in positive:
            if not getattr(self, name) > 0:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(self, name)} is not positive: give 1 or more")
        ratio = self.candidates_ratio
        if ratio is not None and not (ratio >= 1 and math.isfinite(ratio)):
            raise ValueError(
                f"--candidates-ratio {ratio:g} cannot be used: give 1 (fetch what is kept) or more"
            )
        if self.key_index not in get_args(KeyIndex):
            known = ", ".join(get_args(KeyIndex)[:-1]) + f" or {get_args(KeyIndex)[-1]}"
            raise ValueError(f"--key-index {self.key_index!r} is unknown: use {known}")
        if self.exact_layers is not None and self.exact_layers < 0:
            raise ValueError(f"--exact-layers {self.exact_layers} is negative: give 0 or more")
        if self.transfer not in get_args(Transfer):
            known = ", ".join(get_args(Transfer)[:-1]) + f" or {get_args(Transfer)[-1]}"
            raise ValueError(f"--transfer {self.transfer!r} is unknown: use {known}")
        if self.sinks < 0:
            raise ValueError(f"sinks {self.sinks} is negative: give 0 or more")

    def chunk(self, platform: str) -> int:
        """Prompt tokens per prefill program on a device of this ``jax.Device.platform``."""
        return self.prefill_chunk or (GPU_CHUNK if platform == "gpu" else CHUNK)


@dataclass(frozen=True)
class GenerationConfig:
    """How tokens are accepted and where an answer ends.

    Options of the generation rule are those of ``diffusion.rules.Rule``; None takes the rule's.

    Attributes:
      max_new_tokens: tokens generated at most, per request unless the request says otherwise.
      rule: the generation rule, a name from ``diffusion.rules.RULES``; None takes the model's.
      steps: T, denoising steps per block. With neither ``rule`` nor ``strategy`` given it means
        exactly B / T positions a step ("static").
      seed: with temperature, the seed of every request; draws depend on it, the block and the step.
      stop: strings that end an answer and are cut from it.
      stop_token_ids: ids that end an answer; None takes the model's.
    """

    max_new_tokens: int = 256
    rule: str | None = None
    threshold: float | None = None
    steps: int | None = None
    strategy: Strategy | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    compare: Compare | None = None
    fallback: Fallback | None = None
    confidence: Confidence | None = None
    clamp_quota: bool | None = None
    small_block: int | None = None
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    entropy_bound: float | None = None
    ban_mask: bool | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"--max-new-tokens {self.max_new_tokens} cannot be used: give 1 or more"
            )
        check_options(vars(self))
        if self.rule is not None:
            rule_named(self.rule)

    def resolve(self, default: str) -> Rule:
        """The rule that is named here or else ``default``, with the options that are set here.

        Raises:
          ValueError: there is no rule ``default``.
        """
        if self.rule is None:
            rule = rule_named(default, "the model's rule")
        else:
            rule = rule_named(self.rule)
        given = {
            option.name: getattr(self, option.name)
            for option in fields(Rule)
            if getattr(self, option.name, None) is not None
        }
        plain = self.rule is None and self.strategy is None
        if self.steps is not None and plain and rule.strategy == "dynamic":
            given["strategy"] = "static"
        made = replace(rule, **given)
        self._refuse_idle(made)
        return made

    def _refuse_idle(self, rule: Rule) -> None:
        """Refuses options that would change nothing."""
        dynamic = rule.strategy == "dynamic"
        needs = {
            "threshold": (dynamic, "--strategy dynamic"),
            "compare": (dynamic, "--strategy dynamic"),
            "fallback": (dynamic, "--strategy dynamic"),
            "entropy_bound": (rule.strategy == "entropy_bounded", "--strategy entropy_bounded"),
            "max_post_steps": (rule.edit_threshold is not None, "--edit-threshold"),
        }
        for option, (works, needed) in needs.items():
            if getattr(self, option) is not None and not works:
                raise ValueError(
                    f"{flag(option)} does nothing with strategy {rule.strategy}: it needs {needed}"
                )


def check_rule(rule: Rule, model: ModelConfig) -> None:
    """Refuses a rule that a network cannot follow.

    Raises:
      ValueError: naming the option.
    """
    if rule.steps is not None and rule.steps > model.block_size:
        raise ValueError(
            f"--steps {rule.steps} is more than the block size {model.block_size}: every step "
            f"accepts at least one position, so give 1 to {model.block_size}"
        )
    if model.shifts_logits and not rule.clamp_quota:
        raise ValueError(
            "--no-clamp-quota would rewrite the first position of a block, for which this model "
            "has no logits: leave it out"
        )
