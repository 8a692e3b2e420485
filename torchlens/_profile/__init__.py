"""Measures what each module and operation does to time, memory and numbers."""
