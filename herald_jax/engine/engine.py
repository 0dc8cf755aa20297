"""The public engine: requests in, results out, continuous batching by block."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from herald_jax import checkpoint
from herald_jax.compile_cache import keep_compiled
from herald_jax.engine.config import EngineConfig, GenerationConfig, check_rule
from herald_jax.engine.errors import EngineError
from herald_jax.engine.harvest import Harvest
from herald_jax.engine.intake import Intake, Prompt
from herald_jax.engine.rehearsal import Progress
from herald_jax.engine.request import Delta, Request, Result, failed
from herald_jax.engine.session import Session
from herald_jax.engine.sizing import Sizing
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.summary import summarize
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.warm_up import WarmUp
from herald_jax.kv.full_pool import PoolFull
from herald_jax.kv.plan import MemoryPlan
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig
from herald_jax.selection import check_method
from herald_jax.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parents[1] / "assets" / "herald_tiny"


class Engine:
    """Generates with one model; see ``generate``."""

    def __init__(
        self,
        config: ModelConfig,
        model: Any,
        tokenizer: Tokenizer | None = None,
        engine_config: EngineConfig | None = None,
    ) -> None:
        """Wraps a network that is on its device.

        Args:
          config: the network's description; ``model``: its Flax module, or the ``LayerStack`` of
            another engine.
          tokenizer: for text prompts; without one, prompts are token ids.
          engine_config: how to run.

        Raises:
          ValueError: the method is unknown, leaves it no sparse layer, or takes no C / K.
        """
        self.config, self.tokenizer = config, tokenizer
        self.engine_config = engine_config or EngineConfig()
        check_method(self.engine_config.method, self.engine_config.candidates_ratio)
        self.device = jax.devices()[0]
        kept = keep_compiled()
        if kept.failed:
            warnings.warn(kept.reason, stacklevel=2)
        shared = isinstance(model, LayerStack)
        self.stack = model if shared else LayerStack(model, self.device)
        dtype = np.dtype(jax.tree.leaves(self.stack.shell)[0].dtype)
        self.sizing = Sizing(config, self.engine_config, dtype)
        self.timeline = Timeline(self.engine_config.trace)
        self.rule = config.rule
        self.method: str | None = None
        self.method_reason = ""
        self.session: Session | None = None
        self.warm_up: WarmUp | None = None
        self.host_kv_peak = 0
        self.device_kv_bytes = 0
        self.plan: MemoryPlan | None = None
        self.scratch: int | None = None
        self._aborted: set[str] = set()
        self._idle = threading.Lock()
        self._closing = False

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        engine_config: EngineConfig | None = None,
        *,
        dtype: str | None = None,
    ) -> Engine:
        """Loads a converted checkpoint with its tokenizer.

        Args:
          path: a checkpoint directory, or "embedded" for the model in the package.
          engine_config: how to run.
          dtype: "bfloat16" or "float32"; None takes float32 on the CPU, else the stored one.

        Raises:
          CheckpointError: there is no whole checkpoint at ``path``.
        """
        path = EMBEDDED if str(path) == "embedded" else Path(path)
        if dtype is None and jax.default_backend() == "cpu":
            dtype = "float32"
        config, model = checkpoint.load(path, dtype=dtype)
        family = registry.family_of(config)
        tokenizer = Tokenizer.from_directory(
            path,
            config,
            chat_template=family.chat_template,
            mask_literal=family.mask_literal,
        )
        return cls(config, model, tokenizer, engine_config)

    def with_config(self, engine_config: EngineConfig) -> Engine:
        """Another engine over the same weights, which also shares what is compiled already."""
        return Engine(self.config, self.stack, self.tokenizer, engine_config)

    def generate(
        self,
        prompts: Sequence[Prompt],
        generation: GenerationConfig | None = None,
        *,
        stream: bool = False,
        chat: bool = False,
        progress: Progress | None = None,
    ) -> Iterator[Result | Delta]:
        """Generates for every prompt; more prompts than slots wait their turn.

        Args:
          prompts: text, token ids, or mappings with the fields of a ``--requests`` line.
          generation: how to accept tokens and where to end.
          stream: also yield a ``Delta`` whenever a block's text is final.
          chat: wrap text prompts in the model's chat template.
          progress: called with ("programs" | "prompts" | "tokens", done, total) as the work goes
            on: programs compiled before it begins, prompts read, tokens generated.

        Yields:
          A ``Result`` per prompt as it finishes, failed ones included; with ``stream``, deltas
          whose texts joined give the result's.

        Raises:
          ValueError: an option does not fit the model.
          EngineError: the engine's memory does not fit; nothing was generated.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is one string: give a list of prompts")
        generation = generation or GenerationConfig()
        rule = generation.resolve(self.config.rule)
        check_rule(rule, self.config)
        intake = Intake(
            self.config, self.tokenizer, self.engine_config.max_context, strategy=rule.strategy
        )
        limit = generation.max_new_tokens
        read = [intake.read(n, prompt, limit, chat) for n, prompt in enumerate(prompts)]
        yield from (item for item in read if isinstance(item, Result))
        waiting = deque(item for item in read if isinstance(item, Request))
        if not waiting:
            return
        if not self._idle.acquire(blocking=False):
            raise EngineError(
                "this engine is generating already: finish or close that generator first, or make "
                "another engine with with_config"
            )
        session: Session | None = None
        self._aborted.clear()
        try:
            session = self._prepare(list(waiting), generation, progress)
            yield from self._loop(session, waiting, stream, progress)
        except EngineError as error:
            if session is None:
                raise
            # Nothing is lost silently: every request that was accepted gets its answer.
            for index, _ in list(session.batch.active()):
                yield self._failed(session.retire(index).result, str(error))
            for request in waiting:
                yield failed(request, str(error))
            self._drop_session()
        except GeneratorExit:
            raise
        except BaseException:
            # Interrupted in the middle of a block, buffers may be gone: begin anew next time.
            self._drop_session()
            raise
        finally:
            # One that was dropped is closed already.
            if session is not None and session is self.session:
                session.abandon()
            if self._closing:
                self._drop_session()
            self._idle.release()

    def abort(self, request_id: str) -> None:
        """Ends a request of the running generation at the next block boundary.

        Its result keeps what it has so far.
        """
        self._aborted.add(request_id)

    def _prepare(
        self,
        requests: Sequence[Request],
        generation: GenerationConfig,
        progress: Progress | None = None,
    ) -> Session:
        """The session for these requests: the one at hand where it fits, else a new one.

        All that they will run is compiled then, unless the configuration leaves that out.
        """
        longest = max(request.rows(self.config.block_size) for request in requests)
        session = self.session
        rule = generation.resolve(self.config.rule)
        self.rule = rule.name
        temperatures = [request.own.temperature for request in requests]
        sampled = any((rule.temperature if own is None else own) > 0 for own in temperatures)
        if session is None or not session.take(longest, generation, sampled):
            session = self._new_session(longest, generation, sampled)
        assert self.warm_up is not None
        if not self.engine_config.warm_up:
            return session
        try:
            self.warm_up.run(requests, progress)
            self.scratch = self.warm_up.scratch
        except BaseException:
            self._drop_session()
            raise
        return session

    def _new_session(self, longest: int, generation: GenerationConfig, sampled: bool) -> Session:
        self._drop_session()
        context = self.engine_config.max_context or longest
        method, self.method_reason = self.sizing.choose(context)
        shape = self.sizing.shape(method, context)
        session = Session(
            self.config,
            self.stack,
            shape,
            self.sizing.selector(method),
            self.engine_config,
            generation,
            sampled=sampled,
            host_bytes=self.sizing.host_pool_bytes(method, shape, sampled),
            device=self.device,
            timeline=self.timeline,
        )
        self.session, self.warm_up, self.method = session, WarmUp(session), method
        self.device_kv_bytes = max(self.device_kv_bytes, shape.device_bytes)
        self.plan = self.sizing.plan(shape, sampled)
        return session

    def _loop(
        self,
        session: Session,
        waiting: deque[Request],
        stream: bool,
        progress: Progress | None,
    ) -> Iterator[Result | Delta]:
        harvest = Harvest(session.generation, self.config.stop_token_ids, self.tokenizer)
        prompts = len(waiting)
        total = sum(request.max_new_tokens for request in waiting)
        done = 0
        while waiting or any(session.batch.active()):
            if self._closing:
                raise EngineError("the engine was closed before the request ended")
            yield from self._admit(session, waiting, prompts, progress)
            if not any(session.batch.active()):
                continue
            tokens, broken, failures = session.run_block()
            for index, slot in list(session.batch.active()):
                reason, error = None, None
                if broken[index]:
                    # What such a block holds is no part of an answer.
                    error = "the network's output is not finite numbers"
                else:
                    reason = harvest.take(slot, tokens[index])
                if reason is None and error is None:
                    aborted = slot.request.id in self._aborted
                    error = "the request was aborted" if aborted else failures.get(index)
                final = reason is not None or error is not None
                if error is not None:
                    self._failed(slot.result, error)
                delta = harvest.delta(slot, final)
                if stream and (delta.text or delta.token_ids):
                    yield delta
                slot.start += self.config.block_size
                if final:
                    session.retire(index)
                    if broken[index] or index in failures:
                        session.clear(index)
                    done += slot.request.max_new_tokens
                    self.timeline.tokens += slot.result.completion_tokens
                    yield slot.result
            if progress is not None:
                running = sum(len(slot.generated) for _, slot in session.batch.active())
                progress("tokens", done + running, total)

    def _admit(
        self,
        session: Session,
        waiting: deque[Request],
        prompts: int,
        progress: Progress | None,
    ) -> Iterator[Result]:
        """Fills free slots; a request that finds the pool full waits for others to end."""
        for index in session.batch.free():
            while waiting and waiting[0].id in self._aborted:
                yield failed(waiting.popleft(), "the request was aborted")
            if not waiting:
                return
            try:
                session.admit(index, waiting[0])
            except PoolFull as error:
                if not any(session.batch.active()):
                    yield failed(waiting.popleft(), f"{error}; raise --host-memory")
                return
            waiting.popleft()
            self.host_kv_peak = max(self.host_kv_peak, session.host_kv_bytes)
            if progress is not None:
                progress("prompts", prompts - len(waiting), prompts)

    @staticmethod
    def _failed(result: Result, error: str) -> Result:
        result.finish_reason, result.error = "error", error
        return result

    def summary(self, seconds: float) -> dict[str, Any]:
        """The ``--json`` summary of what was generated in ``seconds``; delivered tokens only."""
        return summarize(self, seconds)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees buffers, pools and threads; a later ``generate`` makes them anew.

        While a generation is running it ends at its next block: what is unfinished fails.
        """
        if self._idle.acquire(blocking=False):
            try:
                self._drop_session()
            finally:
                self._idle.release()
        else:
            self._closing = True

    def _drop_session(self) -> None:
        self._closing = False
        if self.session is not None:
            self.session.close()
            self.session = self.warm_up = None
