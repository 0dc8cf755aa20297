"""A few channels of every key of the sparse layers, on the device for methods that scan there."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from herald_jax.kv.device_cache import CacheShape


class PartialKeys:
    """Keys of the whole prefix in P channels, and what turns queries and new keys into them.

    Attributes:
      keys: for each sparse layer [N, H_kv, R, P], position r in row r.
      projections: for each sparse layer float32 [N, H_kv, D, P].
    """

    def __init__(self, shape: CacheShape, device: jax.Device) -> None:
        self.shape, layers = shape, shape.sparse_layers
        heads, channels = shape.kv_heads, shape.partial_channels
        sharding = SingleDeviceSharding(device)
        zeros = functools.partial(jnp.zeros, device=sharding)
        keys = (shape.slots, heads, shape.rows, channels)
        turns = (shape.slots, heads, shape.head_dim, channels)
        self.keys = [zeros(keys, shape.dtype) for _ in range(layers)]
        self.projections = [zeros(turns, np.float32) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (*self.keys, *self.projections))

    def place(
        self, slot: int, projections: Sequence[np.ndarray], keys: Sequence[jax.Array]
    ) -> None:
        """Takes on a request.

        Args:
          projections: for each sparse layer float32 [H_kv, D, P].
          keys: for each sparse layer [1, r, H_kv, D], position p in row p.
        """
        at = np.int32(slot)
        for layer, (projection, whole) in enumerate(zip(projections, keys, strict=True)):
            self.keys[layer], self.projections[layer] = _placed(
                self.keys[layer], self.projections[layer], projection, whole, at
            )

    def append(self, committed: jax.Array, start: np.ndarray) -> None:
        """Takes on a block's rows [L, 2, N, B, H_kv, D], keys first, at int32 [N] ``start``."""
        self.keys = _appended(self.keys, self.projections, committed, start)


def project(keys: jax.Array, projection: jax.Array) -> jax.Array:
    """Keys [N, r, H_kv, D] in the channels of float32 [N, H_kv, D, P]: [N, H_kv, r, P]."""
    return jnp.matmul(
        keys.swapaxes(1, 2),
        projection.astype(keys.dtype),
        precision=jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
    )


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _placed(
    partial: jax.Array, turns: jax.Array, projection: jax.Array, keys: jax.Array, slot: jax.Array
) -> tuple[jax.Array, jax.Array]:
    own = project(keys[:, : partial.shape[2]], projection[None])
    at = (slot, 0, 0, 0)
    return (
        jax.lax.dynamic_update_slice(partial, own, at),
        jax.lax.dynamic_update_slice(turns, projection[None], at),
    )


@functools.partial(jax.jit, donate_argnums=0)
def _appended(
    partial: list[jax.Array], turns: list[jax.Array], committed: jax.Array, start: jax.Array
) -> list[jax.Array]:
    slots = jnp.arange(committed.shape[2])[:, None]
    at = start[:, None] + jnp.arange(committed.shape[3])
    return [
        whole.at[slots, :, at].set(project(rows, turn).swapaxes(1, 2), mode="drop")
        for whole, turn, rows in zip(partial, turns, committed[:, 0], strict=True)
    ]
