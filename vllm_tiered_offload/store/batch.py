# SPDX-License-Identifier: Apache-2.0
"""Stores that are written together: the chunks of several pieces in one list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.io_pool import Piece


@dataclass(slots=True)
class Chunk:
    """One chunk of a piece."""

    piece: Piece
    key: bytes
    payload: memoryview
    number: int  # within the piece


def chunks_of(pieces: Sequence[Piece]) -> list[Chunk]:
    """All of them, in order."""
    return [
        Chunk(piece, *chunk)
        for piece in pieces
        for chunk in zip(piece.keys, piece.payloads, range(len(piece.keys)), strict=True)
    ]


def by_piece(chunks: Sequence[Chunk]) -> Iterator[tuple[Piece, int]]:
    """Pieces and how many of their chunks are here, in order."""
    for _, group in groupby(chunks, key=lambda chunk: id(chunk.piece)):
        first, *others = group
        yield first.piece, 1 + len(others)


def sign(pieces: Sequence[Piece], fingerprint: str) -> None:
    """Computes the checksums of those that have none yet."""
    prefix = fmt.seed_prefix(fingerprint)
    for piece in pieces:
        if len(piece.checksums) < len(piece.keys):
            piece.checksums = [
                fmt.payload_digest(prefix, key, payload)
                for key, payload in zip(piece.keys, piece.payloads, strict=True)
            ]
