"""Drawing: history → scene (plain nodes, edges, boxes) → Graphviz."""
