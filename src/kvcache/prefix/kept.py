"""The blocks that are kept beyond their use: nodes of the index, each with a block for every kind of layers.

A node goes as a whole with its block of the full layers, once no other is behind it. Its block of the sliding layers
may go before; where there are no full layers, a node stays as long as it keeps a block or leads to one that does.
"""

from collections import Counter
from functools import partial

from kvcache.prefix.content import Content
from kvcache.prefix.eviction import EvictionQueue, KeptBlock, Policy
from kvcache.prefix.index import Node, PrefixIndex, Root
from kvcache.prefix.lineage import Lineage
from kvcache.storage.pool import BlockPool
from kvcache.storage.sequence import Sequence


class KeptBlocks:
    """The index of a pool's kept blocks, and for each kind of layers the queue of those that may go.

    Attributes:
        index: the nodes.
        queues: one a kind.
        num_published: nodes that came to be kept so far.
        num_evicted: blocks of each kind that went so far because room was needed.
    """

    def __init__(self, pool: BlockPool, policy: Policy) -> None:
        self.index = PrefixIndex()
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
        return {kind: len(queue.kept) for kind, queue in self.queues.items()}

    def keep(self, sequence: Sequence, lineage: Lineage, short_too: bool) -> None:
        """Keep the blocks of a sequence behind those that it shares already: whole ones, and the short last one too.

        Where the same tokens are kept already, the sequence uses those blocks from now on, and its own go.
        """
        size, length = self._block_size, sequence.seq_len
        node = self._present(lineage.node)
        content = Content(sequence.token_array(lineage.node.stop, length), lineage.node.stop, lineage.media)
        while node is not None and node.stop + size <= length:
            lineage.node = node
            node = self._kept(sequence, node, content.part(node.stop, node.stop + size), size)
        if node is not None:
            lineage.node = node
            short = content.part(node.stop, length) if short_too else b""
            if short and not self.index.is_beginning(node, short):  # of a longer block, which says as much
                self._kept(sequence, node, short, length - node.stop)
        self._prune(lineage.node)

    def forget(self, root: Root) -> int:
        """Let go of all that is behind a root; return of how many blocks."""
        before = sum(self.num_blocks.values())
        nodes = list(root.children)
        for node in nodes:  # which grows
            nodes.extend(node.children)
        for node in reversed(nodes):
            if self.index.holds(node):  # a path to nothing is gone with what it led to
                self._remove(node)
        return before - sum(self.num_blocks.values())

    def check(self) -> None:
        """Check that nodes and kept blocks are one to one, and that every idle block can go sooner or later."""
        self.index.check()
        nodes = self.index.nodes
        for kind, queue in self.queues.items():
            kept = [node.kept[kind] for node in nodes if kind in node.kept]
            assert queue.kept == {entry.block: entry for entry in kept}, f"index and queue differ in {kind} blocks"
            assert len(queue.kept) == len(kept), "two nodes keep one block"
            queue.check()
        for node in nodes:
            assert all(entry.node is node for entry in node.kept.values())
            assert node.kept or node.children, f"{node} is of no use"
        if "full" in self.queues:
            is_idle = self.queues["full"].is_idle
            for node in nodes:
                assert "full" in node.kept, f"{node} has no block of the full layers"
                in_use = [child for child in node.children if not is_idle(child.kept["full"])]
                assert not (in_use and is_idle(node.kept["full"])), f"{node} is idle and has children in use"

    def _present(self, node: Node) -> Node | None:
        """Return the node with the same tokens that is in the index, put back if its path was let go meanwhile."""
        gone = []
        while node.parent is not None and not self.index.holds(node):
            gone.append(node)
            node = node.parent
        for old in reversed(gone):
            found = self._node(node, old.content, old.stop - node.stop)
            if found is None:
                self._prune(node)
                return None
            node = found
        return node

    def _node(self, parent: Node, content: bytes, num_tokens: int) -> Node | None:
        """Return the child with this content, a new one if need be; None if its key is another block's."""
        node = self.index.find(parent, content)
        if node is not None:
            return node
        shorter = self.index.beginning(parent, content)
        node = self.index.add(parent, content, num_tokens)
        if node is not None and shorter is not None:
            self._remove(shorter)
        return node

    def _kept(self, sequence: Sequence, parent: Node, content: bytes, num_tokens: int) -> Node | None:
        """Return the child with this content, which keeps the sequence's blocks, or gives it those that it keeps."""
        node = self._node(parent, content, num_tokens)
        if node is None:
            return None
        self.num_published += not node.kept
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
        return node

    def _may_go(self, kind: str, kept: KeptBlock) -> bool:
        return kind != "full" or not kept.node.children

    def _evict(self, kind: str, kept: KeptBlock) -> None:
        node = kept.node
        if kind == "full":
            self.num_evicted.update(node.kept.keys())
            self._remove(node)
        else:
            self.num_evicted[kind] += 1
            self.queues[kind].release(node.kept.pop(kind))
            self._prune(node)

    def _remove(self, node: Node) -> None:
        """Remove a node without children, and let its blocks go."""
        parent = node.parent
        assert parent is not None
        self.index.remove(node)
        for kind, kept in node.kept.items():
            self.queues[kind].release(kept)
        node.kept = {}
        if not parent.children and "full" in parent.kept:
            self.queues["full"].reconsider(parent.kept["full"])
        self._prune(parent)

    def _prune(self, node: Node) -> None:
        """Remove a node, and those before it, that keep nothing and lead nowhere."""
        while node.parent is not None and not node.kept and not node.children and self.index.holds(node):
            self.index.remove(node)
            node = node.parent
