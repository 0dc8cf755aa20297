"""Dense block diffusion in PyTorch as one would write it for speed.

The query heads of a KV head and the positions of a block are packed into the rows of one attention
call, projections are fused, everything between matrix products is compiled, experts run as grouped
products, and a step is one CUDA graph. On the CPU the same functions run as they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.torch_denoise import Block
from benchmarks.torch_experts import product, product_name, router_logits
from benchmarks.torch_layers import PIECES, rms_norm
from benchmarks.torch_weights import Cache, Experts, Layer, Weights
from herald_jax.models.config import ModelConfig
from herald_jax.models.rope import frequencies

#: Kernels of ``scaled_dot_product_attention`` that are tried; the fastest is kept.
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Tuned:
    """The network over a cache, at work on the block after ``starts``.

    Attributes:
      notes: what a row says about it: how it runs, and why not better.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: Cache,
        starts: list[int],
        block: Block,
    ) -> None:
        """Makes the network.

        Args:
          config, weights, cache, block: as elsewhere; the cache has room for every block.
          starts: positions before each slot's block. Equal ones need no mask.
        """
        self.config, self.weights, self.cache, self.block = config, weights, cache, block
        device, size = block.tokens.device, block.tokens.shape[1]
        self.cuda = device.type == "cuda"
        start = torch.tensor(starts, device=device)
        positions = start[:, None] + torch.arange(size, device=device)
        turns = torch.tensor(frequencies(config), dtype=torch.float32, device=device)
        angles = (positions[..., None].float() * turns)[:, :, None]
        self.cos, self.sin = angles.cos(), angles.sin()
        self.slots, self.positions = torch.arange(len(starts), device=device)[:, None], positions
        self.ragged = len(set(starts)) > 1
        self.start, self.end = max(starts), max(starts) + size
        row = torch.arange(self.end, device=device)
        self.mask = (row < start[:, None] + size)[:, None, None, :] if self.ragged else None
        self.backend: SDPBackend | None = None
        self.functions: dict[str, Callable[..., Any]] = dict(PIECES)
        self.product = product_name(device, weights.embedding.dtype)
        self.notes: dict[str, Any] = {
            "network": "benchmarks.torch_tuned",
            "attention": "sdpa",
            "experts": self.product if config.experts else None,
            "compiled": False,
            "cuda_graph": False,
        }
        self.run_step: Callable[[], None] = self._step
        self.run_commit: Callable[[], None] = self._commit

    def step(self) -> None:
        """One forward pass; positions accept."""
        self.run_step()

    def commit(self) -> None:
        """Writes the keys and values of the block as it is."""
        self.run_commit()

    def logits(self) -> torch.Tensor:
        """[N, B, vocab] of the block, whose keys and values are written to the cache."""
        x = rms_norm(self._hidden(), self.weights.norm, self.config.rms_norm_eps)
        return F.linear(x, self.weights.head)

    def tune(self, compiles: bool = True, graphs: bool = True) -> None:
        """Chooses the attention kernel, compiles and captures; what fails is left out and noted.

        Steps are run for it, so the block is another afterwards.
        """
        if not self.cuda:
            return
        if not self.ragged:
            self._choose_backend()
        if compiles:
            self._compile()
        if graphs:
            self._capture()

    def _step(self) -> None:
        block = self.block
        self.functions["choose"](
            self._hidden(),
            self.weights.norm,
            self.weights.head,
            block.tokens,
            block.masked,
            block.due,
            block.mask_token,
            self.config.rms_norm_eps,
        )

    def _commit(self) -> None:
        self._hidden()

    def _hidden(self) -> torch.Tensor:
        """[N, B, hidden] after the last layer, before its norm."""
        x = F.embedding(self.block.tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            x = self._layer(index, layer, x)
        return x

    def _layer(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        eps, run = self.config.rms_norm_eps, self.functions
        cached = self.cache.keys[index], self.cache.values[index]
        keys, values = (part[:, self.start : self.end] for part in cached)
        if self.ragged:
            keys, values = (torch.empty_like(part) for part in (keys, values))
        norms = layer.q_norm, layer.k_norm, self.cos, self.sin
        q = run["project"](x, layer.input_norm, layer.qkv, *norms, keys, values, eps)
        if self.ragged:
            for part, new in zip(cached, (keys, values), strict=True):
                part[self.slots, self.positions] = new
        attended = self._attend(q, *cached)
        mlp, common = layer.mlp, (x, attended, layer.o, layer.mlp_norm)
        if not isinstance(mlp, Experts):
            return run["finish"](*common, mlp.gate_up, mlp.down, eps)
        return self._mixture(mlp, *run["after_attention"](*common, eps))

    def _mixture(self, mlp: Experts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The rest of a layer with experts: x and y of ``after_attention`` -> [N, B, hidden]."""
        config, run = self.config.experts, self.functions
        assert config is not None
        logits = router_logits(y.flatten(0, 1), mlp.router, config)
        shared = (None, None) if mlp.shared is None else (mlp.shared.gate_up, mlp.shared.down)
        x, rows, row, ends, weights = run["dispatch"](x, y, logits, mlp.bias, *shared, config)
        inner = run["gated"](product(rows, mlp.gate_up, ends, self.product))
        return run["gather"](x, product(inner, mlp.down, ends, self.product), row, weights)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [N, H_kv, rows, D] over the cache [N, R, H_kv, D] of a layer, up to the block's end."""
        k, v = (part[:, : self.end].transpose(1, 2) for part in (keys, values))
        with _only(self.backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    def _choose_backend(self) -> None:
        """Times every kernel that takes these shapes."""
        keys, values = self.cache.keys[0], self.cache.values[0]
        batch, _, kv_heads, dim = keys.shape
        rows = self.block.tokens.shape[1] * self.config.group_size
        q = torch.randn(batch, kv_heads, rows, dim, dtype=keys.dtype, device=keys.device)
        milliseconds: dict[str, float] = {}
        for name, backend in BACKENDS.items():
            self.backend = backend
            try:
                milliseconds[name] = _median_ms(lambda: self._attend(q, keys, values))
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
        self.backend = None
        if milliseconds:
            best = min(milliseconds, key=lambda name: milliseconds[name])
            self.backend = BACKENDS[best]
            self.notes["attention"] = f"sdpa, {best}"
            self.notes["attention_ms"] = {k: round(v, 4) for k, v in milliseconds.items()}

    def _compile(self) -> None:
        plain = self.functions
        self.functions = {
            name: torch.compile(function, fullgraph=True, dynamic=False)
            for name, function in plain.items()
        }
        try:
            self._step()
            torch.cuda.synchronize()
            self.notes["compiled"] = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # The compiler needs tools that a machine may lack.
            self.functions = plain
            self.notes["compiled"] = f"no: {_first_line(error)}"

    def _capture(self) -> None:
        try:
            self.run_step, self.run_commit = _graph(self._step), _graph(self._commit)
            self.notes["cuda_graph"] = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # An operation that waits for the host cannot be captured.
            torch.cuda.synchronize()
            self.run_step, self.run_commit = self._step, self._commit
            self.notes["cuda_graph"] = f"no: {_first_line(error)}"


def _only(backend: SDPBackend | None) -> AbstractContextManager[None]:
    return nullcontext() if backend is None else sdpa_kernel(backend)


def _graph(run: Callable[[], None]) -> Callable[[], None]:
    """Captures what ``run`` launches; calling the result launches it again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Libraries set themselves up on first use, which a capture does not allow.
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _median_ms(run: Callable[[], Any], calls: int = 7) -> float:
    """Milliseconds of a call on the GPU; the first two warm up."""
    took = []
    for _ in range(calls + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took[2:])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
