"""What a selector wants from the main stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax

from herald_jax.engine.step_programs import Queries


@dataclass(frozen=True)
class Lookahead:
    """What the selector wants from the main stream, and whom to tell.

    Attributes:
      places: where in the next block the masks stand that step 1 carries along, beside the draft.
      representative: the only one of them, at the centre, is handed over with the draft's KV;
        otherwise they give merged queries.
      attends_draft: the masks attend the draft, not only the committed blocks.
      merge_step: the step whose merged queries are captured, or None.
      prepare: called once, when the first programs of step 0 are queued: the device
        does not wait for what it does on the host.
      begin: called once with (representative, drafts, queries): as soon as they are queued, or,
        where queries are promised, as soon as those of the first layers are.
    """

    places: tuple[int, ...]
    representative: bool
    attends_draft: bool
    merge_step: int | None
    prepare: Callable[[], None]
    begin: Callable[
        [jax.Array | None, list[jax.Array] | None, Sequence[Future[Queries]] | None], None
    ]

    @property
    def begin_step(self) -> int:
        """The step that has all that the selector wants."""
        return 1 if self.places else self.merge_step or 0
