"""Could the indexer skip pages of keys without changing its choice? What share of them, by which bound.

    python benchmarks/index_pruning.py models/k31-tiny [--text FILE] [--seed 0]

For each page of keys and each query an upper bound of every score in the page, from what a page could keep:

    box     smallest and largest value of each dimension:  U_h = sum_i max(q_i lo_i, q_i hi_i), L_h with min
    ball    centre and largest distance from it:           U_h, L_h = q_h . centre +- |q_h| radius
    both    the lower U_h and the higher L_h

    bound = sum of w_h relu(U_h) over positive w_h + sum of w_h relu(L_h) over negative ones

A page whose bound is below the k-th best score has none of the k best. Each bound has two shares of pages:
in the best order (below the k-th best of all keys: no order skips more) and ascending (below the k-th best of
the keys before the page, which is what a stream knows). "none chosen" is what a perfect bound would skip;
"bound / k-th" is how far the better of both bounds lies above the k-th best score, a median; "cost" is the
dot products of both bounds as a share of scoring every key: skipping pays where more than that is skipped.
Keys and queries are those of each indexed layer of a model that reads a text, and random ones.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longspan.chat import Tokenizer
from longspan.model.loader import load_model
from longspan.ops.indexer import index_scores
from longspan.ops.pages import read_span

PAGE_SIZES = (4, 16, 64)
CONTEXTS = (1024, 4096, 15360)  # of the model
QUERIES = 64  # the last rows of the context; a whole number of pages
COST = 2 + 1  # dot products of each head with the box of a page and with its ball


@dataclass(frozen=True)
class Case:
    """Queries that all see all keys."""

    name: str
    top_k: int
    query: Tensor  # [Q, Hi, Di]
    weight: Tensor  # [Q, Hi]
    keys: Tensor  # [S, Di]


def cases_of_model(path: str, text: Path) -> list[Case]:
    model = load_model(path, "float32")
    ids = Tokenizer.from_dir(path).encode(text.read_text())
    top_k = model.config.indexer.top_k
    select, seen = model.ops.index_select, []

    def record(query, weight, view, batch, top_k):
        seen.append((query, weight, read_span(view.index_key, batch.block_tables[0], 0, batch.num_tokens)))
        return select(query, weight, view, batch, top_k)

    model.ops = dataclasses.replace(model.ops, index_select=record)
    cases = []
    for context in CONTEXTS:
        if context > len(ids):
            continue
        seen.clear()
        model.forward(ids[:context])
        for layer, (query, weight, keys) in enumerate(seen):
            name = f"text, {layer}"
            cases.append(Case(name, top_k, query[-QUERIES:], weight[-QUERIES:], keys[: context - QUERIES]))
    return cases


def random_case(context: int, heads: int, dim: int, top_k: int, queries: int) -> Case:
    keys = torch.nn.functional.layer_norm(torch.randn(context, dim), (dim,))
    return Case("random", top_k, torch.randn(queries, heads, dim), torch.randn(queries, heads), keys)


def bounds(case: Case, page: int) -> dict[str, Tensor]:
    """Upper bounds [Q, pages] of the scores in each page, by each method."""
    pages = case.keys.unflatten(0, (-1, page))  # [P, page, Di]
    q, w = case.query, case.weight[..., None]
    norm = q.shape[2] ** -0.5
    low, high = pages.amin(1), pages.amax(1)
    middle, half = (low + high) / 2, (high - low) / 2
    at, reach = q @ middle.T, q.abs() @ half.T
    centre = pages.mean(1)
    radius = (pages - centre[:, None]).norm(dim=2).amax(1)
    ball_at, ball_reach = q @ centre.T, q.norm(dim=2, keepdim=True) * radius
    upper = {"box": at + reach, "ball": ball_at + ball_reach}
    lower = {"box": at - reach, "ball": ball_at - ball_reach}
    upper["both"] = torch.minimum(upper["box"], upper["ball"])
    lower["both"] = torch.maximum(lower["box"], lower["ball"])
    return {name: (w * torch.where(w > 0, upper[name], lower[name]).relu()).sum(1) * norm for name in upper}


def thresholds(scores: Tensor, page: int, k: int) -> Tensor:
    """scores [Q, S] -> [Q, pages]: the k-th best score before each page, -inf while there are fewer."""
    best = torch.full((scores.shape[0], k), -torch.inf)
    before = []
    for part in scores.split(page, 1):
        before.append(best[:, -1])
        best = torch.cat([best, part], 1).topk(k, 1).values
    return torch.stack(before, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="default: heldout.txt in the model's folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    cases = cases_of_model(args.model, args.text or Path(args.model) / "heldout.txt")
    cases += [random_case(16384, 4, 32, 64, QUERIES), random_case(131072, 32, 128, 2048, 4)]
    columns = ("none chosen", "box", "ball", "both", "bound / k-th", "cost")
    table = Table("", "tokens", "page", *columns, title="share of pages: best order / ascending")
    for case in cases:
        scores = index_scores(case.query, case.weight, case.keys)
        last = scores.topk(case.top_k, 1).values[:, -1:]
        for page in PAGE_SIZES:
            running = thresholds(scores, page, case.top_k)
            bound = bounds(case, page)
            greatest = scores.unflatten(1, (-1, page)).amax(2)
            assert all((upper >= greatest - 1e-4 * greatest.abs().amax()).all() for upper in bound.values())
            skipped = [f"{share(upper < last)} / {share(upper < running)}" for upper in bound.values()]
            above = f"{(bound['both'] / last).nanmedian():.2f}"
            row = (f"{case.keys.shape[0]}", f"{page}", share(greatest < last), *skipped, above)
            table.add_row(case.name, *row, f"{COST / page:.0%}")
    Console(width=110).print(table)


def share(which: Tensor) -> str:
    return f"{which.float().mean():.1%}"


if __name__ == "__main__":
    main()
