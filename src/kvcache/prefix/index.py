"""Which texts are kept: a tree of blocks, where a path from a root is the beginning of a text.

    root of a namespace
      [System: be brief.]             nodes with whole blocks; each knows its parent
        [User: why is the]
          [sky blue?]                 a short block ends a text, and has no children
        [User: who was Ada]

A node is found by the key of its block, and believed only if parent and content are those that were asked for. No block
begins with the whole content of a sibling: the longer one says as much and more.
"""

from bisect import bisect_left
from itertools import pairwise
from operator import attrgetter
from typing import Any

from kvcache.prefix.content import common_tokens
from kvcache.prefix.keys import block_key, root_key


class Node:
    """A run of tokens behind its parent's; a root has neither tokens nor a parent.

    Attributes:
        stop: the position behind the last token.
        children: in the order of their contents.
        kept: what an owner keeps of it, by kind of layers; not used here.
    """

    __slots__ = ("__weakref__", "children", "content", "kept", "key", "parent", "stop")

    def __init__(self, parent: "Node | None", key: bytes, content: bytes, stop: int) -> None:
        self.parent = parent
        self.key = key
        self.content = content
        self.stop = stop
        self.children: list[Node] = []
        self.kept: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Node(stop={self.stop}, {len(self.children)} children, kept={self.kept})"


class Root(Node):
    """Where the texts of a namespace begin.

    Attributes:
        weights: the state of those that its rows are computed with.
        is_valid: whether what was computed in it may still be shared.
    """

    __slots__ = ("is_valid", "weights")

    def __init__(self, namespace: bytes, weights: bytes) -> None:
        super().__init__(None, root_key(namespace), b"", 0)
        self.weights = weights
        self.is_valid = True


class PrefixIndex:
    """The nodes of all namespaces, by the key of their block."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def nodes(self) -> list[Node]:
        """All nodes but the roots: a snapshot."""
        return list(self._nodes.values())

    def holds(self, node: Node) -> bool:
        """Whether a node is in the index."""
        return self._nodes.get(node.key) is node

    def find(self, parent: Node, content: bytes) -> Node | None:
        """Return the child of `parent` with exactly this content."""
        node = self._nodes.get(block_key(parent.key, content))
        return node if node is not None and node.parent is parent and node.content == content else None

    def closest(self, parent: Node, content: bytes) -> tuple[Node | None, int]:
        """Return the child of `parent` that begins with the most tokens of `content`, and how many those are."""
        place = _place(parent, content)
        best, most = None, 0
        for child in parent.children[max(0, place - 1) : place + 1]:  # in order, so that no other has more in common
            if (count := common_tokens(child.content, content)) > most:
                best, most = child, count
        return best, most

    def beginning(self, parent: Node, content: bytes) -> Node | None:
        """Return the child of `parent` that `content`, which is no child's, begins with."""
        place = _place(parent, content)
        before = parent.children[place - 1] if place else None
        return before if before is not None and content.startswith(before.content) else None

    def is_beginning(self, parent: Node, content: bytes) -> bool:
        """Whether a child of `parent` begins with `content` and goes on."""
        place = _place(parent, content)
        after = parent.children[place].content if place < len(parent.children) else b""
        return len(after) > len(content) and after.startswith(content)

    def add(self, parent: Node, content: bytes, num_tokens: int) -> Node | None:
        """Add a child that `parent` does not have, and return it; None if its key is another block's."""
        key = block_key(parent.key, content)
        if key in self._nodes:
            return None
        node = self._nodes[key] = Node(parent, key, content, parent.stop + num_tokens)
        parent.children.insert(_place(parent, content), node)
        return node

    def remove(self, node: Node) -> None:
        """Remove a node without children."""
        assert not node.children
        assert node.parent is not None
        del self._nodes[node.key]
        del node.parent.children[_place(node.parent, node.content)]

    def check(self) -> None:
        """Check that each node is the child of its parent, in order, and found by its key."""
        for key, node in self._nodes.items():
            parent = node.parent
            assert parent is not None
            assert key == node.key == block_key(parent.key, node.content)
            assert parent.children[_place(parent, node.content)] is node, f"{node} is not a child of {parent}"
            assert isinstance(parent, Root) or self.holds(parent), f"{node} has a parent that is gone"
        for parent in {node.parent for node in self._nodes.values()}:
            assert parent is not None
            contents = [child.content for child in parent.children]
            assert all(self.holds(child) for child in parent.children), f"{parent} has a child that is gone"
            for one, other in pairwise(contents):
                assert one < other, f"the children of {parent} are out of order"
                assert not other.startswith(one), f"a child of {parent} begins with all that another says"


def _place(parent: Node, content: bytes) -> int:
    """Return where `content` stands, or would stand, among the children."""
    return bisect_left(parent.children, content, key=attrgetter("content"))
