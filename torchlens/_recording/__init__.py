"""The data that all other packages read: recordings, operations, argument trees, source lines."""
