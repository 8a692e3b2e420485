"""The fields of a history as users read them, a sentence each."""
