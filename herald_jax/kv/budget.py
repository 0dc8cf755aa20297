"""How many entries a request may attend in a sparse layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINIMUM = 32


@dataclass(frozen=True)
class Budget:
    """Selected entries per KV head: a fraction of the prefix, or a fixed number.

    Attributes:
      fraction: share of the prefix in (0, 1], used when ``tokens`` is None.
      tokens: fixed K, the papers' 1,024.
    """

    fraction: float = 0.05
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"--budget-tokens {self.tokens} selects nothing: give 1 or more")
        if self.tokens is None and not 0 < self.fraction <= 1:
            raise ValueError(
                f"--budget {self.fraction:g} is outside (0, 1]: 0.05 keeps 5% of the prefix"
            )

    def entries(self, prefix: int) -> int:
        """K_r for a prefix of ``prefix`` selectable positions; sinks are inside, the tail outside.

        A fraction gives min(prefix, max(32, ceil(fraction * prefix))).
        """
        if self.tokens is not None:
            return min(prefix, self.tokens)
        # The subtraction keeps 0.05 * 640 at 32, which binary fractions would make 33.
        return min(prefix, max(MINIMUM, math.ceil(self.fraction * prefix - 1e-9)))

    def capacity(self, max_rows: int) -> int:
        """Rows a pool reserves for selected entries, given the longest request."""
        return self.entries(max_rows)

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.tokens is not None else f"{self.fraction:.3g}"
