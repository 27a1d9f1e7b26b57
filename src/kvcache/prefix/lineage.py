"""What a prefix cache remembers of a sequence: which of its blocks are kept for others too."""

from dataclasses import dataclass

from kvcache.prefix.content import Media
from kvcache.prefix.index import Node, Root


@dataclass(eq=False)
class Lineage:
    """Where a sequence stands in the index.

    Attributes:
        root: of its namespace; None once its rows may not be shared.
        node: the last of its whole blocks that are kept; the root before the first.
        media: what its tokens stand for.
        num_unread: tokens that were found for it and that no step has read yet.
    """

    root: Root | None
    node: Node
    media: tuple[Media, ...] = ()
    num_unread: int = 0

    def fork(self) -> "Lineage":
        """Return what is true of a fork, whose found tokens count for the sequence itself only."""
        return Lineage(self.root, self.node, self.media)

    def shorten(self, length: int) -> None:
        """Take note that all but the first `length` tokens were dropped."""
        while self.node.parent is not None and self.node.stop > length:
            self.node = self.node.parent
        if self.media and self.media[-1].stop > length:  # whether the next tokens stand for a medium, nobody says
            self.root = None
        self.num_unread = min(self.num_unread, length)
