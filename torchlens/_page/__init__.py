"""A page to explore a history in, or two: history → outline and columns → one HTML file that lays
out what is visible.
"""
