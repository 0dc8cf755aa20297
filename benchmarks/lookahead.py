"""Every way to select for block n+1 while block n is denoised, judged on one dense trajectory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks import estimators, key_indexes
from benchmarks.drafted import Drafted, drafted
from benchmarks.speculated import speculated
from benchmarks.trajectories import Ahead, Block, Network, Trajectory, look_ahead
from herald_jax.diffusion.draft import equal_parts
from herald_jax.kv.budget import Budget
from herald_jax.selection.herald_merged import HeraldMerged
from herald_jax.selection.infinigen import partial_importance

#: What block n is while a selector looks ahead, for one query and for all B of them. The last of
#: each is only known once block n is done; ``mage`` selects at step 0 of block n+1 itself.
ONE_QUERY: dict[Ahead, str] = {
    "omitted": "centre",
    "drafted": "herald-draft",
    "completed": "centre-completed",
}
ALL_QUERIES: dict[Ahead, str] = {"omitted": "mage-omitted", "drafted": "mage-drafted"}
#: Numbers of drafted queries in between, evenly spaced (paper Fig. 8 counts what they cost).
FEW_QUERIES = (2, 4, 8, 16)
#: Parts of the block whose drafted queries are merged apart, where all its masks run.
PARTS = (1, 2, 4, 8, 32)
#: Parts and spacing of ``herald-merged``.
OWN = (HeraldMerged.segments, HeraldMerged.spacing)
#: Steps of block n whose queries are merged; "done" is its commit pass, all positions.
MERGE_STEPS = ("first", "middle", "last", "done")
#: What is said of a unit: the last axis of ``Units``.
MEASURES = ("recall", "mass", "share")
#: MEASURES of [pairs] x [sparse layers, KV heads, budgets, 3].
Units = dict[str, np.ndarray]
#: Drafted queries by what they attended, pool or prefix, and the spacing of their masks.
Over = dict[tuple[str, int], Drafted]


@dataclass(frozen=True)
class Case:
    """What is compared: budgets as fractions of the prefix, and C / K above 1.

    ``pool`` is the budget of block n's own pool, which drafted queries attend.
    """

    budgets: tuple[float, ...]
    ratios: tuple[float, ...]
    pool: float = 0.05


def label(selector: str, reference: str, **more: Any) -> str:
    """The name of one comparison: a JSON object of what identifies its rows."""
    return json.dumps({"selector": selector, "reference": reference} | more)


def entries(case: Case, prefix: int) -> np.ndarray:
    """K of every budget, int [K]."""
    return np.array([Budget(fraction).entries(prefix) for fraction in case.budgets])


def measure(network: Network, trajectory: Trajectory, number: int, case: Case, seed: int) -> Units:
    """Judges every selector for the block after ``trajectory.blocks[number]``.

    Rows before block n may be selected; block n is then the tail, which is always attended.

    Args:
      network, trajectory: as decoded.
      number: index of block n among the decoded ones.
      case: budgets and candidate ratios.
      seed: of the random control.

    Returns:
      Per label, float32 [sparse layers, H, budgets, 3]: recall, mass, and share, which is the same
      for all budgets.
    """
    now, following = trajectory.blocks[number : number + 2]
    asked: list[tuple[str, Ahead, int]] = [(name, ahead, 1) for ahead, name in ONE_QUERY.items()]
    asked += [(f"herald-draft-{few}", "drafted", few) for few in FEW_QUERIES]
    asked += [(name, ahead, network.config.block_size) for ahead, name in ALL_QUERIES.items()]
    seen = {
        name: look_ahead(network, trajectory, now, ahead, count) for name, ahead, count in asked
    }
    over = {
        (name, spacing): drafted(network, trajectory, number, fraction, spacing)
        for name, fraction, spacing in (
            ("pool", case.pool, OWN[1]),
            ("pool", case.pool, 1),
            ("prefix", None, OWN[1]),
        )
    }
    known = speculated(network, trajectory, following)
    layers = []
    for layer in range(network.config.exact_layers, network.config.num_layers):
        view = LayerView(network, trajectory, now, following, layer, case)
        ahead = {}
        for name, (made, length) in seen.items():
            everyone = np.ones(made.queries.shape[1], bool)
            ahead[name] = view.score(made.queries[layer], everyone, made.cache[layer][0][0], length)
        ahead["infinigen"] = view.partly(known.queries[layer], known.projections[layer])
        layers.append(view.compare(ahead, over, seed + layer))
    return {name: np.stack([found[name] for found in layers]) for name in layers[0]}


class LayerView:
    """One layer of two consecutive blocks: references, selections, and how they agree."""

    def __init__(
        self,
        network: Network,
        trajectory: Trajectory,
        now: Block,
        following: Block,
        layer: int,
        case: Case,
    ) -> None:
        self.config, self.case, self.layer = network.config, case, layer
        self.now, self.following = now, following
        self.prefix = now.start
        self.keys = trajectory.cache[layer][0][0]
        self.counts = entries(case, self.prefix)
        self.oracle = np.stack([self._attended(step) for step in range(following.steps)])
        self.share = estimators.share(self.oracle, self.config.group_size)

    def score(
        self, q: jax.Array, voters: np.ndarray, keys: jax.Array | None = None, length: int = 0
    ) -> np.ndarray:
        """Importance float32 [H, P]; over the prefix alone unless ``keys`` say otherwise."""
        if keys is None:
            keys, length = self.keys, self.prefix
        return np.asarray(estimators.importance(q, keys, length, voters))[:, : self.prefix]

    def partly(self, q: np.ndarray, projection: np.ndarray) -> np.ndarray:
        """Importance [H, P] of one query [H_q, D] over committed rows, in some channels."""
        keys = np.asarray(self.keys[: self.following.start])
        return partial_importance(q, keys, projection, len(keys))[:, : self.prefix]

    def _buffer(self, step: int) -> tuple[jax.Array, int]:
        """Keys that block n+1 attends at a step, its own at their rows, and how many."""
        own = self.following.keys[step][self.layer]
        start = self.following.start
        return jax.lax.dynamic_update_slice_in_dim(self.keys, own, start, 0), start + len(own)

    def _attended(self, step: int) -> np.ndarray:
        """What the masked positions of block n+1 attend at a step: float32 [H, P]."""
        voters = self.following.masked[step]
        return self.score(self.following.queries[step][self.layer], voters, *self._buffer(step))

    def compare(self, ahead: dict[str, np.ndarray], over: Over, seed: int) -> Units:
        """Judges the selections by both oracles, and key indexes by the exact scan.

        Args:
          ahead: scores [H, P] of the selectors that ask with [MASK] queries.
          over: the drafted queries, by what they attended and how far apart their masks stood.
          seed: of the random control.

        Returns:
          Per label, float32 [H, budgets, 3].
        """
        sets: list[np.ndarray] = []
        described: list[dict[str, Any]] = []

        def add(selected: np.ndarray, selector: str, **more: Any) -> None:
            sets.append(selected)
            described.append({"selector": selector} | more)

        heads, counts = self.config.num_kv_heads, self.counts
        scores = ahead | {"mage": self.oracle[0]}
        scores["random"] = np.random.default_rng((seed, self.prefix)).random((heads, self.prefix))
        scores["window"] = np.tile(np.arange(self.prefix, dtype=np.float32), (heads, 1))
        for name, values in scores.items():
            add(estimators.top(values, counts), name)
        attended = self._first_probabilities()
        first: dict[str, np.ndarray] = {}
        ways = (("merged", self._merged()), ("herald-merged", self._drafted(over)))
        for selector, made in ways:
            for values, more in made:
                first.setdefault(selector, values)
                add(estimators.top(values, counts), selector, **more)
            for candidates, ratio in self._candidates(first[selector]):
                add(candidates, selector, candidates_ratio=ratio, refined=False)
                refined = estimators.refine(attended, candidates, counts)
                add(refined, selector, candidates_ratio=ratio, refined=True)
        values = first["merged"]
        references = np.stack([estimators.top(mass, counts) for mass in self.oracle])
        recall, mass = estimators.judge(np.stack(sets), references, self.oracle)
        found: Units = {}
        for description, unit in zip(described, _units(recall, mass, self.share), strict=True):
            found[label(reference="first step", **description)] = unit[0]
            found[label(reference="every step", **description)] = unit.mean(axis=0)
        return found | self._indexes(values)

    def _merged(self) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Scores of every merge of block n's queries; what merged does comes first."""
        now, size = self.now, self.config.block_size
        at = {"first": 0, "middle": now.steps // 2, "last": now.steps - 1, "done": now.steps}
        for step in MERGE_STEPS:
            voters = now.masked[at[step]] if step != "done" else np.ones(size, bool)
            for rotation in (True, False):
                q = now.queries[at[step]][self.layer]
                if rotation:
                    q = estimators.advance(q, size, self.config)
                one = estimators.merge(q, voters)
                more = {"step": step, "rotation": rotation}
                yield self.score(one, np.ones(1, bool)), more | {"mean_of": "queries"}
                if step == "first":
                    yield self.score(q, voters), more | {"mean_of": "softmax"}
        own = estimators.merge(self.following.queries[0][self.layer], self.following.masked[0])
        more = {"step": "next block", "rotation": False, "mean_of": "queries"}
        yield self.score(own, np.ones(1, bool)), more

    def _drafted(self, over: Over) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Scores of the next block's drafted queries; what herald-merged does comes first."""
        size = self.config.block_size
        cases = [("pool", *OWN, True)]
        cases += [("pool", parts, 1, True) for parts in PARTS if parts <= size]
        cases += [("prefix", *OWN, True), ("pool", *OWN, False)]
        for attended, parts, spacing, outside in cases:
            made = over[attended, spacing]
            queries, local = made.queries[self.layer], made.keys[self.layer]
            merged = estimators.merge_parts(queries, equal_parts(len(queries), parts))
            keys, length = self.keys, self.prefix
            if outside:
                keys = jax.lax.dynamic_update_slice_in_dim(keys, local, self.prefix, 0)
                length += len(local)
            values = self.score(merged, np.ones(len(merged), bool), keys, length)
            more = {"parts": parts, "spacing": spacing}
            yield values, more | {"mass_outside": outside, "attended": attended}

    def _candidates(self, scores: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
        """The C best rows bool [K, H, P] for each C / K."""
        rank = estimators.ranks(scores)
        for ratio in self.case.ratios:
            most = [min(self.prefix, math.ceil(ratio * count)) for count in self.counts]
            yield rank < np.array(most)[:, None, None], ratio

    def _first_probabilities(self) -> np.ndarray:
        """float32 [H, V, R] of block n+1's masked queries at step 0."""
        voters = np.repeat(self.following.masked[0], self.config.group_size)
        q = self.following.queries[0][self.layer]
        return np.asarray(estimators.probabilities(q, *self._buffer(0)))[:, voters]

    def _indexes(self, exact: np.ndarray) -> Units:
        """Key indexes under the merged query against its exact scan, alone and re-ranked."""
        now, size = self.now, self.config.block_size
        q = estimators.advance(now.queries[0][self.layer], size, self.config)
        one = np.asarray(estimators.merge(q, now.masked[0])[0])
        keys, counts = np.asarray(self.keys[: self.prefix]), self.counts
        twice = np.minimum(2 * counts, self.prefix)
        selections, names = [], []
        for index in key_indexes.INDEXES:
            for ratio, candidates in ((1.0, counts), (2.0, twice)):
                selections.append(key_indexes.find(index, one, keys, counts, candidates)[0])
                names.append(label("merged", "exact scan", index=index, candidates_ratio=ratio))
        wanted = estimators.top(exact, counts)
        recall, mass = estimators.judge(np.stack(selections), wanted[None], exact[None])
        # The scan attends nothing but the prefix: how much that matters is what step 0 says.
        units = _units(recall, mass, self.share[:1])
        return dict(zip(names, units[:, 0], strict=True))


def _units(recall: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
    """[E, T, K, H] twice and [T, H] -> [E, T, H, K, 3]."""
    shares = np.broadcast_to(share[:, None], recall.shape)
    return np.stack([recall, mass, shares], axis=-1).swapaxes(2, 3)
