"""The public engine: requests in, results out, continuous batching by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from herald_jax import checkpoint
from herald_jax.diffusion.stop import end_of, find_stop, held_back, tokens_for
from herald_jax.engine.config import EngineConfig, GenerationConfig
from herald_jax.engine.errors import EngineError
from herald_jax.engine.request import Delta, Request, Result, Slot, failed
from herald_jax.engine.session import Session
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.timeline import Timeline
from herald_jax.kv.device_cache import CacheShape
from herald_jax.kv.full_pool import PoolFull
from herald_jax.kv.host_memory import format_bytes, host_memory_room
from herald_jax.kv.plan import cache_shape, plan
from herald_jax.models.config import ModelConfig
from herald_jax.selection import make_selector
from herald_jax.tokenizer import Tokenizer, check_ids

Prompt = str | Sequence[int] | Mapping[str, Any]
Progress = Callable[[str, int, int], None]


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
          config: the network's description; ``model``: its Flax module.
          tokenizer: for text prompts; without one, prompts are token ids.
          engine_config: how to run.

        Raises:
          ValueError: the method is unknown or leaves it no sparse layer.
        """
        self.config, self.tokenizer = config, tokenizer
        self.engine_config = engine_config or EngineConfig()
        self.device = jax.devices()[0]
        self.stack = LayerStack(model)
        self.dtype = np.dtype(jax.tree.leaves(self.stack.shell)[0].dtype)
        self.timeline = Timeline(self.engine_config.trace)
        self.method: str | None = None
        self.method_reason = "asked for"
        self.session: Session | None = None
        self.host_kv_peak = 0
        self._options: GenerationConfig | None = None
        self._aborted: set[str] = set()
        if self.engine_config.method not in ("auto", "dense"):
            make_selector(self.engine_config.method)
            self._exact_layers(self.engine_config.method)

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
        if str(path) == "embedded":
            path = Path(__file__).parents[1] / "assets" / "herald_tiny"
        if dtype is None and jax.default_backend() == "cpu":
            dtype = "float32"
        config, model = checkpoint.load(path, dtype=dtype)
        return cls(config, model, Tokenizer.from_directory(path, config), engine_config)

    # -- sizing ---------------------------------------------------------------------------------

    def _exact_layers(self, method: str) -> int:
        if method == "dense":
            return self.config.num_layers
        asked = self.engine_config.exact_layers
        exact = self.config.exact_layers if asked is None else asked
        if exact >= self.config.num_layers:
            raise ValueError(
                f"--exact-layers {exact} leaves no sparse layer of {self.config.num_layers} for "
                f"{method}: give at most {self.config.num_layers - 1}, or use --method dense"
            )
        return exact

    def shape(self, method: str, max_context: int) -> CacheShape:
        """Cache sizes of a method for requests of at most ``max_context`` tokens."""
        ratio = 1.0 if method == "dense" else make_selector(method).candidates_ratio
        return cache_shape(
            self.config,
            slots=self.engine_config.max_batch,
            max_context=max_context,
            exact_layers=self._exact_layers(method),
            budget=self.engine_config.budget,
            candidates_ratio=ratio,
            dtype=self.dtype,
        )

    @property
    def device_memory(self) -> int:
        """Bytes the device may hold: the option, what the device reports, or the host's room."""
        if self.engine_config.device_memory is not None:
            return self.engine_config.device_memory
        stats = self.device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return int(limit) if limit else host_memory_room()

    @property
    def host_memory(self) -> int:
        """Bytes the host may hold for KV: the option, or what affords a reserve."""
        asked = self.engine_config.host_memory
        return host_memory_room() if asked is None else asked

    def choose_method(self, max_context: int) -> str:
        """What "auto" means for these requests: dense while its cache fits the device."""
        asked = self.engine_config.method
        if asked != "auto":
            return asked
        need = plan(self.config, self.shape("dense", max_context)).device_bytes
        room = self.device_memory
        fits = need <= room
        self.method_reason = (
            f"the dense cache {'fits' if fits else 'does not fit'} the device: "
            f"{format_bytes(need)} of {format_bytes(room)}"
        )
        return "dense" if fits else "herald-draft"

    def _prepare(self, requests: Sequence[Request], generation: GenerationConfig) -> Session:
        block = self.config.block_size
        longest = max(request.rows(block) for request in requests)
        context = self.engine_config.max_context or longest
        # Accept rules are compiled in; everything else about a generation is an argument.
        session = self.session
        if session is not None and session.shape.rows >= longest and self._options == generation:
            return session
        self.close()
        method = self.choose_method(context)
        shape = self.shape(method, context)
        made = plan(self.config, shape, prefill_chunk=self.engine_config.prefill_chunk)
        if made.device_bytes > self.device_memory:
            raise EngineError(
                f"{method} needs {format_bytes(made.device_bytes)} on the device for batch "
                f"{shape.slots} at {context} tokens and has {format_bytes(self.device_memory)}: "
                "lower --max-batch, --max-context or --budget, or use another --method"
            )
        room = self.host_memory - made.staging
        smallest = made.host_pool // shape.slots
        if made.host_pool and room < smallest:
            raise EngineError(
                f"{method} needs {format_bytes(smallest + made.staging)} of host memory for one "
                f"request of {context} tokens and has {format_bytes(self.host_memory)}: raise "
                "--host-memory or lower --max-context or --max-batch"
            )
        self.method, self._options = method, generation
        self.session = Session(
            self.config,
            self.stack,
            shape,
            None if method == "dense" else make_selector(method),
            self.engine_config,
            generation,
            host_bytes=min(made.host_pool, room),
            device=self.device,
            timeline=self.timeline,
        )
        return self.session

    # -- requests -------------------------------------------------------------------------------

    def _request(
        self, index: int, prompt: Prompt, generation: GenerationConfig, chat: bool
    ) -> Request | Result:
        """Reads one prompt; a bad one becomes a failed result and harms no other."""
        fields: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {}
        name = str(fields.get("id", index))
        try:
            if not isinstance(prompt, Mapping):
                fields = {"prompt" if isinstance(prompt, str) else "prompt_ids": prompt}
            ids = self._encode(fields, chat)
            limit = fields.get("max_new_tokens", generation.max_new_tokens)
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise ValueError(f"max_new_tokens {limit!r} is not a number of 1 or more")
            request = Request(name, np.asarray(ids, np.int32), limit)
            self._check_length(request)
        except ValueError as error:
            nobody = Request(name, np.zeros(0, np.int32), 1)
            return failed(nobody, f"request {name}: {error}")
        return request

    def _encode(self, fields: Mapping[str, Any], chat: bool) -> list[int]:
        known = {"id", "prompt", "messages", "prompt_ids", "max_new_tokens"}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"field {unknown[0]!r} is unknown: use {', '.join(sorted(known))}")
        given = [key for key in ("prompt", "messages", "prompt_ids") if key in fields]
        if len(given) != 1:
            raise ValueError("give exactly one of prompt, messages and prompt_ids")
        value = fields[given[0]]
        if given[0] == "prompt_ids":
            ids = check_ids(value, self.config)
        elif self.tokenizer is None:
            raise ValueError("this model was loaded without a tokenizer: give prompt_ids")
        elif given[0] == "messages":
            ids = self.tokenizer.encode_chat(value)
        elif not isinstance(value, str):
            raise ValueError("prompt is not a string")
        elif chat:
            ids = self.tokenizer.encode_chat([{"role": "user", "content": value}])
        else:
            ids = self.tokenizer.encode(value)
        if not len(ids):
            raise ValueError("the prompt is empty: give at least one token")
        return list(ids)

    def _check_length(self, request: Request) -> None:
        rows = request.rows(self.config.block_size)
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        limits = [
            (self.engine_config.max_context, "--max-context"),
            (self.config.max_position_embeddings, "the model's context of"),
        ]
        for limit, name in limits:
            if limit is not None and prompt + new > limit:
                raise ValueError(
                    f"{prompt} prompt tokens and {new} new ones take {rows} positions, over "
                    f"{name} {limit}: shorten the prompt or lower --max-new-tokens"
                )

    # -- generation -----------------------------------------------------------------------------

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
          progress: called with (what, done, total) as prompts are read and tokens delivered.

        Yields:
          A ``Result`` per prompt as it finishes, failed ones included; with ``stream``, deltas
          whose texts joined give the result's.

        Raises:
          ValueError: an option does not fit the model.
          EngineError: the engine's memory does not fit, before anything is generated.
        """
        generation = generation or GenerationConfig()
        block = self.config.block_size
        if generation.steps is not None and generation.steps > block:
            raise ValueError(
                f"--steps {generation.steps} is more than the block size {block}: every step "
                f"accepts at least one position, so give 1 to {block}"
            )
        read = [self._request(n, p, generation, chat) for n, p in enumerate(prompts)]
        yield from (item for item in read if isinstance(item, Result))
        waiting = deque(item for item in read if isinstance(item, Request))
        if waiting:
            session = self._prepare(list(waiting), generation)
            try:
                yield from self._loop(session, waiting, stream, progress)
            finally:
                for index, _ in list(session.batch.active()):
                    session.retire(index)
                self._aborted.clear()

    def abort(self, request_id: str) -> None:
        """Ends a request at the next block boundary; its result carries what it has so far."""
        self._aborted.add(request_id)

    def _loop(
        self,
        session: Session,
        waiting: deque[Request],
        stream: bool,
        progress: Progress | None,
    ) -> Iterator[Result | Delta]:
        total = sum(request.max_new_tokens for request in waiting)
        done = 0
        try:
            while waiting or any(session.batch.active()):
                yield from self._admit(session, waiting, progress)
                if not any(session.batch.active()):
                    continue
                tokens, failures = session.run_block()
                for index, slot in list(session.batch.active()):
                    delta = self._harvest(session, index, slot, tokens[index], failures)
                    if stream and (delta.text or delta.token_ids):
                        yield delta
                    if session.batch.slots[index] is None:
                        done += slot.request.max_new_tokens
                        self.timeline.tokens += slot.result.completion_tokens
                        yield slot.result
                if progress is not None:
                    running = sum(len(slot.generated) for _, slot in session.batch.active())
                    progress("tokens", done + running, total)
        except EngineError as error:
            # Nothing is lost silently: every request that was accepted gets its answer.
            for index, slot in list(session.batch.active()):
                session.retire(index)
                yield self._fail(slot.result, str(error))
            for request in waiting:
                yield failed(request, str(error))
            self.close()

    def _admit(
        self, session: Session, waiting: deque[Request], progress: Progress | None
    ) -> Iterator[Result]:
        """Fills free slots; a request that finds the pool full waits for others to end."""
        for index in session.batch.free():
            if not waiting:
                return
            if waiting[0].id in self._aborted:
                yield failed(waiting.popleft(), "the request was aborted before it began")
                continue
            try:
                session.admit(index, waiting[0])
            except PoolFull as error:
                if not any(session.batch.active()):
                    yield failed(waiting.popleft(), f"{error}; raise --host-memory")
                return
            self.host_kv_peak = max(self.host_kv_peak, session.host_kv_bytes)
            request = waiting.popleft()
            if progress is not None:
                progress("prompts", len(request.prompt_ids), len(waiting))

    def _harvest(
        self,
        session: Session,
        index: int,
        slot: Slot,
        tokens: np.ndarray,
        failures: Mapping[int, str],
    ) -> Delta:
        """Takes a finished block's tokens; moves the slot on or retires it."""
        prompt = len(slot.request.prompt_ids)
        slot.generated += tokens[max(0, prompt - slot.start) :].tolist()
        stops = self._options.stop_token_ids if self._options else None
        stops = self.config.stop_token_ids if stops is None else stops
        count, reason = end_of(slot.generated, stops, slot.request.max_new_tokens)
        ids = slot.generated[:count]
        text, reason = self._text(ids, reason)
        if self.tokenizer is not None and len(text) < len(self.tokenizer.decode(ids)):
            ids = ids[: tokens_for(len(text), ids, self.tokenizer.decode)]
        error = None
        if reason is None and slot.request.id in self._aborted:
            error = "the request was aborted"
        elif reason is None and index in failures:
            error = failures[index]
        final = reason is not None or error is not None
        result = slot.result
        result.text, result.token_ids = text, ids
        if reason is not None:
            result.finish_reason = reason
        if error is not None:
            self._fail(result, error)
        if final:
            session.retire(index)
        else:
            slot.start += self.config.block_size
        stop = self._options.stop if self._options else ()
        shown = len(text) if final else max(slot.emitted_text, len(text) - held_back(text, stop))
        delta = Delta(slot.request.id, text[slot.emitted_text : shown], ids[slot.emitted_tokens :])
        slot.emitted_text, slot.emitted_tokens = shown, len(ids)
        return delta

    def _text(self, ids: list[int], reason: Any) -> tuple[str, Any]:
        """The answer's text, cut at the first stop string."""
        if self.tokenizer is None:
            return "", reason
        text = self.tokenizer.decode(ids)
        at = find_stop(text, self._options.stop if self._options else ())
        return (text, reason) if at is None else (text[:at], "stop")

    @staticmethod
    def _fail(result: Result, error: str) -> Result:
        result.finish_reason, result.error = "error", error
        return result

    # -- reporting ------------------------------------------------------------------------------

    def summary(self, seconds: float) -> dict[str, Any]:
        """The ``--json`` summary of what was generated in ``seconds``."""
        shape = self.session.shape if self.session else None
        timeline = self.timeline
        return {
            "method": self.method,
            "method_reason": self.method_reason,
            "budget": str(self.engine_config.budget) if self.method != "dense" else None,
            "model": self.config.family,
            "device": self.device.device_kind,
            "batch": self.engine_config.max_batch,
            "blocks": timeline.blocks,
            "steps": timeline.steps,
            "seconds": round(seconds, 4),
            "tokens": timeline.tokens,
            "tokens_per_second": round(timeline.tokens / seconds, 3) if seconds else 0.0,
            "stall_fraction": round(timeline.stall_fraction, 4),
            "prefill_seconds": round(timeline.prefill_seconds, 4),
            "retrieval_seconds": round(timeline.retrieval_seconds, 4),
            "device_kv_bytes": shape.device_bytes if shape else 0,
            "host_kv_bytes": self.host_kv_peak,
        }

    def close(self) -> None:
        """Frees buffers, pools and threads; a later ``generate`` makes them anew."""
        if self.session is not None:
            self.session.close()
            self.session = None


__all__ = ["Delta", "Engine", "Prompt", "Result"]
