"""Which texts are kept: a tree of blocks, where a path from a root is the beginning of a text.

    root of a namespace
      [System: be brief.]             nodes with whole blocks; each knows its parent
        [User: why is the]
          [sky blue?]                 a short block ends a text, and has no children
        [User: who was Ada]

Children stand in the order of what is in their blocks, and are found by comparing it: nothing depends on a hash. No
block begins with the whole content of a sibling: the longer one says as much and more.
"""

from bisect import bisect_left
from operator import attrgetter

from kvcache.prefix.content import common_tokens


class KeptBlock:
    """A block that is kept beyond its use.

    Attributes:
        block: its id.
        node: the tokens whose rows it holds; `node.stop` is the position behind the last one.
        created: when it was kept first, as a number that only grows.
        last_used: when somebody else let go of it last, likewise.
    """

    __slots__ = ("block", "created", "last_used", "node")

    def __init__(self, block: int, node: "Node", now: int) -> None:
        self.block = block
        self.node = node
        self.created = self.last_used = now

    def __repr__(self) -> str:
        return f"KeptBlock({self.block}, created={self.created}, last_used={self.last_used})"


class Node:
    """A run of tokens behind its parent's; a root has neither tokens nor a parent.

    Attributes:
        content: the tokens and what they stand for, as bytes (see `kvcache.prefix.content`).
        stop: the position behind the last token.
        children: in the order of their contents.
        kept: the blocks that are kept for it, by kind of layers.
        is_removed: whether it is no child of its parent any more.
    """

    __slots__ = ("__weakref__", "children", "content", "is_removed", "kept", "parent", "stop")

    def __init__(self, parent: "Node | None", content: bytes, stop: int) -> None:
        self.parent = parent
        self.content = content
        self.stop = stop
        self.children: list[Node] = []
        self.kept: dict[str, KeptBlock] = {}
        self.is_removed = False

    def child(self, content: bytes) -> "Node | None":
        """Return the child with exactly this content."""
        place = self._place(content)
        child = self.children[place] if place < len(self.children) else None
        return child if child is not None and child.content == content else None

    def closest(self, content: bytes) -> "tuple[Node | None, int]":
        """Return the child that begins with the most tokens of `content`, and how many those are."""
        place = self._place(content)
        best, most = None, 0
        for child in self.children[max(0, place - 1) : place + 1]:  # in order, so that no other has more in common
            if (count := common_tokens(child.content, content)) > most:
                best, most = child, count
        return best, most

    def beginning_of(self, content: bytes) -> "Node | None":
        """Return the child that `content`, which is no child's, begins with."""
        place = self._place(content)
        before = self.children[place - 1] if place else None
        return before if before is not None and content.startswith(before.content) else None

    def covers(self, content: bytes) -> bool:
        """Whether a child begins with `content` and goes on."""
        place = self._place(content)
        after = self.children[place].content if place < len(self.children) else b""
        return len(after) > len(content) and after.startswith(content)

    def add(self, content: bytes, num_tokens: int) -> "Node":
        """Add a child that there is not yet, and return it."""
        child = Node(self, content, self.stop + num_tokens)
        self.children.insert(self._place(content), child)
        return child

    def remove(self) -> None:
        """Leave the tree; the node must have no children."""
        assert not self.children
        assert self.parent is not None
        del self.parent.children[self.parent._place(self.content)]
        self.is_removed = True

    def below(self) -> "list[Node]":
        """Return all nodes behind this one, parents before their children."""
        nodes = list(self.children)
        for node in nodes:  # which grows
            nodes.extend(node.children)
        return nodes

    def _place(self, content: bytes) -> int:
        """Return where `content` stands, or would stand, among the children."""
        return bisect_left(self.children, content, key=attrgetter("content"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stop={self.stop}, {len(self.children)} children, kept={self.kept})"


class Root(Node):
    """Where the texts of a namespace begin that certain weights compute.

    Attributes:
        namespace: as bytes.
        weights: their state.
    """

    __slots__ = ("namespace", "weights")

    def __init__(self, namespace: bytes, weights: bytes) -> None:
        super().__init__(None, b"", 0)
        self.namespace = namespace
        self.weights = weights
