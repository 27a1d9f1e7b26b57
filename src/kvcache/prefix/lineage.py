"""What a prefix cache remembers of a sequence: which of its blocks are kept for others too."""

from dataclasses import dataclass, replace

from kvcache.prefix.content import Media
from kvcache.prefix.nodes import Node, Root


@dataclass(eq=False)
class Lineage:
    """Where a sequence stands among the kept texts.

    Attributes:
        root: of its namespace and the weights that it runs with.
        node: the last of its whole blocks that are kept; the root before the first.
        num_changes: of the weights, when it began; once there were more, its rows are not shared any further.
        media: what its tokens stand for.
        num_unread: tokens that were found for it and that no step has read yet.
        may_share: whether what its tokens stand for is known.
    """

    root: Root
    node: Node
    num_changes: int
    media: tuple[Media, ...] = ()
    num_unread: int = 0
    may_share: bool = True

    def fork(self, length: int) -> "Lineage":
        """Return what is true of a fork, whose found tokens count for the sequence itself only."""
        other = replace(self, num_unread=0)
        other.shorten(length)
        return other

    def shorten(self, length: int) -> None:
        """Take note that what comes behind the first `length` tokens may be another text from now on."""
        while self.node.parent is not None and self.node.stop > length:
            self.node = self.node.parent
        if self.media and self.media[-1].stop > length:  # whether the next tokens stand for a medium, nobody says
            self.may_share = False
        self.num_unread = min(self.num_unread, length)
