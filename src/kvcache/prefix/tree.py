"""The blocks that are kept beyond their use: a node of the tree has one for every kind of layers.

A node goes as a whole with its block of the full layers, once no other is behind it. Its block of the sliding layers
may go before; where there are no full layers, a node stays as long as it keeps a block or leads to one that does.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise

from kvcache.prefix.content import Content
from kvcache.prefix.eviction import EvictionQueue, Policy
from kvcache.prefix.lineage import Lineage
from kvcache.prefix.nodes import KeptBlock, Node, Root
from kvcache.storage.pool import BlockPool
from kvcache.storage.sequence import Sequence


class PrefixTree:
    """What is kept of a pool's blocks, and for each kind of layers the queue of those that may go.

    Attributes:
        queues: one a kind.
        num_published: nodes that came to keep blocks so far.
        num_evicted: blocks of each kind that went so far in the order of the policy.
    """

    def __init__(self, pool: BlockPool, policy: Policy) -> None:
        self.queues = {
            kind: EvictionQueue(pool.ledger(kind), policy, partial(self._may_go, kind), partial(self._evict, kind))
            for kind in pool.spec.kinds
        }
        self.num_published = 0
        self.num_evicted: Counter[str] = Counter()
        self._block_size = pool.block_size

    @property
    def num_blocks(self) -> dict[str, int]:
        """Blocks of each kind that are kept, in use or not."""
        return {kind: len(queue.blocks) for kind, queue in self.queues.items()}

    def keep(self, sequence: Sequence, lineage: Lineage, short_too: bool) -> None:
        """Keep the blocks of a sequence behind those that it shares already: whole ones, and the short last one too.

        Where the same tokens are kept already, the sequence uses those blocks from now on, and its own go.
        """
        size, length = self._block_size, sequence.seq_len
        lineage.node = node = self._put_back(lineage.node)
        content = Content(sequence.token_array(node.stop, length), node.stop, lineage.media)
        while node.stop + size <= length:
            lineage.node = node = self._keep_child(sequence, node, content.part(node.stop, node.stop + size), size)
        short = content.part(node.stop, length) if short_too else b""
        if short and not node.covers(short):
            self._keep_child(sequence, node, short, length - node.stop)
        self._prune(node)

    def forget(self, root: Root) -> int:
        """Let go of all that is behind a root, and return how many blocks that were."""
        before = sum(self.num_blocks.values())
        self._remove_below(root)
        return before - sum(self.num_blocks.values())

    def check(self, roots: Iterable[Root]) -> None:
        """Check that nodes and kept blocks are one to one, and the order of what is in them."""
        nodes = [node for root in roots for node in root.below()]
        for kind, queue in self.queues.items():
            kept = [node.kept[kind] for node in nodes if kind in node.kept]
            assert queue.blocks == {entry.block: entry for entry in kept}, f"tree and queue differ in {kind} blocks"
            assert len(queue.blocks) == len(kept), "two nodes keep one block"
            queue.check()
        for node in nodes:
            assert node.kept or node.children, f"{node} is of no use"
            assert "full" in node.kept or "full" not in self.queues, f"{node} has no block of the full layers"
            assert all(entry.node is node for entry in node.kept.values())
        for node in {node.parent for node in nodes if node.parent is not None}:
            assert all(child.parent is node and not child.is_removed for child in node.children)
            for one, other in pairwise(child.content for child in node.children):
                assert one < other, f"the children of {node} are out of order"
                assert not other.startswith(one), f"a child of {node} begins with all that another says"

    def _put_back(self, node: Node) -> Node:
        """Return the node with the same tokens that is in the tree, there again if its path was let go meanwhile."""
        gone = []
        while node.is_removed:
            gone.append(node)
            assert node.parent is not None
            node = node.parent
        for old in reversed(gone):
            node = self._child(node, old.content, old.stop - node.stop)
        return node

    def _child(self, parent: Node, content: bytes, num_tokens: int) -> Node:
        """Return the child with this content, a new one if need be."""
        node = parent.child(content)
        if node is None:
            shorter = parent.beginning_of(content)
            node = parent.add(content, num_tokens)
            if shorter is not None:
                self._remove(shorter)
        return node

    def _keep_child(self, sequence: Sequence, parent: Node, content: bytes, num_tokens: int) -> Node:
        """Return the child with this content, which keeps the sequence's blocks, or gives it those that it keeps."""
        node = self._child(parent, content, num_tokens)
        had_none = not node.kept
        place = parent.stop // self._block_size
        for kind, queue in self.queues.items():
            table = sequence.table(kind)
            block, kept = table.block_at(place), node.kept.get(kind)
            if block is None:
                continue
            if kept is None:
                node.kept[kind] = queue.keep(block, node)
            elif kept.block != block:
                table.exchange(place, kept.block)
        self.num_published += had_none and bool(node.kept)
        return node

    def _may_go(self, kind: str, kept: KeptBlock) -> bool:
        return kind != "full" or not kept.node.children

    def _evict(self, kind: str, kept: KeptBlock) -> None:
        node = kept.node
        if kind == "full":
            self._remove_below(node)
            self.num_evicted.update(node.kept.keys())
            self._remove(node)
        else:
            self.num_evicted[kind] += 1
            self.queues[kind].release(node.kept.pop(kind))
            self._prune(node)

    def _remove_below(self, top: Node) -> None:
        for node in reversed(top.below()):
            if not node.is_removed:  # a path to nothing is gone with what it led to
                self._remove(node)

    def _remove(self, node: Node) -> None:
        """Remove a node without children, and let its blocks go."""
        parent = node.parent
        assert parent is not None
        node.remove()
        for kind, kept in node.kept.items():
            self.queues[kind].release(kept)
        node.kept = {}
        if not parent.children and "full" in parent.kept:
            self.queues["full"].reconsider(parent.kept["full"])
        self._prune(parent)

    def _prune(self, node: Node) -> None:
        """Remove a node, and those before it, that keep nothing and lead nowhere."""
        while node.parent is not None and not (node.kept or node.children or node.is_removed):
            node.remove()
            node = node.parent
