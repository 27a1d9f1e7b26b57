"""How much of a text is kept, and how far that goes for every kind of layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvcache.prefix.content import Content
from kvcache.prefix.nodes import Node
from kvcache.storage.table import BlockTable


class LookupEnd(StrEnum):
    """Why no more tokens can be reused."""

    WHOLE = "all but the last token, or as many as were asked for"
    NOT_KEPT = "the next tokens are not kept"
    WINDOW = "rows that a window needs are not kept"
    NOTHING_KEPT = "nothing is kept in this namespace, with the weights as they are"
    SWITCHED_OFF = "the prefix cache is switched off"


@dataclass(frozen=True)
class Lookup:
    """What of a text can be reused.

    Attributes:
        num_tokens: how many of its first tokens.
        end: why not more.
    """

    num_tokens: int
    end: LookupEnd


def kept_path(root: Node, content: Content, limit: int, block_size: int) -> tuple[list[Node], int]:
    """Return the nodes that hold the first tokens of a text, and how many tokens those are, at most `limit`.

    The last node may hold a part of its block's tokens only.
    """
    nodes: list[Node] = []
    node = root
    while node.stop < limit:
        part = content.part(node.stop, node.stop + block_size)
        child = node.child(part)
        if child is None or child.stop % block_size:  # a part of a block, or a short one
            child, count = node.closest(part)
            return (nodes, node.stop) if child is None else ([*nodes, child], min(node.stop + count, limit))
        nodes.append(child)
        node = child
    return nodes, limit


def usable_length(nodes: list[Node], length: int, tables: Mapping[str, BlockTable], block_size: int) -> int:
    """Return the largest number of tokens, at most `length`, behind which the next one finds every row that it sees.

    Args:
        nodes: those of the tokens.
        tables: of each kind of layers, for its rule.
    """
    while True:
        missing = max((_last_missing(nodes, kind, table, length) for kind, table in tables.items()), default=-1)
        if missing < 0:
            return length
        length = missing * block_size


def _last_missing(nodes: list[Node], kind: str, table: BlockTable, length: int) -> int:
    """Return the last place whose block the next token needs and that is not kept; -1 if there is none."""
    if table.window is None:  # a node has always what is full
        return -1
    sinks, seen = table.places_needed(length)
    return next((place for places in (seen, sinks) for place in reversed(places) if kind not in nodes[place].kept), -1)
