"""Trains the embedded model: ``python -m herald_jax.training.train --help``."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.models.config import ModelConfig
from herald_jax.training import curriculum
from herald_jax.training.data import KINDS, Batch, Stage, batch_shapes, make_batch
from herald_jax.training.loss import Params, init_params, optimizer, train_step
from herald_jax.training.state import Progress, export, load_state, read_params, save_state
from herald_jax.training.vocabulary import Encoder, build_tokenizer, save_tokenizer

WINDOW = 50
LOG_EVERY = 25


@dataclass(frozen=True)
class Settings:
    """Options of a run; ``steps`` and ``seconds`` bound it, whichever comes first.

    The learning rate warms up over ``warmup`` steps and falls as a cosine over the last
    ``decay_share`` of the run. ``bind_weight`` fades to zero over ``fade`` steps once the last
    supervised stage is passed.
    """

    seed: int = 0
    steps: int = 1_000_000
    seconds: float = 480.0
    rate: float = 7e-4
    warmup: int = 100
    decay_share: float = 0.35
    bind_weight: float = 0.5
    fade: int = 300
    workers: int = 0
    save_every: float = 60.0
    dtype: str = "float32"
    attention: str = "xla"


_ENCODER: Encoder | None = None


def _start_worker(tokenizer: str) -> None:
    global _ENCODER
    _ENCODER = Encoder.load(Path(tokenizer))


def _work(stage: Stage, block: int, seed: int, index: int) -> Batch:
    assert _ENCODER is not None
    return make_batch(_ENCODER, stage, block, seed, index)


@contextmanager
def batch_maker(tokenizer: Path, workers: int) -> Iterator[Callable[..., Future[Batch]]]:
    """Gives ``submit(stage, block, seed, index)``; batches are made by background processes."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (str(tokenizer),))
    try:
        yield lambda *arguments: pool.submit(_work, *arguments)
    finally:
        pool.shutdown(cancel_futures=True)


class Trainer:
    """Runs the curriculum; its whole state is ``params``, ``moments`` and ``progress``."""

    def __init__(
        self, config: ModelConfig, plan: list[Stage], settings: Settings, out: Path
    ) -> None:
        self.config, self.plan, self.settings, self.out = config, plan, settings, out
        self.params: Params = init_params(config, settings.seed)
        self.moments: Any = optimizer().init(self.params)
        self.progress = Progress()
        self.pending: list[tuple[int, dict[str, jax.Array]]] = []
        self.compiler = ThreadPoolExecutor(1)
        self.programs: dict[tuple[int, ...], Future[Any]] = {}

    def start_from(self, folder: Path, reached: int) -> None:
        """Takes exported weights and opens stage ``reached``; moments start anew."""
        self.params = read_params(folder)
        self.progress.reached = reached
        if not any(stage.supervised for stage in self.plan[reached:]):
            self.progress.released = -self.settings.fade

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
        """Continues from ``out`` if a state is there."""
        if not (self.out / "state.npz").exists():
            return False
        self.params, self.moments, self.progress = load_state(self.out, self.params)
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
        step = self.compile(self.plan[number]).result()
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
        save_state(self.out, self.params, self.moments, self.progress)
        export(self.out, self.config, self.params)
        (self.out / "history.json").write_text(json.dumps(self.progress.history))

    def run(self, submit: Callable[..., Future[Batch]], ahead: int) -> None:
        """Trains until done; batch ``i`` depends on the seed, ``i`` and the stage alone."""
        settings, progress = self.settings, self.progress
        queue: deque[tuple[int, Future[Batch]]] = deque()
        index, stages, saved = progress.step, len(self.plan), time.monotonic()
        before, printed = time.monotonic(), progress.step
        assert stages > 0
        while self.done() < 1.0:
            while len(queue) < ahead:
                number = curriculum.choose(self.plan, progress.reached, settings.seed, index)
                queue.append(
                    (
                        number,
                        submit(self.plan[number], self.config.block_size, settings.seed, index),
                    )
                )
                index += 1
            number, future = queue.popleft()
            self.update(number, future.result(timeout=300))
            now = time.monotonic()
            progress.seconds += now - before
            before = now
            if progress.step >= printed + 8 * LOG_EVERY and progress.history:
                print(self.report(), flush=True)
                printed = progress.step
            if now - saved > settings.save_every and not self.pending:
                self.save()
                saved = now
        if self.pending:
            self.note()
        self.save()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m herald_jax.training.train", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of state, weights and log")
    parser.add_argument("--model", default="tiny", choices=("tiny", "micro"))
    parser.add_argument("--start-from", type=Path, help="exported folder whose weights to take")
    parser.add_argument("--reached", type=int, default=0, help="stage to open with --start-from")
    parser.add_argument("--curriculum", default="tiny", choices=("tiny", "micro"))
    for name, default in vars(Settings()).items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(default), default=default)
    options = vars(parser.parse_args())
    settings = Settings(**{name: options[name] for name in vars(Settings())})
    out: Path = options["out"]
    if not (out / "tokenizer.json").exists():
        save_tokenizer(build_tokenizer(), out, 8192)
    size = Encoder.load(out / "tokenizer.json").tokenizer.get_vocab_size()
    config = curriculum.model_config(options["model"], size)
    trainer = Trainer(config, curriculum.stages(options["curriculum"]), settings, out)
    resumed = trainer.resume()
    if options["start_from"] and not resumed:
        trainer.start_from(options["start_from"], options["reached"])
    print("resumed" if resumed else "new run", jax.devices(), flush=True)
    workers = settings.workers or max(1, (os.cpu_count() or 2) - 2)
    with batch_maker(out / "tokenizer.json", workers) as submit:
        trainer.run(submit, ahead=4 * workers)
    print(trainer.report())


if __name__ == "__main__":
    main()
