"""Runs as a web page, in a file or served."""
