"""One training run: stages, steps, what is logged and what is saved."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.models.config import ModelConfig
from herald_jax.training import curriculum
from herald_jax.training.data import KINDS, Batch, Stage, batch_shapes
from herald_jax.training.loss import Params, init_params, optimizer, train_step
from herald_jax.training.settings import Settings
from herald_jax.training.state import Progress, export, load_state, save_state

# Newest batches of a stage whose accuracies are held against its goals.
WINDOW = 50
# Steps between looks at the metrics, which wait for the device.
LOG_EVERY = 25
BATCH_TIMEOUT, COMPILE_TIMEOUT = 300.0, 1800.0

Submit = Callable[[Stage, int, int, int], Future[Batch]]


class Trainer:
    """Runs the curriculum; its whole state is ``params``, ``moments``, ``progress``, ``pending``.

    Attributes:
      pending: stage and metrics of the steps that were not looked at yet.
      stopping: set to leave ``run`` after the step in progress.
    """

    def __init__(
        self, config: ModelConfig, plan: list[Stage], settings: Settings, out: Path
    ) -> None:
        self.config, self.plan, self.settings, self.out = config, plan, settings, out
        self.params: Params = init_params(config, settings.seed)
        self.moments: Any = optimizer().init(self.params)
        self.progress = Progress(plan=[f"{stage.name} {stage.shape}" for stage in plan])
        self.pending: list[tuple[int, dict[str, Any]]] = []
        self.stopping = False
        self.compiler = ThreadPoolExecutor(1)
        self.programs: dict[tuple[int, ...], Future[Any]] = {}

    def compile(self, stage: Stage) -> Future[Any]:
        """The compiled step for a stage's shapes, made by a background thread."""
        if stage.shape not in self.programs:
            shapes = batch_shapes(stage, self.config.block_size)
            batch = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
                (self.params, self.moments),
            )
            number = jax.ShapeDtypeStruct((), np.float32)
            lowered = train_step.lower(
                *like,
                batch,
                number,
                number,
                config=self.config,
                context=stage.context,
                branches=stage.branches,
                dtype=jnp.dtype(self.settings.dtype),
                attention=self.settings.attention,
            )
            self.programs[stage.shape] = self.compiler.submit(lowered.compile)
        return self.programs[stage.shape]

    def resume(self) -> bool:
        """Continues from ``out`` if a state is there.

        Raises:
          ValueError: the state is that of another network or curriculum.
        """
        if not (self.out / "state.npz").exists():
            return False
        params, moments, progress = load_state(self.out, self.params)
        if progress.plan != self.progress.plan:
            raise ValueError(
                f"{self.out}/state.npz belongs to another curriculum; use the --curriculum it was "
                "begun with or another --out"
            )
        self.params, self.moments, self.progress = params, moments, progress
        self.pending = [
            (number, {name: np.float32(value) for name, value in metrics.items()})
            for number, metrics in progress.unread
        ]
        return True

    def done(self) -> float:
        """Share of the run that is over, 0 to 1."""
        used = self.progress.step / self.settings.steps
        return min(1.0, max(used, self.progress.seconds / self.settings.seconds))

    def rate(self) -> float:
        """Learning rate of the next step."""
        settings = self.settings
        warm = min(1.0, (self.progress.step + 1) / settings.warmup)
        left = min(1.0, (1.0 - self.done()) / settings.decay_share)
        return settings.rate * warm * (0.02 + 0.98 * 0.5 * (1 - math.cos(math.pi * left)))

    def bind_weight(self) -> float:
        """Weight of the binding loss at the next step."""
        released = self.progress.released
        if released < 0:
            return self.settings.bind_weight
        faded = (self.progress.step - released) / self.settings.fade
        return self.settings.bind_weight * max(0.0, 1.0 - faded)

    def update(self, number: int, batch: Batch) -> None:
        """One step on a batch of stage ``number``."""
        step = _wait(
            self.compile(self.plan[number]),
            COMPILE_TIMEOUT,
            f"the compiled step of stage {self.plan[number].name!r}",
        )
        for stage in self.plan[number + 1 : number + 3]:
            self.compile(stage)
        self.params, self.moments, metrics = step(
            self.params,
            self.moments,
            {name: jnp.asarray(array) for name, array in batch.items()},
            np.float32(self.rate()),
            np.float32(self.bind_weight()),
        )
        self.pending.append((number, metrics))
        self.progress.step += 1
        if self.progress.step % LOG_EVERY == 0:
            self.note()

    def note(self) -> None:
        """Reads the metrics of the last steps, logs them and opens the next stage when due."""
        progress, pending = self.progress, jax.device_get(self.pending)
        self.pending = []
        for number in sorted({number for number, _ in pending}):
            mine = [metrics for other, metrics in pending if other == number]
            means = {name: float(np.mean([m[name] for m in mine])) for name in mine[0]}
            for kind in KINDS:
                have = [float(m[kind]) for m in mine if m[kind] >= 0]
                means[kind] = float(np.mean(have)) if have else -1.0
            if number == progress.reached:
                progress.recent += [{kind: float(m[kind]) for kind in KINDS} for m in mine]
            progress.history.append({"step": progress.step, "stage": number, **means})
        progress.recent = progress.recent[-WINDOW:]
        if len(progress.recent) == WINDOW and self._passed(self.plan[progress.reached]):
            if progress.released < 0 and not self._supervised_beyond():
                progress.released = progress.step
            if progress.reached + 1 < len(self.plan):
                progress.reached += 1
                progress.opened = progress.step
                progress.recent = []

    def _passed(self, stage: Stage) -> bool:
        """Whether the reached stage is to be left."""

        def accuracy(kind: str) -> float:
            have = [row[kind] for row in self.progress.recent if row[kind] >= 0]
            return float(np.mean(have)) if have else 0.0

        if all(accuracy(kind) >= goal for kind, goal in stage.goals):
            return True
        waited = self.progress.step - self.progress.opened >= stage.patience
        return waited and accuracy("one") >= curriculum.MOSTLY

    def _supervised_beyond(self) -> bool:
        return any(stage.supervised for stage in self.plan[self.progress.reached + 1 :])

    def report(self) -> str:
        """One line on where the run stands."""
        if not self.progress.history:
            return f"step {self.progress.step} {self.progress.seconds:.0f}s"
        last = self.progress.history[-1]
        return (
            f"step {self.progress.step} {self.progress.seconds:.0f}s "
            f"[{self.plan[int(last['stage'])].name}] "
            + " ".join(f"{kind} {last[kind]:.2f}" for kind in KINDS if last[kind] >= 0)
            + f" end {last['end']:.2f} loss {last['answer_loss']:.3f} "
            f"binding {last['binding_loss']:.3f} x {self.bind_weight():.3f} "
            f"rate {self.rate():.1e}"
        )

    def save(self) -> None:
        """Writes the state, the exported weights and the log."""
        self.progress.unread = [
            (number, {name: float(value) for name, value in metrics.items()})
            for number, metrics in jax.device_get(self.pending)
        ]
        save_state(self.out, self.params, self.moments, self.progress)
        export(self.out, self.config, self.params)
        (self.out / "history.json").write_text(json.dumps(self.progress.history))

    def run(self, submit: Submit, ahead: int) -> None:
        """Trains until done or told to stop, and saves.

        Args:
          submit: makes batch ``index`` of a stage: (stage, block size, seed, index) -> batch.
          ahead: how many batches are asked for before they are needed. A stage that opens waits
            for those, which are kept across a stop.
        """
        progress, settings = self.progress, self.settings
        queue: deque[Future[Batch]] = deque()
        before = saved = time.monotonic()
        printed = progress.step
        while self.done() < 1.0 and not self.stopping:
            while len(queue) < ahead:
                index = progress.step + len(queue)
                if len(queue) == len(progress.chosen):
                    progress.chosen.append(
                        curriculum.choose(self.plan, progress.reached, settings.seed, index)
                    )
                stage = self.plan[progress.chosen[len(queue)]]
                queue.append(submit(stage, self.config.block_size, settings.seed, index))
            number, future = progress.chosen.pop(0), queue.popleft()
            what = f"batch {progress.step} of stage {self.plan[number].name!r}"
            self.update(number, _wait(future, BATCH_TIMEOUT, what))
            now = time.monotonic()
            progress.seconds += now - before
            before = now
            if progress.step >= printed + 8 * LOG_EVERY and progress.history:
                print(self.report(), file=sys.stderr, flush=True)
                printed = progress.step
            if now - saved > settings.save_every:
                self.save()
                saved = now
        if self.pending and not self.stopping:
            self.note()
        self.save()


def _wait(future: Future[Any], seconds: float, what: str) -> Any:
    try:
        return future.result(timeout=seconds)
    except TimeoutError as error:
        raise TimeoutError(f"waited {seconds:.0f} s for {what}") from error
