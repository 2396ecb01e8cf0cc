"""The figures of the report: arrays in, plain dictionaries out.

Everything is read off answers that the target gave by plain decoding: one pass
of the target over each (features, entropies), one of the drafter (children),
and `replay` for whole trees. Intervals are bootstraps over prompts.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import loading
from eagle_jax.bench import measure, replay
from eagle_jax.bench.measure import Row
from eagle_jax.bench.replay import Known
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.loading import LoadedTarget
from eagle_jax.models import masks
from eagle_jax.speculation import engine, tree
from eagle_jax.speculation.sampling import (
  draft_children,
  gumbel,
  one_setting,
  row_seed,
)
from eagle_jax.speculation.state import Models
from eagle_jax.speculation.tree import TreeSpec

CHUNK = 64  # positions whose logits are alive at once
CHILDREN = 10  # whose confidence is compared with acceptance
EDGES = np.linspace(0, 1, 11)  # bins of confidence
FOLDS = 5
RIDGE = 10.0 ** np.arange(-6, 2)  # of the mean eigenvalue
REGRESSED = 30_000  # rows at most; the Gram matrices do not grow with them


@dataclasses.dataclass(frozen=True)
class Read:
  """One answer as the target reads it, n tokens from the last of the prompt:

    token      x_{p-1} x_p ... x_{p+n-2}     p: length of the prompt
    feature    f_{p-1} f_p ...               after the final norm
    entropy    of the draw of the next token, bits

  category: label of the plots. question: index among the prompts.
  """

  tokens: np.ndarray
  features: np.ndarray
  entropy: np.ndarray
  category: str
  question: int


@jax.jit
def _entropy(m: Models, features: jax.Array) -> jax.Array:
  """float32[n]: entropy in bits of the target's draw after each feature."""

  def chunk(f):
    logits = m.target.apply({"params": m.target_params}, f, method="logits")
    logp = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1) / jnp.log(2.0)

  D = features.shape[-1]
  return jax.lax.map(chunk, features.reshape(-1, CHUNK, D)).reshape(-1)


def _padded(known: Known) -> np.ndarray:
  """int32[rows, width]: prompts and answers, width a multiple of CHUNK."""
  whole = [
    [*r.prompt_ids, *a]
    for r, a in zip(known.requests, known.answers, strict=True)
  ]
  width = -(-max(map(len, whole)) // CHUNK) * CHUNK
  out = np.zeros((len(whole), width), np.int32)
  for row, ids in zip(out, whole, strict=True):
    row[: len(ids)] = ids
  return out


def read(
  target: LoadedTarget, known: Known, categories: Sequence[str], first: int
) -> list[Read]:
  """The target's view of each answer.

  Args:
    categories: of each prompt. first: question index of the first prompt.
  """
  m = loading.models(target, None, tree.plain())
  tokens, found = _padded(known), []
  step = replay.READ_ROWS
  for at in range(0, len(tokens), step):
    _, features = replay.read(m, tokens[at : at + step])
    for b, feature in enumerate(features):
      r, answer = known.requests[at + b], known.answers[at + b]
      span = slice(len(r.prompt_ids) - 1, len(r.prompt_ids) + len(answer) - 1)
      entropy = np.asarray(_entropy(m, feature))
      found.append(
        Read(
          tokens[at + b, span],
          np.asarray(feature, np.float32)[span],
          entropy[span],
          categories[at + b],
          first + at + b,
        )
      )
  return found


def _mean(values: Sequence[np.ndarray]) -> dict:
  """The mean over all values of all prompts, and its interval."""
  sums = np.array([[v.sum(), v.size] for v in values], float)
  found = measure.bootstrap(sums, lambda s: s[..., 0] / s[..., 1])
  return measure.interval(found) | {"n": int(sums[:, 1].sum())}


def entropy(reads: Sequence[Read]) -> dict:
  """Entropy of the target's draws: mean, 2^H, histogram; by category."""
  every = np.concatenate([r.entropy for r in reads])
  top = float(np.ceil(max(every.max(), 1.0)))
  counts, edges = np.histogram(every, bins=32, range=(0, top))
  by_category = {}
  for name in sorted({r.category for r in reads}):
    mine = [r.entropy for r in reads if r.category == name]
    flat = np.concatenate(mine)
    by_category[name] = {
      "prompts": len(mine),
      "bits": _mean(mine),
      "choices_of_mean": float(2 ** flat.mean()),
      "mean_choices": float((2**flat).mean()),
      "above_1_bit": float((flat > 1).mean()),
    }
  return {
    "prompts": len(reads),
    "bits": _mean([r.entropy for r in reads]),
    "choices_of_mean": float(2 ** every.mean()),
    "mean_choices": float((2**every).mean()),
    "above_1_bit": float((every > 1).mean()),
    "histogram": {
      "edges": edges.tolist(),
      "share": (counts / every.size).tolist(),
    },
    "by_category": by_category,
  }


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  norm = lambda x: np.linalg.norm(x, axis=-1)
  return (a * b).sum(-1) / np.maximum(norm(a) * norm(b), 1e-12)


def smoothness(reads: Sequence[Read], table: np.ndarray, seed: int) -> dict:
  """Cosine of neighbours along answers, of features and of embeddings.

  Features share a large common part, so any two of them are alike: "apart"
  is the same figure of two positions of one answer drawn by chance.

  Args:
    table: [V, D], the target's token embedding.
  """
  rng = np.random.default_rng(seed)
  sums = []  # [kind][prompts, (near, count, apart, count)]
  kinds = {
    "feature": lambda r: r.features,
    "embedding": lambda r: table[r.tokens],
  }
  out = {}
  edges = np.linspace(-1, 1, 41)
  for name, of in kinds.items():
    near, apart = [], []
    for r in reads:
      x = of(r)
      if len(x) < 3:
        continue
      near.append(_cosines(x[:-1], x[1:]))
      i = rng.integers(0, len(x), (2, len(x)))
      i = i[:, abs(i[0] - i[1]) > 1]
      apart.append(_cosines(x[i[0]], x[i[1]]))
    sums.append(
      [
        (a.sum(), a.size, b.sum(), b.size)
        for a, b in zip(near, apart, strict=True)
      ]
    )
    share = np.histogram(np.concatenate(near), edges)[0]
    out[name] = {
      "neighbours": _mean(near),
      "apart": _mean(apart),
      "histogram": {
        "edges": edges.tolist(),
        "share": (share / share.sum()).tolist(),
      },
    }
  excess = lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3]
  # by how much neighbours stand out more among features
  out["difference"] = measure.interval(
    measure.bootstrap(
      np.concatenate(sums, axis=1), lambda s: excess(s) - excess(s[..., 4:])
    )
  )
  return out


INPUT_NAMES = {
  "feature": "feature",
  "feature+unshifted": "feature + its own token",
  "token": "next token",
  "feature+token": "feature + next token",
}


def explained(
  reads: Sequence[Read], table: np.ndarray, seed: int
) -> dict[str, dict]:
  """Held-out R^2 of the next feature under ridge regression, by input.

  Folds are over prompts; each fold's ridge is chosen inside its own training
  prompts. R^2 = 1 - squared error / variance about the training mean, summed
  over all dimensions.
  """
  usable = [r for r in reads if len(r.tokens) > 1]
  order = np.random.default_rng(seed).permutation(len(usable))
  total, kept = 0, []
  for i in order:  # whole prompts, so many as the budget holds
    if total < REGRESSED:
      kept.append(usable[i])
      total += len(usable[i].tokens) - 1
  sides = {
    "feature": lambda r: [r.features[:-1]],
    "feature+unshifted": lambda r: [r.features[:-1], table[r.tokens[:-1]]],
    "token": lambda r: [table[r.tokens[1:]]],
    "feature+token": lambda r: [r.features[:-1], table[r.tokens[1:]]],
  }
  wanted = [r.features[1:].astype(float) for r in kept]
  out = {}
  for name, side in sides.items():
    X = [np.concatenate(side(r), axis=1).astype(float) for r in kept]
    errors = _ridge_errors(X, wanted)
    value, low, high = measure.bootstrap(
      errors, lambda s: 1 - s[..., 0] / s[..., 1]
    )
    out[name] = {
      "r2": value,
      "low": low,
      "high": high,
      "rows": total,
      "prompts": len(kept),
    }
  return out


def _ridge_errors(X: list[np.ndarray], Y: list[np.ndarray]) -> np.ndarray:
  """[prompts, 2]: each prompt's held-out squared error and variance."""
  n = len(X)
  fold = np.arange(n) % min(FOLDS, n)
  out = np.zeros((n, 2))
  for f in range(min(FOLDS, n)):
    train = np.flatnonzero(fold != f)
    inner, check = (
      train[: -max(len(train) // 5, 1)],
      train[-max(len(train) // 5, 1) :],
    )
    fits = _ridge(X, Y, inner)
    lost = [sum(_lost(fit, X[i], Y[i])[0] for i in check) for fit in fits]
    best = _ridge(X, Y, train)[int(np.argmin(lost))]
    for i in np.flatnonzero(fold == f):
      out[i] = _lost(best, X[i], Y[i])
  return out


def _ridge(X, Y, rows) -> list[tuple]:
  """A (mean x, scale, mean y, weights) for each ridge of the grid."""
  x, y = (np.concatenate([A[i] for i in rows]) for A in (X, Y))
  mean, scale, base = x.mean(0), x.std(0) + 1e-9, y.mean(0)
  x = (x - mean) / scale
  values, vectors = np.linalg.eigh(x.T @ x)
  right = vectors.T @ (x.T @ (y - base))
  values = np.maximum(values, 0)
  return [
    (
      mean,
      scale,
      base,
      vectors @ (right / (values + ridge * values.mean())[:, None]),
    )
    for ridge in RIDGE
  ]


def _lost(fit, x, y) -> tuple[float, float]:
  mean, scale, base, weights = fit
  error = y - base - ((x - mean) / scale) @ weights
  return float((error**2).sum()), float(((y - base) ** 2).sum())


@functools.partial(jax.jit, static_argnames="count")
def _drafted(m: Models, reads, tokens, first, count: int):
  """[count, D], the drafter's outputs from position `first` of a row on; that
  of position t drafts token t + 2."""
  apply = lambda *a, **k: m.drafter.apply({"params": m.drafter_params}, *a, **k)
  after = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
  out, _ = apply(
    m.drafter.reads(tokens, after),
    apply(reads, method="fuse"),
    jnp.arange(tokens.shape[1])[None],
    masks.Attend(own=masks.Causal()),
    None,
    None,
    (),
  )
  return jax.lax.dynamic_slice_in_dim(out[0], first, count)


@functools.cache
def _children():
  def run(m: Models, x, first, params, seed):
    """children (target ids) and scores [strengths, count, children] of the
    drafter's outputs x of positions from `first` on."""
    W = m.vocabulary.shape[0]

    def chunk(part):
      x, position = part
      logits = m.drafter.apply(
        {"params": m.drafter_params}, x[:, None], method="logits"
      )
      noise = jax.lax.cond(
        jnp.any((params.temperature > 0) & (params.draft_noise > 0)),
        lambda: gumbel(
          jnp.broadcast_to(seed, (CHUNK, 2)), position + 2, m.ends.shape[0]
        )[:, m.vocabulary],
        lambda: jnp.zeros((CHUNK, W)),
      )

      def at_strength(one):
        rows = jax.tree.map(lambda a: jnp.broadcast_to(a, CHUNK), one)
        return draft_children(
          logits, min(CHILDREN, W), m.vocabulary, rows, noise
        )

      best, scores = jax.lax.map(at_strength, params)
      return best[:, :, 0], scores[:, :, 0]

    count = len(x)
    best, scores = jax.lax.map(
      chunk,
      (
        x.reshape(-1, CHUNK, x.shape[-1]),
        first + jnp.arange(count).reshape(-1, CHUNK),
      ),
    )
    flat = lambda a: a.swapaxes(0, 1).reshape(a.shape[1], count, -1)
    return flat(best), flat(scores)

  return jax.jit(
    run, compiler_options=engine.compiler_options(jax.default_backend())
  )


def confidence(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  known: Known,
  temperature: float,
  noises: Sequence[float],
) -> dict[float, list[tuple[np.ndarray, np.ndarray]]]:
  """strength -> (confidence, accepted) [n, CHILDREN] of the root's children,
  by prompt.

  Confidence is the score drafting ranks by: the drafter's probability, above
  temperature 0 tempered and, with shared noise, perturbed. Accepted: the
  child is the target's own token. The target reads each answer once for all
  strengths.

    prompt  p tokens         answer  a_0 a_1 a_2 ... a_{n-1}
    row p - 1 drafts a_1, ..., row p + n - 3 drafts a_{n-1}
  """
  m = loading.models(target, drafter, tree.chain(1))
  params = one_setting(len(noises), temperature, 0.0).replace(
    draft_noise=jnp.asarray(noises, jnp.float32)
  )
  tokens, out = _padded(known), {noise: [] for noise in noises}
  count = -(-max(map(len, known.answers)) // CHUNK) * CHUNK
  step = replay.READ_ROWS
  for at in range(0, len(tokens), step):
    reads, _ = replay.read(m, tokens[at : at + step])
    for b in range(len(reads)):
      r, row = known.requests[at + b], tokens[at + b]
      p, n = len(r.prompt_ids), len(known.answers[at + b])
      # rows p - 1 .. p + n - 3, in a window that lies inside the sequence
      first = min(p - 1, len(row) - count)
      mine = slice(p - 1 - first, p + n - 2 - first)
      best, scores = jax.device_get(
        _children()(
          m,
          _drafted(m, reads[b : b + 1], row[None], first, count),
          first,
          params,
          row_seed(r.seed, r.number, r.sample),
        )
      )
      hit = best[:, mine] == row[p + 1 : p + n, None]
      for noise, s, h in zip(noises, scores[:, mine], hit, strict=True):
        out[noise].append((np.exp(s), h))
  return out


def calibration(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict:
  """Acceptance by bins of confidence, and the mean gap between the two."""
  rows = []
  for value, hit in pairs:
    place = np.clip(np.digitize(value, EDGES) - 1, 0, len(EDGES) - 2)
    count = lambda w, p=place: np.bincount(p.ravel(), w.ravel(), len(EDGES) - 1)
    rows.append([count(np.ones(value.shape)), count(value), count(1.0 * hit)])
  sums = np.array(rows)  # [prompts, 3, bins]
  n, confident, hits = sums.sum(0)
  bins = []
  for i in np.flatnonzero(n):
    _, low, high = measure.bootstrap(
      sums[:, :, i],
      lambda s: s[..., 2] / np.where(s[..., 0], s[..., 0], np.nan),
    )
    bins.append(
      {
        "from": float(EDGES[i]),
        "to": float(EDGES[i + 1]),
        "n": int(n[i]),
        "confidence": float(confident[i] / n[i]),
        "accepted": float(hits[i] / n[i]),
        "low": low,
        "high": high,
      }
    )
  first = [hit[:, 0] for _, hit in pairs]
  found = [hit.any(1) for _, hit in pairs]
  gap = float(np.abs(confident - hits).sum() / n.sum())
  return {
    "bins": bins,
    "gap": gap,
    "children": int(n.sum()),
    "first_child_accepted": _mean([1.0 * h for h in first]),
    "any_child_accepted": _mean([1.0 * h for h in found]),
  }


def tree_figures(rows: Sequence[Row], spec: TreeSpec) -> dict:
  """What one tree did on all prompts."""
  value, low, high = measure.tau_interval(rows)
  # an answer of one token has no cycle: its empty list would be float
  lengths = np.concatenate([r.accept_lengths for r in rows]).astype(int)
  return {
    "nodes": spec.num_nodes,
    "levels": spec.levels,
    "branch": spec.branch,
    "prompts": len({r.question for r in rows}),
    "cycles": int(lengths.size),
    "tau": value,
    "low": low,
    "high": high,
    "mean_accepted": float(lengths.mean()),
    "deepest_accepted": int(lengths.max()),
    "share_at_depth": (np.bincount(lengths) / lengths.size).tolist(),
    "accept_by_depth": measure.accept_by_depth(rows),
  }


def accept_chain(figures: dict) -> dict:
  """The geometric model beside what was measured.

  implied_p: 1 - 1/E, what one acceptance would be if every step had it and
  drafts never ended. cut_p: the same where drafts end after L levels,
  E = (1 - p^{L+1}) / (1 - p).
  """
  E, L = figures["tau"], figures["levels"]
  ps = np.linspace(0, 1, 100_001)[:-1]
  lengths = (1 - ps ** (L + 1)) / (1 - ps)
  cut = float(ps[np.argmin(np.abs(lengths - E))])
  steps = figures["accept_by_depth"]
  return {
    "tau": E,
    "levels": L,
    "implied_p": 1 - 1 / E,
    "cut_p": cut,
    "measured": steps,
    "gap": [s - cut for s in steps],
  }
