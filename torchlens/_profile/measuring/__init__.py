"""Sees calls, operations, backward passes and allocations while they happen, and makes records of
them.
"""
