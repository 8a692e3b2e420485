"""What torchlens costs, and whether it holds on models from other libraries."""
