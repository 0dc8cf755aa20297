"""The compiled programs of step 1 where it looks ahead: draft and next block's masks beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from herald_jax.diffusion.draft import equal_parts
from herald_jax.engine.step_programs import Buffer, Queries, StepPrograms, after
from herald_jax.models.attention import attend, attend_beside


@dataclass(frozen=True)
class LookaheadPrograms(StepPrograms):
    """Step programs and those of step 1 with more than the denoising group.

    Attributes:
      segments: S, the parts of the next block whose drafted queries are merged apart; fewer where
        its masks cannot be cut into so many equal ones.
    """

    segments: int = 1

    def exact_pair(
        self,
        layers: Any,
        buffers: Any,
        x: jax.Array,
        positions: jax.Array,
        start: jax.Array,
        ahead: jax.Array,
    ) -> tuple[jax.Array, list[Buffer]]:
        """Step 1 through exact layers: denoising group, draft group, the next block's masks.

        The groups see the prefix but not each other, except that the masks attend the draft where
        their rows lie beyond it. Each writes its rows, attends and is overwritten by the next.

        Args:
          x: [N, 2B + A, hidden], ``positions``: int32 [N, 2B + A], A masks of the next block.
          start: int32 [N], first position of the block.
          ahead: int32 [N], first row of the masks: they attend the rows before it.
        """
        b = self.block
        groups = [
            (slice(b, 2 * b), start),
            (slice(2 * b, None), ahead),
            (slice(0, b), start),
        ]
        result = []
        for layer, buffer in zip(layers, buffers, strict=True):
            q, k, v = layer.pre(x, positions)
            outs: list[jax.Array] = []
            for part, row in groups:
                if outs:
                    buffer = after(outs[-1], buffer)
                buffer = self._own("exact", buffer, k[:, part], v[:, part], row)
                # Masks beyond the longest request have no rows.
                length = jnp.minimum(row + k[:, part].shape[1], buffer[0].shape[1])
                outs.append(attend(q[:, part], *buffer, length))
            draft, masks, denoising = outs
            x = layer.post(x, jnp.concatenate([denoising, draft, masks], axis=1))
            result.append(buffer)
        return x, result

    def pool_pair(
        self, layers: Any, buffers: Any, x: jax.Array, positions: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, list[Buffer], jax.Array]:
        """Step 1 through sparse layers: x [N, 2B, hidden], denoising group then draft group.

        Returns:
          x, buffers, and the draft's rows [layers, 2, N, B, H_kv, D], keys then values; one
          array, because many small copies to the host are slow.
        """
        b = self.block
        result, drafts = [], []
        for layer, buffer in zip(layers, buffers, strict=True):
            q, k, v = layer.pre(x, positions)
            buffer = self._own("pool", buffer, k[:, b:], v[:, b:], positions[:, 0])
            draft = attend(q[:, b:], *buffer, lengths)
            buffer = after(draft, buffer)
            buffer = self._own("pool", buffer, k[:, :b], v[:, :b], positions[:, 0])
            denoising = attend(q[:, :b], *buffer, lengths)
            x = layer.post(x, jnp.concatenate([denoising, draft], axis=1))
            result.append(buffer)
            drafts.append(jnp.stack([k[:, b:], v[:, b:]]))
        return x, result, jnp.stack(drafts)

    def pool_ahead(
        self, layers: Any, buffers: Any, x: jax.Array, positions: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, list[Buffer], list[Queries]]:
        """Step 1 through sparse layers with A of the next block's masks: x [N, 2B + A, hidden].

        The masks attend the draft, all rows of the pool and one another.

        Returns:
          x, buffers, and for every layer the masks' queries merged over S parts of their block,
          float32 [N, H_kv * S * G, D], with the log of each one's mass on draft and masks.
        """
        b = self.block
        result: list[Buffer] = []
        merged: list[Queries] = []
        for layer, buffer in zip(layers, buffers, strict=True):
            q, k, v = layer.pre(x, positions)
            denoised, drafted, ahead = slice(0, b), slice(b, 2 * b), slice(2 * b, None)
            own = k[:, ahead], v[:, ahead]
            buffer = self._own("pool", buffer, k[:, drafted], v[:, drafted], positions[:, 0])
            # Both at once: on CUDA the pool is read once for them.
            beside = attend_beside(q[:, b:], *buffer, lengths, own, alone=b)
            merged.append(self._parts(q[:, ahead], k[:, b:]))
            buffer = after(beside, buffer)
            buffer = self._own("pool", buffer, k[:, denoised], v[:, denoised], positions[:, 0])
            denoising = attend(q[:, denoised], *buffer, lengths)
            x = layer.post(x, jnp.concatenate([denoising, beside], axis=1))
            result.append(buffer)
        return x, result, merged

    def _parts(self, q: jax.Array, local: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [N, A, H_q, D] merged by part, and the log of their mass on local keys."""
        n, count, heads, dim = q.shape
        kv_heads = local.shape[2]
        parts = equal_parts(count, self.segments)
        mean = q.astype(jnp.float32).reshape(n, parts, count // parts, heads, dim).mean(2)
        grouped = mean.reshape(n, parts, kv_heads, -1, dim).swapaxes(1, 2)
        scores = jnp.einsum(
            "nhsgd,nrhd->nhsgr",
            grouped,
            local.astype(jnp.float32),
            # As exact as the scores of the pool, which the CPU computes in fp32.
            precision=jax.lax.Precision.HIGHEST,
        )
        mass = jax.nn.logsumexp(scores * dim**-0.5, axis=-1)
        return grouped.reshape(n, -1, dim), mass.reshape(n, -1)
