"""Search for strings in text that comes in pieces, with an Aho-Corasick automaton.

A node of the automaton stands for the longest suffix of the text so far that begins one of the strings. That
suffix is kept back; what lies before it can't belong to a match. Each character costs a constant number of
steps on average, however the text is split.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Node:
    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fallback: _Node = self
        self.match = ""


class MarkerSearch:
    """Finds the first of some strings: the match that ends first; of several that end together, the longest.

    Attributes:
        found: The string that was found; empty before.
        behind: Start of the text behind the match in the last piece.
    """

    __slots__ = ("_kept", "_node", "_root", "behind", "found")

    def __init__(self, markers: Sequence[str]) -> None:
        self._root = self._node = _automaton(markers)
        self._kept = ""  # as long as the node is deep
        self.found = ""
        self.behind = 0

    def feed(self, text: str, start: int = 0) -> str:
        """Takes a piece from a position on; returns the text before any match, which `reset` follows."""
        root = self._root
        node = self._node
        for position in range(start, len(text)):
            character = text[position]
            while node is not root and character not in node.next:
                node = node.fallback
            node = node.next.get(character, root)
            if node.match:
                self.found = node.match
                self.behind = position + 1
                whole = self._kept + text[start : position + 1]
                self._node, self._kept = root, ""
                return whole[: len(whole) - len(self.found)]
        whole = self._kept + text[start:]
        cut = len(whole) - node.depth
        self._node, self._kept = node, whole[cut:]
        return whole[:cut]

    def end(self) -> str:
        """Ends the text; returns the text that was kept back."""
        kept, self._kept, self._node = self._kept, "", self._root
        return kept

    def reset(self) -> None:
        """Begins a new search after a match."""
        self.found = ""


def _automaton(markers: Sequence[str]) -> _Node:
    root = _Node(0)
    for marker in markers:
        node = root
        for character in marker:
            if character not in node.next:
                node.next[character] = _Node(node.depth + 1)
            node = node.next[character]
        node.match = marker
    root.fallback = root
    level = list(root.next.values())
    for node in level:
        node.fallback = root
    while level:
        following: list[_Node] = []
        for node in level:
            # What ends here, if not the node's own string, ends at its fallback too.
            node.match = node.match or node.fallback.match
            for character, child in node.next.items():
                behind = node.fallback
                while behind is not root and character not in behind.next:
                    behind = behind.fallback
                child.fallback = behind.next.get(character, root)
                following.append(child)
        level = following
    return root
