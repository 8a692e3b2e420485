"""What a run takes note of while a model trains."""
