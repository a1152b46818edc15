"""Caches of keys and values that lie in pages: a sequence's rows are those of the pages that its line of a table
names, one after the other.

The engines read dense rows. So the pages of a call are copied together first, by one kernel each for keys and
values: it reads and writes every row of every page that the table names, beside what attention itself reads."""

from __future__ import annotations

import torch
from torch import Tensor


def check_pages(call: str, k_cache: Tensor, v_cache: Tensor, table: Tensor, batch: int) -> None:
    """k_cache [page, row, head_kv, dim_qk], v_cache likewise with dim_v; table [batch, pages of a sequence] int."""
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{call}: block_table.dtype is {table.dtype}, must be int32 or int64")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"{call}: block_table.shape is {tuple(table.shape)}, must be [{batch}, pages]")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise ValueError(f"{call}: {name}.rank is {tensor.dim()}, must be 4: [page, row, head_kv, dim]")
        if tensor.device != table.device:
            raise ValueError(f"{call}: block_table.device is {table.device}, must be {name}'s, {tensor.device}")
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError(
            f"{call}: v_cache has {v_cache.shape[0]} pages of {v_cache.shape[1]} rows, must have those of k_cache, "
            f"{k_cache.shape[0]} of {k_cache.shape[1]}"
        )


def cut_table(call: str, table: Tensor, cache: Tensor, lengths: int | Tensor) -> Tensor:
    """The part of the table that sequences of these lengths need. Lengths on a GPU are not looked at, which would
    wait for it: then it is the whole, unchecked."""
    pages, page_rows = cache.shape[:2]
    if isinstance(lengths, Tensor) and (lengths.device.type != "cpu" or torch.compiler.is_compiling()):
        return table
    longest = int(lengths.max()) if isinstance(lengths, Tensor) and lengths.numel() else lengths
    if longest > table.shape[1] * page_rows:
        raise ValueError(
            f"{call}: block_table names {table.shape[1]} pages of {page_rows} rows, must hold {longest} rows: "
            "cache_lengths and what is appended"
        )
    table = table[:, : -(-longest // page_rows)]
    if table.device.type == "cpu" and not torch.compiler.is_compiling():
        begins = torch.arange(table.shape[1]) * page_rows
        used = begins < (lengths[:, None] if isinstance(lengths, Tensor) else lengths)
        wrong = table[used.expand_as(table) & ((table < 0) | (table >= pages))]
        if wrong.numel():
            raise ValueError(f"{call}: block_table names page {int(wrong[0])}, must be in 0..{pages - 1}")
    return table


def gather_pages(cache: Tensor, table: Tensor) -> Tensor:
    """[batch, row, head_kv, dim]: a copy of the pages that the table names. What stands in it beyond a sequence's
    last page may be anything: some page is copied, and no key of it seen."""
    if cache.shape[0] == 0:
        return cache.new_zeros((table.shape[0], 0, *cache.shape[2:]))
    pages = table.clamp(0, cache.shape[0] - 1).flatten()
    return cache.index_select(0, pages).view(table.shape[0], -1, *cache.shape[2:])


def append_to_pages(cache: Tensor, table: Tensor, rows: Tensor, new: Tensor) -> None:
    """Writes new [batch, n, head_kv, dim] at the rows [batch, n] of the sequences, into their pages."""
    page_rows = cache.shape[1]
    pages = table.long().gather(1, rows // page_rows)
    cache[pages, rows % page_rows] = new
