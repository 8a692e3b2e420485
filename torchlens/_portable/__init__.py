"""A log as plain data, and back: documents as JSON has them, and plain tensors beside them."""
