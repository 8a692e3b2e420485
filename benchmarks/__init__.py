"""What torchlens costs, and whether it holds on models nobody here wrote."""
