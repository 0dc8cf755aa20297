"""A model taken apart into plain pytrees, so that one compiled program serves many layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike

from herald_jax.engine.rehearsal import Compiled, Key, perform


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers that run as one program.

    Attributes:
      first: index of the first layer.
      kinds: for each layer, which graph definition it has; equal kinds share executables.
      states: for each layer, its parameters as a pytree.
    """

    first: int
    kinds: tuple[int, ...]
    states: tuple[Any, ...]

    @property
    def last(self) -> int:
        """Index after the last layer."""
        return self.first + len(self.states)


class LayerStack:
    """Splits a model into its shell (embedding, norm, head) and its layers.

    ``nnx.jit`` walks every parameter on each call; ``jax.jit`` over plain pytrees does not, so
    modules are rebuilt from their definitions inside the traced function only.
    """

    def __init__(self, model: Any, device: jax.Device) -> None:
        """Commits the parameters to ``device``: uncommitted arrays would compile twice."""
        layers = list(model.layers)
        model.layers = nnx.List([])
        self._shell_graph, shell = nnx.split(model)
        self.shell = jax.device_put(shell, device)
        model.layers = nnx.List(layers)
        self._graphs: list[Any] = []
        self._kinds: list[int] = []
        self._states: list[Any] = []
        for layer in layers:
            graph, state = nnx.split(layer)
            if graph not in self._graphs:
                self._graphs.append(graph)
            self._kinds.append(self._graphs.index(graph))
            self._states.append(jax.device_put(state, device))
        self._programs: dict[Any, Callable[..., Any]] = {}
        #: What rehearsals have compiled.
        self.known: dict[Key, Compiled] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        leaves = jax.tree.leaves((self.shell, self._states))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def groups(self, first: int, last: int, size: int | None) -> list[LayerGroup]:
        """Cuts layers [first, last) into groups of ``size`` (None: one group)."""
        step = size or max(1, last - first)
        cuts = range(first, last, step)
        return [
            LayerGroup(
                at,
                tuple(self._kinds[at : min(at + step, last)]),
                tuple(self._states[at : min(at + step, last)]),
            )
            for at in cuts
        ]

    def on_layers(
        self, body: Callable[..., Any], group: LayerGroup, donate: Sequence[int] = ()
    ) -> Callable[..., Any]:
        """The compiled ``body(layers, *args)`` for a group; call it with ``*args``.

        Args:
          body: a function of the rebuilt layers and pytrees of arrays.
          group: whose layers to run.
          donate: positions in ``args`` whose buffers the program may reuse.
        """
        key = (*_identity(body), group.kinds, tuple(donate))
        if key not in self._programs:
            graphs = [self._graphs[kind] for kind in group.kinds]

            def run(states: tuple[Any, ...], *args: Any) -> Any:
                layers = [nnx.merge(g, s) for g, s in zip(graphs, states, strict=True)]
                return body(layers, *args)

            run.__name__ = body.__name__
            self._programs[key] = jax.jit(run, donate_argnums=[at + 1 for at in donate])
        program = self._programs[key]
        reused = [at + 1 for at in donate]
        return lambda *args: perform(program, (group.states, *args), reused)

    def on_shell(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled ``body(shell_model, *args)``; call it with ``*args``."""
        key = _identity(body)
        if key not in self._programs:

            def run(state: Any, *args: Any) -> Any:
                return body(nnx.merge(self._shell_graph, state), *args)

            run.__name__ = body.__name__
            self._programs[key] = jax.jit(run)
        program = self._programs[key]
        return lambda *args: perform(program, (self.shell, *args))

    def embed(self, tokens: ArrayLike) -> jax.Array:
        """int32 [N, S] -> [N, S, hidden]."""
        return self.on_shell(_embed)(tokens)


def _embed(shell: Any, tokens: jax.Array) -> jax.Array:
    return shell.embed(tokens)


def _identity(body: Callable[..., Any]) -> tuple[Any, ...]:
    """What makes two bodies the same program: equal owners, not the same bound method."""
    return getattr(body, "__func__", body), getattr(body, "__self__", None)
