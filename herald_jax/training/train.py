"""Trains the embedded model.

A run makes its own data: documents of up to 8K tokens with questions about them, by rule, between
sentences of Python's documentation. It learns them stage by stage (herald_jax.training.curriculum).
540 seconds on one H200, about 11,700 steps with 14 or more CPU cores to make batches, give the
embedded model; other GPUs take longer for the same steps, so give them more --seconds.

  python -m herald_jax.training.train --out runs/tiny \\
      --dtype bfloat16 --attention cudnn --seconds 540

A small network on short documents, to try the same on a CPU; it does one or two steps a second
there and needs thousands to find anything, so a minute only shows that everything runs:

  python -m herald_jax.training.train --out runs/micro --model micro --curriculum micro

--out then holds the trained model as a Hugging Face folder (config.json, model.safetensors,
tokenizer.json), the log (history.json, which herald_jax.training.plot draws) and the state
(state.npz). The same command goes on where the last one stopped, exactly. Ctrl-C saves and ends
after the step in progress; a second Ctrl-C ends at once and keeps what was saved last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax

from herald_jax.training import curriculum, prose
from herald_jax.training.data import Batch, Stage, make_batch
from herald_jax.training.settings import Settings
from herald_jax.training.trainer import Submit, Trainer
from herald_jax.training.vocabulary import Encoder, build_tokenizer, save_tokenizer

MODELS = ("tiny", "micro")
MAX_LENGTH = 8192

_ENCODER: Encoder | None = None


def _start_worker(tokenizer: str) -> None:
    global _ENCODER
    # Ctrl-C reaches every process of a terminal; the main one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ENCODER = Encoder.load(Path(tokenizer))


def _work(stage: Stage, block: int, seed: int, index: int) -> Batch:
    assert _ENCODER is not None
    return make_batch(_ENCODER, stage, block, seed, index)


@contextmanager
def batch_maker(tokenizer: Path, workers: int) -> Iterator[Submit]:
    """Gives ``submit(stage, block, seed, index)``; batches are made by background processes."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (str(tokenizer),))
    try:
        yield lambda *arguments: pool.submit(_work, *arguments)
    finally:
        pool.shutdown(cancel_futures=True)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults beside the options, the text above as it is."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m herald_jax.training.train", description=__doc__, formatter_class=_Help
    )
    made.add_argument(
        "--out", type=Path, required=True, help="folder of this run", default=argparse.SUPPRESS
    )
    made.add_argument(
        "--model", default="tiny", choices=MODELS, help="tiny: 6.6M weights; micro: a study of it"
    )
    made.add_argument(
        "--curriculum", default="tiny", choices=MODELS, help="tiny: up to 8K tokens; micro: 192"
    )
    for name, entry in Settings.__dataclass_fields__.items():
        made.add_argument(
            "--" + name.replace("_", "-"),
            type=type(entry.default),
            default=entry.default,
            choices=entry.metadata["choices"],
            help=entry.metadata["help"],
        )
    return made


def open_tokenizer(out: Path) -> Encoder:
    """The tokenizer of a run's folder, trained if this is a new run.

    Raises:
      ValueError: the folder is no folder of a run.
      prose.NoProse: there is no text to train with.
    """
    path, state = out / "tokenizer.json", out / "state.npz"
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: give a folder")
    if state.exists() and not path.exists():
        raise ValueError(f"{out} has a state but no tokenizer.json: use another --out")
    if not state.exists() and (out / "config.json").exists():
        raise ValueError(f"{out} holds a model but no state to go on from: use another --out")
    if not path.exists():
        save_tokenizer(build_tokenizer(), out, MAX_LENGTH)
    try:
        return Encoder.load(path)
    except Exception as error:  # the library raises this class itself
        raise ValueError(f"{path} cannot be read ({error}): use another --out") from error


def open_run(options: argparse.Namespace) -> tuple[Trainer, bool]:
    """The run that the command line asks for, and whether it goes on with an earlier one.

    Raises:
      ValueError: one sentence that names the option or file.
      prose.NoProse: there is no text to train with.
    """
    settings = Settings(**{name: getattr(options, name) for name in vars(Settings())})
    if settings.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError("--attention cudnn needs a CUDA device and there is none: use xla")
    size = open_tokenizer(options.out).tokenizer.get_vocab_size()
    config = curriculum.model_config(options.model, size)
    trainer = Trainer(config, curriculum.stages(options.curriculum), settings, options.out)
    return trainer, trainer.resume()


def main() -> None:
    """Trains as the command line says."""
    options = parser().parse_args()
    try:
        try:
            trainer, resumed = open_run(options)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error
        _train(trainer, resumed)
    except (OSError, prose.NoProse) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(f"stopped at once; {options.out} keeps what was saved last") from None


def _train(trainer: Trainer, resumed: bool) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        print("stopping after this step, then saving", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        trainer.stopping = True

    out, workers = trainer.out, trainer.settings.workers or max(1, (os.cpu_count() or 2) - 2)
    begun = f"going on at step {trainer.progress.step}" if resumed else "a new run"
    device = jax.devices()[0].device_kind
    print(f"{out}: {begun} on {device}, {workers} processes make batches", file=sys.stderr)
    before = signal.signal(signal.SIGINT, stop)
    try:
        with batch_maker(out / "tokenizer.json", workers) as submit:
            trainer.run(submit, ahead=4 * workers)
    finally:
        signal.signal(signal.SIGINT, before)
    print(trainer.report(), file=sys.stderr)
    if trainer.stopping:
        print(f"stopped and saved: the same command goes on; {out} holds the model so far")
    else:
        print(f"done: {out} holds the model; `herald convert {out} DIR` makes it ready to serve")


if __name__ == "__main__":
    main()
