"""Pictures and films of activations."""
