"""mage-offload: mage with the whole KV streamed to the device ahead of the layers."""

from __future__ import annotations

from typing import ClassVar

from herald_jax.selection.mage import Mage


class MageOffload(Mage):
    """What mage selects, at the rate of the link: copies run ahead of the layer that computes."""

    name: ClassVar[str] = "mage-offload"
    summary: ClassVar[str] = "baseline: mage, its whole KV streamed layer by layer ahead of need"
    in_flight: ClassVar[int] = 3
