"""Draws a history: history → scene (plain nodes, edges, boxes) → DOT → files."""
