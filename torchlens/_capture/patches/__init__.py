"""What is replaced in torch while a log is written."""
