"""The warm-up: everything that requests will run is compiled before the first is admitted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from herald_jax.engine.rehearsal import Progress, Rehearsal
from herald_jax.engine.request import Request
from herald_jax.engine.session import Session


class WarmUp:
    """Runs a session without requests, first in rehearsal and then in earnest.

    The rehearsal finds the programs of the layers and compiles them side by side. What it cannot
    see, programs of the retrieval stream and small ones of their own, is compiled as it runs, once
    the others are there. So the code that serves requests is itself the list of what there is to
    compile.

    Attributes:
      scratch: bytes of the device that programs need beside what the cache and the weights take;
        None where the compiler does not tell.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.scratch: int | None = None
        self._prefilled: set[int] = set()
        self._blocks_ran = False

    def run(self, requests: Sequence[Request], progress: Progress | None = None) -> None:
        """Compiles what these requests need and the session has not run yet.

        Call it while the batch is empty; it leaves the session as it was.

        Args:
          requests: whose prompts decide which prefill buffers there will be.
          progress: called with ("programs", done, total) as programs are compiled.

        Raises:
          WaitTimeout: a program was not compiled, or did not end, in time.
          EngineError: the retrieval stream failed.
        """
        session = self.session
        assert not any(session.batch.active()), "a warm-up overwrites what slots hold"
        wanted = {session.prefill.rows_for(len(request.prompt_ids)) for request in requests}
        buffers = sorted(wanted - self._prefilled - {0})
        if not buffers and self._blocks_ran:
            return
        began = time.perf_counter()
        stack, device = session.main.stack, session.cache.device
        rehearsal = Rehearsal(stack.known, device, session.config.timeout)
        with session.timeline.uncounted():
            with contextlib.closing(rehearsal):
                with rehearsal.of_this_thread():
                    self._perform(buffers)
                rehearsal.finish(progress)
            self._perform(buffers)
        session.clear(0)
        session.cache.reset()
        self._prefilled.update(buffers)
        self._blocks_ran = True
        if rehearsal.scratch is not None:
            self.scratch = max(self.scratch or 0, rehearsal.scratch)
        session.timeline.warm_up_seconds += time.perf_counter() - began

    def _perform(self, buffers: Sequence[int]) -> None:
        for rows in buffers:
            self.session.prefill.rehearse(rows)
        if not self._blocks_ran:
            for ahead in (True, False):
                self.session.run_idle_block(ahead=ahead)
