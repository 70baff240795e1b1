"""Derive what a compiled step keeps in memory from the trace of the eager step.

torch.compile traces forward and backward together and cuts them in two where the fewest bytes have to be kept: cheap
values are recomputed in backward from what is kept, and values between two kernels that can be fused are never stored.
Compiling would take a minute. This module applies the rules of AOTAutograd's partitioner to the eager trace instead:

    always kept    products, convolutions, attention, random numbers, and results of our own operations
    recomputed     everything pointwise, except what a backward kernel has to read from memory anyway, and what is used
                   again long after its first use (the residual stream)
    the rest       a minimum cut in bytes decides

A value is then stored from its creation to its last use if it is kept, made or read by a kernel that cannot be fused,
or a result. Left out, because they change no stored prediction by more than 5 % (benchmarks/results/memory_plan.json):
which norms and sums inductor keeps, values that several recomputations share, and arguments that eager functions hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from halfstep_train.run.memory.step_trace import Life, Op, StepTrace, Timeline

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "_scaled_mm"})
APART = frozenset(
    {
        "embedding_dense_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "index_put",
        "index_put_", "scatter_add_", "scatter_add", "scatter", "sort", "topk", "cumsum", "_fft_r2c", "_fft_c2r",
        "_fft_c2c", "_embedding_bag", "grid_sampler_2d", "grid_sampler_2d_backward",
        "upsample_bilinear2d_backward", "upsample_nearest2d_backward", "native_dropout", "bernoulli_",
    }
)  # fmt: skip
"""Operations that inductor does not fuse, in addition to products and attention."""
POOL, OFFSET_SHARE = "max_pool2d_with_indices", 8
"""Compiled pooling stores the position of its maximum in one byte, not in an int64."""
FAR = 1 << 60


@dataclass(slots=True)
class _Node:
    """A value of the trace, with the operation that made it and those that read it in forward and backward."""

    num_bytes: int
    made_by: int
    maker: Op | None
    forward_readers: list[int]
    backward_readers: list[int]


def derive_compiled_timeline(trace: StepTrace, *, keeps_cheap: bool = True) -> Timeline:
    """Return the allocations of a compiled step; keeps_cheap=False recomputes all cheap values (`pointwise`)."""
    return _ForwardBackwardCut(trace, keeps_cheap=keeps_cheap).derive_timeline()


class _ForwardBackwardCut:
    """The cut between forward and backward: which values are kept, recomputed, or never stored."""

    def __init__(self, trace: StepTrace, *, keeps_cheap: bool) -> None:
        self.trace, self.keeps_cheap = trace, keeps_cheap
        self.nodes = [
            _Node(value.num_bytes, value.made_by, trace.ops[value.made_by] if value.made_by >= 0 else None, [], [])
            for value in trace.values
        ]
        for number, op in enumerate(trace.ops):
            for read in op.reads:
                # Views share the storage of their input: they neither read nor make a value.
                if not op.is_view:
                    readers = self.nodes[read].backward_readers if op.in_backward else self.nodes[read].forward_readers
                    readers.append(number)
        # The first operation of backward.
        self.first_backward_op = next((n for n, op in enumerate(trace.ops) if op.in_backward), len(trace.ops))
        self.forward = [n for n, node in enumerate(self.nodes) if 0 <= node.made_by < self.first_backward_op]
        # Whether backward may compute a value again instead of keeping it.
        self.may_recompute = {n: self._is_cheap(n) for n in self.forward}
        self._keep_values_used_far_apart()

    # --- what may be recomputed ---

    def _is_cheap(self, number: int) -> bool:
        node = self.nodes[number]
        if node.maker is None or _is_apart(node.maker):
            return False
        is_stored_in_backward = any(_is_apart(self.trace.ops[reader]) for reader in node.backward_readers)
        return not (self.keeps_cheap and is_stored_in_backward)

    def _keep_values_used_far_apart(self) -> None:
        """Keep what is computed from a value that is read again after the first operation that cannot be fused."""
        if not self.keeps_cheap:
            return
        for number in self.forward:
            readers = self.nodes[number].forward_readers
            if len(readers) < 2:
                continue
            first = next((n for n in range(min(readers), self.first_backward_op) if _is_apart(self.trace.ops[n])), FAR)
            for reader in readers:
                if reader > first and not _is_apart(self.trace.ops[reader]):
                    for made in self.trace.ops[reader].makes:
                        self.may_recompute[made] = False

    # --- the cut ---

    def find_kept(self) -> set[int]:
        """Return the forward values that are kept for backward: a minimum cut in bytes.

        Each value is an edge from ("in", n) to ("out", n) whose capacity is its size, so cutting it means keeping it.
        Values that must not be recomputed are connected to the source, those that backward reads to the sink.
        """
        needed = [n for n in self.forward if self.nodes[n].backward_readers]
        reached, stack = set(needed), list(needed)
        while stack:
            number = stack.pop()
            if self.may_recompute[number]:
                for read in self._list_reads(number):
                    if read not in reached:
                        reached.add(read)
                        stack.append(read)
        edges: list[tuple[object, object, int]] = [(("out", number), "sink", FAR) for number in needed]
        for number in reached:
            edges.append((("in", number), ("out", number), max(self.nodes[number].num_bytes, 1)))
            if self.may_recompute[number]:
                edges += [(("out", read), ("in", number), FAR) for read in self._list_reads(number)]
            else:
                edges.append(("source", ("in", number), FAR))
        behind = _find_source_side(edges)
        return {number for number in reached if ("in", number) in behind and ("out", number) not in behind}

    def _list_reads(self, number: int) -> list[int]:
        maker = self.nodes[number].maker
        assert maker is not None
        return [read for read in maker.reads if self.nodes[read].maker is not None]

    # --- lifetimes ---

    def derive_timeline(self) -> Timeline:
        """Return the allocations of the compiled step."""
        kept = self.find_kept()
        last_use, uses = self._find_last_uses(kept), self._find_uses_again(kept)
        lives = [
            life
            for number, node in enumerate(self.nodes)
            if node.maker is not None and node.num_bytes
            for life in self._derive_lives(number, node, kept, last_use, uses.get(number, []))
        ]
        return Timeline(tuple(lives), tuple(op.workspace_bytes for op in self.trace.ops))

    def _derive_lives(
        self, number: int, node: _Node, kept: set[int], last_use: Mapping[int, int], uses_again: list[int]
    ) -> Iterator[Life]:
        """Yield when a value is in memory: once in forward, again in backward if it is recomputed and stored."""
        # The branches, in order: eager code, kept for backward, outlives the step, and everything else.
        value = self.trace.values[number]
        # The second result of pooling is the index of each maximum.
        is_index = node.maker is not None and node.maker.name == POOL and number in node.maker.makes[1:]
        size = node.num_bytes // OFFSET_SHARE if is_index else node.num_bytes
        last_op, is_backward = len(self.trace.ops) - 1, node.made_by >= self.first_backward_op
        ended_at = last_op if value.ended_at < 0 else value.ended_at
        if node.maker is not None and node.maker.as_written:
            spans = [(node.made_by, max(ended_at, node.made_by))]
        elif number in kept:
            read_last = max(last_use.get(number, self.first_backward_op), node.made_by)
            spans = [(node.made_by, last_op if value.ended_at < 0 else read_last)]
        elif value.ended_at < 0 or value.owner == "gradients":
            spans = [(node.made_by, last_op)]
        else:
            spans = []
            if self._is_stored(node.maker, node.forward_readers):
                spans.append((node.made_by, max(node.forward_readers)))
            if is_backward and self._is_stored(node.maker, node.backward_readers):
                spans.append((node.made_by, max(node.backward_readers)))
            elif not is_backward and uses_again and self._is_stored(None, node.backward_readers):
                spans.append((min(uses_again), max(uses_again)))
        for begin, end in spans:
            is_activation = begin < self.first_backward_op <= end
            yield Life(size, begin, end, value.owner or ("activations" if is_activation else "workspaces"))

    def _is_stored(self, maker: Op | None, readers: list[int]) -> bool:
        """True if a value must be written to memory: a kernel that cannot be fused makes or reads it."""
        operations = [maker, *(self.trace.ops[reader] for reader in readers)]
        return bool(readers) and any(op is not None and _is_apart(op) for op in operations)

    def _find_uses_again(self, kept: set[int]) -> dict[int, list[int]]:
        """Return when each recomputed value is read: by backward, and by other values recomputed from it."""
        uses: dict[int, list[int]] = {}
        for number in reversed(self.forward):
            node = self.nodes[number]
            if number in kept or not self.may_recompute[number]:
                continue
            makes = [[uses[made] for made in self.trace.ops[reader].makes if uses.get(made)]
                     for reader in node.forward_readers]  # fmt: skip
            uses[number] = [*node.backward_readers, *(min(map(min, found)) for found in makes if found)]
        return uses

    def _find_last_uses(self, kept: set[int]) -> dict[int, int]:
        """Return each value's last use in backward, including uses by values that are recomputed from it."""
        last = {n: max(node.backward_readers) for n, node in enumerate(self.nodes) if node.backward_readers}
        for number in reversed(self.forward):
            if number in kept or number not in last or not self.may_recompute.get(number):
                continue
            for read in self._list_reads(number):
                last[read] = max(last.get(read, 0), last[number])
        return last


def _is_apart(op: Op) -> bool:
    """True if an operation is a separate kernel that reads and writes memory."""
    return op.as_written or op.name in PRODUCTS or op.name in APART or "attention" in op.name


def _find_source_side(edges: Iterable[tuple[object, object, int]]) -> set[object]:
    """Return the nodes that the source still reaches at maximum flow: the minimum cut is their border."""
    import networkx as nx  # slow to import; torch uses it for the same cut
    from networkx.algorithms.flow import boykov_kolmogorov

    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    graph.add_weighted_edges_from(edges, weight="capacity")
    left = boykov_kolmogorov(graph, "source", "sink")
    left.remove_edges_from([(a, b) for a, b, edge in left.edges(data=True) if edge["flow"] == edge["capacity"]])
    return {"source", *nx.descendants(left, "source")}
